/* Scorers: which slow sub-pages a decode step attends when they are more than `fetch` allows (docs/cache.md, "Retrieval"). One file each, one const table each; formula,
 * constants and source stand in the head of the file, and so does each deviation from the original. The arithmetic is the op's (attn_decode in kernels/kernels.h says it
 * exactly), since it runs where the pages are; what a scorer has to say here is which arithmetic it is and what it needs to keep.
 *
 * The rule around a scorer is the engine's: a page's mass for a query head is exp(e - log-sum-exp of everything that the head could attend), with e the scorer's estimate for the
 * page; masses are averaged over the group's heads, and a KV head makes one choice. What a step attends is a pure function of the sequence's state.
 *
 * Summaries are a private overlay of the sequence: they describe a page's slow tokens alone, not the kept ones, because they are to say what fetching the page would bring, and
 * the sharpest tokens, which would dominate them, are the kept ones. So they cannot be shared with the block, as the index is. */
#pragma once
#include "kernels/kernels.h"

struct scorer_ops {
    const char *name;
    enum page_scorer kernel;
    bool measuring_only; /* reads what retrieval is there to save: to measure others against, never to serve with */
};

extern const struct scorer_ops scorer_index2;
extern const struct scorer_ops scorer_minmax;
extern const struct scorer_ops scorer_mean;
extern const struct scorer_ops scorer_meanvar;
extern const struct scorer_ops scorer_recent;
extern const struct scorer_ops scorer_oracle;

/* By name; NULL when there is none. */
const struct scorer_ops *scorer_find(const char *name);
/* "index2, minmax, ...", for messages. */
const char *scorer_names(void);
