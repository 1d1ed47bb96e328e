#include "tests/unit/sched_run.h"
#include <criterion/criterion.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

static struct fixture f;
static struct run run;

static void setup(void)
{
    cr_assert(fixture_open(&f, (struct fixture_params){0}));
    struct engine_config config = fixture_config();
    run_open(&run, &f, &config, 8, 4);
}

static void teardown(void)
{
    run_close(&run);
    fixture_close(&f);
}

TestSuite(scheduler, .init = setup, .fini = teardown, .timeout = 120);

static bool same_tokens(const struct run_job *a, int from, const struct run_job *b, int n)
{
    for (int i = 0; i < n; i++) {
        if (a->tokens[from + i].token != b->tokens[i].token || a->tokens[from + i].logprob != b->tokens[i].logprob)
            return false;
    }
    return true;
}

static struct job_params sampled(uint64_t id, uint64_t prompt, int n_prompt, int max_tokens)
{
    struct job_params p = run_params(prompt, n_prompt, max_tokens);

    p.id = id;
    p.sampling.temperature = 8; /* the small model is sure of itself: colder, every draw would be its first choice */
    p.sampling.top_p = 0.95f;
    p.sampling.seed = prompt * 77;
    return p;
}

Test(scheduler, test_answer_does_not_depend_on_company)
{
    for (uint64_t i = 0; i < 4; i++) {
        run_submit(&run, sampled(i, i, 150 + 40 * (int)i, 40));
        run_all(&run);
    }
    for (uint64_t i = 0; i < 4; i++)
        run_submit(&run, sampled(10 + i, i, 150 + 40 * (int)i, 40));
    run_all(&run);
    for (int i = 0; i < 4; i++) {
        cr_assert(run.jobs[i].finished && run.jobs[10 + i].finished);
        cr_assert_eq(run.jobs[10 + i].n_tokens, 40);
        cr_assert(same_tokens(&run.jobs[i], 0, &run.jobs[10 + i], 40), "job %d", i);
    }
    /* And it is drawn, not the first choice each time. */
    struct job_params greedy = run_params(0, 150, 40);
    greedy.id = 20;
    run_submit(&run, greedy);
    run_all(&run);
    cr_assert_not(same_tokens(&run.jobs[0], 0, &run.jobs[20], 40));
}

Test(scheduler, test_generated_tokens_are_replayed_and_continued)
{
    enum { N = 60 };
    const int cuts[] = {1, 7, N - 1};
    int32_t answer[N];

    run_submit(&run, sampled(0, 5, 200, N));
    run_all(&run);
    for (int i = 0; i < N; i++)
        answer[i] = run.jobs[0].tokens[i].token;
    for (uint64_t c = 0; c < 3; c++) {
        struct job_params p = sampled(1 + c, 5, 200, N);
        p.n_generated = cuts[c];
        p.generated = malloc(sizeof answer);
        memcpy(p.generated, answer, sizeof answer);
        run_submit(&run, p);
    }
    run_all(&run);
    for (int c = 0; c < 3; c++) {
        const struct run_job *job = &run.jobs[1 + c];
        cr_assert(job->finished && job->first_index == cuts[c] && job->n_tokens == N - cuts[c]);
        cr_assert_eq(job->finish.n_tokens, N);
        cr_assert(same_tokens(&run.jobs[0], cuts[c], job, N - cuts[c]), "cut at %d", cuts[c]);
    }
}

Test(scheduler, test_complete_replay_ends_without_a_token)
{
    struct job_params p = run_params(1, 100, 3);

    p.n_generated = 3;
    p.generated = calloc(3, sizeof *p.generated);
    run_submit(&run, p);
    run_all(&run);
    cr_assert(run.jobs[1].finished && run.jobs[1].n_tokens == 0 && run.jobs[1].finish.end == JOB_END_LENGTH);
}

