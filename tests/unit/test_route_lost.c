/* Workers that die, fall silent, fail or stand still: requests go on elsewhere, without gap or repeat. */
#include "proto/base/clock.h"
#include "tests/unit/route_fixture.h"
#include <criterion/criterion.h>

TestSuite(route_lost, .init = route_fixture_open, .fini = route_fixture_close, .timeout = 60);

/* Turns the loop once; now and then the worker says that it is alive. */
static void live_on(struct fake_worker *w)
{
    static uint64_t last_us;
    if (clock_now_us() - last_us > 20000) {
        last_us = clock_now_us();
        fake_beat(w, 1, false);
    }
    loop_poll(loop);
}

/* Two workers and a request that one of them, which is returned, has. */
static struct fake_worker *start_two(struct fake_worker w[2], struct client *c, struct fake_worker **ret_other)
{
    fake_start(&w[0], "w0", 1);
    fake_start(&w[1], "w1", 1);
    client_submit(c);
    UNTIL(w[0].n_generate + w[1].n_generate == 1);
    const int has = w[0].n_generate ? 0 : 1;
    *ret_other = &w[1 - has];
    return &w[has];
}

Test(route_lost, test_route_continues_on_another_worker_without_gap_or_repeat)
{
    struct client c;
    struct fake_worker w[2], *second, *first = start_two(w, &c, &second);
    fake_prefilled(first, 0);
    fake_tokens(first, 0, 11, 12);
    UNTIL(c.n_tokens == 2);
    uint64_t old_id = first->id;
    fake_close(first); /* noticed by the next heartbeat: no route to it */
    while (second->n_generate == 0)
        live_on(second);
    cr_assert_eq(second->n_generated, 2);
    cr_assert_eq(second->generated[0], 11);
    cr_assert_eq(second->generated[1], 12);
    cr_assert_eq(second->seed, 42);
    cr_assert_eq(second->max_tokens, 6, "in all, those generated included");
    cr_assert_neq(second->id, old_id, "a wire id is used once");
    fake_prefilled(second, 0);
    fake_tokens(second, 2, 13, EOS);
    fake_finished(second, 4);
    UNTIL(c.n_finished == 1);
    cr_assert_eq(c.n_prefilled, 1, "told once");
    cr_assert_eq(c.retries, 1);
    cr_assert_arr_eq(c.tokens, ((uint32_t[]){11, 12, 13, EOS}), 4 * sizeof(uint32_t));
    fake_close(second);
}

Test(route_lost, test_route_finishes_by_itself_when_only_the_last_word_was_missing)
{
    struct fake_worker w;
    struct client c;
    fake_start(&w, "w0", 1);
    cr_assert_eq(client_submit_n(&c, 10, 2), 0);
    UNTIL(w.n_generate == 1);
    fake_prefilled(&w, 0);
    fake_tokens(&w, 0, 11, 12);
    UNTIL(c.n_tokens == 2);
    fake_close(&w);
    UNTIL(c.n_finished == 1);
    cr_assert_not(c.stopped);
}

Test(route_lost, test_route_gives_up_after_the_last_retry)
{
    struct fake_worker w;
    struct client c;
    fake_start(&w, "w0", 1);
    client_submit(&c);
    for (int i = 1; i <= 3; i++) {
        UNTIL(w.n_generate == i);
        fake_failed(&w, TIDEPOOL__ENGINE__FAILED__KIND__INTERNAL, "engine trouble");
    }
    UNTIL(c.n_failed == 1);
    cr_assert_eq(c.failure, ROUTE_LOST);
    cr_assert_str_eq(c.text, "engine trouble");
    fake_close(&w);
}

Test(route_lost, test_route_does_not_retry_what_is_the_requests_fault)
{
    struct fake_worker w;
    struct client c;
    fake_start(&w, "w0", 1);
    client_submit(&c);
    UNTIL(w.n_generate == 1);
    fake_failed(&w, TIDEPOOL__ENGINE__FAILED__KIND__TOO_LONG, "does not fit");
    UNTIL(c.n_failed == 1);
    cr_assert_eq(c.failure, ROUTE_TOO_LONG);
    cr_assert_eq(w.n_generate, 1);
    fake_close(&w);
}

Test(route_lost, test_route_takes_a_silent_worker_for_lost_and_drops_its_late_words)
{
    struct client c;
    struct fake_worker w[2], *second, *first = start_two(w, &c, &second);
    fake_tokens(first, 0, 11, 12);
    UNTIL(c.n_tokens == 2);
    while (second->n_generate == 0) /* `first` is stopped: connected, but silent */
        live_on(second);
    cr_assert_eq(route_n_ready(route), 1);
    uint64_t dropped = route_counters(route)->dropped_late;
    fake_tokens(first, 2, 90, 91); /* it wakes up */
    UNTIL(route_counters(route)->dropped_late > dropped);
    cr_assert_eq(c.n_tokens, 2);
    fake_tokens(second, 2, 13, 14);
    UNTIL(c.n_tokens == 4);
    cr_assert_eq(c.tokens[2], 13);
    fake_ready_with(first, NULL); /* having cancelled everything, it says Ready and is back */
    cr_assert_eq(route_n_ready(route), 2);
    route_cancel(c.request);
    fake_close(first);
    fake_close(second);
}

Test(route_lost, test_route_moves_requests_off_a_worker_without_progress)
{
    struct client c;
    struct fake_worker w[2], *second, *first = start_two(w, &c, &second);
    uint64_t beat_us = clock_now_us();
    while (second->n_generate == 0) { /* beats, but its counter stands still */
        if (clock_now_us() - beat_us > 20000) {
            fake_beat(first, 7, true);
            fake_beat(second, 1, false);
            beat_us = clock_now_us();
        }
        loop_poll(loop);
    }
    UNTIL(first->n_cancel == 1);
    cr_assert_eq(route_counters(route)->unhealthy, 1);
    cr_assert_eq(route_n_ready(route), 1);
    fake_beat(first, 8, true);
    UNTIL(route_n_ready(route) == 2);
    route_cancel(c.request);
    fake_close(first);
    fake_close(second);
}
