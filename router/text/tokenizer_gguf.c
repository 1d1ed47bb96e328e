/* Tokenizers from GGUF metadata (ggml/docs/gguf.md, tokenizer.ggml.*): "gpt2" is byte-level BPE by a merge list, "llama" is SentencePiece by score. */
#include "formats/gguf.h"
#include "router/text/byte_alphabet.h"
#include "router/text/tokenizer_private.h"
#include "proto/base/utf8.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SPLIT_BYTES_MAX 512 /* longer tokens are not made by merging */
#define SPACE "\xe2\x96\x81"

/* tokenizer.ggml.token_type */
enum { TYPE_NORMAL = 1, TYPE_UNKNOWN = 2, TYPE_CONTROL = 3, TYPE_USER_DEFINED = 4, TYPE_UNUSED = 5, TYPE_BYTE = 6 };

struct gguf_reader {
    const struct gguf *file;
    struct tokenizer *tok;
    struct error *err;
    bool is_spm;
    uint64_t n;
    const uint8_t *types;  /* [n] int32, or NULL: all normal */
    const uint8_t *scores; /* [n] float, or NULL */
};

static int out_of_memory(struct error *err)
{
    return error_set(err, -ENOMEM, "out of memory");
}

static int type_of(const struct gguf_reader *g, uint64_t i)
{
    int32_t type = TYPE_NORMAL;
    if (g->types)
        memcpy(&type, g->types + i * sizeof type, sizeof type);
    return type;
}

static float score_of(const struct gguf_reader *g, uint64_t i)
{
    float score;
    memcpy(&score, g->scores + i * sizeof score, sizeof score);
    return score;
}

/* An array of n items of 4 bytes that goes with the tokens; NULL if the file has none. */
static int companion(const struct gguf_reader *g, const char *key, enum gguf_type type, const uint8_t **ret_data)
{
    const struct gguf_value *v = gguf_find(g->file, key);
    *ret_data = NULL;
    if (!v)
        return 0;
    bool fits = v->type == GGUF_ARRAY && (v->item_type == type || (type == GGUF_I32 && v->item_type == GGUF_U32)) && v->n_items == g->n;
    if (!fits)
        return error_set(g->err, -EINVAL, "%s must be an array of %llu values", key, (unsigned long long)g->n);
    *ret_data = v->data;
    return 0;
}

/* Writes ▁ as a space; `out` has room for len bytes. */
static size_t spaces_restored(const uint8_t *text, size_t len, uint8_t *out)
{
    size_t n = 0;
    for (size_t i = 0; i < len;) {
        bool is_space = len - i >= 3 && memcmp(text + i, SPACE, 3) == 0;
        out[n++] = is_space ? ' ' : text[i];
        i += is_space ? 3 : 1;
    }
    return n;
}

/* The bytes a token stands for, and its flags. `bytes` has room for the text. Returns the number of bytes. */
static size_t meaning_of(const struct gguf_reader *g, int type, const struct gguf_str *text, uint8_t *bytes, unsigned *ret_flags)
{
    size_t len = (size_t)text->len;
    unsigned value;
    *ret_flags = 0;
    if (type == TYPE_CONTROL || type == TYPE_UNKNOWN)
        *ret_flags = VOCAB_ADDED | VOCAB_SPECIAL;
    else if (type == TYPE_USER_DEFINED)
        *ret_flags = VOCAB_ADDED;
    if (*ret_flags) {
        memcpy(bytes, text->data, len);
        return len;
    }
    *ret_flags = VOCAB_KEY;
    if (!g->is_spm) {
        int64_t n = byte_alphabet_decode(text->data, len, bytes);
        if (n >= 0)
            return (size_t)n;
        *ret_flags = 0; /* no text can become it */
        memcpy(bytes, text->data, len);
        return len;
    }
    if (type == TYPE_BYTE && len == 6 && sscanf(text->data, "<0x%2X>", &value) == 1) {
        bytes[0] = (uint8_t)value;
        return 1;
    }
    return spaces_restored((const uint8_t *)text->data, len, bytes);
}

