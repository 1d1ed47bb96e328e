/* The true mass of the coded keys: what attending every page would find heaviest.
 *
 *     e[h] = log sum over the page's slow tokens t of exp(scale * q[h] . k_t)           k: the key as its 8-bit code gives it back
 *
 * The bound on what any scorer can reach with the same budget. It reads every key of the slow tier in every step. */
#include "worker/cache/scorer.h"

const struct scorer_ops scorer_oracle = {
    .name = "oracle",
    .kernel = PAGE_SCORER_ORACLE,
    .measuring_only = true,
};
