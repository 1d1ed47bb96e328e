/* The lab over a small random model: its prefills and continuations against plain references, and every method where it must equal full attention. */
#include "bench/fidelity/lab/baseline_methods.h"
#include "bench/fidelity/lab/drift.h"
#include "bench/fidelity/lab/drift_engine.h"
#include "bench/fidelity/lab/lab_attention.h"
#include "bench/fidelity/lab/lab_cache.h"
#include "bench/fidelity/lab/lab_search.h"
#include "tests/unit/fidelity_fixture.h"
#include "tests/unit/tiny_reference.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N_PROMPT = 430, N_FED = 20, N_TOKENS = N_PROMPT + N_FED + 1 };

struct lab_fixture {
    struct fixture f;
    int32_t tokens[N_TOKENS];
    struct fidelity_case c;
};

static void lab_open(struct lab_fixture *l, int n_threads)
{
    cr_assert(fixture_open(&l->f, (struct fixture_params){.n_threads = n_threads}));
    fixture_tokens(5, l->tokens, N_TOKENS);
    l->c = (struct fidelity_case){.tokens = l->tokens, .n_prompt = N_PROMPT, .n_fed = N_FED};
}

static void lab_close(struct lab_fixture *l)
{
    lab_cache_clear();
    fixture_expect_no_memory(&l->f);
    fixture_close(&l->f);
}

static struct lab_context *prefilled(struct lab_fixture *l, int chunk, enum lab_values values, const struct lab_eviction *eviction)
{
    const struct lab_prefill_params p = {.model = &l->f.model, .tokens = l->tokens, .n = N_PROMPT, .chunk = chunk, .values = values, .eviction = eviction};
    struct lab_context *context;
    cr_assert(lab_prefill(&p, &context) >= 0);
    return context;
}

static size_t kv_bytes(const struct lab_context *c)
{
    const struct model_config *m = &c->model->config;
    return (size_t)m->n_layers * (size_t)m->n_kv_heads * (size_t)c->n_rows * (size_t)m->head_dim * sizeof(bf16_t);
}

/* ---- prefill ---- */

Test(fidelity_lab, test_chunks_do_not_matter)
{
    static const int chunks[] = {1, 100, 128, 333};
    struct lab_fixture l;
    lab_open(&l, 2);
    for (int values = LAB_VALUES_EXACT; values <= LAB_VALUES_K8V4; values++) {
        struct lab_context *one = prefilled(&l, N_PROMPT, (enum lab_values)values, NULL);
        for (size_t i = 0; i < sizeof(chunks) / sizeof(chunks[0]); i++) {
            struct lab_context *other = prefilled(&l, chunks[i], (enum lab_values)values, NULL);
            cr_expect(memcmp(one->k, other->k, kv_bytes(one)) == 0 && memcmp(one->v, other->v, kv_bytes(one)) == 0);
            cr_expect(memcmp(one->hidden, other->hidden, (size_t)N_PROMPT * TINY_DIM * sizeof(float)) == 0);
            cr_expect(memcmp(one->window, other->window, (size_t)(3 * LAB_WINDOW) * TINY_HEADS * TINY_HEAD_DIM * sizeof(float)) == 0);
            lab_context_free(other);
        }
        lab_context_free(one);
    }
    lab_close(&l);
}

Test(fidelity_lab, test_the_engine_prefills_the_same_numbers)
{
    struct lab_fixture l;
    lab_open(&l, 2);
    for (int values = LAB_VALUES_EXACT; values <= LAB_VALUES_K8V4; values++) {
        struct lab_context *context = prefilled(&l, 96, (enum lab_values)values, NULL);
        struct error err;
        int n_different = -1;
        cr_assert(drift_engine_compare(context, &l.f.model, l.tokens, (enum lab_values)values, 70, &n_different, &err) >= 0);
        cr_expect(n_different == 0, "%d", n_different);
        /* It would see a difference. */
        cr_assert(drift_engine_compare(context, &l.f.model, l.tokens, values == LAB_VALUES_EXACT ? LAB_VALUES_K8V4 : LAB_VALUES_EXACT, 70, &n_different, &err) >= 0);
        cr_expect(n_different > 0);
        lab_context_free(context);
    }
    lab_close(&l);
}

