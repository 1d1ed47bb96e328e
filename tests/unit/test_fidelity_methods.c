/* What each method attends, one layer and query at a time: choice and attention again in plain loops and double precision, by the formulas in the methods' heads. A query whose choice hangs
 * on a near tie is left out, and most must be left in. */
#include "bench/fidelity/lab/baseline.h"
#include "bench/fidelity/lab/baseline_methods.h"
#include "bench/fidelity/lab/lab_quant.h"
#include "tests/unit/fidelity_fixture.h"
#include "tests/unit/engine_fixture.h"
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N = 430, N_NEW = 12, D = TINY_HEAD_DIM, GROUP = TINY_HEADS / TINY_KV_HEADS };

/* What a query of one KV head attends of the prompt. */
struct view {
    bool attended[N];
    float k[N][D], v[N][D]; /* as they read */
    bool sure;              /* the choice does not hang on rounding */
};

typedef void view_fn(const struct lab_layer *l, int head, int query, int budget, int fetch, struct view *ret);

struct check {
    const struct baseline *baseline;
    struct baseline_args args;
    view_fn *view;
    int n_sure, n;
};

static float bf16_value(bf16_t x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static float rounded(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &bits, sizeof(bits));
    return x;
}

static const float *query_of(const struct lab_layer *l, int query, int head, int g)
{
    return l->q + ((int64_t)query * l->n_heads + head * GROUP + g) * D;
}

static double dot(const float *q, const float *k)
{
    double sum = 0;
    for (int c = 0; c < D; c++)
        sum += (double)q[c] * (double)k[c];
    return sum;
}

static void attend_view(const struct lab_layer *l, const struct view *w, int head, int query, int g, double *out)
{
    const float *q = query_of(l, query, head, g);
    double weight = 0;
    memset(out, 0, D * sizeof(*out));
    for (int i = 0; i < N + query + 1; i++) {
        float k[D], v[D];
        if (i < N && !w->attended[i])
            continue;
        for (int c = 0; c < D; c++) {
            k[c] = i < N ? w->k[i][c] : bf16_value(l->new_k[((int64_t)head * l->n_new + i - N) * D + c]);
            v[c] = i < N ? w->v[i][c] : bf16_value(l->new_v[((int64_t)head * l->n_new + i - N) * D + c]);
        }
        const double p = exp(dot(q, k) * (double)l->context->model->config.attention_scale);
        weight += p;
        for (int c = 0; c < D; c++)
            out[c] += p * (double)v[c];
    }
    for (int c = 0; c < D; c++)
        out[c] /= weight;
}

static void view_exact(const struct lab_layer *l, int head, struct view *w)
{
    w->sure = true;
    for (int i = 0; i < N; i++) {
        w->attended[i] = false;
        for (int c = 0; c < D; c++) {
            w->k[i][c] = bf16_value(l->k[((int64_t)head * N + i) * D + c]);
            w->v[i][c] = bf16_value(l->v[((int64_t)head * N + i) * D + c]);
        }
    }
}

static int checked_attend(const struct lab_layer *l, void *arg)
{
    static struct view w;
    struct check *check = arg;
    cr_assert(check->baseline->attend(l, &check->args) >= 0);
    for (int head = 0; head < TINY_KV_HEADS; head++)
        for (int query = 0; query < l->n_new; query++) {
            check->view(l, head, query, check->args.budget, check->args.fetch, &w);
            check->n++;
            check->n_sure += w.sure;
            for (int g = 0; w.sure && g < GROUP; g++) {
                double want[D];
                attend_view(l, &w, head, query, g, want);
                for (int c = 0; c < D; c++)
                    cr_assert_float_eq((double)l->out[((int64_t)query * l->n_heads + head * GROUP + g) * D + c], want[c], 1e-4, "layer %d, head %d, query %d", l->index, head, query);
            }
        }
    return 0;
}

static int ignore_logits(void *arg, int row, const float *logits)
{
    (void)arg;
    (void)row;
    (void)logits;
    return 0;
}

static void check_method(const struct fidelity_method *method, view_fn *view, int budget, int fetch)
{
    static int32_t tokens[N + N_NEW];
    struct fixture f;
    struct lab_context *context;
    struct lab_counters counters;
    struct check check = {.baseline = method->arg, .view = view};
    check.args = (struct baseline_args){.constants = check.baseline->constants, .budget = budget, .fetch = fetch};
    cr_assert(fixture_open(&f, (struct fixture_params){.n_threads = 2}));
    fixture_tokens(9, tokens, N + N_NEW);
    const struct lab_prefill_params p = {.model = &f.model, .tokens = tokens, .n = N, .chunk = N};
    cr_assert(lab_prefill(&p, &context) >= 0);
    const struct lab_continuation c = {.context = context, .tokens = tokens + N, .n = N_NEW, .attend = checked_attend, .attend_arg = &check, .logits = ignore_logits};
    cr_assert(lab_continue(&c, &counters) >= 0);
    cr_expect(check.n == 3 * TINY_KV_HEADS * N_NEW && check.n_sure > check.n * 3 / 4, "%s: %d of %d queries checked", method->name, check.n_sure, check.n);
    lab_context_free(context);
    fixture_close(&f);
}

