/* The page's mean key, as ShadowKV's landmarks (chunks of 8 there) and TTKV's block summaries.
 *
 *     e[h] = scale * q[h] . mean + log n                               mean over the page's n slow tokens, fp16
 *
 * Deviations from ShadowKV: 16 tokens a page, log n (pages have lost kept tokens, chunks have not), no outlier chunks, the mean over the group's heads where it takes the
 * maximum. */
#include "worker/cache/scorer.h"

const struct scorer_ops scorer_mean = {
    .name = "mean",
    .kernel = PAGE_SCORER_MEAN,
};
