/* UTF-8: checking, stepping and repairing (Unicode 15, table 3-7). Any thread. */
#pragma once
#include "proto/base/buf.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Bytes of the longest well-formed beginning; `len` if all of it is. */
size_t utf8_valid_len(const void *text, size_t len);

enum utf8_kind { UTF8_CHAR, UTF8_PARTIAL, UTF8_ILL_FORMED };
/* What stands at s[0..n), n >= 1: a whole character, the beginning of one that the end cuts off, or an ill-formed part. *ret_len is its length;
 * of an ill-formed part that of the maximal subpart, which U+FFFD replaces as a whole. */
enum utf8_kind utf8_next(const uint8_t *s, size_t n, size_t *ret_len);

/* Appends the bytes to `out` as well-formed UTF-8, ill-formed parts as U+FFFD. Returns how many bytes at the end, at most 3, were left out because they
 * begin a character, or a negative errno. With `final` nothing is left out. */
int utf8_append_text(struct buf *out, const uint8_t *s, size_t n, bool final);

/* Bytes of the longest beginning that is ASCII. */
static inline size_t utf8_ascii_len(const uint8_t *s, size_t len)
{
    size_t i = 0;
    uint64_t w;
    for (; len - i >= sizeof w; i += sizeof w) {
        memcpy(&w, s + i, sizeof w);
        if (w & 0x8080808080808080ull)
            break;
    }
    while (i < len && s[i] < 0x80)
        i++;
    return i;
}

/* The character at p, of well-formed text. */
static inline uint32_t utf8_get(const uint8_t *p, size_t *ret_len)
{
    uint32_t c = p[0];
    if (c < 0x80) {
        *ret_len = 1;
        return c;
    }
    if (c < 0xe0) {
        *ret_len = 2;
        return (c & 0x1f) << 6 | (p[1] & 0x3fu);
    }
    if (c < 0xf0) {
        *ret_len = 3;
        return (c & 0x0f) << 12 | (p[1] & 0x3fu) << 6 | (p[2] & 0x3fu);
    }
    *ret_len = 4;
    return (c & 0x07) << 18 | (p[1] & 0x3fu) << 12 | (p[2] & 0x3fu) << 6 | (p[3] & 0x3fu);
}

static inline size_t utf8_char_bytes(uint8_t first)
{
    return first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
}

/* The beginning of the character that ends before p > start, of well-formed text. */
static inline const uint8_t *utf8_before(const uint8_t *start, const uint8_t *p)
{
    do
        p--;
    while (p > start && (*p & 0xc0) == 0x80);
    return p;
}

/* Writes a character (no surrogate, at most U+10FFFF) and returns its bytes, 1 to 4. */
size_t utf8_put(uint32_t c, uint8_t out[4]);
