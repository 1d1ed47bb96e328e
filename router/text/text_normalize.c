#include "router/text/text_normalize.h"
#include "router/text/char_class.h"
#include "router/text/unicode_form.h"
#include "proto/base/utf8.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

void normalizer_fini(struct normalizer *norm)
{
    for (size_t i = 0; i < norm->n; i++) {
        free(norm->ops[i].string);
        free(norm->ops[i].content);
        regex_free(norm->ops[i].regex);
    }
    norm->n = 0;
}

int normalizer_finish(const struct normalizer *norm)
{
    for (size_t i = 0; i < norm->n; i++)
        if (norm->ops[i].kind <= NORMALIZE_NFKD)
            return unicode_form_init();
    return 0;
}

void normalize_work_init(struct normalize_work *work)
{
    *work = (struct normalize_work){0};
    buf_init(&work->bufs[0], NORMALIZE_BYTES_MAX);
    buf_init(&work->bufs[1], NORMALIZE_BYTES_MAX);
}

void normalize_work_fini(struct normalize_work *work)
{
    buf_fini(&work->bufs[0]);
    buf_fini(&work->bufs[1]);
    free(work->chars);
    work->chars = NULL;
    work->cap = 0;
}

/* The text on its way through the ops. */
struct passage {
    const uint8_t *text;
    size_t len;
};

static const enum unicode_form forms[] = {
    [NORMALIZE_NFC] = UNICODE_NFC,
    [NORMALIZE_NFD] = UNICODE_NFD,
    [NORMALIZE_NFKC] = UNICODE_NFKC,
    [NORMALIZE_NFKD] = UNICODE_NFKD,
};

/* Each step returns 1 when the new text is in `out`, 0 when the text stays (perhaps cut at its ends), or a negative errno. */

static int step_form(enum unicode_form form, struct normalize_work *work, struct passage *p, struct buf *out)
{
    if (unicode_form_stable(form, p->text, p->len) == p->len)
        return 0;
    int r = unicode_form_append(form, p->text, p->len, &work->chars, &work->cap, out);
    return r < 0 ? r : 1;
}

static int step_lowercase(struct passage *p, struct buf *out)
{
    size_t n;
    for (size_t i = 0; i < p->len; i += n) {
        uint32_t c = utf8_get(p->text + i, &n);
        uint8_t bytes[4];
        /* The one character whose lower case is two: I with a dot above. */
        int r = c == 0x130 ? buf_append(out, "i\xcc\x87", 3) : buf_append(out, bytes, utf8_put((uint32_t)utf8proc_tolower((utf8proc_int32_t)c), bytes));
        if (r < 0)
            return r;
    }
    return 1;
}

static int step_strip_accents(struct passage *p, struct buf *out)
{
    size_t n;
    for (size_t i = 0; i < p->len; i += n) {
        int r = char_class_of(utf8_get(p->text + i, &n)) & CHAR_M ? 0 : buf_append(out, p->text + i, n);
        if (r < 0)
            return r;
    }
    return 1;
}

static int step_prepend(const struct normalize_op *op, struct passage *p, struct buf *out)
{
    if (p->len == 0)
        return 0;
    int r = buf_append(out, op->content, op->content_len);
    if (r == 0)
        r = buf_append(out, p->text, p->len);
    return r < 0 ? r : 1;
}

/* The next occurrence at or behind `from`: 1, 0 or a negative errno. */
static int find_next(const struct normalize_op *op, struct regex_matcher *matcher, const struct passage *p, size_t from, size_t *ret_start, size_t *ret_end)
{
    if (op->regex)
        return regex_search(matcher, op->regex, p->text, p->len, from, ret_start, ret_end);
    const uint8_t *hit = op->string_len ? memmem(p->text + from, p->len - from, op->string, op->string_len) : NULL;
    if (!hit)
        return 0;
    *ret_start = (size_t)(hit - p->text);
    *ret_end = *ret_start + op->string_len;
    return 1;
}

static int step_replace(const struct normalize_op *op, struct regex_matcher *matcher, struct passage *p, struct buf *out)
{
    size_t done = 0, from = 0, start, end;
    bool changed = false;
    while (from <= p->len) {
        int r = find_next(op, matcher, p, from, &start, &end);
        if (r < 0)
            return r;
        if (r == 0)
            break;
        /* An empty match right behind the last one is none; step over a character. */
        if (start == end && changed && start == done) {
            from = start < p->len ? start + utf8_char_bytes(p->text[start]) : p->len + 1;
            continue;
        }
        r = buf_append(out, p->text + done, start - done);
        if (r == 0)
            r = buf_append(out, op->content, op->content_len);
        if (r < 0)
            return r;
        changed = true;
        done = from = end;
    }
    if (!changed)
        return 0;
    int r = buf_append(out, p->text + done, p->len - done);
    return r < 0 ? r : 1;
}

static int step_strip(const struct normalize_op *op, struct passage *p)
{
    size_t n;
    while (op->left && p->len > 0 && char_class_of(utf8_get(p->text, &n)) & CHAR_SPACE) {
        p->text += n;
        p->len -= n;
    }
    while (op->right && p->len > 0) {
        const uint8_t *last = utf8_before(p->text, p->text + p->len);
        if (!(char_class_of(utf8_get(last, &n)) & CHAR_SPACE))
            break;
        p->len -= n;
    }
    return 0;
}

static int step(const struct normalize_op *op, struct normalize_work *work, struct regex_matcher *matcher, struct passage *p, struct buf *out)
{
    switch (op->kind) {
    case NORMALIZE_NFC:
    case NORMALIZE_NFD:
    case NORMALIZE_NFKC:
    case NORMALIZE_NFKD: return step_form(forms[op->kind], work, p, out);
    case NORMALIZE_LOWERCASE: return step_lowercase(p, out);
    case NORMALIZE_STRIP_ACCENTS: return step_strip_accents(p, out);
    case NORMALIZE_PREPEND: return step_prepend(op, p, out);
    case NORMALIZE_REPLACE: return step_replace(op, matcher, p, out);
    case NORMALIZE_STRIP: return step_strip(op, p);
    }
    return -EINVAL;
}

int normalize(const struct normalizer *norm, struct normalize_work *work, struct regex_matcher *matcher, const uint8_t *text, size_t len, const uint8_t **ret_text, size_t *ret_len)
{
    struct passage p = {.text = text, .len = len};
    int side = 0;
    for (size_t i = 0; i < norm->n; i++) {
        struct buf *out = &work->bufs[side];
        buf_clear(out);
        int r = step(&norm->ops[i], work, matcher, &p, out);
        if (r < 0)
            return r;
        if (r == 1) {
            p = (struct passage){.text = out->data ? out->data : (const uint8_t *)"", .len = out->len};
            side ^= 1;
        }
    }
    *ret_text = p.text;
    *ret_len = p.len;
    return 0;
}
