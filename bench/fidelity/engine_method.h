/* Methods that the real engine runs: one engine per row over the run's model and store, so that only the first row of a format computes the prompts and the others find them in the
 * pool. What is measured is what `tidepool-worker` would do with these options. */
#pragma once
#include "bench/fidelity/method.h"
#include "worker/cache/engine.h"

/* A method's `arg`. */
struct engine_method {
    const char *selector;
    enum kv_format format;
    enum prefill_values values;
    enum prefill_order order;
    const char *scorer; /* NULL: index2 */
    int fetch_unit;     /* tokens chosen together: SUBPAGE_TOKENS, BLOCK_TOKENS, or 0 for the former */
    int page_cache;     /* fetched tokens that the device's page cache holds per layer, KV head and case; 0: none, and every page attended is fetched */
    int recent;         /* newest tokens beside the budget */
    bool answer_leaves; /* as when serving: blocks of the continuation become slow when they leave the window */
};

int engine_method_run(const struct fidelity_method *method, const struct fidelity_run *run, struct fidelity_sink *sink);
extern const struct fidelity_methods engine_methods;
