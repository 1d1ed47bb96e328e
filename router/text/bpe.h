/* Byte-pair encoding: a piece of text becomes symbols (bytes or characters), and the pair of neighbours with the lowest rank is merged, the leftmost
 * first, until none is left. Ranks come from a merge list (Sennrich 2016) or, for SentencePiece, from the score of the merged token.
 * Immutable once built. */
#pragma once
#include "router/text/vocab.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct token_ids;

struct bpe_pair {
    uint64_t key; /* left id << 32 | right id; all ones: free */
    uint32_t rank;
    int32_t id;   /* the merged token */
};

struct bpe {
    const struct vocab *vocab;
    struct bpe_pair *pairs;  /* [mask + 1] */
    size_t n_pairs, mask;
    bool by_char;            /* symbols are characters, not bytes */
    bool ignore_merges;      /* a piece that is a token becomes it at once */
    bool byte_fallback;      /* a character without token becomes the tokens <0xXX> of its bytes */
    bool fuse_unk;           /* neighbouring unknown characters become one unknown token */
    int32_t unk;             /* or -1: unknown characters vanish */
    int32_t bytes[256];      /* the token of each byte: by itself, or as <0xXX> for the fallback; -1 if none */
    int32_t ascii[128];      /* by_char: the token of each ASCII character, or -1 */
};

/* Working memory of one thread. */
struct bpe_work {
    int32_t *symbols;   /* [cap] ids */
    size_t cap;
    void *links;        /* [links_cap], for long pieces */
    size_t links_cap;
    uint64_t *heap;     /* [heap_cap] */
    size_t heap_cap;
};

void bpe_init(struct bpe *b, const struct vocab *vocab, bool by_char);
void bpe_fini(struct bpe *b);
/* Room for n pairs in all; before the first bpe_add. */
int bpe_reserve(struct bpe *b, size_t n);
/* Of one pair added twice the first stays. */
int bpe_add(struct bpe *b, int32_t left, int32_t right, uint32_t rank, int32_t id);
/* Looks up the tokens of single bytes and characters; after the vocabulary is indexed and the flags are set. */
void bpe_finish(struct bpe *b);

void bpe_work_fini(struct bpe_work *work); /* a zeroed one is fine */
/* Encodes one piece by merging. Returns the number of ids, which lie in work->symbols until the next call; -ENOMEM. */
int64_t bpe_encode(const struct bpe *b, struct bpe_work *work, const uint8_t *piece, size_t len);
