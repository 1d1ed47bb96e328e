/* Real workers and a real store with a driver in the router's place. Most tests run a small random model; what must hold for a real one is in the suite
 * worker_model. */
#include "proto/base/clock.h"
#include "tests/system/child_process.h"
#include "tests/system/router_driver.h"
#include "tests/system/tiny_gguf.h"
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REAL_MODEL "models/SmolLM2-135M-Instruct.Q4_1.gguf"
enum { WAIT_MS = 240000, PROMPT_MAX = 40000 };

static char folder[64], endpoint[96], store_socket[96], model[96];
static struct driver driver;
static struct child store, workers[2];

static void store_start(void)
{
    const char *argv[] = {program_path("tidepool-kvstore"), "--socket", store_socket, "--pool-size", "128M", NULL};

    child_start(&store, argv, 0);
    cr_assert(child_wait_line(&store, "event=store_ready", WAIT_MS));
}

/* `extra`: one more option with its value, or NULL. */
static struct driver_worker *worker_start(int i, const char *extra, const char *value)
{
    char name[16];
    const char *argv[] = {program_path("tidepool-worker"), "--model", model, "--router", endpoint, "--store", store_socket, "--threads", "1",
                          "--chunk", "128", "--name", name, extra, value, NULL};

    snprintf(name, sizeof name, "w%d", i);
    child_start(&workers[i], argv, 0);
    return driver_worker(&driver, name);
}

static void setup(void)
{
    folder_make(folder);
    snprintf(endpoint, sizeof endpoint, "ipc://%s/router.sock", folder);
    snprintf(store_socket, sizeof store_socket, "%s/kvstore.sock", folder);
    snprintf(model, sizeof model, "%s/tiny.gguf", folder);
    tiny_gguf_write(model);
    driver_open(&driver, endpoint);
}

static void setup_real(void)
{
    setup();
    snprintf(model, sizeof model, "%s", REAL_MODEL);
}

static void teardown(void)
{
    for (int i = 0; i < 2; i++)
        child_end(&workers[i]);
    child_end(&store);
    driver_close(&driver);
    folder_remove(folder);
}

TestSuite(worker, .init = setup, .fini = teardown, .timeout = 600);
TestSuite(worker_model, .init = setup_real, .fini = teardown, .timeout = 900);

/* Under sanitizers the small model goes the same ways; the real one would take minutes. */
static void need_real_model(void)
{
#ifdef TIDEPOOL_SANITIZED
    cr_skip_test("the real model is run in the Release build");
#endif
    if (access(REAL_MODEL, R_OK) < 0)
        cr_skip_test("no %s: deploy/get-model.sh fetches it", REAL_MODEL);
}

/* A repeatable prompt. */
static uint32_t prompt_tokens[PROMPT_MAX];

struct ask {
    int n_prompt, max_tokens, min_tokens;
    uint32_t prompt_seed;
    float temperature;
    uint64_t seed;
    uint32_t stop_id; /* 0: none */
    const uint32_t *generated;
    int n_generated;
    bool no_cache, logprobs, prompt_logprobs;
};

static void ask(struct driver_worker *w, uint64_t id, const struct ask *a)
{
    Tidepool__Engine__Sampling sampling = TIDEPOOL__ENGINE__SAMPLING__INIT;
    Tidepool__Engine__Generate g = TIDEPOOL__ENGINE__GENERATE__INIT;
    uint32_t stop[1] = {a->stop_id};

    for (int i = 0; i < a->n_prompt; i++)
        prompt_tokens[i] = (uint32_t)(((uint64_t)i * 7919 + a->prompt_seed * 104729ull + (uint64_t)(i / 7) * 31) % w->vocab_size);
    sampling.temperature = a->temperature;
    sampling.top_p = 1;
    sampling.repetition_penalty = 1;
    sampling.seed = a->seed;
    sampling.logprobs = a->logprobs;
    sampling.n_logprobs = a->logprobs ? 5 : 0;
    g.epoch = driver.epoch;
    g.prompt = prompt_tokens;
    g.n_prompt = (size_t)a->n_prompt;
    g.generated = (uint32_t *)a->generated;
    g.n_generated = (size_t)a->n_generated;
    g.max_tokens = (uint32_t)a->max_tokens;
    g.min_tokens = (uint32_t)a->min_tokens;
    g.stop_ids = stop;
    g.n_stop_ids = a->stop_id != 0;
    g.sampling = &sampling;
    g.no_cache = a->no_cache;
    g.prompt_logprobs = a->prompt_logprobs;
    driver_send(&driver, w, ENGINE_GENERATE, id, &g.base);
}

