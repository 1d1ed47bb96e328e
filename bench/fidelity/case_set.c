#include "bench/fidelity/case_set.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void case_set_init(struct case_set *set, enum fidelity_task task)
{
    *set = (struct case_set){.task = task};
}

static void free_case(struct case_set *set, int i)
{
    free((int32_t *)set->cases[i].tokens);
    if (set->reference)
        free(set->reference[i]);
    if (set->reference_lse)
        free(set->reference_lse[i]);
}

void case_set_fini(struct case_set *set)
{
    for (int i = 0; i < set->n; i++)
        free_case(set, i);
    free(set->reference);
    free(set->reference_lse);
    free(set->cases);
    free(set->info);
    *set = (struct case_set){.task = set->task};
}

static int grow(struct case_set *set)
{
    const int cap = set->cap ? 2 * set->cap : 16;
    struct fidelity_case *cases = realloc(set->cases, (size_t)cap * sizeof(*cases));
    if (!cases)
        return -ENOMEM;
    set->cases = cases;
    struct case_info *info = realloc(set->info, (size_t)cap * sizeof(*info));
    if (!info)
        return -ENOMEM;
    set->info = info;
    set->cap = cap;
    return 0;
}

int case_set_add(struct case_set *set, const int32_t *tokens, int n_prompt, int n_fed, const struct case_info *info)
{
    if (n_prompt < 1 || n_fed < 1 || info->scored_first < 0 || info->n_scored < 0 || info->scored_first > n_fed - info->n_scored)
        return -EINVAL;
    if (set->n == set->cap && grow(set) < 0)
        return -ENOMEM;
    const size_t bytes = ((size_t)n_prompt + (size_t)n_fed + 1) * sizeof(*tokens);
    int32_t *copy = malloc(bytes);
    if (!copy)
        return -ENOMEM;
    memcpy(copy, tokens, bytes);
    set->cases[set->n] = (struct fidelity_case){.tokens = copy, .n_prompt = n_prompt, .n_fed = n_fed};
    set->info[set->n] = *info;
    set->n++;
    return 0;
}

int case_set_add_label(struct case_set *set, const char *text)
{
    if (set->n_labels == CASE_LABELS_MAX)
        return -ENOSPC;
    snprintf(set->label_text[set->n_labels], sizeof(set->label_text[0]), "%s", text);
    set->labels[set->n_labels] = set->label_text[set->n_labels];
    return set->n_labels++;
}

int case_set_alloc_reference(struct case_set *set, int n_vocab)
{
    set->reference = calloc((size_t)set->n + 1, sizeof(*set->reference));
    set->reference_lse = calloc((size_t)set->n + 1, sizeof(*set->reference_lse));
    if (!set->reference || !set->reference_lse)
        return -ENOMEM;
    for (int i = 0; i < set->n; i++) {
        const size_t n_fed = (size_t)set->cases[i].n_fed;
        set->reference[i] = malloc(n_fed * (size_t)n_vocab * sizeof(float));
        set->reference_lse[i] = malloc(n_fed * sizeof(double));
        if (!set->reference[i] || !set->reference_lse[i])
            return -ENOMEM;
    }
    return 0;
}

void case_set_keep(struct case_set *set, const bool *right)
{
    int n = 0;
    for (int i = 0, end; i < set->n; i = end) {
        bool all = true;
        for (end = i; end < set->n && set->info[end].sample == set->info[i].sample; end++)
            all = all && right[end];
        for (int j = i; j < end; j++) {
            if (!all) {
                free_case(set, j);
                continue;
            }
            set->cases[n] = set->cases[j];
            set->info[n] = set->info[j];
            if (set->reference)
                set->reference[n] = set->reference[j];
            if (set->reference_lse)
                set->reference_lse[n] = set->reference_lse[j];
            n++;
        }
    }
    set->n = n;
}

int64_t case_set_steps(const struct case_set *set)
{
    int64_t steps = 0;
    for (int i = 0; i < set->n; i++)
        steps += set->cases[i].n_fed;
    return steps;
}

int case_set_context(const struct case_set *set)
{
    int longest = 0;
    for (int i = 0; i < set->n; i++)
        if (set->cases[i].n_prompt + set->cases[i].n_fed > longest)
            longest = set->cases[i].n_prompt + set->cases[i].n_fed;
    return longest;
}
