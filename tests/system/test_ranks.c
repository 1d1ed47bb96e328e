/* Workers of several ranks (--tp), real processes with a driver in the router's place: they answer like a worker of one, share their pool, and end together however one of them ends. */
#include "proto/base/clock.h"
#include "tests/system/child_process.h"
#include "tests/system/router_driver.h"
#include "tests/system/tiny_gguf.h"
#include <criterion/criterion.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { WAIT_MS = 60000, N_CHILDREN = 3, PROMPT_MAX = 4000, LONG = 30000 };

static char folder[64], endpoint[96], store_socket[96], model[96], leader_socket[96];
static struct driver driver;
static struct child store, children[N_CHILDREN];
static uint32_t prompt_tokens[PROMPT_MAX];

static void setup(void)
{
    folder_make(folder);
    snprintf(endpoint, sizeof endpoint, "ipc://%s/router.sock", folder);
    snprintf(store_socket, sizeof store_socket, "%s/kvstore.sock", folder);
    snprintf(leader_socket, sizeof leader_socket, "%s/leader.sock", folder);
    snprintf(model, sizeof model, "%s/tiny.gguf", folder);
    tiny_gguf_write(model);
    driver_open(&driver, endpoint);
}

static void teardown(void)
{
    for (int i = 0; i < N_CHILDREN; i++)
        child_end(&children[i]);
    child_end(&store);
    driver_close(&driver);
    folder_remove(folder);
}

TestSuite(ranks, .init = setup, .fini = teardown, .timeout = 300);

/* ---- processes ---- */

static void store_start(void)
{
    const char *argv[] = {program_path("tidepool-kvstore"), "--socket", store_socket, "--pool-size", "64M", NULL};

    child_start(&store, argv, 0);
    cr_assert(child_wait_line(&store, "event=store_ready", WAIT_MS));
}

/* `more`: further options with their values, or NULL. */
static struct child *process_start(int i, const char *tp, const char *const *more)
{
    char name[16];
    const char *argv[32] = {program_path("tidepool-worker"), "--model", model, "--store", store_socket, "--threads", "1", "--chunk", "128", "--name", name, "--tp", tp};
    int n = 13;

    snprintf(name, sizeof name, "w%d", i);
    while (more && *more && n < 31)
        argv[n++] = *more++;
    child_start(&children[i], argv, 0);
    return &children[i];
}

static struct driver_worker *worker_start(int i, const char *tp, const char *option, const char *value)
{
    const char *more[] = {"--router", endpoint, "--tp-timeout", "20", option, value, NULL};
    char name[16];

    snprintf(name, sizeof name, "w%d", i);
    process_start(i, tp, more);
    return driver_worker(&driver, name);
}

/* A descriptor for the process of a follower that worker i has started; it becomes readable when that process has ended. */
static int follower_open(int i, int rank, pid_t *ret_pid)
{
    char text[64];
    const char *found;
    int fd;

    snprintf(text, sizeof text, " rank=%d pid=", rank);
    found = strstr(children[i].log, text);
    if (!found && child_wait_line(&children[i], text, WAIT_MS))
        found = strstr(children[i].log, text);
    cr_assert_not_null(found, "%s", children[i].log);
    *ret_pid = (pid_t)strtol(found + strlen(text), NULL, 10);
    cr_assert_gt(*ret_pid, 1);
    fd = (int)syscall(SYS_pidfd_open, *ret_pid, 0);
    cr_assert_geq(fd, 0);
    return fd;
}

static void expect_ended(int fd, const char *who)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};

    cr_expect_eq(poll(&p, 1, WAIT_MS), 1, "%s still runs", who);
    close(fd);
}

/* ---- requests ---- */

struct ask {
    int n_prompt, max_tokens;
    uint32_t prompt_seed;
    float temperature;
    const uint32_t *generated;
    int n_generated;
    bool prompt_logprobs;
};

static void ask(struct driver_worker *w, uint64_t id, const struct ask *a)
{
    Tidepool__Engine__Sampling sampling = TIDEPOOL__ENGINE__SAMPLING__INIT;
    Tidepool__Engine__Generate g = TIDEPOOL__ENGINE__GENERATE__INIT;

    for (int i = 0; i < a->n_prompt; i++)
        prompt_tokens[i] = (uint32_t)(((uint64_t)i * 7919 + a->prompt_seed * 104729ull + (uint64_t)(i / 7) * 31) % w->vocab_size);
    sampling.temperature = a->temperature;
    sampling.top_p = 1;
    sampling.repetition_penalty = 1;
    sampling.seed = 11;
    sampling.logprobs = true;
    g.epoch = driver.epoch;
    g.prompt = prompt_tokens;
    g.n_prompt = (size_t)a->n_prompt;
    g.generated = (uint32_t *)a->generated;
    g.n_generated = (size_t)a->n_generated;
    g.max_tokens = (uint32_t)a->max_tokens;
    g.sampling = &sampling;
    g.prompt_logprobs = a->prompt_logprobs;
    driver_send(&driver, w, ENGINE_GENERATE, id, &g.base);
}

