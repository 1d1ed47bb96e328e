/* Monotonic time. Any thread. Wall-clock time is used for `created` fields and log stamps only. */
#pragma once
#include <stdint.h>

/* CLOCK_MONOTONIC in nanoseconds and in microseconds. */
uint64_t clock_now_ns(void);
uint64_t clock_now_us(void);
/* CLOCK_REALTIME in whole seconds since the epoch. */
int64_t clock_wall_s(void);
