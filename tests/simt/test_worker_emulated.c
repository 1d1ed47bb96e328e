/* A real tidepool-worker with --device cuda, whose plugin is the CUDA backend over the emulator, with a real store, and a driver in the router's place. */
#include "tests/system/worker_fixture.h"
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WAIT_MS = 120000, PROMPT = 300, ANSWER = 8 };

static struct worker_fixture f;

static void setup(void)
{
    static const char *const options[] = {"--device", "cuda", "--context", "2048", NULL};

    worker_fixture_init(&f);
    f.program = "../tests/plugin/tidepool-worker";
    f.options = options;
    worker_fixture_store(&f, "32M");
}

static void teardown(void)
{
    worker_fixture_fini(&f);
}
TestSuite(worker_emulated, .init = setup, .fini = teardown, .timeout = 250);

static struct driver_worker *worker_await(int i)
{
    cr_assert(child_wait_line(&f.workers[i], "device=\"cuda emulated", WAIT_MS), "%s", f.workers[i].log);
    cr_assert(child_wait_line(&f.workers[i], "event=pool_registered", WAIT_MS), "%s", f.workers[i].log);
    return worker_fixture_ready(&f, i);
}

static struct driver_worker *worker_start(int i)
{
    worker_fixture_start(&f, i, (const char *const[]){"--router", f.endpoint, "--page-cache", "8M", "--budget", "64", "--recent", "0", NULL});
    return worker_await(i);
}

/* The first n_known tokens of the answer have been made elsewhere. */
static void send_request(struct driver_worker *w, uint64_t id, int max_tokens, const struct driver_request *known, int n_known)
{
    driver_ask(&f.driver, w, id, &(struct driver_ask){.n_prompt = PROMPT, .max_tokens = max_tokens, .temperature = 0.8f, .seed = 5, .generated = n_known ? known->tokens : NULL, .n_generated = n_known});
}

static struct driver_request *ask(struct driver_worker *w, uint64_t id)
{
    send_request(w, id, ANSWER, NULL, 0);
    return driver_end(&f.driver, id);
}

/* The first by itself, then from its own blocks in the pool; the second worker from those of the first. What the first answer fetched the second finds in the page cache. SIGTERM ends both in order: nothing is left registered or allocated. */
Test(worker_emulated, answers_from_the_pool_are_the_same)
{
    struct driver_worker *w0 = worker_start(0), *w1 = worker_start(1);
    const struct driver_request *answers[] = {ask(w0, 1), ask(w0, 2), ask(w1, 3)};
    for (int i = 0; i < 3; i++) {
        cr_assert(answers[i]->finished && answers[i]->n_tokens == ANSWER, "answer %d: %s", i, answers[i]->text);
        cr_expect_eq((int)answers[i]->cached_tokens, i == 0 ? 0 : 256, "answer %d: %d cached", i, (int)answers[i]->cached_tokens);
        driver_expect_same(answers[0], 0, answers[i], ANSWER, 0);
    }
    cr_expect(answers[0]->page_misses > 0 && answers[1]->page_misses == 0 && answers[1]->page_hits == answers[0]->page_hits + answers[0]->page_misses, "%d found and %d missed, then %d and %d",
              (int)answers[0]->page_hits, (int)answers[0]->page_misses, (int)answers[1]->page_hits, (int)answers[1]->page_misses);
    cr_expect_eq(answers[2]->page_hits + answers[2]->page_misses, answers[1]->page_hits);
    for (int i = 0; i < 2; i++) {
        kill(f.workers[i].pid, SIGTERM);
        cr_expect_eq(child_wait(&f.workers[i], WAIT_MS), 0, "%s", f.workers[i].log);
    }
}

/* Of two workers of one launcher the second is given a GPU that is not there: it ends, and says why, instead of computing on the CPU. */
Test(worker_emulated, a_gpu_beyond_the_last_ends_the_worker)
{
    worker_fixture_start(&f, 0, (const char *const[]){"--router", f.endpoint, "--device", "auto", "--gpu", "1", NULL});
    cr_expect_eq(child_wait(&f.workers[0], WAIT_MS), 2);
    cr_expect(strstr(f.workers[0].log, "no GPU 1: this host has 1, from 0 to 0"), "%s", f.workers[0].log);
}

static long long logged(const struct child *worker, const char *name)
{
    const char *at = strstr(worker->log, "event=memory_limit_chosen");
    at = at ? strstr(at, name) : NULL;
    cr_assert_not_null(at, "%s", worker->log);
    return strtoll(at + strlen(name), NULL, 10);
}