static void same(const struct driver_request *a, int from, const struct driver_request *b, int n)
{
    for (int i = 0; i < n; i++) {
        cr_assert_eq(a->tokens[from + i], b->tokens[i], "token %d", i);
        cr_assert_eq(a->logprobs[from + i], b->logprobs[i], "logprob %d", i);
    }
}

static bool is_idle(struct driver *d, uint64_t arg)
{
    const struct driver_worker *w = &d->workers[arg];

    return w->has_beat && !w->beat.busy && w->beat.n_running + w->beat.n_prefilling + w->beat.n_waiting == 0;
}

static void answers_alone_and_together(void)
{
    struct driver_worker *w = worker_start(0, NULL, NULL);
    const struct ask asks[3] = {
        {.n_prompt = 300, .max_tokens = 24, .prompt_seed = 1, .temperature = 0.8f, .seed = 5},
        {.n_prompt = 40, .max_tokens = 30, .prompt_seed = 2, .temperature = 0.8f, .seed = 6, .logprobs = true},
        {.n_prompt = 140, .max_tokens = 12, .prompt_seed = 3},
    };

    for (uint64_t i = 0; i < 3; i++) {
        ask(w, 1 + i, &asks[i]);
        struct driver_request *r = driver_end(&driver, 1 + i);
        cr_assert(r->finished, "%s", r->text);
        cr_assert_eq(r->n_tokens, asks[i].max_tokens);
        cr_assert_eq((int)r->completion_tokens, r->n_tokens);
        cr_assert_eq((int)r->prompt_tokens, asks[i].n_prompt);
        cr_assert_eq(r->reason, TIDEPOOL__ENGINE__FINISH_REASON__FINISH_LENGTH);
        cr_assert_eq(r->n_top, asks[i].logprobs ? 5 : 0);
    }
    for (uint64_t i = 0; i < 3; i++)
        ask(w, 11 + i, &asks[i]);
    for (uint64_t i = 0; i < 3; i++)
        same(&driver.requests[1 + i], 0, driver_end(&driver, 11 + i), asks[i].max_tokens);
    cr_assert(driver_pump(&driver, is_idle, 0, WAIT_MS));
    kill(workers[0].pid, SIGUSR1);
    cr_assert(child_wait_line(&workers[0], "event=memory", WAIT_MS));
    cr_assert(child_wait_line(&workers[0], "tag=total", WAIT_MS));
}

Test(worker, test_answers_are_the_same_alone_and_together)
{
    answers_alone_and_together();
}

Test(worker_model, test_answers_are_the_same_alone_and_together)
{
    need_real_model();
    answers_alone_and_together();
}

static void second_worker_answers_from_the_pool(void)
{
    store_start();
    struct driver_worker *w0 = worker_start(0, NULL, NULL), *w1 = worker_start(1, NULL, NULL);
    struct ask a = {.n_prompt = 700, .max_tokens = 16, .prompt_seed = 4, .temperature = 0.7f, .seed = 9};

    cr_assert(w0->has_store && w1->has_store);
    cr_assert_eq(memcmp(w0->store_uuid, w1->store_uuid, 16), 0);
    ask(w0, 1, &a);
    struct driver_request *first = driver_end(&driver, 1);
    cr_assert(first->finished && first->cached_tokens == 0, "%s", first->text);
    ask(w1, 2, &a);
    struct driver_request *second = driver_end(&driver, 2);
    cr_assert(second->finished, "%s", second->text);
    cr_assert_geq(second->cached_tokens, 512);
    same(first, 0, second, 16);
    a.no_cache = true;
    ask(w1, 3, &a);
    struct driver_request *third = driver_end(&driver, 3);
    cr_assert_eq(third->cached_tokens, 0);
    same(first, 0, third, 16);
}

