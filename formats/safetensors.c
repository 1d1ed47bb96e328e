#include "formats/safetensors.h"
#include "formats/file_map.h"
#include "formats/json.h"
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The largest published models have under 200 shards and some ten thousand tensors. */
enum { MAX_SHARDS = 1024, MAX_TENSORS = 262144, MAX_NAME_BYTES = 255 };
enum { MAX_HEADER_BYTES = 100 * 1000 * 1000 /* the reference library's limit */, MAX_INDEX_BYTES = 100 * 1000 * 1000 };

struct shard {
    struct file_map map; /* empty when the memory is the caller's */
    char *file_name;     /* inside the folder, owned; NULL for memory */
};

struct safetensors {
    struct shard *shards; /* [n_shards] */
    size_t n_shards;
    struct st_tensor *tensors; /* [n_tensors] sorted by name once the set is open; names owned */
    size_t n_tensors, cap_tensors;
};

struct dtype_info {
    const char *name;
    enum st_dtype dtype;
    uint32_t bytes;
};

static const struct dtype_info dtypes[] = {
    {"F32", ST_F32, 4},   {"F16", ST_F16, 2},      {"BF16", ST_BF16, 2},        {"F64", ST_OTHER, 8}, {"I64", ST_OTHER, 8},
    {"U64", ST_OTHER, 8}, {"I32", ST_OTHER, 4},    {"U32", ST_OTHER, 4},        {"I16", ST_OTHER, 2}, {"U16", ST_OTHER, 2},
    {"I8", ST_OTHER, 1},  {"U8", ST_OTHER, 1},     {"BOOL", ST_OTHER, 1},       {"C64", ST_OTHER, 8}, {"F8_E4M3", ST_OTHER, 1},
    {"F8_E5M2", ST_OTHER, 1}, {"F8_E8M0", ST_OTHER, 1},
};

static int compare_tensors(const void *a, const void *b)
{
    return strcmp(((const struct st_tensor *)a)->name, ((const struct st_tensor *)b)->name);
}

const struct st_tensor *safetensors_find(const struct safetensors *set, const char *name)
{
    struct st_tensor key = {.name = name};
    return bsearch(&key, set->tensors, set->n_tensors, sizeof(*set->tensors), compare_tensors);
}

size_t safetensors_n_tensors(const struct safetensors *set)
{
    return set->n_tensors;
}

const struct st_tensor *safetensors_at(const struct safetensors *set, size_t i)
{
    return i < set->n_tensors ? &set->tensors[i] : NULL;
}

/* ---- one tensor of a header ---- */

/* What the header says of one tensor. */
struct entry {
    const struct dtype_info *dtype;
    uint32_t n_dims;
    uint64_t dims[4];
    uint64_t begin, end;
    bool has_shape, has_offsets;
};

static int read_count(struct json *j, uint64_t *ret_value)
{
    int64_t v;
    int r = json_int(j, &v);
    if (r < 0)
        return r;
    if (v < 0)
        return json_fail(j, "must not be negative");
    *ret_value = (uint64_t)v;
    return 0;
}

static void read_dtype(struct json *j, struct entry *e)
{
    struct json_str s;
    if (json_string(j, &s) < 0)
        return;
    for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++)
        if (json_str_eq(&s, dtypes[i].name))
            e->dtype = &dtypes[i];
    if (!e->dtype)
        json_fail(j, "unknown dtype");
}

static void read_shape(struct json *j, struct entry *e)
{
    json_array(j);
    while (json_next_item(j)) {
        if (e->n_dims == 4) {
            json_fail(j, "tensors have at most 4 dimensions");
            return;
        }
        if (read_count(j, &e->dims[e->n_dims]) < 0)
            return;
        e->n_dims++;
    }
    e->has_shape = true;
}

static void read_offsets(struct json *j, struct entry *e)
{
    uint64_t offsets[2] = {0, 0};
    int n = 0;
    json_array(j);
    while (json_next_item(j)) {
        if (n == 2) {
            json_fail(j, "data_offsets must hold two numbers");
            return;
        }
        if (read_count(j, &offsets[n]) < 0)
            return;
        n++;
    }
    if (n != 2) {
        json_fail(j, "data_offsets must hold two numbers");
        return;
    }
    e->begin = offsets[0];
    e->end = offsets[1];
    e->has_offsets = true;
}

