/* tokenizer.json: decoders. What a decoder does to each token is done once, when the file is read, so that decoding joins bytes; what it does to the
 * whole text is only a strip of leading spaces, which the detokenizer does. */
#include "router/text/byte_alphabet.h"
#include "router/text/tokenizer_json_private.h"
#include "proto/base/utf8.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define DECODE_OPS_MAX 16

enum decode_kind { DECODE_BYTE_LEVEL, DECODE_REPLACE, DECODE_BYTE_FALLBACK, DECODE_STRIP };

struct decode_op {
    enum decode_kind kind;
    char *string;  /* REPLACE: what; STRIP: which character. Owned */
    size_t string_len;
    char *content; /* REPLACE: by what. Owned */
    size_t content_len;
    int64_t start, stop; /* STRIP: how many at each end */
};

struct decoder {
    struct decode_op ops[DECODE_OPS_MAX];
    size_t n;
    bool fused;         /* what follows sees the whole text */
    size_t strip_start;
};

static void decoder_fini(struct decoder *d)
{
    for (size_t i = 0; i < d->n; i++) {
        free(d->ops[i].string);
        free(d->ops[i].content);
    }
}

static int read_replace(struct json_part *p, const struct json_str *pattern, const struct json_str *content, struct decode_op *op, bool fused)
{
    static const char *const names[] = {"String"};
    struct json_str f;
    if (!pattern->data)
        return part_fail(p, "\"pattern\" is missing");
    int r = part_fields(p, pattern, names, &f, 1);
    if (r == 0 && !f.data)
        return error_set(p->err, -ENOTSUP, "%s: Replace with a regular expression is not supported", p->name);
    if (r == 0)
        r = part_string(p, &f, "\"String\" must be a string", &op->string, &op->string_len);
    if (r == 0 && (op->string_len == 0 || (fused && op->string_len != utf8_char_bytes((uint8_t)op->string[0]))))
        return error_set(p->err, -ENOTSUP, "%s: Replace of this pattern is not supported", p->name);
    return r < 0 ? r : part_string(p, content, "\"content\" must be a string", &op->content, &op->content_len);
}

static int read_strip(struct json_part *p, const struct json_str f[], struct decoder *d, struct decode_op *op)
{
    int r = part_string(p, &f[0], "\"content\" must be a string", &op->string, &op->string_len);
    if (r == 0)
        r = part_int(p, &f[1], 0, "\"start\" must be an integer", &op->start);
    if (r == 0)
        r = part_int(p, &f[2], 0, "\"stop\" must be an integer", &op->stop);
    if (r < 0)
        return r;
    if (op->start < 0 || op->stop < 0 || op->string_len == 0)
        return part_fail(p, "Strip with a negative count or without a character");
    if (!d->fused)
        return 0;
    if (op->stop != 0 || strcmp(op->string, " ") != 0)
        return error_set(p->err, -ENOTSUP, "%s: Strip of the whole text is supported for spaces at its start only", p->name);
    d->strip_start = (size_t)op->start;
    op->start = 0;
    return 0;
}

static int read_metaspace(struct json_part *p, const struct json_str *replacement, const struct json_str *scheme, const struct json_str *add_prefix, struct decoder *d, struct decode_op *op)
{
    bool prefix;
    op->kind = DECODE_REPLACE;
    int r = part_string(p, replacement, "\"replacement\" must be a string", &op->string, &op->string_len);
    if (r == 0)
        r = part_bool(p, add_prefix, true, "\"add_prefix_space\" must be true or false", &prefix);
    if (r < 0)
        return r;
    op->content = strdup(" ");
    op->content_len = 1;
    if (!op->content || op->string_len == 0)
        return op->content ? part_fail(p, "\"replacement\" is empty") : error_set(p->err, -ENOMEM, "out of memory");
    bool never = scheme->data && scheme->len == 7 && memcmp(scheme->data, "\"never\"", 7) == 0;
    if (scheme->data ? !never : prefix)
        d->strip_start = SIZE_MAX;
    return 0;
}

static int read_decoder(struct json_part *p, const struct json_str *text, struct decoder *d);

static int read_decoder_item(struct json_part *p, const struct json_str *item, void *arg)
{
    return read_decoder(p, item, arg);
}

static int read_decoder(struct json_part *p, const struct json_str *text, struct decoder *d)
{
    static const char *const names[] = {"type", "decoders", "pattern", "content", "start", "stop", "replacement", "prepend_scheme", "add_prefix_space"};
    struct json_str f[9];
    char type[PART_TYPE_MAX];
    int r = part_fields(p, text, names, f, 9);
    if (r == 0)
        r = part_type(p, &f[0], type);
    if (r < 0)
        return r;
    if (strcmp(type, "Sequence") == 0)
        return part_items(p, &f[1], "\"decoders\" must be an array", read_decoder_item, d);
    if (strcmp(type, "Fuse") == 0) {
        d->fused = true;
        return 0;
    }
    if (d->n == DECODE_OPS_MAX)
        return part_fail(p, "too many steps");
    struct decode_op *op = &d->ops[d->n++];
    *op = (struct decode_op){.kind = DECODE_BYTE_LEVEL};
    if (strcmp(type, "Replace") == 0) {
        op->kind = DECODE_REPLACE;
        return read_replace(p, &f[2], &f[3], op, d->fused);
    }
    if (strcmp(type, "Strip") == 0) {
        op->kind = DECODE_STRIP;
        return read_strip(p, &f[3], d, op);
    }
    if (d->fused)
        return error_set(p->err, -ENOTSUP, "%s: %s behind Fuse is not supported", p->name, type);
    if (strcmp(type, "ByteLevel") == 0)
        return 0;
    if (strcmp(type, "ByteFallback") == 0) {
        op->kind = DECODE_BYTE_FALLBACK;
        return 0;
    }
    if (strcmp(type, "Metaspace") == 0)
        return read_metaspace(p, &f[6], &f[7], &f[8], d, op);
    return part_unsupported(p, type);
}

