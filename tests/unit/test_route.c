/* The routing core while all is well with its workers: answers, the queue, and messages that are wrong. */
#include "proto/base/clock.h"
#include "tests/unit/route_fixture.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

TestSuite(route, .init = route_fixture_open, .fini = route_fixture_close, .timeout = 60);

/* -- the ordinary way -- */

Test(route, test_route_delivers_tokens_and_the_end)
{
    struct fake_worker w;
    struct client c;
    fake_start(&w, "w0", 1);
    client_submit(&c);
    UNTIL(w.n_generate == 1);
    cr_assert_eq(w.n_prompt, 10);
    cr_assert_eq(w.seed, 42);
    cr_assert_eq(w.max_tokens, 6);
    cr_assert_eq(w.n_stop_ids, 1, "the model's own end is added");
    fake_prefilled(&w, 4);
    fake_tokens(&w, 0, 11, 12);
    fake_tokens(&w, 2, 13, EOS);
    fake_finished(&w, 4);
    UNTIL(c.n_finished == 1);
    cr_assert_eq(c.n_prefilled, 1);
    cr_assert_eq(c.cached, 4);
    cr_assert_eq(c.n_tokens, 4);
    cr_assert(c.stopped);
    cr_assert_eq(route_n_running(route), 0);
    fake_close(&w);
}

Test(route, test_route_without_max_tokens_gives_the_rest_of_the_context)
{
    struct fake_worker w;
    struct client c;
    fake_start(&w, "w0", 1);
    cr_assert_eq(client_submit_n(&c, 10, 0), 0);
    UNTIL(w.n_generate == 1);
    cr_assert_eq(w.max_tokens, CONTEXT - 10);
    route_cancel(c.request);
    UNTIL(w.n_cancel == 1);
    cr_assert_eq(w.cancelled_id, w.id);
    fake_close(&w);
}

Test(route, test_route_refuses_what_no_context_holds)
{
    struct fake_worker w;
    struct client c;
    fake_start(&w, "w0", 1);
    cr_assert_eq(client_submit_n(&c, 990, 11), -EMSGSIZE);
    cr_assert(strstr(c.text, "at most 10 fit"), "%s", c.text);
    cr_assert_eq(client_submit_n(&c, 1000, 0), -EMSGSIZE);
    cr_assert_eq(client_submit_n(&c, 990, 10), 0);
    route_cancel(c.request);
    fake_close(&w);
}

Test(route, test_route_takes_turns_among_idle_workers)
{
    struct fake_worker w[2];
    struct client c;
    fake_start(&w[0], "w0", 1);
    fake_start(&w[1], "w1", 1);
    for (int i = 0; i < 4; i++) {
        client_submit(&c);
        UNTIL(w[0].n_generate + w[1].n_generate == i + 1);
        route_cancel(c.request);
        cr_assert_leq(abs(w[0].n_generate - w[1].n_generate), 1);
    }
    cr_assert_eq(w[0].n_generate, 2);
    cr_assert_eq(w[1].n_generate, 2);
    fake_close(&w[0]);
    fake_close(&w[1]);
}

/* -- the queue -- */

Test(route, test_route_queues_beyond_what_workers_take_and_refuses_beyond_the_limit)
{
    struct fake_worker w;
    struct client c[8];
    fake_start(&w, "w0", 1);
    for (int i = 0; i < 2; i++)
        client_submit(&c[i]);
    UNTIL(w.n_generate == 2);
    for (int i = 2; i < 6; i++)
        client_submit(&c[i]);
    cr_assert_eq(route_n_queued(route), 4);
    cr_assert_eq(client_submit_n(&c[6], 10, 6), -EBUSY);
    cr_assert_eq(route_counters(route)->queue_rejected, 1);
    route_cancel(c[0].request);
    UNTIL(w.n_generate == 3);
    cr_assert_eq(route_n_queued(route), 3);
    for (int i = 1; i < 6; i++)
        route_cancel(c[i].request);
    cr_assert_eq(route_n_queued(route), 0);
    cr_assert_eq(route_n_running(route), 0);
    fake_close(&w);
}

Test(route, test_route_limits_the_queue_by_tokens)
{
    struct client c[3];
    struct route_config config = route_defaults();
    config.queue_tokens_max = 1000;
    route_restart(config);
    cr_assert_eq(client_submit_n(&c[0], 900, 1), 0, "alone, a prompt of any length may wait");
    cr_assert_eq(client_submit_n(&c[1], 101, 1), -EBUSY);
    cr_assert_eq(client_submit_n(&c[2], 100, 1), 0);
    route_cancel(c[0].request);
    route_cancel(c[2].request);
}

Test(route, test_route_fails_a_request_when_no_worker_comes)
{
    struct client c;
    struct route_config config = route_defaults();
    config.worker_wait_us = 100000;
    route_restart(config);
    client_submit(&c);
    UNTIL(c.n_failed == 1);
    cr_assert_eq(c.failure, ROUTE_NO_WORKER);
}

Test(route, test_route_waits_for_a_worker_that_comes_later)
{
    struct fake_worker w;
    struct client c;
    client_submit(&c);
    fake_start(&w, "w0", 1);
    UNTIL(w.n_generate == 1);
    route_cancel(c.request);
    fake_close(&w);
}

/* -- messages that are wrong -- */

