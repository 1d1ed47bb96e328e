/* One plot for each question of the study. */
#include "bench/fidelity/results.h"
#include "bench/fidelity/svg_plot.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What is drawn of a row. */
typedef double figure_fn(const struct fidelity_row *row);

static double fig_budget(const struct fidelity_row *row)
{
    return row->budget;
}
static double fig_attended(const struct fidelity_row *row)
{
    return row->result.attended;
}
static double fig_kl(const struct fidelity_row *row)
{
    return row->result.kl;
}
static double fig_recall(const struct fidelity_row *row)
{
    return row->result.recall_all;
}
static double fig_fetched_kb(const struct fidelity_row *row)
{
    return row->result.bytes_fetched / 1024;
}

struct question {
    const char *title;
    struct svg_axis x, y;
    figure_fn *fx, *fy;
    unsigned groups;      /* bits 1 << GROUP_ */
    bool all_selectors;   /* of drop and demote; else snapkv stands for them */
};

#define TOKENS_ATTENDED {"tokens attended per layer and KV head", true, true}
#define KL_AXIS {"KL(full || method), nats", true, false}

static struct svg_series *series_of(struct svg_plot *plot, const struct fidelity_method *method, const struct fidelity_method **methods)
{
    for (int i = 0; i < plot->n_series; i++)
        if (methods[i] == method)
            return &plot->series[i];
    if (plot->n_series == SVG_SERIES_MAX)
        return NULL;
    int same_group = 0;
    for (int i = 0; i < plot->n_series; i++)
        same_group += methods[i]->group == method->group;
    static const int colours[GROUP_COUNT] = {[GROUP_REFERENCE] = 5, [GROUP_DEFAULT] = 1, [GROUP_DROP] = 0, [GROUP_DEMOTE] = 1, [GROUP_SCORER] = 3,
                                             [GROUP_SPLIT] = 2,     [GROUP_BASELINE] = 4, [GROUP_CONTROL] = 0, [GROUP_DRIFT] = 5};
    struct svg_series *s = &plot->series[plot->n_series];
    methods[plot->n_series++] = method;
    *s = (struct svg_series){.colour = colours[method->group], .marker = same_group, .line = true, .dashed = method->group == GROUP_DROP};
    snprintf(s->label, sizeof(s->label), "%s/%s", fidelity_group_name(method->group), method->name);
    return s;
}

static bool asked_for(const struct question *q, const struct fidelity_method *method)
{
    const bool selectors = method->group == GROUP_DROP || method->group == GROUP_DEMOTE;
    return q->groups & 1u << method->group && (q->all_selectors || !selectors || strcmp(method->name, "snapkv") == 0);
}

static bool drawable(double v, const struct svg_axis *axis)
{
    return isfinite(v) && (v > 0 || !axis->log);
}

static void add_row(struct svg_plot *plot, const struct fidelity_method **methods, const struct question *q, const struct fidelity_row *row)
{
    const double x = q->fx(row), y = q->fy(row);
    if (!row->result.done || row->result.error[0] || !asked_for(q, row->method) || !drawable(x, &q->x) || !drawable(y, &q->y))
        return;
    struct svg_series *s = series_of(plot, row->method, methods);
    if (!s || s->n == SVG_POINTS_MAX)
        return;
    s->x[s->n] = x;
    s->y[s->n++] = y;
}

static int write_question(const struct run_results *results, const struct question *q, struct buf *out)
{
    const struct fidelity_method *methods[SVG_SERIES_MAX];
    struct svg_plot *plot = calloc(1, sizeof(*plot));
    if (!plot)
        return -1;
    plot->title = q->title;
    plot->x = q->x;
    plot->y = q->y;
    for (int i = 0; i < results->list->n; i++)
        add_row(plot, methods, q, &results->list->rows[i]);
    const int r = svg_plot_write(plot, out);
    free(plot);
    return r;
}

enum {
    SELECTORS = 1 << GROUP_DROP | 1 << GROUP_DEMOTE,
    METHODS = SELECTORS | 1 << GROUP_REFERENCE | 1 << GROUP_DEFAULT | 1 << GROUP_BASELINE | 1 << GROUP_CONTROL,
};

static int kl_by_budget(const struct run_results *results, struct buf *out)
{
    static const struct question q = {
        .title = "Does demoting beat dropping? KL by fast budget",
        .x = {"fast budget, tokens per layer and KV head", true, true},
        .y = KL_AXIS,
        .fx = fig_budget, .fy = fig_kl, .groups = SELECTORS, .all_selectors = true,
    };
    return write_question(results, &q, out);
}

static int kl_by_attended(const struct run_results *results, struct buf *out)
{
    static const struct question q = {
        .title = "What does a token attended buy? KL by tokens attended",
        .x = TOKENS_ATTENDED, .y = KL_AXIS, .fx = fig_attended, .fy = fig_kl, .groups = METHODS,
    };
    return write_question(results, &q, out);
}

static int kl_by_scorer(const struct run_results *results, struct buf *out)
{
    static const struct question q = {
        .title = "Who finds the pages? KL by tokens attended",
        .x = TOKENS_ATTENDED, .y = KL_AXIS, .fx = fig_attended, .fy = fig_kl, .groups = 1 << GROUP_SCORER,
    };
    return write_question(results, &q, out);
}

static int kl_by_traffic(const struct run_results *results, struct buf *out)
{
    static const struct question q = {
        .title = "Kept or fetched? KL by bytes of the slow tier",
        .x = {"KB of the slow tier a token", true, false}, .y = KL_AXIS, .fx = fig_fetched_kb, .fy = fig_kl,
        .groups = 1 << GROUP_DEFAULT | 1 << GROUP_DEMOTE | 1 << GROUP_SPLIT | 1 << GROUP_BASELINE | 1 << GROUP_REFERENCE,
    };
    return write_question(results, &q, out);
}

static int recall_by_attended(const struct run_results *results, struct buf *out)
{
    static const struct question q = {
        .title = "Is what was read still there? Verbatim recall by tokens attended",
        .x = TOKENS_ATTENDED, .y = {"share of words recalled", false, false}, .fx = fig_attended, .fy = fig_recall, .groups = METHODS, .all_selectors = true,
    };
    return write_question(results, &q, out);
}

const struct plot_file fidelity_plots[] = {
    {"kl_by_budget.svg", kl_by_budget},
    {"kl_by_attended.svg", kl_by_attended},
    {"kl_by_scorer.svg", kl_by_scorer},
    {"kl_by_traffic.svg", kl_by_traffic},
    {"recall_by_attended.svg", recall_by_attended},
    {NULL, NULL},
};
