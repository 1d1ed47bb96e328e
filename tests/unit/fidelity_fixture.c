#include "tests/unit/fidelity_fixture.h"
#include "bench/fidelity/logit_metrics.h"
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

int fidelity_sink_logits(struct fidelity_sink *sink, int i_case, int row, const float *logits)
{
    cr_assert(i_case == 0 && row >= 0 && row < sink->n_rows && !sink->seen[row]);
    sink->seen[row] = true;
    memcpy(sink->logits + (size_t)row * (size_t)sink->n_vocab, logits, (size_t)sink->n_vocab * sizeof(*logits));
    return 0;
}

void fidelity_sink_counts(struct fidelity_sink *sink, const struct fidelity_counts *counts)
{
    sink->counts = *counts;
}

void fidelity_sink_value(struct fidelity_sink *sink, const char *name, double value)
{
    cr_assert(sink->n_values < FIDELITY_VALUES_MAX);
    sink->names[sink->n_values] = name;
    sink->values[sink->n_values++] = value;
}

struct fidelity_sink *lab_run(const struct fidelity_method *method, struct model *model, const struct fidelity_case *c, int budget, int fetch)
{
    struct error err = {""};
    struct fidelity_sink *sink = calloc(1, sizeof(*sink));
    cr_assert(sink);
    sink->n_rows = c->n_fed;
    sink->n_vocab = model->config.n_vocab;
    sink->logits = malloc((size_t)c->n_fed * (size_t)sink->n_vocab * sizeof(*sink->logits));
    sink->seen = calloc((size_t)c->n_fed, sizeof(*sink->seen));
    cr_assert(sink->logits && sink->seen);
    const struct fidelity_run run = {.model = model, .cases = c, .n_cases = 1, .task = TASK_KL, .budget = budget, .fetch = fetch, .err = &err};
    const int r = method->run(method, &run, sink);
    cr_assert(r >= 0, "%s: %s", method->name, err.text);
    for (int i = 0; i < c->n_fed; i++)
        cr_assert(sink->seen[i], "%s: row %d", method->name, i);
    return sink;
}

void lab_run_free(struct fidelity_sink *sink)
{
    free(sink->seen);
    free(sink->logits);
    free(sink);
}

double lab_run_value(const struct fidelity_sink *sink, const char *name)
{
    for (int i = 0; i < sink->n_values; i++)
        if (strcmp(sink->names[i], name) == 0)
            return sink->values[i];
    cr_assert_fail("no value %s", name);
    return 0;
}

double lab_run_kl(const struct fidelity_sink *reference, const struct fidelity_sink *other)
{
    double sum = 0;
    for (int row = 0; row < reference->n_rows; row++) {
        const float *p = reference->logits + (size_t)row * (size_t)reference->n_vocab, *q = other->logits + (size_t)row * (size_t)other->n_vocab;
        struct divergence d;
        logits_divergence(p, logits_lse(p, reference->n_vocab), q, logits_lse(q, other->n_vocab), reference->n_vocab, &d);
        sum += d.kl;
    }
    return sum / reference->n_rows;
}

double lab_run_attended(const struct fidelity_sink *sink, const struct model *model)
{
    return sink->counts.attended / (double)sink->counts.steps / model->config.n_layers / model->config.n_kv_heads;
}

const struct fidelity_method *lab_method(const struct fidelity_methods *methods, const char *name)
{
    for (int i = 0; i < methods->n; i++)
        if (strcmp(methods->methods[i].name, name) == 0)
            return &methods->methods[i];
    cr_assert_fail("no method %s", name);
    return NULL;
}
