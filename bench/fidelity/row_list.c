#include "bench/fidelity/row_list.h"
#include <errno.h>
#include <fnmatch.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COSTLY = 5 }; /* rows of the engine */

const char *fidelity_group_name(enum fidelity_group group)
{
    static const char *const names[GROUP_COUNT] = {
        [GROUP_REFERENCE] = "reference", [GROUP_DEFAULT] = "default", [GROUP_DROP] = "drop",         [GROUP_DEMOTE] = "demote", [GROUP_SCORER] = "scorer",
        [GROUP_SPLIT] = "split",         [GROUP_BASELINE] = "baseline", [GROUP_CONTROL] = "control", [GROUP_DRIFT] = "drift",
    };
    return names[group];
}

void row_result_init(struct row_result *r)
{
    *r = (struct row_result){.kl = NAN, .kl_p99 = NAN, .jsd = NAN, .top1 = NAN, .perplexity = NAN, .recall_all = NAN, .attended = NAN,
                             .bytes_attended = NAN, .bytes_fetched = NAN, .seconds = NAN, .cpu_seconds = NAN};
    for (int i = 0; i < CASE_LABELS_MAX; i++)
        r->recall[i] = r->needle[i] = NAN;
}

static void number(char *text, size_t size, int n)
{
    if (n == FIDELITY_ALL)
        snprintf(text, size, "all");
    else
        snprintf(text, size, "%d", n);
}

struct maker {
    struct row_list *list;
    const struct row_filter *filter;
    int cap, n_matched;
};

/* POSIX regular expressions are not used: the library that tokenizers match with exports functions of the same names. */
static bool matches(const char *patterns, const char *name)
{
    for (const char *at = patterns; *at;) {
        char pattern[ROW_NAME_MAX];
        const size_t len = strcspn(at, ",");
        snprintf(pattern, sizeof(pattern), "%.*s", (int)(len < sizeof(pattern) ? len : sizeof(pattern) - 1), at);
        if (pattern[0] && (strstr(name, pattern) || fnmatch(pattern, name, 0) == 0))
            return true;
        at += len + (at[len] == ',');
    }
    return false;
}

static bool wanted(struct maker *m, const struct fidelity_row *row)
{
    const bool matched = m->filter->patterns ? matches(m->filter->patterns, row->name) : row->method->importance <= m->filter->importance_max;
    m->n_matched += matched;
    return matched || m->list->n == 0;
}

static int add_row(struct maker *m, const struct fidelity_method *method, int budget, int fetch, bool all_tasks)
{
    struct fidelity_row row = {.method = method, .budget = budget, .fetch = fetch, .tasks = method->tasks & m->filter->tasks};
    char b[16], f[16];
    number(b, sizeof(b), budget);
    number(f, sizeof(f), fetch);
    snprintf(row.name, sizeof(row.name), "%s/%s@%s+%s", fidelity_group_name(method->group), method->name, b, f);
    /* What takes minutes a row is measured once, and on the news; the whole of it with --all. */
    const bool costly = method->cost >= COSTLY && m->filter->importance_max < 2 && method->group != GROUP_REFERENCE;
    if (method->sweep && budget != m->filter->task_budget) {
        row.tasks &= ON_KL;
        if (costly && !m->filter->patterns)
            return 0;
    }
    if (costly || !all_tasks)
        row.tasks &= ON_KL;
    if (!wanted(m, &row) || (row.tasks == 0 && m->list->n > 0))
        return 0;
    if (m->list->n == m->cap) {
        const int cap = m->cap ? 2 * m->cap : 64;
        struct fidelity_row *rows = realloc(m->list->rows, (size_t)cap * sizeof(*rows));
        if (!rows)
            return -ENOMEM;
        m->list->rows = rows;
        m->cap = cap;
    }
    row_result_init(&row.result);
    m->list->rows[m->list->n++] = row;
    return 0;
}

