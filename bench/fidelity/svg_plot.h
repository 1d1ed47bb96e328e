/* A line or scatter plot as SVG, for a page that is light or dark: colours of the text follow the reader's preference, those of the series stand out on both. */
#pragma once
#include "proto/base/buf.h"
#include <stdbool.h>

enum { SVG_POINTS_MAX = 32, SVG_SERIES_MAX = 40, SVG_COLOURS = 6, SVG_MARKERS = 8 };

struct svg_series {
    char label[64];
    int colour, marker; /* taken modulo SVG_COLOURS and SVG_MARKERS */
    bool line, dashed;
    double x[SVG_POINTS_MAX], y[SVG_POINTS_MAX];
    int n;
};

struct svg_axis {
    const char *title;
    bool log;           /* points that are not positive are left out */
    bool binary;        /* with log: ticks at powers of two, for budgets */
};

struct svg_plot {
    const char *title;
    struct svg_axis x, y;
    struct svg_series series[SVG_SERIES_MAX];
    int n_series;
};

/* Appends a whole document. Points that are no finite numbers are left out; without any point the plot says so. */
int svg_plot_write(const struct svg_plot *plot, struct buf *out);
