#include "bench/fidelity/sink.h"
#include "bench/fidelity/logit_metrics.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

int fidelity_sink_init(struct fidelity_sink *sink, struct case_set *set, int n_vocab, bool is_reference, struct task_scores *scores)
{
    *sink = (struct fidelity_sink){.set = set, .n_cases = set->n, .n_vocab = n_vocab, .is_reference = is_reference, .scores = scores};
    *scores = (struct task_scores){.n = 0};
    sink->seen = calloc((size_t)set->n + 1, sizeof(*sink->seen));
    sink->n_right = calloc((size_t)set->n + 1, sizeof(*sink->n_right));
    bool ok = sink->seen && sink->n_right;
    for (int i = 0; ok && i < set->n; i++)
        ok = (sink->seen[i] = calloc(1, (size_t)set->cases[i].n_fed)) != NULL;
    if (ok && set->task == TASK_KL)
        ok = (scores->kl_each = malloc((size_t)(case_set_steps(set) + 1) * sizeof(double))) != NULL;
    if (ok)
        return 0;
    fidelity_sink_fini(sink);
    task_scores_fini(scores);
    return -ENOMEM;
}

void fidelity_sink_fini(struct fidelity_sink *sink)
{
    for (int i = 0; sink->seen && i < sink->n_cases; i++)
        free(sink->seen[i]);
    free(sink->seen);
    free(sink->n_right);
    sink->seen = NULL;
    sink->n_right = NULL;
}

void task_scores_fini(struct task_scores *scores)
{
    free(scores->kl_each);
    scores->kl_each = NULL;
}

static void compare(struct fidelity_sink *sink, int i_case, int row, const float *logits, double lse)
{
    struct task_scores *s = sink->scores;
    float *full = sink->set->reference[i_case] + (int64_t)row * sink->n_vocab;
    double *full_lse = &sink->set->reference_lse[i_case][row];
    struct divergence d;
    if (sink->is_reference) {
        memcpy(full, logits, (size_t)sink->n_vocab * sizeof(*logits));
        *full_lse = lse;
    }
    logits_divergence(full, *full_lse, logits, lse, sink->n_vocab, &d);
    s->kl_each[s->n++] = d.kl;
    s->kl += d.kl;
    s->jsd += d.jsd;
    s->n_same_top += logits_argmax(full, sink->n_vocab) == logits_argmax(logits, sink->n_vocab);
}

int fidelity_sink_logits(struct fidelity_sink *sink, int i_case, int row, const float *logits)
{
    const struct case_set *set = sink->set;
    if (i_case < 0 || i_case >= set->n || row < 0 || row >= set->cases[i_case].n_fed || sink->seen[i_case][row])
        return -EINVAL;
    const struct fidelity_case *c = &set->cases[i_case];
    const struct case_info *info = &set->info[i_case];
    const int32_t target = c->tokens[c->n_prompt + row + 1];
    const double lse = logits_lse(logits, sink->n_vocab);
    if (!isfinite(lse))
        return -ERANGE;
    sink->seen[i_case][row] = 1;
    sink->n_rows++;
    if (set->task == TASK_KL) {
        sink->scores->nll += lse - (double)logits[target];
        compare(sink, i_case, row, logits, lse);
    } else if (row >= info->scored_first && row < info->scored_first + info->n_scored) {
        sink->n_right[i_case] += logits_argmax(logits, sink->n_vocab) == target;
        sink->scores->recall_nll[info->label] += lse - (double)logits[target];
        sink->scores->scored[info->label]++;
    }
    if (sink->on_row)
        sink->on_row(sink->arg);
    return 0;
}

void fidelity_sink_counts(struct fidelity_sink *sink, const struct fidelity_counts *counts)
{
    struct fidelity_counts *sum = &sink->scores->counts;
    sum->steps += counts->steps;
    sum->attended += counts->attended;
    sum->bytes_attended += counts->bytes_attended;
    sum->bytes_fetched += counts->bytes_fetched;
}

void fidelity_sink_value(struct fidelity_sink *sink, const char *name, double value)
{
    struct task_scores *s = sink->scores;
    int i = 0;
    while (i < s->n_values && strcmp(s->values[i].name, name) != 0)
        i++;
    if (i == FIDELITY_VALUES_MAX)
        return;
    if (i == s->n_values)
        s->values[s->n_values++] = (struct named_value){.name = name};
    s->values[i].sum += value;
    s->values[i].n++;
}

int fidelity_sink_finish(struct fidelity_sink *sink, bool *ret_right)
{
    const struct case_set *set = sink->set;
    if (sink->n_rows != case_set_steps(set))
        return -ENODATA;
    for (int i = 0; set->task != TASK_KL && i < set->n; i++) {
        const struct case_info *info = &set->info[i];
        const bool all = sink->n_right[i] == info->n_scored;
        sink->scores->right[info->label] += set->task == TASK_RECALL ? sink->n_right[i] : all;
        sink->scores->asked[info->label] += set->task == TASK_RECALL ? info->n_scored : 1;
        if (ret_right)
            ret_right[i] = all;
    }
    return 0;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double task_scores_kl_quantile(const struct task_scores *scores, double q)
{
    if (scores->n == 0)
        return 0;
    qsort(scores->kl_each, (size_t)scores->n, sizeof(double), by_value);
    return scores->kl_each[(int64_t)(q * (double)(scores->n - 1) + 0.5)];
}