static int add_method(struct maker *m, const struct fidelity_method *method)
{
    int r = 0;
    for (int i = 0; method->sweep && r >= 0 && i < m->filter->n_budgets; i++)
        r = add_row(m, method, m->filter->budgets[i], m->filter->budgets[i] * method->fetch_per_budget, true);
    for (int i = 0; !method->sweep && r >= 0 && i < method->n_splits; i++)
        r = add_row(m, method, method->splits[i].budget, method->splits[i].fetch, method->n_task_splits == 0 || i < method->n_task_splits);
    return r;
}

int row_list_make(struct row_list *list, const struct row_filter *filter, struct error *err)
{
    struct maker m = {.list = list, .filter = filter};
    *list = (struct row_list){.n = 0};
    int r = 0;
    for (int i = 0; r >= 0 && fidelity_method_lists[i]; i++)
        for (int k = 0; r >= 0 && k < fidelity_method_lists[i]->n; k++)
            r = add_method(&m, &fidelity_method_lists[i]->methods[k]);
    if (r < 0)
        error_set(err, r, "no memory for the rows");
    else if (m.n_matched == 0)
        r = error_set(err, -EINVAL, "--rows %s names no row; --list shows them", filter->patterns ? filter->patterns : "");
    if (r < 0)
        row_list_free(list);
    return r;
}

void row_list_free(struct row_list *list)
{
    free(list->rows);
    *list = (struct row_list){.n = 0};
}

struct fidelity_row *row_list_find(struct row_list *list, const char *name, size_t len)
{
    for (int i = 0; i < list->n; i++)
        if (strlen(list->rows[i].name) == len && memcmp(list->rows[i].name, name, len) == 0)
            return &list->rows[i];
    return NULL;
}

static bool same_method(const struct fidelity_method *a, const struct fidelity_method *b)
{
    return a == b || (a->run == b->run && a->arg_bytes && a->arg_bytes == b->arg_bytes && memcmp(a->arg, b->arg, a->arg_bytes) == 0);
}

const struct fidelity_row *row_list_twin(const struct row_list *list, const struct fidelity_row *row)
{
    for (int i = 0; i < list->n; i++) {
        const struct fidelity_row *other = &list->rows[i];
        if (other != row && other->result.done && !other->result.error[0] && other->budget == row->budget && other->fetch == row->fetch &&
            (row->tasks & ~other->tasks) == 0 && same_method(row->method, other->method))
            return other;
    }
    return NULL;
}

static void add_counts(struct row_result *r, const struct fidelity_counts *c, int n_layers, int n_kv_heads)
{
    if (c->steps == 0)
        return;
    r->attended = c->attended / (double)c->steps / n_layers / n_kv_heads;
    r->bytes_attended = c->bytes_attended / (double)c->steps;
    r->bytes_fetched = c->bytes_fetched / (double)c->steps;
}

static double share(int64_t part, int64_t whole)
{
    return whole ? (double)part / (double)whole : NAN;
}

void row_result_add(struct row_result *r, const struct case_set *set, struct task_scores *s, int n_layers, int n_kv_heads)
{
    for (int i = 0; i < s->n_values && r->n_values < FIDELITY_VALUES_MAX; i++) {
        struct row_value *v = &r->values[r->n_values++];
        snprintf(v->name, sizeof(v->name), "%s", s->values[i].name);
        v->value = s->values[i].sum / (double)s->values[i].n;
    }
    if (set->task == TASK_KL) {
        const double n = (double)s->n;
        r->kl = s->kl / n;
        r->kl_p99 = task_scores_kl_quantile(s, 0.99);
        r->jsd = s->jsd / n;
        r->top1 = (double)s->n_same_top / n;
        r->perplexity = exp(s->nll / n);
        add_counts(r, &s->counts, n_layers, n_kv_heads);
        return;
    }
    /* Counts are those of the news where a row has it: its contexts are all of one length. */
    if (r->attended != r->attended)
        add_counts(r, &s->counts, n_layers, n_kv_heads);
    int64_t right = 0, asked = 0;
    for (int i = 0; i < set->n_labels; i++) {
        *(set->task == TASK_RECALL ? &r->recall[i] : &r->needle[i]) = share(s->right[i], s->asked[i]);
        right += s->right[i];
        asked += s->asked[i];
    }
    if (set->task == TASK_RECALL)
        r->recall_all = share(right, asked);
}
