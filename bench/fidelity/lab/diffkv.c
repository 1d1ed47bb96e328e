/* DiffKV-like (arXiv 2412.03131): keys get more bits than values, important tokens more than others, and the least important are dropped, each head as its own attention says. With
 * s = the attention that a token gets, as a multiple of the mean over all n tokens of the prompt:
 *
 *     s >= 1.0         8-bit keys, 4-bit values
 *     0.02 <= s < 1.0  4-bit keys, 2-bit values
 *     s < 0.02         dropped
 *
 * the newest 64 tokens keep the higher precision. Codes are asymmetric, one scale and minimum (fp16) for a token's key and one for its value. Thresholds and window are those that its
 * published scripts use for Llama-3 8B (kv-quant-thresh 1.0, kv-prune-thresh 0.02, kv-buffer 64). Everything left is resident and attended; what that takes follows from the text, not from B.
 *
 * Simplified: s is the mean attention of the newest 64 queries and the group's heads (the original sums over all queries of the prompt and takes the group's maximum), decided once at the
 * prompt's end (there tokens also sink from one precision to the other while an answer grows). */
#include "bench/fidelity/lab/baseline.h"
#include "bench/fidelity/lab/baseline_methods.h"
#include "bench/fidelity/lab/lab_attention.h"
#include "bench/fidelity/lab/lab_keys.h"
#include "bench/fidelity/lab/lab_quant.h"
#include "kernels/cpu/half.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { BUFFER = LAB_WINDOW, HIGH_K = 8, HIGH_V = 4, LOW_K = 4, LOW_V = 2, SCALE_BYTES = 8 };
static const float HIGH_FROM = 1.0f, KEEP_FROM = 0.02f; /* multiples of the mean */

enum precision { DROPPED, LOW, HIGH };

static enum precision precision_of(const struct lab_layer *l, float score, int row)
{
    if (row >= l->n_rows - BUFFER)
        return HIGH;
    const float s = score * (float)l->n_rows;
    if (s >= HIGH_FROM)
        return HIGH;
    return s >= KEEP_FROM ? LOW : DROPPED;
}

/* scores [n_kv_heads, n_rows]; what stands for the window means nothing. */
static int score_rows(const struct lab_layer *l, float *scores)
{
    const struct lab_context *ctx = l->context;
    const struct model *m = ctx->model;
    const int n_scored = l->n_rows - ctx->n_window;
    if (n_scored == 0)
        return 0;
    const struct window_score_params p = {
        .q = ctx->window + (int64_t)l->index * ctx->n_window * l->n_heads * l->head_dim,
        .n_window = ctx->n_window,
        .k = l->k,
        .head_stride = (int64_t)l->n_rows * l->head_dim,
        .n_keys = l->n_rows,
        .n_heads = l->n_heads,
        .n_kv_heads = l->n_kv_heads,
        .head_dim = l->head_dim,
        .scale = m->config.attention_scale,
        .last = n_scored,
        .pool = 1,
        .chunk = 1,
        .scores = scores,
    };
    int r = m->ops->window_scores(m->stream, &p);
    for (int h = l->n_kv_heads - 1; r >= 0 && h > 0; h--)
        memmove(scores + (int64_t)h * l->n_rows, scores + (int64_t)h * n_scored, (size_t)n_scored * sizeof *scores);
    return r;
}

/* One row of K and V as it reads back. x [d]. */
static void code_row(const struct lab_layer *l, enum precision precision, float *x, bf16_t *k, bf16_t *v)
{
    const enum rope_style style = l->context->model->config.rope_style;
    const int d = l->head_dim;
    lab_keys_read(k, 1, d, LAB_AFTER_ROPE, style, NULL, x);
    lab_quant_tokens(x, 1, d, d, precision == HIGH ? HIGH_K : LOW_K);
    lab_keys_write(x, 1, d, LAB_AFTER_ROPE, style, NULL, k);
    for (int i = 0; i < d; i++)
        x[i] = bf16_to_float(v[i]);
    lab_quant_tokens(x, 1, d, d, precision == HIGH ? HIGH_V : LOW_V);
    for (int i = 0; i < d; i++)
        v[i] = bf16_from_float(x[i]);
}

/* The head's rows that are left, coded, into k and v. Returns how many. */
static int code_head(const struct lab_layer *l, int head, const float *scores, float *x, bf16_t *k, bf16_t *v)
{
    const int64_t base = (int64_t)head * l->n_rows * l->head_dim;
    int n = 0;
    for (int i = 0; i < l->n_rows; i++) {
        const enum precision precision = precision_of(l, scores[i], i);
        const size_t bytes = (size_t)l->head_dim * sizeof *k;
        if (precision == DROPPED)
            continue;
        bf16_t *to_k = k + (int64_t)n * l->head_dim, *to_v = v + (int64_t)n * l->head_dim;
        memcpy(to_k, l->k + base + (int64_t)i * l->head_dim, bytes);
        memcpy(to_v, l->v + base + (int64_t)i * l->head_dim, bytes);
        code_row(l, precision, x, to_k, to_v);
        l->counters->bytes_fast += SCALE_BYTES + (precision == HIGH ? baseline_row_bytes(l, HIGH_K, HIGH_V) : baseline_row_bytes(l, LOW_K, LOW_V));
        n++;
    }
    return n;
}

static int attend(const struct lab_layer *l, void *arg)
{
    const int64_t head = (int64_t)l->n_rows * l->head_dim;
    float *scores = malloc((size_t)l->n_kv_heads * (size_t)l->n_rows * sizeof *scores), *x = malloc((size_t)l->head_dim * sizeof *x);
    bf16_t *k = baseline_rows(l, 2, sizeof *k), *v = k ? k + l->n_kv_heads * head : NULL;
    struct lab_head_rows *heads = calloc((size_t)l->n_kv_heads, sizeof *heads);
    int r = scores && x && k && heads ? 0 : -ENOMEM;
    (void)arg;
    if (r >= 0)
        r = score_rows(l, scores);
    for (int h = 0; r >= 0 && h < l->n_kv_heads; h++)
        heads[h] = (struct lab_head_rows){k + h * head, v + h * head, code_head(l, h, scores + (int64_t)h * l->n_rows, x, k + h * head, v + h * head)};
    if (r >= 0)
        r = lab_attend_heads(l, heads);
    free(heads);
    free(k);
    free(x);
    free(scores);
    return r;
}

static const struct baseline diffkv = {.attend = attend};
static const struct fidelity_split everything = {FIDELITY_ALL, 0};

static const struct fidelity_method methods[] = {
    {
        .name = "diffkv",
        .text = "important tokens K8V4, others K4V2, the least dropped (thresholds 1.0 and 0.02 of the mean attention); all resident",
        .group = GROUP_BASELINE,
        .run = baseline_run,
        .arg = &diffkv,
        .tasks = ON_ALL,
        .splits = &everything,
        .n_splits = 1,
        .importance = 1,
    },
};
const struct fidelity_methods diffkv_methods = {methods, sizeof methods / sizeof *methods};
