/* How often each token occurs in a prompt and in its answer: what the penalties need. The distinct tokens lie in one array, in order of first
 * appearance; a hash table finds their places. Not thread-safe. */
#pragma once
#include "kernels/kernels.h"
#include <stdint.h>

struct token_counts {
    struct token_count *counts; /* [n] */
    int n, cap;
    int32_t *table;             /* [n_table] index into counts, or -1; a power of two, at most half full */
    int n_table;
};

/* A zeroed struct is empty. */
void token_counts_fini(struct token_counts *c);
/* Counts one more occurrence. -ENOMEM leaves the counts as they were. */
int token_counts_add_prompt(struct token_counts *c, int32_t token);
int token_counts_add_output(struct token_counts *c, int32_t token);
