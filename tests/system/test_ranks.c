/* Workers of several ranks (--tp), real processes with a driver in the router's place: they answer like a worker of one, share their pool, and end together however one of them ends. */
#include "tests/system/tiny_gguf.h"
#include "tests/system/worker_fixture.h"
#include <criterion/criterion.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { WAIT_MS = 60000, LONG = 30000 };

static struct worker_fixture f;
static char leader_socket[96];

static void setup(void)
{
    worker_fixture_init(&f);
    snprintf(leader_socket, sizeof leader_socket, "%s/leader.sock", f.folder);
}

static void teardown(void)
{
    worker_fixture_fini(&f);
}

TestSuite(ranks, .init = setup, .fini = teardown, .timeout = 300);

/* ---- processes ---- */

static void store_start(void)
{
    worker_fixture_store(&f, "64M");
}

static struct driver_worker *worker_start(int i, const char *tp, const char *option, const char *value)
{
    worker_fixture_start(&f, i, (const char *const[]){"--tp", tp, "--router", f.endpoint, "--tp-timeout", "20", option, value, NULL});
    return worker_fixture_ready(&f, i);
}

/* A descriptor for the process of a follower that worker i has started; it becomes readable when that process has ended. */
static int follower_open(int i, int rank, pid_t *ret_pid)
{
    char text[64];
    const char *found;
    int fd;

    snprintf(text, sizeof text, " rank=%d pid=", rank);
    found = strstr(f.workers[i].log, text);
    if (!found && child_wait_line(&f.workers[i], text, WAIT_MS))
        found = strstr(f.workers[i].log, text);
    cr_assert_not_null(found, "%s", f.workers[i].log);
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

static const struct driver_ask asks[4] = {
    {.n_prompt = 700, .max_tokens = 40, .prompt_seed = 1},
    {.n_prompt = 40, .max_tokens = 150, .prompt_seed = 2},
    {.n_prompt = 140, .max_tokens = 20, .prompt_seed = 3, .temperature = 0.7f, .prompt_logprobs = true},
    {.n_prompt = 300, .max_tokens = 30, .prompt_seed = 4},
};

/* Asks for all at once, as ids first .. first + 3. */
static void ask_all(struct driver_worker *w, uint64_t first)
{
    for (uint64_t i = 0; i < 4; i++)
        driver_ask(&f.driver, w, first + i, &asks[i]);
    for (uint64_t i = 0; i < 4; i++)
        cr_assert(driver_end(&f.driver, first + i)->finished, "%s", f.driver.requests[first + i].text);
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
        driver_expect_same(&f.driver.requests[1 + i], 0, &f.driver.requests[5 + i], asks[i].max_tokens, 2e-3f);
    /* Figures are those of all ranks together: a KV head that two of three ranks have is attended by both. */
    for (int i = 0; i < 4; i++) {
        const struct driver_request *a = &f.driver.requests[1 + i], *b = &f.driver.requests[5 + i];
        const bool same = a->pages_attended == b->pages_attended && a->bytes_attended == b->bytes_attended, more = b->pages_attended > a->pages_attended && b->pages_attended < 2 * a->pages_attended;
        cr_expect(same || (*tp == '3' && more), "request %d: %d pages, with one rank %d", i, (int)b->pages_attended, (int)a->pages_attended);
    }
    driver_ask(&f.driver, many, 9, &(struct driver_ask){.n_prompt = 60, .max_tokens = LONG, .prompt_seed = 7});
    driver_tokens(&f.driver, 9, 5);
    ask_all(many, 11);
    driver_cancel(&f.driver, many, 9);
    for (int i = 0; i < 4; i++) {
        driver_expect_same(&f.driver.requests[5 + i], 0, &f.driver.requests[11 + i], asks[i].max_tokens, 0);
        prefixes += f.driver.requests[5 + i].cached_tokens == 0 && f.driver.requests[11 + i].cached_tokens >= 128;
    }
    cr_expect(f.driver.requests[7].n_prompt_logprobs == 139 && f.driver.requests[13].n_prompt_logprobs == 139);
    cr_expect_eq(prefixes, 2, "%d prompts had a prefix in the pool", prefixes);
    cr_expect_geq(f.driver.requests[11].cached_tokens, 512);
    driver_idle(&f.driver, many);
    kill(f.workers[1].pid, SIGTERM);
    cr_expect_eq(child_wait(&f.workers[1], WAIT_MS), 0, "%s", f.workers[1].log);
    cr_expect(!strstr(f.workers[1].log, "level=error"), "%s", f.workers[1].log);
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

/* Heads of both ranks compete for rows, from the pool as without it. */
Test(ranks, test_two_ranks_share_out_a_layers_rows)
{
    ranks_answer_like_one("2", "--selector", "adakv");
}

Test(ranks, test_three_ranks_answer_like_one)
{
    ranks_answer_like_one("3", NULL, NULL);
}

/* ---- ends ---- */

Test(ranks, test_killed_follower_ends_the_group_and_another_group_goes_on)
{
    enum { END = 90 };
    struct driver_ask a = {.n_prompt = 400, .max_tokens = LONG, .prompt_seed = 5};
    pid_t pids[2];

    store_start();
    struct driver_worker *w0 = worker_start(0, "3", NULL, NULL), *w1 = worker_start(1, "3", NULL, NULL);
    driver_ask(&f.driver, w1, 1, &(struct driver_ask){.n_prompt = 400, .max_tokens = END, .prompt_seed = 5});
    cr_assert(driver_end(&f.driver, 1)->finished);
    int ended[] = {follower_open(0, 1, &pids[0]), follower_open(0, 2, &pids[1])};
    driver_ask(&f.driver, w0, 2, &a);
    driver_tokens(&f.driver, 2, 20);
    kill(pids[1], SIGKILL);
    struct driver_request *r = driver_end(&f.driver, 2);
    cr_expect(r->failed && r->kind == TIDEPOOL__ENGINE__FAILED__KIND__INTERNAL);
    cr_expect_eq(child_wait(&f.workers[0], WAIT_MS), 1);
    cr_expect(strstr(f.workers[0].log, "rank 2"), "%s", f.workers[0].log);
    expect_ended(ended[0], "rank 1");
    expect_ended(ended[1], "rank 2");
    a.n_generated = r->n_tokens < END - 5 ? r->n_tokens : END - 5;
    a.generated = r->tokens;
    a.max_tokens = END;
    driver_expect_same(&f.driver.requests[1], 0, r, a.n_generated, 0);
    driver_ask(&f.driver, w1, 3, &a);
    r = driver_end(&f.driver, 3);
    cr_assert(r->finished && r->first_index == a.n_generated, "%s", r->text);
    driver_expect_same(&f.driver.requests[1], a.n_generated, r, r->n_tokens, 0);
}

Test(ranks, test_killed_leader_takes_its_followers_along)
{
    pid_t pids[2];
    struct driver_worker *w = worker_start(0, "3", NULL, NULL);
    int ended[] = {follower_open(0, 1, &pids[0]), follower_open(0, 2, &pids[1])};

    driver_ask(&f.driver, w, 1, &(struct driver_ask){.n_prompt = 40, .max_tokens = LONG, .prompt_seed = 1});
    driver_tokens(&f.driver, 1, 3);
    kill(f.workers[0].pid, SIGKILL);
    expect_ended(ended[0], "rank 1");
    expect_ended(ended[1], "rank 2");
}

/* Nobody waits longer than that for a rank that has stopped answering. */
Test(ranks, test_follower_that_hangs_ends_the_group)
{
    pid_t pid;
    struct driver_worker *w = worker_start(0, "2", "--tp-timeout", "3");
    int ended = follower_open(0, 1, &pid);

    driver_ask(&f.driver, w, 1, &(struct driver_ask){.n_prompt = 40, .max_tokens = LONG, .prompt_seed = 1});
    driver_tokens(&f.driver, 1, 3);
    kill(pid, SIGSTOP);
    cr_expect(driver_end(&f.driver, 1)->failed);
    cr_expect_eq(child_wait(&f.workers[0], WAIT_MS), 1);
    expect_ended(ended, "rank 1");
}

Test(ranks, test_idle_group_notices_a_rank_that_is_gone)
{
    pid_t pid;

    worker_start(0, "2", NULL, NULL);
    int ended = follower_open(0, 1, &pid);
    kill(pid, SIGKILL);
    expect_ended(ended, "rank 1");
    cr_expect_eq(child_wait(&f.workers[0], WAIT_MS), 1);
    cr_expect(strstr(f.workers[0].log, "event=group_failed"), "%s", f.workers[0].log);
}

/* ---- followers started by hand ---- */

static struct child *follower_start(int i, const char *rank, const char *option, const char *value)
{
    return worker_fixture_start(&f, i, (const char *const[]){"--tp", "3", "--tp-rank", rank, "--tp-leader", leader_socket, "--tp-timeout", "20", option, value, NULL});
}

static struct child *leader_start(int i, const char *timeout)
{
    return worker_fixture_start(&f, i, (const char *const[]){"--tp", "3", "--router", f.endpoint, "--tp-listen", leader_socket, "--tp-timeout", timeout, NULL});
}

/* A follower that is asked to end asks the group to. */
Test(ranks, test_followers_by_hand_join_and_drain)
{
    struct child *first = follower_start(1, "1", NULL, NULL); /* before its leader */
    struct child *leader = leader_start(0, "20"), *second = follower_start(2, "2", NULL, NULL);
    struct driver_worker *w = worker_fixture_ready(&f, 0);

    cr_expect(access(leader_socket, F_OK) < 0);
    driver_ask(&f.driver, w, 1, &(struct driver_ask){.n_prompt = 140, .max_tokens = 600, .prompt_seed = 1});
    driver_tokens(&f.driver, 1, 3);
    kill(second->pid, SIGTERM);
    cr_assert(child_wait_line(leader, "event=draining", WAIT_MS));
    cr_expect(driver_end(&f.driver, 1)->finished && f.driver.requests[1].n_tokens == 600);
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
    for (int i = 0; i < FIXTURE_WORKERS_MAX; i++)
        child_end(&f.workers[i]);
}

Test(ranks, test_follower_with_another_model_is_refused)
{
    char other[96];
    FILE *file;

    /* The last weight of the file is another. */
    snprintf(other, sizeof other, "%s/other.gguf", f.folder);
    tiny_gguf_write(other);
    file = fopen(other, "r+e");
    cr_assert(file && fseek(file, -2, SEEK_END) == 0 && fputc(0x11, file) != EOF && fclose(file) == 0);
    expect_refused("--model", other, "--model of rank 2 is another one");
}

Test(ranks, test_follower_with_other_settings_is_refused)
{
    expect_refused("--budget", "64", "rank 2 was started with budget=64, the leader with budget=256");
}

/* Nobody is started for it. */
Test(ranks, test_model_with_too_few_heads_is_refused)
{
    struct child *c = worker_fixture_start(&f, 0, (const char *const[]){"--tp", "5", "--router", f.endpoint, NULL});

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
    static const struct {
        const char *options[9], *text;
    } cases[] = {
        {{"--tp", "3", "--router", "ipc:///x", "--tp-rank", "3", "--tp-leader", "x"}, "--tp-rank 3: ranks of --tp 3 are 0 to 2"},
        {{"--tp", "3", "--router", "ipc:///x", "--tp-rank", "1"}, "--tp-rank 1: a follower needs --tp-leader"},
        {{"--tp", "3", "--router", "ipc:///x", "--tp-leader", "x"}, "--tp-leader x: only a follower"},
        {{"--tp", "3", "--tp-rank", "1", "--tp-leader", "fd:99"}, "--tp-leader fd:99: no descriptor"},
        {{"--tp", "3", "--tp-rank", "0"}, "--router is required"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct child *c = worker_fixture_start(&f, 0, cases[i].options);
        cr_expect_eq(child_wait(c, WAIT_MS), 2);
        cr_expect(strstr(c->log, cases[i].text), "no \"%s\" in %s", cases[i].text, c->log);
        child_end(c);
    }
}
