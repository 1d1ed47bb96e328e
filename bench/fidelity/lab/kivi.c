/* KIVI-like (arXiv 2402.02750): asymmetric codes of 2 or 4 bits, keys (RoPE applied) per channel in groups of 32 tokens, values per token in groups of 32 channels, scale and minimum in
 * fp16, the newest 128 tokens in full precision. Everything resident, everything attended.
 *
 * Simplified: the newest 128 prompt tokens stay exact while the continuation is fed (in the original the window moves with it: keys leave it 128 at a time, values one by one), which
 * favours it. The tokens before them are coded at the prompt's end in whole groups of 32; what is left over, up to 31 tokens, stays exact too. */
#include "bench/fidelity/lab/baseline.h"
#include "bench/fidelity/lab/baseline_methods.h"
#include "bench/fidelity/lab/lab_attention.h"
#include "bench/fidelity/lab/lab_keys.h"
#include "bench/fidelity/lab/lab_quant.h"
#include "kernels/cpu/half.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP = 32, RESIDUAL = 128 };

struct kivi {
    int bits;
};

/* Of one KV head: the oldest n_coded of n rows. */
static void code_head(const struct lab_layer *l, const struct kivi *kivi, int64_t n_coded, float *x, bf16_t *k, bf16_t *v)
{
    const enum rope_style style = l->context->model->config.rope_style;
    lab_keys_read(k, n_coded, l->head_dim, LAB_AFTER_ROPE, style, NULL, x);
    lab_quant_channels(x, n_coded, l->head_dim, GROUP, kivi->bits);
    lab_keys_write(x, n_coded, l->head_dim, LAB_AFTER_ROPE, style, NULL, k);
    for (int64_t i = 0; i < n_coded * l->head_dim; i++)
        x[i] = bf16_to_float(v[i]);
    lab_quant_tokens(x, n_coded, l->head_dim, GROUP, kivi->bits);
    for (int64_t i = 0; i < n_coded * l->head_dim; i++)
        v[i] = bf16_from_float(x[i]);
}

static int attend(const struct lab_layer *l, void *arg)
{
    const struct kivi *kivi = ((const struct baseline_args *)arg)->constants;
    const int64_t head = (int64_t)l->n_rows * l->head_dim;
    const int n_coded = l->n_rows > RESIDUAL ? (l->n_rows - RESIDUAL) / GROUP * GROUP : 0;
    float *x = malloc((size_t)head * sizeof *x);
    bf16_t *k = baseline_rows(l, 2, sizeof *k), *v = k ? k + l->n_kv_heads * head : NULL;
    int r = x && k ? 0 : -ENOMEM;
    if (r >= 0) {
        memcpy(k, l->k, (size_t)(l->n_kv_heads * head) * sizeof *k);
        memcpy(v, l->v, (size_t)(l->n_kv_heads * head) * sizeof *v);
        for (int h = 0; h < l->n_kv_heads; h++)
            code_head(l, kivi, n_coded, x, k + h * head, v + h * head);
        r = lab_attend_all(l, k, v);
    }
    /* Codes, and for each 32 of them a scale and a minimum. */
    const double coded = baseline_row_bytes(l, kivi->bits, kivi->bits) + 2.0 * l->head_dim / GROUP * 4;
    l->counters->bytes_fast += l->n_kv_heads * (n_coded * coded + (l->n_rows - n_coded) * baseline_row_bytes(l, 16, 16));
    free(k);
    free(x);
    return r;
}

static const struct kivi two_bits = {2}, four_bits = {4};
static const struct baseline kivi2 = {attend, &two_bits}, kivi4 = {attend, &four_bits};
static const struct fidelity_split everything = {FIDELITY_ALL, 0};

#define KIVI(name_, text_, baseline_) \
    { \
        .name = name_, .text = text_, .group = GROUP_BASELINE, .run = baseline_run, .arg = baseline_, .tasks = ON_ALL, .splits = &everything, .n_splits = 1, .importance = 1 \
    }
static const struct fidelity_method methods[] = {
    KIVI("kivi-4bit", "keys per channel of 32 tokens, values in groups of 32, 4 bits; newest 128 exact; all resident", &kivi4),
    KIVI("kivi-2bit", "keys per channel of 32 tokens, values in groups of 32, 2 bits; newest 128 exact; all resident", &kivi2),
};
const struct fidelity_methods kivi_methods = {methods, sizeof methods / sizeof *methods};
