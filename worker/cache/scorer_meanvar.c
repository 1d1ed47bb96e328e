/* Mean and diagonal variance of the page's keys: the log-mean-exp of a gaussian with these moments.
 *
 *     e[h] = scale * q[h] . mean + min((scale * q[h])^2 . variance / 2, 4) + log n      over the page's n slow tokens, fp16, the model's own basis
 *
 * Cumulant expansion to the second order; RetroInfer and Expected Attention score with the same moments. The limit of 4 (fidelity study): a few tokens far apart have a variance that
 * promises a mass which none of them holds. */
#include "worker/cache/scorer.h"

const struct scorer_ops scorer_meanvar = {
    .name = "meanvar",
    .kernel = PAGE_SCORER_MEANVAR,
};
