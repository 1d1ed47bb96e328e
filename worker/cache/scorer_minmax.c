/* Quest (arXiv 2406.10774): a bound on the largest logit of the page.
 *
 *     e[h] = scale * sum over d of max(q[h, d] min[d], q[h, d] max[d])      min, max over the page's slow tokens, fp16
 *
 * As there: channels of the model's own basis (the key's rotation is undone first) and no log n. Deviations: pages of sub-pages (16 tokens, Quest's own size) or blocks by
 * --fetch-unit, where a block's score is the log-sum-exp of its sub-pages'; one choice per KV head by mass, where Quest chooses per query head by the bound alone; every layer
 * is sparse, where Quest leaves the first two dense; slow tokens only. The bound lies above what the page holds, so the fast tier counts for little in the masses, which leaves
 * their order alone within one query head. */
#include "worker/cache/scorer.h"

const struct scorer_ops scorer_minmax = {
    .name = "minmax",
    .kernel = PAGE_SCORER_MINMAX,
};
