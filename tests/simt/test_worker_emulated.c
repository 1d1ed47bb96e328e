/* A real tidepool-worker with --device cuda, whose plugin is the CUDA backend over the emulator, with a real store, and a driver in the router's place. */
#include "tests/system/child_process.h"
#include "tests/system/router_driver.h"
#include "tests/system/tiny_gguf.h"
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WAIT_MS = 120000, PROMPT = 300, ANSWER = 8 };

static char folder[64], endpoint[96], store_socket[96], model[96];
static struct driver driver;
static struct child store, workers[2];

static void setup(void)
{
    folder_make(folder);
    snprintf(endpoint, sizeof endpoint, "ipc://%s/router.sock", folder);
    snprintf(store_socket, sizeof store_socket, "%s/kvstore.sock", folder);
    snprintf(model, sizeof model, "%s/tiny.gguf", folder);
    tiny_gguf_write(model);
    driver_open(&driver, endpoint);
    const char *argv[] = {program_path("tidepool-kvstore"), "--socket", store_socket, "--pool-size", "32M", NULL};
    child_start(&store, argv, 0);
    cr_assert(child_wait_line(&store, "event=store_ready", WAIT_MS));
}

static void teardown(void)
{
    for (int i = 0; i < 2; i++)
        child_end(&workers[i]);
    child_end(&store);
    driver_close(&driver);
    folder_remove(folder);
}
TestSuite(worker_emulated, .init = setup, .fini = teardown, .timeout = 250);

/* `more`: further options with their values. */
static void process_start(int i, const char *const *more)
{
    char name[16];
    const char *argv[32] = {program_path("../tests/plugin/tidepool-worker"), "--device", "cuda", "--model", model, "--store", store_socket,
                            "--context", "2048", "--chunk", "128", "--name", name};
    int n = 13;
    snprintf(name, sizeof name, "w%d", i);
    while (*more && n < 31)
        argv[n++] = *more++;
    child_start(&workers[i], argv, 0);
}

static struct driver_worker *worker_await(int i)
{
    char name[16];
    snprintf(name, sizeof name, "w%d", i);
    cr_assert(child_wait_line(&workers[i], "device=\"cuda emulated", WAIT_MS), "%s", workers[i].log);
    cr_assert(child_wait_line(&workers[i], "event=pool_registered", WAIT_MS), "%s", workers[i].log);
    return driver_worker(&driver, name);
}

static struct driver_worker *worker_start(int i)
{
    process_start(i, (const char *const[]){"--router", endpoint, "--page-cache", "8M", "--budget", "64", "--recent", "0", NULL});
    return worker_await(i);
}

/* The first n_known tokens of the answer have been made elsewhere. */
static void send_request(struct driver_worker *w, uint64_t id, uint32_t max_tokens, struct driver_request *known, int n_known)
{
    Tidepool__Engine__Sampling sampling = TIDEPOOL__ENGINE__SAMPLING__INIT;
    Tidepool__Engine__Generate g = TIDEPOOL__ENGINE__GENERATE__INIT;
    uint32_t prompt[PROMPT];
    for (uint32_t i = 0; i < PROMPT; i++)
        prompt[i] = (i * 7919 + i / 7 * 31) % w->vocab_size;
    sampling.temperature = 0.8f;
    sampling.top_p = 1;
    sampling.repetition_penalty = 1;
    sampling.seed = 5;
    sampling.logprobs = true;
    g.epoch = driver.epoch;
    g.prompt = prompt;
    g.n_prompt = PROMPT;
    g.max_tokens = max_tokens;
    g.sampling = &sampling;
    if (n_known) {
        g.generated = known->tokens;
        g.n_generated = (size_t)n_known;
    }
    driver_send(&driver, w, ENGINE_GENERATE, id, &g.base);
}

static struct driver_request *ask(struct driver_worker *w, uint64_t id)
{
    send_request(w, id, ANSWER, NULL, 0);
    return driver_end(&driver, id);
}

