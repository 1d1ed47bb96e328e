#include "proto/base/utf8.h"

enum utf8_kind utf8_next(const uint8_t *s, size_t n, size_t *ret_len)
{
    uint8_t c = s[0], low = 0x80, high = 0xbf;
    size_t want;
    *ret_len = 1;
    if (c < 0x80)
        return UTF8_CHAR;
    if (c < 0xc2 || c > 0xf4)
        return UTF8_ILL_FORMED;
    if (c < 0xe0) {
        want = 2;
    } else if (c < 0xf0) {
        want = 3;
        low = c == 0xe0 ? 0xa0 : 0x80;
        high = c == 0xed ? 0x9f : 0xbf;
    } else {
        want = 4;
        low = c == 0xf0 ? 0x90 : 0x80;
        high = c == 0xf4 ? 0x8f : 0xbf;
    }
    for (size_t i = 1; i < want; i++) {
        if (i == n) {
            *ret_len = n;
            return UTF8_PARTIAL;
        }
        if (s[i] < low || s[i] > high) {
            *ret_len = i;
            return UTF8_ILL_FORMED;
        }
        low = 0x80;
        high = 0xbf;
    }
    *ret_len = want;
    return UTF8_CHAR;
}

size_t utf8_valid_len(const void *text, size_t len)
{
    const uint8_t *s = text;
    size_t i = 0;
    while (i < len) {
        i += utf8_ascii_len(s + i, len - i);
        while (i < len && s[i] >= 0x80) {
            size_t n;
            if (utf8_next(s + i, len - i, &n) != UTF8_CHAR)
                return i;
            i += n;
        }
    }
    return i;
}

int utf8_append_text(struct buf *out, const uint8_t *s, size_t n, bool final)
{
    size_t i = 0;
    while (i < n) {
        size_t good = utf8_valid_len(s + i, n - i), part;
        int r = buf_append(out, s + i, good);
        if (r < 0)
            return r;
        i += good;
        if (i == n)
            break;
        if (utf8_next(s + i, n - i, &part) == UTF8_PARTIAL && !final)
            return (int)(n - i);
        r = buf_append(out, "\xef\xbf\xbd", 3);
        if (r < 0)
            return r;
        i += part;
    }
    return 0;
}

size_t utf8_put(uint32_t c, uint8_t out[4])
{
    if (c < 0x80) {
        out[0] = (uint8_t)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (uint8_t)(0xc0 | c >> 6);
        out[1] = (uint8_t)(0x80 | (c & 0x3f));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (uint8_t)(0xe0 | c >> 12);
        out[1] = (uint8_t)(0x80 | (c >> 6 & 0x3f));
        out[2] = (uint8_t)(0x80 | (c & 0x3f));
        return 3;
    }
    out[0] = (uint8_t)(0xf0 | c >> 18);
    out[1] = (uint8_t)(0x80 | (c >> 12 & 0x3f));
    out[2] = (uint8_t)(0x80 | (c >> 6 & 0x3f));
    out[3] = (uint8_t)(0x80 | (c & 0x3f));
    return 4;
}
