/* How far a prefill's last hidden states, and the distributions of the next token that follow from them, are from those of one-shot prefill over exact values, on the same prompt. */
#pragma once
#include "bench/fidelity/lab/lab.h"

enum { DRIFT_EVERY = 16 }; /* of the prompt's positions one in so many is given to the head */

struct drift {
    double relative_l2;    /* norm of the difference of all hidden states over the norm of the reference's */
    double cosine;         /* mean over positions */
    double top1;           /* share of the sampled positions with the same most likely token */
    double jsd, kl;        /* mean over the sampled positions, nats */
};

/* Both contexts keep hidden states [n_tokens, dim] of the same tokens. */
int drift_measure(const struct lab_context *reference, const struct lab_context *other, struct drift *ret);