/* ---- choices ---- */

/* Marks the n best of n_units; false where the last one in and the first one out are close. */
static bool best(const double *share, int n_units, int n, bool *ret_in)
{
    for (int u = 0; u < n_units; u++) {
        int better = 0;
        for (int other = 0; other < n_units; other++)
            better += share[other] > share[u] || (share[other] == share[u] && other < u);
        ret_in[u] = better < n;
    }
    double in = INFINITY, out = -INFINITY;
    for (int u = 0; u < n_units; u++) {
        in = ret_in[u] ? fmin(in, share[u]) : in;
        out = ret_in[u] ? out : fmax(out, share[u]);
    }
    return n == 0 || n >= n_units || in - out > 1e-4 * fabs(in);
}

static void to_softmax(double *x, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += x[i] = exp(x[i]);
    for (int i = 0; i < n; i++)
        x[i] /= sum;
}

/* Sylvester's matrix over sqrt(d), its own inverse. */
static void unrotate(const float *x, double *y)
{
    for (int i = 0; i < D; i++) {
        y[i] = 0;
        for (int j = 0; j < D; j++)
            y[i] += (__builtin_popcount((unsigned)(i & j)) & 1 ? -(double)x[j] : (double)x[j]) / sqrt(D);
    }
}

static void quest_view(const struct lab_layer *l, int head, int query, int budget, int fetch, struct view *w)
{
    enum { PAGE = 16, PAGES = (N + PAGE - 1) / PAGE };
    double share[PAGES] = {0}, key[D], q[D];
    bool in[PAGES];
    view_exact(l, head, w);
    for (int g = 0; g < GROUP; g++) {
        double bound[PAGES], max[PAGES][D], min[PAGES][D];
        unrotate(query_of(l, query, head, g), q);
        for (int i = 0; i < N; i++) {
            unrotate(w->k[i], key);
            for (int c = 0; c < D; c++) {
                max[i / PAGE][c] = i % PAGE ? fmax(max[i / PAGE][c], key[c]) : key[c];
                min[i / PAGE][c] = i % PAGE ? fmin(min[i / PAGE][c], key[c]) : key[c];
            }
        }
        for (int p = 0; p < PAGES; p++) {
            bound[p] = 0;
            for (int c = 0; c < D; c++)
                bound[p] += fmax(q[c] * max[p][c], q[c] * min[p][c]) * (double)l->context->model->config.attention_scale;
        }
        to_softmax(bound, PAGES);
        for (int p = 0; p < PAGES; p++)
            share[p] += bound[p] / GROUP;
    }
    w->sure = best(share, PAGES, (budget + fetch) / PAGE, in);
    for (int i = 0; i < N; i++)
        w->attended[i] = l->index < 2 || in[i / PAGE];
    w->sure |= l->index < 2;
}

static void mean_key(const struct view *w, const bool *skip, int first, int end, float *ret, int *ret_n)
{
    double sum[D] = {0};
    *ret_n = 0;
    for (int i = first; i < end && i < N; i++) {
        if (skip && skip[i])
            continue;
        ++*ret_n;
        for (int c = 0; c < D; c++)
            sum[c] += (double)w->k[i][c];
    }
    for (int c = 0; c < D; c++)
        ret[c] = (float)(sum[c] / (*ret_n ? *ret_n : 1));
}

static void shadowkv_view(const struct lab_layer *l, int head, int query, int budget, int fetch, struct view *w)
{
    enum { CHUNK = 8, CHUNKS = (N + CHUNK - 1) / CHUNK, LOCAL = 4 };
    const int outliers = (budget + fetch) * 24 / 1024, chosen = (budget + fetch) / CHUNK - LOCAL - outliers;
    double odd[CHUNKS], share[CHUNKS] = {0};
    float landmark[CHUNKS][D];
    bool fast[CHUNKS], in[CHUNKS];
    int n;
    view_exact(l, head, w);
    for (int c = 0; c < CHUNKS; c++) {
        mean_key(w, NULL, c * CHUNK, (c + 1) * CHUNK, landmark[c], &n);
        odd[c] = -1;
        for (int i = c * CHUNK; i < (c + 1) * CHUNK && i < N; i++)
            odd[c] = fmax(odd[c], -dot(w->k[i], landmark[c]) / sqrt(dot(w->k[i], w->k[i]) * dot(landmark[c], landmark[c])));
        odd[c] = c >= CHUNKS - LOCAL ? -9 : odd[c];
    }
    bool sure = best(odd, CHUNKS, outliers, fast);
    for (int c = CHUNKS - LOCAL; c < CHUNKS; c++)
        fast[c] = true;
    for (int g = 0; g < GROUP; g++) {
        double logit[CHUNKS];
        for (int c = 0; c < CHUNKS; c++)
            logit[c] = fast[c] ? -INFINITY : dot(query_of(l, query, head, g), landmark[c]) * (double)l->context->model->config.attention_scale;
        to_softmax(logit, CHUNKS);
        for (int c = 0; c < CHUNKS; c++)
            share[c] = fmax(share[c], logit[c]);
    }
    sure &= best(share, CHUNKS, chosen, in);
    w->sure = sure;
    for (int i = 0; i < N; i++)
        w->attended[i] = fast[i / CHUNK] || in[i / CHUNK];
}

