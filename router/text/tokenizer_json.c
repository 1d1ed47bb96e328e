/* tokenizer.json of huggingface/tokenizers: the file's top level, its added tokens and its BPE model. */
#include "router/text/tokenizer_json_private.h"
#include "router/text/byte_alphabet.h"
#include "proto/base/utf8.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int part_fail(struct json_part *p, const char *what)
{
    return error_set(p->err, -EINVAL, "%s: %s", p->name, what);
}

/* The parser's own complaint. */
static int part_syntax(struct json_part *p, const struct json *j)
{
    return error_set(p->err, j->error == -ENOMEM ? -ENOMEM : -EINVAL, "%s: %s at byte %zu", p->name, j->error_text, (size_t)(j->text - p->base) + j->error_pos);
}

int part_fields(struct json_part *p, const struct json_str *text, const char *const names[], struct json_str ret_fields[], size_t n)
{
    struct json j;
    struct json_str key;
    memset(ret_fields, 0, n * sizeof *ret_fields);
    json_init(&j, text->data, text->len);
    json_object(&j);
    while (json_next_key(&j, &key)) {
        size_t i = 0;
        while (i < n && !json_str_eq(&key, names[i]))
            i++;
        if (i < n)
            json_raw(&j, &ret_fields[i]);
        else
            json_skip(&j);
    }
    int r = json_end(&j) < 0 ? part_syntax(p, &j) : 0;
    json_fini(&j);
    return r;
}

static bool is_null(const struct json_str *field)
{
    return !field->data || (field->len == 4 && memcmp(field->data, "null", 4) == 0);
}

int part_string(struct json_part *p, const struct json_str *field, const char *what, char **ret_text, size_t *ret_len)
{
    struct json j;
    struct json_str s;
    if (is_null(field))
        return part_fail(p, what);
    json_init(&j, field->data, field->len);
    char *copy = NULL;
    int r = json_string(&j, &s) < 0 ? part_fail(p, what) : 0;
    if (r == 0 && !(copy = malloc(s.len + 1)))
        r = error_set(p->err, -ENOMEM, "out of memory");
    if (r == 0) {
        memcpy(copy, s.data, s.len);
        copy[s.len] = '\0';
        *ret_text = copy;
        *ret_len = s.len;
    }
    json_fini(&j);
    return r;
}

int part_bool(struct json_part *p, const struct json_str *field, bool fallback, const char *what, bool *ret_value)
{
    struct json j;
    *ret_value = fallback;
    if (is_null(field))
        return 0;
    json_init(&j, field->data, field->len);
    int r = json_bool(&j, ret_value) < 0 ? part_fail(p, what) : 0;
    json_fini(&j);
    return r;
}

int part_int(struct json_part *p, const struct json_str *field, int64_t fallback, const char *what, int64_t *ret_value)
{
    struct json j;
    *ret_value = fallback;
    if (is_null(field))
        return 0;
    json_init(&j, field->data, field->len);
    int r = json_int(&j, ret_value) < 0 ? part_fail(p, what) : 0;
    json_fini(&j);
    return r;
}

int part_items(struct json_part *p, const struct json_str *field, const char *what, part_item_fn *take, void *arg)
{
    struct json j;
    struct json_str item;
    if (is_null(field))
        return part_fail(p, what);
    json_init(&j, field->data, field->len);
    int r = json_array(&j) < 0 ? part_fail(p, what) : 0;
    while (r == 0 && json_next_item(&j)) {
        if (json_raw(&j, &item) < 0)
            break;
        r = take(p, &item, arg);
    }
    if (r == 0 && j.error)
        r = part_syntax(p, &j);
    json_fini(&j);
    return r;
}

int part_type(struct json_part *p, const struct json_str *type, char ret_type[PART_TYPE_MAX])
{
    char *text;
    size_t len;
    int r = part_string(p, type, "\"type\" must be a string", &text, &len);
    if (r < 0)
        return r;
    snprintf(ret_type, PART_TYPE_MAX, "%s", text);
    free(text);
    return 0;
}

int part_unsupported(struct json_part *p, const char *type)
{
    return error_set(p->err, -ENOTSUP, "%s of type \"%s\" is not supported", p->name, type);
}

/* Tokens. */

/* What a spelling stands for while nothing is known of the decoder: the bytes of a byte-level model, otherwise the spelling itself. `bytes` has room
 * for the text. False when no text can become it. */