static int set_token(const struct gguf_reader *g, uint64_t i, const struct gguf_str *text)
{
    uint8_t bytes[VOCAB_TOKEN_BYTES_MAX];
    if (text->len > VOCAB_TOKEN_BYTES_MAX || utf8_valid_len(text->data, (size_t)text->len) < text->len)
        return error_set(g->err, -EINVAL, "token %llu is not UTF-8 of at most %d bytes", (unsigned long long)i, VOCAB_TOKEN_BYTES_MAX);
    unsigned flags;
    size_t n = meaning_of(g, type_of(g, i), text, bytes, &flags);
    int r = vocab_set(&g->tok->vocab, (int64_t)i, text->data, (size_t)text->len, bytes, n, flags);
    if (r == 0 && flags & VOCAB_ADDED) {
        struct added_token token = {.id = (int32_t)i, .special = flags & VOCAB_SPECIAL};
        r = tokenizer_add_token(g->tok, &token);
    }
    if (r == -EINVAL)
        return error_set(g->err, r, "too many tokens");
    return r < 0 ? out_of_memory(g->err) : 0;
}

static int read_tokens(struct gguf_reader *g)
{
    const struct gguf_value *v = gguf_find(g->file, "tokenizer.ggml.tokens");
    if (!v || v->type != GGUF_ARRAY || v->item_type != GGUF_STRING || v->n_items == 0 || v->n_items > VOCAB_ID_MAX)
        return error_set(g->err, -EINVAL, "tokenizer.ggml.tokens must be an array of 1 to %d strings", VOCAB_ID_MAX);
    g->n = v->n_items;
    int r = companion(g, "tokenizer.ggml.token_type", GGUF_I32, &g->types);
    if (r == 0)
        r = companion(g, "tokenizer.ggml.scores", GGUF_F32, &g->scores);
    struct gguf_str text;
    const uint8_t *cursor = v->data;
    for (uint64_t i = 0; r == 0 && gguf_next_str(v, &cursor, &text); i++)
        r = set_token(g, i, &text);
    if (r == 0 && vocab_index(&g->tok->vocab) < 0)
        r = out_of_memory(g->err);
    return r;
}

/* "left right" of the merge list, in the byte alphabet. Merges of characters that stand for no byte cannot apply and are left out. */
static int add_merge(const struct gguf_reader *g, uint64_t i, const struct gguf_str *merge)
{
    const char *space = merge->len > 2 ? memchr(merge->data + 1, ' ', (size_t)merge->len - 1) : NULL;
    size_t left_len = space ? (size_t)(space - merge->data) : 0, right_len = (size_t)merge->len - left_len - 1;
    uint8_t bytes[2 * SPLIT_BYTES_MAX];
    if (!space || right_len == 0 || merge->len > sizeof bytes || utf8_valid_len(merge->data, (size_t)merge->len) < merge->len)
        return error_set(g->err, -EINVAL, "tokenizer.ggml.merges: item %llu is not two tokens", (unsigned long long)i);
    int64_t left = byte_alphabet_decode(merge->data, left_len, bytes);
    int64_t right = left < 0 ? -1 : byte_alphabet_decode(space + 1, right_len, bytes + left);
    if (right < 0)
        return 0;
    const struct vocab *v = &g->tok->vocab;
    int32_t a = vocab_find(v, bytes, (size_t)left), b = vocab_find(v, bytes + left, (size_t)right), c = vocab_find(v, bytes, (size_t)(left + right));
    if (a < 0 || b < 0 || c < 0)
        return error_set(g->err, -EINVAL, "tokenizer.ggml.merges: item %llu names a token that is not in the vocabulary", (unsigned long long)i);
    return bpe_add(&g->tok->bpe, a, b, (uint32_t)i, c);
}

static int read_merges(struct gguf_reader *g)
{
    const struct gguf_value *v = gguf_find(g->file, "tokenizer.ggml.merges");
    if (!v || v->type != GGUF_ARRAY || v->item_type != GGUF_STRING || v->n_items > UINT32_MAX - 1)
        return error_set(g->err, -EINVAL, "tokenizer.ggml.merges must be an array of strings");
    if (bpe_reserve(&g->tok->bpe, v->n_items) < 0)
        return out_of_memory(g->err);
    struct gguf_str merge;
    const uint8_t *cursor = v->data;
    int r = 0;
    for (uint64_t i = 0; r == 0 && gguf_next_str(v, &cursor, &merge); i++)
        r = add_merge(g, i, &merge);
    return r;
}

