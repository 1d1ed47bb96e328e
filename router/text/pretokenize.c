#include "router/text/pretokenize.h"
#include "router/text/byte_alphabet.h"
#include "router/text/char_class.h"
#include "proto/base/utf8.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define SCRATCH_MAX ((size_t)1 << 30)

void pretokenizer_fini(struct pretokenizer *pt)
{
    for (size_t i = 0; i < pt->n; i++) {
        regex_free(pt->ops[i].regex);
        free(pt->ops[i].string);
    }
    pt->n = 0;
}

void pretok_work_init(struct pretok_work *work, struct regex_matcher *matcher, pieces_fn *take, void *arg)
{
    work->matcher = matcher;
    work->take = take;
    work->arg = arg;
    work->n_batch = 0;
    for (size_t i = 0; i < PRETOK_OPS_MAX; i++)
        buf_init(&work->scratch[i], SCRATCH_MAX);
}

void pretok_work_fini(struct pretok_work *work)
{
    for (size_t i = 0; i < PRETOK_OPS_MAX; i++)
        buf_fini(&work->scratch[i]);
}

bool pretok_is_number(uint32_t c)
{
    return char_class_of(c) & CHAR_N;
}

bool pretok_is_space(uint32_t c)
{
    return char_class_of(c) & CHAR_SPACE;
}

bool pretok_is_punctuation(uint32_t c)
{
    return char_class_of(c) & CHAR_P || (c < 128 && char_class_of(c) & CHAR_S);
}

size_t pretok_scan_metaspace_words(const uint8_t *s, size_t pos, size_t end)
{
    while (pos + 3 <= end && memcmp(s + pos, "\xe2\x96\x81", 3) == 0)
        pos += 3;
    while (pos < end) {
        const uint8_t *hit = memchr(s + pos, 0xe2, end - pos);
        if (!hit)
            return end;
        pos = (size_t)(hit - s);
        if (pos + 3 <= end && memcmp(hit, "\xe2\x96\x81", 3) == 0)
            return pos;
        pos++;
    }
    return end;
}

/* The walk: each op hands its pieces to the next, the last one's pieces go to the batch. */

static int run(const struct pretokenizer *pt, struct pretok_work *work, size_t op, const uint8_t *text, size_t len, bool at_start);

static int flush(struct pretok_work *work)
{
    size_t n = work->n_batch;
    work->n_batch = 0;
    return n ? work->take(work->arg, work->batch, n, work->readable_end) : 0;
}

static inline int emit(struct pretok_work *work, const uint8_t *text, size_t len)
{
    work->batch[work->n_batch++] = (struct text_piece){.data = text, .len = len};
    return work->n_batch == PRETOK_BATCH ? flush(work) : 0;
}

/* What Split makes of a row of spans, as they come: `held` waits for a neighbour that it may join. */
struct splitter {
    const struct pretokenizer *pt;
    struct pretok_work *work;
    size_t op;
    const uint8_t *text;
    size_t len;
    bool at_start;
    size_t mapped_at, bytes_at; /* a mapped op: this offset in the stand-ins is that one in the text */
    bool any, prev_match;
    size_t start, end;      /* the held span */
};

/* The offset in the text of an offset in its stand-ins, each of which is one byte there. Offsets come in ascending order. */
static size_t unmapped(struct splitter *sp, size_t offset)
{
    const uint8_t *stand_ins = sp->work->scratch[sp->op].data;
    for (; sp->mapped_at < offset; sp->bytes_at++)
        sp->mapped_at += utf8_char_bytes(stand_ins[sp->mapped_at]);
    return sp->bytes_at;
}

static int hand_on(struct splitter *sp, size_t start, size_t end)
{
    if (start == end)
        return 0;
    if (sp->pt->ops[sp->op].mapped) {
        start = unmapped(sp, start);
        end = unmapped(sp, end);
    }
    return run(sp->pt, sp->work, sp->op + 1, sp->text + start, end - start, sp->at_start && start == 0);
}

static int flush_held(struct splitter *sp)
{
    bool any = sp->any;
    sp->any = false;
    return any ? hand_on(sp, sp->start, sp->end) : 0;
}

