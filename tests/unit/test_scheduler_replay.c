/* Answers that move between workers, as the scheduler sees them: what the pool has of one is not decoded again, what is sampled is the same, and whose blocks stay when. */
#include "tests/unit/fake_kv_client.h"
#include "tests/unit/sched_run.h"
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { N_PROMPT = 200, N_ANSWER = 420, PROMPT_BLOCKS = N_PROMPT / BLOCK_TOKENS };

static struct fixture f;
static struct kv_client *store;
static struct run run;

static void setup(void)
{
    struct engine_config config = fixture_config();
    cr_assert(fixture_open(&f, (struct fixture_params){0}));
    store = fake_store_create();
    run_open_with_store(&run, &f, &config, store, 8, 4);
}

static void teardown(void)
{
    run_close(&run);
    while (fake_store_pump(store))
        ;
    cr_expect(fake_store_n_leases(store) == 0 && fake_store_n_granted(store) == 0);
    fake_store_free(store);
    fixture_close(&f);
}

TestSuite(scheduler_replay, .init = setup, .fini = teardown, .timeout = 120);

/* Sampled, with every penalty: what is drawn depends on the tokens before, not on the logits alone. */
static struct job_params params(uint64_t id)
{
    struct job_params p = run_params(3, N_PROMPT, N_ANSWER);
    p.id = id;
    p.sampling.temperature = 8;
    p.sampling.top_p = 0.95f;
    p.sampling.seed = 99;
    p.sampling.presence_penalty = 0.5f;
    p.sampling.frequency_penalty = 0.3f;
    p.sampling.repetition_penalty = 1.1f;
    return p;
}

static void steps_until(uint64_t id, int n_tokens)
{
    while (run.jobs[id].n_tokens < n_tokens && !run.jobs[id].finished) {
        run_step(&run, 1);
        fake_store_pump(store);
    }
}

static struct run_job *complete(uint64_t id)
{
    steps_until(id, N_ANSWER);
    cr_assert(run.jobs[id].finished);
    while (fake_store_pump(store))
        ;
    return &run.jobs[id];
}

static void submit_known(uint64_t id, const struct run_job *from, int n_known)
{
    struct job_params p = params(id);
    p.n_generated = n_known;
    p.generated = malloc((size_t)n_known * sizeof *p.generated);
    cr_assert(p.generated);
    for (int i = 0; i < n_known; i++)
        p.generated[i] = from->tokens[i].token;
    run_submit(&run, p);
}

Test(scheduler_replay, test_answer_goes_on_where_the_last_block_ends)
{
    static const int knowns[] = {50, 56, 57, 184, 185, 300, N_ANSWER - 1};
    run_submit(&run, params(0));
    const struct run_job *whole = complete(0);
    for (uint64_t i = 0; i < sizeof knowns / sizeof knowns[0]; i++) {
        const int known = knowns[i], restored = (N_PROMPT + known - 1) / BLOCK_TOKENS * BLOCK_TOKENS - N_PROMPT;
        const uint64_t first = 1 + 2 * i, second = 2 + 2 * i;
        fake_store_drop_from(store, 0);
        run_submit(&run, params(first));
        steps_until(first, known);
        scheduler_cancel_all(run.scheduler);
        fake_store_pump(store);
        submit_known(second, whole, known);
        const struct run_job *job = complete(second);
        cr_assert(job->prefill.n_known == known && job->prefill.n_restored == (restored > 0 ? restored : 0), "%d of %d restored", job->prefill.n_restored, known);
        cr_assert(job->first_index == known && job->n_tokens == N_ANSWER - known && job->finish.n_tokens == N_ANSWER);
        for (int t = 0; t < job->n_tokens; t++)
            cr_assert(job->tokens[t].token == whole->tokens[known + t].token && job->tokens[t].logprob == whole->tokens[known + t].logprob, "token %d", known + t);
    }
}

/* A complete answer, and one that nobody wants, are of no more use; one that this worker cannot finish is. */
Test(scheduler_replay, test_whose_blocks_stay)
{
    run_submit(&run, params(0));
    steps_until(0, 300);
    cr_assert_eq(fake_store_n_blocks(store), (N_PROMPT + 299) / BLOCK_TOKENS);
    complete(0);
    cr_expect_eq(fake_store_n_blocks(store), PROMPT_BLOCKS, "complete");

    run_submit(&run, params(1));
    steps_until(1, 300);
    cr_assert(scheduler_cancel(run.scheduler, 1));
    cr_expect_eq(fake_store_n_blocks(store), PROMPT_BLOCKS, "cancelled");

    run_submit(&run, params(2));
    steps_until(2, 300);
    scheduler_cancel_all(run.scheduler);
    cr_expect_eq(fake_store_n_blocks(store), (N_PROMPT + 299) / BLOCK_TOKENS, "the router is gone");
}

/* A replay that is complete has nothing to sample, wherever its last tokens came from. */
Test(scheduler_replay, test_complete_replay_ends_without_a_token)
{
    run_submit(&run, params(0));
    steps_until(0, 300);
    const struct run_job *made = &run.jobs[0];
    scheduler_cancel_all(run.scheduler);
    struct job_params p = params(1);
    p.max_tokens = p.n_generated = 300;
    p.generated = malloc(300 * sizeof *p.generated);
    cr_assert(p.generated);
    for (int i = 0; i < 300; i++)
        p.generated[i] = made->tokens[i].token;
    run_submit(&run, p);
    complete(1);
    cr_assert(run.jobs[1].prefill.n_restored > 0 && run.jobs[1].n_tokens == 0 && run.jobs[1].finish.end == JOB_END_LENGTH && run.jobs[1].finish.n_tokens == 300);
}
