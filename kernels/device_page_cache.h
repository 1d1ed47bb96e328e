/* The page cache of a device whose memory is not the host's: sub-pages that were fetched from the registered pool, in slots of device memory, found and filled by kernels alone, so that a
 * step that attends them needs no answer from the host. One cache a device; attn_decode fetches through it (attn_decode_params.cache), for all sequences.
 *
 * A page is known by its block's id, layer, KV head and place in the block. The same id always means the same bytes, so an entry never goes stale and leaves only to make room: sets of
 * DEVICE_PAGE_WAYS slots, second chance within a set. A page that is needed by the call at work, or by the one before, never gives way; one that finds no slot is staged, and if there is no
 * room for that either, read where it lies. What is attended never depends on which of these it was. A page that is asked for several times in one call is fetched once.
 * Which pages are held is a function of the calls so far, not of the order in which a device ran them.
 *
 * Memory is the caller's: one fixed piece (page_cache_bytes), and any number of equal extents, which may come and go: the pages of those that stay, stay found.
 *
 * Thread: the owner of the device. The ops are slots of struct kernel_ops. Devices with host_memory read pages where they lie: every slot but page_cache_bytes (0) is -ENOTSUP there. */
#pragma once
#include "proto/block_layout.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct stream;
struct device_page_cache;

enum {
    DEVICE_PAGE_WAYS = 16,
    DEVICE_PAGE_EXTENTS_MAX = 64,
    DEVICE_PAGE_CALL_MAX = 1 << 15,   /* pages that are looked up together */
    DEVICE_PAGE_STAGED_MAX = 2048,
};
#define DEVICE_PAGE_ID_MAX (((uint64_t)1 << 44) - 1)

struct device_page_cache_config {
    const struct block_layout *layout; /* copied */
    int n_pages;         /* most pages that are looked up together, >= 1; attn_decode cuts what is more into rounds, and takes no less than 16 */
    int n_staged;        /* most pages that are staged at a time; 0: DEVICE_PAGE_STAGED_MAX. A cache with few slots works in rounds of as many, so attn_decode takes no less than 16 here too */
    size_t extent_bytes; /* of one extent: at least one set of pages and one of sinks; 0: there will be none */
};

/* A page to fetch. */
struct fetch_page {
    uint64_t id;         /* 1..DEVICE_PAGE_ID_MAX; 0: it lies in device memory and is read there */
    const uint8_t *page; /* where it lies: registered memory of the host, on 64 bytes */
    uint16_t layer, kv_head; /* below 512 and 256 */
    uint8_t subpage;     /* of its block, below BLOCK_SUBPAGES */
    bool sink;           /* the BF16 sub-page of block 0: layout->sink.bytes, not layout->page.bytes */
};

/* Since the cache was opened. Of pages that are asked for several times in a call, the first is counted as what it was, the others as hits. */
struct device_page_cache_stats {
    uint64_t hits, misses, evictions;
    uint64_t bytes_missed;   /* fetched, or read in place */
    uint64_t in_place;       /* misses that were read where they lie */
    size_t capacity_bytes, used_bytes; /* of slots */
};
