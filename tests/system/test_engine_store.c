/* Engines over a real kvstore process: what one worker has computed another one finds, and a store that dies costs nothing but reuse. */
#include "proto/base/clock.h"
#include "tests/system/store_fixture.h"
#include "tests/unit/engine_fixture.h"
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { N_PROMPT = 900, N_DECODE = 280, N_TOKENS = N_PROMPT + N_DECODE, N_ROWS = N_DECODE + 1 };

static int32_t tokens[N_TOKENS];
static const struct fixture_run run = {.tokens = tokens, .n_prompt = N_PROMPT, .n_decode = N_DECODE};
static struct fixture f;
static struct store_fixture store;
static struct kv_client *client, *other;

static void setup(void)
{
    fixture_tokens(21, tokens, N_TOKENS);
    cr_assert(fixture_open(&f, (struct fixture_params){0}));
    store_fixture_init(&store, "64M", 30);
    client = store_fixture_client(&store, "w0");
    other = store_fixture_client(&store, "w1");
}
static void teardown(void)
{
    fixture_expect_no_memory(&f);
    fixture_close(&f);
    kv_client_free(other);
    kv_client_free(client);
    store_fixture_fini(&store);
}
TestSuite(engine_store, .init = setup, .fini = teardown, .timeout = 100);

static void wait_connected(const struct kv_client *c, bool connected)
{
    const uint64_t end_us = clock_now_us() + STORE_WAIT_US;
    struct kv_store_info info;
    for (kv_client_info(c, &info); info.connected != connected; kv_client_info(c, &info)) {
        cr_assert(clock_now_us() < end_us, "%s", info.error.text);
        loop_poll(store.loop);
    }
}

static float *alone(const struct engine_config *config)
{
    struct engine *engine = fixture_engine(&f, config, NULL);
    float *logits = fixture_logits(engine, &run, NULL);
    engine_free(engine);
    return logits;
}

static void decode_and_compare(struct engine *engine, struct sequence *seq, const float *want, int from, int to)
{
    for (int i = from; i < to; i++) {
        fixture_decode(engine, seq, tokens[N_PROMPT + i]);
        fixture_expect_same(want + (size_t)(i + 1) * TINY_VOCAB, sequence_logits(seq), 1, "decode");
        loop_poll(store.loop);
    }
}

/* The newest of the answer's blocks may still be on their way to a pool that has room. */
static struct sequence_stats settled_stats(const struct sequence *seq, bool room)
{
    const uint64_t end_us = clock_now_us() + STORE_WAIT_US;
    struct sequence_stats stats;
    for (sequence_stats(seq, &stats); room && stats.private_blocks; sequence_stats(seq, &stats)) {
        cr_assert(clock_now_us() < end_us, "%d blocks stay private", stats.private_blocks);
        loop_poll(store.loop);
    }
    return stats;
}

static struct sequence_stats run_in_pool(struct kv_client *with, const struct engine_config *config, const float *want, bool room)
{
    struct engine *engine = fixture_engine(&f, config, with);
    struct sequence *seq = fixture_prefilled(engine, &run);
    fixture_expect_same(want, sequence_logits(seq), 1, "prefill");
    decode_and_compare(engine, seq, want, 0, N_DECODE);
    const struct sequence_stats stats = settled_stats(seq, room);
    sequence_free(seq);
    engine_free(engine);
    return stats;
}

static struct sequence_stats run_with(struct kv_client *with, const struct engine_config *config, const float *want)
{
    return run_in_pool(with, config, want, true);
}

Test(engine_store, test_another_worker_finds_the_prefix_in_every_format)
{
    for (int format = 0; format < KV_FORMAT_COUNT; format++) {
        struct engine_config config = fixture_config();
        config.format = format;
        float *want = alone(&config);
        struct sequence_stats cold = run_with(client, &config, want);
        struct sequence_stats warm = run_with(other, &config, want);
        cr_expect(cold.n_cached == 0 && cold.bytes_to_pool > 0 && cold.private_blocks == 0, "%d private", cold.private_blocks);
        cr_expect(warm.n_cached == 768, "%d cached", warm.n_cached);
        cr_expect(warm.bytes_to_pool == 0, "what is there is not written again");
        free(want);
    }
}

