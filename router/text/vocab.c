#include "router/text/vocab.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define ARENA_MAX ((size_t)1 << 30)

/* short_key_masks[n] keeps the first n bytes of four words (little-endian). */
#define W(n, i) ((n) >= 8 * (i) + 8 ? ~0ull : (n) <= 8 * (i) ? 0ull : ((1ull << ((8 * ((n)-8 * (i))) & 63)) - 1))
#define M(n) {W(n, 0), W(n, 1), W(n, 2), W(n, 3)}
const uint64_t short_key_masks[SHORT_KEY_MAX + 1][4] = {M(0),  M(1),  M(2),  M(3),  M(4),  M(5),  M(6),  M(7),  M(8),  M(9),  M(10), M(11), M(12), M(13), M(14), M(15), M(16),
                                                        M(17), M(18), M(19), M(20), M(21), M(22), M(23), M(24), M(25), M(26), M(27), M(28), M(29), M(30), M(31), M(32)};
#undef M
#undef W

void vocab_init(struct vocab *v, bool key_is_bytes)
{
    *v = (struct vocab){.key_is_bytes = key_is_bytes};
    buf_init(&v->text, ARENA_MAX);
    buf_init(&v->bytes, ARENA_MAX);
}

void vocab_fini(struct vocab *v)
{
    free(v->tokens);
    free(v->slots);
    buf_fini(&v->text);
    buf_fini(&v->bytes);
    v->tokens = NULL;
    v->slots = NULL;
    v->n = v->cap = 0;
}

static int make_room(struct vocab *v, size_t id)
{
    if (id < v->cap)
        return 0;
    size_t cap = v->cap ? v->cap : 1024;
    while (cap <= id)
        cap *= 2;
    struct vocab_token *tokens = calloc(cap, sizeof *tokens);
    if (!tokens)
        return -ENOMEM;
    if (v->n)
        memcpy(tokens, v->tokens, v->n * sizeof *tokens);
    free(v->tokens);
    v->tokens = tokens;
    v->cap = cap;
    return 0;
}

int vocab_set_bytes(struct vocab *v, int32_t id, const uint8_t *bytes, size_t bytes_len)
{
    if (bytes_len > VOCAB_TOKEN_BYTES_MAX)
        return -EINVAL;
    struct vocab_token *t = &v->tokens[id];
    uint32_t at = (uint32_t)v->bytes.len;
    int r = buf_append(&v->bytes, bytes, bytes_len);
    if (r < 0)
        return r == -ENOBUFS ? -EINVAL : r;
    t->bytes = at;
    t->bytes_len = (uint16_t)bytes_len;
    return 0;
}

int vocab_set(struct vocab *v, int64_t id, const char *text, size_t text_len, const uint8_t *bytes, size_t bytes_len, unsigned flags)
{
    if (id < 0 || id > VOCAB_ID_MAX || text_len > VOCAB_TOKEN_BYTES_MAX)
        return -EINVAL;
    int r = make_room(v, (size_t)id);
    if (r < 0)
        return r;
    uint32_t at = (uint32_t)v->text.len;
    r = buf_append(&v->text, text, text_len);
    if (r < 0)
        return r == -ENOBUFS ? -EINVAL : r;
    r = vocab_set_bytes(v, (int32_t)id, bytes ? bytes : (const uint8_t *)text, bytes ? bytes_len : text_len);
    if (r < 0)
        return r;
    struct vocab_token *t = &v->tokens[id];
    t->text = at;
    t->text_len = (uint16_t)text_len;
    t->flags = (uint8_t)(flags | VOCAB_PRESENT);
    if ((size_t)id >= v->n)
        v->n = (size_t)id + 1;
    return 0;
}

static uint64_t key_hash(const void *key, size_t len)
{
    if (len > SHORT_KEY_MAX)
        return XXH3_64bits(key, len);
    struct short_key short_key = short_key_load(key, len, len);
    return short_key_hash(&short_key, len);
}

/* The slot that holds the key, or the free one where it would go. */
static size_t find_slot(const struct vocab *v, const void *key, size_t len, uint64_t hash)
{
    uint32_t tag = (uint32_t)hash;
    size_t at = (hash >> 32) & v->mask;
    for (; v->slots[at].id >= 0; at = (at + 1) & v->mask) {
        if (v->slots[at].tag != tag)
            continue;
        size_t n;
        const uint8_t *found = vocab_key(v, v->slots[at].id, &n);
        if (n == len && memcmp(found, key, len) == 0)
            break;
    }
    return at;
}

int vocab_index(struct vocab *v)
{
    size_t n_keys = 0, cap = 16, len;
    for (size_t i = 0; i < v->n; i++)
        n_keys += (v->tokens[i].flags & VOCAB_KEY) != 0;
    while (cap < n_keys * 2)
        cap *= 2;
    free(v->slots);
    v->slots = malloc(cap * sizeof *v->slots);
    if (!v->slots)
        return -ENOMEM;
    memset(v->slots, 0xff, cap * sizeof *v->slots);
    v->mask = cap - 1;
    for (size_t i = 0; i < v->n; i++) {
        if (!(v->tokens[i].flags & VOCAB_KEY))
            continue;
        const uint8_t *key = vocab_key(v, (int32_t)i, &len);
        uint64_t hash = key_hash(key, len);
        size_t at = find_slot(v, key, len, hash);
        if (v->slots[at].id < 0)
            v->slots[at] = (struct vocab_slot){.tag = (uint32_t)hash, .id = (int32_t)i};
    }
    return 0;
}

int32_t vocab_find_hashed(const struct vocab *v, const void *key, size_t len, uint64_t hash)
{
    return v->slots[find_slot(v, key, len, hash)].id;
}

int32_t vocab_find(const struct vocab *v, const void *key, size_t len)
{
    return vocab_find_hashed(v, key, len, key_hash(key, len));
}