/* Bytes that the shape and dtype need; false on overflow. */
static bool entry_bytes(const struct entry *e, uint64_t *ret_bytes)
{
    uint64_t n = e->dtype->bytes;
    for (uint32_t d = 0; d < e->n_dims; d++)
        if (__builtin_mul_overflow(n, e->dims[d], &n))
            return false;
    *ret_bytes = n;
    return true;
}

static int read_entry(struct json *j, struct entry *e, uint64_t data_bytes)
{
    struct json_str key;
    *e = (struct entry){.n_dims = 0};
    json_object(j);
    while (json_next_key(j, &key)) {
        if (json_str_eq(&key, "dtype"))
            read_dtype(j, e);
        else if (json_str_eq(&key, "shape"))
            read_shape(j, e);
        else if (json_str_eq(&key, "data_offsets"))
            read_offsets(j, e);
        else
            json_skip(j);
    }
    if (j->error)
        return j->error;
    uint64_t bytes;
    if (!e->dtype || !e->has_shape || !e->has_offsets)
        return json_fail(j, "a tensor needs dtype, shape and data_offsets");
    if (e->begin > e->end || e->end > data_bytes)
        return json_fail(j, "data_offsets reach beyond the end of the file (truncated download?)");
    if (!entry_bytes(e, &bytes) || bytes != e->end - e->begin)
        return json_fail(j, "data_offsets do not agree with dtype and shape");
    return 0;
}

/* ---- one file ---- */

static int add_tensor(struct safetensors *set, struct json_str name, const struct entry *e, const uint8_t *data)
{
    if (set->n_tensors == set->cap_tensors) {
        size_t cap = set->cap_tensors ? set->cap_tensors * 2 : 256;
        struct st_tensor *grown = realloc(set->tensors, cap * sizeof(*grown));
        if (!grown)
            return -ENOMEM;
        set->tensors = grown;
        set->cap_tensors = cap;
    }
    char *copy = strndup(name.data, name.len);
    if (!copy)
        return -ENOMEM;
    struct st_tensor *t = &set->tensors[set->n_tensors++];
    *t = (struct st_tensor){.name = copy, .dtype = e->dtype->dtype, .n_dims = e->n_dims, .data = data + e->begin, .bytes = e->end - e->begin};
    memcpy(t->dims, e->dims, sizeof(t->dims));
    return 0;
}

static int read_header(struct safetensors *set, struct json *j, const uint8_t *data, uint64_t data_bytes)
{
    struct json_str name;
    struct entry e;
    json_object(j);
    while (json_next_key(j, &name)) {
        if (json_str_eq(&name, "__metadata__")) {
            json_skip(j);
            continue;
        }
        if (name.len == 0 || name.len > MAX_NAME_BYTES || memchr(name.data, 0, name.len))
            return json_fail(j, "a tensor's name is empty, too long or holds a zero byte");
        if (set->n_tensors == MAX_TENSORS)
            return json_fail(j, "too many tensors");
        if (read_entry(j, &e, data_bytes) < 0)
            return j->error;
        int r = add_tensor(set, name, &e, data);
        if (r < 0)
            return r;
    }
    return json_end(j);
}

/* Appends the tensors of one file. The text in `err` does not name the file. */
static int parse_file(struct safetensors *set, const void *data, size_t size, struct error *err)
{
    uint64_t header_bytes;
    if (size < sizeof(header_bytes))
        return error_set(err, -EINVAL, "safetensors: the file is shorter than its header");
    memcpy(&header_bytes, data, sizeof(header_bytes));
    if (header_bytes > MAX_HEADER_BYTES || header_bytes > size - sizeof(header_bytes))
        return error_set(err, -EINVAL, "safetensors: the header claims %llu bytes (at most %d, and in the file)",
                         (unsigned long long)header_bytes, MAX_HEADER_BYTES);
    const char *text = (const char *)data + sizeof(header_bytes);
    struct json j;
    json_init(&j, text, header_bytes);
    int r = read_header(set, &j, (const uint8_t *)text + header_bytes, size - sizeof(header_bytes) - header_bytes);
    if (j.error)
        r = error_set(err, j.error, "safetensors: header: %s (at byte %zu)", j.error_text, j.error_pos + sizeof(header_bytes));
    else if (r < 0)
        error_set(err, r, "safetensors: out of memory");
    json_fini(&j);
    return r;
}