Test(scheduler, test_stop_id_ends_but_not_before_min_tokens)
{
    struct job_params p;
    int32_t stop;
    int first = 0;

    run_submit(&run, run_params(0, 120, 30));
    run_all(&run);
    cr_assert(run.jobs[0].finish.end == JOB_END_LENGTH && run.jobs[0].n_tokens == 30);
    stop = run.jobs[0].tokens[10].token;
    while (run.jobs[0].tokens[first].token != stop)
        first++;

    p = run_params(0, 120, 30);
    p.id = 1;
    p.stop_ids = malloc(sizeof stop);
    p.stop_ids[0] = stop;
    p.n_stop_ids = 1;
    run_submit(&run, p);
    run_all(&run);
    cr_assert(run.jobs[1].finish.end == JOB_END_STOP && run.jobs[1].finish.stop_id == stop);
    cr_assert_eq(run.jobs[1].n_tokens, first + 1);
    cr_assert_eq(run.jobs[1].tokens[first].token, stop);

    p = run_params(0, 120, 30);
    p.id = 2;
    p.stop_ids = malloc(sizeof stop);
    p.stop_ids[0] = stop;
    p.n_stop_ids = 1;
    p.min_tokens = first + 1;
    run_submit(&run, p);
    run_all(&run);
    cr_assert_gt(run.jobs[2].n_tokens, first + 1);
    for (int i = 0; i <= first; i++)
        cr_assert_neq(run.jobs[2].tokens[i].token, stop);
}

Test(scheduler, test_penalties_see_prompt_and_answer)
{
    struct job_params p = run_params(3, 150, 40);
    bool seen[TINY_VOCAB] = {false};

    for (int i = 0; i < p.n_prompt; i++)
        seen[p.prompt[i]] = true;
    int unseen = 0;
    for (int t = 0; t < TINY_VOCAB; t++)
        unseen += !seen[t];
    cr_assert_gt(unseen, 5);
    p.max_tokens = unseen < 20 ? unseen : 20;
    p.sampling.presence_penalty = 100; /* of tokens in the answer */
    p.sampling.repetition_penalty = 100;
    run_submit(&run, p);
    run_all(&run);
    for (int i = 0; i < run.jobs[3].n_tokens; i++) {
        for (int j = 0; j < i; j++)
            cr_assert_neq(run.jobs[3].tokens[i].token, run.jobs[3].tokens[j].token);
    }
}

Test(scheduler, test_logprobs_come_with_tokens_and_prompt)
{
    struct job_params p = run_params(4, 140, 5);

    p.sampling.n_top = 3;
    p.prompt_logprobs = true;
    run_submit(&run, p);
    run_all(&run);
    cr_assert_not_null(run.jobs[4].prefill.prompt_logprobs);
    for (int i = 0; i < 5; i++) {
        const struct sample_result *t = &run.jobs[4].tokens[i];
        cr_assert_eq(t->n_top, 3);
        cr_assert_eq(t->top[0].token, t->token); /* greedy */
        cr_assert(t->top[0].logprob >= t->top[1].logprob && t->logprob == t->top[0].logprob && t->logprob <= 0);
    }
}

Test(scheduler, test_running_streams_go_on_during_a_long_prefill)
{
    int before;

    run_submit(&run, run_params(1, 64, 400));
    while (run.jobs[1].n_tokens < 5)
        run_step(&run, 1);
    run_submit(&run, run_params(2, 2000, 4));
    run_step(&run, 1);
    before = run.jobs[1].n_tokens;
    int units = 0;
    while (!run.jobs[2].prefilled) {
        run_step(&run, 1);
        units++;
    }
    cr_assert_gt(units, 20);
    cr_assert_eq(run.jobs[1].n_tokens - before, units); /* one token a unit */
}

Test(scheduler, test_short_prompts_pass_a_long_one_and_equals_keep_their_order)
{
    run_submit(&run, run_params(1, 3000, 2));
    run_step(&run, 2);
    run_submit(&run, run_params(2, 2900, 2)); /* not short beside it: waits */
    run_submit(&run, run_params(3, 100, 2));
    run_submit(&run, run_params(4, 120, 2));
    run_all(&run);
    for (int i = 1; i <= 4; i++)
        cr_assert(run.jobs[i].finished);
    cr_assert_lt(run.jobs[3].order, run.jobs[4].order);
    cr_assert_lt(run.jobs[4].order, run.jobs[1].order);
    cr_assert_lt(run.jobs[1].order, run.jobs[2].order);
}

