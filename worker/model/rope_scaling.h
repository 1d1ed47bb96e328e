/* Rotary position embedding: from what a model's configuration says to the inverse frequencies that rope_table takes. Pure; any thread.
 * Formulas: transformers' modeling_rope_utils.py (linear, llama3, yarn), which GGUF files follow too (there llama3 comes as a tensor of factors).
 * The angle of pair i at position p is p * inv_freq[i]; cos and sin are multiplied by `factor` (YaRN's attention factor; else 1). */
#pragma once
#include "proto/base/error.h"
#include <stdbool.h>

enum { ROPE_MAX_FREQS = 128 }; /* head_dim / 2 */

enum rope_scaling_type { ROPE_SCALING_NONE, ROPE_SCALING_LINEAR, ROPE_SCALING_LLAMA3, ROPE_SCALING_YARN };
const char *rope_scaling_name(enum rope_scaling_type type); /* "none", "linear", "llama3", "yarn" */

/* Zero means: not given, take the default. */
struct rope_scaling {
    enum rope_scaling_type type;
    double theta;                             /* base, e.g. 10000 */
    double factor;                            /* linear, llama3, yarn: >= 1 */
    double original_context;                  /* llama3, yarn: positions the model was first trained on */
    double low_freq_factor, high_freq_factor; /* llama3 */
    double attention_factor;                  /* yarn; default 0.1 ln(factor) + 1, or from mscale and mscale_all_dim */
    double attention_multiplier;              /* yarn in GGUF: times that default */
    double mscale, mscale_all_dim;            /* yarn */
    double beta_fast, beta_slow;              /* yarn; 32 and 1 */
    bool no_truncate;                         /* yarn: the correction range is not rounded to whole pairs */
};

struct rope_freqs {
    double inv_freq[ROPE_MAX_FREQS]; /* [n_freqs] radians a position */
    int n_freqs;
    double factor;
};

/* `divisors` [head_dim / 2] divides the frequencies (GGUF's rope_freqs.weight) or is NULL. -EINVAL with the parameter that is out of range. */
int rope_freqs_init(const struct rope_scaling *scaling, int head_dim, const float *divisors, struct rope_freqs *ret_freqs, struct error *err);
