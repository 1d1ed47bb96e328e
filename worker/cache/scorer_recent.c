/* Age: the newest slow pages are attended, whatever the query. This is what TTKV's temporal tiers do, whose scoring function is not specified but whose
 * demotion is by age, and what a sliding window over the slow tier would do. No scores, no index, no summaries. */
#include "worker/cache/scorer.h"

const struct scorer_ops scorer_recent = {
    .name = "recent",
    .kernel = PAGE_SCORER_RECENT,
};