/* ---- eviction ---- */

enum { EVICT_CHUNK = 100, EVICT_BUDGET = 60, Q_DIM = TINY_HEADS * TINY_HEAD_DIM, D = TINY_HEAD_DIM };

static double bf16_value(bf16_t x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof(f));
    return (double)f;
}

/* What recent tokens leave: the sinks, the newest rows when the query's chunk began, and the chunk. */
static bool visible_to_recent(int query, int key)
{
    const int chunk = query / EVICT_CHUNK * EVICT_CHUNK;
    return key < SELECT_SINKS || key >= chunk - (EVICT_BUDGET - SELECT_SINKS);
}

static void masked_attention(const float *q, const bf16_t *k, const bf16_t *v, int query, float scale, float *out)
{
    double weight = 0, sum[D] = {0};
    for (int i = 0; i <= query; i++) {
        double dot = 0;
        if (!visible_to_recent(query, i))
            continue;
        for (int c = 0; c < D; c++)
            dot += (double)q[c] * bf16_value(k[i * D + c]);
        const double p = exp(dot * (double)scale);
        weight += p;
        for (int c = 0; c < D; c++)
            sum[c] += p * bf16_value(v[i * D + c]);
    }
    for (int c = 0; c < D; c++)
        out[c] = (float)(sum[c] / weight);
}

/* Attention in plain loops over what is visible; everything else by the model. x [N_PROMPT, dim]. */
static void masked_prefill(struct lab_fixture *l, float *x)
{
    static bf16_t k[TINY_KV_HEADS * N_PROMPT * D], v[TINY_KV_HEADS * N_PROMPT * D];
    static float rope[N_PROMPT * D];
    static struct kv_dst dst[N_PROMPT];
    static int32_t positions[N_PROMPT];
    const struct model *m = &l->f.model;
    struct model_workspace ws;
    cr_assert(model_workspace_init(&ws, m, N_PROMPT, 0) >= 0);
    for (int i = 0; i < N_PROMPT; i++) {
        positions[i] = i;
        dst[i] = (struct kv_dst){k + i * D, v + i * D, N_PROMPT * D};
    }
    cr_assert(model_embed(m, l->tokens, N_PROMPT, x) >= 0 && model_rope_table(m, positions, N_PROMPT, rope) >= 0);
    for (int layer = 0; layer < m->config.n_layers; layer++) {
        cr_assert(model_layer_qkv(m, layer, x, N_PROMPT, rope, dst, &ws) >= 0);
        for (int i = 0; i < N_PROMPT * TINY_HEADS; i++) {
            const int head = i % TINY_HEADS / (TINY_HEADS / TINY_KV_HEADS) * N_PROMPT * D;
            masked_attention(ws.q + i * D, k + head, v + head, i / TINY_HEADS, m->config.attention_scale, (float *)ws.attn_out + i * D);
        }
        cr_assert(model_layer_out(m, layer, x, N_PROMPT, &ws) >= 0);
    }
    model_workspace_fini(&ws, m);
}

Test(fidelity_lab, test_eviction_of_all_but_recent_tokens_as_a_mask)
{
    static float want[N_PROMPT * TINY_DIM];
    const struct lab_eviction eviction = {.selector = &selector_streaming, .budget = EVICT_BUDGET};
    struct lab_fixture l;
    lab_open(&l, 2);
    masked_prefill(&l, want);
    struct lab_context *context = prefilled(&l, EVICT_CHUNK, LAB_VALUES_EXACT, &eviction);
    /* K and V are rounded to bf16, and what is rounded differs in the last places, so single numbers may be off by more than their mean. */
    double off = 0, norm = 0;
    for (int i = 0; i < N_PROMPT * TINY_DIM; i++) {
        const double x = (double)want[i], difference = (double)context->hidden[i] - x;
        cr_assert(fabs(difference) < 1e-2, "token %d: %g, want %g", i / TINY_DIM, (double)context->hidden[i], x);
        off += difference * difference;
        norm += x * x;
    }
    cr_expect(sqrt(off / norm) < 3e-4, "%g", sqrt(off / norm));
    cr_expect(context->n_rows == EVICT_BUDGET && context->n_tokens == N_PROMPT);
    lab_context_free(context);
    lab_close(&l);
}

