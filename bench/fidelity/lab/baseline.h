/* Methods of others as a way to attend one layer of a continuation (lab.h). Each file of this folder that is named after one exports what method.h asks for; formula, constants, source and
 * deviations stand in its head. baseline_methods.h lists them. */
#pragma once
#include "bench/fidelity/lab/lab.h"
#include "bench/fidelity/method.h"

/* method->arg of a baseline. */
struct baseline {
    lab_attend_fn *attend; /* its argument is a struct baseline_args */
    const void *constants;
};

struct baseline_args {
    const void *constants;
    int budget, fetch;     /* B and F of the row, 0 .. FIDELITY_ALL */
};

/* fidelity_method.run of every baseline: exact prefill (shared by all rows, lab_cache.h), then the continuation, for each case. */
int baseline_run(const struct fidelity_method *method, const struct fidelity_run *run, struct fidelity_sink *sink);
/* The continuation of a case over any context, for methods that prefill in their own way. Adds to the sink's counts and values. */
int baseline_continue(const struct lab_context *context, const struct fidelity_run *run, int i_case, lab_attend_fn *attend, void *arg, struct fidelity_sink *sink);
/* lab_attend_fn: all rows of the context in bf16, all of them in fast memory. */
int baseline_attend_resident(const struct lab_layer *layer, void *arg);

/* B + F, at most `limit`. */
static inline int baseline_attended(const struct baseline_args *a, int limit)
{
    return a->budget >= limit - a->fetch ? limit : a->budget + a->fetch;
}

/* Bytes of K and V of one token and KV head at so many bits a value, without scales. */
static inline double baseline_row_bytes(const struct lab_layer *l, int k_bits, int v_bits)
{
    return l->head_dim * (k_bits + v_bits) / 8.0;
}

/* An array of fp32 or bf16 [n_kv_heads, n_rows, head_dim] times `n`. NULL when there is no memory. */
void *baseline_rows(const struct lab_layer *l, int n, size_t element);