/* One step on one token: `in` to `out`, which is empty. */

static int hex_digit(uint8_t c)
{
    return c >= '0' && c <= '9' ? c - '0' : (c | 0x20) >= 'a' && (c | 0x20) <= 'f' ? (c | 0x20) - 'a' + 10 : -1;
}

static int step_byte_fallback(const uint8_t *in, size_t n, struct buf *out)
{
    if (n == 6 && memcmp(in, "<0x", 3) == 0 && in[5] == '>' && hex_digit(in[3]) >= 0 && hex_digit(in[4]) >= 0) {
        uint8_t byte = (uint8_t)(hex_digit(in[3]) * 16 + hex_digit(in[4]));
        return buf_append(out, &byte, 1);
    }
    return buf_append(out, in, n);
}

static int step_byte_level(const uint8_t *in, size_t n, struct buf *out)
{
    int r = buf_reserve(out, n + 1);
    if (r < 0)
        return r;
    int64_t bytes = utf8_valid_len(in, n) == n ? byte_alphabet_decode((const char *)in, n, out->data) : -1;
    if (bytes < 0)
        return buf_append(out, in, n);
    out->len = (size_t)bytes;
    return 0;
}

static int step_replace(const struct decode_op *op, const uint8_t *in, size_t n, struct buf *out)
{
    int r = 0;
    for (size_t i = 0; i < n && r == 0;) {
        const uint8_t *hit = memmem(in + i, n - i, op->string, op->string_len);
        size_t plain = hit ? (size_t)(hit - in) - i : n - i;
        r = buf_append(out, in + i, plain);
        if (r == 0 && hit)
            r = buf_append(out, op->content, op->content_len);
        i += plain + (hit ? op->string_len : 0);
    }
    return r;
}

static int step_strip(const struct decode_op *op, const uint8_t *in, size_t n, struct buf *out)
{
    size_t len = op->string_len;
    for (int64_t i = 0; i < op->start && n >= len && memcmp(in, op->string, len) == 0; i++) {
        in += len;
        n -= len;
    }
    for (int64_t i = 0; i < op->stop && n >= len && memcmp(in + n - len, op->string, len) == 0; i++)
        n -= len;
    return buf_append(out, in, n);
}

static int step(const struct decode_op *op, const uint8_t *in, size_t n, struct buf *out)
{
    switch (op->kind) {
    case DECODE_BYTE_LEVEL: return step_byte_level(in, n, out);
    case DECODE_REPLACE: return step_replace(op, in, n, out);
    case DECODE_BYTE_FALLBACK: return step_byte_fallback(in, n, out);
    case DECODE_STRIP: return step_strip(op, in, n, out);
    }
    return -EINVAL;
}

static int decode_token(const struct decoder *d, struct vocab *v, int32_t id, struct buf bufs[2])
{
    const struct vocab_token *t = &v->tokens[id];
    struct buf *in = &bufs[0], *out = &bufs[1];
    buf_clear(in);
    int r = buf_append(in, v->text.data + t->text, t->text_len);
    for (size_t i = 0; i < d->n && r == 0; i++) {
        struct buf *swap = in;
        buf_clear(out);
        r = step(&d->ops[i], in->data ? in->data : (const uint8_t *)"", in->len, out);
        in = out;
        out = swap;
    }
    return r < 0 ? r : vocab_set_bytes(v, id, in->data ? in->data : (const uint8_t *)"", in->len);
}

/* In a byte-level vocabulary the bytes are also the model's keys. They stay as they are: ByteLevel gives the same, and nothing else is done to them there. */
static bool keeps_keys(const struct decoder *d, const struct tokenizer *tok)
{
    return tok->vocab.key_is_bytes && d->n == 1 && d->ops[0].kind == DECODE_BYTE_LEVEL;
}

static int apply(struct json_part *p, const struct decoder *d, struct tokenizer *tok)
{
    struct buf bufs[2];
    int r = 0;
    if (keeps_keys(d, tok))
        return 0;
    if (tok->vocab.key_is_bytes)
        return error_set(p->err, -ENOTSUP, "%s: only ByteLevel is supported with a ByteLevel pre-tokenizer", p->name);
    buf_init(&bufs[0], VOCAB_TOKEN_BYTES_MAX);
    buf_init(&bufs[1], VOCAB_TOKEN_BYTES_MAX);
    for (size_t i = 0; i < tok->vocab.n && r == 0; i++)
        if (tok->vocab.tokens[i].flags & VOCAB_PRESENT)
            r = decode_token(d, &tok->vocab, (int32_t)i, bufs);
    buf_fini(&bufs[0]);
    buf_fini(&bufs[1]);
    return r == -ENOMEM ? error_set(p->err, r, "out of memory") : r < 0 ? part_fail(p, "a token becomes too long") : 0;
}

int json_read_decoder(struct json_part *p, const struct json_str *text, struct tokenizer *tok)
{
    struct decoder d = {0};
    if (!text)
        return 0; /* tokens stand for their keys */
    int r = read_decoder(p, text, &d);
    if (r == 0)
        r = apply(p, &d, tok);
    if (r == 0)
        tok->strip_start = d.strip_start;
    decoder_fini(&d);
    return r;
}
