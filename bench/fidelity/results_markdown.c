#include "bench/fidelity/results.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

static const char *const titles[GROUP_COUNT] = {
    [GROUP_REFERENCE] = "Full attention, and what formats and prefill cost with everything attended",
    [GROUP_DEFAULT] = "The default path",
    [GROUP_DROP] = "Drop: what the selector does not keep is gone",
    [GROUP_DEMOTE] = "Demote: the same selectors, the rest fetched when a query wants it",
    [GROUP_SCORER] = "How slow pages are found",
    [GROUP_SPLIT] = "Kept or fetched, at equal attended tokens",
    [GROUP_BASELINE] = "Methods of others, built from the same parts",
    [GROUP_CONTROL] = "Controls: eviction during prefill",
    [GROUP_DRIFT] = "Drift from one-shot prefill",
};

/* Three significant digits for small figures, without an exponent where that stays short. */
static int cell(struct buf *out, double v, const char *fmt)
{
    char text[32];
    if (v != v)
        return buf_append_str(out, " |");
    if (strcmp(fmt, "kl") == 0)
        snprintf(text, sizeof(text), fabs(v) >= 0.001 || v == 0 ? "%.4f" : "%.1e", fabs(v) < 1e-12 ? 0.0 : v);
    else
        snprintf(text, sizeof(text), fmt, v);
    return buf_printf(out, " %s |", text);
}

static int tokens_cell(struct buf *out, int n)
{
    return n == FIDELITY_ALL ? buf_append_str(out, " all |") : buf_printf(out, " %d |", n);
}

static bool has_recall(const struct run_results *results)
{
    return results->n_recall_labels > 0;
}

static bool has_needles(const struct run_results *results)
{
    return results->settings.n_needles > 0;
}

static int head(struct buf *out, const struct run_results *results)
{
    int r = buf_append_str(out, "| row | B | F | attended | fast B | KB a token | KL | p99 | JSD | top-1 | perplexity |");
    for (int i = 0; r >= 0 && i < results->n_recall_labels; i++)
        r = buf_printf(out, " recall %s |", results->recall_labels[i]);
    if (r >= 0 && has_recall(results))
        r = buf_append_str(out, " recall |");
    if (r >= 0)
        r = buf_append_str(out, has_needles(results) ? " needle seen | unseen |\n|---|" : "\n|---|");
    for (int i = 0; r >= 0 && i < 10 + results->n_recall_labels + has_recall(results) + 2 * has_needles(results); i++)
        r = buf_append_str(out, "---|");
    return r < 0 ? r : buf_append_str(out, "\n");
}

static double value_of(const struct row_result *r, const char *name)
{
    for (int i = 0; i < r->n_values; i++)
        if (strcmp(r->values[i].name, name) == 0)
            return r->values[i].value;
    return NAN;
}

static int line(struct buf *out, const struct run_results *results, const struct fidelity_row *row)
{
    const struct row_result *v = &row->result;
    int r = buf_printf(out, "| %s |", row->method->name);
    if (r >= 0)
        r = tokens_cell(out, row->budget);
    if (r >= 0)
        r = tokens_cell(out, row->fetch);
    if (r >= 0 && v->error[0])
        return buf_printf(out, " failed: %s |\n", v->error);
    const struct {
        double value;
        const char *fmt;
    } cells[] = {
        {v->attended, "%.0f"}, {value_of(v, FIDELITY_FAST_BYTES), "%.0f"}, {v->bytes_fetched / 1024, "%.0f"}, {v->kl, "kl"}, {v->kl_p99, "kl"}, {v->jsd, "kl"}, {v->top1, "%.3f"}, {v->perplexity, "%.3f"},
    };
    for (size_t i = 0; r >= 0 && i < sizeof(cells) / sizeof(cells[0]); i++)
        r = cell(out, cells[i].value, cells[i].fmt);
    for (int i = 0; r >= 0 && i < results->n_recall_labels; i++)
        r = cell(out, v->recall[i], "%.3f");
    if (r >= 0 && has_recall(results))
        r = cell(out, v->recall_all, "%.3f");
    for (int i = 0; r >= 0 && has_needles(results) && i < 2; i++)
        r = cell(out, v->needle[i], "%.2f");
    return r < 0 ? r : buf_append_str(out, "\n");
}

/* The first row of a group that has values of its own gives the columns. */
static const struct row_result *with_values(const struct run_results *results, enum fidelity_group group)
{
    for (int i = 0; i < results->list->n; i++) {
        const struct fidelity_row *row = &results->list->rows[i];
        for (int k = 0; row->method->group == group && k < row->result.n_values; k++)
            if (strcmp(row->result.values[k].name, FIDELITY_FAST_BYTES) != 0)
                return &row->result;
    }
    return NULL;
}

