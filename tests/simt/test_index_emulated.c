/* Key indices on a device with memory of its own: blocks of the pool have a copy of theirs on the device, one for all sequences that use the block, and decoding reads nothing else of them. */
#include "tests/simt/pool_side.h"
#include "tests/simt/simt.h"
#include "worker/cache/device_slabs.h"
#include "worker/cache/memory_plan.h"
#include "worker/cache/scorer.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

kernel_backend_fn tidepool_cuda_backend;

/* Without a recent window beyond the block at work the answer's first block becomes slow, too; the last 32 tokens of the prompt are observed, so two of its blocks can be found. */
enum { PROMPT = 376, ANSWER = 14, LAYERS = 2, CACHED = 256, STEPS = 4, LONG_ANSWER = 2000 };

static int32_t tokens[PROMPT + ANSWER];
static const struct fixture_run all = {.tokens = tokens, .n_prompt = PROMPT, .n_decode = ANSWER}, steps = {.tokens = tokens, .n_prompt = PROMPT, .n_decode = STEPS};
static struct block_layout layout;
static struct engine_config config;
static struct side side;

static void setup(void)
{
    fixture_tokens(5, tokens, PROMPT + ANSWER);
    store_fixture_init(&side_store, "8M", 60);
    config = fixture_config();
    config.recent = 0;
    cr_assert_eq(block_layout_init(&layout, config.format, LAYERS, TINY_KV_HEADS, TINY_HEAD_DIM), 0);
    side_open(&side, tidepool_cuda_backend(), LAYERS, 0);
}
static void teardown(void)
{
    side_close(&side);
    store_fixture_fini(&side_store);
}
TestSuite(index_emulated, .init = setup, .fini = teardown, .timeout = 200);

/* Slabs of so many blocks each. */
static void set_slab(int n_blocks)
{
    config.index_slab = (size_t)n_blocks * block_index_bytes(&layout);
}

/* Blocks' worth of MEM_INDEX, in slabs. */
static void expect_indices(int n)
{
    const size_t in_slab = config.index_slab ? config.index_slab / block_index_bytes(&layout) : DEVICE_SLAB_PIECES_MAX, n_slabs = ((size_t)n + in_slab - 1) / in_slab;
    struct device_memory_stats stats;
    side.f.dev->memory_stats(side.f.device, &stats);
    cr_expect_eq(stats.now[MEM_INDEX], n_slabs * in_slab * block_index_bytes(&layout), "%zu bytes of %d blocks", stats.now[MEM_INDEX], n);
}

/* The logits of `steps` from a sequence behind its prompt. */
static float *decode_steps(struct engine *engine, struct sequence *seq)
{
    float *logits = malloc(sizeof(*logits) * TINY_VOCAB * STEPS);
    cr_assert(logits);
    for (int i = 0; i < STEPS; i++) {
        fixture_decode(engine, seq, tokens[PROMPT + i]);
        fixture_read_logits(seq, logits + (size_t)i * TINY_VOCAB);
    }
    return logits;
}

/* What lies in the pool of a block's index becomes worthless. */
static void spoil_indices(const struct sequence *seq)
{
    for (int b = 0; b < CACHED / BLOCK_TOKENS; b++)
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            for (uint32_t h = 0; h < TINY_KV_HEADS; h++) {
                uint8_t *data = side.pool + (coverage_block(seq, b) - side.pool);
                memset(data + block_slice_offset(&layout, b == 0, layer) + block_index_offset(&layout, b == 0, h, 0), 0x5A, (size_t)BLOCK_SUBPAGES * layout.index_entry_bytes);
            }
}

Test(index_emulated, decoding_reads_no_index_in_the_pool)
{
    struct engine *engine = fixture_engine(&side.f, &config, side.client);
    struct sequence *cold = fixture_prefilled(engine, &steps);
    float *want = decode_steps(engine, cold);
    struct sequence *warm = fixture_prefilled(engine, &steps);
    struct sequence_stats stats;
    sequence_free(cold);
    sequence_stats(warm, &stats);
    cr_assert_eq(stats.n_cached, CACHED);
    spoil_indices(warm);
    float *shared = decode_steps(engine, warm);
    fixture_expect_same(want, shared, STEPS, "a shared index");
    sequence_free(warm);
    engine_free(engine);
    free(shared);
    free(want);
}

Test(index_emulated, sequences_with_one_prefix_hold_one_copy)
{
    set_slab(1);
    struct engine *engine = fixture_engine(&side.f, &config, side.client);
    expect_indices(0);
    struct sequence *first = fixture_prefilled(engine, &steps);
    expect_indices(CACHED / BLOCK_TOKENS);
    struct sequence *second = fixture_prefilled(engine, &steps);
    expect_indices(CACHED / BLOCK_TOKENS);
    float *want = decode_steps(engine, first);
    sequence_free(first);
    expect_indices(CACHED / BLOCK_TOKENS);
    float *got = decode_steps(engine, second);
    fixture_expect_same(want, got, STEPS, "the second");
    sequence_free(second);
    expect_indices(0);
    struct sequence *third = fixture_prefilled(engine, &steps); /* out of the pool again */
    float *again = decode_steps(engine, third);
    fixture_expect_same(want, again, STEPS, "the third");
    sequence_free(third);
    engine_free(engine);
    free(again);
    free(got);
    free(want);
}

