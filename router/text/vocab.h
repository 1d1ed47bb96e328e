/* The vocabulary: for each id its spelling, the bytes it stands for and its flags; and the way back from a model key to the id. The key is what the model
 * sees of a token: the bytes for byte-level models, the spelling for the others. Built by one thread, then immutable. */
#pragma once
#include "proto/base/buf.h"
#include "router/text/short_key.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define VOCAB_ID_MAX ((1 << 22) - 1)
#define VOCAB_TOKEN_BYTES_MAX 65535

enum vocab_flags {
    VOCAB_PRESENT = 1, /* the id is in use */
    VOCAB_KEY = 2,     /* the model can produce it */
    VOCAB_ADDED = 4,
    VOCAB_SPECIAL = 8,
};

struct vocab_token {
    uint32_t text, bytes;          /* offsets into vocab.text and vocab.bytes */
    uint16_t text_len, bytes_len;
    uint8_t flags;
};

struct vocab_slot {
    uint32_t tag; /* of the hash */
    int32_t id;   /* -1: free */
};

struct vocab {
    struct vocab_token *tokens; /* [n] */
    size_t n, cap;
    struct buf text, bytes;
    struct vocab_slot *slots;   /* [mask + 1] */
    size_t mask;
    bool key_is_bytes;
};

void vocab_init(struct vocab *v, bool key_is_bytes);
void vocab_fini(struct vocab *v);
/* Sets or replaces the token `id`. `bytes` NULL: the spelling. -EINVAL when the id or a length is out of bounds, -ENOMEM. */
int vocab_set(struct vocab *v, int64_t id, const char *text, size_t text_len, const uint8_t *bytes, size_t bytes_len, unsigned flags);
/* Replaces what a token stands for. */
int vocab_set_bytes(struct vocab *v, int32_t id, const uint8_t *bytes, size_t bytes_len);
/* Builds the index over the tokens with VOCAB_KEY; of several with one key the first stays. */
int vocab_index(struct vocab *v);
/* The id of a key, or -1. */
int32_t vocab_find(const struct vocab *v, const void *key, size_t len);
/* The same with the short key's hash at hand, len <= SHORT_KEY_MAX. */
int32_t vocab_find_hashed(const struct vocab *v, const void *key, size_t len, uint64_t hash);

static inline const uint8_t *vocab_key(const struct vocab *v, int32_t id, size_t *ret_len)
{
    const struct vocab_token *t = &v->tokens[id];
    *ret_len = v->key_is_bytes ? t->bytes_len : t->text_len;
    return v->key_is_bytes ? v->bytes.data + t->bytes : v->text.data + t->text;
}
