#include "formats/gguf.h"
#include "gguf_build.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* A file with every kind of value and two tensors. */
static void build_sample(struct gguf_build *b)
{
    static const char *const words[] = {"a", "", "hello"};
    static const uint64_t shape_a[] = {32, 4}, shape_b[] = {5};
    float values[5] = {1, 2, 3, 4, 5};
    uint64_t big = UINT64_MAX;
    int8_t minus = -3;
    gguf_build_init(b);
    gguf_build_u32(b, "n", 7);
    gguf_build_f32(b, "f", 0.5f);
    gguf_build_bool(b, "flag", true);
    gguf_build_str(b, "text", "value");
    gguf_build_strings(b, "words", words, 3);
    gguf_build_raw(b, "big", 10, &big, 8);
    gguf_build_raw(b, "minus", 1, &minus, 1);
    gguf_build_tensor(b, "a.weight", 8, 2, shape_a, NULL, 4 * 34);
    gguf_build_tensor(b, "b", 0, 1, shape_b, values, sizeof(values));
}

static void finish(struct gguf_build *b, struct buf *file)
{
    buf_init(file, 1 << 20);
    gguf_build_finish(b, file);
    gguf_build_fini(b);
}

static void check_refused(const struct buf *file, const char *expected)
{
    struct gguf *g = NULL;
    struct error err = {0};
    cr_expect_eq(gguf_open_memory(file->data, file->len, &g, &err), -EINVAL, "accepted, expected \"%s\"", expected);
    cr_expect(strstr(err.text, expected), "\"%s\" does not contain \"%s\"", err.text, expected);
    cr_expect_null(g);
}

/* Builds a file with one entry or tensor made by the caller and checks that it is refused. */
static void check_build_refused(struct gguf_build *b, const char *expected)
{
    struct buf file;
    finish(b, &file);
    check_refused(&file, expected);
    buf_fini(&file);
}

Test(gguf, values_and_tensors_are_found)
{
    struct gguf_build b;
    struct buf file;
    struct gguf *g;
    struct error err;
    uint64_t u;
    double d;
    bool flag;
    struct gguf_str s;
    build_sample(&b);
    finish(&b, &file);
    cr_assert_eq(gguf_open_memory(file.data, file.len, &g, &err), 0, "%s", err.text);
    cr_expect(gguf_get_u64(g, "n", &u) == 0 && u == 7);
    cr_expect(gguf_get_f64(g, "f", &d) == 0 && d == 0.5);
    cr_expect(gguf_get_f64(g, "minus", &d) == 0 && d == -3);
    cr_expect(gguf_get_bool(g, "flag", &flag) == 0 && flag);
    cr_expect(gguf_get_str(g, "text", &s) == 0 && s.len == 5 && memcmp(s.data, "value", 5) == 0);
    cr_expect(gguf_get_u64(g, "big", &u) == 0 && u == UINT64_MAX);
    cr_expect_eq(gguf_get_u64(g, "minus", &u), -EINVAL);
    cr_expect_eq(gguf_get_u64(g, "text", &u), -EINVAL);
    cr_expect_eq(gguf_get_u64(g, "words", &u), -EINVAL);
    cr_expect_eq(gguf_get_str(g, "n", &s), -EINVAL);
    cr_expect_eq(gguf_get_bool(g, "nothing", &flag), -ENOENT);
    cr_expect_eq(gguf_n_tensors(g), 2);
    const struct gguf_tensor *t = gguf_find_tensor(g, "b");
    cr_assert_not_null(t);
    cr_expect(t->bytes == 20 && t->n_dims == 1 && t->dims[0] == 5 && t->dims[1] == 1 && ((const float *)t->data)[4] == 5.0f);
    cr_expect_eq(gguf_find_tensor(g, "a.weight")->bytes, 4 * 34);
    cr_expect_eq(gguf_find_tensor(g, "a.weight"), gguf_tensor_at(g, 0));
    cr_expect_null(gguf_find_tensor(g, "a"));
    cr_expect_null(gguf_tensor_at(g, 2));
    gguf_close(g);
    buf_fini(&file);
}

Test(gguf, strings_of_an_array_are_walked)
{
    struct gguf_build b;
    struct buf file;
    struct gguf *g;
    struct error err;
    struct gguf_str s;
    build_sample(&b);
    finish(&b, &file);
    cr_assert_eq(gguf_open_memory(file.data, file.len, &g, &err), 0, "%s", err.text);
    const struct gguf_value *words = gguf_find(g, "words");
    cr_assert(words && words->type == GGUF_ARRAY && words->item_type == GGUF_STRING && words->n_items == 3);
    const uint8_t *cursor = words->data;
    cr_expect(gguf_next_str(words, &cursor, &s) && s.len == 1);
    cr_expect(gguf_next_str(words, &cursor, &s) && s.len == 0);
    cr_expect(gguf_next_str(words, &cursor, &s) && s.len == 5 && memcmp(s.data, "hello", 5) == 0);
    cr_expect_not(gguf_next_str(words, &cursor, &s));
    gguf_close(g);
    buf_fini(&file);
}

Test(gguf, every_truncation_is_refused)
{
    struct gguf_build b;
    struct buf file;
    build_sample(&b);
    finish(&b, &file);
    size_t last_byte = file.len - 12; /* 20 bytes of data, padded to 32 */
    for (size_t n = 0; n < last_byte; n++) {
        /* A copy of exactly n bytes, so that AddressSanitizer sees a read beyond them. */
        uint8_t *copy = malloc(n + 1);
        struct gguf *g = NULL;
        struct error err = {0};
        memcpy(copy, file.data, n);
        cr_assert_eq(gguf_open_memory(copy, n, &g, &err), -EINVAL, "%zu of %zu bytes were accepted", n, file.len);
        cr_assert_neq(err.text[0], 0);
        free(copy);
    }
    buf_fini(&file);
}