/* The private block of the answer has its index in its extent; in the pool it gets a copy. Coverage is checked after every step. */
Test(index_emulated, without_the_pool_cold_and_warm_are_one)
{
    struct sequence_stats stats;
    float *want = side_logits(&side, &config, &all, false, &stats);
    float *cold = side_logits(&side, &config, &all, true, &stats);
    cr_expect(stats.n_cached == 0 && stats.private_blocks == 0 && stats.page_misses > 0 && stats.page_hits == 0);
    float *warm = side_logits(&side, &config, &all, true, &stats);
    cr_expect_eq(stats.n_cached, CACHED);
    fixture_expect_same(want, cold, ANSWER + 1, "cold");
    fixture_expect_same(want, warm, ANSWER + 1, "warm");
    free(warm);
    free(cold);
    free(want);
}

static struct memory_plan plan_of(int max_new)
{
    struct memory_plan plan;
    struct error err;
    struct model *m = &side.f.model;
    const struct memory_plan_params params = {
        .model = &m->config, .engine = config, .dev = m->dev, .ops = m->ops, .device = m->device, .stream = m->stream, .n_prompt = PROMPT, .max_new = max_new, .pool = true};
    cr_assert(memory_plan_init(&params, &plan, &err) >= 0, "%s", err.text);
    return plan;
}

Test(index_emulated, it_is_planned_to_the_byte)
{
    static const int slabs[] = {0, 1, 3}; /* blocks in one; 0: as many as there can be */
    struct device_memory_stats stats;
    const struct model *m = &side.f.model;
    for (size_t i = 0; i < sizeof(slabs) / sizeof(slabs[0]); i++) {
        const int in_slab = slabs[i] ? slabs[i] : DEVICE_SLAB_PIECES_MAX, n_slabs = (CACHED / BLOCK_TOKENS + in_slab - 1) / in_slab;
        set_slab(slabs[i]);
        const struct memory_plan plan = plan_of(STEPS);
        cr_expect_eq(plan.peak[MEM_INDEX], (size_t)n_slabs * (size_t)in_slab * block_index_bytes(&layout));
        m->dev->reset_peaks(m->device);
        struct engine *engine = fixture_engine(&side.f, &config, side.client);
        cr_expect_eq(engine_sequence_bytes(engine, PROMPT, STEPS), plan.sequence);
        struct sequence *seq = fixture_prefilled(engine, &steps);
        m->dev->memory_stats(m->device, &stats);
        for (int tag = 0; tag < MEM_TAG_COUNT; tag++)
            if (tag == MEM_INDEX || tag == MEM_TABLES || tag == MEM_FAST)
                cr_expect_eq(stats.peak[tag], plan.peak[tag], "%s: %zu bytes, planned %zu", mem_tag_name((enum mem_tag)tag), stats.peak[tag], plan.peak[tag]);
        sequence_free(seq);
        engine_free(engine);
    }
}

/* Prompts of two blocks each, in slabs of three: four of them need three slabs, and a limit for that lets in no fifth; nothing is taken beyond it, whoever goes. */
Test(index_emulated, admission_counts_slabs)
{
    enum { N = 4 };
    const size_t index = block_index_bytes(&layout);
    struct sequence *sequences[N], *fifth;
    struct device_memory_stats stats;
    struct error err;
    set_slab(3);
    config.max_batch = N + 1;
    const struct memory_plan plan = plan_of(STEPS);
    config.memory_limit = plan.fixed + N * (plan.sequence - 3 * index) + 9 * index;
    struct engine *engine = fixture_engine(&side.f, &config, side.client);
    side.f.dev->memory_stats(side.f.device, &stats);
    const size_t before = stats.total_now - engine_workspace_bytes(engine);
    side.f.dev->reset_peaks(side.f.device);
    for (int i = 0; i < N; i++) {
        const struct sequence_request request = {.prompt = tokens, .n_prompt = PROMPT, .max_new = STEPS, .salt = (const uint8_t *)&i, .n_salt = sizeof(i)}; /* nobody shares */
        cr_assert(sequence_create(engine, &request, &sequences[i], &err) >= 0, "%d: %s", i, err.text);
    }
    expect_indices(8);
    const struct sequence_request request = {.prompt = tokens, .n_prompt = PROMPT, .max_new = STEPS};
    cr_expect_eq(sequence_create(engine, &request, &fifth, &err), -EAGAIN);
    sequence_free(sequences[1]);
    cr_assert(sequence_create(engine, &request, &sequences[1], &err) >= 0, "%s", err.text);
    side.f.dev->memory_stats(side.f.device, &stats);
    cr_expect(stats.total_peak <= before + config.memory_limit, "%zu bytes, %zu allowed", stats.total_peak, before + config.memory_limit);
    for (int i = 0; i < N; i++)
        sequence_free(sequences[i]);
    expect_indices(0);
    engine_free(engine);
}

