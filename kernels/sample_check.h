/* What both backends' sample ops ask of their parameters before they draw. On the host; C, and C++ for the .cu file. */
#pragma once
#include "kernels/kernels.h"
#include <errno.h>

enum {
    SAMPLE_VOCAB_MAX = 1 << 24, /* ids are compared as floats */
    SAMPLE_TOP_MAX = 32,
};

static inline int sample_check_tokens(const struct sample_params *p, int n_vocab)
{
    for (int i = 0; i < p->n_bias; i++)
        if (p->bias[i].token < 0 || p->bias[i].token >= n_vocab || p->bias[i].bias != p->bias[i].bias)
            return -EINVAL;
    for (int i = 0; i < p->n_counts; i++)
        if (p->counts[i].token < 0 || p->counts[i].token >= n_vocab)
            return -EINVAL;
    for (int i = 0; i < p->n_banned; i++)
        if (p->banned[i] < 0 || p->banned[i] >= n_vocab)
            return -EINVAL;
    return p->given && (*p->given < 0 || *p->given >= n_vocab) ? -EINVAL : 0;
}

/* -EINVAL, of a whole call. */
static inline int sample_check_call(int n, int n_vocab)
{
    return n < 0 || n_vocab < 1 || n_vocab > SAMPLE_VOCAB_MAX ? -EINVAL : 0;
}

/* -EINVAL where a parameter is outside of what kernels.h allows. */
static inline int sample_check(const struct sample_params *p, int n_vocab)
{
    if (p->n_bias < 0 || p->n_counts < 0 || p->n_banned < 0 || p->n_top < 0 || p->n_top > SAMPLE_TOP_MAX)
        return -EINVAL;
    if (!(p->temperature >= 0) || !(p->top_p >= 0 && p->top_p <= 1) || !(p->min_p >= 0 && p->min_p <= 1))
        return -EINVAL;
    if (!(p->repetition_penalty > 0) || p->presence_penalty != p->presence_penalty || p->frequency_penalty != p->frequency_penalty)
        return -EINVAL;
    return sample_check_tokens(p, n_vocab);
}

/* Whether the counts change any logit. */
static inline bool sample_has_penalties(const struct sample_params *p)
{
    return p->n_counts > 0 && (p->presence_penalty != 0 || p->frequency_penalty != 0 || p->repetition_penalty != 1);
}

/* Whether a token is drawn from other logits than the model's. */
static inline bool sample_adjusts(const struct sample_params *p)
{
    return !p->given && (p->n_bias > 0 || p->n_banned > 0 || sample_has_penalties(p));
}