Test(scheduler, test_cancel_at_every_stage_gives_all_back)
{
    struct device_memory_stats idle, now;

    f.dev->memory_stats(f.device, &idle);
    for (uint64_t stage = 0; stage < 3; stage++) {
        run_submit(&run, run_params(stage, 500, 50));
        run_step(&run, stage == 0 ? 0 : stage == 1 ? 3 : 60);
        cr_assert_eq(run.jobs[stage].n_tokens > 0, stage == 2);
        cr_assert(scheduler_cancel(run.scheduler, stage));
        cr_assert_not(scheduler_cancel(run.scheduler, stage));
        cr_assert_not(scheduler_has_work(run.scheduler));
        f.dev->memory_stats(f.device, &now);
        cr_assert_eq(now.total_now, idle.total_now);
        cr_assert_not(run.jobs[stage].finished || run.jobs[stage].failed);
    }
    /* Others are not touched. */
    run_submit(&run, run_params(10, 500, 20));
    run_submit(&run, run_params(11, 100, 20));
    run_step(&run, 30);
    cr_assert(scheduler_cancel(run.scheduler, 10));
    run_all(&run);
    cr_assert(run.jobs[11].finished && run.jobs[11].n_tokens == 20);
    run_submit(&run, run_params(12, 300, 20));
    run_submit(&run, run_params(13, 300, 20));
    run_step(&run, 5);
    scheduler_cancel_all(run.scheduler);
    cr_assert_not(scheduler_has_work(run.scheduler));
}

Test(scheduler, test_queue_has_a_limit)
{
    struct scheduler_load load;

    for (uint64_t i = 0; i < 13; i++)
        run_submit(&run, run_params(i, 100, 2));
    /* 8 can start, 4 may wait. */
    scheduler_load(run.scheduler, &load);
    cr_assert(load.n_waiting == 12 && load.waiting_tokens == 1200);
    cr_assert(run.jobs[12].failed && run.jobs[12].failure == JOB_FAILED_OVERLOADED);
    run_all(&run);
    for (int i = 0; i < 12; i++)
        cr_assert(run.jobs[i].finished);
    scheduler_load(run.scheduler, &load);
    cr_assert(load.n_waiting + load.n_prefilling + load.n_running == 0 && load.progress > 12);
}

Test(scheduler, test_drain_finishes_what_runs)
{
    run_submit(&run, run_params(1, 100, 30));
    while (!run.jobs[1].prefilled)
        run_step(&run, 1);
    run_submit(&run, run_params(2, 2000, 30));
    run_step(&run, 1);
    run_submit(&run, run_params(3, 2000, 30));
    scheduler_drain(run.scheduler);
    run_submit(&run, run_params(4, 100, 30));
    cr_assert(run.jobs[3].failed && run.jobs[3].failure == JOB_FAILED_DRAINING);
    cr_assert(run.jobs[4].failed && run.jobs[4].failure == JOB_FAILED_DRAINING);
    run_all(&run);
    cr_assert(run.jobs[1].finished && run.jobs[1].n_tokens == 30);
    cr_assert(run.jobs[2].finished && run.jobs[2].n_tokens == 30);
}

/* A device that holds one large request at a time. */
Test(scheduler, test_request_waits_for_memory_and_nobody_overtakes_it)
{
    struct engine_config config = fixture_config();
    static struct run small;
    size_t one = engine_sequence_bytes(run.engine, 1000, 50), workspace;
    struct device_memory_stats idle;

    f.dev->memory_stats(f.device, &idle);
    workspace = idle.total_now - f.at_start.total_now;
    config.memory_limit = workspace + one + one / 2;
    run_open(&small, &f, &config, 8, 8);
    run_submit(&small, run_params(1, 1000, 50));
    while (!small.jobs[1].prefilled)
        run_step(&small, 1);
    run_submit(&small, run_params(2, 1000, 50));
    run_submit(&small, run_params(3, 60, 5));
    run_all(&small);
    cr_assert(small.jobs[1].finished && small.jobs[2].finished && small.jobs[3].finished);
    cr_assert_lt(small.jobs[1].order, small.jobs[2].order);
    run_submit(&small, run_params(4, 4000, 50));
    cr_assert(small.jobs[4].failed && small.jobs[4].failure == JOB_FAILED_TOO_LONG, "%s", small.jobs[4].text);
    scheduler_free(small.scheduler);
    engine_free(small.engine);
}

