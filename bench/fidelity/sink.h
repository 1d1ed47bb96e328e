/* Where a method's logits become figures: each row of logits is compared as it comes and forgotten. */
#pragma once
#include "bench/fidelity/case_set.h"

struct named_value {
    const char *name;
    double sum;
    int64_t n;
};

/* Figures of one row of the result in one task. Zeroed at first; task_scores_fini frees the list of divergences. */
struct task_scores {
    int64_t n;                        /* positions compared (TASK_KL) */
    double kl, jsd, nll;              /* sums over them */
    int64_t n_same_top;
    double *kl_each;                  /* [n], for quantiles */
    int64_t right[CASE_LABELS_MAX], asked[CASE_LABELS_MAX]; /* recall: words; needle: answers */
    double recall_nll[CASE_LABELS_MAX]; /* sum over scored tokens */
    int64_t scored[CASE_LABELS_MAX];
    struct fidelity_counts counts;
    struct named_value values[FIDELITY_VALUES_MAX];
    int n_values;
};

struct fidelity_sink {
    struct case_set *set;
    int n_cases;                      /* when the sink was made: the set may lose cases while it lives */
    int n_vocab;
    bool is_reference;                /* TASK_KL: what comes is kept, and compared with itself */
    struct task_scores *scores;       /* filled */
    void (*on_row)(void *arg);        /* after each row of logits, or NULL */
    void *arg;
    uint8_t **seen;                   /* [n] of [n_fed] */
    int *n_right;                     /* [n] scored tokens predicted */
    int64_t n_rows;
};

int fidelity_sink_init(struct fidelity_sink *sink, struct case_set *set, int n_vocab, bool is_reference, struct task_scores *scores);
void fidelity_sink_fini(struct fidelity_sink *sink);
/* After the method: 0, or -ENODATA when rows are missing. ret_right [n] may be NULL: whether all scored tokens of a case were predicted. */
int fidelity_sink_finish(struct fidelity_sink *sink, bool *ret_right);
void task_scores_fini(struct task_scores *scores);
double task_scores_kl_quantile(const struct task_scores *scores, double q);
