/* Runs one method of the lab on one case and keeps what it gave: a sink of its own in place of the harness's. All failures are Criterion assertions. */
#pragma once
#include "bench/fidelity/method.h"
#include <stdbool.h>

struct fidelity_sink {
    int n_rows, n_vocab;
    float *logits; /* [n_rows, n_vocab] */
    bool *seen;    /* [n_rows] */
    struct fidelity_counts counts;
    const char *names[FIDELITY_VALUES_MAX];
    double values[FIDELITY_VALUES_MAX];
    int n_values;
};

/* The caller frees it with lab_run_free. */
struct fidelity_sink *lab_run(const struct fidelity_method *method, struct model *model, const struct fidelity_case *c, int budget, int fetch);
void lab_run_free(struct fidelity_sink *sink);
const struct fidelity_method *lab_method(const struct fidelity_methods *methods, const char *name);
double lab_run_value(const struct fidelity_sink *sink, const char *name);
/* Mean over rows of KL(reference || other), nats. */
double lab_run_kl(const struct fidelity_sink *reference, const struct fidelity_sink *other);
/* Tokens a step, layer and KV head. */
double lab_run_attended(const struct fidelity_sink *sink, const struct model *model);
