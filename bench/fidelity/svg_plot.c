#include "bench/fidelity/svg_plot.h"
#include <math.h>
#include <stdio.h>

enum { WIDTH = 860, LEFT = 70, TOP = 44, PLOT_W = 540, PLOT_H = 380, LEGEND_X = LEFT + PLOT_W + 24, LEGEND_STEP = 18, TICKS_MAX = 24 };

/* Ends of an axis in the drawn scale: values or their logarithms. */
struct range {
    double lo, hi;
    bool log, binary;
};

static const char *const colours[SVG_COLOURS] = {"#d9730d", "#2f7fd6", "#2f9e6b", "#a45fd0", "#c9404f", "#7d8590"};

static bool usable(double x, const struct svg_axis *axis)
{
    return isfinite(x) && (!axis->log || x > 0);
}

static double scaled(double x, bool is_log)
{
    return is_log ? log10(x) : x;
}

static struct range range_of(const struct svg_plot *p, bool y)
{
    const struct svg_axis *axis = y ? &p->y : &p->x;
    struct range r = {INFINITY, -INFINITY, axis->log, axis->binary};
    for (int s = 0; s < p->n_series; s++)
        for (int i = 0; i < p->series[s].n; i++) {
            const double px = p->series[s].x[i], py = p->series[s].y[i];
            if (!usable(px, &p->x) || !usable(py, &p->y))
                continue;
            r.lo = fmin(r.lo, scaled(y ? py : px, axis->log));
            r.hi = fmax(r.hi, scaled(y ? py : px, axis->log));
        }
    if (r.lo > r.hi)
        return (struct range){0, 1, axis->log, axis->binary};
    const double margin = r.hi > r.lo ? 0.06 * (r.hi - r.lo) : axis->log ? 0.5 : fmax(fabs(r.hi) * 0.1, 0.5);
    r.lo -= margin;
    r.hi += margin;
    return r;
}

static double at_x(double x, const struct range *r)
{
    return LEFT + PLOT_W * (scaled(x, r->log) - r->lo) / (r->hi - r->lo);
}
static double at_y(double y, const struct range *r)
{
    return TOP + PLOT_H * (r->hi - scaled(y, r->log)) / (r->hi - r->lo);
}

static int log_ticks(const struct range *r, double *values)
{
    static const int tens[] = {1, 2, 5}, twos[] = {1};
    const double base = r->binary ? 2 : 10;
    const int *steps = r->binary ? twos : tens;
    const int n_steps = r->binary || r->hi - r->lo > 3 ? 1 : 3;
    int n = 0;
    for (int e = (int)floor(r->lo / log10(base)); e <= (int)ceil(r->hi / log10(base)); e++)
        for (int i = 0; i < n_steps && n < TICKS_MAX; i++) {
            const double v = steps[i] * pow(base, e);
            if (log10(v) >= r->lo && log10(v) <= r->hi)
                values[n++] = v;
        }
    return n;
}

/* Round values within the range: 1, 2, 5 times a power of ten. With a logarithmic axis of more than three decades only the powers. */
static int ticks(const struct range *r, double *values)
{
    static const int steps[] = {1, 2, 5};
    int n = 0;
    if (r->log)
        return log_ticks(r, values);
    double step = pow(10, floor(log10((r->hi - r->lo) / 4)));
    for (int i = 0; i < 3 && (r->hi - r->lo) / (steps[i] * step) > 7; i++)
        if (i < 2 && (r->hi - r->lo) / (steps[i + 1] * step) <= 7)
            step *= steps[i + 1], i = 3;
    for (double v = ceil(r->lo / step) * step; v <= r->hi && n < TICKS_MAX; v += step)
        values[n++] = v;
    return n;
}

static void number_text(double v, char text[24])
{
    if (v != 0 && fabs(v) < 1e-3)
        snprintf(text, 24, "%.0e", v);
    else if (fabs(v) >= 1e6)
        snprintf(text, 24, "%gM", v / 1e6);
    else
        snprintf(text, 24, "%g", fabs(v) < 1e-12 ? 0.0 : v);
}

static int escaped(struct buf *out, const char *text)
{
    int r = 0;
    for (; r >= 0 && *text; text++) {
        if (*text == '<')
            r = buf_append_str(out, "&lt;");
        else if (*text == '&')
            r = buf_append_str(out, "&amp;");
        else
            r = buf_append(out, text, 1);
    }
    return r;
}

static int write_text(struct buf *out, double x, double y, const char *class_name, const char *transform, const char *text)
{
    int r = buf_printf(out, "<text x=\"%.1f\" y=\"%.1f\" class=\"%s\"%s>", x, y, class_name, transform);
    if (r >= 0)
        r = escaped(out, text);
    return r < 0 ? r : buf_append_str(out, "</text>\n");
}

