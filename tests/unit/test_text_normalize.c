#include "proto/base/base_assert.h"
#include "router/text/char_class.h"
#include "router/text/unicode_form.h"
#include "proto/base/utf8.h"
#include <criterion/criterion.h>
#include <stdlib.h>
#include <utf8proc.h>

static uint64_t random_next(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

static const int options[] = {
    [UNICODE_NFC] = UTF8PROC_STABLE | UTF8PROC_COMPOSE,
    [UNICODE_NFD] = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE,
    [UNICODE_NFKC] = UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT,
    [UNICODE_NFKD] = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT,
};

/* The whole text in one call of the library. */
static void hold_against_utf8proc(const uint8_t *text, size_t len)
{
    int32_t *chars = NULL;
    size_t cap = 0;
    for (enum unicode_form form = UNICODE_NFC; form <= UNICODE_NFKD; form++) {
        struct buf out;
        utf8proc_uint8_t *want;
        buf_init(&out, 1 << 24);
        utf8proc_ssize_t n = utf8proc_map(text, (utf8proc_ssize_t)len, &want, (utf8proc_option_t)options[form]);
        cr_assert_geq(n, 0);
        cr_assert_eq(unicode_form_append(form, text, len, &chars, &cap, &out), 0);
        cr_assert(out.len == (size_t)n && memcmp(buf_cstr(&out), want, out.len) == 0, "form %d of <%.*s>", (int)form, (int)len, (const char *)text);
        size_t stable = unicode_form_stable(form, text, len);
        cr_assert(stable <= out.len && memcmp(buf_cstr(&out), text, stable) == 0);
        free(want);
        buf_fini(&out);
    }
    free(chars);
}

Test(text_normalize, test_every_character_between_others)
{
    static const uint32_t before[] = {'a', 0x1100, 0x3046, 0x9c7};
    cr_assert_eq(unicode_form_init(), 0);
    for (uint32_t c = 0; c < 0x110000; c++) {
        if (c >= 0xd800 && c <= 0xdfff)
            continue;
        if (c > 0x3000 && c < 0xa000 && c % 16)
            continue; /* thousands of Han characters that are all alike */
        if (c > 0x30000 && c % 256)
            continue;
        uint8_t text[16];
        size_t len = utf8_put(before[c % ARRAY_LEN(before)], text);
        len += utf8_put(c, text + len);
        len += utf8_put(0x301, text + len);
        hold_against_utf8proc(text, len);
    }
}

Test(text_normalize, test_random_sequences)
{
    static const uint32_t chars[] = {'a', 'e', 'o', 'A', ' ', 0x300, 0x301, 0x323, 0x327, 0x345, 0x344, 0xe9, 0x1e69, 0x1100, 0x1161, 0x11a8, 0xac00, 0xac01, 0x3046, 0x3099, 0x9c7, 0x9be, 0x9d7, 0xfb01, 0x2126, 0x212b,
                                     0xfdfa, 0x915, 0x93c, 0x958, 0x1d15e, 0x1d165, 0x4e00, 0xf900, 0x1f600, 0x41f, 0x438, 0x306};
    uint64_t rng = 17;
    cr_assert_eq(unicode_form_init(), 0);
    for (int round = 0; round < 20000; round++) {
        uint8_t text[128];
        size_t len = 0;
        for (uint64_t n = random_next(&rng) % 16; n > 0; n--)
            len += utf8_put(chars[random_next(&rng) % ARRAY_LEN(chars)], text + len);
        hold_against_utf8proc(text, len);
    }
}

Test(text_normalize, test_long_runs_of_marks_are_ordered)
{
    static uint8_t text[4000];
    uint64_t rng = 4;
    static const uint32_t marks[] = {0x301, 0x323, 0x327, 0x345, 0x35c, 0x5b0, 0x64b};
    size_t len = utf8_put('a', text);
    while (len + 4 < sizeof text)
        len += utf8_put(marks[random_next(&rng) % ARRAY_LEN(marks)], text + len);
    cr_assert_eq(unicode_form_init(), 0);
    hold_against_utf8proc(text, len);
}

Test(text_normalize, test_character_classes)
{
    cr_assert_eq(char_table_init(), 0);
    cr_assert_eq(char_class_of('a'), CHAR_L | CHAR_LOWER | CHAR_WORD);
    cr_assert_eq(char_class_of('Z'), CHAR_L | CHAR_UPPER | CHAR_WORD);
    cr_assert_eq(char_class_of('\n'), CHAR_SPACE | CHAR_NEWLINE);
    cr_assert_eq(char_class_of(0x4e00), CHAR_L | CHAR_UPPER | CHAR_LOWER | CHAR_WORD);
    cr_assert_eq(char_class_of(0x301), CHAR_M | CHAR_UPPER | CHAR_LOWER | CHAR_WORD);
    cr_assert_eq(char_class_of('5'), CHAR_N | CHAR_WORD);
    cr_assert_eq(char_class_of('$'), CHAR_S);
    cr_assert_eq(char_class_of('_'), CHAR_P | CHAR_WORD);
    cr_assert_eq(char_class_of(0xa0), CHAR_SPACE);
    cr_assert_eq(char_class_of(0x10ffff), 0);
}
