#include "formats/safetensors.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A file in memory: header and n_data bytes 0, 1, 2, ... */
static uint8_t *make_file(const char *header, size_t n_data, size_t *ret_size)
{
    uint64_t n = strlen(header);
    uint8_t *file = malloc(8 + n + n_data);
    cr_assert_not_null(file);
    memcpy(file, &n, 8);
    memcpy(file + 8, header, n);
    for (size_t i = 0; i < n_data; i++)
        file[8 + n + i] = (uint8_t)i;
    *ret_size = 8 + n + n_data;
    return file;
}

static void check_refused(const char *header, size_t n_data, const char *expected)
{
    size_t size;
    struct safetensors *set = NULL;
    struct error err = {0};
    uint8_t *file = make_file(header, n_data, &size);
    cr_expect_eq(safetensors_open_memory(file, size, &set, &err), -EINVAL, "%s was accepted", header);
    cr_expect(strstr(err.text, expected), "%s: \"%s\" does not contain \"%s\"", header, err.text, expected);
    cr_expect_null(set);
    free(file);
}

static const char sample[] = "{\"__metadata__\":{\"format\":\"pt\"},"
                             "\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[4,16]},"
                             "\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
                             "\"c\":{\"dtype\":\"I64\",\"shape\":[0],\"data_offsets\":[16,16]}}";

Test(safetensors, tensors_are_found)
{
    size_t size;
    struct safetensors *set;
    struct error err;
    uint8_t *file = make_file(sample, 16, &size);
    cr_assert_eq(safetensors_open_memory(file, size, &set, &err), 0, "%s", err.text);
    cr_expect_eq(safetensors_n_tensors(set), 3);
    const struct st_tensor *t = safetensors_find(set, "b");
    cr_assert_not_null(t);
    cr_expect(t->dtype == ST_BF16 && t->n_dims == 2 && t->dims[0] == 2 && t->dims[1] == 3 && t->bytes == 12);
    cr_expect_eq(*(const uint8_t *)t->data, 4);
    cr_expect(safetensors_find(set, "a")->dtype == ST_F32 && safetensors_find(set, "a")->n_dims == 0);
    cr_expect(safetensors_find(set, "c")->dtype == ST_OTHER && safetensors_find(set, "c")->bytes == 0);
    cr_expect_str_eq(safetensors_at(set, 0)->name, "a");
    cr_expect_null(safetensors_at(set, 3));
    cr_expect_null(safetensors_find(set, "__metadata__"));
    safetensors_close(set);
    free(file);
}

Test(safetensors, every_truncation_is_refused)
{
    size_t size;
    uint8_t *file = make_file(sample, 16, &size);
    for (size_t n = 0; n < size; n++) {
        uint8_t *copy = malloc(n + 1);
        struct safetensors *set = NULL;
        struct error err = {0};
        memcpy(copy, file, n);
        cr_assert_eq(safetensors_open_memory(copy, n, &set, &err), -EINVAL, "%zu of %zu bytes were accepted", n, size);
        free(copy);
    }
    free(file);
}

Test(safetensors, wrong_headers_are_refused)
{
    check_refused("{}", 8, "no tensors");
    check_refused("[]", 8, "header");
    check_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}} x", 4, "header");
    check_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 8, "do not agree");
    check_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}}", 8, "do not agree");
    check_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 4, "beyond the end");
    check_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, "beyond the end");
    check_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, "two numbers");
    check_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,4]}}", 4, "two numbers");
    check_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "negative");
    check_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1],\"data_offsets\":[0,4]}}", 4, "at most 4");
    check_refused("{\"a\":{\"dtype\":\"Q3\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "unknown dtype");
    check_refused("{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "needs dtype");
    check_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]}}", 4, "do not agree");
    check_refused("{\"\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "name");
    check_refused("{\"a\\u0000b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "name");
    check_refused("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "header");
}

/* ---- folders ---- */

static char folder[PATH_MAX];

static void make_folder(void)
{
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof(folder), "%s/test_safetensors.XXXXXX", base ? base : P_tmpdir);
    cr_assert_not_null(mkdtemp(folder));
}

static void put_file(const char *name, const void *data, size_t n)
{
    char path[PATH_MAX + 64];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    cr_assert(f && fwrite(data, 1, n, f) == n);
    fclose(f);
}

static void put_shard(const char *name, const char *header, size_t n_data)
{
    size_t size;
    uint8_t *file = make_file(header, n_data, &size);
    put_file(name, file, size);
    free(file);
}

static void put_index(const char *text)
{
    put_file("model.safetensors.index.json", text, strlen(text));
}

static void remove_folder(void)
{
    static const char *const names[] = {"model.safetensors", "model.safetensors.index.json", "one.safetensors", "two.safetensors"};
    char path[PATH_MAX + 64];
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        snprintf(path, sizeof(path), "%s/%s", folder, names[i]);
        unlink(path);
    }
    rmdir(folder);
}

