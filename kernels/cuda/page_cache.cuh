/* A round of the page cache, as its kernels share it: the pages of one lookup become entries of a table, each distinct one once; entries fall on sets, sets give slots, what is missing becomes a
 * list of copies. All pointers are device memory but the sources of pages. page_cache.cu says how the kernels work together. */
#pragma once
#include "kernels/cuda/cuda_private.h"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/submit.cuh"
#include "kernels/cuda/page_cache_shape.h"

enum { PAGE_ROUNDS = 2 /* in flight: one is looked up while the pages of the other are attended */ };
/* Lowest bits of where a page is to be read, which is a multiple of 64. */
enum { PAGE_MISSED = 1, PAGE_ARRIVES = 2, PAGE_BITS = 3 };

/* One copy of the gather kernel. */
struct page_copy {
    const uint8_t *src;
    uint8_t *dst;
    uint32_t bytes, unused;
};

struct page_cache_totals {
    unsigned long long requests, misses[PAGE_CLASSES], evictions, in_place;
};

/* What outlives a round, on the device alone: so that a lookup can be replayed without a new argument. */
struct page_cache_state {
    struct page_cache_totals total;
    uint32_t epoch;                        /* of the round at work; slots stamped with it or the one before are pinned */
    unsigned n_touched, n_copies, n_staged[PAGE_CLASSES]; /* of the round */
    uint32_t n_extents;
    uint8_t *extents[DEVICE_PAGE_EXTENTS_MAX];
    unsigned n_filled[DEVICE_PAGE_EXTENTS_MAX][PAGE_CLASSES]; /* slots with a page */
};

struct page_cache_args {
    struct page_cache_state *state;
    /* The table of a round's distinct pages, [mask + 1] each. */
    unsigned long long *tags;    /* 0: free */
    unsigned *first;             /* the lowest request for the page */
    unsigned *next;              /* in the list of its set, plus 1 */
    unsigned long long *sources; /* where it lies; bit 0: class */
    unsigned long long *places;  /* where it can be read after the round, with PAGE_MISSED and PAGE_ARRIVES */
    unsigned mask;
    unsigned *touched;           /* [n_pages] sets with a list */
    struct page_copy *copies;    /* [n_pages] */
    unsigned *entries;           /* [n_pages] of each request, plus 1; 0: it names no page to look up */
    const uint8_t **pages;       /* [n_pages] of each request: where its page is to be read; PAGE_MISSED: it is counted as a miss, PAGE_ARRIVES: not before the gather is done */
    uint8_t *staging[PAGE_CLASSES];
    unsigned n_staging[PAGE_CLASSES];
    struct page_cache_shape shape;
};

/* Request i of the round. `page` is read in place for id 0. */
DEVICE void page_request(const struct page_cache_args &a, unsigned i, uint64_t id, uint64_t tag, const uint8_t *page, bool sink)
{
    if (id == 0) {
        a.entries[i] = 0;
        a.pages[i] = page;
        return;
    }
    const int page_class = page_class_of(&a.shape, sink);
    unsigned e = (unsigned)(page_hash(tag) >> 24) & a.mask;
    unsigned long long was;
    while ((was = atomicCAS(&a.tags[e], 0ull, (unsigned long long)tag)) != 0 && was != tag)
        e = (e + 1) & a.mask;
    a.entries[i] = e + 1;
    atomicMin(&a.first[e], i);
    if (was != 0)
        return;
    a.sources[e] = (unsigned long long)(uintptr_t)page | (unsigned)page_class;
    const uint32_t n_extents = a.state->n_extents;
    if (n_extents == 0) { /* a list of one, which no set knows */
        a.next[e] = 0;
        a.touched[atomicAdd(&a.state->n_touched, 1u)] = e;
        return;
    }
    const uint32_t set = page_set(&a.shape, tag, page_class, n_extents), n = page_sets(&a.shape);
    unsigned *heads = reinterpret_cast<unsigned *>(a.state->extents[set / n] + a.shape.heads);
    a.next[e] = atomicExch(&heads[set % n], e + 1);
    if (a.next[e] == 0)
        a.touched[atomicAdd(&a.state->n_touched, 1u)] = set;
}

/* Requests of the round that name a page to look up; by whole warps. */
DEVICE void page_requests_count(const struct page_cache_args &a, bool counts)
{
    const unsigned n = (unsigned)__popc(__ballot_sync(0xFFFFFFFFu, counts));
    if (threadIdx.x % 32 == 0 && n)
        atomicAdd(&a.state->total.requests, (unsigned long long)n);
}

/* ---- host ---- */
struct device_page_cache {
    struct stream *stream, *gather;
    cudaEvent_t chosen, answered[PAGE_ROUNDS], fetched[PAGE_ROUNDS], attended[PAGE_ROUNDS];
    struct page_cache_args args;   /* but for entries and pages, which each round has its own of */
    unsigned *entries[PAGE_ROUNDS];
    const uint8_t **pages[PAGE_ROUNDS];
    uint8_t *staging[PAGE_ROUNDS][PAGE_CLASSES];
    size_t extent_bytes;
    int n_pages;                   /* of a round, at most */
    uint32_t n_extents;
    void *extents[DEVICE_PAGE_EXTENTS_MAX];
    struct page_cache_state *host; /* pinned: what crosses between host and device when nothing is at work */
};

/* The pages that one round of this call looks up at most. */
int page_cache_round_pages(const struct device_page_cache *c, int64_t n_call);
/* Begins round `round` of a call: the gather stream waits for what it needs, and the table is cleared. The caller then launches its requests (page_request for every i of the round) on
 * c->gather, and page_cache_fetch_round answers them. What the compute stream runs after page_cache_wait_answers has c->pages[round % PAGE_ROUNDS] and the pages that were there, after
 * page_cache_wait all of them. */
int page_cache_begin_round(struct device_page_cache *c, int round, int n, struct page_cache_args *ret_args);
int page_cache_fetch_round(struct device_page_cache *c, const struct page_cache_args *args, int round, int n);
int page_cache_wait_answers(struct device_page_cache *c, int round);
int page_cache_wait(struct device_page_cache *c, int round);
/* The compute stream has submitted all that reads the round's pages. */
int page_cache_end_round(struct device_page_cache *c, int round);

/* Copies what is missing, of n requests (gather_pages.cu). */
int gather_pages(const struct page_cache_args *args, int n, struct stream *stream);
