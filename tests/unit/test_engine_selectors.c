/* Every selector in the engine: what its choices may not depend on, and how budgets are shared. */
#include "tests/unit/engine_fixture.h"
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TOKENS = 800, N_PROMPT = 420, N_DECODE = 5, LAYERS = 2 };
static int32_t tokens[MAX_TOKENS];

/* ---- determinism ---- */

/* Everything a choice leads to: kept positions of all layers and heads, layer after layer, and the logits behind the prompt and behind each token. */
struct outcome {
    int32_t kept[LAYERS * TINY_KV_HEADS * N_PROMPT];
    int n_kept;
    float logits[(N_DECODE + 1) * TINY_VOCAB];
};

static void run_engine(struct fixture *f, const struct engine_config *config, struct outcome *ret)
{
    struct engine *engine = fixture_engine(f, config, NULL);
    struct sequence *seq = fixture_prefilled(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = N_PROMPT, .n_decode = N_DECODE});
    ret->n_kept = 0;
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int h = 0; h < TINY_KV_HEADS; h++) {
            int n;
            const int32_t *kept = coverage_kept(seq, layer, h, &n);
            memcpy(ret->kept + ret->n_kept, kept, (size_t)n * sizeof(*kept));
            ret->n_kept += n;
        }
    }
    for (int i = 0; i <= N_DECODE; i++) {
        memcpy(ret->logits + i * TINY_VOCAB, sequence_logits(seq), TINY_VOCAB * sizeof(float));
        if (i < N_DECODE)
            fixture_decode(engine, seq, tokens[N_PROMPT + i]);
    }
    sequence_free(seq);
    engine_free(engine);
}

/* False where this processor lacks the instruction set. */
static bool run_params(struct fixture_params params, const struct engine_config *config, struct outcome *ret)
{
    struct fixture f;
    params.n_layers = LAYERS;
    if (!fixture_open(&f, params))
        return false;
    run_engine(&f, config, ret);
    fixture_expect_no_memory(&f);
    fixture_close(&f);
    return true;
}

static void expect_same(const struct outcome *want, struct fixture_params params, const struct engine_config *config, const char *what)
{
    static struct outcome got;
    if (!run_params(params, config, &got)) {
        fprintf(stderr, "skipped: this processor cannot do %s\n", what);
        return;
    }
    cr_assert(got.n_kept == want->n_kept && memcmp(got.kept, want->kept, (size_t)got.n_kept * sizeof(int32_t)) == 0, "%s: %s keeps others", config->selector->name, what);
    fixture_expect_same(want->logits, got.logits, N_DECODE + 1, what);
}

Test(engine_selectors, test_choices_do_not_depend_on_how_they_are_computed)
{
    static struct outcome want;
    fixture_tokens(1, tokens, MAX_TOKENS);
    for (int i = 0; i < FIXTURE_SELECTORS; i++) {
        struct engine_config config = fixture_config();
        config.selector = fixture_selectors[i];
        config.budget = 100;
        cr_assert(run_params((struct fixture_params){.isa = CPU_ISA_PLAIN}, &config, &want));
        expect_same(&want, (struct fixture_params){.isa = CPU_ISA_AVX2, .n_threads = 2}, &config, "avx2, 2 threads");
        expect_same(&want, (struct fixture_params){.isa = CPU_ISA_AVX512, .n_threads = 3}, &config, "avx512, 3 threads");
        config.chunk = 37;
        expect_same(&want, (struct fixture_params){0}, &config, "chunk 37");
        config.order = PREFILL_CHUNK_MAJOR;
        config.chunk = 256;
        expect_same(&want, (struct fixture_params){0}, &config, "chunk-major");
    }
}

/* ---- budgets ---- */

/* Kept rows of each layer and head, [n_layers, n_kv_heads]. */
static void count_kept(const struct sequence *seq, int n_layers, int *ret_n)
{
    for (int layer = 0; layer < n_layers; layer++)
        for (int h = 0; h < TINY_KV_HEADS; h++)
            coverage_kept(seq, layer, h, &ret_n[layer * TINY_KV_HEADS + h]);
}

