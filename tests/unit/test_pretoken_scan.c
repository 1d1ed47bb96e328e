/* Every hand-written scanner against the regular expression it stands for, run by Oniguruma. */
#include "proto/base/base_assert.h"
#include "router/text/char_class.h"
#include "router/text/pretoken_scan.h"
#include "router/text/text_regex.h"
#include "proto/base/utf8.h"
#include <criterion/criterion.h>
#include <errno.h>

static uint64_t random_next(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

/* The end of the piece that Split with behaviour Isolated makes at `pos`. */
static size_t piece_by_regex(struct regex_matcher *m, const struct regex *re, const uint8_t *text, size_t len, size_t pos)
{
    size_t start, stop;
    int r = regex_search(m, re, text, len, pos, &start, &stop);
    cr_assert_geq(r, 0);
    return r == 0 ? len : start > pos ? start : stop;
}

static void hold_together(const struct scan_pattern *p, struct regex_matcher *m, const struct regex *re, const char *text, size_t len)
{
    uint8_t *exact = malloc(len ? len : 1); /* a sanitizer then sees a scanner that reads past the end */
    cr_assert(exact);
    memcpy(exact, text, len);
    for (size_t pos = 0; pos < len;) {
        size_t want = piece_by_regex(m, re, exact, len, pos), got = p->scan(exact, pos, len);
        cr_assert_eq(got, want, "pattern %s at %zu: piece ends at %zu, by the regular expression at %zu, in <%.*s>", p->pattern, pos, got, want, (int)len, text);
        pos = want;
    }
    free(exact);
}

static void with_each_pattern(void (*check)(const struct scan_pattern *, struct regex_matcher *, const struct regex *))
{
    cr_assert_eq(char_table_init(), 0);
    struct regex_matcher m;
    cr_assert_eq(regex_matcher_init(&m, 100 << 20), 0);
    for (size_t i = 0; i < n_scan_patterns; i++) {
        struct regex *re;
        struct error err;
        cr_assert_eq(regex_compile(scan_patterns[i].pattern, strlen(scan_patterns[i].pattern), &re, &err), 0, "%s", err.text);
        check(&scan_patterns[i], &m, re);
        regex_free(re);
    }
    regex_matcher_fini(&m);
}

static void check_random_characters(const struct scan_pattern *p, struct regex_matcher *m, const struct regex *re)
{
    /* Characters of every class a pattern speaks of, and neighbours of the ranges. */
    static const uint32_t chars[] = {'a', 'b', 'Z', 's', 'S', 't', 'm', 'd', 'l', 'L', 'v', 'e', 'r', 'R', 'E', '1', '2', ' ', ' ', ' ', '\n', '\r', '\t', '\'', '\'', '/', '.', '$', '_', '\\', '{',
                                     0x0b, 0x0, 0x7f, 0x85, 0xa0, 0xb2, 0xaa, 0xdf, 0xe9, 0xc9, 0x17f, 0x1c5, 0x2b0, 0x301, 0x345, 0x3a3, 0x416, 0x436, 0x5d0, 0x661, 0x903, 0x20ac, 0x200b, 0x200d,
                                     0x2028, 0x212a, 0x2160, 0x3000, 0x3040, 0x309f, 0x30ff, 0x3100, 0x4dff, 0x4e00, 0x9fa5, 0x9fa6, 0xac00, 0xe000, 0xfb05, 0xfffd, 0xffff, 0x10400, 0x10428, 0x1d165,
                                     0x1d7ce, 0x1f600, 0x20000, 0xe0001, 0x10ffff};
    uint64_t rng = 11;
    for (int round = 0; round < 6000; round++) {
        char text[256];
        size_t len = 0;
        for (uint64_t n = random_next(&rng) % 40; n > 0; n--)
            len += utf8_put(chars[random_next(&rng) % ARRAY_LEN(chars)], (uint8_t *)text + len);
        hold_together(p, m, re, text, len);
    }
}

Test(pretoken_scan, test_scanners_equal_oniguruma_on_random_characters, .timeout = 100)
{
    with_each_pattern(check_random_characters);
}

static void check_all_characters(const struct scan_pattern *p, struct regex_matcher *m, const struct regex *re)
{
    for (uint32_t base = 0; base < 0x110000; base += 61) {
        char text[512];
        size_t len = 0;
        for (uint32_t c = base; c < base + 61 && c < 0x110000; c++) {
            if (c >= 0xd800 && c <= 0xdfff)
                continue;
            text[len++] = "a 1"[c % 3];
            len += utf8_put(c, (uint8_t *)text + len);
        }
        hold_together(p, m, re, text, len);
    }
}

Test(pretoken_scan, test_scanners_equal_oniguruma_on_every_character, .timeout = 100)
{
    with_each_pattern(check_all_characters);
}

static void check_real_text(const struct scan_pattern *p, struct regex_matcher *m, const struct regex *re)
{
    static const char *const texts[] = {
        "I'm sure you'll see that they've gone; he'd said \"IT'S LATE\" 1,234.50 times!\r\n\r\n\tint main(void) { return 0; } // done\n",
        "    indented\n        more\n\n\n  \n trailing   ",
        "Gr\xc3\xbc\xc3\x9f" "e aus K\xc3\xb6ln, na\xc3\xafve caf\xc3\xa9 \xe2\x80\x94 \xe2\x82\xac" "12,50 \xc2\xb2\xc2\xb3",
        "\xe4\xbd\xa0\xe5\xa5\xbd\xef\xbc\x8c\xe4\xb8\x96\xe7\x95\x8c\xe3\x80\x82\xe3\x81\x93\xe3\x82\x93\xe3\x81\xab\xe3\x81\xa1\xe3\x81\xaf 123\xe5\xb9\xb4",
        "\xd0\x9f\xd1\x80\xd0\xb8\xd0\xb2\xd0\xb5\xd1\x82 \xd0\xbc\xd0\xb8\xd1\x80! \xd7\xa9\xd7\x9c\xd7\x95\xd7\x9d \xd9\x85\xd8\xb1\xd8\xad\xd8\xa8\xd8\xa7 \xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa7 e\xcc\x81",
        "https://example.org/a/b?c=d&e=f#g HTTPServer camelCase snake_case XMLHttpRequest ABCdef ABC 3.14e-10 $(cat /etc/passwd)",
    };
    for (size_t i = 0; i < ARRAY_LEN(texts); i++)
        hold_together(p, m, re, texts[i], strlen(texts[i]));
}

Test(pretoken_scan, test_scanners_equal_oniguruma_on_real_text)
{
    with_each_pattern(check_real_text);
}

Test(pretoken_scan, test_pattern_that_runs_away_is_cut_off)
{
    struct regex *re;
    struct regex_matcher m;
    struct error err;
    cr_assert_eq(regex_init(), 0);
    cr_assert_eq(regex_matcher_init(&m, 100 << 20), 0);
    cr_assert_eq(regex_compile("(?:a|aa)+[cd]", 13, &re, &err), 0);
    char text[4000];
    memset(text, 'a', sizeof text);
    size_t start, stop;
    cr_assert_eq(regex_search(&m, re, (const uint8_t *)text, sizeof text, 0, &start, &stop), -EINVAL);
    regex_free(re);
    regex_matcher_fini(&m);
    cr_assert_eq(regex_compile("(a", 2, &re, &err), -EINVAL);
}