/* SentencePiece: any two tokens whose texts join to a third merge, the higher its score the sooner. */

struct scored {
    float score;
    int32_t id;
};

static int by_score(const void *a, const void *b)
{
    float x = ((const struct scored *)a)->score, y = ((const struct scored *)b)->score;
    return x > y ? -1 : x < y;
}

static bool merges_to(const struct gguf_reader *g, int32_t id)
{
    int type = type_of(g, (uint64_t)id);
    return (type == TYPE_NORMAL || type == TYPE_UNUSED) && g->tok->vocab.tokens[id].text_len <= SPLIT_BYTES_MAX;
}

static int add_splits(const struct gguf_reader *g, int32_t id, uint32_t rank)
{
    size_t len;
    const struct vocab *v = &g->tok->vocab;
    const uint8_t *text = vocab_key(v, id, &len);
    if (len == 0)
        return 0;
    for (size_t at = utf8_char_bytes(text[0]); at < len; at += utf8_char_bytes(text[at])) {
        int32_t left = vocab_find(v, text, at), right = vocab_find(v, text + at, len - at);
        if (left < 0 || right < 0 || !merges_to(g, left) || !merges_to(g, right))
            continue;
        int r = bpe_add(&g->tok->bpe, left, right, rank, id);
        if (r < 0)
            return r;
    }
    return 0;
}

static int rank_by_score(struct gguf_reader *g)
{
    struct tokenizer *tok = g->tok;
    if (!g->scores)
        return error_set(g->err, -EINVAL, "tokenizer.ggml.scores is missing");
    struct scored *list = malloc(tok->vocab.n * sizeof *list);
    size_t n = 0, n_splits = 0;
    if (!list)
        return out_of_memory(g->err);
    for (size_t i = 0; i < tok->vocab.n; i++) {
        float score = score_of(g, i);
        if (!merges_to(g, (int32_t)i) || score != score)
            continue;
        list[n++] = (struct scored){.score = score, .id = (int32_t)i};
        n_splits += tok->vocab.tokens[i].text_len;
    }
    qsort(list, n, sizeof *list, by_score);
    int r = bpe_reserve(&tok->bpe, n_splits);
    uint32_t rank = 0;
    for (size_t i = 0; i < n && r == 0; i++) {
        rank += i > 0 && list[i].score < list[i - 1].score;
        r = add_splits(g, list[i].id, rank);
    }
    free(list);
    return r < 0 ? out_of_memory(g->err) : 0;
}

static int32_t id_of(const struct gguf_reader *g, const char *key)
{
    uint64_t id;
    return gguf_get_u64(g->file, key, &id) == 0 && id < g->n ? (int32_t)id : TOKEN_NONE;
}

static bool flag_of(const struct gguf_reader *g, const char *key, bool fallback)
{
    bool value = fallback;
    gguf_get_bool(g->file, key, &value);
    return value;
}

static char *copy_text(const char *text, size_t len)
{
    char *copy = malloc(len + 1);
    if (copy) {
        memcpy(copy, text, len);
        copy[len] = '\0';
    }
    return copy;
}

/* The normalizer of SentencePiece: ▁ before the text and for every space. */
static int set_spm_normalizer(struct tokenizer *tok, bool add_prefix)
{
    struct normalizer *norm = &tok->normalizer;
    struct normalize_op prepend = {.kind = NORMALIZE_PREPEND, .content = copy_text(SPACE, 3), .content_len = 3};
    struct normalize_op replace = {.kind = NORMALIZE_REPLACE, .string = copy_text(" ", 1), .string_len = 1, .content = copy_text(SPACE, 3), .content_len = 3};
    bool ok = prepend.content && replace.content && replace.string;
    if (add_prefix)
        norm->ops[norm->n++] = prepend;
    else
        free(prepend.content);
    norm->ops[norm->n++] = replace;
    return ok ? 0 : -ENOMEM;
}