Test(route, test_route_drops_repeats_and_retries_after_a_gap)
{
    struct fake_worker w;
    struct client c;
    fake_start(&w, "w0", 1);
    client_submit(&c);
    UNTIL(w.n_generate == 1);
    fake_tokens(&w, 0, 11, 12);
    fake_tokens(&w, 0, 11, 12); /* again */
    fake_tokens(&w, 1, 12, 13); /* overlapping */
    UNTIL(c.n_tokens == 3);
    uint64_t old_id = w.id;
    fake_tokens(&w, 4, 15, 16); /* one is missing */
    UNTIL(w.n_generate == 2);
    cr_assert_eq(w.cancelled_id, old_id);
    cr_assert_eq(w.n_generated, 3);
    cr_assert_arr_eq(c.tokens, ((uint32_t[]){11, 12, 13}), 3 * sizeof(uint32_t));
    route_cancel(c.request);
    fake_close(&w);
}

Test(route, test_route_drops_messages_of_another_epoch_and_unknown_requests)
{
    struct fake_worker w;
    struct client c;
    fake_start(&w, "w0", 1);
    client_submit(&c);
    UNTIL(w.n_generate == 1);
    fake_tokens_at(&w, w.epoch + 1, 0, (const uint32_t[]){50, 51}, 2);
    w.id++;
    fake_tokens(&w, 0, 60, 61);
    w.id--;
    fake_tokens(&w, 0, 11, 12);
    UNTIL(c.n_tokens > 0);
    cr_assert_eq(c.tokens[0], 11);
    cr_assert_eq(route_counters(route)->dropped_late, 2);
    route_cancel(c.request);
    fake_close(&w);
}

Test(route, test_route_never_delivers_more_than_max_tokens_or_behind_the_end)
{
    struct fake_worker w;
    struct client c;
    fake_start(&w, "w0", 1);
    cr_assert_eq(client_submit_n(&c, 10, 3), 0);
    UNTIL(w.n_generate == 1);
    fake_tokens(&w, 0, 11, 12);
    fake_tokens(&w, 2, 13, 14);
    fake_finished(&w, 3);
    UNTIL(c.n_finished == 1);
    cr_assert_eq(c.n_tokens, 3);
    client_submit(&c);
    UNTIL(w.n_generate == 2);
    fake_tokens(&w, 0, EOS, 14);
    fake_finished(&w, 1);
    UNTIL(c.n_finished == 1);
    cr_assert_eq(c.n_tokens, 1);
    cr_assert(c.stopped);
    fake_close(&w);
}

Test(route, test_route_drops_a_worker_that_talks_nonsense)
{
    struct fake_worker w;
    fake_start(&w, "w0", 1);
    for (int i = 0; i < 100; i++) {
        uint8_t head[FRAME_HEADER_BYTES];
        frame_header_encode(&(struct frame_header){.type = ENGINE_TOKENS, .body_bytes = 3, .request_id = 1}, head);
        zmq_send(w.socket, head, sizeof(head), ZMQ_SNDMORE);
        zmq_send(w.socket, "\xff\xff\xff", 3, 0);
        zmq_send(w.socket, "one part", 8, 0);
    }
    UNTIL(route_n_ready(route) == 0);
    cr_assert_geq(route_counters(route)->malformed, 100);
    fake_close(&w);
}

Test(route, test_route_refuses_a_second_worker_of_a_name_that_is_alive)
{
    struct fake_worker a, b;
    fake_start(&a, "w0", 1);
    fake_connect(&b, "w0", 2);
    uint8_t uuid[16] = {2}, fingerprint[32] = {0};
    Tidepool__Engine__Ready ready = TIDEPOOL__ENGINE__READY__INIT;
    ready.name = b.name;
    ready.boot_uuid = (ProtobufCBinaryData){16, uuid};
    ready.fingerprint = (ProtobufCBinaryData){32, fingerprint};
    ready.context_length = CONTEXT;
    ready.vocab_size = 100;
    ready.max_running = 1;
    fake_send(&b, ENGINE_READY, 0, &ready.base);
    int beats = a.n_beats;
    UNTIL(a.n_beats > beats + 1);
    cr_assert_eq(b.n_acks, 0);
    cr_assert_eq(route_n_workers(route), 1);
    fake_close(&a); /* it was the old one after all: the next Ready is taken */
    uint64_t since = 0;
    UNTIL((clock_now_us() - since > 20000 ? (since = clock_now_us(), fake_send(&b, ENGINE_READY, 0, &ready.base), 0) : 0) || b.n_acks > 0);
    cr_assert_eq(route_n_workers(route), 1, "the old entry is gone");
    fake_close(&b);
}

Test(route, test_route_refuses_a_worker_with_a_smaller_vocabulary)
{
    struct fake_worker w;
    fake_connect(&w, "w0", 1);
    uint8_t uuid[16] = {2}, fingerprint[32] = {0};
    Tidepool__Engine__Ready ready = TIDEPOOL__ENGINE__READY__INIT;
    ready.name = w.name;
    ready.boot_uuid = (ProtobufCBinaryData){16, uuid};
    ready.fingerprint = (ProtobufCBinaryData){32, fingerprint};
    ready.context_length = CONTEXT;
    ready.vocab_size = 99;
    ready.max_running = 1;
    fake_send(&w, ENGINE_READY, 0, &ready.base);
    UNTIL(route_counters(route)->malformed == 1);
    cr_assert_eq(route_n_workers(route), 0);
    fake_close(&w);
}
