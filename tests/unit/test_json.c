#include "formats/json.h"
#include "proto/base/base_assert.h"
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>

/* jansson's function names are ours too, so it is loaded at run time and never linked. */
struct jansson {
    void *library;
    void *(*loadb)(const char *text, size_t len, size_t flags, void *error);
    char *(*dumps)(const void *value, size_t flags);
    void (*delete)(void *value);
};
enum { REJECT_DUPLICATES = 0x1, DECODE_ANY = 0x4, ALLOW_NUL = 0x10 };   /* decoding */
enum { COMPACT = 0x20, SORT_KEYS = 0x80, ENCODE_ANY = 0x200 };          /* encoding */

static struct jansson load_jansson(void)
{
    struct jansson lib = {.library = dlopen("libjansson.so.4", RTLD_NOW | RTLD_LOCAL)};
    cr_assert(lib.library, "%s", dlerror());
    lib.loadb = (void *(*)(const char *, size_t, size_t, void *))dlsym(lib.library, "json_loadb");
    lib.dumps = (char *(*)(const void *, size_t))dlsym(lib.library, "json_dumps");
    lib.delete = (void (*)(void *))dlsym(lib.library, "json_delete");
    cr_assert(lib.loadb && lib.dumps && lib.delete);
    return lib;
}

/* The canonical form that jansson gives a text, or NULL if it refuses it. */
static char *canonical(const struct jansson *lib, const char *text, size_t len)
{
    char error[512];
    void *value = lib->loadb(text, len, REJECT_DUPLICATES | DECODE_ANY | ALLOW_NUL, error);
    if (!value)
        return NULL;
    char *dump = lib->dumps(value, COMPACT | SORT_KEYS | ENCODE_ANY);
    lib->delete(value);
    cr_assert(dump);
    return dump;
}

struct out {
    char *data;
    size_t len, cap;
};

static void put(struct out *o, const char *s, size_t n)
{
    if (o->cap - o->len < n + 1) {
        o->cap = (o->len + n + 1) * 2;
        o->data = realloc(o->data, o->cap);
        cr_assert(o->data);
    }
    memcpy(o->data + o->len, s, n);
    o->len += n;
    o->data[o->len] = '\0';
}

static void put_string(struct out *o, const struct json_str *s)
{
    put(o, "\"", 1);
    for (size_t i = 0; i < s->len; i++) {
        char escape[8];
        unsigned char c = (unsigned char)s->data[i];
        if (c < 0x20 || c == '"' || c == '\\')
            put(o, escape, (size_t)snprintf(escape, sizeof escape, "\\u%04x", c));
        else
            put(o, s->data + i, 1);
    }
    put(o, "\"", 1);
}

static void put_number(struct json *j, struct out *o)
{
    char text[64];
    struct json_str raw;
    struct json copy = *j;
    if (json_raw(&copy, &raw) < 0 || memchr(raw.data, '.', raw.len) || memchr(raw.data, 'e', raw.len) || memchr(raw.data, 'E', raw.len)) {
        double v = 0;
        json_double(j, &v);
        put(o, text, (size_t)snprintf(text, sizeof text, "%.17e", v));
    } else {
        int64_t v = 0;
        json_int(j, &v);
        put(o, text, (size_t)snprintf(text, sizeof text, "%" PRId64, v));
    }
}

/* Reads any value with the walking calls and writes it again in a form of its own. */
static void rewrite(struct json *j, struct out *o)
{
    struct json_str s;
    bool b = false, first = true;
    switch (json_peek(j)) {
    case JSON_OBJECT:
        json_object(j);
        put(o, "{", 1);
        while (json_next_key(j, &s)) {
            if (!first)
                put(o, ",", 1);
            first = false;
            put_string(o, &s);
            put(o, ":", 1);
            rewrite(j, o);
        }
        put(o, "}", 1);
        break;
    case JSON_ARRAY:
        json_array(j);
        put(o, "[", 1);
        while (json_next_item(j)) {
            if (!first)
                put(o, ",", 1);
            first = false;
            rewrite(j, o);
        }
        put(o, "]", 1);
        break;
    case JSON_STRING:
        if (json_string(j, &s) == 0)
            put_string(o, &s);
        break;
    case JSON_NUMBER: put_number(j, o); break;
    case JSON_BOOL:
        if (json_bool(j, &b) == 0)
            put(o, b ? "true" : "false", b ? 4 : 5);
        break;
    case JSON_NULL:
        json_null(j);
        put(o, "null", 4);
        break;
    case JSON_ERROR: break;
    }
}

