#include "router/text/tokenizer_private.h"
#include "proto/base/utf8.h"
#include <errno.h>
#include <string.h>

/* What the token adds to a text, leading spaces cut off where the decoder cuts them. False for an id outside the vocabulary. */
static bool bytes_of(const struct tokenizer *tok, int32_t id, bool skip_special, bool *at_start, const uint8_t **ret_bytes, size_t *ret_n)
{
    size_t n;
    const uint8_t *bytes = tokenizer_token_bytes(tok, id, &n);
    if (!bytes)
        return false;
    if (skip_special && tokenizer_is_special(tok, id))
        n = 0;
    if (*at_start && n > 0) {
        for (size_t cut = 0; cut < tok->strip_start && n > 0 && *bytes == ' '; cut++) {
            bytes++;
            n--;
        }
        *at_start = false;
    }
    *ret_bytes = bytes;
    *ret_n = n;
    return true;
}

int tokenizer_decode(const struct tokenizer *tok, const int32_t ids[], size_t n, bool skip_special, struct buf *out)
{
    size_t before = out->len;
    bool at_start = true;
    for (size_t i = 0; i < n; i++) {
        const uint8_t *bytes;
        size_t len;
        int r = bytes_of(tok, ids[i], skip_special, &at_start, &bytes, &len) ? buf_append(out, bytes, len) : -ERANGE;
        if (r < 0) {
            out->len = before;
            return r;
        }
    }
    return 0;
}

void detok_init(struct detok *d, const struct tokenizer *tok, bool skip_special, bool at_start)
{
    *d = (struct detok){.tok = tok, .skip_special = skip_special, .at_start = at_start};
}

int detok_push(struct detok *d, int32_t id, struct buf *out, struct detok_piece *ret_piece)
{
    struct detok next = *d;
    const uint8_t *bytes;
    size_t n, done = 0;
    if (!bytes_of(d->tok, id, d->skip_special, &next.at_start, &bytes, &n))
        return -ERANGE;
    next.n_bytes += n;
    int r = 0;
    /* The held character takes bytes until it is whole or ill-formed. An ill-formed part may end before the byte that showed it. */
    while (next.n_held > 0 && done < n && r == 0) {
        size_t part;
        next.held[next.n_held++] = bytes[done++];
        if (utf8_next(next.held, next.n_held, &part) == UTF8_PARTIAL)
            continue;
        done -= next.n_held - part;
        r = utf8_append_text(out, next.held, part, true);
        next.n_held = 0;
    }
    if (r == 0 && done < n) {
        r = utf8_append_text(out, bytes + done, n - done, false);
        if (r > 0) {
            memcpy(next.held, bytes + n - r, (size_t)r);
            next.n_held = (uint8_t)r;
            r = 0;
        }
    }
    if (r < 0)
        return r;
    if (ret_piece)
        *ret_piece = (struct detok_piece){.text_offset = d->n_bytes, .bytes = bytes, .n_bytes = n};
    *d = next;
    return 0;
}

int detok_flush(struct detok *d, struct buf *out)
{
    int r = utf8_append_text(out, d->held, d->n_held, true);
    if (r == 0)
        d->n_held = 0;
    return r;
}
