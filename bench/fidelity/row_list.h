/* The rows of a run: methods at budgets, in the order of the table, and what came out of each. */
#pragma once
#include "bench/fidelity/sink.h"

enum { ROW_NAME_MAX = 96, BUDGETS_MAX = 16 };

struct row_value {
    char name[32];
    double value;
};

/* What the tables and plots show of a row. Averages are over tokens or positions; a figure that the row has not is NaN. */
struct row_result {
    bool done;
    char error[160];            /* why it failed; "" */
    double kl, kl_p99, jsd, top1, perplexity;
    double recall[CASE_LABELS_MAX], recall_all; /* share of words */
    double needle[CASE_LABELS_MAX]; /* share of answers that full attention finds */
    double attended;            /* tokens a step, layer and KV head */
    double bytes_attended, bytes_fetched; /* a step, all layers and KV heads */
    double seconds, cpu_seconds; /* on the wall, and of all threads: what counts on a busy machine */
    struct row_value values[FIDELITY_VALUES_MAX];
    int n_values;
};

struct fidelity_row {
    const struct fidelity_method *method;
    int budget, fetch;
    unsigned tasks;
    char name[ROW_NAME_MAX];    /* "demote/snapkv@256+256" */
    struct row_result result;
};

struct row_list {
    struct fidelity_row *rows;  /* [n] */
    int n;
};

struct row_filter {
    const char *patterns;       /* comma-separated parts of names or shell patterns (*, ?, []) over whole names; NULL: by importance */
    int importance_max;
    const int *budgets;         /* [n_budgets] of rows that sweep */
    int n_budgets;
    int task_budget;            /* rows that sweep do recall and needles at this one alone */
    unsigned tasks;             /* ON_ bits */
};

const char *fidelity_group_name(enum fidelity_group group);
/* The reference is always among them and comes first. -EINVAL for patterns that name nothing, -ENOMEM. */
int row_list_make(struct row_list *list, const struct row_filter *filter, struct error *err);
void row_list_free(struct row_list *list);
struct fidelity_row *row_list_find(struct row_list *list, const char *name, size_t len);
/* A row that has run, measures the same and at least as much; NULL when there is none. */
const struct fidelity_row *row_list_twin(const struct row_list *list, const struct fidelity_row *row);
void row_result_init(struct row_result *result);
/* Adds one task's figures. n_layers and n_kv_heads turn sums into averages. */
void row_result_add(struct row_result *result, const struct case_set *set, struct task_scores *scores, int n_layers, int n_kv_heads);