Test(scheduler, test_random_arrivals_and_cancellations_end_exactly_once)
{
    uint64_t state = 11, id = 0;

    while (id < RUN_JOBS_MAX) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        uint32_t r = (uint32_t)(state >> 33);
        if (r % 4 == 0) {
            run_submit(&run, run_params(id++, 1 + (int)(r >> 4) % 700, 1 + (int)(r >> 14) % 30));
        } else if (r % 16 == 1 && id) {
            uint64_t victim = (r >> 8) % id;
            bool ended = run.jobs[victim].finished || run.jobs[victim].failed;
            cr_assert(!(scheduler_cancel(run.scheduler, victim) && ended));
        } else if (scheduler_has_work(run.scheduler)) {
            run_step(&run, 1);
        }
    }
    run_all(&run);
}

/* One of five kinds, each with another prompt: a long one, a short one with penalties and log-probabilities, and those that are cancelled at their prompt and at their answer, and one
 * that is refused. */
static void run_one(uint64_t i)
{
    const uint64_t id = i % 5;
    struct job_params p = sampled(id, i, id == 1 ? 30 : 400, id == 4 ? INT32_MAX : 20);

    memset(&run.jobs[id], 0, sizeof run.jobs[id]);
    p.prompt_logprobs = id == 1;
    p.sampling.repetition_penalty = id == 1 ? 1.1f : 1;
    run_submit(&run, p);
    run_step(&run, id == 2 ? 3 : id == 3 ? 30 : 0);
    if (id == 2 || id == 3)
        cr_assert(scheduler_cancel(run.scheduler, id));
    run_all(&run);
    cr_assert(id < 2 ? run.jobs[id].finished : id == 4 ? run.jobs[id].failed : !run.jobs[id].finished);
}

/* Nothing of a request stays behind: not a byte of the device and not one of the heap. The allocator counts what it caches of freed pieces as used: the tests are run
 * without these caches (GLIBC_TUNABLES in CMakeLists.txt); by hand there are up to a few KiB. */
Test(scheduler, test_memory_after_150_jobs_is_that_after_10)
{
    const size_t cached = getenv("GLIBC_TUNABLES") ? 0 : 16 << 10;
    struct device_memory_stats early = {0}, late;
    struct mallinfo2 heap_early = {0}, heap_late;

    for (uint64_t i = 0; i < 150; i++) {
        run_one(i);
        if (i == 9) {
            f.dev->memory_stats(f.device, &early);
            heap_early = mallinfo2();
        }
    }
    f.dev->memory_stats(f.device, &late);
    heap_late = mallinfo2();
    cr_expect(memcmp(&early, &late, sizeof early) == 0);
    cr_expect(heap_late.uordblks + heap_late.hblkhd <= heap_early.uordblks + heap_early.hblkhd + cached, "%zu and %zu bytes, then %zu and %zu",
              heap_early.uordblks, heap_early.hblkhd, heap_late.uordblks, heap_late.hblkhd);
}

/* ---- numbers that are none ---- */

enum { POISON = 7 };

static struct job_params clean(uint64_t id, int n_prompt, int max_tokens)
{
    struct job_params p = run_params(id, n_prompt, max_tokens);
    for (int i = 0; i < n_prompt; i++)
        p.prompt[i] += p.prompt[i] == POISON;
    return p;
}