static int skip_all(const char *text, size_t len)
{
    struct json j;
    json_init(&j, text, len);
    json_skip(&j);
    int r = json_end(&j);
    json_fini(&j);
    return r;
}

/* Both parsers accept the text and read the same value, or both refuse it. The known differences: jansson nests deeper than 64, has no keys
 * with NUL and takes a NUL byte behind the value for the end of the text. */
static void compare(const struct jansson *lib, const char *text, size_t len)
{
    struct json j;
    struct out o = {0};
    json_init(&j, text, len);
    rewrite(&j, &o);
    int r = json_end(&j);
    int skipped = skip_all(text, len);
    char *theirs = canonical(lib, text, len);
    if (r == 0) {
        char *ours = canonical(lib, o.data, o.len);
        cr_assert_eq(skipped, 0, "walked but not skipped: %.*s", (int)len, text);
        if (theirs)
            cr_assert_str_eq(ours, theirs, "of %.*s", (int)len, text);
        else
            cr_assert_null(ours, "accepted only here: %.*s", (int)len, text);
        free(ours);
    } else if (theirs && !memchr(text, 0, len)) {
        cr_assert_str_eq(j.error_text, "nested too deeply", "refused only here (%s at %zu): %.*s", j.error_text, j.error_pos, (int)len, text);
    }
    if (skipped == 0 && r < 0)
        cr_assert(strcmp(j.error_text, "duplicate key") == 0 || r == -ERANGE, "skipped but not walked: %.*s", (int)len, text);
    json_fini(&j);
    free(o.data);
    free(theirs);
}

static const char *const corpus[] = {
    "", " ", "null", "true", "false", "nul", "truth", "tru", "[]", "{}", "[ ]", "{ }", " [1 , 2] ", "[1,]", "[,1]", "[1 2]", "{\"a\":1,}", "{,}", "{\"a\"}", "{\"a\":}",
    "{a:1}", "{\"a\":1 \"b\":2}", "{\"a\":1,\"a\":2}", "{\"a\":1,\"\\u0061\":2}", "{\"a\":{\"a\":1},\"b\":{\"a\":2}}", "[1]x", "[1]]", "[", "{", "\"", "\"\\", "]", "}",
    "0", "-0", "-", "+1", "01", "-01", "1.", ".5", "1.5", "1e5", "1E+5", "1e-5", "1e", "1e+", "1e999", "-1e999", "1e-999", "0e999", "0.0e5", "123456789012345678",
    "9223372036854775807", "-9223372036854775808", "9223372036854775808", "-9223372036854775809", "1e18", "1.7976931348623157e308", "1.7976931348623159e308", "4.9e-324",
    "0.1", "3.141592653589793238462643383279", "1e22", "1e23", "123456789.123456789e10", "NaN", "Infinity", "-Infinity", "0x10",
    "\"abc\"", "\"a\\nb\\t\\\"\\\\\\/\\b\\f\\r\"", "\"\\u0041\\u00e9\\u20ac\"", "\"\\ud83d\\ude00\"", "\"\\ud83d\"", "\"\\ude00\"", "\"\\ud83dx\"", "\"\\ud83d\\u0041\"",
    "\"\\u12\"", "\"\\x41\"", "\"\\u00zz\"", "\"\\u0000\"", "{\"\\u0000\":1}", "\"\x01\"", "\"a\nb\"", "\"\x7f\"", "\"\xc3\xa9\"", "\"\xe2\x82\xac\"", "\"\xf0\x9f\x98\x80\"",
    "\"\xc0\x80\"", "\"\xed\xa0\x80\"", "\"\xf4\x90\x80\x80\"", "\"\xff\"", "\"\xe2\x82\"", "\"\x80\"", "\"\xf8\x88\x80\x80\x80\"", "\xef\xbb\xbf[]", "'a'", "[\"a\",'b']", "// c\n1", "[1,/*c*/2]",
    "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"Gr\xc3\xbc\xc3\x9f dich, Welt! \\ud83d\\ude00\"}],\"temperature\":0.7,\"stream\":true,\"max_tokens\":128,\"stop\":null,\"logit_bias\":{\"15\":-100,\"16\":1.5e1}}",
    "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]",    "[123456789012345678,1234567890123456789,-123456789012345678,-0,-1,00]", "[123456789012345678,-0,-1,7]", "[1.0e1,2.50,-3e-2,1E2,0.000001,100000000000000000000.5]", "{\"k1\":1,\"k2\":2,\"k3\":3,\"k4\":4,\"k5\":5,\"k6\":6,\"k7\":7,\"k8\":8,\"k9\":9,\"k10\":10,\"k11\":[],\"k12\":{}}",
};