static void ttkv_view(const struct lab_layer *l, int head, int query, int budget, int fetch, struct view *w)
{
    enum { BLOCKS = (N + BLOCK_TOKENS - 1) / BLOCK_TOKENS };
    double share[BLOCKS] = {0};
    bool fast[N], in[BLOCKS];
    float mean[BLOCKS][D];
    int n[BLOCKS];
    view_exact(l, head, w);
    for (int i = 0; i < N; i++)
        fast[i] = i < SELECT_SINKS || i >= N - (budget - SELECT_SINKS);
    for (int b = 0; b < BLOCKS; b++)
        mean_key(w, fast, b * BLOCK_TOKENS, (b + 1) * BLOCK_TOKENS, mean[b], &n[b]);
    for (int g = 0; g < GROUP; g++) {
        double logit[BLOCKS];
        for (int b = 0; b < BLOCKS; b++)
            logit[b] = n[b] ? dot(query_of(l, query, head, g), mean[b]) * (double)l->context->model->config.attention_scale + log(n[b]) : -INFINITY;
        to_softmax(logit, BLOCKS);
        for (int b = 0; b < BLOCKS; b++)
            share[b] += logit[b] / GROUP;
    }
    w->sure = best(share, BLOCKS, fetch / BLOCK_TOKENS, in);
    for (int i = 0; i < N; i++) {
        w->attended[i] = fast[i] || in[i / BLOCK_TOKENS];
        if (fast[i])
            continue;
        lab_quant_tokens(w->k[i], 1, D, D, 8);
        lab_quant_tokens(w->v[i], 1, D, VALUE_GROUP, 4);
        for (int c = 0; c < D; c++) {
            w->k[i][c] = rounded(w->k[i][c]);
            w->v[i][c] = rounded(w->v[i][c]);
        }
    }
}

/* Mean attention of the newest 64 prompt queries, times N. */
static void importance(const struct lab_layer *l, const struct view *w, int head, double *s)
{
    const float *window = l->context->window + (int64_t)l->index * LAB_WINDOW * l->n_heads * D;
    memset(s, 0, N * sizeof(*s));
    for (int i = 0; i < LAB_WINDOW * GROUP; i++) {
        const float *q = window + (int64_t)(i / GROUP * l->n_heads + head * GROUP + i % GROUP) * D;
        const int seen = N - LAB_WINDOW + i / GROUP + 1;
        double logit[N];
        for (int k = 0; k < seen; k++)
            logit[k] = dot(q, w->k[k]) * (double)l->context->model->config.attention_scale;
        to_softmax(logit, seen);
        for (int k = 0; k < seen; k++)
            s[k] += logit[k] * N / (LAB_WINDOW * GROUP);
    }
}

static void diffkv_view(const struct lab_layer *l, int head, int query, int budget, int fetch, struct view *w)
{
    double s[N];
    (void)query;
    (void)budget;
    (void)fetch;
    view_exact(l, head, w);
    importance(l, w, head, s);
    for (int i = 0; i < N; i++) {
        const bool newest = i >= N - LAB_WINDOW, high = newest || s[i] >= 1;
        w->sure &= newest || (fabs(s[i] - 1) > 1e-5 && fabs(s[i] - 0.02) > 1e-6);
        w->attended[i] = high || s[i] >= 0.02;
        float key[D];
        double plain[D];
        unrotate(w->k[i], plain);
        for (int c = 0; c < D; c++)
            key[c] = (float)plain[c];
        lab_quant_tokens(key, 1, D, D, high ? 8 : 4);
        lab_quant_tokens(w->v[i], 1, D, D, high ? 4 : 2);
        unrotate(key, plain);
        for (int c = 0; c < D; c++) {
            w->k[i][c] = rounded((float)plain[c]);
            w->v[i][c] = rounded(w->v[i][c]);
        }
    }
}

Test(fidelity_methods, test_quest_attends_the_pages_of_largest_bound)
{
    check_method(lab_method(&quest_methods, "quest"), quest_view, 64, 96);
}

Test(fidelity_methods, test_shadowkv_attends_outliers_local_chunks_and_the_best_landmarks)
{
    check_method(lab_method(&shadowkv_methods, "shadowkv"), shadowkv_view, 64, 128);
}

Test(fidelity_methods, test_ttkv_attends_the_newest_and_the_best_blocks)
{
    check_method(lab_method(&ttkv_methods, "ttkv"), ttkv_view, 60, 128);
}

Test(fidelity_methods, test_diffkv_gives_bits_by_attention)
{
    check_method(lab_method(&diffkv_methods, "diffkv"), diffkv_view, FIDELITY_ALL, 0);
}
