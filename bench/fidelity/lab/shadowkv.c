/* ShadowKV-like landmarks (arXiv 2410.21465): chunks of 8 tokens, a landmark is the mean of a chunk's keys (RoPE applied).
 *
 *     share[h, c] = softmax over c of q[h] . landmark_c * scale;   maximum over the group's heads;   the best chunks are fetched
 *
 * The newest 4 chunks and the outliers, those whose least cosine between a key and the chunk's landmark is lowest, stay in fast memory: 24 outlier chunks for each 1,024 tokens of budget, as in
 * the published code. B + F is the budget of it all (in the original outliers and local chunks come on top), so that a row compares with others at equal attended tokens.
 *
 * Simplified: fetched keys are exact. The original rebuilds them on the device from a rank-160 decomposition of the keys before RoPE, and fetches values alone; its memory (160 of 1,024
 * dimensions) and its traffic (values) are what is counted, its error is not suffered. One choice for each query and KV head as there. */
#include "bench/fidelity/lab/baseline.h"
#include "bench/fidelity/lab/baseline_methods.h"
#include "bench/fidelity/lab/lab_attention.h"
#include "bench/fidelity/lab/lab_search.h"
#include "kernels/cpu/half.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 8, LOCAL_CHUNKS = 4, OUTLIERS_PER_1024 = 24 };
static const double LOW_RANK_SHARE = 160.0 / 1024;

struct shadowkv {
    const struct lab_layer *l;
    int n_chunks, n_local, n_outliers, n_choose;
    float *landmarks;      /* [n_kv_heads, n_chunks, d] */
    float *odd;            /* [n_kv_heads, n_chunks] minus the least cosine; local chunks: -INFINITY */
    float *bias;           /* [n_kv_heads, n_chunks] -INFINITY where the chunk is in fast memory */
    uint8_t *fast;         /* [n_kv_heads, n_rows] */
    int32_t *outliers;     /* [n_kv_heads, n_outliers] */
    int32_t *chosen;
};

static float cosine(const bf16_t *key, const float *mean, int d)
{
    float dot = 0, a = 0, b = 0;
    for (int i = 0; i < d; i++) {
        const float x = bf16_to_float(key[i]);
        dot += x * mean[i];
        a += x * x;
        b += mean[i] * mean[i];
    }
    return a > 0 && b > 0 ? dot / sqrtf(a * b) : 0;
}

static float least_cosine(const struct shadowkv *s, int head, int chunk)
{
    const struct lab_layer *l = s->l;
    const float *mean = s->landmarks + ((int64_t)head * s->n_chunks + chunk) * l->head_dim;
    float least = 1;
    for (int row = chunk * CHUNK; row < (chunk + 1) * CHUNK && row < l->n_rows; row++) {
        const float x = cosine(l->k + ((int64_t)head * l->n_rows + row) * l->head_dim, mean, l->head_dim);
        least = x < least ? x : least;
    }
    return least;
}

static void mark_fast(struct shadowkv *s, int head, int chunk)
{
    s->bias[(int64_t)head * s->n_chunks + chunk] = -INFINITY;
    for (int row = chunk * CHUNK; row < (chunk + 1) * CHUNK && row < s->l->n_rows; row++)
        s->fast[(int64_t)head * s->l->n_rows + row] = 1;
}

static int find_fast(struct shadowkv *s)
{
    const struct lab_layer *l = s->l;
    const struct model *m = l->context->model;
    for (int i = 0; i < l->n_kv_heads * s->n_chunks; i++)
        s->odd[i] = i % s->n_chunks >= s->n_chunks - s->n_local ? -INFINITY : -least_cosine(s, i / s->n_chunks, i % s->n_chunks);
    int r = m->ops->topk(m->stream, s->odd, l->n_kv_heads, s->n_chunks, s->n_outliers, s->outliers);
    for (int h = 0; r >= 0 && h < l->n_kv_heads; h++) {
        for (int i = 0; i < s->n_outliers; i++)
            mark_fast(s, h, s->outliers[h * s->n_outliers + i]);
        for (int c = s->n_chunks - s->n_local; c < s->n_chunks; c++)
            mark_fast(s, h, c);
    }
    return r;
}