Test(worker, test_second_worker_answers_from_the_pool)
{
    second_worker_answers_from_the_pool();
}

Test(worker_model, test_second_worker_answers_from_the_pool)
{
    need_real_model();
    second_worker_answers_from_the_pool();
}

Test(worker, test_other_worker_continues_a_broken_answer)
{
    store_start();
    struct driver_worker *w0 = worker_start(0, NULL, NULL), *w1 = worker_start(1, NULL, NULL);
    struct ask a = {.n_prompt = 400, .max_tokens = 30000, .prompt_seed = 5, .temperature = 0.7f, .seed = 10};
    enum { END = 60 };

    ask(w1, 1, &(struct ask){.n_prompt = 400, .max_tokens = END, .prompt_seed = 5, .temperature = 0.7f, .seed = 10, .no_cache = true});
    driver_end(&driver, 1);
    ask(w0, 2, &a);
    driver_tokens(&driver, 2, 20);
    kill(workers[0].pid, SIGKILL);
    int n = driver.requests[2].n_tokens;
    same(&driver.requests[1], 0, &driver.requests[2], n < END ? n : END);
    a.generated = driver.requests[2].tokens;
    a.n_generated = n < END - 5 ? n : END - 5;
    a.max_tokens = END;
    ask(w1, 3, &a);
    struct driver_request *r = driver_end(&driver, 3);
    cr_assert(r->finished && r->first_index == a.n_generated && r->n_tokens == END - a.n_generated, "%s", r->text);
    cr_assert_geq(r->cached_tokens, 256);
    same(&driver.requests[1], a.n_generated, r, r->n_tokens);
}

Test(worker, test_killed_store_does_not_change_an_answer)
{
    enum { N = 1000 };

    store_start();
    struct driver_worker *w = worker_start(0, NULL, NULL);
    struct ask a = {.n_prompt = 400, .max_tokens = N, .prompt_seed = 6};
    uint8_t uuid[16];

    ask(w, 1, &a);
    cr_assert_eq(driver_end(&driver, 1)->n_tokens, N);
    memcpy(uuid, w->store_uuid, sizeof uuid);
    ask(w, 2, &a);
    driver_tokens(&driver, 2, 10);
    child_end(&store);
    struct driver_request *r = driver_end(&driver, 2);
    cr_assert(r->finished, "%s", r->text);
    same(&driver.requests[1], 0, r, N);
    /* Without a store, and with the next one. */
    ask(w, 3, &a);
    same(&driver.requests[1], 0, driver_end(&driver, 3), N);
    cr_assert_eq(driver.requests[3].cached_tokens, 0);
    store_start();
    cr_assert(child_wait_line(&workers[0], "event=store_lost", WAIT_MS));
    while (!w->has_store || memcmp(uuid, w->store_uuid, sizeof uuid) == 0)
        driver_pump(&driver, NULL, 0, 50);
    ask(w, 4, &a);
    driver_end(&driver, 4);
    ask(w, 5, &a);
    same(&driver.requests[1], 0, driver_end(&driver, 5), N);
    cr_assert_geq(driver.requests[5].cached_tokens, 256);
}

Test(worker, test_cancelled_request_falls_silent)
{
    struct driver_worker *w = worker_start(0, NULL, NULL);
    int n;

    ask(w, 1, &(struct ask){.n_prompt = 60, .max_tokens = 30000, .prompt_seed = 7});
    ask(w, 2, &(struct ask){.n_prompt = 30000, .max_tokens = 10, .prompt_seed = 8});
    driver_tokens(&driver, 1, 5);
    driver_cancel(&driver, w, 1);
    driver_cancel(&driver, w, 2);
    w->has_beat = false;
    cr_assert(driver_pump(&driver, is_idle, 0, WAIT_MS));
    n = driver.requests[1].n_tokens;
    cr_assert_lt(n, 30000);
    driver_pump(&driver, NULL, 0, 300);
    cr_assert_eq(driver.requests[1].n_tokens, n);
    cr_assert(!driver.requests[1].finished && !driver.requests[1].failed && !driver.requests[2].prefilled);
    ask(w, 3, &(struct ask){.n_prompt = 60, .max_tokens = 5, .prompt_seed = 7});
    same(&driver.requests[1], 0, driver_end(&driver, 3), 5);
}

