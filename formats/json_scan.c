#include "formats/json_private.h"
#include "proto/base/utf8.h"
#include <errno.h>
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LOW_BITS 0x0101010101010101ull
#define HIGH_BITS 0x8080808080808080ull

static size_t fault_at(struct json_fault *fault, const char *text, size_t pos)
{
    *fault = (struct json_fault){.code = -EINVAL, .text = text, .pos = pos};
    return 0;
}

/* Nonzero where one of the eight bytes ends a run of plain characters: a quote, a backslash, a control or a byte of a multi-byte character.
 * Borrows may mark bytes above the first true one, so only the lowest mark counts. */
static uint64_t special_bytes(uint64_t w)
{
    uint64_t quote = w ^ (LOW_BITS * '"'), backslash = w ^ (LOW_BITS * '\\');
    return (((w - LOW_BITS * 0x20) | (quote - LOW_BITS) | (backslash - LOW_BITS)) | w) & HIGH_BITS;
}

static size_t skip_plain(const char *text, size_t len, size_t pos)
{
    while (len - pos >= 8) {
        uint64_t w;
        memcpy(&w, text + pos, 8);
        uint64_t mask = special_bytes(w);
        if (mask)
            return pos + (size_t)__builtin_ctzll(mask) / 8;
        pos += 8;
    }
    while (pos < len) {
        unsigned char c = (unsigned char)text[pos];
        if (c < 0x20 || c >= 0x80 || c == '"' || c == '\\')
            break;
        pos++;
    }
    return pos;
}

static int hex4(const char *s)
{
    int value = 0;
    for (int i = 0; i < 4; i++) {
        int c = (unsigned char)s[i], d;
        if (c >= '0' && c <= '9')
            d = c - '0';
        else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f')
            d = (c | 0x20) - 'a' + 10;
        else
            return -1;
        value = value * 16 + d;
    }
    return value;
}

/* The escape whose backslash is at text[pos]; returns the position behind it. */
static size_t scan_escape(const char *text, size_t len, size_t pos, struct json_fault *fault)
{
    if (len - pos < 2)
        return fault_at(fault, "unterminated string", pos);
    if (text[pos + 1] != 'u') {
        if (text[pos + 1] == '\0' || !strchr("\"\\/bfnrt", text[pos + 1]))
            return fault_at(fault, "unknown escape", pos);
        return pos + 2;
    }
    int unit = len - pos >= 6 ? hex4(text + pos + 2) : -1;
    if (unit < 0)
        return fault_at(fault, "\\u needs four hexadecimal digits", pos);
    if (unit < 0xd800 || unit > 0xdfff)
        return pos + 6;
    int low = unit < 0xdc00 && len - pos >= 12 && text[pos + 6] == '\\' && text[pos + 7] == 'u' ? hex4(text + pos + 8) : -1;
    if (low < 0xdc00 || low > 0xdfff)
        return fault_at(fault, "lone surrogate", pos);
    return pos + 12;
}

size_t json_scan_string(const char *text, size_t len, size_t pos, bool *ret_escapes, struct json_fault *ret_fault)
{
    size_t start = pos;
    bool escapes = false;
    pos++;
    for (;;) {
        pos = skip_plain(text, len, pos);
        if (pos >= len)
            return fault_at(ret_fault, "unterminated string", start);
        unsigned char c = (unsigned char)text[pos];
        if (c == '"')
            break;
        if (c < 0x20)
            return fault_at(ret_fault, "control character in a string", pos);
        if (c == '\\') {
            escapes = true;
            pos = scan_escape(text, len, pos, ret_fault);
            if (!pos)
                return 0;
            continue;
        }
        while (pos < len && (unsigned char)text[pos] >= 0x80) {
            size_t n;
            if (utf8_next((const uint8_t *)text + pos, len - pos, &n) != UTF8_CHAR)
                return fault_at(ret_fault, "ill-formed UTF-8", pos);
            pos += n;
        }
    }
    *ret_escapes = escapes;
    return pos + 1;
}

size_t json_unescape(const char *in, size_t n, char *out)
{
    size_t w = 0, i = 0;
    while (i < n) {
        const char *slash = memchr(in + i, '\\', n - i);
        size_t run = slash ? (size_t)(slash - in) - i : n - i;
        memcpy(out + w, in + i, run);
        w += run;
        i += run;
        if (!slash)
            break;
        if (in[i + 1] != 'u') {
            static const char from[] = "bfnrt", to[] = "\b\f\n\r\t";
            const char *named = strchr(from, in[i + 1]);
            out[w++] = named ? to[named - from] : in[i + 1];
            i += 2;
            continue;
        }
        uint32_t c = (uint32_t)hex4(in + i + 2);
        i += 6;
        if (c >= 0xd800 && c <= 0xdfff) {
            c = 0x10000 + ((c - 0xd800) << 10) + ((uint32_t)hex4(in + i + 2) - 0xdc00);
            i += 6;
        }
        w += utf8_put(c, (uint8_t *)out + w);
    }
    return w;
}

static size_t skip_digits(const char *text, size_t len, size_t pos)
{
    while (pos < len && text[pos] >= '0' && text[pos] <= '9')
        pos++;
    return pos;
}

#define MAGNITUDE_MAX 1000000000000000ll /* beyond the length of any text, so that clamping loses nothing */

