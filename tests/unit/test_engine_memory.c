/* Admission is arithmetic: what engine_sequence_bytes says is what the arena gives out, and all of it comes back. */
#include "tests/unit/engine_fixture.h"
#include "worker/cache/scorer.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TOKENS = 1600 };
static int32_t tokens[MAX_TOKENS];
static struct fixture f;

static void setup(void)
{
    fixture_tokens(6, tokens, MAX_TOKENS);
    cr_assert(fixture_open(&f, (struct fixture_params){0}));
}
static void teardown(void)
{
    fixture_expect_no_memory(&f);
    fixture_close(&f);
}
TestSuite(engine_memory, .init = setup, .fini = teardown);

/* To the last token that was promised, so that every block made while decoding is there too. */
static void expect_exact(const struct engine_config *config, int n_prompt, int max_new)
{
    struct device_memory_stats before, created, after;
    struct engine *engine = fixture_engine(&f, config, NULL);
    f.dev->reset_peaks(f.device);
    f.dev->memory_stats(f.device, &before);
    cr_expect(engine_workspace_bytes(engine) == before.now[MEM_WORKSPACE]);

    const struct sequence_request request = {.prompt = tokens, .n_prompt = n_prompt, .max_new = max_new};
    struct sequence *seq;
    cr_assert(sequence_create(engine, &request, &seq, NULL) >= 0);
    f.dev->memory_stats(f.device, &created);
    int r;
    while ((r = sequence_prefill_step(seq)) > 0)
        ;
    cr_assert(r == 0);
    for (int i = 0; i < max_new; i++)
        fixture_decode(engine, seq, tokens[n_prompt + i]);
    f.dev->memory_stats(f.device, &after);
    cr_expect(after.now[MEM_ACTIVE_KV] == before.now[MEM_ACTIVE_KV] && after.now[MEM_BRIDGE] == before.now[MEM_BRIDGE]);
    for (int tag = 0; tag < MEM_TAG_COUNT; tag++)
        if (tag != MEM_STAGING)
            cr_expect(after.peak[tag] == created.now[tag], "%s grew behind sequence_create", mem_tag_name((enum mem_tag)tag));
    const size_t held = after.total_peak - before.total_now, promised = engine_sequence_bytes(engine, n_prompt, max_new);
    cr_expect(held == promised, "%d + %d: %zu promised, %zu held", n_prompt, max_new, promised, held);
    sequence_free(seq);
    engine_free(engine);
}

Test(engine_memory, test_sequence_bytes_equal_what_the_arena_gave)
{
    struct engine_config config = fixture_config();
    for (int order = PREFILL_LAYER_MAJOR; order <= PREFILL_CHUNK_MAJOR; order++) {
        config.order = order;
        config.selector = &selector_snapkv;
        expect_exact(&config, 1000, 300);
        expect_exact(&config, 1024, 0);
        expect_exact(&config, 50, 400);
        expect_exact(&config, 100, 1400); /* the answer's blocks outweigh the prompt's memory */
        expect_exact(&config, 1, 0);
        for (int i = 0; i < FIXTURE_SELECTORS; i++) {
            config.selector = fixture_selectors[i];
            expect_exact(&config, 1000, 130);
        }
    }
}

/* A scorer's summaries are part of what is promised, and the others have none. */
Test(engine_memory, test_summaries_are_counted)
{
    static const struct scorer_ops *const scorers[] = {&scorer_index2, &scorer_minmax, &scorer_mean, &scorer_meanvar, &scorer_recent, &scorer_oracle};
    static const size_t vectors[] = {0, 2, 1, 2, 0, 0};
    struct engine_config config = fixture_config();
    for (size_t i = 0; i < sizeof(scorers) / sizeof(scorers[0]); i++) {
        struct device_memory_stats stats;
        config.scorer = scorers[i];
        config.fetch_unit = i % 2 ? BLOCK_TOKENS : SUBPAGE_TOKENS;
        expect_exact(&config, 1000, 300);
        struct engine *engine = fixture_engine(&f, &config, NULL);
        struct sequence *seq = fixture_prefilled(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = 1000, .n_decode = 300});
        f.dev->memory_stats(f.device, &stats);
        /* 1,300 tokens, of which 32 stay: 9 blocks can become slow. */
        cr_expect(stats.now[MEM_SUMMARIES] == vectors[i] * 3 * TINY_KV_HEADS * 9 * BLOCK_SUBPAGES * TINY_HEAD_DIM * sizeof(fp16_t), "%s", scorers[i]->name);
        sequence_free(seq);
        engine_free(engine);
    }
    config.scorer = &scorer_meanvar;
    config.fetch = INT32_MAX;
    expect_exact(&config, 1000, 300);
    struct engine *engine = fixture_engine(&f, &config, NULL);
    struct sequence *seq = fixture_prefilled(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = 1000, .n_decode = 300});
    struct device_memory_stats stats;
    f.dev->memory_stats(f.device, &stats);
    cr_expect_eq(stats.now[MEM_SUMMARIES], 0, "nobody chooses");
    sequence_free(seq);
    engine_free(engine);
}

