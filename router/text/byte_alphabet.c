#include "router/text/byte_alphabet.h"
#include "proto/base/utf8.h"

/* Printable bytes stand for themselves; the other 68, in order, are U+0100 and up. */
static bool stands_for_itself(uint32_t c)
{
    return (c >= 0x21 && c <= 0x7e) || (c >= 0xa1 && c <= 0xac) || (c >= 0xae && c <= 0xff);
}

uint32_t byte_alphabet_char(uint8_t byte)
{
    if (stands_for_itself(byte))
        return byte;
    if (byte <= 0x20)
        return 0x100u + byte;
    if (byte < 0xa1)
        return 0x121u + (byte - 0x7fu);
    return 0x143;
}

int byte_alphabet_byte(uint32_t c)
{
    if (stands_for_itself(c))
        return (int)c;
    if (c >= 0x100 && c <= 0x120)
        return (int)(c - 0x100);
    if (c >= 0x121 && c <= 0x142)
        return (int)(c - 0x121 + 0x7f);
    return c == 0x143 ? 0xad : -1;
}

int64_t byte_alphabet_decode(const char *text, size_t len, uint8_t *out)
{
    const uint8_t *s = (const uint8_t *)text;
    size_t n = 0, step;
    for (size_t i = 0; i < len; i += step) {
        int byte = byte_alphabet_byte(utf8_get(s + i, &step));
        if (byte < 0)
            return -1;
        out[n++] = (uint8_t)byte;
    }
    return (int64_t)n;
}
