/* A table of chains over a fixed array of slots. A page's bucket comes from its block's key, which is a hash already, and its place. Slots fill in order, so the first n_filled are in use
 * and the others free; the clock's hand goes round the capacity. */
#include "worker/cache/page_cache.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS_MAX = 1 << 26, TAKE_AHEAD = 16 /* pages whose chains are asked for before they are walked */ };

struct slot {
    struct block_key block;
    uint32_t place;
    uint32_t round; /* page_cache_begin count when it was last handed out */
    int32_t next;   /* in its chain, plus 1; 0: the last */
    bool used;      /* since the hand came by */
};

struct page_cache {
    struct slot *slots; /* [n_max] */
    int32_t *chains;    /* [n_chains] first slot plus 1; 0: empty, as calloc gives it */
    uint32_t n_chains;  /* a power of two */
    uint32_t round;
    bool full;          /* every slot is of this round */
    int n_max, n_slots, n_filled, hand;
    size_t slot_bytes;
    uint64_t hits, misses, evictions;
};

int page_cache_create(size_t slot_bytes, size_t max_bytes, struct page_cache **ret_cache)
{
    if (slot_bytes == 0 || max_bytes / slot_bytes == 0)
        return -EINVAL;
    struct page_cache *c = calloc(1, sizeof(*c));
    if (!c)
        return -ENOMEM;
    c->slot_bytes = slot_bytes;
    c->n_max = c->n_slots = max_bytes / slot_bytes < SLOTS_MAX ? (int)(max_bytes / slot_bytes) : SLOTS_MAX;
    c->n_chains = 1;
    while (c->n_chains < (uint32_t)c->n_max)
        c->n_chains *= 2;
    c->slots = calloc((size_t)c->n_max, sizeof(*c->slots));
    c->chains = calloc(c->n_chains, sizeof(*c->chains));
    if (!c->slots || !c->chains) {
        page_cache_free(c);
        return -ENOMEM;
    }
    *ret_cache = c;
    return 0;
}

void page_cache_free(struct page_cache *c)
{
    if (!c)
        return;
    free(c->chains);
    free(c->slots);
    free(c);
}

/* Keys are hashes, places are small and dense: a multiplication spreads them over the chains of one block's key. */
static int32_t *chain_of(const struct page_cache *c, const struct block_key *block, uint32_t place)
{
    uint64_t key;
    memcpy(&key, block->bytes, sizeof(key));
    key = (key ^ place * 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u;
    return &c->chains[(uint32_t)(key >> 32) & (c->n_chains - 1)];
}

static int find(const struct page_cache *c, const int32_t *chain, const struct page_ref *page)
{
    for (int i = *chain - 1; i >= 0; i = c->slots[i].next - 1)
        if (c->slots[i].place == page->place && memcmp(&c->slots[i].block, page->block, sizeof(*page->block)) == 0)
            return i;
    return -1;
}

static void unlink_slot(struct page_cache *c, int slot)
{
    int32_t *link = chain_of(c, &c->slots[slot].block, c->slots[slot].place);
    while (*link != slot + 1) {
        ASSERT(*link > 0);
        link = &c->slots[*link - 1].next;
    }
    *link = c->slots[slot].next;
    c->evictions++;
}

/* A slot without a page: a free one, or the first that the hand finds unused and not needed now. Two rounds look at each slot without its mark once. -1: all are needed now. */
static int make_room(struct page_cache *c)
{
    if (c->n_filled < c->n_slots)
        return c->n_filled++;
    for (int64_t looks = 0; !c->full && looks < 2 * (int64_t)c->n_slots; looks++) {
        const int i = c->hand;
        c->hand = i + 1 < c->n_slots ? i + 1 : 0;
        if (c->slots[i].round == c->round)
            continue;
        if (!c->slots[i].used) {
            unlink_slot(c, i);
            return i;
        }
        c->slots[i].used = false;
    }
    c->full = true;
    return -1;
}

static int take_one(struct page_cache *c, const struct page_ref *page, bool *ret_missed)
{
    int32_t *chain = chain_of(c, page->block, page->place);
    int slot = find(c, chain, page);
    *ret_missed = slot < 0;
    if (slot < 0) {
        c->misses++;
        slot = make_room(c);
        if (slot < 0)
            return -1;
        c->slots[slot] = (struct slot){.block = *page->block, .place = page->place, .next = *chain};
        *chain = slot + 1;
    } else {
        c->hits++;
        c->slots[slot].used = true;
    }
    c->slots[slot].round = c->round;
    return slot;
}

int page_cache_take(struct page_cache *c, const struct page_ref *pages, int n, int32_t *ret_slots, bool *ret_missed)
{
    int misses = 0;
    for (int first = 0; first < n; first += TAKE_AHEAD) {
        const int end = first + TAKE_AHEAD < n ? first + TAKE_AHEAD : n;
        const int32_t *chains[TAKE_AHEAD];
        for (int i = first; i < end; i++) {
            chains[i - first] = chain_of(c, pages[i].block, pages[i].place);
            __builtin_prefetch(chains[i - first]);
        }
        for (int i = first; i < end; i++)
            if (*chains[i - first] > 0)
                __builtin_prefetch(&c->slots[*chains[i - first] - 1]);
        for (int i = first; i < end; i++) {
            ret_slots[i] = take_one(c, &pages[i], &ret_missed[i]);
            misses += ret_missed[i];
        }
    }
    return misses;
}

void page_cache_begin(struct page_cache *c)
{
    c->full = false;
    if (++c->round != 0)
        return;
    for (int i = 0; i < c->n_filled; i++) /* it has wrapped: no slot may seem to be of this round */
        c->slots[i].round = 0;
    c->round = 1;
}

void page_cache_resize(struct page_cache *c, size_t bytes)
{
    const size_t n = bytes / c->slot_bytes;
    c->full = false;
    c->n_slots = n < (size_t)c->n_max ? (int)n : c->n_max;
    while (c->n_filled > c->n_slots)
        unlink_slot(c, --c->n_filled);
    if (c->hand >= c->n_slots)
        c->hand = 0;
}

void page_cache_stats(const struct page_cache *c, struct page_cache_stats *ret)
{
    *ret = (struct page_cache_stats){
        .hits = c->hits,
        .misses = c->misses,
        .evictions = c->evictions,
        .capacity_bytes = (size_t)c->n_slots * c->slot_bytes,
        .used_bytes = (size_t)c->n_filled * c->slot_bytes,
    };
}