Test(worker, test_long_prefill_does_not_stop_a_stream)
{
    struct driver_worker *w = worker_start(0, NULL, NULL);
    int before;

    ask(w, 1, &(struct ask){.n_prompt = 40, .max_tokens = 30000, .prompt_seed = 1});
    driver_tokens(&driver, 1, 3);
    before = driver.requests[1].n_tokens;
    ask(w, 2, &(struct ask){.n_prompt = 6000, .max_tokens = 1, .prompt_seed = 2});
    driver_end(&driver, 2);
    cr_assert_gt(driver.requests[1].n_tokens - before, 50);
    driver_cancel(&driver, w, 1);
}

Test(worker, test_requests_that_cannot_be_served)
{
    struct driver_worker *w = worker_start(0, "--context", "512");
    Tidepool__Engine__Generate g = TIDEPOOL__ENGINE__GENERATE__INIT;

    cr_assert_eq(w->context_length, 512);
    ask(w, 1, &(struct ask){.n_prompt = 500, .max_tokens = 13});
    cr_assert(driver_end(&driver, 1)->failed && driver.requests[1].kind == TIDEPOOL__ENGINE__FAILED__KIND__TOO_LONG);
    cr_assert(strstr(driver.requests[1].text, "512"), "%s", driver.requests[1].text);
    g.epoch = driver.epoch;
    driver_send(&driver, w, ENGINE_GENERATE, 2, &g.base);
    cr_assert(driver_end(&driver, 2)->failed && driver.requests[2].kind == TIDEPOOL__ENGINE__FAILED__KIND__INVALID);
    ask(w, 3, &(struct ask){.n_prompt = 10, .max_tokens = 3, .prompt_logprobs = true});
    cr_assert(driver_end(&driver, 3)->finished && driver.requests[3].n_prompt_logprobs == 9);
    ask(w, 4, &(struct ask){.n_prompt = 10, .max_tokens = 3, .stop_id = driver.requests[3].tokens[0]});
    cr_assert(driver_end(&driver, 4)->finished && driver.requests[4].n_tokens == 1);
    cr_assert_eq(driver.requests[4].reason, TIDEPOOL__ENGINE__FINISH_REASON__FINISH_STOP);
    cr_assert_eq(driver.requests[4].stop_id, driver.requests[3].tokens[0]);
}

Test(worker, test_malformed_and_late_messages_are_dropped)
{
    struct driver_worker *w = worker_start(0, NULL, NULL);
    uint8_t junk[64] = {1, 2, 3}, header[FRAME_HEADER_BYTES];

    driver_send_raw(&driver, w, junk, sizeof junk, NULL, 0);
    driver_send_raw(&driver, w, junk, FRAME_HEADER_BYTES, junk, sizeof junk);
    frame_header_encode(&(struct frame_header){.type = ENGINE_GENERATE, .body_bytes = 64, .request_id = 1}, header);
    driver_send_raw(&driver, w, header, sizeof header, junk, 64);
    driver_send_raw(&driver, w, header, sizeof header, junk, 63);
    frame_header_encode(&(struct frame_header){.type = ENGINE_READY, .body_bytes = 0}, header);
    driver_send_raw(&driver, w, header, sizeof header, junk, 0);
    driver.epoch--; /* a request of a router that was */
    ask(w, 2, &(struct ask){.n_prompt = 10, .max_tokens = 1});
    driver.epoch++;
    ask(w, 3, &(struct ask){.n_prompt = 10, .max_tokens = 1});
    cr_assert(driver_end(&driver, 3)->finished);
    cr_assert(!driver.requests[1].failed && !driver.requests[2].prefilled && !driver.requests[2].failed);
}

static bool is_ready_again(struct driver *d, uint64_t n)
{
    return d->workers[0].n_ready > (int)n;
}