static size_t active_kv_bytes(int n_layers, enum prefill_order order)
{
    struct fixture g;
    struct device_memory_stats stats;
    struct engine_config config = fixture_config();
    config.order = order;
    cr_assert(fixture_open(&g, (struct fixture_params){.n_layers = n_layers}));
    struct engine *engine = fixture_engine(&g, &config, NULL);
    sequence_free(fixture_prefilled(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = 700}));
    g.dev->memory_stats(g.device, &stats);
    engine_free(engine);
    fixture_close(&g);
    return stats.peak[MEM_ACTIVE_KV];
}

Test(engine_memory, test_active_kv_does_not_depend_on_layers)
{
    const size_t one = active_kv_bytes(1, PREFILL_LAYER_MAJOR);
    cr_expect(one == active_kv_bytes(6, PREFILL_LAYER_MAJOR));
    cr_expect(one == (size_t)2 * TINY_KV_HEADS * 700 * TINY_HEAD_DIM * sizeof(bf16_t));
    cr_expect(6 * one == active_kv_bytes(6, PREFILL_CHUNK_MAJOR));
}

Test(engine_memory, test_memory_after_fifty_sequences)
{
    struct engine_config config = fixture_config();
    struct engine *engine = fixture_engine(&f, &config, NULL);
    struct device_memory_stats before, after;
    f.dev->memory_stats(f.device, &before);
    for (int i = 0; i < 50; i++) {
        struct sequence *seq = fixture_prefilled(engine, &(struct fixture_run){.tokens = tokens + i, .n_prompt = 20 + 9 * i, .n_decode = 40});
        for (int j = 0; j < i % 40; j++)
            fixture_decode(engine, seq, tokens[j]);
        sequence_free(seq);
    }
    f.dev->memory_stats(f.device, &after);
    cr_expect(memcmp(before.now, after.now, sizeof(before.now)) == 0 && before.n_allocations == after.n_allocations);
    engine_free(engine);
}

Test(engine_memory, test_cancel_at_every_unit)
{
    struct engine_config config = fixture_config();
    struct engine *engine = fixture_engine(&f, &config, NULL);
    struct sequence_stats stats = {.units_total = 1};
    for (int stop = 0; stop <= stats.units_total; stop++) {
        const struct sequence_request request = {.prompt = tokens, .n_prompt = 300, .max_new = 3};
        struct sequence *seq;
        cr_assert(sequence_create(engine, &request, &seq, NULL) >= 0);
        for (int unit = 0; unit < stop; unit++)
            cr_assert(sequence_prefill_step(seq) == (unit + 1 < stats.units_total));
        sequence_stats(seq, &stats);
        cr_expect(stats.units_done == stop);
        cr_expect((sequence_logits(seq) != NULL) == (stop == stats.units_total));
        sequence_free(seq);
    }
    engine_free(engine);
}

Test(engine_memory, test_admission_by_limit)
{
    struct engine_config config = fixture_config();
    struct error err = {0};
    struct engine *engine = fixture_engine(&f, &config, NULL);
    const size_t need = engine_sequence_bytes(engine, 500, 100), fixed = engine_workspace_bytes(engine);
    engine_free(engine);

    /* Room for one and a half. */
    config.memory_limit = fixed + need + need / 2;
    engine = fixture_engine(&f, &config, NULL);
    const struct sequence_request request = {.prompt = tokens, .n_prompt = 500, .max_new = 100};
    struct sequence *seq, *second;
    cr_expect(engine_admits(engine, 500, 100, &err) == 1);
    cr_assert(sequence_create(engine, &request, &seq, &err) >= 0);
    cr_expect(engine_admits(engine, 500, 100, &err) == 0);
    cr_expect(sequence_create(engine, &request, &second, &err) == -EAGAIN);
    cr_expect(engine_admits(engine, 1500, 0, &err) == -E2BIG);
    cr_expect(strstr(err.text, "bytes") != NULL, "%s", err.text);
    cr_expect(engine_admits(engine, 4000, 97, &err) == -E2BIG);
    cr_expect(strstr(err.text, "4096") != NULL, "%s", err.text);
    sequence_free(seq);
    cr_expect(engine_admits(engine, 500, 100, &err) == 1);
    engine_free(engine);
}

