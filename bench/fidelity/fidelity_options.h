/* Options of tidepool-fidelity. */
#pragma once
#include "bench/fidelity/row_list.h"
#include "proto/base/options.h"

enum { LENGTHS_MAX = CASE_LABELS_MAX };

struct fidelity_options {
    const char *model, *texts, *budgets, *rows, *tasks, *recall_tokens, *out;
    int64_t contexts, context_tokens, positions, recall_samples, needle_samples, needle_tokens, task_budget, threads, seed, pool_size, time_limit;
    int isa;
    bool quick, all, list, resume;
    /* From the lists above, by fidelity_options_derive. */
    int budget_list[BUDGETS_MAX], n_budgets;
    int length_list[LENGTHS_MAX], n_lengths;
    unsigned task_set; /* ON_ bits */
};

extern const struct option_set fidelity_option_set;
/* Reads the lists, and gives what is 0 its value for --quick or a whole run. -EINVAL. */
int fidelity_options_derive(struct fidelity_options *o, struct error *err);