/* Logits of `all` by an engine with this limit, as a request for an answer so long that its promised blocks are the larger part of its memory. */
static float *long_request(size_t limit, struct sequence_stats *ret_stats)
{
    const struct sequence_request request = {.prompt = tokens, .n_prompt = PROMPT, .max_new = LONG_ANSWER};
    float *logits = malloc(sizeof(*logits) * TINY_VOCAB * (ANSWER + 1));
    struct sequence *seq;
    struct error err;
    config.memory_limit = limit;
    struct engine *engine = fixture_engine(&side.f, &config, side.client);
    cr_assert(logits && sequence_create(engine, &request, &seq, &err) >= 0, "%s", err.text);
    while (sequence_prefill_step(seq) > 0)
        ;
    fixture_read_logits(seq, logits);
    for (int i = 0; i < ANSWER; i++) {
        fixture_decode(engine, seq, tokens[PROMPT + i]);
        fixture_read_logits(seq, logits + (size_t)(i + 1) * TINY_VOCAB);
        loop_poll(side_store.loop);
    }
    sequence_stats(seq, ret_stats);
    sequence_free(seq);
    engine_free(engine);
    return logits;
}

/* A block of the answer moves to the pool when there is memory for its index, and otherwise stays where it is. */
Test(index_emulated, a_block_moves_when_its_index_has_room)
{
    struct sequence_stats stats;
    set_slab(2);
    const struct memory_plan plan = plan_of(LONG_ANSWER);
    cr_assert_eq(plan.sequence, plan.running);
    float *want = side_logits(&side, &config, &all, false, &stats);
    for (int room = 0; room < 2; room++) {
        float *got = long_request(plan.fixed + plan.sequence + (room ? 2 * block_index_bytes(&layout) : 0), &stats);
        cr_expect_eq(stats.private_blocks, !room, "%d private blocks, room %d", stats.private_blocks, room);
        fixture_expect_same(want, got, ANSWER + 1, room ? "moved" : "stayed");
        free(got);
    }
    free(want);
}

/* One step in which the next allocation fails. Returns whether there was one. */
static bool step_without_memory(struct engine *engine, struct sequence *seq, int32_t token)
{
    void *memory;
    loop_poll(side_store.loop); /* not behind the step: the block would be offered again, and move */
    simt_fail_malloc(1);
    fixture_decode(engine, seq, token);
    const bool failed = side.f.dev->alloc(side.f.device, MEM_STAGING, BLOCK_TOKENS, &memory) >= 0; /* not the first one */
    simt_fail_malloc(0);
    if (failed)
        side.f.dev->free(side.f.device, memory);
    return failed;
}

/* The device has no memory when a block comes to the pool, whatever admission thought: the block stays where it is, and its lease is given back once. */
Test(index_emulated, a_block_whose_index_finds_no_memory_stays)
{
    enum { COMPLETES = BLOCK_TOKENS - PROMPT % BLOCK_TOKENS, MOST_STEPS = 100 };
    const struct sequence_request request = {.prompt = tokens, .n_prompt = PROMPT, .max_new = MOST_STEPS};
    struct sequence_stats stats;
    struct sequence *seq;
    struct error err;
    bool failed = false;
    set_slab(1);
    struct engine *engine = fixture_engine(&side.f, &config, side.client);
    cr_assert(sequence_create(engine, &request, &seq, &err) >= 0, "%s", err.text);
    while (sequence_prefill_step(seq) > 0)
        ;
    for (int i = 0; i < COMPLETES; i++)
        fixture_decode(engine, seq, tokens[i]);
    for (int i = COMPLETES; !failed && i < MOST_STEPS; i++)
        failed = step_without_memory(engine, seq, tokens[i]);
    sequence_stats(seq, &stats);
    cr_expect(failed && stats.private_blocks == 1, "%d private blocks", stats.private_blocks);
    sequence_retire_answer(seq);
    sequence_free(seq);
    engine_free(engine);
}

/* Whoever does not score by it has none, nor who attends everything. */
Test(index_emulated, only_its_scorer_has_one)
{
    for (int i = 0; i < 2; i++) {
        config.scorer = i ? &scorer_recent : &scorer_index2;
        config.fetch = i ? 64 : INT32_MAX;
        struct engine *engine = fixture_engine(&side.f, &config, side.client);
        struct sequence *seq = fixture_prefilled(engine, &steps);
        expect_indices(0);
        free(decode_steps(engine, seq));
        sequence_free(seq);
        engine_free(engine);
    }
}