static int add_span(struct splitter *sp, size_t start, size_t end, bool is_match)
{
    const struct pretok_op *op = &sp->pt->ops[sp->op];
    is_match ^= op->invert;
    bool joins = false;
    switch (op->behavior) {
    case PRETOK_REMOVED: return is_match ? 0 : hand_on(sp, start, end);
    case PRETOK_ISOLATED: return hand_on(sp, start, end);
    case PRETOK_CONTIGUOUS: joins = is_match == sp->prev_match; break;
    case PRETOK_MERGED_WITH_PREVIOUS: joins = is_match && !sp->prev_match; break;
    case PRETOK_MERGED_WITH_NEXT: joins = !is_match && sp->prev_match; break;
    }
    sp->prev_match = is_match;
    if (sp->any && joins) {
        sp->end = end;
        return 0;
    }
    int r = flush_held(sp);
    sp->any = true;
    sp->start = start;
    sp->end = end;
    return r;
}

static int split_by_regex(struct splitter *sp, const struct pretok_op *op, const uint8_t *text, size_t len)
{
    size_t done = 0, from = 0, start, end;
    bool matched = false;
    int r = 0;
    while (r == 0 && from <= len) {
        int found = regex_search(sp->work->matcher, op->regex, text, len, from, &start, &end);
        if (found <= 0) {
            r = found;
            break;
        }
        if (start == end && matched && start == done) {
            from = start < len ? start + utf8_char_bytes(text[start]) : len + 1;
            continue;
        }
        r = start > done ? add_span(sp, done, start, false) : 0;
        if (r == 0)
            r = add_span(sp, start, end, true);
        matched = true;
        done = from = end;
    }
    if (r == 0 && done < len)
        r = add_span(sp, done, len, false);
    return r;
}

static int split_by_string(struct splitter *sp, const struct pretok_op *op, const uint8_t *text, size_t len)
{
    size_t done = 0;
    while (done < len) {
        const uint8_t *hit = memmem(text + done, len - done, op->string, op->string_len);
        size_t start = hit ? (size_t)(hit - text) : len;
        int r = start > done ? add_span(sp, done, start, false) : 0;
        if (r == 0 && hit)
            r = add_span(sp, start, start + op->string_len, true);
        if (r < 0)
            return r;
        done = hit ? start + op->string_len : len;
    }
    return 0;
}

static int split_by_chars(struct splitter *sp, const struct pretok_op *op, const uint8_t *text, size_t len)
{
    size_t done = 0, i = 0, n;
    int r = 0;
    for (; i < len && r == 0; i += n) {
        if (!op->is_delimiter(utf8_get(text + i, &n)))
            continue;
        r = i > done ? add_span(sp, done, i, false) : 0;
        if (r == 0)
            r = add_span(sp, i, i + n, true);
        done = i + n;
    }
    return r == 0 && done < len ? add_span(sp, done, len, false) : r;
}

static int split_by_scan(struct splitter *sp, const struct pretok_op *op, const uint8_t *text, size_t len)
{
    int r = 0;
    for (size_t pos = 0, end; pos < len && r == 0; pos = end) {
        end = op->scan(text, pos, len);
        r = hand_on(sp, pos, end);
    }
    return r;
}

static int write_stand_ins(struct buf *out, const uint8_t *text, size_t len)
{
    buf_clear(out);
    for (size_t i = 0; i < len; i++) {
        uint8_t bytes[4];
        int r = buf_append(out, bytes, utf8_put(byte_alphabet_char(text[i]), bytes));
        if (r < 0)
            return r;
    }
    return 0;
}

static int split(struct splitter *sp)
{
    const struct pretok_op *op = &sp->pt->ops[sp->op];
    const uint8_t *text = sp->text;
    size_t len = sp->len;
    int r = 0;
    if (op->mapped) {
        struct buf *scratch = &sp->work->scratch[sp->op];
        r = write_stand_ins(scratch, text, len);
        if (r < 0)
            return r;
        text = scratch->data;
        len = scratch->len;
    }
    switch (op->kind) {
    case PRETOK_SCAN: return split_by_scan(sp, op, text, len);
    case PRETOK_REGEX: r = split_by_regex(sp, op, text, len); break;
    case PRETOK_STRING: r = split_by_string(sp, op, text, len); break;
    case PRETOK_CHARS: r = split_by_chars(sp, op, text, len); break;
    default: return -EINVAL;
    }
    int held = flush_held(sp);
    return r < 0 ? r : held;
}