Test(engine_store, test_store_killed_during_prefill_and_back)
{
    struct engine_config config = fixture_config();
    float *want = alone(&config);
    struct engine *engine = fixture_engine(&f, &config, client);
    struct sequence *seq;
    struct error err;
    const struct sequence_request request = {.prompt = tokens, .n_prompt = N_PROMPT, .max_new = N_DECODE};
    cr_assert(sequence_create(engine, &request, &seq, &err) >= 0, "%s", err.text);
    for (int i = 0; i < 9; i++)
        cr_assert(sequence_prefill_step(seq) == 1);
    store_fixture_kill(&store);
    while (sequence_prefill_step(seq) > 0)
        loop_poll(store.loop);
    fixture_expect_same(want, sequence_logits(seq), 1, "store killed");
    decode_and_compare(engine, seq, want, 0, 140);

    /* A new store on the same socket: the running sequence keeps its old mapping, new ones use the new pool. */
    store_fixture_restart(&store);
    wait_connected(client, false);
    wait_connected(client, true);
    wait_connected(other, true);
    decode_and_compare(engine, seq, want, 140, N_DECODE);
    struct sequence_stats cold = run_with(client, &config, want), warm = run_with(other, &config, want);
    cr_expect(cold.n_cached == 0 && warm.n_cached == 768);
    sequence_free(seq);
    engine_free(engine);
    free(want);
}

Test(engine_store, test_store_killed_while_decoding)
{
    struct engine_config config = fixture_config();
    float *want = alone(&config);
    run_with(client, &config, want);
    struct engine *engine = fixture_engine(&f, &config, other);
    struct sequence *seq = fixture_prefilled(engine, &run);
    struct sequence_stats stats;
    decode_and_compare(engine, seq, want, 0, 30);
    store_fixture_kill(&store);
    decode_and_compare(engine, seq, want, 30, N_DECODE);
    sequence_stats(seq, &stats);
    cr_expect(stats.n_cached == 768 && stats.private_blocks > 0, "blocks made since then are private");
    sequence_free(seq);
    engine_free(engine);
    free(want);
}

/* Another sequence holds most of a small pool: some blocks are granted, the rest is private. */
Test(engine_store, test_pool_too_small)
{
    struct engine_config config = fixture_config();
    kv_client_free(client);
    kv_client_free(other);
    store_fixture_fini(&store);
    store_fixture_init(&store, "1M", 30);
    client = store_fixture_client(&store, "w0");
    other = store_fixture_client(&store, "w1");
    config.format = KV_FORMAT_BF16;
    float *want = alone(&config);
    struct engine *engine = fixture_engine(&f, &config, other);
    static int32_t more[N_PROMPT];
    fixture_tokens(22, more, N_PROMPT);
    struct sequence *holder = fixture_prefilled(engine, &(struct fixture_run){.tokens = more, .n_prompt = N_PROMPT});
    struct sequence_stats cold = run_in_pool(client, &config, want, false), warm = run_in_pool(other, &config, want, false);
    sequence_free(holder);
    engine_free(engine);
    cr_expect(cold.private_blocks > 0 && cold.bytes_to_pool > 0, "%d private, %llu bytes written", cold.private_blocks, (unsigned long long)cold.bytes_to_pool);
    cr_expect(warm.n_cached > 0 && warm.n_cached < 768, "%d cached", warm.n_cached);
    free(want);
}

/* A byte of a sealed block changes: the reader's checksum finds it, the rest of the prefix is computed. */
Test(engine_store, test_corrupt_block_is_recomputed)
{
    struct engine_config config = fixture_config();
    struct block_key keys[3], root;
    struct kv_lease leases[3];
    uint8_t fingerprint[FINGERPRINT_BYTES];
    float *want = alone(&config);
    run_with(client, &config, want);

    struct engine *engine = fixture_engine(&f, &config, other);
    engine_fingerprint(engine, fingerprint);
    engine_free(engine);
    block_key_root(fingerprint, NULL, 0, &root);
    for (int i = 0; i < 3; i++)
        block_key_next(i ? &keys[i - 1] : &root, tokens + (size_t)i * BLOCK_TOKENS, &keys[i]);
    cr_assert(kv_client_lookup(client, keys, 3, 5000000, leases) == 3);
    leases[2].data[leases[2].length / 2] ^= 4;
    kv_client_release(client, leases, 3);

    struct sequence_stats warm = run_with(other, &config, want);
    cr_expect(warm.n_cached == 256, "%d cached", warm.n_cached);
    warm = run_with(client, &config, want);
    cr_expect(warm.n_cached >= 256);
    free(want);
}