static int min_int(int a, int b)
{
    return a < b ? a : b;
}

static int init(struct shadowkv *s, const struct baseline_args *a)
{
    const struct lab_layer *l = s->l;
    const int attended = baseline_attended(a, l->n_rows);
    s->n_chunks = (l->n_rows + CHUNK - 1) / CHUNK;
    const int n_budget = attended == l->n_rows ? s->n_chunks : attended / CHUNK;
    s->n_local = min_int(LOCAL_CHUNKS, n_budget);
    s->n_outliers = min_int(n_budget - s->n_local, (int)((int64_t)attended * OUTLIERS_PER_1024 / 1024));
    s->n_choose = n_budget - s->n_local - s->n_outliers;
    const size_t heads = (size_t)l->n_kv_heads, chunks = heads * (size_t)s->n_chunks;
    s->landmarks = malloc(chunks * (size_t)l->head_dim * sizeof *s->landmarks);
    s->odd = malloc(chunks * sizeof *s->odd);
    s->bias = calloc(chunks, sizeof *s->bias);
    s->fast = calloc(heads, (size_t)l->n_rows);
    s->outliers = malloc((heads * (size_t)s->n_outliers + 1) * sizeof *s->outliers);
    s->chosen = malloc((heads * (size_t)l->n_new * (size_t)s->n_choose + 1) * sizeof *s->chosen);
    return s->landmarks && s->odd && s->bias && s->fast && s->outliers && s->chosen ? 0 : -ENOMEM;
}

static void fini(struct shadowkv *s)
{
    free(s->chosen);
    free(s->outliers);
    free(s->fast);
    free(s->bias);
    free(s->odd);
    free(s->landmarks);
}

static int search(struct shadowkv *s)
{
    const struct lab_layer *l = s->l;
    lab_unit_means(l, CHUNK, NULL, s->landmarks, NULL);
    int r = find_fast(s);
    const struct lab_search p = {
        .n_units = s->n_chunks,
        .width = l->head_dim,
        .summary = s->landmarks,
        .queries = l->q,
        .bias = s->bias,
        .scale = l->context->model->config.attention_scale,
        .group = LAB_GROUP_MAX,
        .n_choose = s->n_choose,
    };
    return r < 0 ? r : lab_search(l, &p, s->chosen);
}

static int attend(const struct lab_layer *l, void *arg)
{
    struct shadowkv s = {.l = l};
    int r = init(&s, arg);
    if (r >= 0)
        r = search(&s);
    if (r >= 0) {
        const struct lab_choice choice = {
            .unit = CHUNK,
            .n_chosen = s.n_choose,
            .chosen = s.chosen,
            .fast = s.fast,
            .slow_k = l->k,
            .slow_v = l->v,
            .slow_row_bytes = baseline_row_bytes(l, 0, 16),
        };
        r = lab_attend_choice(l, &choice);
        l->counters->bytes_fast += l->n_kv_heads * ((s.n_local + s.n_outliers) * CHUNK * baseline_row_bytes(l, 16, 16) + s.n_chunks * 2.0 * l->head_dim +
                                                    LOW_RANK_SHARE * l->n_rows * baseline_row_bytes(l, 16, 0));
    }
    fini(&s);
    return r;
}

static const struct baseline shadowkv = {.attend = attend};

static const struct fidelity_method methods[] = {
    {
        .name = "shadowkv",
        .text = "landmarks (mean key of 8 tokens); outlier and newest chunks fast, the best of the others fetched, B + F tokens in all; keys exact",
        .group = GROUP_BASELINE,
        .run = baseline_run,
        .arg = &shadowkv,
        .tasks = ON_ALL,
        .sweep = true,
        .fetch_per_budget = 1,
        .importance = 1,
    },
};
const struct fidelity_methods shadowkv_methods = {methods, sizeof methods / sizeof *methods};