/* What a prompt needs only while it is computed is free for others behind it. */
Test(engine_memory, test_admission_behind_prefill)
{
    struct engine_config config = fixture_config();
    struct engine *engine = fixture_engine(&f, &config, NULL);
    config.memory_limit = engine_workspace_bytes(engine) + engine_sequence_bytes(engine, 500, 100) + engine_sequence_bytes(engine, 200, 0) - 1;
    engine_free(engine);
    engine = fixture_engine(&f, &config, NULL);
    const struct sequence_request request = {.prompt = tokens, .n_prompt = 500, .max_new = 100};
    struct sequence *seq;
    cr_assert(sequence_create(engine, &request, &seq, NULL) >= 0);
    do
        cr_expect(engine_admits(engine, 200, 0, NULL) == 0);
    while (sequence_prefill_step(seq) > 0);
    cr_expect(engine_admits(engine, 200, 0, NULL) == 1);
    sequence_free(seq);
    engine_free(engine);
}

/* The arena runs dry in the middle of sequence_create: nothing stays behind, and the engine goes on. */
Test(engine_memory, test_create_when_the_arena_is_full)
{
    struct device_config limited = {.n_threads = 1};
    struct fixture g;
    cr_assert(fixture_open(&g, (struct fixture_params){0}));
    struct engine_config config = fixture_config();
    struct engine *engine = fixture_engine(&g, &config, NULL);
    const size_t need = engine_sequence_bytes(engine, 600, 10);
    struct device_memory_stats stats;
    g.dev->memory_stats(g.device, &stats);
    engine_free(engine);
    const size_t held = stats.total_now;
    fixture_close(&g);

    for (size_t room = 0; room < need; room += need / 23) {
        limited.memory_limit = held + room;
        cr_assert(fixture_open_device(&g, &limited, 3));
        engine = fixture_engine(&g, &config, NULL);
        const struct sequence_request request = {.prompt = tokens, .n_prompt = 600, .max_new = 10};
        struct sequence *seq;
        struct error err;
        cr_expect(sequence_create(engine, &request, &seq, &err) == -ENOMEM);
        engine_free(engine);
        fixture_expect_no_memory(&g);
        fixture_close(&g);
    }
}

Test(engine_memory, test_configuration_is_checked)
{
    struct error err;
    struct engine *engine;
    struct engine_config good = fixture_config(), bad;
    bad = good, bad.chunk = 0;
    cr_expect(engine_create(&bad, &f.model, NULL, &engine, &err) == -EINVAL && strstr(err.text, "chunk"));
    bad = good, bad.max_context = TINY_CONTEXT + 1;
    cr_expect(engine_create(&bad, &f.model, NULL, &engine, &err) == -EINVAL && strstr(err.text, "max_context"));
    bad = good, bad.budget = -1;
    cr_expect(engine_create(&bad, &f.model, NULL, &engine, &err) == -EINVAL && strstr(err.text, "budget"));
    bad = good, bad.selector = NULL;
    cr_expect(engine_create(&bad, &f.model, NULL, &engine, &err) == -EINVAL && strstr(err.text, "snapkv"));
    bad = good, bad.max_batch = 0;
    cr_expect(engine_create(&bad, &f.model, NULL, &engine, &err) == -EINVAL);
}

Test(engine_memory, test_requests_are_checked)
{
    struct engine_config config = fixture_config();
    struct engine *engine = fixture_engine(&f, &config, NULL);
    struct sequence *seq, *pair[2];
    struct error err;
    int32_t wrong[2] = {1, TINY_VOCAB};
    cr_expect(sequence_create(engine, &(struct sequence_request){.prompt = wrong, .n_prompt = 2}, &seq, &err) == -EINVAL);
    wrong[1] = -1;
    cr_expect(sequence_create(engine, &(struct sequence_request){.prompt = wrong, .n_prompt = 2}, &seq, &err) == -EINVAL);
    cr_expect(sequence_create(engine, &(struct sequence_request){.prompt = wrong, .n_prompt = 0}, &seq, &err) == -EINVAL);
    cr_expect(sequence_create(engine, &(struct sequence_request){.prompt = tokens, .n_prompt = 10, .n_salt = 5000, .salt = tokens}, &seq, &err) == -EINVAL);
    cr_expect(sequence_create(engine, &(struct sequence_request){.prompt = tokens, .n_prompt = 10, .max_new = INT32_MAX}, &seq, &err) == -E2BIG);

    seq = fixture_prefilled(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = 200, .n_decode = 2});
    const int32_t token = 3, pair_tokens[2] = {3, 4}, outside = TINY_VOCAB;
    pair[0] = pair[1] = seq;
    cr_expect(engine_decode(engine, pair, pair_tokens, 2) == -EINVAL, "the same sequence twice");
    cr_expect(engine_decode(engine, &seq, &outside, 1) == -EINVAL);
    cr_expect(engine_decode(engine, &seq, &token, 0) == -EINVAL);
    cr_expect(engine_decode(engine, &seq, &token, 1) >= 0, "a refused call changes nothing");
    sequence_free(seq);
    engine_free(engine);
}