/* The exponent behind `e`, clamped. */
static int64_t parse_exponent(const char *text, size_t pos, size_t end)
{
    bool negative = text[pos] == '-';
    if (text[pos] == '-' || text[pos] == '+')
        pos++;
    int64_t value = 0;
    for (; pos < end; pos++)
        if (value < MAGNITUDE_MAX)
            value = value * 10 + (text[pos] - '0');
    if (value > MAGNITUDE_MAX)
        value = MAGNITUDE_MAX;
    return negative ? -value : value;
}

static int64_t clamp_magnitude(int64_t v)
{
    return v > MAGNITUDE_MAX ? MAGNITUDE_MAX : v < -MAGNITUDE_MAX ? -MAGNITUDE_MAX : v;
}

bool json_scan_number(const char *text, size_t len, size_t pos, struct json_number *ret_num, struct json_fault *ret_fault)
{
    struct json_number n = {.start = pos, .plain = true};
    if (text[pos] == '-') {
        n.negative = true;
        pos++;
    }
    size_t whole = pos;
    pos = skip_digits(text, len, pos);
    if (pos == whole)
        return fault_at(ret_fault, "expected a digit", pos);
    if (text[whole] == '0' && pos - whole > 1)
        return fault_at(ret_fault, "leading zero in a number", whole);
    size_t point = pos, mantissa_end = pos;
    if (pos < len && text[pos] == '.') {
        n.plain = false;
        mantissa_end = skip_digits(text, len, pos + 1);
        if (mantissa_end == pos + 1)
            return fault_at(ret_fault, "expected a digit", pos + 1);
        pos = mantissa_end;
    }
    int64_t exponent = 0;
    if (pos < len && (text[pos] | 0x20) == 'e') {
        n.plain = false;
        size_t digits = pos + 1;
        if (digits < len && (text[digits] == '-' || text[digits] == '+'))
            digits++;
        size_t end = skip_digits(text, len, digits);
        if (end == digits)
            return fault_at(ret_fault, "expected a digit", digits);
        exponent = parse_exponent(text, pos + 1, end);
        pos = end;
    }
    n.end = pos;
    n.digits = whole;
    while (n.digits < mantissa_end && (text[n.digits] == '0' || text[n.digits] == '.'))
        n.digits++;
    if (n.digits == mantissa_end) {
        n.digits = n.end;
        n.magnitude = -MAGNITUDE_MAX;
    } else {
        /* Digits before the point, negative when the first one lies behind zeros of the fraction. */
        int64_t lead = n.digits < point ? (int64_t)(point - n.digits) : -(int64_t)(n.digits - point - 1);
        n.magnitude = clamp_magnitude(lead + exponent);
    }
    *ret_num = n;
    return true;
}

int json_number_int(const char *text, const struct json_number *num, int64_t *ret_value)
{
    if (num->digits == num->end) {
        *ret_value = 0;
        return 0;
    }
    /* The value is 0.d1d2d3... * 10^magnitude: every digit behind the magnitude-th must be zero. */
    int64_t value = 0, taken = 0;
    bool overflow = num->magnitude > 19, fraction = num->magnitude <= 0;
    for (size_t i = num->digits; i < num->end && (text[i] | 0x20) != 'e'; i++) {
        if (text[i] == '.')
            continue;
        int digit = text[i] - '0';
        if (taken++ >= num->magnitude)
            fraction |= digit != 0;
        else if (!overflow)
            overflow = __builtin_mul_overflow(value, (int64_t)10, &value) || __builtin_sub_overflow(value, (int64_t)digit, &value);
    }
    if (fraction)
        return -EINVAL;
    for (; taken < num->magnitude && !overflow; taken++)
        overflow = __builtin_mul_overflow(value, (int64_t)10, &value);
    if (overflow || (!num->negative && value == INT64_MIN))
        return -ERANGE;
    *ret_value = num->negative ? value : -value;
    return 0;
}

/* Numbers of up to 15 digits and small exponents are exact in one division or multiplication (Clinger 1990). */
static bool exact_double(const char *text, const struct json_number *num, double *ret_value)
{
    static const double powers[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                    1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    int64_t value = 0, n_digits = 0;
    for (size_t i = num->digits; i < num->end && (text[i] | 0x20) != 'e'; i++) {
        if (text[i] == '.')
            continue;
        if (++n_digits > 15)
            return false;
        value = value * 10 + (text[i] - '0');
    }
    int64_t exponent = num->magnitude - n_digits;
    if (exponent < -22 || exponent > 22)
        return false;
    double v = exponent < 0 ? (double)value / powers[-exponent] : (double)value * powers[exponent];
    *ret_value = num->negative ? -v : v;
    return true;
}

int json_number_double(const char *text, const struct json_number *num, void *c_locale, double *ret_value)
{
    if (num->digits == num->end) {
        *ret_value = num->negative ? -0.0 : 0.0;
        return 0;
    }
    if (num->magnitude > 400)
        return -ERANGE;
    if (exact_double(text, num, ret_value))
        return 0;
    char local[128];
    size_t n = num->end - num->start;
    char *copy = n < sizeof local ? local : malloc(n + 1);
    if (!copy)
        return -ENOMEM;
    memcpy(copy, text + num->start, n);
    copy[n] = '\0';
    double v = strtod_l(copy, NULL, c_locale);
    if (copy != local)
        free(copy);
    if (isinf(v))
        return -ERANGE;
    *ret_value = v;
    return 0;
}
