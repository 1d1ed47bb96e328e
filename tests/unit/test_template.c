#include "proto/base/base_assert.h"
#include "proto/base/buf.h"
#include "router/text/template.h"
#include "router/text/template_sandbox.h"
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define SECOND 1000000ull
#define PATIENCE (60 * SECOND)

struct answer {
    struct loop *loop;
    int *left;      /* answers still to come; the loop stops at 0 */
    bool came;
    int code, order;
    char text[4096];
    size_t len;
};

static int order;

static void take(void *arg, int code, const char *text, size_t len)
{
    struct answer *a = arg;
    cr_assert_not(a->came);
    a->came = true;
    a->code = code;
    a->order = ++order;
    a->len = len;
    snprintf(a->text, sizeof a->text, "%.*s", (int)(len < 4000 ? len : 4000), text);
    if (--*a->left == 0)
        loop_stop(a->loop);
}

static struct loop *loop;
static struct template_engine *engine;

static void start(const char *text)
{
    struct template_config config = {.text = text, .bos = "<s>", .eos = "</s>"};
    struct error err = {.text = ""};
    cr_assert_eq(loop_create(&loop), 0);
    cr_assert_eq(template_engine_create(loop, &config, &engine, &err), 0, "%s", err.text);
}

static void stop(void)
{
    template_engine_free(engine);
    loop_free(loop);
    engine = NULL;
}

static struct template_render *ask(struct answer *a, int *left, const char *messages, const char *options, uint64_t deadline_us)
{
    struct template_render *render;
    *a = (struct answer){.loop = loop, .left = left};
    cr_assert_eq(template_render(engine, messages, strlen(messages), options, strlen(options), deadline_us, take, a, &render), 0);
    cr_assert_not(a->came);
    return render;
}

/* One render from start to end. */
static struct answer render(const char *messages, const char *options, uint64_t deadline_us)
{
    struct answer a;
    int left = 1;
    ask(&a, &left, messages, options, deadline_us);
    cr_assert_eq(loop_run(loop), 0);
    cr_assert(a.came);
    return a;
}

#define ONE "[{\"role\":\"user\",\"content\":\"Hi <b> \\u00e9 \\ud83d\\ude00\"}]"

Test(template, test_smollm2_template)
{
    start("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
          "Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
          "'<|im_start|>assistant\n' }}{% endif %}");
    struct answer a = render(ONE, "{\"add_generation_prompt\":true}", PATIENCE);
    cr_assert_eq(a.code, 0, "%s", a.text);
    cr_assert_str_eq(a.text, "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\nHi <b> \xc3\xa9 \xf0\x9f\x98\x80<|im_end|>\n"
                             "<|im_start|>assistant\n");
    a = render(ONE, "{}", PATIENCE);
    cr_assert_str_eq(a.text + a.len - 11, "<|im_end|>\n");
    stop();
}

Test(template, test_what_transformers_gives_to_templates)
{
    start("{{ bos_token }}{{ eos_token }}\n"
          "  {% if tools is none %}\n"
          "no tools\n"
          "  {% else %}\n"
          "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}\n"
          "  {% endif %}\n"
          "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}\n"
          "{% generation %}{{ messages[0].content }}{% endgeneration %}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}\n"
          "{{ strftime_now('%Y') | length }}{{ thinking | default('off') }}");
    struct answer a = render(ONE, "{}", PATIENCE);
    cr_assert_eq(a.code, 0, "%s", a.text);
    cr_assert_str_eq(a.text, "<s></s>\nno tools\n023Hi <b> \xc3\xa9 \xf0\x9f\x98\x80" "1\n4off");
    a = render(ONE, "{\"tools\":[{\"a\":\"<\xc3\xa9>\"}],\"thinking\":\"on\"}", PATIENCE);
    cr_assert_eq(a.code, 0, "%s", a.text);
    cr_assert_str_eq(a.text, "<s></s>\n[{\"a\": \"<\xc3\xa9>\"}]|[\n  {\n    \"a\": \"<\xc3\xa9>\"\n  }\n]\n023Hi <b> \xc3\xa9 \xf0\x9f\x98\x80" "1\n4on");
    stop();
}

Test(template, test_reasons_that_the_template_gives)
{
    start("{% if messages[0].role != 'user' %}{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{{ messages[1].content.x.y }}");
    struct answer a = render("[{\"role\":\"system\"}]", "{}", PATIENCE);
    cr_assert_eq(a.code, -EINVAL);
    cr_assert_str_eq(a.text, "Conversation roles must alternate user/assistant");
    a = render(ONE, "{}", PATIENCE);
    cr_assert_eq(a.code, -EINVAL);
    cr_assert(strstr(a.text, "content") || strstr(a.text, "undefined") || strstr(a.text, "element"), "%s", a.text);
    stop();
}

