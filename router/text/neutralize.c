#include "router/text/neutralize.h"
#include "proto/base/utf8.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* U+FDD0 to U+FDD4 are EF B7 90 to EF B7 94. */
#define BREAK "\xef\xb7\x90"
#define ESCAPE "\xef\xb7\x91"
#define FOR_BREAK "\xef\xb7\x92"
#define FOR_ESCAPE "\xef\xb7\x93"
#define FOR_NOTHING "\xef\xb7\x94"
#define MARK_BYTES 3
#define WINDOW 8

/* 0x90 to 0x94 if one of the five stands at text[pos], else 0. */
static uint8_t mark_at(const uint8_t *text, size_t len, size_t pos)
{
    if (len - pos < MARK_BYTES || text[pos] != 0xef || text[pos + 1] != 0xb7)
        return 0;
    return text[pos + 2] >= 0x90 && text[pos + 2] <= 0x94 ? text[pos + 2] : 0;
}

/* Up to 8 bytes as a number that sorts as they do. */
static uint64_t window_of(const uint8_t *text, size_t len)
{
    uint64_t w = 0;
    for (size_t i = 0; i < WINDOW; i++)
        w = w << 8 | (i < len ? text[i] : 0);
    return w;
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static size_t sort_unique(uint64_t *values, size_t n)
{
    size_t kept = 0;
    qsort(values, n, sizeof *values, by_value);
    for (size_t i = 0; i < n; i++)
        if (i == 0 || values[i] != values[i - 1])
            values[kept++] = values[i];
    return kept;
}

int neutralize_tails_build(struct neutralize_tails *tails, const struct neutralize_special tokens[], size_t n)
{
    size_t n_bytes = 1;
    for (size_t i = 0; i < n; i++)
        n_bytes += tokens[i].len;
    *tails = (struct neutralize_tails){.windows = malloc(n_bytes * sizeof(uint64_t)), .ends = malloc(n_bytes * sizeof(uint64_t))};
    if (!tails->windows || !tails->ends) {
        neutralize_tails_fini(tails);
        return -ENOMEM;
    }
    for (size_t i = 0; i < n; i++) {
        const uint8_t *text = (const uint8_t *)tokens[i].text;
        size_t len = tokens[i].len;
        for (size_t from = len ? utf8_char_bytes(text[0]) : 0; from < len; from += utf8_char_bytes(text[from])) {
            tails->windows[tails->n_windows++] = window_of(text + from, len - from);
            if (len - from < WINDOW)
                tails->ends[tails->n_ends++] = window_of(text + from, len - from);
        }
    }
    tails->n_windows = sort_unique(tails->windows, tails->n_windows);
    tails->n_ends = sort_unique(tails->ends, tails->n_ends);
    return 0;
}

void neutralize_tails_fini(struct neutralize_tails *tails)
{
    free(tails->windows);
    free(tails->ends);
    *tails = (struct neutralize_tails){0};
}

/* The first of the ascending values that is not below `value`; n if all are. */
static size_t lower_bound(const uint64_t *values, size_t n, uint64_t value)
{
    size_t low = 0;
    while (low < n) {
        size_t middle = low + (n - low) / 2;
        if (values[middle] < value)
            low = middle + 1;
        else
            n = middle;
    }
    return low;
}

/* True if the text, len >= 1, could go on where a special token was begun: it begins with an end of one, or with a middle of one, or lies within. */
static bool could_go_on(const struct neutralize_tails *tails, const uint8_t *text, size_t len)
{
    uint64_t all = window_of(text, len), mask = len < WINDOW ? ~0ull << (8 * (WINDOW - len)) : ~0ull;
    size_t at = lower_bound(tails->windows, tails->n_windows, all);
    if (at < tails->n_windows && (tails->windows[at] & mask) == all)
        return true;
    for (size_t n = 1; n < WINDOW && n <= len; n++) {
        uint64_t beginning = window_of(text, n);
        at = lower_bound(tails->ends, tails->n_ends, beginning);
        if (at < tails->n_ends && tails->ends[at] == beginning)
            return true;
    }
    return false;
}

/* True if some end of the text begins a special token that it does not finish. */
static bool could_begin(const struct text_trie *specials, const uint8_t *text, size_t len)
{
    size_t from = len > specials->longest ? len - specials->longest : 0;
    for (; from < len; from++)
        if (text_trie_begins(specials, text + from, len - from))
            return true;
    return false;
}

static int append(struct buf *out, const char *mark)
{
    return buf_append(out, mark, strlen(mark));
}

/* The character at text[pos], escaped if it is one of ours, and the break behind it if a special token begins there. */
static int append_char(const struct text_trie *specials, const uint8_t *text, size_t len, size_t pos, size_t n, struct buf *out)
{
    uint8_t mark = mark_at(text, len, pos);
    int r;
    if (mark == 0x90)
        r = append(out, ESCAPE FOR_BREAK);
    else if (mark == 0x91)
        r = append(out, ESCAPE FOR_ESCAPE);
    else
        r = buf_append(out, text + pos, n);
    size_t match;
    if (r == 0 && text_trie_longest(specials, text + pos, len - pos, &match) >= 0)
        r = append(out, BREAK);
    return r;
}

int neutralize_text(const struct text_trie *specials, const struct neutralize_tails *tails, const uint8_t *text, size_t len, struct buf *out)
{
    if (len == 0)
        return 0;
    int r = could_go_on(tails, text, len) ? append(out, ESCAPE FOR_NOTHING) : 0;
    size_t plain = 0, pos = 0;
    while (r == 0 && pos < len) {
        size_t n = utf8_char_bytes(text[pos]);
        if (specials->roots[text[pos]] < 0 && !mark_at(text, len, pos)) {
            pos += n;
            continue;
        }
        r = buf_append(out, text + plain, pos - plain);
        if (r == 0)
            r = append_char(specials, text, len, pos, n, out);
        pos += n;
        plain = pos;
    }
    if (r == 0)
        r = buf_append(out, text + plain, len - plain);
    if (r == 0 && could_begin(specials, text, len))
        r = append(out, BREAK);
    return r < 0 ? r : 0;
}

int neutralize_strip(const uint8_t *text, size_t len, struct buf *out)
{
    size_t plain = 0;
    for (size_t pos = 0; pos < len;) {
        const uint8_t *next = memchr(text + pos, 0xef, len - pos);
        if (!next)
            break;
        pos = (size_t)(next - text);
        uint8_t mark = mark_at(text, len, pos);
        size_t taken = 0;
        const char *stands_for = "";
        if (mark == 0x90) {
            taken = MARK_BYTES;
        } else if (mark == 0x91 && len - pos >= 2 * MARK_BYTES) {
            uint8_t code = mark_at(text, len, pos + MARK_BYTES);
            taken = code >= 0x92 ? 2 * MARK_BYTES : 0;
            stands_for = code == 0x92 ? BREAK : code == 0x93 ? ESCAPE : "";
        }
        if (!taken) {
            pos += utf8_char_bytes(text[pos]);
            continue;
        }
        int r = buf_append(out, text + plain, pos - plain);
        if (r == 0)
            r = append(out, stands_for);
        if (r < 0)
            return r;
        pos += taken;
        plain = pos;
    }
    return buf_append(out, text + plain, len - plain);
}
