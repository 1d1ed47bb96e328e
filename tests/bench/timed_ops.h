/* A table of ops that takes the time of each and passes it on; for benches. One at a time in a process. */
#pragma once
#include "kernels/kernels.h"
#include <stdio.h>

/* The ops of `ops` (borrowed) with a clock around each. The device must finish an op before it returns (the CPU). */
const struct kernel_ops *timed_ops(const struct kernel_ops *ops);
void timed_ops_reset(void);
/* Microseconds and calls of each op since the reset as a table, longest first; `wall_us` is what they are compared with. */
void timed_ops_print(FILE *out, double wall_us);
