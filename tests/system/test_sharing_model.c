/* Sharing over the real model (models/SmolLM2-135M-Instruct.Q4_1.gguf) and a real kvstore: a prefix that another selector's run has written, and an answer that another worker
 * has begun, give the bits that one worker alone gives. Skipped where the model is not there. */
#include "tests/system/store_fixture.h"
#include "tests/unit/real_model.h"
#include "worker/cache/selector.h"
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { N_PROMPT = 500, N_DECODE = 160, N_TOKENS = N_PROMPT + N_DECODE, N_KNOWN = 150, N_CACHED = 384, N_RESTORED = 640 - N_PROMPT };

static int32_t tokens[N_TOKENS];
static struct real_model m;
static struct store_fixture store;
static struct kv_client *client, *other;

static struct engine *open_engine(enum kv_format format, const struct selector_ops *selector, int budget, struct kv_client *with)
{
    const struct engine_config config = {
        .format = format,
        .selector = selector,
        .budget = budget,
        .recent = 128,
        .fetch = 128,
        .chunk = 256,
        .max_context = 1024,
        .max_batch = 1,
        .store_deadline_us = STORE_WAIT_US,
    };
    struct engine *engine;
    struct error err;
    cr_assert(engine_create(&config, m.model, with, &engine, &err) >= 0, "%s", err.text);
    return engine;
}

static struct sequence *prefilled(struct engine *engine, int n_known)
{
    return real_model_prefilled(engine, &(struct sequence_request){.prompt = tokens, .n_prompt = N_PROMPT, .max_new = N_DECODE, .answer = tokens + N_PROMPT, .n_answer = n_known});
}

/* Feeds the answer's tokens from `from` on; keeps the logits behind each, or compares them. */
static void decode(struct engine *engine, struct sequence *seq, int from, float *ret_logits, const float *want)
{
    const size_t n = (size_t)m.model->config.n_vocab;
    for (int i = from; i < N_DECODE; i++) {
        cr_assert(engine_decode(engine, &seq, &tokens[N_PROMPT + i], 1) >= 0);
        if (ret_logits)
            memcpy(ret_logits + (size_t)i * n, sequence_logits(seq), n * sizeof(float));
        else
            cr_assert(memcmp(want + (size_t)i * n, sequence_logits(seq), n * sizeof(float)) == 0, "logits behind token %d of the answer differ", i);
        loop_poll(store.loop);
    }
}

static void check(enum kv_format format)
{
    float *want = malloc((size_t)N_DECODE * (size_t)m.model->config.n_vocab * sizeof(float));
    struct sequence_stats stats;
    cr_assert(want);
    struct engine *engine = open_engine(format, &selector_snapkv, 64, NULL);
    struct sequence *seq = prefilled(engine, 0);
    decode(engine, seq, 0, want, NULL);
    sequence_free(seq);
    engine_free(engine);

    engine = open_engine(format, &selector_streaming, 200, client);
    sequence_free(prefilled(engine, 0));
    engine_free(engine);

    engine = open_engine(format, &selector_snapkv, 64, other);
    seq = prefilled(engine, 0);
    decode(engine, seq, 0, NULL, want);
    sequence_stats(seq, &stats);
    cr_expect(stats.n_cached == N_CACHED && stats.bytes_to_pool > 0, "%d cached", stats.n_cached);
    sequence_free(seq);
    engine_free(engine);

    engine = open_engine(format, &selector_snapkv, 64, client);
    seq = prefilled(engine, N_KNOWN);
    sequence_stats(seq, &stats);
    cr_expect(stats.n_cached == N_CACHED && stats.n_restored == N_RESTORED, "%d cached, %d restored", stats.n_cached, stats.n_restored);
    decode(engine, seq, stats.n_restored, NULL, want);
    sequence_free(seq);
    engine_free(engine);
    free(want);
}

Test(sharing_model, test_same_bits_from_the_pool_in_every_format, .timeout = 600)
{
    cr_assert(real_model_open(&m, 2, CPU_ISA_AUTO));
    for (int i = 0; i < N_TOKENS; i++)
        tokens[i] = (int32_t)((uint64_t)i * i * 2654435761u % (uint64_t)m.model->config.n_vocab);
    store_fixture_init(&store, "128M", 30);
    client = store_fixture_client(&store, "w0");
    other = store_fixture_client(&store, "w1");
    for (int format = 0; format < KV_FORMAT_COUNT; format++)
        check(format);
    kv_client_free(other);
    kv_client_free(client);
    store_fixture_fini(&store);
    real_model_close(&m);
}
