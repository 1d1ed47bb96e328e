/* Logprobs in the two shapes of the API. Chat: a list of objects, each with the token's text, its raw bytes (a token may be half a character) and the
 * alternatives. Completions: parallel arrays, where a token that is no UTF-8 is written as "bytes:\x.."; its text_offset counts characters.
 * JSON has no infinity: the floor is -9999. */
#include "router/api/api_private.h"
#include "proto/base/utf8.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { LOG_BYTES_MAX = 64 << 20 };
static const double floor_logprob = -9999;

void logprobs_init(struct logprob_log *log)
{
    struct buf *const all[] = {&log->content, &log->tokens, &log->logprobs, &log->tops, &log->offsets};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        buf_init(all[i], LOG_BYTES_MAX);
    log->n = 0;
    log->text_chars = 0;
}

void logprobs_fini(struct logprob_log *log)
{
    buf_fini(&log->content);
    buf_fini(&log->tokens);
    buf_fini(&log->logprobs);
    buf_fini(&log->tops);
    buf_fini(&log->offsets);
}

static double printable(float logprob)
{
    return isfinite(logprob) && logprob > floor_logprob ? (double)logprob : floor_logprob;
}

/* What an alternative stands for; special tokens by their name. */
static const uint8_t *bytes_of(const struct choice *c, uint32_t id, size_t *ret_n)
{
    const struct tokenizer *tok = c->g->api->config.tok;
    const uint8_t *bytes = NULL;
    *ret_n = 0;
    if (id < tokenizer_n_vocab(tok))
        bytes = tokenizer_token_bytes(tok, (int32_t)id, ret_n);
    if ((!bytes || *ret_n == 0) && id < tokenizer_n_vocab(tok))
        bytes = (const uint8_t *)tokenizer_token_text(tok, (int32_t)id, ret_n);
    return bytes ? bytes : (const uint8_t *)"";
}

/* -- chat -- */

static void write_chat_token(struct json_writer *w, const uint8_t *bytes, size_t n, double logprob)
{
    json_write_key(w, "token");
    json_write_str_n(w, (const char *)bytes, n);
    json_write_kdouble(w, "logprob", logprob);
    json_write_karray(w, "bytes");
    for (size_t i = 0; i < n; i++)
        json_write_int(w, bytes[i]);
    json_write_array_end(w);
}

static int add_chat(struct choice *c, const struct route_token *token, const uint8_t *bytes, size_t n)
{
    struct json_writer w;
    if (c->log.content.len && buf_append(&c->log.content, ",", 1) < 0)
        return -1;
    json_write_begin(&w, &c->log.content);
    json_write_object(&w);
    write_chat_token(&w, bytes, n, printable(token->logprob));
    json_write_karray(&w, "top_logprobs");
    for (uint32_t i = 0; i < token->n_top; i++) {
        size_t n_top;
        const uint8_t *top = bytes_of(c, token->top[i].id, &n_top);
        json_write_object(&w);
        write_chat_token(&w, top, n_top, printable(token->top[i].logprob));
        json_write_object_end(&w);
    }
    json_write_array_end(&w);
    json_write_object_end(&w);
    return json_write_end(&w);
}

/* -- completions -- */

/* The token as a JSON string can hold it: its text, or bytes:\x.. */
static const char *spell(const uint8_t *bytes, size_t n, char *storage, size_t size)
{
    if (utf8_valid_len(bytes, n) == n && !memchr(bytes, 0, n) && n < size) {
        memcpy(storage, bytes, n);
        storage[n] = 0;
        return storage;
    }
    int at = snprintf(storage, size, "bytes:");
    for (size_t i = 0; i < n && (size_t)at + 5 < size; i++)
        at += snprintf(storage + at, size - (size_t)at, "\\x%02x", bytes[i]);
    return storage;
}

static void write_tops(struct choice *c, struct json_writer *w, const struct route_token *token, const uint8_t *bytes, size_t n)
{
    char name[1024];
    bool has_own = false;
    json_write_object(w);
    for (uint32_t i = 0; i < token->n_top; i++) {
        size_t n_top;
        const uint8_t *top = bytes_of(c, token->top[i].id, &n_top);
        has_own |= token->top[i].id == token->id;
        json_write_kdouble(w, spell(top, n_top, name, sizeof(name)), printable(token->top[i].logprob));
    }
    if (!has_own)
        json_write_kdouble(w, spell(bytes, n, name, sizeof(name)), printable(token->logprob));
    json_write_object_end(w);
}

static int add_completion(struct choice *c, const struct route_token *token, bool has_logprob, const uint8_t *bytes, size_t n)
{
    struct logprob_log *log = &c->log;
    struct buf *const all[] = {&log->tokens, &log->logprobs, &log->tops, &log->offsets};
    struct json_writer w[4];
    char name[1024];
    int rc = 0;
    for (int i = 0; i < 4; i++) {
        rc = log->n && rc >= 0 ? buf_append(all[i], ",", 1) : rc;
        json_write_begin(&w[i], all[i]);
    }
    json_write_str(&w[0], spell(bytes, n, name, sizeof(name)));
    if (has_logprob) {
        json_write_double(&w[1], printable(token->logprob));
        write_tops(c, &w[2], token, bytes, n);
    } else {
        json_write_null(&w[1]);
        json_write_null(&w[2]);
    }
    json_write_int(&w[3], (int64_t)log->text_chars);
    for (int i = 0; i < 4 && rc >= 0; i++)
        rc = json_write_end(&w[i]);
    return rc;
}

static uint64_t count_chars(const uint8_t *bytes, size_t n)
{
    uint64_t chars = 0;
    for (size_t i = 0; i < n; i++)
        chars += (bytes[i] & 0xc0) != 0x80;
    return chars;
}

int logprobs_add(struct choice *c, const struct route_token *token, bool has_logprob, const uint8_t *bytes, size_t n)
{
    uint64_t chars = count_chars(bytes, n);
    if (n == 0)
        bytes = bytes_of(c, token->id, &n); /* a special token that the text leaves out is named all the same */
    int rc = c->g->req.kind == API_CHAT ? add_chat(c, token, bytes, n) : add_completion(c, token, has_logprob, bytes, n);
    c->log.n++;
    c->log.text_chars += chars;
    return rc;
}

/* -- taking them out -- */

static void write_list(struct json_writer *w, const char *key, struct buf *items)
{
    json_write_karray(w, key);
    if (items->len)
        json_write_raw(w, (const char *)items->data, items->len);
    json_write_array_end(w);
    buf_clear(items);
}

void logprobs_write(struct choice *c, struct json_writer *w)
{
    struct logprob_log *log = &c->log;
    json_write_key(w, "logprobs");
    if (!c->g->req.sampling.logprobs || (log->n == 0 && c->g->req.stream)) {
        json_write_null(w);
        return;
    }
    json_write_object(w);
    if (c->g->req.kind == API_CHAT) {
        write_list(w, "content", &log->content);
        json_write_knull(w, "refusal");
    } else {
        write_list(w, "tokens", &log->tokens);
        write_list(w, "token_logprobs", &log->logprobs);
        write_list(w, "top_logprobs", &log->tops);
        write_list(w, "text_offset", &log->offsets);
    }
    json_write_object_end(w);
    log->n = 0;
}