Test(worker, test_silent_router_loses_its_requests)
{
    struct driver_worker *w = worker_start(0, NULL, NULL);
    int n_ready;

    ask(w, 1, &(struct ask){.n_prompt = 40, .max_tokens = 30000, .prompt_seed = 1});
    driver_tokens(&driver, 1, 3);
    driver.silent = true;
    n_ready = w->n_ready;
    cr_assert(driver_pump(&driver, is_ready_again, (uint64_t)n_ready, WAIT_MS));
    cr_assert(child_wait_line(&workers[0], "event=router_lost", WAIT_MS));
    /* The next router, at the same place. */
    driver.epoch++;
    driver.silent = false;
    n_ready = w->n_ready;
    w->has_beat = false;
    cr_assert(driver_pump(&driver, is_ready_again, (uint64_t)n_ready, WAIT_MS));
    cr_assert(driver_pump(&driver, is_idle, 0, WAIT_MS));
    ask(w, 2, &(struct ask){.n_prompt = 40, .max_tokens = 3, .prompt_seed = 1});
    same(&driver.requests[1], 0, driver_end(&driver, 2), 3);
}

Test(worker, test_router_that_restarts_gets_a_ready_worker)
{
    struct driver_worker *w = worker_start(0, NULL, NULL);

    ask(w, 1, &(struct ask){.n_prompt = 40, .max_tokens = 30000, .prompt_seed = 1});
    driver_tokens(&driver, 1, 3);
    driver_close(&driver);
    driver_open(&driver, endpoint);
    driver.epoch = 2000;
    w = driver_worker(&driver, "w0");
    ask(w, 1, &(struct ask){.n_prompt = 40, .max_tokens = 3, .prompt_seed = 1});
    cr_assert(driver_end(&driver, 1)->finished);
}

Test(worker, test_sigterm_finishes_what_runs_and_refuses_the_rest)
{
    struct driver_worker *w = worker_start(0, NULL, NULL);

    ask(w, 1, &(struct ask){.n_prompt = 40, .max_tokens = 5000, .prompt_seed = 1});
    driver_tokens(&driver, 1, 3);
    kill(workers[0].pid, SIGTERM);
    cr_assert(child_wait_line(&workers[0], "event=draining", WAIT_MS));
    ask(w, 2, &(struct ask){.n_prompt = 40, .max_tokens = 100, .prompt_seed = 1});
    cr_assert(driver_end(&driver, 2)->failed && driver.requests[2].kind == TIDEPOOL__ENGINE__FAILED__KIND__DRAINING);
    cr_assert(driver_end(&driver, 1)->finished && driver.requests[1].n_tokens == 5000);
    cr_assert_eq(child_wait(&workers[0], WAIT_MS), 0);
}

Test(worker, test_second_sigterm_ends_at_once)
{
    struct driver_worker *w = worker_start(0, NULL, NULL);

    ask(w, 1, &(struct ask){.n_prompt = 40, .max_tokens = 30000, .prompt_seed = 1});
    driver_tokens(&driver, 1, 3);
    kill(workers[0].pid, SIGTERM);
    cr_assert(child_wait_line(&workers[0], "event=draining", WAIT_MS));
    kill(workers[0].pid, SIGTERM);
    cr_assert_eq(child_wait(&workers[0], WAIT_MS), 1);
}

Test(worker, test_start_without_what_it_needs_is_refused)
{
    const char *missing[] = {program_path("tidepool-worker"), "--model", "no/such.gguf", "--router", endpoint, NULL};
    const char *context[] = {program_path("tidepool-worker"), "--model", model, "--router", endpoint, "--context", "99999", NULL};
    const char *selector[] = {program_path("tidepool-worker"), "--model", model, "--router", endpoint, "--selector", "best", NULL};
    const struct {
        const char *const *argv;
        const char *text;
    } cases[] = {{missing, "no/such.gguf"}, {context, "--context 99999"}, {selector, "--selector best"}};

    for (int i = 0; i < 3; i++) {
        child_start(&workers[0], cases[i].argv, 0);
        cr_assert_eq(child_wait(&workers[0], WAIT_MS), 2); /* its configuration is wrong: starting again would not help */
        cr_assert(strstr(workers[0].log, cases[i].text), "%s", workers[0].log);
        child_end(&workers[0]);
    }
}
