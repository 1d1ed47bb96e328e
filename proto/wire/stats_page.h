/* Statistics of the store in one shared page that only the store can write (a memfd sealed with F_SEAL_FUTURE_WRITE, handed out with Welcome). Readers
 * never ask the store and never trust the page for more than display: `sequence` is odd while the store writes, and a reader takes the
 * numbers between two equal even values of it. */
#pragma once
#include <assert.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define STATS_PAGE_MAGIC 0x7461747364697431ull /* "1tidstat" */
enum { STATS_PAGE_VERSION = 1, STATS_PAGE_BYTES = 4096 };

enum stats_field {
    STATS_POOL_BYTES,
    STATS_USED_BYTES,
    STATS_PINNED_BYTES,
    STATS_BLOCKS,
    STATS_UNSEALED,
    STATS_LEASES,
    STATS_CLIENTS,
    STATS_LOOKUPS,
    STATS_LOOKUP_HITS,
    STATS_LOOKUP_MISSES,
    STATS_STORED,
    STATS_EVICTED,
    STATS_REJECTED_FULL,
    STATS_CORRUPT,
    STATS_PROTOCOL_ERRORS,
    STATS_EVENT_SEQUENCE,
    STATS_UNRESPONSIVE,
    STATS_DISCARDED,
    STATS_FIELD_COUNT,
};

struct stats_page {
    uint64_t magic;
    uint32_t version, bytes;
    _Atomic uint64_t sequence;
    _Atomic uint64_t fields[STATS_FIELD_COUNT]; /* by enum stats_field */
};
static_assert(offsetof(struct stats_page, sequence) == 16, "layout of the statistics page");
static_assert(offsetof(struct stats_page, fields) == 24, "layout of the statistics page");
static_assert(sizeof(struct stats_page) <= STATS_PAGE_BYTES, "the statistics fit into a page");

/* The store's side; one writer. The fences order the numbers between the two changes of `sequence`. */
static inline void stats_page_write(struct stats_page *page, const uint64_t fields[STATS_FIELD_COUNT])
{
    uint64_t sequence = atomic_load_explicit(&page->sequence, memory_order_relaxed);

    atomic_store_explicit(&page->sequence, sequence + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    for (int i = 0; i < STATS_FIELD_COUNT; i++)
        atomic_store_explicit(&page->fields[i], fields[i], memory_order_relaxed);
    atomic_store_explicit(&page->sequence, sequence + 2, memory_order_release);
}

/* Returns 0, or -1 if the store was writing at each of a few tries (or died doing so). */
static inline int stats_page_read(struct stats_page *page, uint64_t ret_fields[STATS_FIELD_COUNT])
{
    enum { TRIES = 16 };

    for (int t = 0; t < TRIES; t++) {
        uint64_t before = atomic_load_explicit(&page->sequence, memory_order_acquire);
        uint64_t fields[STATS_FIELD_COUNT];
        for (int i = 0; i < STATS_FIELD_COUNT; i++)
            fields[i] = atomic_load_explicit(&page->fields[i], memory_order_relaxed);
        atomic_thread_fence(memory_order_acquire);
        if (before % 2 || before != atomic_load_explicit(&page->sequence, memory_order_relaxed))
            continue;
        for (int i = 0; i < STATS_FIELD_COUNT; i++)
            ret_fields[i] = fields[i];
        return 0;
    }
    return -1;
}