/* What another process holds of the device's memory is not shared out. */
Test(worker_emulated, memory_of_others_is_left_alone)
{
    enum { OTHERS = 200 << 20 };
    worker_start(0);
    setenv("SIMT_OTHERS_BYTES", "209715200", 1);
    worker_start(1);
    unsetenv("SIMT_OTHERS_BYTES");
    cr_expect_eq(logged(&f.workers[0], "room_bytes=") - logged(&f.workers[1], "room_bytes="), OTHERS);
    for (int i = 0; i < 2; i++)
        cr_expect_eq(logged(&f.workers[i], "memory_limit="),
                     logged(&f.workers[i], "room_bytes=") - logged(&f.workers[i], "weights_bytes=") - logged(&f.workers[i], "reserve_bytes="));
    cr_expect_lt(logged(&f.workers[1], "room_bytes="), (512 << 20) - OTHERS + 1);
}

/* Two ranks, both on the one GPU there is, over emulated NCCL: the same from the pool, and when one is killed in the middle of a collective the other is not left waiting in it. */
Test(worker_emulated, two_ranks_answer_from_the_pool_and_end_together)
{
    char leader[96];
    snprintf(leader, sizeof leader, "%s/leader.sock", f.folder);
    worker_fixture_start(&f, 0, (const char *const[]){"--router", f.endpoint, "--tp", "2", "--tp-listen", leader, NULL});
    worker_fixture_start(&f, 1, (const char *const[]){"--tp", "2", "--tp-rank", "1", "--tp-leader", leader, NULL});
    struct driver_worker *w = worker_await(0);
    cr_assert(strstr(f.workers[0].log, "collectives=nccl"), "%s", f.workers[0].log);
    cr_assert(child_wait_line(&f.workers[1], "event=pool_registered", WAIT_MS), "%s", f.workers[1].log);
    const struct driver_request *answers[] = {ask(w, 1), ask(w, 2)};
    for (int i = 0; i < 2; i++)
        cr_assert(answers[i]->finished && answers[i]->n_tokens == ANSWER, "answer %d: %s", i, answers[i]->text);
    cr_expect_eq((int)answers[1]->cached_tokens, 256);
    driver_expect_same(answers[0], 0, answers[1], ANSWER, 0);
    send_request(w, 3, 1500, NULL, 0);
    driver_tokens(&f.driver, 3, 3);
    kill(f.workers[1].pid, SIGKILL);
    cr_expect(driver_end(&f.driver, 3)->failed);
    cr_expect_eq(child_wait(&f.workers[0], WAIT_MS), 1, "%s", f.workers[0].log);
}

/* The device breaks: the request comes back to be continued elsewhere, the worker ends with status 1, and another worker goes on with the very tokens that would have come. */
static void device_breaks(const char *launch, int n_tokens)
{
    setenv("SIMT_FAIL_LAUNCH", launch, 1);
    struct driver_worker *broken = worker_start(0);
    unsetenv("SIMT_FAIL_LAUNCH");
    struct driver_worker *other = worker_start(1);
    struct driver_request *first = ask(broken, 1);
    cr_expect(first->failed && first->kind == TIDEPOOL__ENGINE__FAILED__KIND__INTERNAL, "%s", first->text);
    cr_expect_eq(first->n_tokens, n_tokens, "%d tokens", first->n_tokens);
    cr_expect_eq(child_wait(&f.workers[0], WAIT_MS), 1, "%s", f.workers[0].log);
    cr_expect(strstr(f.workers[0].log, "event=engine_failed"), "%s", f.workers[0].log);
    send_request(other, 2, ANSWER, first, n_tokens);
    const struct driver_request *rest = driver_end(&f.driver, 2), *whole = ask(other, 3);
    cr_assert(rest->finished && whole->finished && whole->n_tokens == ANSWER && rest->n_tokens == ANSWER - n_tokens, "%d and %d tokens", rest->n_tokens, whole->n_tokens);
    driver_expect_same(whole, 0, first, n_tokens, 0);
    driver_expect_same(whole, n_tokens, rest, rest->n_tokens, 0);
}

Test(worker_emulated, a_device_that_breaks_in_an_answer)
{
    device_breaks("decode_merge:5", 3);
}
Test(worker_emulated, a_device_that_breaks_while_it_samples)
{
    device_breaks("sample:3", 2);
}
Test(worker_emulated, a_device_that_breaks_in_a_prompt)
{
    device_breaks("block_encode:3", 0);
}
