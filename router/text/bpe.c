#include "router/text/bpe.h"
#include "proto/base/utf8.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAIR_FREE UINT64_MAX
#define RANK_NONE UINT32_MAX
#define SHORT_PIECE 64 /* symbols; up to here a linear search for the lowest rank beats a heap */

void bpe_init(struct bpe *b, const struct vocab *vocab, bool by_char)
{
    *b = (struct bpe){.vocab = vocab, .by_char = by_char, .unk = -1};
}

void bpe_fini(struct bpe *b)
{
    free(b->pairs);
    b->pairs = NULL;
}

int bpe_reserve(struct bpe *b, size_t n)
{
    size_t cap = 16;
    while (cap < n * 2)
        cap *= 2;
    b->pairs = malloc(cap * sizeof *b->pairs);
    if (!b->pairs)
        return -ENOMEM;
    memset(b->pairs, 0xff, cap * sizeof *b->pairs);
    b->mask = cap - 1;
    return 0;
}

static inline size_t pair_slot(const struct bpe *b, uint64_t key)
{
    uint64_t h = key * 0x9fb21c651e98df25ull;
    return (h ^ h >> 32) & b->mask;
}

int bpe_add(struct bpe *b, int32_t left, int32_t right, uint32_t rank, int32_t id)
{
    if ((b->n_pairs + 1) * 2 > b->mask + 1)
        return -ENOBUFS;
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    size_t at = pair_slot(b, key);
    for (; b->pairs[at].key != PAIR_FREE; at = (at + 1) & b->mask)
        if (b->pairs[at].key == key)
            return 0;
    b->pairs[at] = (struct bpe_pair){.key = key, .rank = rank, .id = id};
    b->n_pairs++;
    return 0;
}

/* The rank of a pair, RANK_NONE if it does not merge; otherwise *ret_id is the merged token. */
static inline uint32_t pair_rank(const struct bpe *b, int32_t left, int32_t right, int32_t *ret_id)
{
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    for (size_t at = pair_slot(b, key);; at = (at + 1) & b->mask) {
        const struct bpe_pair *p = &b->pairs[at];
        if (p->key == key) {
            *ret_id = p->id;
            return p->rank;
        }
        if (p->key == PAIR_FREE)
            return RANK_NONE;
    }
}

void bpe_finish(struct bpe *b)
{
    for (int i = 0; i < 256; i++) {
        uint8_t byte = (uint8_t)i;
        char name[8];
        if (i < 128)
            b->ascii[i] = vocab_find(b->vocab, &byte, 1);
        if (b->by_char)
            b->bytes[i] = vocab_find(b->vocab, name, (size_t)snprintf(name, sizeof name, "<0x%02X>", i));
        else
            b->bytes[i] = vocab_find(b->vocab, &byte, 1);
    }
}

void bpe_work_fini(struct bpe_work *work)
{
    free(work->symbols);
    free(work->links);
    free(work->heap);
    *work = (struct bpe_work){0};
}

static int grow(void **data, size_t *cap, size_t n, size_t item)
{
    if (n <= *cap)
        return 0;
    size_t want = n < 256 ? 256 : n + n / 2;
    void *p = realloc(*data, want * item);
    if (!p)
        return -ENOMEM;
    *data = p;
    *cap = want;
    return 0;
}

/* Symbols of a byte-level model. A byte without token vanishes or becomes unknown, as an unknown character would. */
static size_t byte_symbols(const struct bpe *b, const uint8_t *piece, size_t len, int32_t *symbols)
{
    size_t n = 0;
    for (size_t i = 0; i < len; i++) {
        int32_t id = b->bytes[piece[i]];
        if (id < 0)
            id = b->unk;
        if (id >= 0 && !(b->fuse_unk && id == b->unk && n && symbols[n - 1] == b->unk))
            symbols[n++] = id;
    }
    return n;
}

static bool has_fallback(const struct bpe *b, const uint8_t *c, size_t n)
{
    if (!b->byte_fallback)
        return false;
    for (size_t i = 0; i < n; i++)
        if (b->bytes[c[i]] < 0)
            return false;
    return true;
}

/* Symbols of a character-level model. An unknown token is held back until a known character follows, so that neighbours can be fused; bytes of the fallback
 * do not end the run (as in huggingface/tokenizers). */
static size_t char_symbols(const struct bpe *b, const uint8_t *piece, size_t len, int32_t *symbols)
{
    size_t n = 0, step;
    bool unknown = false;
    for (size_t i = 0; i < len; i += step) {
        step = utf8_char_bytes(piece[i]);
        int32_t id = piece[i] < 128 ? b->ascii[piece[i]] : vocab_find(b->vocab, piece + i, step);
        if (id >= 0) {
            if (unknown)
                symbols[n++] = b->unk;
            unknown = false;
            symbols[n++] = id;
        } else if (has_fallback(b, piece + i, step)) {
            for (size_t k = 0; k < step; k++)
                symbols[n++] = b->bytes[piece[i + k]];
        } else if (b->unk >= 0) {
            if (unknown && !b->fuse_unk)
                symbols[n++] = b->unk;
            unknown = true;
        }
    }
    if (unknown)
        symbols[n++] = b->unk;
    return n;
}

