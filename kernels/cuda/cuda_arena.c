#include "kernels/cuda/cuda_arena.h"
#include "kernels/cuda/cuda_private.h"
#include "kernels/memory_stats.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <stdlib.h>

enum { SLOTS_MIN = 64 };

static size_t slot_of(const struct cuda_arena *a, const void *memory)
{
    return (size_t)((uintptr_t)memory >> 8) * 0x9E3779B97F4A7C15u >> 20 & (a->n_slots - 1);
}

static struct cuda_allocation *slot_find(const struct cuda_arena *a, const void *memory)
{
    size_t i = slot_of(a, memory);
    while (a->table[i].memory && a->table[i].memory != memory)
        i = (i + 1) & (a->n_slots - 1);
    return &a->table[i];
}

static int table_grow(struct cuda_arena *a)
{
    struct cuda_arena larger = {.n_slots = a->n_slots ? 2 * a->n_slots : SLOTS_MIN};
    if (a->table && 2 * (a->stats.n_allocations + 1) <= a->n_slots)
        return 0;
    larger.table = calloc(larger.n_slots, sizeof *larger.table);
    if (!larger.table)
        return -ENOMEM;
    for (size_t i = 0; i < a->n_slots; i++)
        if (a->table[i].memory)
            *slot_find(&larger, a->table[i].memory) = a->table[i];
    free(a->table);
    a->table = larger.table;
    a->n_slots = larger.n_slots;
    return 0;
}

/* Empties a slot and moves up what only stood behind it because of it. */
static void slot_clear(struct cuda_arena *a, struct cuda_allocation *slot)
{
    size_t hole = (size_t)(slot - a->table), mask = a->n_slots - 1;
    slot->memory = NULL;
    for (size_t i = (hole + 1) & mask; a->table[i].memory; i = (i + 1) & mask) {
        size_t home = slot_of(a, a->table[i].memory);
        if (((i - home) & mask) < ((i - hole) & mask))
            continue;
        a->table[hole] = a->table[i];
        a->table[i].memory = NULL;
        hole = i;
    }
}

int cuda_arena_alloc(struct cuda_arena *a, enum mem_tag tag, size_t bytes, void **ret_memory)
{
    void *memory;
    if ((unsigned)tag >= MEM_TAG_COUNT)
        return -EINVAL;
    if (a->limit && (a->stats.total_now > a->limit || bytes > a->limit - a->stats.total_now))
        return -ENOMEM;
    int r = table_grow(a);
    if (r == 0)
        r = cuda_error(cudaMalloc(&memory, bytes ? bytes : 1));
    if (r < 0)
        return r;
    *slot_find(a, memory) = (struct cuda_allocation){.memory = memory, .bytes = bytes, .tag = tag};
    memory_stats_add(&a->stats, tag, bytes);
    *ret_memory = memory;
    return 0;
}

void cuda_arena_free(struct cuda_arena *a, void *memory)
{
    if (!memory)
        return;
    ASSERT(a->table);
    struct cuda_allocation *slot = slot_find(a, memory);
    ASSERT(slot->memory == memory);
    memory_stats_take(&a->stats, slot->tag, slot->bytes);
    slot_clear(a, slot);
    cuda_error(cudaFree(memory)); /* a device that has failed says so at the next wait too */
}

void cuda_arena_reset_peaks(struct cuda_arena *a)
{
    memory_stats_reset_peaks(&a->stats);
}

void cuda_arena_init(struct cuda_arena *a, size_t limit)
{
    *a = (struct cuda_arena){.limit = limit};
}

void cuda_arena_fini(struct cuda_arena *a)
{
    ASSERT(a->stats.n_allocations == 0);
    free(a->table);
    a->table = NULL;
}
