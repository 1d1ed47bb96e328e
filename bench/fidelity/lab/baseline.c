#include "bench/fidelity/lab/baseline.h"
#include "bench/fidelity/lab/lab_attention.h"
#include "bench/fidelity/lab/lab_cache.h"
#include <stdlib.h>
#include <string.h>

struct row_sink {
    struct fidelity_sink *sink;
    int i_case;
};

static int give_row(void *arg, int row, const float *logits)
{
    const struct row_sink *s = arg;
    return fidelity_sink_logits(s->sink, s->i_case, row, logits);
}

int baseline_continue(const struct lab_context *context, const struct fidelity_run *run, int i_case, lab_attend_fn *attend, void *arg, struct fidelity_sink *sink)
{
    const struct fidelity_case *fc = &run->cases[i_case];
    struct row_sink rows = {.sink = sink, .i_case = i_case};
    const struct lab_continuation c = {
        .context = context,
        .tokens = fc->tokens + fc->n_prompt,
        .n = fc->n_fed,
        .attend = attend,
        .attend_arg = arg,
        .logits = give_row,
        .logits_arg = &rows,
    };
    struct lab_counters counters;
    int r = lab_continue(&c, &counters);
    if (r < 0)
        return r;
    const struct fidelity_counts counts = {
        .steps = (uint64_t)fc->n_fed, .attended = counters.attended, .bytes_attended = counters.bytes_slow, .bytes_fetched = counters.bytes_slow};
    fidelity_sink_counts(sink, &counts);
    if (run->task == TASK_KL)
        fidelity_sink_value(sink, FIDELITY_FAST_BYTES, counters.bytes_fast / fc->n_prompt);
    return 0;
}

int baseline_run(const struct fidelity_method *method, const struct fidelity_run *run, struct fidelity_sink *sink)
{
    const struct baseline *b = method->arg;
    struct baseline_args args = {.constants = b->constants, .budget = run->budget, .fetch = run->fetch};
    int r = 0;
    for (int i = 0; r >= 0 && i < run->n_cases; i++) {
        const struct lab_context *context;
        r = lab_cache_context(run->model, &run->cases[i], &context);
        if (r >= 0)
            r = baseline_continue(context, run, i, b->attend, &args, sink);
    }
    return r < 0 ? error_set(run->err, r, "%s: %s", method->name, strerrordesc_np(-r)) : 0;
}

int baseline_attend_resident(const struct lab_layer *l, void *arg)
{
    (void)arg;
    l->counters->bytes_fast += (double)l->n_kv_heads * l->n_rows * baseline_row_bytes(l, 16, 16);
    return lab_attend_all(l, l->k, l->v);
}

void *baseline_rows(const struct lab_layer *l, int n, size_t element)
{
    return malloc((size_t)n * (size_t)l->n_kv_heads * (size_t)l->n_rows * (size_t)l->head_dim * element);
}