static const char shard_one[] = "{\"x\":{\"dtype\":\"F16\",\"shape\":[4],\"data_offsets\":[0,8]}}";
static const char shard_two[] = "{\"y\":{\"dtype\":\"F16\",\"shape\":[2,2],\"data_offsets\":[0,8]}}";

Test(safetensors, folder_with_one_file, .init = make_folder, .fini = remove_folder)
{
    struct safetensors *set;
    struct error err;
    put_shard("model.safetensors", shard_one, 8);
    cr_assert_eq(safetensors_open(folder, &set, &err), 0, "%s", err.text);
    cr_expect_not_null(safetensors_find(set, "x"));
    safetensors_close(set);
}

Test(safetensors, folder_with_shards, .init = make_folder, .fini = remove_folder)
{
    struct safetensors *set;
    struct error err;
    put_shard("one.safetensors", shard_one, 8);
    put_shard("two.safetensors", shard_two, 8);
    put_index("{\"metadata\":{\"total_size\":16},\"weight_map\":{\"x\":\"one.safetensors\",\"y\":\"two.safetensors\"}}");
    cr_assert_eq(safetensors_open(folder, &set, &err), 0, "%s", err.text);
    cr_expect_eq(safetensors_n_tensors(set), 2);
    cr_expect_eq(((const uint8_t *)safetensors_find(set, "y")->data)[7], 7);
    safetensors_close(set);
}

static void check_index_refused(const char *index, int code, const char *expected)
{
    struct safetensors *set = NULL;
    struct error err = {0};
    put_index(index);
    cr_expect_eq(safetensors_open(folder, &set, &err), code, "%s", index);
    cr_expect(strstr(err.text, expected), "%s: \"%s\" does not contain \"%s\"", index, err.text, expected);
    cr_expect_null(set);
}

Test(safetensors, wrong_indexes_are_refused, .init = make_folder, .fini = remove_folder)
{
    put_shard("one.safetensors", shard_one, 8);
    put_shard("two.safetensors", shard_two, 8);
    check_index_refused("{\"weight_map\":{\"x\":\"../one.safetensors\"}}", -EINVAL, "file name");
    check_index_refused("{\"weight_map\":{\"x\":\"one.bin\"}}", -EINVAL, "file name");
    check_index_refused("{\"weight_map\":{\"x\":\"three.safetensors\"}}", -ENOENT, "three.safetensors");
    check_index_refused("{\"weight_map\":{\"z\":\"one.safetensors\"}}", -EINVAL, "in no shard");
    check_index_refused("{\"weight_map\":{\"x\":\"two.safetensors\",\"y\":\"one.safetensors\"}}", -EINVAL, "index names");
    check_index_refused("{\"weight_map\":{}}", -EINVAL, "no tensors");
    check_index_refused("{}", -EINVAL, "weight_map");
    check_index_refused("{\"weight_map\":", -EINVAL, "index.json");
    put_shard("two.safetensors", shard_one, 8);
    check_index_refused("{\"weight_map\":{\"x\":\"one.safetensors\",\"y\":\"two.safetensors\"}}", -EINVAL, "two files");
}

Test(safetensors, missing_files_are_named, .init = make_folder, .fini = remove_folder)
{
    struct safetensors *set = NULL;
    struct error err;
    cr_expect_eq(safetensors_open(folder, &set, &err), -ENOENT);
    cr_expect(strstr(err.text, "model.safetensors"));
    cr_expect_null(set);
}