/* The first layer's K does not depend on attention, so its rows tell which tokens were left. Returns how many of the exact rows were found, in order. */
static int rows_found(const struct lab_context *exact, const struct lab_context *evicted, int head, int *positions)
{
    int n = 0;
    for (int i = 0; i < exact->n_rows && n < evicted->n_rows; i++)
        if (memcmp(exact->k + (head * exact->n_rows + i) * D, evicted->k + (head * evicted->n_rows + n) * D, D * sizeof(bf16_t)) == 0)
            positions[n++] = i;
    return n;
}

Test(fidelity_lab, test_eviction_by_snapkv_keeps_sinks_and_the_newest)
{
    const struct lab_eviction eviction = {.selector = &selector_snapkv, .budget = EVICT_BUDGET};
    struct lab_fixture l;
    lab_open(&l, 1);
    struct lab_context *exact = prefilled(&l, N_PROMPT, LAB_VALUES_EXACT, NULL), *evicted = prefilled(&l, EVICT_CHUNK, LAB_VALUES_EXACT, &eviction);
    for (int h = 0; h < TINY_KV_HEADS; h++) {
        int positions[EVICT_BUDGET];
        cr_assert(rows_found(exact, evicted, h, positions) == EVICT_BUDGET);
        for (int i = 0; i < SELECT_SINKS; i++)
            cr_expect(positions[i] == i);
        for (int i = 1; i <= SELECT_MANDATORY; i++)
            cr_expect(positions[EVICT_BUDGET - i] == N_PROMPT - i);
        cr_expect(positions[EVICT_BUDGET - SELECT_MANDATORY - 1] != N_PROMPT - SELECT_MANDATORY - 1 || positions[SELECT_SINKS] < N_PROMPT - EVICT_BUDGET,
                  "not the newest alone");
    }
    lab_context_free(evicted);
    lab_context_free(exact);
    lab_close(&l);
}

Test(fidelity_lab, test_eviction_with_room_for_all_is_exact)
{
    const struct lab_eviction eviction = {.selector = &selector_snapkv, .budget = N_PROMPT};
    struct lab_fixture l;
    lab_open(&l, 2);
    struct lab_context *exact = prefilled(&l, N_PROMPT, LAB_VALUES_EXACT, NULL), *evicted = prefilled(&l, EVICT_CHUNK, LAB_VALUES_EXACT, &eviction);
    cr_expect(memcmp(exact->hidden, evicted->hidden, (size_t)N_PROMPT * TINY_DIM * sizeof(float)) == 0);
    cr_expect(memcmp(exact->k, evicted->k, kv_bytes(exact)) == 0);
    lab_context_free(evicted);
    lab_context_free(exact);
    lab_close(&l);
}

Test(fidelity_lab, test_prefill_refuses_what_it_cannot_do)
{
    const struct lab_eviction small = {.selector = &selector_snapkv, .budget = SELECT_SINKS + SELECT_MANDATORY}, eviction = {.selector = &selector_snapkv, .budget = 64};
    struct lab_context *context;
    struct lab_fixture l;
    lab_open(&l, 1);
    struct lab_prefill_params p = {.model = &l.f.model, .tokens = l.tokens, .n = 0, .chunk = 10};
    cr_expect(lab_prefill(&p, &context) == -EINVAL);
    p = (struct lab_prefill_params){.model = &l.f.model, .tokens = l.tokens, .n = 100, .chunk = 10, .eviction = &small};
    cr_expect(lab_prefill(&p, &context) == -EINVAL);
    p = (struct lab_prefill_params){.model = &l.f.model, .tokens = l.tokens, .n = 100, .chunk = 10, .eviction = &eviction, .values = LAB_VALUES_K8V4};
    cr_expect(lab_prefill(&p, &context) == -EINVAL);
    const int32_t bad = TINY_VOCAB;
    p = (struct lab_prefill_params){.model = &l.f.model, .tokens = &bad, .n = 1, .chunk = 1};
    cr_expect(lab_prefill(&p, &context) == -EINVAL);
    lab_close(&l);
}

