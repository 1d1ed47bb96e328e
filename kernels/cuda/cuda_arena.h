/* Device memory by tag over plain cudaMalloc: every byte is counted as asked for. One thread. */
#pragma once
#include "kernels/device.h"
#include <stdbool.h>

struct cuda_allocation {
    void *memory; /* NULL: the slot is free */
    size_t bytes;
    enum mem_tag tag;
};

struct cuda_arena {
    struct device_memory_stats stats;
    size_t limit; /* bytes, 0: none */
    struct cuda_allocation *table; /* by address, open addressing; a power of two of slots, at most half of them used */
    size_t n_slots;
};

void cuda_arena_init(struct cuda_arena *arena, size_t limit);
void cuda_arena_fini(struct cuda_arena *arena); /* asserts that nothing is allocated */
/* 256-byte aligned. -EINVAL (no such tag), -ENOMEM (also beyond the limit), -EIO. */
int cuda_arena_alloc(struct cuda_arena *arena, enum mem_tag tag, size_t bytes, void **ret_memory);
/* NULL is fine; asserts that it is this arena's. No work that was submitted may still use the memory. */
void cuda_arena_free(struct cuda_arena *arena, void *memory);
void cuda_arena_reset_peaks(struct cuda_arena *arena);
