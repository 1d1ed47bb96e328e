/* What a run leaves behind: fidelity.json (everything, read back by --resume), fidelity.md (tables) and plots. */
#pragma once
#include "bench/fidelity/row_list.h"
#include "proto/base/buf.h"

/* How it was measured. Strings are borrowed. */
struct run_settings {
    const char *model, *texts;
    int contexts, context_tokens, positions, recall_samples, needle_samples, needle_tokens, n_needles;
    const int *lengths;
    int n_lengths;
    int64_t seed;
};

struct run_results {
    struct run_settings settings;
    const struct row_list *list;
    const char *recall_labels[CASE_LABELS_MAX];
    int n_recall_labels;
    double seconds;
};

/* Writes the three kinds into `dir`, each file aside and renamed. -EIO and what opening gives. */
int results_write(const struct run_results *results, const char *dir, struct error *err);
/* Takes from dir/fidelity.json what its rows say about rows of the list, when its settings are equal. Returns how many; 0 also when there is no such file; -EINVAL (no file of ours, or
 * other settings). */
int results_resume(const struct run_results *results, struct row_list *list, const char *dir, struct error *err);

int results_json(const struct run_results *results, struct buf *out);
int results_markdown(const struct run_results *results, struct buf *out);
/* Each file's name and what is in it. */
struct plot_file {
    const char *name;
    int (*write)(const struct run_results *results, struct buf *out);
};
extern const struct plot_file fidelity_plots[]; /* ends with name NULL */