Test(template, test_template_cannot_reach_python)
{
    start("{{ messages[0].content }}{% if messages[0].way == 1 %}{{ ''.__class__.__mro__ }}{% elif messages[0].way == 2 %}{{ messages.append(1) }}{% else %}{{ raise_exception.__globals__.os }}{% endif %}");
    for (int way = 1; way <= 3; way++) {
        char messages[64];
        snprintf(messages, sizeof messages, "[{\"content\":\"\",\"way\":%d}]", way);
        struct answer a = render(messages, "{}", PATIENCE);
        cr_assert_eq(a.code, -EINVAL, "way %d gave %s", way, a.text);
        cr_assert(strstr(a.text, "unsafe") || strstr(a.text, "undefined"), "%s", a.text);
    }
    stop();
}

Test(template, test_limits_end_a_render_and_the_next_one_works)
{
    start("{% if way == 1 %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
          "{% elif way == 2 %}{{ 'a' * 70000000 }}{% elif way == 3 %}{{ 'a' * 100000000000 }}{% endif %}done");
    struct answer a = render(ONE, "{\"way\":1}", SECOND / 5);
    cr_assert_eq(a.code, -ETIMEDOUT);
    a = render(ONE, "{\"way\":0}", PATIENCE);
    cr_assert_str_eq(a.text, "done");
    a = render(ONE, "{\"way\":2}", PATIENCE);
    cr_assert_eq(a.code, -ENOBUFS, "%d %s", a.code, a.text);
    a = render(ONE, "{\"way\":3}", PATIENCE);
    cr_assert_eq(a.code, -ENOBUFS, "%d %s", a.code, a.text);
    a = render(ONE, "{\"way\":0}", PATIENCE);
    cr_assert_str_eq(a.text, "done");
    stop();
}

Test(template, test_renders_come_in_order_and_late_ones_do_not_hold_up_others)
{
    struct answer a[8];
    int left = 8;
    start("{% if slow is defined %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages }}");
    ask(&a[0], &left, "[0]", "{}", PATIENCE);
    ask(&a[1], &left, "[1]", "{\"slow\":1}", SECOND / 2);
    for (int i = 2; i < 7; i++) {
        char messages[8];
        snprintf(messages, sizeof messages, "[%d]", i);
        ask(&a[i], &left, messages, "{}", PATIENCE);
    }
    ask(&a[7], &left, "[7]", "{}", SECOND / 4); /* is over while the slow one runs */
    cr_assert_eq(loop_run(loop), 0);
    cr_assert_eq(a[1].code, -ETIMEDOUT);
    cr_assert_eq(a[7].code, -ETIMEDOUT);
    for (int i = 2; i < 7; i++) {
        cr_assert_eq(a[i].code, 0, "%s", a[i].text);
        cr_assert_eq(a[i].text[1], '0' + i);
        cr_assert_gt(a[i].order, a[i - 1].order);
    }
    stop();
}

Test(template, test_cancelled_renders_are_not_answered)
{
    struct answer a[3];
    int left = 3; /* the answers of this poll must not stop the loop of the run below */
    start("{{ messages }}");
    struct template_render *first = ask(&a[0], &left, "[0]", "{}", PATIENCE);
    struct template_render *second = ask(&a[1], &left, "[1]", "{}", PATIENCE);
    cr_assert_eq(loop_poll(loop), 0); /* the first may be on its way now */
    if (!a[0].came)
        template_cancel(first);
    if (!a[1].came)
        template_cancel(second);
    left = 1;
    ask(&a[2], &left, "[2]", "{}", PATIENCE);
    cr_assert_eq(loop_run(loop), 0);
    cr_assert_str_eq(a[2].text, "[2]");
    stop();
}

Test(template, test_queue_has_a_limit)
{
    static struct answer a[TEMPLATE_QUEUE_MAX];
    struct template_render *render_of_none;
    int left = TEMPLATE_QUEUE_MAX;
    start("x");
    for (int i = 0; i < TEMPLATE_QUEUE_MAX; i++)
        ask(&a[i], &left, "[]", "{}", PATIENCE);
    cr_assert_eq(template_render(engine, "[]", 2, "{}", 2, PATIENCE, take, &a[0], &render_of_none), -EAGAIN);
    cr_assert_eq(loop_run(loop), 0);
    for (int i = 0; i < TEMPLATE_QUEUE_MAX; i++)
        cr_assert_eq(a[i].code, 0);
    stop();
}

