#include "proto/base/json_write.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <string.h>

static struct buf out;
static struct json_writer w;

static void setup(void)
{
    buf_init(&out, 1 << 20);
    json_write_begin(&w, &out);
}

static void teardown(void)
{
    buf_fini(&out);
}

TestSuite(json_write, .init = setup, .fini = teardown);

Test(json_write, test_nested_values_get_their_commas)
{
    json_write_object(&w);
    json_write_kstr(&w, "id", "cmpl-1");
    json_write_kint(&w, "n", INT64_MIN);
    json_write_karray(&w, "list");
    json_write_int(&w, 1);
    json_write_object(&w);
    json_write_object_end(&w);
    json_write_array(&w);
    json_write_array_end(&w);
    json_write_str(&w, "x");
    json_write_array_end(&w);
    json_write_kbool(&w, "ok", true);
    json_write_knull(&w, "none");
    json_write_kdouble(&w, "p", -0.5);
    json_write_key(&w, "raw");
    json_write_raw(&w, "{\"a\":1}", 7);
    json_write_kobject(&w, "object");
    json_write_kint(&w, "b", 2);
    json_write_object_end(&w);
    json_write_object_end(&w);
    cr_assert_eq(json_write_end(&w), 0);
    cr_assert_str_eq(buf_cstr(&out), "{\"id\":\"cmpl-1\",\"n\":-9223372036854775808,\"list\":[1,{},[],\"x\"],\"ok\":true,\"none\":null,\"p\":-0.5,\"raw\":{\"a\":1},\"object\":{\"b\":2}}");
}

Test(json_write, test_strings_are_escaped)
{
    json_write_str_n(&w, "a\"b\\c\n\t\r\b\f\x01\0/\x7F", 14);
    cr_assert_eq(json_write_end(&w), 0);
    cr_assert_str_eq(buf_cstr(&out), "\"a\\\"b\\\\c\\n\\t\\r\\b\\f\\u0001\\u0000/\x7F\"");
}

Test(json_write, test_well_formed_utf8_is_kept)
{
    const char *text = "\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80 \xED\x9F\xBF \xF4\x8F\xBF\xBF";
    json_write_str(&w, text);
    cr_assert_eq(json_write_end(&w), 0);
    cr_assert_eq(out.len, strlen(text) + 2);
    cr_assert(memcmp(out.data + 1, text, strlen(text)) == 0);
}

/* Overlong forms, surrogates, beyond U+10FFFF, cut sequences, lone continuation bytes: each bad byte becomes U+FFFD. */
Test(json_write, test_ill_formed_utf8_becomes_replacement)
{
    static const char *const bad[] = {"\xC0\x80", "\xC1\xBF", "\xE0\x9F\x80", "\xED\xA0\x80", "\xF0\x8F\x80\x80", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xE2\x82", "\x80", "\xFF", "\xC3"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        buf_clear(&out);
        json_write_begin(&w, &out);
        json_write_array(&w);
        json_write_str(&w, bad[i]);
        json_write_array_end(&w);
        cr_assert_eq(json_write_end(&w), 0);
        json_t *doc = json_loadb((const char *)out.data, out.len, 0, NULL);
        cr_assert_not_null(doc, "case %zu is valid JSON", i);
        cr_assert(strstr(buf_cstr(&out), "\xEF\xBF\xBD"), "case %zu", i);
        json_decref(doc);
    }
}

Test(json_write, test_doubles_are_the_shortest_that_read_back)
{
    static const struct {
        double v;
        const char *text;
    } cases[] = {{0.1, "0.1"}, {1.0, "1"}, {-0.0, "-0"}, {1e300, "1e+300"}, {1.0 / 3, "0.3333333333333333"}, {0.1 + 0.2, "0.30000000000000004"}, {5e-324, "5e-324"}, {123456789.5, "123456789.5"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char text[JSON_DOUBLE_TEXT];
        cr_assert_eq(json_double_text(cases[i].v, text), (int)strlen(cases[i].text));
        cr_assert_str_eq(text, cases[i].text);
    }
    uint64_t bits = 88172645463325252u;
    for (int i = 0; i < 20000; i++) {
        bits ^= bits << 13, bits ^= bits >> 7, bits ^= bits << 17;
        double v;
        memcpy(&v, &bits, sizeof(v));
        if (!isfinite(v))
            continue;
        char text[JSON_DOUBLE_TEXT];
        json_double_text(v, text);
        cr_assert(strtod(text, NULL) == v, "%s", text);
    }
}

Test(json_write, test_non_finite_numbers_are_null)
{
    json_write_array(&w);
    json_write_double(&w, NAN);
    json_write_double(&w, INFINITY);
    json_write_double(&w, -INFINITY);
    json_write_array_end(&w);
    cr_assert_eq(json_write_end(&w), 0);
    cr_assert_str_eq(buf_cstr(&out), "[null,null,null]");
}

Test(json_write, test_deep_nesting_up_to_the_limit)
{
    for (int i = 0; i < 31; i++)
        json_write_array(&w);
    json_write_object(&w);
    json_write_kint(&w, "a", 1);
    json_write_kint(&w, "b", 2);
    json_write_object_end(&w);
    for (int i = 0; i < 31; i++)
        json_write_array_end(&w);
    cr_assert_eq(json_write_end(&w), 0);
    cr_assert_eq(out.len, 62 + 13);
    json_write_begin(&w, &out);
    for (int i = 0; i < 33; i++)
        json_write_array(&w);
    cr_assert_eq(json_write_end(&w), -EINVAL);
}

Test(json_write, test_misuse_is_reported_at_the_end)
{
    json_write_object(&w);
    json_write_int(&w, 1);
    json_write_object_end(&w);
    cr_assert_eq(json_write_end(&w), -EINVAL, "a value without a key");
    json_write_begin(&w, &out);
    json_write_array(&w);
    json_write_object_end(&w);
    cr_assert_eq(json_write_end(&w), -EINVAL, "the wrong end");
    json_write_begin(&w, &out);
    json_write_array(&w);
    json_write_key(&w, "k");
    cr_assert_eq(json_write_end(&w), -EINVAL, "a key in an array");
    json_write_begin(&w, &out);
    json_write_object(&w);
    cr_assert_eq(json_write_end(&w), -EINVAL, "no end");
    json_write_begin(&w, &out);
    json_write_object(&w);
    json_write_key(&w, "k");
    json_write_object_end(&w);
    cr_assert_eq(json_write_end(&w), -EINVAL, "a key without a value");
}

Test(json_write, test_first_error_wins_when_the_buffer_is_full)
{
    struct buf small;
    buf_init(&small, 8);
    json_write_begin(&w, &small);
    json_write_str(&w, "longer than eight");
    json_write_object_end(&w);
    cr_assert_eq(json_write_end(&w), -ENOBUFS);
    cr_assert_leq(small.len, 8);
    buf_fini(&small);
}