Test(gguf, wrong_headers_are_refused)
{
    static const struct {
        size_t at;
        uint8_t byte;
        const char *expected;
    } cases[] = {{0, 'X', "magic"}, {4, 1, "version 1"}, {4, 4, "version 4"}, {15, 0x7f, "tensors do not fit"}, {23, 0x7f, "entries do not fit"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct gguf_build b;
        struct buf file;
        build_sample(&b);
        finish(&b, &file);
        file.data[cases[i].at] = cases[i].byte;
        check_refused(&file, cases[i].expected);
        buf_fini(&file);
    }
}

Test(gguf, big_endian_is_named)
{
    struct gguf_build b;
    struct buf file;
    build_sample(&b);
    finish(&b, &file);
    memcpy(file.data + 4, "\0\0\0\3", 4);
    check_refused(&file, "big-endian");
    buf_fini(&file);
}

Test(gguf, duplicates_are_refused)
{
    static const uint64_t shape[] = {1};
    struct gguf_build b;
    build_sample(&b);
    gguf_build_u32(&b, "n", 8);
    check_build_refused(&b, "\"n\" occurs twice");
    build_sample(&b);
    gguf_build_tensor(&b, "b", 0, 1, shape, NULL, 4);
    check_build_refused(&b, "\"b\" occurs twice");
}

Test(gguf, wrong_values_are_refused)
{
    static const uint8_t nested[16] = {9};
    static const uint8_t huge[16] = {4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f};
    struct gguf_build b;
    gguf_build_init(&b);
    gguf_build_raw(&b, "k", 13, nested, 8);
    check_build_refused(&b, "unknown value type");
    gguf_build_init(&b);
    gguf_build_raw(&b, "k", 9, nested, 16);
    check_build_refused(&b, "arrays of arrays");
    gguf_build_init(&b);
    gguf_build_raw(&b, "k", 9, huge, 16);
    check_build_refused(&b, "ends early");
    gguf_build_init(&b);
    gguf_build_u32(&b, "general.alignment", 24);
    check_build_refused(&b, "general.alignment");
}

Test(gguf, wrong_tensors_are_refused)
{
    static const uint64_t odd[] = {33, 1}, wide[] = {1ull << 62, 8}, large[] = {64, 64}, four[] = {1, 1, 1, 1};
    struct gguf_build b;
    gguf_build_init(&b);
    gguf_build_tensor(&b, "t", 8, 2, odd, NULL, 64);
    check_build_refused(&b, "whole number of blocks");
    gguf_build_init(&b);
    gguf_build_tensor(&b, "t", 0, 2, wide, NULL, 64);
    check_build_refused(&b, "too large");
    gguf_build_init(&b);
    gguf_build_tensor(&b, "t", 0, 2, large, NULL, 64 * 64 * 4 - 32);
    check_build_refused(&b, "beyond the end");
    gguf_build_init(&b);
    gguf_build_tensor(&b, "t", 4, 1, large, NULL, 64);
    check_build_refused(&b, "unknown tensor type");
    gguf_build_init(&b);
    gguf_build_tensor(&b, "t", 0, 0, four, NULL, 64);
    check_build_refused(&b, "dimensions");
}

Test(gguf, misaligned_offset_is_refused)
{
    static const uint64_t shape[] = {1};
    struct gguf_build b;
    gguf_build_init(&b);
    gguf_build_tensor(&b, "t", 0, 1, shape, NULL, 64);
    b.tensors.data[b.tensors.len - 8] = 4; /* the offset is the last field */
    check_build_refused(&b, "not aligned");
}

Test(gguf, files_that_are_none_are_refused)
{
    struct gguf *g = NULL;
    struct error err;
    cr_expect_eq(gguf_open("does/not/exist.gguf", &g, &err), -ENOENT);
    cr_expect(strstr(err.text, "does/not/exist.gguf"));
    cr_expect_eq(gguf_open(".", &g, &err), -EINVAL);
    cr_expect_eq(gguf_open("CMakeLists.txt", &g, &err), -EINVAL);
    cr_expect_not(gguf_is_file("CMakeLists.txt"));
    cr_expect_not(gguf_is_file("."));
    cr_expect_null(g);
}

Test(gguf, real_model_is_read)
{
    static const char path[] = "models/SmolLM2-135M-Instruct.Q4_1.gguf";
    struct gguf *g;
    struct error err;
    uint64_t u;
    struct gguf_str s;
    if (access(path, R_OK) < 0)
        cr_skip_test("skipped: %s is not here", path);
    cr_assert(gguf_is_file(path));
    cr_assert_eq(gguf_open(path, &g, &err), 0, "%s", err.text);
    cr_expect(gguf_get_str(g, "general.architecture", &s) == 0 && s.len == 5 && memcmp(s.data, "llama", 5) == 0);
    cr_expect(gguf_get_u64(g, "llama.block_count", &u) == 0 && u == 30);
    cr_expect_eq(gguf_find(g, "tokenizer.ggml.tokens")->n_items, 49152);
    cr_expect_eq(gguf_n_tensors(g), 272);
    const struct gguf_tensor *t = gguf_find_tensor(g, "blk.29.ffn_down.weight");
    cr_assert_not_null(t);
    cr_expect(t->ggml_type == 3 && t->dims[0] == 1536 && t->dims[1] == 576 && t->bytes == 552960);
    cr_expect_str_eq(gguf_tensor_type_name(t->ggml_type), "Q4_1");
    cr_expect_str_eq(gguf_tensor_type_name(4), "unknown");
    gguf_close(g);
}
