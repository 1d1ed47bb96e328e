/* How an arena counts: by tag and in all, now and at most. One thread. */
#pragma once
#include "kernels/device.h"
#include <string.h>

static inline void memory_stats_add(struct device_memory_stats *stats, enum mem_tag tag, size_t bytes)
{
    stats->now[tag] += bytes;
    stats->total_now += bytes;
    stats->n_allocations++;
    if (stats->now[tag] > stats->peak[tag])
        stats->peak[tag] = stats->now[tag];
    if (stats->total_now > stats->total_peak)
        stats->total_peak = stats->total_now;
}

static inline void memory_stats_take(struct device_memory_stats *stats, enum mem_tag tag, size_t bytes)
{
    stats->now[tag] -= bytes;
    stats->total_now -= bytes;
    stats->n_allocations--;
}

static inline void memory_stats_reset_peaks(struct device_memory_stats *stats)
{
    memcpy(stats->peak, stats->now, sizeof(stats->peak));
    stats->total_peak = stats->total_now;
}