static bool key_of(const struct tokenizer *tok, const char *text, size_t len, uint8_t *bytes, size_t *ret_n)
{
    int64_t n = (int64_t)len;
    if (tok->vocab.key_is_bytes)
        n = byte_alphabet_decode(text, len, bytes);
    else
        memcpy(bytes, text, len);
    *ret_n = (size_t)n;
    return n >= 0;
}

static int set_token(struct json_part *p, struct tokenizer *tok, int64_t id, const struct json_str *text, unsigned flags)
{
    uint8_t bytes[VOCAB_TOKEN_BYTES_MAX];
    size_t n;
    if (text->len > sizeof bytes)
        return part_fail(p, "a token is longer than 65535 bytes");
    bool has_key = key_of(tok, text->data, text->len, bytes, &n);
    int r = vocab_set(&tok->vocab, id, text->data, text->len, has_key ? bytes : NULL, n, flags | (has_key ? VOCAB_KEY : 0));
    if (r == -EINVAL)
        return error_set(p->err, r, "%s: token id %lld is out of range", p->name, (long long)id);
    return r < 0 ? error_set(p->err, r, "out of memory") : 0;
}

/* A special token must not come out of the model, or a user could write it: the model keeps it only where it is a single byte or character, or the
 * <0xXX> of one, without which a text could not be encoded. */
static unsigned special_key_flag(const struct tokenizer *tok, int32_t id)
{
    size_t len;
    if (!(tok->vocab.tokens[id].flags & VOCAB_KEY))
        return 0;
    const uint8_t *key = vocab_key(&tok->vocab, id, &len);
    bool fallback = len == 6 && memcmp(key, "<0x", 3) == 0 && key[5] == '>';
    bool single = fallback || len == 1 || (!tok->vocab.key_is_bytes && len > 0 && utf8_char_bytes(key[0]) == len);
    return single ? VOCAB_KEY : 0;
}