static int sort_tensors(struct safetensors *set, struct error *err)
{
    if (set->n_tensors == 0)
        return error_set(err, -EINVAL, "safetensors: there are no tensors");
    qsort(set->tensors, set->n_tensors, sizeof(*set->tensors), compare_tensors);
    for (size_t i = 1; i < set->n_tensors; i++)
        if (compare_tensors(&set->tensors[i - 1], &set->tensors[i]) == 0)
            return error_set(err, -EINVAL, "safetensors: tensor \"%s\" occurs in two files", set->tensors[i].name);
    return 0;
}

int safetensors_open_memory(const void *data, size_t size, struct safetensors **ret_set, struct error *err)
{
    struct safetensors *set = calloc(1, sizeof(*set));
    if (!set)
        return error_set(err, -ENOMEM, "safetensors: out of memory");
    int r = parse_file(set, data, size, err);
    if (r >= 0)
        r = sort_tensors(set, err);
    if (r < 0) {
        safetensors_close(set);
        return r;
    }
    *ret_set = set;
    return 0;
}

void safetensors_close(struct safetensors *set)
{
    if (!set)
        return;
    for (size_t i = 0; i < set->n_tensors; i++)
        free((void *)set->tensors[i].name);
    free(set->tensors);
    for (size_t i = 0; i < set->n_shards; i++) {
        file_map_close(&set->shards[i].map);
        free(set->shards[i].file_name);
    }
    free(set->shards);
    free(set);
}

/* ---- a folder ---- */

static int join_path(char path[PATH_MAX], const char *folder, const char *file, struct error *err)
{
    if (snprintf(path, PATH_MAX, "%s/%s", folder, file) >= PATH_MAX)
        return error_set(err, -ENAMETOOLONG, "%s: the path is too long", folder);
    return 0;
}

/* A shard lies in the folder itself: the index comes with the download and must not reach anything else. */
static bool is_plain_file_name(struct json_str s)
{
    static const char suffix[] = ".safetensors";
    size_t n = sizeof(suffix) - 1;
    return s.len > n && s.len <= NAME_MAX && s.data[0] != '.' && !memchr(s.data, '/', s.len) && !memchr(s.data, 0, s.len) &&
           memcmp(s.data + s.len - n, suffix, n) == 0;
}

static int find_shard(const struct safetensors *set, struct json_str file, size_t *ret_i)
{
    for (size_t i = 0; i < set->n_shards; i++)
        if (json_str_eq(&file, set->shards[i].file_name)) {
            *ret_i = i;
            return 0;
        }
    return -ENOENT;
}

static int add_shard(struct safetensors *set, const char *file, size_t len)
{
    if (!set->shards) {
        set->shards = calloc(MAX_SHARDS, sizeof(*set->shards));
        if (!set->shards)
            return -ENOMEM;
    }
    char *copy = strndup(file, len);
    if (!copy)
        return -ENOMEM;
    set->shards[set->n_shards++].file_name = copy;
    return 0;
}

static int load_shard(struct safetensors *set, struct shard *shard, const char *folder, struct error *err)
{
    char path[PATH_MAX];
    struct error reason = {0};
    int r = join_path(path, folder, shard->file_name, err);
    if (r < 0 || (r = file_map_open(path, &shard->map, err)) < 0)
        return r;
    r = parse_file(set, shard->map.data, shard->map.size, &reason);
    if (r < 0)
        return error_set(err, r, "%s: %.400s", path, reason.text);
    return 0;
}

/* What is done with one entry of weight_map. */
typedef int index_entry_fn(struct safetensors *set, struct json *j, struct json_str tensor, struct json_str file);

/* First pass: collects the shards. */
static int note_shard(struct safetensors *set, struct json *j, struct json_str tensor, struct json_str file)
{
    size_t i;
    (void)tensor;
    if (find_shard(set, file, &i) == 0)
        return 0;
    if (set->n_shards == MAX_SHARDS)
        return json_fail(j, "too many shards");
    return add_shard(set, file.data, file.len);
}

