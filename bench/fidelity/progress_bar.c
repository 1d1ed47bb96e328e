#include "bench/fidelity/progress_bar.h"
#include "proto/base/clock.h"
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

enum { BAR_WIDTH = 28, DRAW_EVERY_US = 100 * 1000 };

void progress_bar_init(struct progress_bar *bar, double total)
{
    *bar = (struct progress_bar){.tty = isatty(STDERR_FILENO), .total = total, .started_us = clock_now_us()};
}

void progress_time_text(double seconds, char text[32])
{
    const long s = seconds > 0 && seconds < 1e7 ? (long)(seconds + 0.5) : 0;
    if (s >= 3600)
        snprintf(text, 32, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
    else
        snprintf(text, 32, "%ld:%02ld", s / 60, s % 60);
}

static double left_s(const struct progress_bar *bar)
{
    const double elapsed = (double)(clock_now_us() - bar->started_us) / 1e6;
    return bar->done > 0 ? elapsed * (bar->total - bar->done) / bar->done : 0;
}

static void draw(struct progress_bar *bar)
{
    char cells[BAR_WIDTH + 1], left[32];
    const double share = bar->total > 0 ? bar->done / bar->total : 0;
    for (int i = 0; i < BAR_WIDTH; i++)
        cells[i] = i < (int)(share * BAR_WIDTH) ? '=' : ' ';
    cells[BAR_WIDTH] = '\0';
    progress_time_text(left_s(bar), left);
    fprintf(stderr, "\r\033[K[%s] %3d %%  %s left  %s", cells, (int)(share * 100), bar->done > 0 ? left : "?", bar->label);
    bar->drawn_us = clock_now_us();
}

void progress_bar_label(struct progress_bar *bar, double done, const char *label)
{
    snprintf(bar->label, sizeof(bar->label), "%s", label);
    bar->done = done;
    if (bar->tty)
        draw(bar);
}

void progress_bar_move(struct progress_bar *bar, double done)
{
    bar->done = done;
    if (bar->tty && clock_now_us() - bar->drawn_us >= DRAW_EVERY_US)
        draw(bar);
}

void progress_bar_line(struct progress_bar *bar, const char *fmt, ...)
{
    char left[32];
    va_list ap;
    if (bar->tty)
        fputs("\r\033[K", stderr);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    progress_time_text(left_s(bar), left);
    if (!bar->tty && bar->done > 0 && bar->done < bar->total)
        fprintf(stderr, " (%d %%, %s left)", (int)(100 * bar->done / bar->total), left);
    fputc('\n', stderr);
    if (bar->tty)
        draw(bar);
}

void progress_bar_end(struct progress_bar *bar)
{
    if (bar->tty)
        fputs("\r\033[K", stderr);
}
