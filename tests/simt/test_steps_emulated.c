/* Decode steps that are replayed (device_ops.step_begin), on the emulated GPU over a real pool: sequences join and leave the batch, blocks are completed, the page cache has little room, and every
 * logit has the bits of steps that are submitted op by op. */
#include "tests/simt/pool_side.h"
#include "tests/simt/simt.h"
#include <criterion/criterion.h>
#include <stdlib.h>

kernel_backend_fn tidepool_cuda_backend;

enum { SEQUENCES = 3, LAYERS = 2, ANSWER = 40, PROMPT_MAX = 150, ROWS_MAX = 128 };

static const int n_prompts[SEQUENCES] = {138, 150, 120};
/* Which sequences take so many steps together. In its sixth step the first one's recent window moves, and it gets a slow tier; the third one completes a block in its eighth. */
static const struct phase {
    int n_steps;
    bool with[SEQUENCES];
} phases[] = {{8, {true}}, {9, {true, true}}, {6, {true, true, true}}, {9, {true, false, true}}};

static int32_t tokens[SEQUENCES][PROMPT_MAX + ANSWER];

static void setup(void)
{
    for (int i = 0; i < SEQUENCES; i++)
        fixture_tokens(11 + (uint64_t)i, tokens[i], PROMPT_MAX + ANSWER);
    store_fixture_init(&side_store, "8M", 60);
}
static void teardown(void)
{
    store_fixture_fini(&side_store);
}
TestSuite(steps_emulated, .init = setup, .fini = teardown, .timeout = 200);

static struct engine_config config_of(bool eager)
{
    struct engine_config config = fixture_config();
    config.recent = 16;
    config.page_cache = 1 << 16; /* pages come and go */
    config.max_batch = SEQUENCES;
    config.eager_steps = eager;
    return config;
}

/* One step of the phase's sequences; appends their logits. */
static void step(struct engine *engine, const struct phase *phase, struct sequence **all, float *rows, int *n_rows)
{
    struct sequence *batch[SEQUENCES];
    int32_t next[SEQUENCES];
    int n = 0, n_tokens;
    for (int i = 0; i < SEQUENCES; i++)
        if (phase->with[i]) {
            (void)sequence_tokens(all[i], &n_tokens);
            batch[n] = all[i];
            next[n++] = tokens[i][n_tokens];
        }
    cr_assert(engine_decode(engine, batch, next, n) >= 0);
    for (int i = 0; i < n; i++)
        fixture_read_logits(batch[i], rows + (size_t)(*n_rows)++ * TINY_VOCAB);
    loop_poll(side_store.loop);
}

/* All phases; the logits of each step, sequence after sequence. A sequence begins when a phase wants it, and ends when no other does. */
static float *run(struct side *side, bool eager, int *ret_rows, struct step_stats *ret_stats)
{
    const struct engine_config config = config_of(eager);
    struct engine *engine = fixture_engine(&side->f, &config, side->client);
    struct sequence *all[SEQUENCES] = {NULL};
    float *rows = malloc(sizeof(float) * ROWS_MAX * TINY_VOCAB);
    struct error err;
    *ret_rows = 0;
    for (size_t p = 0; p < sizeof phases / sizeof *phases; p++) {
        for (int i = 0; i < SEQUENCES; i++) {
            const struct fixture_run prompt = {.tokens = tokens[i], .n_prompt = n_prompts[i], .n_decode = ANSWER};
            if (phases[p].with[i] && !all[i])
                all[i] = fixture_prefilled(engine, &prompt);
            if (!phases[p].with[i]) {
                sequence_free(all[i]);
                all[i] = NULL;
            }
        }
        for (int i = 0; i < phases[p].n_steps; i++)
            step(engine, &phases[p], all, rows, ret_rows);
    }
    engine_step_stats(engine, ret_stats);
    for (int i = 0; i < SEQUENCES; i++)
        if (all[i]) {
            cr_assert(coverage_check(all[i], &err) >= 0, "%s", err.text);
            sequence_free(all[i]);
        }
    engine_free(engine);
    return rows;
}

static void same_bits(uint64_t seed, bool threads)
{
    struct step_stats eager, steps;
    struct side side;
    int n_eager, n_rows;
    simt_configure(seed, threads);
    side_open(&side, tidepool_cuda_backend(), LAYERS, 0);
    float *expected = run(&side, true, &n_eager, &eager), *actual = run(&side, false, &n_rows, &steps);
    const int n_steps = 8 + 9 + 6 + 9;
    cr_expect(eager.replays == 0 && eager.captures == 0);
    cr_assert_eq(n_rows, n_eager);
    fixture_expect_same(expected, actual, n_rows, "replayed steps");
    cr_expect_eq(steps.eager + steps.captures + steps.replays, n_steps);
    cr_expect(steps.replays * 3 >= n_steps * 2, "%d of %d steps replayed, %d graphs", (int)steps.replays, n_steps, (int)steps.captures);
    free(expected);
    free(actual);
    side_close(&side);
}

Test(steps_emulated, streams_in_turns)
{
    same_bits(1, false);
}
Test(steps_emulated, a_thread_for_each_stream)
{
    same_bits(3, true);
}

/* What steps take of the device is planned to the byte, and so is what they do not take. */
Test(steps_emulated, memory_is_planned)
{
    struct device_memory_stats stats;
    struct device_properties properties;
    size_t workspace[2];
    struct side side;
    side_open(&side, tidepool_cuda_backend(), LAYERS, 0);
    side.f.dev->properties(side.f.device, &properties);
    for (int eager = 0; eager < 2; eager++) {
        struct engine_config config = config_of(eager);
        config.page_cache = 0;
        struct engine *engine = fixture_engine(&side.f, &config, NULL);
        side.f.dev->memory_stats(side.f.device, &stats);
        workspace[eager] = engine_workspace_bytes(engine);
        cr_expect_eq(stats.total_now - side.f.at_start.total_now, workspace[eager] - properties.fixed_bytes - properties.library_bytes);
        engine_free(engine);
    }
    cr_expect_gt(workspace[0], workspace[1]);
    side_close(&side);
}