/* The same tokens; their probabilities within `tolerance`, since sums over ranks have another order. */
static void same(const struct driver_request *a, int from, const struct driver_request *b, int n, float tolerance)
{
    for (int i = 0; i < n; i++) {
        cr_assert_eq(a->tokens[from + i], b->tokens[i], "token %d: %u, %u", i, a->tokens[from + i], b->tokens[i]);
        cr_assert_leq(fabsf(a->logprobs[from + i] - b->logprobs[i]), tolerance, "logprob %d: %g, %g", i, (double)a->logprobs[from + i], (double)b->logprobs[i]);
    }
}

static bool is_idle(struct driver *d, uint64_t arg)
{
    const struct driver_worker *w = &d->workers[arg];

    return w->has_beat && !w->beat.busy && w->beat.n_running + w->beat.n_prefilling + w->beat.n_waiting == 0;
}

static const struct ask asks[4] = {
    {.n_prompt = 700, .max_tokens = 40, .prompt_seed = 1},
    {.n_prompt = 40, .max_tokens = 150, .prompt_seed = 2},
    {.n_prompt = 140, .max_tokens = 20, .prompt_seed = 3, .temperature = 0.7f, .prompt_logprobs = true},
    {.n_prompt = 300, .max_tokens = 30, .prompt_seed = 4},
};

/* Asks for all at once, as ids first .. first + 3. */
static void ask_all(struct driver_worker *w, uint64_t first)
{
    for (uint64_t i = 0; i < 4; i++)
        ask(w, first + i, &asks[i]);
    for (uint64_t i = 0; i < 4; i++)
        cr_assert(driver_end(&driver, first + i)->finished, "%s", driver.requests[first + i].text);
}

/* Ranks answer as one; what comes from the pool is what they would have computed; a cancelled request leaves nothing behind. */
static void ranks_answer_like_one(const char *tp, const char *option, const char *value)
{
    int prefixes = 0;

    store_start();
    struct driver_worker *one = worker_start(0, "1", option, value), *many = worker_start(1, tp, option, value);
    cr_assert(one->context_length == many->context_length && one->vocab_size == many->vocab_size);
    ask_all(one, 1);
    ask_all(many, 5);
    for (int i = 0; i < 4; i++)
        same(&driver.requests[1 + i], 0, &driver.requests[5 + i], asks[i].max_tokens, 2e-3f);
    ask(many, 9, &(struct ask){.n_prompt = 60, .max_tokens = LONG, .prompt_seed = 7});
    driver_tokens(&driver, 9, 5);
    ask_all(many, 11);
    driver_cancel(&driver, many, 9);
    for (int i = 0; i < 4; i++) {
        same(&driver.requests[5 + i], 0, &driver.requests[11 + i], asks[i].max_tokens, 0);
        prefixes += driver.requests[5 + i].cached_tokens == 0 && driver.requests[11 + i].cached_tokens >= 128;
    }
    cr_expect(driver.requests[7].n_prompt_logprobs == 139 && driver.requests[13].n_prompt_logprobs == 139);
    cr_expect_eq(prefixes, 2, "%d prompts had a prefix in the pool", prefixes);
    cr_expect_geq(driver.requests[11].cached_tokens, 512);
    many->has_beat = false;
    cr_assert(driver_pump(&driver, is_idle, 1, WAIT_MS));
    kill(children[1].pid, SIGTERM);
    cr_expect_eq(child_wait(&children[1], WAIT_MS), 0, "%s", children[1].log);
    cr_expect(!strstr(children[1].log, "level=error"), "%s", children[1].log);
}

Test(ranks, test_two_ranks_answer_like_one)
{
    ranks_answer_like_one("2", NULL, NULL);
}

/* Each rank chooses pages for its own heads. */
Test(ranks, test_two_ranks_choose_the_pages_that_one_does)
{
    ranks_answer_like_one("2", "--fetch", "64");
}

Test(ranks, test_three_ranks_answer_like_one)
{
    ranks_answer_like_one("3", NULL, NULL);
}

/* ---- ends ---- */

