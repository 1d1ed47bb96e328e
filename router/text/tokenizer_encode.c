#include "router/text/neutralize.h"
#include "router/text/tokenizer_private.h"
#include "proto/base/utf8.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* One call of tokenizer_encode. */
struct encoder {
    const struct tokenizer *tok;
    bool parse_special;
    const uint8_t *start;          /* of the user's text */
    struct token_ids *ids;
    struct regex_matcher matcher;
    struct normalize_work normalize;
    struct pretok_work pretok;
    struct bpe_work bpe;
    struct buf plain;              /* a stretch of rendered text without its marks */
};

/* Room for n more ids. */
static int reserve_ids(struct token_ids *ids, size_t n)
{
    if (ids->cap - ids->n >= n)
        return 0;
    size_t cap = ids->cap ? ids->cap * 2 : 64;
    while (cap - ids->n < n)
        cap *= 2;
    int32_t *data = realloc(ids->data, cap * sizeof *data);
    if (!data)
        return -ENOMEM;
    ids->data = data;
    ids->cap = cap;
    return 0;
}

int token_ids_append(struct token_ids *ids, int32_t id)
{
    int r = reserve_ids(ids, 1);
    if (r == 0)
        ids->data[ids->n++] = id;
    return r;
}

void token_ids_fini(struct token_ids *ids)
{
    free(ids->data);
    *ids = (struct token_ids){0};
}

static int append_ids(struct token_ids *ids, const int32_t *data, size_t n)
{
    int r = reserve_ids(ids, n);
    if (r == 0 && n) {
        memcpy(ids->data + ids->n, data, n * sizeof *data);
        ids->n += n;
    }
    return r;
}

/* A piece of any length, by the model itself. */
static int encode_by_model(struct encoder *e, const struct text_piece *p)
{
    int64_t n = bpe_encode(&e->tok->bpe, &e->bpe, p->data, p->len);
    return n < 0 ? (int)n : append_ids(e->ids, e->bpe.symbols, (size_t)n);
}

static int encode_long(struct encoder *e, const struct text_piece *p)
{
    int32_t id = e->tok->bpe.ignore_merges ? vocab_find(&e->tok->vocab, p->data, p->len) : -1;
    return id >= 0 ? append_ids(e->ids, &id, 1) : encode_by_model(e, p);
}

/* A short piece that the cache does not have. */
static int encode_short(struct encoder *e, const struct text_piece *p, const struct short_key *key, uint64_t hash)
{
    int32_t id = e->tok->bpe.ignore_merges ? vocab_find_hashed(&e->tok->vocab, p->data, p->len, hash) : -1;
    if (id >= 0) {
        word_cache_put(e->tok->cache, key, p->len, hash, &id, 1);
        return append_ids(e->ids, &id, 1);
    }
    size_t before = e->ids->n;
    int r = encode_by_model(e, p);
    size_t n = e->ids->n - before;
    if (r == 0 && n > 0 && n <= WORD_CACHE_IDS_MAX)
        word_cache_put(e->tok->cache, key, p->len, hash, e->ids->data + before, n);
    return r;
}

/* Hashes the whole batch first, so that the cache lines are on their way when they are needed. */
static int take_pieces(void *arg, const struct text_piece pieces[], size_t n, const uint8_t *readable_end)
{
    struct encoder *e = arg;
    struct short_key keys[PRETOK_BATCH];
    uint64_t hashes[PRETOK_BATCH];
    for (size_t i = 0; i < n; i++) {
        if (pieces[i].len > SHORT_KEY_MAX)
            continue;
        keys[i] = short_key_load(pieces[i].data, pieces[i].len, (size_t)(readable_end - pieces[i].data));
        hashes[i] = short_key_hash(&keys[i], pieces[i].len);
        word_cache_prefetch(e->tok->cache, hashes[i]);
    }
    for (size_t i = 0; i < n; i++) {
        int r = reserve_ids(e->ids, WORD_CACHE_IDS_MAX);
        if (r < 0)
            return r;
        if (pieces[i].len > SHORT_KEY_MAX) {
            r = encode_long(e, &pieces[i]);
        } else {
            size_t found = word_cache_get(e->tok->cache, &keys[i], pieces[i].len, hashes[i], e->ids->data + e->ids->n);
            e->ids->n += found;
            r = found ? 0 : encode_short(e, &pieces[i], &keys[i], hashes[i]);
        }
        if (r < 0)
            return r;
    }
    return 0;
}

/* Text between added tokens, already normalized. */
static int encode_plain(struct encoder *e, const uint8_t *text, size_t len, bool at_start)
{
    return pretokenize(&e->tok->pretokenizer, &e->pretok, text, len, at_start);
}

typedef int stretch_fn(struct encoder *e, const uint8_t *text, size_t len, bool at_start);

