#include "proto/base/base_assert.h"
#include "router/text/stop_text.h"
#include "proto/base/utf8.h"
#include <criterion/criterion.h>
#include <errno.h>

#define TEXT_MAX 64

static uint64_t random_next(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

static bool ends_with(const uint8_t *text, size_t len, const struct stop_string *stop)
{
    return len >= stop->len && memcmp(text + len - stop->len, stop->text, stop->len) == 0;
}

/* What the text comes to, by looking at all of it: the stop string that ends first, of several the longest. */
static int expected(const uint8_t *text, size_t len, const struct stop_string stops[], size_t n, bool include, struct buf *out)
{
    for (size_t end = 1; end <= len; end++) {
        int best = -1;
        for (size_t i = 0; i < n; i++)
            if (ends_with(text, end, &stops[i]) && (best < 0 || stops[i].len > stops[best].len))
                best = (int)i;
        if (best >= 0) {
            size_t start = end - stops[best].len;
            utf8_append_text(out, text, start, true);
            if (include)
                buf_append(out, stops[best].text, stops[best].len);
            return best;
        }
    }
    utf8_append_text(out, text, len, true);
    return -1;
}

/* How many bytes at the end must wait: the longest end that begins a stop string, or an incomplete character before it. */
static size_t must_wait(const uint8_t *text, size_t len, const struct stop_string stops[], size_t n)
{
    size_t wait = 0, part;
    for (size_t k = 1; k <= len; k++)
        for (size_t i = 0; i < n; i++)
            if (k < stops[i].len && memcmp(text + len - k, stops[i].text, k) == 0)
                wait = k;
    if (wait == 0)
        for (size_t at = 0; at < len; at += part)
            if (utf8_next(text + at, len - at, &part) == UTF8_PARTIAL)
                wait = part;
    return wait;
}

/* Pushes the text cut at the bits of `cuts`, and holds what comes out against the whole. */
static void check_split(const uint8_t *text, size_t len, uint64_t cuts, const struct stop_string stops[], size_t n, bool include)
{
    struct stop_text *s;
    struct buf out, want, sure;
    buf_init(&out, 4096);
    buf_init(&want, 4096);
    buf_init(&sure, 4096);
    int best = expected(text, len, stops, n, include, &want), r = 0;
    cr_assert_eq(stop_text_create(stops, n, include, &s), 0);
    for (size_t start = 0, end; start < len; start = end) {
        for (end = start + 1; end < len && !(cuts >> (end % 64) & 1); end++)
            ;
        r = stop_text_push(s, text + start, end - start, true, &out);
        cr_assert_geq(r, 0);
        if (r == 1)
            break;
        /* Nothing is held back longer than it must be. */
        buf_clear(&sure);
        utf8_append_text(&sure, text, end - must_wait(text, end, stops, n), true);
        cr_assert(out.len == sure.len && memcmp(out.data ? out.data : text, sure.data ? sure.data : text, out.len) == 0, "after %zu bytes", end);
    }
    cr_assert_eq(r, best >= 0);
    cr_assert_eq(stop_text_flush(s, &out), 0);
    cr_assert_eq(stop_text_matched(s), best);
    cr_assert_str_eq(buf_cstr(&out), buf_cstr(&want));
    stop_text_free(s);
    buf_fini(&out);
    buf_fini(&want);
    buf_fini(&sure);
}

#define STOP(t) {.text = (t), .len = sizeof(t) - 1}

Test(stop_text, test_every_split_of_short_texts)
{
    static const struct stop_string stops[] = {STOP("abc"), STOP("bd"), STOP("cab"), STOP("\xc3\xa9")};
    static const char *const texts[] = {"xababcab", "aabbccabd", "abcabc", "\xc3\xa8\xc3\xa9x", "ab\xc3", "\xe2\x82\xac" "bd", "ca\xf0\x9f\x98\x80" "b", "a\xff" "bc"};
    for (size_t i = 0; i < ARRAY_LEN(texts); i++)
        for (uint64_t cuts = 0; cuts < 1u << strlen(texts[i]); cuts++)
            for (size_t n = 0; n <= ARRAY_LEN(stops); n++)
                check_split((const uint8_t *)texts[i], strlen(texts[i]), cuts, stops, n, cuts & 1);
}

Test(stop_text, test_random_texts_and_splits)
{
    /* Few different bytes, so that stop strings and their beginnings are everywhere, whole characters, halves of them and rubbish. */
    static const char *const pieces[] = {"a", "b", "a", "b", "\xc3\xa9", "\xc3", "\xa9", "\xe2\x82\xac", "\xe2\x82", "\xf0\x9f\x98\x80", "\xf0\x9f", "\xff"};
    static const struct stop_string all[] = {STOP("ab"), STOP("aab"), STOP("bab"), STOP("abab"), STOP("\xc3\xa9" "a"), STOP("b\xe2\x82\xac"), STOP("a\xc3\xa9"), STOP("\xf0\x9f\x98\x80\xf0\x9f\x98\x80"), STOP("bbbb")};
    uint64_t rng = 3;
    for (int round = 0; round < 30000; round++) {
        uint8_t text[TEXT_MAX];
        size_t len = 0, n = random_next(&rng) % 4;
        struct stop_string stops[4];
        for (size_t i = 0; i < n; i++)
            stops[i] = all[random_next(&rng) % ARRAY_LEN(all)];
        for (uint64_t k = random_next(&rng) % 14; k > 0; k--) {
            const char *piece = pieces[random_next(&rng) % ARRAY_LEN(pieces)];
            memcpy(text + len, piece, strlen(piece));
            len += strlen(piece);
        }
        check_split(text, len, random_next(&rng), stops, n, random_next(&rng) & 1);
    }
}

Test(stop_text, test_no_stop_string_begins_before_it_may)
{
    static const struct stop_string stops[] = {STOP("END")};
    struct stop_text *s;
    struct buf out;
    buf_init(&out, 4096);
    cr_assert_eq(stop_text_create(stops, 1, false, &s), 0);
    cr_assert_eq(stop_text_push(s, "END E", 5, false, &out), 0);
    cr_assert_str_eq(buf_cstr(&out), "END E");
    cr_assert_eq(stop_text_push(s, "ND ENDx", 7, true, &out), 1);
    cr_assert_str_eq(buf_cstr(&out), "END END ");
    cr_assert_eq(stop_text_push(s, "more", 4, true, &out), 1);
    cr_assert_str_eq(buf_cstr(&out), "END END ");
    stop_text_free(s);
    buf_fini(&out);
}

Test(stop_text, test_limits_of_stop_strings)
{
    struct stop_text *s;
    char longest[STOP_STRING_BYTES_MAX + 1];
    struct stop_string many[STOP_STRINGS_MAX + 1];
    memset(longest, 'a', sizeof longest);
    for (size_t i = 0; i < ARRAY_LEN(many); i++)
        many[i] = (struct stop_string){.text = longest, .len = i + 1};
    cr_assert_eq(stop_text_create(many, ARRAY_LEN(many), false, &s), -E2BIG);
    cr_assert_eq(stop_text_create(many, STOP_STRINGS_MAX, false, &s), 0);
    stop_text_free(s);
    cr_assert_eq(stop_text_create(&(struct stop_string){.text = longest, .len = sizeof longest}, 1, false, &s), -E2BIG);
    cr_assert_eq(stop_text_create(&(struct stop_string){.text = longest, .len = 0}, 1, false, &s), -EINVAL);
    cr_assert_eq(stop_text_create(&(struct stop_string){.text = "\xff", .len = 1}, 1, false, &s), -EINVAL);
}