Test(ranks, test_killed_follower_ends_the_group_and_another_group_goes_on)
{
    enum { END = 90 };
    struct ask a = {.n_prompt = 400, .max_tokens = LONG, .prompt_seed = 5};
    pid_t pids[2];

    store_start();
    struct driver_worker *w0 = worker_start(0, "3", NULL, NULL), *w1 = worker_start(1, "3", NULL, NULL);
    ask(w1, 1, &(struct ask){.n_prompt = 400, .max_tokens = END, .prompt_seed = 5});
    cr_assert(driver_end(&driver, 1)->finished);
    int ended[] = {follower_open(0, 1, &pids[0]), follower_open(0, 2, &pids[1])};
    ask(w0, 2, &a);
    driver_tokens(&driver, 2, 20);
    kill(pids[1], SIGKILL);
    struct driver_request *r = driver_end(&driver, 2);
    cr_expect(r->failed && r->kind == TIDEPOOL__ENGINE__FAILED__KIND__INTERNAL);
    cr_expect_eq(child_wait(&children[0], WAIT_MS), 1);
    cr_expect(strstr(children[0].log, "rank 2"), "%s", children[0].log);
    expect_ended(ended[0], "rank 1");
    expect_ended(ended[1], "rank 2");
    a.n_generated = r->n_tokens < END - 5 ? r->n_tokens : END - 5;
    a.generated = r->tokens;
    a.max_tokens = END;
    same(&driver.requests[1], 0, r, a.n_generated, 0);
    ask(w1, 3, &a);
    r = driver_end(&driver, 3);
    cr_assert(r->finished && r->first_index == a.n_generated, "%s", r->text);
    same(&driver.requests[1], a.n_generated, r, r->n_tokens, 0);
}

Test(ranks, test_killed_leader_takes_its_followers_along)
{
    pid_t pids[2];
    struct driver_worker *w = worker_start(0, "3", NULL, NULL);
    int ended[] = {follower_open(0, 1, &pids[0]), follower_open(0, 2, &pids[1])};

    ask(w, 1, &(struct ask){.n_prompt = 40, .max_tokens = LONG, .prompt_seed = 1});
    driver_tokens(&driver, 1, 3);
    kill(children[0].pid, SIGKILL);
    expect_ended(ended[0], "rank 1");
    expect_ended(ended[1], "rank 2");
}

/* Nobody waits longer than that for a rank that has stopped answering. */
Test(ranks, test_follower_that_hangs_ends_the_group)
{
    pid_t pid;
    struct driver_worker *w = worker_start(0, "2", "--tp-timeout", "3");
    int ended = follower_open(0, 1, &pid);

    ask(w, 1, &(struct ask){.n_prompt = 40, .max_tokens = LONG, .prompt_seed = 1});
    driver_tokens(&driver, 1, 3);
    kill(pid, SIGSTOP);
    cr_expect(driver_end(&driver, 1)->failed);
    cr_expect_eq(child_wait(&children[0], WAIT_MS), 1);
    expect_ended(ended, "rank 1");
}

Test(ranks, test_idle_group_notices_a_rank_that_is_gone)
{
    pid_t pid;

    worker_start(0, "2", NULL, NULL);
    int ended = follower_open(0, 1, &pid);
    kill(pid, SIGKILL);
    expect_ended(ended, "rank 1");
    cr_expect_eq(child_wait(&children[0], WAIT_MS), 1);
    cr_expect(strstr(children[0].log, "event=group_failed"), "%s", children[0].log);
}

/* ---- followers started by hand ---- */

static struct child *follower_start(int i, const char *rank, const char *option, const char *value)
{
    const char *more[] = {"--tp-rank", rank, "--tp-leader", leader_socket, "--tp-timeout", "20", option, value, NULL};

    return process_start(i, "3", more);
}

static struct child *leader_start(int i, const char *timeout)
{
    const char *more[] = {"--router", endpoint, "--tp-listen", leader_socket, "--tp-timeout", timeout, NULL};

    return process_start(i, "3", more);
}

/* A follower that is asked to end asks the group to. */
Test(ranks, test_followers_by_hand_join_and_drain)
{
    struct child *first = follower_start(1, "1", NULL, NULL); /* before its leader */
    struct child *leader = leader_start(0, "20"), *second = follower_start(2, "2", NULL, NULL);
    struct driver_worker *w = driver_worker(&driver, "w0");

    cr_expect(access(leader_socket, F_OK) < 0);
    ask(w, 1, &(struct ask){.n_prompt = 140, .max_tokens = 600, .prompt_seed = 1});
    driver_tokens(&driver, 1, 3);
    kill(second->pid, SIGTERM);
    cr_assert(child_wait_line(leader, "event=draining", WAIT_MS));
    cr_expect(driver_end(&driver, 1)->finished && driver.requests[1].n_tokens == 600);
    cr_expect_eq(child_wait(leader, WAIT_MS), 0);
    cr_expect_eq(child_wait(first, WAIT_MS), 0);
    cr_expect_eq(child_wait(second, WAIT_MS), 0);
}