/* Budgets fall over the layers or differ between heads, and all of it together is what an even budget takes; every head has the sinks and the newest tokens. */
Test(engine_selectors, test_uneven_budgets_add_up)
{
    enum { UNEVEN_LAYERS = 5, BUDGET = 136, FREE = 100 };
    struct fixture f;
    cr_assert(fixture_open(&f, (struct fixture_params){.n_layers = UNEVEN_LAYERS}));
    fixture_tokens(5, tokens, MAX_TOKENS);
    for (int s = 0; s < FIXTURE_SELECTORS; s++) {
        struct engine_config config = fixture_config();
        int n[UNEVEN_LAYERS * TINY_KV_HEADS], total = 0, uneven = 0;
        config.budget = BUDGET;
        config.recent = 0;
        config.selector = fixture_selectors[s];
        struct engine *engine = fixture_engine(&f, &config, NULL);
        struct sequence *seq = fixture_prefilled(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = 768, .n_decode = 1});
        count_kept(seq, UNEVEN_LAYERS, n);
        for (int layer = 0; layer < UNEVEN_LAYERS; layer++) {
            /* max - l steps of PyramidKV: 2 * 100 - 5 down to 5, in steps of 47.5, which are rounded away from 100. */
            static const int pyramid[UNEVEN_LAYERS] = {195, 148, 100, 52, 5};
            const int want = fixture_selectors[s] == &selector_pyramidkv ? pyramid[layer] : FREE, *heads = n + layer * TINY_KV_HEADS;
            cr_expect(heads[0] + heads[1] == 2 * (want + 36), "%s layer %d: %d + %d rows", fixture_selectors[s]->name, layer, heads[0], heads[1]);
            uneven += heads[0] != heads[1];
            total += heads[0] + heads[1];
            for (int h = 0; h < TINY_KV_HEADS; h++) {
                int n_kept;
                const int32_t *kept = coverage_kept(seq, layer, h, &n_kept);
                cr_expect(kept[3] == 3 && kept[n_kept - 1] == 767 && kept[n_kept - 32] == 736);
                cr_expect(heads[h] >= (fixture_selectors[s] == &selector_pyramidkv ? 5 : FREE / 5) + 36, "%s layer %d head %d: %d rows", fixture_selectors[s]->name, layer, h, heads[h]);
            }
        }
        cr_expect(total == UNEVEN_LAYERS * TINY_KV_HEADS * BUDGET, "%s keeps %d rows", fixture_selectors[s]->name, total);
        cr_expect((uneven > 0) == (fixture_selectors[s] == &selector_adakv), "%s: %d layers whose heads differ", fixture_selectors[s]->name, uneven);
        sequence_free(seq);
        engine_free(engine);
    }
    fixture_close(&f);
}

/* Kept rows of a head with an even share: the budget, less the newest tokens that the recent window holds, or all there is below the window (recent = 0). */
static int rows_expected(int n_prompt, int budget)
{
    const int below = n_prompt / 128 * 128, sinks = budget < 4 ? budget : 4, newest = budget - sinks < 32 ? budget - sinks : 32;
    const int in_window = newest < n_prompt - below ? newest : n_prompt - below;
    return below < budget - in_window ? below : budget - in_window;
}

/* Prompts shorter than a window or than what is mandatory, budgets below and above all there is. */
Test(engine_selectors, test_odd_prompts_and_budgets)
{
    static const int lengths[] = {1, 4, 31, 33, 37, 128, 165, 300}, budgets[] = {3, 36, 37, 100, 5000};
    struct fixture f;
    cr_assert(fixture_open(&f, (struct fixture_params){.n_layers = 1}));
    fixture_tokens(9, tokens, MAX_TOKENS);
    for (int s = 0; s < FIXTURE_SELECTORS; s++) {
        for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
            for (size_t b = 0; b < sizeof(budgets) / sizeof(budgets[0]); b++) {
                struct engine_config config = fixture_config();
                config.selector = fixture_selectors[s];
                config.budget = budgets[b];
                config.recent = 0;
                struct engine *engine = fixture_engine(&f, &config, NULL);
                struct sequence *seq = fixture_prefilled(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = lengths[i], .n_decode = 1});
                const int want = rows_expected(lengths[i], budgets[b]);
                int n[TINY_KV_HEADS];
                count_kept(seq, 1, n);
                cr_expect(n[0] + n[1] == TINY_KV_HEADS * want, "%s, %d tokens, budget %d: %d + %d rows", config.selector->name, lengths[i], budgets[b], n[0], n[1]);
                fixture_decode(engine, seq, tokens[lengths[i]]);
                sequence_free(seq);
                engine_free(engine);
            }
        }
    }
    fixture_close(&f);
}