/* A prompt whose keys are NaN fails alone, whether a block finds it or, in a short one, the logits; so does an answer. The others get what they get without it. */
Test(scheduler, test_numbers_that_are_none_fail_their_job_alone)
{
    run_submit(&run, clean(1, 200, 150));
    run_all(&run);
    fixture_poison_token(&f, POISON);
    for (uint64_t id = 2; id <= 4; id++) {
        struct job_params p = clean(id, id == 2 ? 200 : 60, 100);
        if (id < 4) {
            p.prompt[20] = POISON;
        } else {
            p.n_generated = 5;
            p.generated = calloc(5, sizeof *p.generated);
            p.generated[4] = POISON;
        }
        run_submit(&run, p);
    }
    struct job_params again = clean(1, 200, 150);
    again.id = 5;
    run_submit(&run, again);
    run_all(&run);
    for (int id = 2; id <= 4; id++) {
        cr_expect(run.jobs[id].failed && run.jobs[id].failure == JOB_FAILED_INTERNAL && run.jobs[id].n_tokens == 0, "job %d", id);
        cr_expect(strstr(run.jobs[id].text, "numbers that are none"), "job %d: %s", id, run.jobs[id].text);
    }
    cr_expect(run.jobs[5].finished && same_tokens(&run.jobs[1], 0, &run.jobs[5], 150));
}

/* ---- one call of `sample` a step ---- */

static const struct kernel_ops *real_ops;
static int n_calls, n_rows;
static struct run alone;

static int counted_sample(struct stream *s, struct sample_row *rows, int n, int n_vocab)
{
    n_calls++;
    n_rows += n;
    return real_ops->sample(s, rows, n, n_vocab);
}

/* A greedy job of which two tokens are known; it fails when the third is drawn, because nothing may be. */
static struct job_params hopeless(uint64_t id)
{
    struct job_params p = run_params(id, 90, 20);

    p.n_generated = 2;
    p.generated = calloc(2, sizeof *p.generated);
    p.n_stop_ids = TINY_VOCAB;
    p.stop_ids = malloc(TINY_VOCAB * sizeof *p.stop_ids);
    cr_assert(p.generated && p.stop_ids);
    for (int i = 0; i < TINY_VOCAB; i++)
        p.stop_ids[i] = i;
    p.min_tokens = 20;
    return p;
}

Test(scheduler, test_a_step_draws_for_all_in_one_call)
{
    enum { N = 5 };
    struct engine_config config = fixture_config();
    struct kernel_ops counted = *f.model.ops;

    real_ops = f.model.ops;
    counted.sample = counted_sample;
    for (uint64_t i = 0; i < N; i++) { /* alone */
        run_submit(&run, sampled(i, i, 80, 90 + (int)i));
        run_all(&run);
    }
    alone = run;
    run_close(&run);
    f.model.ops = &counted;
    run_open(&run, &f, &config, 8, 4);
    for (uint64_t i = 0; i < N; i++)
        run_submit(&run, sampled(i, i, 80, 90 + (int)i));
    run_submit(&run, hopeless(N));
    while (run.jobs[N].order == 0 || run.jobs[N - 1].order == 0)
        run_step(&run, 1);
    while (!run.jobs[N].failed) { /* with the others, which do not notice */
        const int before = run.jobs[0].n_tokens;
        n_calls = n_rows = 0;
        run_step(&run, 1);
        cr_assert(n_calls == 1 && run.jobs[0].n_tokens == before + 1, "%d calls, %d tokens", n_calls, run.jobs[0].n_tokens - before);
        cr_assert_eq(n_rows, N + (run.jobs[N].failed ? 1 : 0));
    }
    cr_assert(run.jobs[N].n_tokens == 0 && run.jobs[N].failure == JOB_FAILED_INTERNAL);
    run_all(&run);
    for (int i = 0; i < N; i++) {
        cr_assert(run.jobs[i].finished && run.jobs[i].n_tokens == 90 + i);
        cr_assert(same_tokens(&alone.jobs[i], 0, &run.jobs[i], 90 + i), "job %d", i);
    }
    run_close(&run);
    f.model.ops = real_ops;
    run_open(&run, &f, &config, 8, 4);
}