/* Hands what lies between the tokens of `trie` to `stretch`, and appends the tokens. */
static int encode_around(struct encoder *e, const struct text_trie *trie, bool has_plain, const uint8_t *text, size_t len, bool at_start, stretch_fn *stretch)
{
    if (trie->n == 0 || (!e->parse_special && !has_plain))
        return len ? stretch(e, text, len, at_start) : 0;
    struct added_scan scan = {.trie = trie, .tokens = e->tok->added, .text = text, .len = len, .skip_special = !e->parse_special};
    struct added_match match;
    size_t done = 0;
    while (added_scan_next(&scan, &match)) {
        int r = match.start > done ? stretch(e, text + done, match.start - done, at_start && done == 0) : 0;
        if (r == 0)
            r = token_ids_append(e->ids, match.token->id);
        if (r < 0)
            return r;
        done = match.stop;
    }
    return len > done ? stretch(e, text + done, len - done, at_start && done == 0) : 0;
}

static int encode_normalized(struct encoder *e, const uint8_t *text, size_t len, bool at_start)
{
    return encode_around(e, &e->tok->normalized, e->tok->normalized_has_plain, text, len, at_start, encode_plain);
}

static int encode_given(struct encoder *e, const uint8_t *text, size_t len, bool at_start)
{
    const uint8_t *normal;
    size_t normal_len;
    int r = normalize(&e->tok->normalizer, &e->normalize, &e->matcher, text, len, &normal, &normal_len);
    return r < 0 ? r : encode_normalized(e, normal, normal_len, at_start);
}

static int encode_text(struct encoder *e, const uint8_t *text, size_t len, bool at_start)
{
    return encode_around(e, &e->tok->raw, e->tok->raw_has_plain, text, len, at_start, encode_given);
}

/* A stretch of a rendered template between special tokens: what is left of them in it is a user's text. */
static int encode_marked(struct encoder *e, const uint8_t *text, size_t len, bool at_start)
{
    if (memmem(text, len, "\xef\xb7", 2)) {
        buf_clear(&e->plain);
        int r = neutralize_strip(text, len, &e->plain);
        if (r < 0)
            return r;
        text = e->plain.data;
        len = e->plain.len;
    }
    return len ? encode_text(e, text, len, at_start) : 0;
}

static int encode_rendered(struct encoder *e, const uint8_t *text, size_t len)
{
    struct added_scan scan = {.trie = &e->tok->specials, .tokens = e->tok->added, .text = text, .len = len, .refuse_marked = true};
    struct added_match match;
    size_t done = 0;
    while (added_scan_next(&scan, &match)) {
        int r = match.start > done ? encode_marked(e, text + done, match.start - done, done == 0) : 0;
        if (r == 0)
            r = token_ids_append(e->ids, match.token->id);
        if (r < 0)
            return r;
        done = match.stop;
    }
    return len > done ? encode_marked(e, text + done, len - done, done == 0) : 0;
}

static int encode_all(struct encoder *e, const uint8_t *text, size_t len, int flags)
{
    const struct tokenizer *tok = e->tok;
    bool around = flags & TOKENIZE_ADD_SPECIAL;
    int r = around ? append_ids(e->ids, tok->prefix, tok->n_prefix) : 0;
    if (r == 0)
        r = flags & TOKENIZE_RENDERED ? encode_rendered(e, text, len) : encode_text(e, text, len, true);
    if (r == 0 && around)
        r = append_ids(e->ids, tok->suffix, tok->n_suffix);
    return r;
}

static const char *reason_of(int code)
{
    return code == -ENOMEM ? "out of memory" : code == -ENOBUFS ? "the normalized text is too long" : "a pattern of the tokenizer ran into its limits on this text";
}

int tokenizer_encode(const struct tokenizer *tok, const char *text, size_t len, int flags, struct token_ids *ids, struct error *err)
{
    if (len > TOKENIZER_TEXT_MAX)
        return error_set(err, -E2BIG, "text of %zu bytes; at most %zu can be encoded", len, TOKENIZER_TEXT_MAX);
    size_t valid = utf8_valid_len(text, len), before = ids->n;
    if (valid < len)
        return error_set(err, -EILSEQ, "the text is not UTF-8 at byte %zu", valid);
    struct encoder e = {.tok = tok, .parse_special = flags & TOKENIZE_PARSE_SPECIAL && !(flags & TOKENIZE_RENDERED), .ids = ids};
    int r = regex_matcher_init(&e.matcher, len);
    if (r < 0)
        return error_set(err, r, "out of memory");
    normalize_work_init(&e.normalize);
    pretok_work_init(&e.pretok, &e.matcher, take_pieces, &e);
    buf_init(&e.plain, TOKENIZER_TEXT_MAX);
    r = len || flags & TOKENIZE_ADD_SPECIAL ? encode_all(&e, (const uint8_t *)(text ? text : ""), len, flags) : 0;
    if (r < 0) {
        ids->n = before;
        error_set(err, r, "%s", reason_of(r));
    }
    buf_fini(&e.plain);
    bpe_work_fini(&e.bpe);
    pretok_work_fini(&e.pretok);
    normalize_work_fini(&e.normalize);
    regex_matcher_fini(&e.matcher);
    return r;
}

int tokenizer_neutralize(const struct tokenizer *tok, const char *text, size_t len, struct buf *out)
{
    if (utf8_valid_len(text, len) < len)
        return -EILSEQ;
    return neutralize_text(&tok->specials, &tok->tails, (const uint8_t *)text, len, out);
}