/* ---- drift ---- */

Test(fidelity_lab, test_drift_of_nothing_is_exactly_nothing)
{
    struct lab_fixture l;
    struct drift d;
    lab_open(&l, 2);
    struct lab_context *one = prefilled(&l, N_PROMPT, LAB_VALUES_EXACT, NULL), *same = prefilled(&l, 50, LAB_VALUES_EXACT, NULL);
    struct lab_context *consistent = prefilled(&l, 50, LAB_VALUES_K8V4, NULL);
    cr_assert(drift_measure(one, same, &d) >= 0);
    cr_expect(d.relative_l2 == 0 && d.jsd == 0 && d.kl == 0 && d.top1 == 1);
    cr_expect_float_eq(d.cosine, 1, 1e-12);
    cr_assert(drift_measure(one, consistent, &d) >= 0);
    cr_expect(d.relative_l2 > 1e-5 && d.relative_l2 < 0.1 && d.cosine < 1 && d.cosine > 0.99 && d.jsd > 0 && d.jsd < d.kl);
    lab_context_free(consistent);
    lab_context_free(same);
    lab_context_free(one);
    lab_close(&l);
}

Test(fidelity_lab, test_drift_by_the_book)
{
    struct lab_fixture l;
    struct drift d;
    lab_open(&l, 1);
    struct lab_context *one = prefilled(&l, N_PROMPT, LAB_VALUES_EXACT, NULL), *other = prefilled(&l, N_PROMPT, LAB_VALUES_EXACT, NULL);
    double norm = 0;
    for (int i = 0; i < N_PROMPT * TINY_DIM; i++) {
        norm += (double)one->hidden[i] * (double)one->hidden[i];
        other->hidden[i] *= i / TINY_DIM == 7 ? -1.0f : 2.0f; /* one token turned round, the others twice as long */
    }
    double off = norm;
    for (int i = 7 * TINY_DIM; i < 8 * TINY_DIM; i++)
        off += 3 * (double)one->hidden[i] * (double)one->hidden[i];
    cr_assert(drift_measure(one, other, &d) >= 0);
    cr_expect_float_eq(d.relative_l2, sqrt(off / norm), 1e-9);
    cr_expect_float_eq(d.cosine, (N_PROMPT - 2.0) / N_PROMPT, 1e-9);
    cr_expect(d.top1 == 1); /* the final norm forgets lengths, and position 7 is not sampled */
    lab_context_free(other);
    lab_context_free(one);
    lab_close(&l);
}

/* ---- search ---- */

static int attend_nothing(const struct lab_layer *layer, void *arg)
{
    (void)layer;
    (void)arg;
    return -ECANCELED;
}

struct search_check {
    enum lab_group group;
    bool bias;
    int n_checked;
};

/* Shares in double, by sorting. */
static void expect_best(const struct lab_layer *l, const struct lab_search *s, int head, int query, const int32_t *chosen)
{
    double share[64] = {0};
    for (int g = 0; g < l->group; g++) {
        double logit[64], sum = 0;
        for (int u = 0; u < s->n_units; u++) {
            logit[u] = s->bias ? (double)s->bias[head * s->n_units + u] : 0;
            for (int c = 0; c < s->width; c++)
                logit[u] += (double)s->scale * (double)s->queries[((int64_t)query * l->n_heads + head * l->group + g) * s->width + c] *
                            (double)s->summary[((int64_t)head * s->n_units + u) * s->width + c];
            sum += exp(logit[u]);
        }
        for (int u = 0; u < s->n_units; u++)
            share[u] = s->group == LAB_GROUP_MAX ? fmax(share[u], exp(logit[u]) / sum) : share[u] + exp(logit[u]) / sum;
    }
    for (int u = 0; u < s->n_units; u++) {
        bool in = false;
        int better = 0;
        for (int i = 0; i < s->n_choose; i++)
            in |= chosen[i] == u;
        for (int other = 0; other < s->n_units; other++)
            better += share[other] > share[u] * (in ? 1 + 1e-4 : 1 - 1e-4);
        cr_assert(in ? better < s->n_choose : better >= s->n_choose, "head %d, query %d, unit %d of share %g", head, query, u, share[u]);
    }
}