/* The first by itself, then from its own blocks in the pool; the second worker from those of the first. What the first answer fetched the second finds in the page cache. SIGTERM ends both in order: nothing is left registered or allocated. */
Test(worker_emulated, answers_from_the_pool_are_the_same)
{
    struct driver_worker *w0 = worker_start(0), *w1 = worker_start(1);
    const struct driver_request *answers[] = {ask(w0, 1), ask(w0, 2), ask(w1, 3)};
    for (int i = 0; i < 3; i++) {
        cr_assert(answers[i]->finished && answers[i]->n_tokens == ANSWER, "answer %d: %s", i, answers[i]->text);
        cr_expect_eq((int)answers[i]->cached_tokens, i == 0 ? 0 : 256, "answer %d: %d cached", i, (int)answers[i]->cached_tokens);
        cr_expect_eq(memcmp(answers[0]->tokens, answers[i]->tokens, ANSWER * sizeof(uint32_t)), 0, "answer %d", i);
        cr_expect_eq(memcmp(answers[0]->logprobs, answers[i]->logprobs, ANSWER * sizeof(float)), 0, "answer %d", i);
    }
    cr_expect(answers[0]->page_misses > 0 && answers[1]->page_misses == 0 && answers[1]->page_hits == answers[0]->page_hits + answers[0]->page_misses, "%d found and %d missed, then %d and %d",
              (int)answers[0]->page_hits, (int)answers[0]->page_misses, (int)answers[1]->page_hits, (int)answers[1]->page_misses);
    cr_expect_eq(answers[2]->page_hits + answers[2]->page_misses, answers[1]->page_hits);
    for (int i = 0; i < 2; i++) {
        kill(workers[i].pid, SIGTERM);
        cr_expect_eq(child_wait(&workers[i], WAIT_MS), 0, "%s", workers[i].log);
    }
}

/* Two ranks, both on the one GPU there is, over emulated NCCL: the same from the pool, and when one is killed in the middle of a collective the other is not left waiting in it. */
Test(worker_emulated, two_ranks_answer_from_the_pool_and_end_together)
{
    char leader[96];
    snprintf(leader, sizeof leader, "%s/leader.sock", folder);
    process_start(0, (const char *const[]){"--router", endpoint, "--tp", "2", "--tp-listen", leader, NULL});
    process_start(1, (const char *const[]){"--tp", "2", "--tp-rank", "1", "--tp-leader", leader, NULL});
    struct driver_worker *w = worker_await(0);
    cr_assert(strstr(workers[0].log, "collectives=nccl"), "%s", workers[0].log);
    cr_assert(child_wait_line(&workers[1], "event=pool_registered", WAIT_MS), "%s", workers[1].log);
    const struct driver_request *answers[] = {ask(w, 1), ask(w, 2)};
    for (int i = 0; i < 2; i++)
        cr_assert(answers[i]->finished && answers[i]->n_tokens == ANSWER, "answer %d: %s", i, answers[i]->text);
    cr_expect_eq((int)answers[1]->cached_tokens, 256);
    cr_expect_eq(memcmp(answers[0]->tokens, answers[1]->tokens, ANSWER * sizeof(uint32_t)), 0);
    cr_expect_eq(memcmp(answers[0]->logprobs, answers[1]->logprobs, ANSWER * sizeof(float)), 0);
    send_request(w, 3, 1500, NULL, 0);
    driver_tokens(&driver, 3, 3);
    kill(workers[1].pid, SIGKILL);
    cr_expect(driver_end(&driver, 3)->failed);
    cr_expect_eq(child_wait(&workers[0], WAIT_MS), 1, "%s", workers[0].log);
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
    cr_expect_eq(child_wait(&workers[0], WAIT_MS), 1, "%s", workers[0].log);
    cr_expect(strstr(workers[0].log, "event=engine_failed"), "%s", workers[0].log);
    send_request(other, 2, ANSWER, first, n_tokens);
    const struct driver_request *rest = driver_end(&driver, 2), *whole = ask(other, 3);
    cr_assert(rest->finished && whole->finished && whole->n_tokens == ANSWER && rest->n_tokens == ANSWER - n_tokens, "%d and %d tokens", rest->n_tokens, whole->n_tokens);
    cr_expect_eq(memcmp(whole->tokens, first->tokens, (size_t)n_tokens * sizeof(uint32_t)), 0);
    cr_expect_eq(memcmp(whole->tokens + n_tokens, rest->tokens, (size_t)rest->n_tokens * sizeof(uint32_t)), 0);
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