/* The commonest case by far, without a call for each piece but the scanner's. */
static int scan_last(struct pretok_work *work, scan_fn *scan, const uint8_t *text, size_t len)
{
    int r = 0;
    for (size_t pos = 0, end; pos < len && r == 0; pos = end) {
        end = scan(text, pos, len);
        r = emit(work, text + pos, end - pos);
    }
    return r;
}

/* Goes on with a text that an op has written to its scratch. Pieces in the batch point into the text before, and later ones into this scratch, so
 * the batch is handed over on both sides. */
static int run_scratch(const struct pretokenizer *pt, struct pretok_work *work, size_t op, bool at_start)
{
    const uint8_t *end_before = work->readable_end;
    struct buf *scratch = &work->scratch[op];
    int r = flush(work);
    if (r < 0)
        return r;
    work->readable_end = scratch->data + scratch->len;
    r = run(pt, work, op + 1, scratch->data, scratch->len, at_start);
    if (r == 0)
        r = flush(work);
    work->readable_end = end_before;
    return r;
}

static int run_prefix(const struct pretokenizer *pt, struct pretok_work *work, size_t op, const uint8_t *text, size_t len, bool at_start)
{
    if (text[0] == ' ')
        return run(pt, work, op + 1, text, len, at_start);
    struct buf *scratch = &work->scratch[op];
    buf_clear(scratch);
    int r = buf_append(scratch, " ", 1);
    if (r == 0)
        r = buf_append(scratch, text, len);
    return r < 0 ? r : run_scratch(pt, work, op, at_start);
}

static int run_metaspace(const struct pretokenizer *pt, struct pretok_work *work, size_t i, const uint8_t *text, size_t len, bool at_start)
{
    const struct pretok_op *op = &pt->ops[i];
    struct buf *scratch = &work->scratch[i];
    buf_clear(scratch);
    bool begins = text[0] == ' ' || (len >= op->string_len && memcmp(text, op->string, op->string_len) == 0);
    bool wanted = op->prepend == PRETOK_PREPEND_ALWAYS || (op->prepend == PRETOK_PREPEND_FIRST && at_start);
    int r = wanted && !begins ? buf_append(scratch, op->string, op->string_len) : 0;
    for (size_t done = 0; done < len && r == 0;) {
        const uint8_t *space = memchr(text + done, ' ', len - done);
        size_t end = space ? (size_t)(space - text) : len;
        r = buf_append(scratch, text + done, end - done);
        if (r == 0 && space)
            r = buf_append(scratch, op->string, op->string_len);
        done = end + 1;
    }
    return r < 0 ? r : run_scratch(pt, work, i, at_start);
}

static int run(const struct pretokenizer *pt, struct pretok_work *work, size_t op, const uint8_t *text, size_t len, bool at_start)
{
    if (op == pt->n)
        return emit(work, text, len);
    switch (pt->ops[op].kind) {
    case PRETOK_PREFIX: return run_prefix(pt, work, op, text, len, at_start);
    case PRETOK_METASPACE: return run_metaspace(pt, work, op, text, len, at_start);
    case PRETOK_SCAN:
        if (op + 1 == pt->n && !pt->ops[op].mapped)
            return scan_last(work, pt->ops[op].scan, text, len);
        break;
    default: break;
    }
    struct splitter sp = {.pt = pt, .work = work, .op = op, .text = text, .len = len, .at_start = at_start};
    return split(&sp);
}

int pretokenize(const struct pretokenizer *pt, struct pretok_work *work, const uint8_t *text, size_t len, bool at_start)
{
    if (len == 0)
        return 0;
    work->n_batch = 0;
    work->readable_end = text + len;
    int r = run(pt, work, 0, text, len, at_start);
    return r < 0 ? r : flush(work);
}
