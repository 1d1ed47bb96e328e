/* The cases of one task and what is expected of them. Made before the first row and never changed while rows run; owned by who calls case_set_fini. */
#pragma once
#include "bench/fidelity/method.h"
#include <stdbool.h>

enum { CASE_LABELS_MAX = 8 };

struct case_info {
    int label;        /* which figure of the task the case counts in: recall by length, needle by seen and unseen question */
    int scored_first; /* rows scored_first .. scored_first + n_scored - 1 must predict the next token; n_scored 0: none */
    int n_scored;
    int sample;       /* cases of one sample are added one after the other and stand or fall together: a needle that full attention does not find asks nothing of the others */
};

struct case_set {
    enum fidelity_task task;
    struct fidelity_case *cases; /* [n] */
    struct case_info *info;      /* [n] */
    int n, cap;
    const char *labels[CASE_LABELS_MAX];
    char label_text[CASE_LABELS_MAX][24];
    int n_labels;

    /* What full attention said, filled by the first row; TASK_KL alone. */
    float **reference;           /* [n] of [n_fed, n_vocab] */
    double **reference_lse;      /* [n] of [n_fed] */
};

void case_set_init(struct case_set *set, enum fidelity_task task);
void case_set_fini(struct case_set *set); /* a zeroed set is fine */
/* Adds a case over its own copy of tokens [n_prompt + n_fed + 1]. -ENOMEM, -EINVAL for counts below 1 or scored rows that are none. */
int case_set_add(struct case_set *set, const int32_t *tokens, int n_prompt, int n_fed, const struct case_info *info);
/* -ENOSPC beyond CASE_LABELS_MAX. Returns the label's number. */
int case_set_add_label(struct case_set *set, const char *text);
int case_set_alloc_reference(struct case_set *set, int n_vocab); /* -ENOMEM */
/* Leaves out every sample of which `right` [n] is false in one of its cases. */
void case_set_keep(struct case_set *set, const bool *right);
/* Continuation tokens over all cases, and tokens of the longest case. */
int64_t case_set_steps(const struct case_set *set);
int case_set_context(const struct case_set *set);
