/* Real workers and a real store with a driver in the router's place. Most tests run a small random model; what must hold for a real one is in the suite
 * worker_model. */
#include "tests/system/worker_fixture.h"
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REAL_MODEL "models/SmolLM2-135M-Instruct.Q4_1.gguf"

static struct worker_fixture f;

static void store_start(void)
{
    worker_fixture_store(&f, "128M");
}

/* `option`: one more with its value, or NULL. */
static struct driver_worker *worker_start(int i, const char *option, const char *value)
{
    worker_fixture_start(&f, i, (const char *const[]){"--router", f.endpoint, option, value, NULL});
    return worker_fixture_ready(&f, i);
}

static void setup(void)
{
    worker_fixture_init(&f);
}

static void setup_real(void)
{
    setup();
    snprintf(f.model, sizeof f.model, "%s", REAL_MODEL);
}

static void teardown(void)
{
    worker_fixture_fini(&f);
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

static void answers_alone_and_together(void)
{
    struct driver_worker *w = worker_start(0, NULL, NULL);
    const struct driver_ask asks[3] = {
        {.n_prompt = 300, .max_tokens = 24, .prompt_seed = 1, .temperature = 0.8f, .seed = 5},
        {.n_prompt = 40, .max_tokens = 30, .prompt_seed = 2, .temperature = 0.8f, .seed = 6, .n_logprobs = 5},
        {.n_prompt = 140, .max_tokens = 12, .prompt_seed = 3},
    };

    for (uint64_t i = 0; i < 3; i++) {
        driver_ask(&f.driver, w, 1 + i, &asks[i]);
        struct driver_request *r = driver_end(&f.driver, 1 + i);
        cr_assert(r->finished, "%s", r->text);
        cr_assert_eq(r->n_tokens, asks[i].max_tokens);
        cr_assert_eq((int)r->completion_tokens, r->n_tokens);
        cr_assert_eq((int)r->prompt_tokens, asks[i].n_prompt);
        cr_assert_eq(r->reason, TIDEPOOL__ENGINE__FINISH_REASON__FINISH_LENGTH);
        cr_assert_eq(r->n_top, asks[i].n_logprobs);
    }
    for (uint64_t i = 0; i < 3; i++)
        driver_ask(&f.driver, w, 11 + i, &asks[i]);
    for (uint64_t i = 0; i < 3; i++)
        driver_expect_same(&f.driver.requests[1 + i], 0, driver_end(&f.driver, 11 + i), asks[i].max_tokens, 0);
    driver_idle(&f.driver, w);
    kill(f.workers[0].pid, SIGUSR1);
    cr_assert(child_wait_line(&f.workers[0], "event=memory", FIXTURE_WAIT_MS));
    cr_assert(child_wait_line(&f.workers[0], "tag=total", FIXTURE_WAIT_MS));
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
    struct driver_ask a = {.n_prompt = 700, .max_tokens = 16, .prompt_seed = 4, .temperature = 0.7f, .seed = 9};

    cr_assert(w0->has_store && w1->has_store);
    cr_assert_eq(memcmp(w0->store_uuid, w1->store_uuid, 16), 0);
    driver_ask(&f.driver, w0, 1, &a);
    struct driver_request *first = driver_end(&f.driver, 1);
    cr_assert(first->finished && first->cached_tokens == 0, "%s", first->text);
    driver_ask(&f.driver, w1, 2, &a);
    struct driver_request *second = driver_end(&f.driver, 2);
    cr_assert(second->finished, "%s", second->text);
    cr_assert_geq(second->cached_tokens, 512);
    driver_expect_same(first, 0, second, 16, 0);
    a.no_cache = true;
    driver_ask(&f.driver, w1, 3, &a);
    struct driver_request *third = driver_end(&f.driver, 3);
    cr_assert_eq(third->cached_tokens, 0);
    driver_expect_same(first, 0, third, 16, 0);
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
    struct driver_ask a = {.n_prompt = 400, .max_tokens = 30000, .prompt_seed = 5, .temperature = 0.7f, .seed = 10};
    enum { END = 60 };

    driver_ask(&f.driver, w1, 1, &(struct driver_ask){.n_prompt = 400, .max_tokens = END, .prompt_seed = 5, .temperature = 0.7f, .seed = 10, .no_cache = true});
    driver_end(&f.driver, 1);
    driver_ask(&f.driver, w0, 2, &a);
    driver_tokens(&f.driver, 2, 20);
    kill(f.workers[0].pid, SIGKILL);
    int n = f.driver.requests[2].n_tokens;
    driver_expect_same(&f.driver.requests[1], 0, &f.driver.requests[2], n < END ? n : END, 0);
    a.generated = f.driver.requests[2].tokens;
    a.n_generated = n < END - 5 ? n : END - 5;
    a.max_tokens = END;
    driver_ask(&f.driver, w1, 3, &a);
    struct driver_request *r = driver_end(&f.driver, 3);
    cr_assert(r->finished && r->first_index == a.n_generated && r->n_tokens == END - a.n_generated, "%s", r->text);
    cr_assert_geq(r->cached_tokens, 256);
    driver_expect_same(&f.driver.requests[1], a.n_generated, r, r->n_tokens, 0);
}

Test(worker, test_killed_store_does_not_change_an_answer)
{
    enum { N = 1000 };

    store_start();
    struct driver_worker *w = worker_start(0, NULL, NULL);
    struct driver_ask a = {.n_prompt = 400, .max_tokens = N, .prompt_seed = 6};
    uint8_t uuid[16];

    driver_ask(&f.driver, w, 1, &a);
    cr_assert_eq(driver_end(&f.driver, 1)->n_tokens, N);
    memcpy(uuid, w->store_uuid, sizeof uuid);
    driver_ask(&f.driver, w, 2, &a);
    driver_tokens(&f.driver, 2, 10);
    child_end(&f.store);
    struct driver_request *r = driver_end(&f.driver, 2);
    cr_assert(r->finished, "%s", r->text);
    driver_expect_same(&f.driver.requests[1], 0, r, N, 0);
    /* Without a store, and with the next one. */
    driver_ask(&f.driver, w, 3, &a);
    driver_expect_same(&f.driver.requests[1], 0, driver_end(&f.driver, 3), N, 0);
    cr_assert_eq(f.driver.requests[3].cached_tokens, 0);
    store_start();
    cr_assert(child_wait_line(&f.workers[0], "event=store_lost", FIXTURE_WAIT_MS));
    while (!w->has_store || memcmp(uuid, w->store_uuid, sizeof uuid) == 0)
        driver_pump(&f.driver, NULL, 0, 50);
    driver_ask(&f.driver, w, 4, &a);
    driver_end(&f.driver, 4);
    driver_ask(&f.driver, w, 5, &a);
    driver_expect_same(&f.driver.requests[1], 0, driver_end(&f.driver, 5), N, 0);
    cr_assert_geq(f.driver.requests[5].cached_tokens, 256);
}

Test(worker, test_cancelled_request_falls_silent)
{
    struct driver_worker *w = worker_start(0, NULL, NULL);
    int n;

    driver_ask(&f.driver, w, 1, &(struct driver_ask){.n_prompt = 60, .max_tokens = 30000, .prompt_seed = 7});
    driver_ask(&f.driver, w, 2, &(struct driver_ask){.n_prompt = 30000, .max_tokens = 10, .prompt_seed = 8});
    driver_tokens(&f.driver, 1, 5);
    driver_cancel(&f.driver, w, 1);
    driver_cancel(&f.driver, w, 2);
    driver_idle(&f.driver, w);
    n = f.driver.requests[1].n_tokens;
    cr_assert_lt(n, 30000);
    driver_pump(&f.driver, NULL, 0, 300);
    cr_assert_eq(f.driver.requests[1].n_tokens, n);
    cr_assert(!f.driver.requests[1].finished && !f.driver.requests[1].failed && !f.driver.requests[2].prefilled);
    driver_ask(&f.driver, w, 3, &(struct driver_ask){.n_prompt = 60, .max_tokens = 5, .prompt_seed = 7});
    driver_expect_same(&f.driver.requests[1], 0, driver_end(&f.driver, 3), 5, 0);
}

Test(worker, test_long_prefill_does_not_stop_a_stream)
{
    struct driver_worker *w = worker_start(0, NULL, NULL);
    int before;

    driver_ask(&f.driver, w, 1, &(struct driver_ask){.n_prompt = 40, .max_tokens = 30000, .prompt_seed = 1});
    driver_tokens(&f.driver, 1, 3);
    before = f.driver.requests[1].n_tokens;
    driver_ask(&f.driver, w, 2, &(struct driver_ask){.n_prompt = 6000, .max_tokens = 1, .prompt_seed = 2});
    driver_end(&f.driver, 2);
    cr_assert_gt(f.driver.requests[1].n_tokens - before, 50);
    driver_cancel(&f.driver, w, 1);
}

Test(worker, test_requests_that_cannot_be_served)
{
    struct driver_worker *w = worker_start(0, "--context", "512");
    Tidepool__Engine__Generate g = TIDEPOOL__ENGINE__GENERATE__INIT;

    cr_assert_eq(w->context_length, 512);
    driver_ask(&f.driver, w, 1, &(struct driver_ask){.n_prompt = 500, .max_tokens = 13});
    cr_assert(driver_end(&f.driver, 1)->failed && f.driver.requests[1].kind == TIDEPOOL__ENGINE__FAILED__KIND__TOO_LONG);
    cr_assert(strstr(f.driver.requests[1].text, "512"), "%s", f.driver.requests[1].text);
    g.epoch = f.driver.epoch;
    driver_send(&f.driver, w, ENGINE_GENERATE, 2, &g.base);
    cr_assert(driver_end(&f.driver, 2)->failed && f.driver.requests[2].kind == TIDEPOOL__ENGINE__FAILED__KIND__INVALID);
    driver_ask(&f.driver, w, 3, &(struct driver_ask){.n_prompt = 10, .max_tokens = 3, .prompt_logprobs = true});
    cr_assert(driver_end(&f.driver, 3)->finished && f.driver.requests[3].n_prompt_logprobs == 9);
    driver_ask(&f.driver, w, 4, &(struct driver_ask){.n_prompt = 10, .max_tokens = 3, .stop_id = f.driver.requests[3].tokens[0]});
    cr_assert(driver_end(&f.driver, 4)->finished && f.driver.requests[4].n_tokens == 1);
    cr_assert_eq(f.driver.requests[4].reason, TIDEPOOL__ENGINE__FINISH_REASON__FINISH_STOP);
    cr_assert_eq(f.driver.requests[4].stop_id, f.driver.requests[3].tokens[0]);
}

Test(worker, test_malformed_and_late_messages_are_dropped)
{
    struct driver_worker *w = worker_start(0, NULL, NULL);
    uint8_t junk[64] = {1, 2, 3}, header[FRAME_HEADER_BYTES];

    driver_send_raw(&f.driver, w, junk, sizeof junk, NULL, 0);
    driver_send_raw(&f.driver, w, junk, FRAME_HEADER_BYTES, junk, sizeof junk);
    frame_header_encode(&(struct frame_header){.type = ENGINE_GENERATE, .body_bytes = 64, .request_id = 1}, header);
    driver_send_raw(&f.driver, w, header, sizeof header, junk, 64);
    driver_send_raw(&f.driver, w, header, sizeof header, junk, 63);
    frame_header_encode(&(struct frame_header){.type = ENGINE_READY, .body_bytes = 0}, header);
    driver_send_raw(&f.driver, w, header, sizeof header, junk, 0);
    f.driver.epoch--; /* a request of a router that was */
    driver_ask(&f.driver, w, 2, &(struct driver_ask){.n_prompt = 10, .max_tokens = 1});
    f.driver.epoch++;
    driver_ask(&f.driver, w, 3, &(struct driver_ask){.n_prompt = 10, .max_tokens = 1});
    cr_assert(driver_end(&f.driver, 3)->finished);
    cr_assert(!f.driver.requests[1].failed && !f.driver.requests[2].prefilled && !f.driver.requests[2].failed);
}

static bool is_ready_again(struct driver *d, uint64_t n)
{
    return d->workers[0].n_ready > (int)n;
}

Test(worker, test_silent_router_loses_its_requests)
{
    struct driver_worker *w = worker_start(0, NULL, NULL);
    int n_ready;

    driver_ask(&f.driver, w, 1, &(struct driver_ask){.n_prompt = 40, .max_tokens = 30000, .prompt_seed = 1});
    driver_tokens(&f.driver, 1, 3);
    f.driver.silent = true;
    n_ready = w->n_ready;
    cr_assert(driver_pump(&f.driver, is_ready_again, (uint64_t)n_ready, FIXTURE_WAIT_MS));
    cr_assert(child_wait_line(&f.workers[0], "event=router_lost", FIXTURE_WAIT_MS));
    /* The next router, at the same place. */
    f.driver.epoch++;
    f.driver.silent = false;
    n_ready = w->n_ready;
    cr_assert(driver_pump(&f.driver, is_ready_again, (uint64_t)n_ready, FIXTURE_WAIT_MS));
    driver_idle(&f.driver, w);
    driver_ask(&f.driver, w, 2, &(struct driver_ask){.n_prompt = 40, .max_tokens = 3, .prompt_seed = 1});
    driver_expect_same(&f.driver.requests[1], 0, driver_end(&f.driver, 2), 3, 0);
}

Test(worker, test_router_that_restarts_gets_a_ready_worker)
{
    struct driver_worker *w = worker_start(0, NULL, NULL);

    driver_ask(&f.driver, w, 1, &(struct driver_ask){.n_prompt = 40, .max_tokens = 30000, .prompt_seed = 1});
    driver_tokens(&f.driver, 1, 3);
    driver_close(&f.driver);
    driver_open(&f.driver, f.endpoint);
    f.driver.epoch = 2000;
    w = worker_fixture_ready(&f, 0);
    driver_ask(&f.driver, w, 1, &(struct driver_ask){.n_prompt = 40, .max_tokens = 3, .prompt_seed = 1});
    cr_assert(driver_end(&f.driver, 1)->finished);
}

Test(worker, test_sigterm_finishes_what_runs_and_refuses_the_rest)
{
    struct driver_worker *w = worker_start(0, NULL, NULL);

    driver_ask(&f.driver, w, 1, &(struct driver_ask){.n_prompt = 40, .max_tokens = 5000, .prompt_seed = 1});
    driver_tokens(&f.driver, 1, 3);
    kill(f.workers[0].pid, SIGTERM);
    cr_assert(child_wait_line(&f.workers[0], "event=draining", FIXTURE_WAIT_MS));
    driver_ask(&f.driver, w, 2, &(struct driver_ask){.n_prompt = 40, .max_tokens = 100, .prompt_seed = 1});
    cr_assert(driver_end(&f.driver, 2)->failed && f.driver.requests[2].kind == TIDEPOOL__ENGINE__FAILED__KIND__DRAINING);
    cr_assert(driver_end(&f.driver, 1)->finished && f.driver.requests[1].n_tokens == 5000);
    cr_assert_eq(child_wait(&f.workers[0], FIXTURE_WAIT_MS), 0);
}

Test(worker, test_second_sigterm_ends_at_once)
{
    struct driver_worker *w = worker_start(0, NULL, NULL);

    driver_ask(&f.driver, w, 1, &(struct driver_ask){.n_prompt = 40, .max_tokens = 30000, .prompt_seed = 1});
    driver_tokens(&f.driver, 1, 3);
    kill(f.workers[0].pid, SIGTERM);
    cr_assert(child_wait_line(&f.workers[0], "event=draining", FIXTURE_WAIT_MS));
    kill(f.workers[0].pid, SIGTERM);
    cr_assert_eq(child_wait(&f.workers[0], FIXTURE_WAIT_MS), 1);
}

Test(worker, test_start_without_what_it_needs_is_refused)
{
    const char *missing[] = {program_path("tidepool-worker"), "--model", "no/such.gguf", "--router", f.endpoint, NULL};
    const char *context[] = {program_path("tidepool-worker"), "--model", f.model, "--router", f.endpoint, "--context", "99999", NULL};
    const char *selector[] = {program_path("tidepool-worker"), "--model", f.model, "--router", f.endpoint, "--selector", "best", NULL};
    const struct {
        const char *const *argv;
        const char *text;
    } cases[] = {{missing, "no/such.gguf"}, {context, "--context 99999"}, {selector, "--selector (command line): the value \"best\""}};

    for (int i = 0; i < 3; i++) {
        child_start(&f.workers[0], cases[i].argv, 0);
        cr_assert_eq(child_wait(&f.workers[0], FIXTURE_WAIT_MS), 2); /* its configuration is wrong: starting again would not help */
        cr_assert(strstr(f.workers[0].log, cases[i].text), "%s", f.workers[0].log);
        child_end(&f.workers[0]);
    }
}