/* Merges up to SHORT_PIECE symbols in place: ranks[i] and merged[i] belong to the pair (i, i + 1). */
static size_t merge_short(const struct bpe *b, int32_t *symbols, size_t n)
{
    uint32_t ranks[SHORT_PIECE];
    int32_t merged[SHORT_PIECE];
    for (size_t i = 0; i + 1 < n; i++)
        ranks[i] = pair_rank(b, symbols[i], symbols[i + 1], &merged[i]);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (ranks[i] < ranks[best])
                best = i;
        if (ranks[best] == RANK_NONE)
            break;
        symbols[best] = merged[best];
        n--;
        for (size_t i = best + 1; i < n; i++)
            symbols[i] = symbols[i + 1];
        for (size_t i = best + 1; i + 1 < n; i++) {
            ranks[i] = ranks[i + 1];
            merged[i] = merged[i + 1];
        }
        if (best + 1 < n)
            ranks[best] = pair_rank(b, symbols[best], symbols[best + 1], &merged[best]);
        if (best > 0)
            ranks[best - 1] = pair_rank(b, symbols[best - 1], symbols[best], &merged[best - 1]);
    }
    return n;
}

/* A symbol of a long piece, in a list. `rank` and `merged` belong to the pair of this symbol and the next. */
struct link {
    uint32_t prev, next;
    uint32_t rank;
    int32_t merged;
};
#define LINK_NONE UINT32_MAX

static void heap_push(uint64_t *heap, size_t *n, uint64_t key)
{
    size_t i = (*n)++;
    while (i > 0 && heap[(i - 1) / 2] > key) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = key;
}

static uint64_t heap_pop(uint64_t *heap, size_t *n)
{
    uint64_t top = heap[0], last = heap[--*n];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= *n)
            break;
        if (child + 1 < *n && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= last)
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return top;
}

/* Looks at the pair that begins at `at` anew and queues it. The queue's order is by rank, then by position. */
static void renew_pair(const struct bpe *b, struct bpe_work *work, size_t *n_heap, uint32_t at)
{
    struct link *links = work->links, *l = &links[at];
    l->rank = l->next == LINK_NONE ? RANK_NONE : pair_rank(b, work->symbols[at], work->symbols[l->next], &l->merged);
    if (l->rank != RANK_NONE)
        heap_push(work->heap, n_heap, (uint64_t)l->rank << 32 | at);
}

/* Merges any number of symbols in O(n log n). Every merge queues at most two pairs, so the queue never holds more than 3 n. */
static int64_t merge_long(const struct bpe *b, struct bpe_work *work, size_t n)
{
    if (grow(&work->links, &work->links_cap, n, sizeof(struct link)) < 0 || grow((void **)&work->heap, &work->heap_cap, 3 * n, sizeof(uint64_t)) < 0)
        return -ENOMEM;
    struct link *links = work->links;
    size_t n_heap = 0, out = 0;
    for (uint32_t i = 0; i < n; i++) {
        links[i].prev = i ? i - 1 : LINK_NONE;
        links[i].next = i + 1 < n ? i + 1 : LINK_NONE;
        renew_pair(b, work, &n_heap, i);
    }
    while (n_heap > 0) {
        uint64_t top = heap_pop(work->heap, &n_heap);
        uint32_t at = (uint32_t)top;
        struct link *l = &links[at];
        if (l->rank != top >> 32)
            continue; /* the pair has changed since it was queued */
        uint32_t gone = l->next;
        work->symbols[at] = l->merged;
        l->next = links[gone].next;
        if (l->next != LINK_NONE)
            links[l->next].prev = at;
        links[gone].rank = RANK_NONE;
        renew_pair(b, work, &n_heap, at);
        if (l->prev != LINK_NONE)
            renew_pair(b, work, &n_heap, l->prev);
    }
    for (uint32_t i = 0; i != LINK_NONE; i = links[i].next)
        work->symbols[out++] = work->symbols[i];
    return (int64_t)out;
}

int64_t bpe_encode(const struct bpe *b, struct bpe_work *work, const uint8_t *piece, size_t len)
{
    if (grow((void **)&work->symbols, &work->cap, len + 1, sizeof *work->symbols) < 0)
        return -ENOMEM;
    size_t n = b->by_char ? char_symbols(b, piece, len, work->symbols) : byte_symbols(b, piece, len, work->symbols);
    if (n <= SHORT_PIECE)
        return (int64_t)merge_short(b, work->symbols, n);
    return merge_long(b, work, n);
}
