/* A bar with the time that is left on stderr when that is a terminal, else a line for each thing that is finished. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

struct progress_bar {
    bool tty;
    double total, done; /* in units of work */
    uint64_t started_us, drawn_us;
    char label[128];
};

void progress_bar_init(struct progress_bar *bar, double total);
/* What is being done; `done` units are behind it. */
void progress_bar_label(struct progress_bar *bar, double done, const char *label);
/* Some of it is through. Cheap: draws ten times a second at most. */
void progress_bar_move(struct progress_bar *bar, double done);
/* A line that stays: with a terminal above the bar. */
void progress_bar_line(struct progress_bar *bar, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void progress_bar_end(struct progress_bar *bar);
/* "1:05" or "2:03:09". */
void progress_time_text(double seconds, char text[32]);