static int read_spm(struct gguf_reader *g)
{
    struct tokenizer *tok = g->tok;
    bool add_prefix = flag_of(g, "tokenizer.ggml.add_space_prefix", true);
    tok->vocab.key_is_bytes = false;
    tok->bpe.by_char = tok->bpe.byte_fallback = tok->bpe.fuse_unk = true;
    tok->strip_start = add_prefix;
    int r = read_tokens(g);
    if (r < 0)
        return r;
    tok->bpe.unk = id_of(g, "tokenizer.ggml.unknown_token_id");
    r = rank_by_score(g);
    if (r < 0)
        return r;
    snprintf(tok->description, sizeof tok->description, "gguf llama (SentencePiece)");
    return set_spm_normalizer(tok, add_prefix) < 0 ? out_of_memory(g->err) : 0;
}

static int read_bpe(struct gguf_reader *g, bool *ret_add_bos)
{
    struct gguf_str pre = {.data = "default", .len = 7};
    gguf_get_str(g->file, "tokenizer.ggml.pre", &pre);
    int r = tokenizer_named_pretokenizer(g->tok, pre.data, (size_t)pre.len, &g->tok->bpe.ignore_merges, ret_add_bos, g->err);
    if (r == 0)
        r = read_tokens(g);
    if (r == 0)
        r = read_merges(g);
    snprintf(g->tok->description, sizeof g->tok->description, "gguf gpt2/%.*s", (int)(pre.len < 32 ? pre.len : 32), pre.data);
    return r;
}

static int read_model(struct gguf_reader *g)
{
    struct tokenizer *tok = g->tok;
    struct gguf_str model;
    bool add_bos = false;
    if (gguf_get_str(g->file, "tokenizer.ggml.model", &model) < 0)
        return error_set(g->err, -EINVAL, "tokenizer.ggml.model is missing");
    g->is_spm = model.len == 5 && memcmp(model.data, "llama", 5) == 0;
    if (!g->is_spm && !(model.len == 4 && memcmp(model.data, "gpt2", 4) == 0))
        return error_set(g->err, -ENOTSUP, "tokenizer.ggml.model \"%.*s\" is not supported; gpt2 and llama are", (int)(model.len < 64 ? model.len : 64), model.data);
    int r = g->is_spm ? read_spm(g) : read_bpe(g, &add_bos);
    if (r < 0)
        return r;
    tok->bos = id_of(g, "tokenizer.ggml.bos_token_id");
    tok->eos = id_of(g, "tokenizer.ggml.eos_token_id");
    tok->eot = id_of(g, "tokenizer.ggml.eot_token_id");
    if (flag_of(g, "tokenizer.ggml.add_bos_token", g->is_spm || add_bos) && tok->bos != TOKEN_NONE)
        tok->prefix[tok->n_prefix++] = tok->bos;
    if (flag_of(g, "tokenizer.ggml.add_eos_token", false) && tok->eos != TOKEN_NONE)
        tok->suffix[tok->n_suffix++] = tok->eos;
    struct gguf_str template;
    if (gguf_get_str(g->file, "tokenizer.chat_template", &template) == 0) {
        tok->chat_template = copy_text(template.data, (size_t)template.len);
        if (!tok->chat_template)
            return out_of_memory(g->err);
    }
    r = tokenizer_complete(tok, g->err);
    if (r == 0) {
        tokenizer_find_eog(tok);
        tokenizer_add_eog(tok, id_of(g, "tokenizer.ggml.eom_token_id"));
    }
    return r;
}

int tokenizer_from_gguf(const struct gguf *file, struct tokenizer **ret_tok, struct error *err)
{
    struct gguf_reader g = {.file = file, .tok = tokenizer_alloc(), .err = err};
    int r = g.tok ? read_model(&g) : out_of_memory(err);
    if (r < 0) {
        tokenizer_close(g.tok);
        return r;
    }
    *ret_tok = g.tok;
    return 0;
}