Test(template, test_large_messages)
{
    static char messages[2000100];
    start("{{ messages[0] | length }}|{{ messages[0] }}");
    memcpy(messages, "[\"", 2);
    memset(messages + 2, 'a', 2000000);
    memcpy(messages + 2000002, "\"]", 3);
    struct answer a = render(messages, "{}", PATIENCE);
    cr_assert_eq(a.code, 0, "%s", a.text);
    cr_assert_eq(a.len, 2000008);
    cr_assert_eq(strncmp(a.text, "2000000|aaaa", 12), 0);
    stop();
}

Test(template, test_killed_helper_comes_back)
{
    start("ok");
    for (int i = 0; i < 3; i++) {
        pid_t pid = template_engine_pid(engine);
        cr_assert_gt(pid, 0);
        cr_assert_eq(kill(pid, SIGKILL), 0);
        struct answer a = render(ONE, "{}", PATIENCE);
        /* The kill may have met the render on its way; never anything else. */
        cr_assert(a.code == 0 || a.code == -EIO, "%d %s", a.code, a.text);
        a = render(ONE, "{}", PATIENCE);
        cr_assert_str_eq(a.text, "ok");
        cr_assert_neq(template_engine_pid(engine), pid);
    }
    stop();
}

Test(template, test_errors_at_the_start_are_named)
{
    struct template_config config = {.text = "a\n{% if %}"};
    struct error err;
    cr_assert_eq(loop_create(&loop), 0);
    cr_assert_eq(template_engine_create(loop, &config, &engine, &err), -EINVAL);
    cr_assert(strstr(err.text, "line 2"), "%s", err.text);
    config = (struct template_config){.text = "a", .python = "/nonexistent/python3"};
    cr_assert_eq(template_engine_create(loop, &config, &engine, &err), -ENOENT);
    cr_assert(strstr(err.text, "/nonexistent/python3"), "%s", err.text);
    config.python = "/bin/true";
    cr_assert_eq(template_engine_create(loop, &config, &engine, &err), -ENOENT);
    loop_free(loop);
}

static int count_fds(pid_t pid)
{
    char path[64];
    int n = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(path);
    cr_assert(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n - 2;
}

Test(template, test_helper_is_confined)
{
    char path[64], line[256];
    int seen = 0;
    start("ok");
    snprintf(path, sizeof path, "/proc/%d/status", (int)template_engine_pid(engine));
    FILE *f = fopen(path, "r");
    cr_assert(f);
    while (fgets(line, sizeof line, f))
        seen += strcmp(line, "Seccomp:\t2\n") == 0 || strcmp(line, "NoNewPrivs:\t1\n") == 0;
    fclose(f);
    cr_assert_eq(seen, 2);
    cr_assert_eq(count_fds(template_engine_pid(engine)), 3);
    stop();
}

/* Runs in a child under the filter; the exit status says what the kernel let through. */
static int try_calls(const struct sock_fprog *program)
{
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program) < 0)
        return 100;
    int passed = 0;
    passed |= open("/dev/null", O_RDONLY) >= 0 || errno != EPERM;
    passed |= (socket(AF_INET, SOCK_STREAM, 0) >= 0 || errno != EPERM) << 1;
    passed |= (execl("/bin/true", "true", NULL) == 0 || errno != EPERM) << 2;
    passed |= (mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED || errno != EPERM) << 3;
    passed |= (kill(getppid(), 0) == 0 || errno != EPERM) << 4;
    passed |= (mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED) << 5;
    return passed;
}

Test(template, test_filter_lets_through_computing_only)
{
    struct buf hex;
    struct sock_filter code[256];
    buf_init(&hex, 65536);
    cr_assert_eq(template_sandbox_filter(&hex), 0);
    cr_assert_leq(hex.len / 2, sizeof code);
    for (size_t i = 0; i < hex.len / 2; i++) {
        unsigned byte;
        cr_assert_eq(sscanf(buf_cstr(&hex) + 2 * i, "%2x", &byte), 1);
        ((uint8_t *)code)[i] = (uint8_t)byte;
    }
    struct sock_fprog program = {.len = (unsigned short)(hex.len / 2 / sizeof code[0]), .filter = code};
    pid_t pid = fork();
    cr_assert_geq(pid, 0);
    if (pid == 0)
        syscall(SYS_exit_group, try_calls(&program)); /* under a sanitizer, _exit makes calls that the filter refuses */
    int status;
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_assert(WIFEXITED(status), "ended by signal %d", WTERMSIG(status));
    cr_assert_eq(WEXITSTATUS(status), 0, "let through: %x", WEXITSTATUS(status));
    buf_fini(&hex);
}