Test(json, test_corpus_agrees_with_jansson)
{
    struct jansson lib = load_jansson();
    for (size_t i = 0; i < ARRAY_LEN(corpus); i++)
        compare(&lib, corpus[i], strlen(corpus[i]));
    compare(&lib, "\"a\0b\"", 5);
    compare(&lib, "1\0", 2);
}

static uint64_t random_next(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

/* Replaces, drops or inserts a few bytes; insertions prefer what the grammar is made of. */
static size_t mutate(uint64_t *rng, char *text, size_t len, size_t cap)
{
    static const char *const pieces[] = {"\"", "\\", "{", "}", "[", "]", ",", ":", "0", "9", "-", ".", "e", "E+", "\\u", "\\ud800", "\\udc00", "null", "true", " ", "\t", "\xc3", "\xa9",
                                         "\xed\xa0\x80", "\xf0\x9f\x98\x80", "\x1f", "\x80", "1e308", "99999999999999999999", "{\"a\":", "\"a\":1,", "[1,"};
    for (uint64_t n = random_next(rng) % 4 + 1; n > 0; n--) {
        size_t at = len ? random_next(rng) % (len + 1) : 0;
        switch (random_next(rng) % 4) {
        case 0:
            if (at < len)
                text[at] = (char)random_next(rng);
            break;
        case 1:
            if (at < len) {
                size_t cut = random_next(rng) % (len - at < 4 ? len - at : 4) + 1;
                memmove(text + at, text + at + cut, len - at - cut);
                len -= cut;
            }
            break;
        default: {
            const char *piece = pieces[random_next(rng) % ARRAY_LEN(pieces)];
            size_t size = strlen(piece);
            if (len + size > cap)
                break;
            memmove(text + at + size, text + at, len - at);
            memcpy(text + at, piece, size);
            len += size;
        }
        }
    }
    return len;
}

Test(json, test_mutated_inputs_agree_with_jansson, .timeout = 100)
{
    struct jansson lib = load_jansson();
    uint64_t rng = 1;
    for (int round = 0; round < 150000; round++) {
        const char *seed = corpus[random_next(&rng) % ARRAY_LEN(corpus)];
        char text[1024];
        size_t len = strlen(seed);
        memcpy(text, seed, len);
        len = mutate(&rng, text, len, sizeof text);
        char *exact = malloc(len ? len : 1); /* so that a sanitizer sees every byte read too far */
        memcpy(exact, text, len);
        compare(&lib, exact, len);
        free(exact);
    }
}

Test(json, test_random_doubles_read_back)
{
    uint64_t rng = 7;
    for (int i = 0; i < 200000; i++) {
        uint64_t bits = random_next(&rng);
        double want, got;
        memcpy(&want, &bits, sizeof want);
        if (!isfinite(want))
            continue;
        char text[64];
        int n = snprintf(text, sizeof text, i % 3 ? "%.17g" : "%.15e", want);
        want = strtod(text, NULL);
        struct json j;
        json_init(&j, text, (size_t)n);
        cr_assert_eq(json_double(&j, &got), 0, "%s", text);
        cr_assert_eq(memcmp(&want, &got, sizeof want), 0, "%s", text);
        cr_assert_eq(json_end(&j), 0);
        json_fini(&j);
    }
}

static int read_int(const char *text, int64_t *ret_value)
{
    struct json j;
    json_init(&j, text, strlen(text));
    int r = json_int(&j, ret_value);
    json_fini(&j);
    return r;
}

Test(json, test_integers_written_as_fractions)
{
    int64_t v = 0;
    cr_assert_eq(read_int("1.0", &v), 0);
    cr_assert_eq(v, 1);
    cr_assert_eq(read_int("-12.50e1", &v), 0);
    cr_assert_eq(v, -125);
    cr_assert_eq(read_int("0.05e2", &v), 0);
    cr_assert_eq(v, 5);
    cr_assert_eq(read_int("9.223372036854775807e18", &v), 0);
    cr_assert_eq(v, INT64_MAX);
    cr_assert_eq(read_int("0e99999999999999999999", &v), 0);
    cr_assert_eq(v, 0);
    cr_assert_eq(read_int("1.5", &v), -EINVAL);
    cr_assert_eq(read_int("1e-1", &v), -EINVAL);
    cr_assert_eq(read_int("1e19", &v), -ERANGE);
    cr_assert_eq(read_int("-1e99999999999999999999", &v), -ERANGE);
}

Test(json, test_errors_carry_position_and_stick)
{
    struct json j;
    struct json_str key;
    int64_t v = 77;
    const char *text = "{\"n\": \"x\"}";
    json_init(&j, text, strlen(text));
    json_object(&j);
    cr_assert(json_next_key(&j, &key));
    cr_assert(json_str_eq(&key, "n"));
    cr_assert_eq(json_int(&j, &v), -EINVAL);
    cr_assert_eq(v, 77);
    cr_assert_not(json_next_key(&j, &key));
    cr_assert_eq(json_skip(&j), -EINVAL);
    cr_assert_eq(json_end(&j), -EINVAL);
    cr_assert_str_eq(j.error_text, "expected a number");
    cr_assert_eq(j.error_pos, 6);
    json_fini(&j);
}

Test(json, test_nesting_has_a_limit_when_walked_and_skipped)
{
    char text[400];
    memset(text, '[', 200);
    memset(text + 200, ']', 200);
    cr_assert_eq(skip_all(text + 136, 128), 0);
    cr_assert_eq(skip_all(text + 135, 130), -EINVAL);
    struct json j;
    json_init(&j, text + 136, 128);
    for (int i = 0; i < 64; i++)
        cr_assert_eq(json_array(&j), 0);
    cr_assert_not(json_next_item(&j));
    cr_assert_eq(j.error, 0);
    json_fini(&j);
    json_init(&j, text + 135, 130);
    for (int i = 0; i < 64; i++)
        cr_assert_eq(json_array(&j), 0);
    cr_assert_eq(json_array(&j), -EINVAL);
    json_fini(&j);
}

Test(json, test_many_keys_and_raw_values)
{
    struct out o = {0};
    char item[64];
    put(&o, "{", 1);
    for (int i = 0; i < 20000; i++)
        put(&o, item, (size_t)snprintf(item, sizeof item, "%s\"key\\u002d%d\":[%d]", i ? "," : "", i, i));
    put(&o, "}", 1);
    struct json j;
    struct json_str key, raw;
    json_init(&j, o.data, o.len);
    json_object(&j);
    int n = 0;
    while (json_next_key(&j, &key)) {
        cr_assert_eq(json_raw(&j, &raw), 0);
        int len = snprintf(item, sizeof item, "key-%d", n);
        cr_assert(key.len == (size_t)len && memcmp(key.data, item, key.len) == 0);
        len = snprintf(item, sizeof item, "[%d]", n++);
        cr_assert(raw.len == (size_t)len && memcmp(raw.data, item, raw.len) == 0);
    }
    cr_assert_eq(json_end(&j), 0);
    cr_assert_eq(n, 20000);
    json_fini(&j);

    o.data[o.len - 1] = ',';
    put(&o, "\"key-777\":0}", 12);
    json_init(&j, o.data, o.len);
    json_object(&j);
    while (json_next_key(&j, &key))
        json_skip(&j);
    cr_assert_eq(json_end(&j), -EINVAL);
    cr_assert_str_eq(j.error_text, "duplicate key");
    json_fini(&j);
    free(o.data);
}