static int write_axes(const struct svg_plot *p, const struct range *rx, const struct range *ry, struct buf *out)
{
    double values[TICKS_MAX];
    char text[24], transform[64];
    int r = write_text(out, LEFT, 24, "title", "", p->title);
    for (int i = 0, n = ticks(rx, values); r >= 0 && i < n; i++) {
        const double x = at_x(values[i], rx);
        number_text(values[i], text);
        r = buf_printf(out, "<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\" class=\"grid\"/>\n", x, TOP, x, TOP + PLOT_H);
        if (r >= 0)
            r = write_text(out, x, TOP + PLOT_H + 18, "tick mid", "", text);
    }
    for (int i = 0, n = ticks(ry, values); r >= 0 && i < n; i++) {
        const double y = at_y(values[i], ry);
        number_text(values[i], text);
        r = buf_printf(out, "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" class=\"grid\"/>\n", LEFT, y, LEFT + PLOT_W, y);
        if (r >= 0)
            r = write_text(out, LEFT - 8, y + 4, "tick end", "", text);
    }
    if (r >= 0)
        r = write_text(out, LEFT + PLOT_W / 2.0, TOP + PLOT_H + 40, "axis mid", "", p->x.title);
    snprintf(transform, sizeof(transform), " transform=\"rotate(-90 18 %d)\"", TOP + PLOT_H / 2);
    return r < 0 ? r : write_text(out, 18, TOP + PLOT_H / 2.0, "axis mid", transform, p->y.title);
}

/* Shapes of about equal area: filled and hollow circle, square, diamond, triangle. */
static int write_marker(struct buf *out, double x, double y, const struct svg_series *s)
{
    const char *colour = colours[s->colour % SVG_COLOURS];
    const int marker = s->marker % SVG_MARKERS;
    const char *fill = marker < 4 ? colour : "none";
    switch (marker % 4) {
    case 0:
        return buf_printf(out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"%s\" stroke=\"%s\"/>\n", x, y, fill, colour);
    case 1:
        return buf_printf(out, "<rect x=\"%.1f\" y=\"%.1f\" width=\"7\" height=\"7\" fill=\"%s\" stroke=\"%s\"/>\n", x - 3.5, y - 3.5, fill, colour);
    case 2:
        return buf_printf(out, "<path d=\"M%.1f %.1fl5 5l-5 5l-5 -5z\" fill=\"%s\" stroke=\"%s\"/>\n", x, y - 5, fill, colour);
    default:
        return buf_printf(out, "<path d=\"M%.1f %.1fl5 8.5h-10z\" fill=\"%s\" stroke=\"%s\"/>\n", x, y - 5, fill, colour);
    }
}

static int write_series(const struct svg_plot *p, const struct svg_series *s, const struct range *rx, const struct range *ry, struct buf *out)
{
    int r = 0, drawn = 0;
    for (int i = 0; s->line && r >= 0 && i < s->n; i++) {
        if (!usable(s->x[i], &p->x) || !usable(s->y[i], &p->y))
            continue;
        r = drawn++ ? buf_printf(out, "L%.1f %.1f", at_x(s->x[i], rx), at_y(s->y[i], ry))
                    : buf_printf(out, "<path fill=\"none\" stroke=\"%s\" stroke-width=\"1.5\"%s d=\"M%.1f %.1f", colours[s->colour % SVG_COLOURS],
                                 s->dashed ? " stroke-dasharray=\"5 4\"" : "", at_x(s->x[i], rx), at_y(s->y[i], ry));
    }
    if (r >= 0 && drawn)
        r = buf_append_str(out, "\"/>\n");
    for (int i = 0; r >= 0 && i < s->n; i++)
        if (usable(s->x[i], &p->x) && usable(s->y[i], &p->y))
            r = write_marker(out, at_x(s->x[i], rx), at_y(s->y[i], ry), s);
    return r;
}

static int write_legend(const struct svg_plot *p, struct buf *out)
{
    int r = 0;
    for (int i = 0; r >= 0 && i < p->n_series; i++) {
        const double y = TOP + 8 + i * LEGEND_STEP;
        r = write_marker(out, LEGEND_X, y, &p->series[i]);
        if (r >= 0)
            r = write_text(out, LEGEND_X + 12, y + 4, "tick", "", p->series[i].label);
    }
    return r;
}

int svg_plot_write(const struct svg_plot *p, struct buf *out)
{
    const struct range rx = range_of(p, false), ry = range_of(p, true);
    const int legend_h = TOP + 16 + p->n_series * LEGEND_STEP, plot_h = TOP + PLOT_H + 56;
    const int height = legend_h > plot_h ? legend_h : plot_h;
    int r = buf_printf(out,
                       "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\">\n"
                       "<style>svg{--ink:#24292f;--grid:#d8dee4}@media(prefers-color-scheme:dark){svg{--ink:#e6edf3;--grid:#30363d}}"
                       "text{font-family:system-ui,sans-serif;fill:var(--ink)}.title{font-size:15px;font-weight:600}.axis{font-size:13px}.tick{font-size:12px}"
                       ".mid{text-anchor:middle}.end{text-anchor:end}.grid{stroke:var(--grid)}</style>\n",
                       WIDTH, height, WIDTH, height);
    if (r >= 0)
        r = write_axes(p, &rx, &ry, out);
    for (int i = 0; r >= 0 && i < p->n_series; i++)
        r = write_series(p, &p->series[i], &rx, &ry, out);
    if (r >= 0)
        r = p->n_series ? write_legend(p, out) : write_text(out, LEFT + 20, TOP + 30, "axis", "", "nothing measured");
    return r < 0 ? r : buf_append_str(out, "</svg>\n");
}