/* Second pass, over the open and sorted set: the tensor is in the shard that the index names, which catches an index of another download. */
static int check_tensor(struct safetensors *set, struct json *j, struct json_str tensor, struct json_str file)
{
    char name[MAX_NAME_BYTES + 1];
    size_t i;
    if (tensor.len > MAX_NAME_BYTES)
        return json_fail(j, "a tensor's name is too long");
    memcpy(name, tensor.data, tensor.len);
    name[tensor.len] = 0;
    const struct st_tensor *t = safetensors_find(set, name);
    if (!t || find_shard(set, file, &i) < 0)
        return json_fail(j, "a tensor is in no shard");
    uintptr_t base = (uintptr_t)set->shards[i].map.data, data = (uintptr_t)t->data;
    if (data < base || data > base + set->shards[i].map.size)
        return json_fail(j, "a tensor is not in the shard that the index names");
    return 0;
}

static int walk_weight_map(struct safetensors *set, struct json *j, index_entry_fn *fn)
{
    struct json_str tensor, file;
    json_object(j);
    while (json_next_key(j, &tensor)) {
        if (json_string(j, &file) < 0)
            break;
        if (!is_plain_file_name(file))
            return json_fail(j, "a shard must be a file name of the same folder that ends in .safetensors");
        int r = fn(set, j, tensor, file);
        if (r < 0)
            return r;
    }
    return j->error;
}

static int walk_index(struct safetensors *set, const struct file_map *index, index_entry_fn *fn, struct error *err)
{
    struct json j;
    struct json_str key;
    bool found = false;
    int r = 0;
    json_init(&j, index->data, index->size);
    json_object(&j);
    while (r >= 0 && json_next_key(&j, &key)) {
        if (json_str_eq(&key, "weight_map")) {
            found = true;
            r = walk_weight_map(set, &j, fn);
        } else {
            json_skip(&j);
        }
    }
    if (r >= 0)
        r = json_end(&j);
    if (r >= 0 && !found)
        r = json_fail(&j, "there is no weight_map");
    if (j.error)
        r = error_set(err, j.error, "model.safetensors.index.json: %s (at byte %zu)", j.error_text, j.error_pos);
    else if (r < 0)
        error_set(err, r, "safetensors: out of memory");
    json_fini(&j);
    return r;
}

static int load_shards(struct safetensors *set, const char *folder, struct error *err)
{
    for (size_t i = 0; i < set->n_shards; i++) {
        int r = load_shard(set, &set->shards[i], folder, err);
        if (r < 0)
            return r;
    }
    return sort_tensors(set, err);
}

static int open_sharded(struct safetensors *set, const char *folder, const char *index_path, struct error *err)
{
    struct file_map index = {0};
    int r = file_map_open(index_path, &index, err);
    if (r < 0)
        return r;
    if (index.size > MAX_INDEX_BYTES)
        r = error_set(err, -EINVAL, "%s: has %zu bytes (at most %d)", index_path, index.size, MAX_INDEX_BYTES);
    if (r >= 0)
        r = walk_index(set, &index, note_shard, err);
    if (r >= 0)
        r = load_shards(set, folder, err);
    if (r >= 0)
        r = walk_index(set, &index, check_tensor, err);
    file_map_close(&index);
    return r;
}

static int open_single(struct safetensors *set, const char *folder, struct error *err)
{
    static const char file[] = "model.safetensors";
    int r = add_shard(set, file, sizeof(file) - 1);
    if (r < 0)
        return error_set(err, r, "safetensors: out of memory");
    return load_shards(set, folder, err);
}

int safetensors_open(const char *folder, struct safetensors **ret_set, struct error *err)
{
    char index_path[PATH_MAX];
    int r = join_path(index_path, folder, "model.safetensors.index.json", err);
    if (r < 0)
        return r;
    struct safetensors *set = calloc(1, sizeof(*set));
    if (!set)
        return error_set(err, -ENOMEM, "safetensors: out of memory");
    if (access(index_path, F_OK) == 0)
        r = open_sharded(set, folder, index_path, err);
    else
        r = open_single(set, folder, err);
    if (r < 0) {
        safetensors_close(set);
        return r;
    }
    *ret_set = set;
    return 0;
}