static int values_head(struct buf *out, const struct row_result *columns)
{
    int r = buf_append_str(out, "\n| row |"), n = 1;
    for (int i = 0; r >= 0 && i < columns->n_values; i++)
        if (strcmp(columns->values[i].name, FIDELITY_FAST_BYTES) != 0) {
            r = buf_printf(out, " %s |", columns->values[i].name);
            n++;
        }
    if (r >= 0)
        r = buf_append_str(out, "\n|");
    while (r >= 0 && n-- > 0)
        r = buf_append_str(out, "---|");
    return r < 0 ? r : buf_append_str(out, "\n");
}

/* A table of what the methods of a group say beside the figures that all have. */
static int values_table(struct buf *out, const struct run_results *results, enum fidelity_group group)
{
    const struct row_result *columns = with_values(results, group);
    int r = columns ? values_head(out, columns) : 0;
    for (int i = 0; r >= 0 && columns && i < results->list->n; i++) {
        const struct fidelity_row *row = &results->list->rows[i];
        if (row->method->group != group || row->result.n_values == 0)
            continue;
        r = buf_printf(out, "| %s |", strchr(row->name, '/') + 1);
        for (int k = 0; r >= 0 && k < columns->n_values; k++)
            if (strcmp(columns->values[k].name, FIDELITY_FAST_BYTES) != 0)
                r = cell(out, value_of(&row->result, columns->values[k].name), "%.4g");
        if (r >= 0)
            r = buf_append_str(out, "\n");
    }
    return r;
}

static int legend(struct buf *out, const struct run_results *results, enum fidelity_group group)
{
    const struct fidelity_method *last = NULL;
    int r = buf_append_str(out, "\n");
    for (int i = 0; r >= 0 && i < results->list->n; i++) {
        const struct fidelity_row *row = &results->list->rows[i];
        if (row->method->group != group || !row->result.done)
            continue;
        if (row->method != last && row->method->text)
            r = buf_printf(out, "* %s: %s\n", row->method->name, row->method->text);
        last = row->method;
    }
    return r < 0 ? r : buf_append_str(out, "\n");
}

static int group_table(struct buf *out, const struct run_results *results, enum fidelity_group group)
{
    bool any = false;
    int r = 0;
    for (int i = 0; r >= 0 && i < results->list->n; i++) {
        const struct fidelity_row *row = &results->list->rows[i];
        if (row->method->group != group || !row->result.done)
            continue;
        if (!any)
            r = buf_printf(out, "## %s\n\n", titles[group]);
        if (r >= 0 && !any)
            r = head(out, results);
        any = true;
        if (r >= 0)
            r = line(out, results, row);
    }
    if (r >= 0 && any)
        r = values_table(out, results, group);
    return r < 0 || !any ? r : legend(out, results, group);
}

static int intro(struct buf *out, const struct run_results *results)
{
    const struct run_settings *s = &results->settings;
    int r = buf_printf(out,
                       "# Fidelity of %s\n\n%d contexts of %d tokens from `%s`, %d teacher-forced positions behind each. KL, p99 and JSD in nats against full attention (bf16) on the "
                       "same tokens, top-1 the agreement of the most likely token. B is the fast budget, F the fetch budget, tokens per layer and KV head; attended counts the "
                       "continuation's own tokens too. Fast B: bytes of fast memory that a prompt token takes on the average; KB a token: kilobytes of the slow tier that a decode step reads; both over "
                       "all layers and KV heads.\n\n",
                       s->model, s->contexts, s->context_tokens, s->texts, s->positions);
    if (r >= 0 && has_recall(results))
        r = buf_printf(out, "Recall: share of the words of a list that are predicted right when the list comes again, %d contexts of each length. ", s->recall_samples);
    if (r >= 0 && has_needles(results))
        r = buf_printf(out, "Needle: share of the %d questions (of %d) that full attention answers, at %d tokens.", s->n_needles, s->needle_samples, s->needle_tokens);
    else if (r >= 0 && s->needle_samples > 0 && results->list->n > 0 && results->list->rows[0].result.done)
        r = buf_printf(out, "Needle: full attention answers none of the %d questions, at %d tokens.", s->needle_samples, s->needle_tokens);
    return r < 0 ? r : buf_append_str(out, "\n\n");
}

int results_markdown(const struct run_results *results, struct buf *out)
{
    int r = intro(out, results);
    for (int g = 0; r >= 0 && g < GROUP_COUNT; g++)
        r = group_table(out, results, (enum fidelity_group)g);
    for (int i = 0; r >= 0 && fidelity_plots[i].name; i++)
        r = buf_printf(out, "![%s](%s)\n", fidelity_plots[i].name, fidelity_plots[i].name);
    return r;
}