static int check_search(const struct lab_layer *l, void *arg)
{
    enum { UNIT = 16, UNITS = (N_PROMPT + UNIT - 1) / UNIT, CHOOSE = 5 };
    struct search_check *check = arg;
    float means[TINY_KV_HEADS * UNITS * D], bias[TINY_KV_HEADS * UNITS];
    int counts[TINY_KV_HEADS * UNITS];
    int32_t chosen[TINY_KV_HEADS * N_FED * CHOOSE];
    lab_unit_means(l, UNIT, NULL, means, counts);
    for (int i = 0; i < TINY_KV_HEADS * UNITS; i++)
        bias[i] = i % 3 == 0 ? -INFINITY : logf((float)counts[i]);
    const struct lab_search s = {.n_units = UNITS, .width = D, .summary = means, .queries = l->q, .bias = check->bias ? bias : NULL,
                                 .scale = 3 * l->context->model->config.attention_scale, .group = check->group, .n_choose = CHOOSE};
    cr_assert(lab_search(l, &s, chosen) >= 0);
    for (int h = 0; h < TINY_KV_HEADS; h++)
        for (int q = 0; q < N_FED; q++) {
            const int32_t *row = chosen + (h * N_FED + q) * CHOOSE;
            for (int i = 0; i < CHOOSE; i++)
                cr_assert(row[i] >= 0 && row[i] < UNITS && (i == 0 || row[i] > row[i - 1]) && !(check->bias && (h * UNITS + row[i]) % 3 == 0));
            expect_best(l, &s, h, q, row);
            check->n_checked++;
        }
    cr_expect(counts[UNITS - 1] == N_PROMPT - (UNITS - 1) * UNIT);
    return lab_attend_all(l, l->k, l->v);
}

static int ignore_logits(void *arg, int row, const float *logits)
{
    (void)arg;
    (void)row;
    (void)logits;
    return 0;
}

Test(fidelity_lab, test_search_finds_the_best_units)
{
    struct lab_fixture l;
    lab_open(&l, 2);
    struct lab_context *context = prefilled(&l, N_PROMPT, LAB_VALUES_EXACT, NULL);
    for (int i = 0; i < 4; i++) {
        struct search_check check = {.group = i % 2 ? LAB_GROUP_MAX : LAB_GROUP_MEAN, .bias = i / 2};
        const struct lab_continuation c = {.context = context, .tokens = l.tokens + N_PROMPT, .n = N_FED, .attend = check_search, .attend_arg = &check, .logits = ignore_logits};
        struct lab_counters counters;
        cr_assert(lab_continue(&c, &counters) >= 0);
        cr_expect(check.n_checked == l.f.model.config.n_layers * TINY_KV_HEADS * N_FED);
    }
    lab_context_free(context);
    lab_close(&l);
}

/* ---- continuations ---- */

Test(fidelity_lab, test_a_method_that_fails_ends_the_continuation)
{
    struct lab_counters counters = {.attended = 7};
    struct lab_fixture l;
    lab_open(&l, 1);
    struct lab_context *context = prefilled(&l, N_PROMPT, LAB_VALUES_EXACT, NULL);
    struct lab_continuation c = {.context = context, .tokens = l.tokens, .n = 3, .attend = attend_nothing, .logits = ignore_logits};
    cr_expect(lab_continue(&c, &counters) == -ECANCELED && counters.attended == 7);
    c.n = 0;
    cr_expect(lab_continue(&c, &counters) == -EINVAL);
    c.n = LAB_MAX_NEW + 1;
    cr_expect(lab_continue(&c, &counters) == -EINVAL);
    lab_context_free(context);
    lab_close(&l);
}

static void expect_near(const struct fidelity_sink *sink, const float *want, const char *what)
{
    for (int i = 0; i < sink->n_rows * sink->n_vocab; i++)
        cr_assert_float_eq((double)sink->logits[i], (double)want[i], 2e-2, "%s, row %d: %g, want %g", what, i / sink->n_vocab, (double)sink->logits[i], (double)want[i]);
}

