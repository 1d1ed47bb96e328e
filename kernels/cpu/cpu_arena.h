/* The CPU device's memory: every byte carries a tag and is counted exactly as asked for. One thread. */
#pragma once
#include "kernels/device.h"

struct arena_header;

struct cpu_arena {
    struct device_memory_stats stats;
    size_t limit;              /* bytes, 0: none */
    struct arena_header *head; /* all that is allocated */
};

void cpu_arena_init(struct cpu_arena *arena, size_t limit);
void cpu_arena_fini(struct cpu_arena *arena); /* asserts that nothing is allocated */
/* 64-byte aligned; from 1 MiB on a mapping of its own, in huge pages where the system gives them. -EINVAL (no such tag), -ENOMEM (also beyond the limit). */
int cpu_arena_alloc(struct cpu_arena *arena, enum mem_tag tag, size_t bytes, void **ret_memory);
void cpu_arena_free(struct cpu_arena *arena, void *memory); /* NULL is fine; asserts that it is this arena's */
void cpu_arena_reset_peaks(struct cpu_arena *arena);