Test(ranks, test_follower_that_never_comes_is_missed_by_name)
{
    struct child *first = follower_start(1, "1", NULL, NULL);

    cr_assert(child_wait_line(first, "event=device_opened", WAIT_MS));
    struct child *leader = leader_start(0, "2");
    cr_expect_eq(child_wait(leader, WAIT_MS), 1);
    cr_expect(strstr(leader->log, "rank 2 has not joined within 2 s"), "%s", leader->log);
    cr_expect_eq(child_wait(first, WAIT_MS), 1);
    cr_expect(access(leader_socket, F_OK) < 0);
}

static void expect_refused(const char *option, const char *value, const char *text)
{
    struct child *first = follower_start(1, "1", NULL, NULL), *second = follower_start(2, "2", option, value);

    cr_assert(child_wait_line(first, "event=device_opened", WAIT_MS) && child_wait_line(second, "event=device_opened", WAIT_MS));
    struct child *leader = leader_start(0, "20");
    cr_expect_eq(child_wait(leader, WAIT_MS), 2);
    cr_expect(strstr(leader->log, text), "no \"%s\" in %s", text, leader->log);
    cr_expect_eq(child_wait(second, WAIT_MS), 2);
    cr_expect(strstr(second->log, text), "no \"%s\" in %s", text, second->log);
    /* The first one may still be looking for a leader. */
    for (int i = 0; i < N_CHILDREN; i++)
        child_end(&children[i]);
}

Test(ranks, test_follower_with_another_model_is_refused)
{
    char other[96];
    FILE *f;

    /* The last weight of the file is another. */
    snprintf(other, sizeof other, "%s/other.gguf", folder);
    tiny_gguf_write(other);
    f = fopen(other, "r+e");
    cr_assert(f && fseek(f, -2, SEEK_END) == 0 && fputc(0x11, f) != EOF && fclose(f) == 0);
    expect_refused("--model", other, "--model of rank 2 is another one");
}

Test(ranks, test_follower_with_other_settings_is_refused)
{
    expect_refused("--budget", "64", "rank 2 was started with budget=64, the leader with budget=256");
}

/* Nobody is started for it. */
Test(ranks, test_model_with_too_few_heads_is_refused)
{
    const char *more[] = {"--router", endpoint, NULL};
    struct child *c = process_start(0, "5", more);

    cr_expect_eq(child_wait(c, WAIT_MS), 2);
    cr_expect(strstr(c->log, "--tp 5: 4 heads in 2 KV heads"), "%s", c->log);
    cr_expect(!strstr(c->log, "event=rank_started"), "%s", c->log);
}

/* The router does not hear of a worker of which one rank cannot work. */
Test(ranks, test_follower_without_memory_ends_the_start)
{
    struct child *first = follower_start(1, "1", "--memory-limit", "100K"), *second = follower_start(2, "2", NULL, NULL), *leader = leader_start(0, "20");

    cr_expect_eq(child_wait(first, WAIT_MS), 2);
    cr_expect(strstr(first->log, "--memory-limit"), "%s", first->log);
    cr_expect_eq(child_wait(leader, WAIT_MS), 1);
    cr_expect(strstr(leader->log, "rank 1: its process has ended") && !strstr(leader->log, "worker_ready"), "%s", leader->log);
    cr_expect_eq(child_wait(second, WAIT_MS), 1);
}

Test(ranks, test_options_that_make_no_group)
{
    static const char *const cases[][7] = {
        {"--router", "ipc:///x", "--tp-rank", "3", "--tp-leader", "x", "--tp-rank 3: ranks of --tp 3 are 0 to 2"},
        {"--router", "ipc:///x", "--tp-rank", "1", NULL, NULL, "--tp-rank 1: a follower needs --tp-leader"},
        {"--router", "ipc:///x", "--tp-leader", "x", NULL, NULL, "--tp-leader x: only a follower"},
        {"--tp-rank", "1", "--tp-leader", "fd:99", NULL, NULL, "--tp-leader fd:99: no descriptor"},
        {"--tp-rank", "0", NULL, NULL, NULL, NULL, "--router is required"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct child *c = process_start(0, "3", cases[i]);
        cr_expect_eq(child_wait(c, WAIT_MS), 2);
        cr_expect(strstr(c->log, cases[i][6]), "no \"%s\" in %s", cases[i][6], c->log);
        child_end(c);
    }
}