Test(fidelity_lab, test_everything_attended_is_full_attention)
{
    static double reference[(N_PROMPT + N_FED) * TINY_VOCAB];
    static float want[N_FED * TINY_VOCAB];
    const struct {
        const struct fidelity_method *method;
        int budget, fetch;
    } runs[] = {
        {lab_method(&headinfer_methods, "headinfer"), FIDELITY_ALL, FIDELITY_ALL},
        {lab_method(&ttkv_methods, "ttkv"), FIDELITY_ALL, FIDELITY_ALL},
        {lab_method(&ttkv_methods, "ttkv"), N_PROMPT, 0},
        {lab_method(&quest_methods, "quest"), FIDELITY_ALL, FIDELITY_ALL},
        {lab_method(&quest_methods, "quest"), 0, N_PROMPT},
        {lab_method(&shadowkv_methods, "shadowkv"), FIDELITY_ALL, FIDELITY_ALL},
        {lab_method(&shadowkv_methods, "shadowkv"), 200, N_PROMPT - 200},
        {lab_method(&eviction_methods, "blockwise-snapkv-512"), N_PROMPT, 0},
        {lab_method(&eviction_methods, "recent-2048"), FIDELITY_ALL, 0},
        {lab_method(&drift_methods, "layer-major-exact"), FIDELITY_ALL, 0},
    };
    struct lab_fixture l;
    lab_open(&l, 2);
    tiny_reference_logits(&l.f, l.tokens, N_PROMPT + N_FED, reference);
    for (int i = 0; i < N_FED * TINY_VOCAB; i++)
        want[i] = (float)reference[N_PROMPT * TINY_VOCAB + i];
    for (size_t i = 0; i < sizeof(runs) / sizeof(runs[0]); i++) {
        struct fidelity_sink *sink = lab_run(runs[i].method, &l.f.model, &l.c, runs[i].budget, runs[i].fetch);
        expect_near(sink, want, runs[i].method->name);
        cr_expect_float_eq(lab_run_attended(sink, &l.f.model), N_PROMPT + (N_FED + 1) / 2.0, 1e-9);
        lab_run_free(sink);
    }
    lab_close(&l);
}

/* What a method attends and reads, counted by hand: 430 prompt tokens, and 10.5 new ones on average. */
Test(fidelity_lab, test_counts)
{
    const double kv = 2.0 * TINY_HEAD_DIM * sizeof(bf16_t), heads = 3 * TINY_KV_HEADS;
    struct lab_fixture l;
    lab_open(&l, 2);

    struct fidelity_sink *s = lab_run(lab_method(&headinfer_methods, "headinfer"), &l.f.model, &l.c, FIDELITY_ALL, FIDELITY_ALL);
    cr_expect_float_eq(s->counts.bytes_fetched / N_FED, heads * N_PROMPT * kv, 1e-6);
    cr_expect(lab_run_value(s, FIDELITY_FAST_BYTES) == 0);
    lab_run_free(s);

    /* Two dense layers, then 8 pages of 16; the last page of the prompt has 14 tokens. */
    s = lab_run(lab_method(&quest_methods, "quest"), &l.f.model, &l.c, 64, 64);
    const double attended = lab_run_attended(s, &l.f.model) - (N_FED + 1) / 2.0;
    cr_expect(attended <= (2 * N_PROMPT + 128) / 3.0 && attended > (2 * N_PROMPT + 126) / 3.0 - 1e-9);
    cr_expect(s->counts.bytes_fetched == 0);
    lab_run_free(s);

    /* Sinks and newest 60, then one block of 128: the first has four sinks in it, the last is all but the newest. */
    s = lab_run(lab_method(&ttkv_methods, "ttkv"), &l.f.model, &l.c, 64, 64);
    const double slow = lab_run_attended(s, &l.f.model) - (N_FED + 1) / 2.0 - 64;
    cr_expect(slow <= 128 && slow > 0);
    cr_expect_float_eq(s->counts.bytes_fetched / N_FED, heads * slow * (TINY_HEAD_DIM * 1.5 + 8), 1e-6 * s->counts.bytes_fetched);
    lab_run_free(s);

    /* 16 chunks: 4 local, 128 * 24 / 1024 = 3 outliers, 9 fetched, values alone. The last chunk has 6 tokens. */
    s = lab_run(lab_method(&shadowkv_methods, "shadowkv"), &l.f.model, &l.c, 64, 64);
    cr_expect_float_eq(lab_run_attended(s, &l.f.model), 126 + (N_FED + 1) / 2.0, 1e-9);
    cr_expect_float_eq(s->counts.bytes_fetched / N_FED, heads * 72 * kv / 2, 1e-6);
    lab_run_free(s);
    lab_close(&l);
}