static int take_added(struct json_part *p, const struct json_str *item, void *arg)
{
    static const char *const names[] = {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"};
    struct json_str f[7], content;
    struct tokenizer *tok = arg;
    struct added_token token;
    int64_t id;
    char *text = NULL;
    int r = part_fields(p, item, names, f, 7);
    if (r == 0)
        r = part_int(p, &f[0], -1, "\"id\" must be an integer", &id);
    if (r == 0)
        r = part_string(p, &f[1], "\"content\" must be a string", &text, &content.len);
    if (r == 0)
        r = part_bool(p, &f[2], false, "\"single_word\" must be true or false", &token.single_word);
    if (r == 0)
        r = part_bool(p, &f[3], false, "\"lstrip\" must be true or false", &token.lstrip);
    if (r == 0)
        r = part_bool(p, &f[4], false, "\"rstrip\" must be true or false", &token.rstrip);
    if (r == 0)
        r = part_bool(p, &f[6], false, "\"special\" must be true or false", &token.special);
    if (r == 0)
        r = part_bool(p, &f[5], !token.special, "\"normalized\" must be true or false", &token.normalized);
    content.data = text;
    if (r == 0 && id >= 0 && (size_t)id < tok->vocab.n && tok->vocab.tokens[id].flags & VOCAB_ADDED)
        r = error_set(p->err, -EINVAL, "%s: two added tokens have the id %lld", p->name, (long long)id);
    if (r == 0)
        r = set_token(p, tok, id, &content, VOCAB_ADDED | (token.special ? VOCAB_SPECIAL : 0));
    if (r == 0) {
        token.id = (int32_t)id;
        struct vocab_token *v = &tok->vocab.tokens[id];
        if (token.special)
            v->flags = (uint8_t)((v->flags & ~VOCAB_KEY) | special_key_flag(tok, token.id));
        r = tokenizer_add_token(tok, &token);
        r = r == -EINVAL ? part_fail(p, "too many added tokens") : r < 0 ? error_set(p->err, r, "out of memory") : 0;
    }
    free(text);
    return r;
}

/* The model. */

static int read_vocab(struct json_part *p, struct tokenizer *tok, const struct json_str *field)
{
    struct json j;
    struct json_str text;
    int64_t id;
    if (is_null(field))
        return part_fail(p, "\"vocab\" must be an object");
    json_init(&j, field->data, field->len);
    json_object(&j);
    int r = 0;
    while (r == 0 && json_next_key(&j, &text) && json_int(&j, &id) == 0)
        r = set_token(p, tok, id, &text, 0);
    if (r == 0 && j.error)
        r = part_syntax(p, &j);
    json_fini(&j);
    return r;
}

/* One merge: "left right", or ["left", "right"]. The texts live until the parser's end. */
static int next_merge(struct json *j, struct json_str *ret_left, struct json_str *ret_right)
{
    if (json_peek(j) == JSON_ARRAY) {
        json_array(j);
        if (json_next_item(j))
            json_string(j, ret_left);
        if (json_next_item(j))
            json_string(j, ret_right);
        if (!j->error && json_next_item(j))
            json_fail(j, "a merge must be two tokens");
        return j->error;
    }
    struct json_str both;
    int r = json_string(j, &both);
    if (r < 0)
        return r;
    const char *space = memchr(both.data, ' ', both.len);
    if (!space || memchr(space + 1, ' ', both.len - (size_t)(space + 1 - both.data)))
        return json_fail(j, "a merge must be two tokens");
    *ret_left = (struct json_str){.data = both.data, .len = (size_t)(space - both.data)};
    *ret_right = (struct json_str){.data = space + 1, .len = both.len - ret_left->len - 1};
    return 0;
}

/* Merges that cannot apply are left out: of spellings that no text can have, and those that would make a special token out of plain text. */
static int add_merge(struct json_part *p, struct tokenizer *tok, const struct json_str *left, const struct json_str *right, uint32_t rank)
{
    uint8_t joined[4096];
    size_t n_left, n_right;
    if (left->len + right->len > sizeof joined)
        return part_fail(p, "a merge is longer than 4096 bytes");
    if (!key_of(tok, left->data, left->len, joined, &n_left) || !key_of(tok, right->data, right->len, joined + n_left, &n_right))
        return 0;
    const struct vocab *v = &tok->vocab;
    int32_t a = vocab_find(v, joined, n_left), b = vocab_find(v, joined + n_left, n_right), c = vocab_find(v, joined, n_left + n_right);
    if (a >= 0 && b >= 0 && c >= 0)
        return bpe_add(&tok->bpe, a, b, rank, c);
    char text[sizeof joined];
    memcpy(text, left->data, left->len);
    memcpy(text + left->len, right->data, right->len);
    if (text_trie_exact(&tok->specials, text, left->len + right->len) >= 0)
        return 0;
    return error_set(p->err, -EINVAL, "%s: merge %u \"%.*s %.*s\" names a token that is not in the vocabulary", p->name, rank, (int)(left->len < 64 ? left->len : 64), left->data,
                     (int)(right->len < 64 ? right->len : 64), right->data);
}

static size_t count_items(const struct json_str *field)
{
    struct json j;
    size_t n = 0;
    json_init(&j, field->data, field->len);
    json_array(&j);
    while (json_next_item(&j) && json_skip(&j) == 0)
        n++;
    json_fini(&j);
    return n;
}

static int read_merges(struct json_part *p, struct tokenizer *tok, const struct json_str *field)
{
    struct json j;
    struct json_str left, right;
    if (is_null(field))
        return part_fail(p, "\"merges\" must be an array");
    if (bpe_reserve(&tok->bpe, count_items(field)) < 0)
        return error_set(p->err, -ENOMEM, "out of memory");
    json_init(&j, field->data, field->len);
    json_array(&j);
    int r = 0;
    for (uint32_t rank = 0; r == 0 && json_next_item(&j) && next_merge(&j, &left, &right) == 0; rank++)
        r = add_merge(p, tok, &left, &right, rank);
    if (r == 0 && j.error)
        r = part_syntax(p, &j);
    json_fini(&j);
    return r;
}

static int find_unk(struct json_part *p, struct tokenizer *tok, const struct json_str *field)
{
    char *text;
    size_t len;
    if (is_null(field))
        return 0;
    int r = part_string(p, field, "\"unk_token\" must be a string", &text, &len);
    if (r < 0)
        return r;
    for (size_t i = 0; i < tok->vocab.n && tok->bpe.unk < 0; i++) {
        const struct vocab_token *t = &tok->vocab.tokens[i];
        if (t->flags & VOCAB_PRESENT && t->text_len == len && memcmp(tok->vocab.text.data + t->text, text, len) == 0)
            tok->bpe.unk = (int32_t)i;
    }
    free(text);
    return tok->bpe.unk < 0 ? part_fail(p, "\"unk_token\" is not in the vocabulary") : 0;
}

static bool is_empty_string(const struct json_str *field)
{
    return is_null(field) || (field->len == 2 && memcmp(field->data, "\"\"", 2) == 0);
}

/* The special texts must be known while merges are read. */
static int index_specials(struct json_part *p, struct tokenizer *tok)
{
    for (size_t i = 0; i < tok->n_added; i++) {
        const struct vocab_token *t = &tok->vocab.tokens[tok->added[i].id];
        if (!tok->added[i].special || t->text_len == 0)
            continue;
        int r = text_trie_add(&tok->specials, tok->vocab.text.data + t->text, t->text_len, (int32_t)i);
        if (r < 0)
            return r == -ENOMEM ? error_set(p->err, r, "out of memory") : part_fail(p, "an added token is too long");
    }
    return 0;
}

static int read_model(struct json_part *p, struct tokenizer *tok, const struct json_str *text, const struct json_str *added)
{
    static const char *const names[] = {"type", "vocab", "merges", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges", "dropout", "continuing_subword_prefix", "end_of_word_suffix"};
    struct json_str f[10];
    char type[PART_TYPE_MAX] = "BPE";
    int64_t dropout;
    int r = part_fields(p, text, names, f, 10);
    if (r == 0 && f[0].data)
        r = part_type(p, &f[0], type);
    if (r == 0 && strcmp(type, "BPE") != 0)
        return part_unsupported(p, type);
    if (r == 0 && (!is_empty_string(&f[8]) || !is_empty_string(&f[9])))
        return error_set(p->err, -ENOTSUP, "%s: continuing_subword_prefix and end_of_word_suffix are not supported", p->name);
    if (r == 0 && (part_int(p, &f[7], 0, "", &dropout) < 0 || dropout != 0))
        return error_set(p->err, -ENOTSUP, "%s: dropout is not supported", p->name);
    if (r == 0)
        r = part_bool(p, &f[4], false, "\"fuse_unk\" must be true or false", &tok->bpe.fuse_unk);
    if (r == 0)
        r = part_bool(p, &f[5], false, "\"byte_fallback\" must be true or false", &tok->bpe.byte_fallback);
    if (r == 0)
        r = part_bool(p, &f[6], false, "\"ignore_merges\" must be true or false", &tok->bpe.ignore_merges);
    if (r == 0)
        r = read_vocab(p, tok, &f[1]);
    if (r == 0 && !is_null(added)) {
        struct json_part added_part = {.name = "added_tokens", .base = p->base, .err = p->err};
        r = part_items(&added_part, added, "must be an array", take_added, tok);
        if (r == 0)
            r = index_specials(&added_part, tok);
    }
    if (r == 0 && vocab_index(&tok->vocab) < 0)
        r = error_set(p->err, -ENOMEM, "out of memory");
    if (r == 0)
        r = read_merges(p, tok, &f[2]);
    return r < 0 ? r : find_unk(p, tok, &f[3]);
}

static int read_all(const struct json_str *text, const char *folder, struct tokenizer *tok, struct error *err)
{
    static const char *const names[] = {"added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model"};
    struct json_str f[6];
    struct json_part p = {.name = "tokenizer.json", .base = text->data, .err = err};
    int r = part_fields(&p, text, names, f, 6);
    if (r < 0)
        return r;
    if (is_null(&f[5]))
        return part_fail(&p, "\"model\" is missing");
    bool byte_level = false;
    p.name = "normalizer";
    r = is_null(&f[1]) ? 0 : json_read_normalizer(&p, &f[1], &tok->normalizer);
    p.name = "pre_tokenizer";
    if (r == 0 && !is_null(&f[2]))
        r = json_read_pretokenizer(&p, &f[2], &tok->pretokenizer, &byte_level);
    tok->vocab.key_is_bytes = byte_level;
    tok->bpe.by_char = !byte_level;
    p.name = "model";
    if (r == 0)
        r = read_model(&p, tok, &f[5], &f[0]);
    p.name = "post_processor";
    if (r == 0 && !is_null(&f[3]))
        r = json_read_post_processor(&p, &f[3], tok);
    p.name = "decoder";
    if (r == 0)
        r = json_read_decoder(&p, is_null(&f[4]) ? NULL : &f[4], tok);
    if (r == 0)
        r = tokenizer_complete(tok, err);
    if (r == 0 && folder)
        r = tokenizer_read_config(tok, folder, err);
    if (r == 0 && tok->n_eog <= 1)
        tokenizer_find_eog(tok);
    snprintf(tok->description, sizeof tok->description, "tokenizer.json BPE, %s", byte_level ? "byte level" : "by character");
    return r;
}

int tokenizer_parse_json(const char *text, size_t len, const char *folder, struct tokenizer **ret_tok, struct error *err)
{
    struct json_str all = {.data = text, .len = len};
    struct tokenizer *tok = tokenizer_alloc();
    int r = tok ? read_all(&all, folder, tok, err) : error_set(err, -ENOMEM, "out of memory");
    if (r < 0) {
        tokenizer_close(tok);
        return r;
    }
    *ret_tok = tok;
    return 0;
}