Test(fidelity_lab, test_fewer_bits_cost_more_and_take_less)
{
    static const char *const kivi[] = {"kivi-4bit", "kivi-2bit"}, *const kvquant[] = {"kvquant-4bit", "kvquant-3bit"};
    struct lab_fixture l;
    lab_open(&l, 2);
    struct fidelity_sink *full = lab_run(lab_method(&headinfer_methods, "headinfer"), &l.f.model, &l.c, FIDELITY_ALL, FIDELITY_ALL);
    for (int i = 0; i < 2; i++) {
        const struct fidelity_methods *methods = i ? &kvquant_methods : &kivi_methods;
        struct fidelity_sink *more = lab_run(lab_method(methods, i ? kvquant[0] : kivi[0]), &l.f.model, &l.c, FIDELITY_ALL, 0);
        struct fidelity_sink *less = lab_run(lab_method(methods, i ? kvquant[1] : kivi[1]), &l.f.model, &l.c, FIDELITY_ALL, 0);
        const double kl_more = lab_run_kl(full, more), kl_less = lab_run_kl(full, less);
        cr_expect(kl_more > 1e-9 && kl_more < kl_less && kl_less < 0.1, "%g %g", kl_more, kl_less);
        cr_expect(lab_run_value(more, FIDELITY_FAST_BYTES) > lab_run_value(less, FIDELITY_FAST_BYTES));
        lab_run_free(less);
        lab_run_free(more);
    }
    struct fidelity_sink *diffkv = lab_run(lab_method(&diffkv_methods, "diffkv"), &l.f.model, &l.c, FIDELITY_ALL, 0);
    cr_expect(lab_run_kl(full, diffkv) > 1e-9 && lab_run_attended(diffkv, &l.f.model) <= N_PROMPT + (N_FED + 1) / 2.0);
    lab_run_free(diffkv);
    lab_run_free(full);
    lab_close(&l);
}

/* Prompts shorter than windows, blocks and pages. */
Test(fidelity_lab, test_short_prompts)
{
    static const int lengths[] = {1, 3, 17, 40, 64, 65, 129, 161};
    const struct fidelity_methods *const all[] = {&headinfer_methods, &kivi_methods, &kvquant_methods, &diffkv_methods, &ttkv_methods,
                                                  &quest_methods, &shadowkv_methods, &eviction_methods, &drift_methods};
    struct lab_fixture l;
    lab_open(&l, 1);
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        const struct fidelity_case c = {.tokens = l.tokens, .n_prompt = lengths[i], .n_fed = 2};
        for (size_t k = 0; k < sizeof(all) / sizeof(all[0]); k++)
            for (int m = 0; m < all[k]->n; m++) {
                struct fidelity_sink *sink = lab_run(&all[k]->methods[m], &l.f.model, &c, 8, 8);
                for (int j = 0; j < 2 * TINY_VOCAB; j++)
                    cr_assert(isfinite(sink->logits[j]), "%s at %d tokens", all[k]->methods[m].name, lengths[i]);
                lab_run_free(sink);
            }
    }
    lab_close(&l);
}

Test(fidelity_lab, test_the_cache_gives_the_same_context_until_it_is_cleared)
{
    const struct lab_context *a, *b, *other;
    struct lab_fixture l;
    lab_open(&l, 1);
    const struct fidelity_case shorter = {.tokens = l.tokens, .n_prompt = 50, .n_fed = 1};
    cr_assert(lab_cache_context(&l.f.model, &l.c, &a) >= 0 && lab_cache_context(&l.f.model, &shorter, &other) >= 0 && lab_cache_context(&l.f.model, &l.c, &b) >= 0);
    cr_expect(a == b && other != a && other->n_tokens == 50);
    lab_close(&l);
}
