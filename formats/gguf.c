#include "formats/gguf.h"
#include "formats/file_map.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Real files have about 50 entries and, in the largest models, some thousand tensors. */
enum { MAX_ENTRIES = 65536, MAX_TENSORS = 65536, MAX_KEY_BYTES = 65535, MAX_TENSOR_NAME_BYTES = 255 };
enum { DEFAULT_ALIGNMENT = 32, MIN_ALIGNMENT = 8, MAX_ALIGNMENT = 65536 };
/* The smallest encodings: what a count claims must fit in the bytes that are left before memory is taken for it. */
enum { MIN_ENTRY_BYTES = 8 + 1 + 4 + 1, MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8 };

struct gguf_entry {
    struct gguf_str key;
    struct gguf_value value;
};

struct gguf {
    struct file_map map; /* of gguf_open; empty when the memory is the caller's */
    const uint8_t *base, *end;
    uint64_t n_entries, n_tensors;
    struct gguf_entry *entries;  /* [n_entries] sorted by key */
    struct gguf_tensor *tensors; /* [n_tensors] in file order */
    uint32_t *by_name;           /* [n_tensors] indices into tensors, sorted by name */
    uint64_t alignment;
};

/* Reads forward; after a failure `error` stays set and nothing is consumed. */
struct reader {
    const uint8_t *at, *end;
    const char *error; /* static text of the first failure */
};

struct ggml_type_info {
    const char *name;
    uint16_t block_values, block_bytes; /* 0: the number is not assigned */
};

static const struct ggml_type_info ggml_types[] = {
    [0] = {"F32", 1, 4},        [1] = {"F16", 1, 2},        [2] = {"Q4_0", 32, 18},     [3] = {"Q4_1", 32, 20},
    [6] = {"Q5_0", 32, 22},     [7] = {"Q5_1", 32, 24},     [8] = {"Q8_0", 32, 34},     [9] = {"Q8_1", 32, 36},
    [10] = {"Q2_K", 256, 84},   [11] = {"Q3_K", 256, 110},  [12] = {"Q4_K", 256, 144},  [13] = {"Q5_K", 256, 176},
    [14] = {"Q6_K", 256, 210},  [15] = {"Q8_K", 256, 292},  [16] = {"IQ2_XXS", 256, 66}, [17] = {"IQ2_XS", 256, 74},
    [18] = {"IQ3_XXS", 256, 98}, [19] = {"IQ1_S", 256, 50}, [20] = {"IQ4_NL", 32, 18},  [21] = {"IQ3_S", 256, 110},
    [22] = {"IQ2_S", 256, 82},  [23] = {"IQ4_XS", 256, 136}, [24] = {"I8", 1, 1},       [25] = {"I16", 1, 2},
    [26] = {"I32", 1, 4},       [27] = {"I64", 1, 8},       [28] = {"F64", 1, 8},       [29] = {"IQ1_M", 256, 56},
    [30] = {"BF16", 1, 2},      [34] = {"TQ1_0", 256, 54},  [35] = {"TQ2_0", 256, 66},  [39] = {"MXFP4", 32, 17},
};

static const struct ggml_type_info *type_info(uint32_t ggml_type)
{
    if (ggml_type >= sizeof(ggml_types) / sizeof(ggml_types[0]) || !ggml_types[ggml_type].name)
        return NULL;
    return &ggml_types[ggml_type];
}

const char *gguf_tensor_type_name(uint32_t ggml_type)
{
    const struct ggml_type_info *info = type_info(ggml_type);
    return info ? info->name : "unknown";
}

/* ---- reading ---- */

static bool read_fail(struct reader *r, const char *text)
{
    if (!r->error)
        r->error = text;
    return false;
}

static bool read_bytes(struct reader *r, uint64_t n, const uint8_t **ret_data)
{
    if (r->error || n > (uint64_t)(r->end - r->at))
        return read_fail(r, "the file ends early");
    *ret_data = r->at;
    r->at += n;
    return true;
}

static uint32_t load_u32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof(v));
    return v;
}

static uint64_t load_u64(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof(v));
    return v;
}

static bool read_u32(struct reader *r, uint32_t *ret_value)
{
    const uint8_t *p;
    if (!read_bytes(r, 4, &p))
        return false;
    *ret_value = load_u32(p);
    return true;
}

static bool read_u64(struct reader *r, uint64_t *ret_value)
{
    const uint8_t *p;
    if (!read_bytes(r, 8, &p))
        return false;
    *ret_value = load_u64(p);
    return true;
}

static bool read_str(struct reader *r, struct gguf_str *ret_str)
{
    uint64_t len;
    const uint8_t *p;
    if (!read_u64(r, &len) || !read_bytes(r, len, &p))
        return false;
    *ret_str = (struct gguf_str){(const char *)p, len};
    return true;
}

/* Bytes of a scalar, 0 for strings, arrays and unknown types. */
static uint32_t scalar_bytes(uint32_t type)
{
    switch (type) {
    case GGUF_U8: case GGUF_I8: case GGUF_BOOL: return 1;
    case GGUF_U16: case GGUF_I16: return 2;
    case GGUF_U32: case GGUF_I32: case GGUF_F32: return 4;
    case GGUF_U64: case GGUF_I64: case GGUF_F64: return 8;
    default: return 0;
    }
}

static bool read_strings(struct reader *r, uint64_t n)
{
    struct gguf_str skipped;
    for (uint64_t i = 0; i < n; i++)
        if (!read_str(r, &skipped))
            return false;
    return true;
}

/* `n` values of one type that is no array; leaves value->data and value->end around them. */
static bool read_items(struct reader *r, uint32_t type, uint64_t n, struct gguf_value *value)
{
    value->data = r->at;
    if (type == GGUF_STRING) {
        if (!read_strings(r, n))
            return false;
    } else {
        uint32_t item = scalar_bytes(type);
        const uint8_t *p;
        if (item == 0)
            return read_fail(r, type == GGUF_ARRAY ? "arrays of arrays are not supported" : "unknown value type");
        if (n > UINT64_MAX / item || !read_bytes(r, n * item, &p))
            return read_fail(r, "the file ends early");
    }
    value->end = r->at;
    return true;
}

static bool read_value(struct reader *r, struct gguf_value *value)
{
    uint32_t type;
    if (!read_u32(r, &type))
        return false;
    *value = (struct gguf_value){.type = type, .item_type = type, .n_items = 1};
    if (type != GGUF_ARRAY)
        return read_items(r, type, 1, value);
    uint32_t item_type;
    if (!read_u32(r, &item_type) || !read_u64(r, &value->n_items))
        return false;
    value->item_type = item_type;
    return read_items(r, item_type, value->n_items, value);
}

/* ---- sorting and finding ---- */

static int compare_str(struct gguf_str a, struct gguf_str b)
{
    size_t n = a.len < b.len ? a.len : b.len;
    int c = n ? memcmp(a.data, b.data, n) : 0;
    return c ? c : (a.len > b.len) - (a.len < b.len);
}

static int compare_entries(const void *a, const void *b)
{
    return compare_str(((const struct gguf_entry *)a)->key, ((const struct gguf_entry *)b)->key);
}

static int compare_names(const void *a, const void *b, void *tensors)
{
    const struct gguf_tensor *t = tensors;
    return compare_str(t[*(const uint32_t *)a].name, t[*(const uint32_t *)b].name);
}

const struct gguf_value *gguf_find(const struct gguf *file, const char *key)
{
    struct gguf_str wanted = {key, strlen(key)};
    uint64_t low = 0, high = file->n_entries;
    while (low < high) {
        uint64_t mid = low + (high - low) / 2;
        int c = compare_str(wanted, file->entries[mid].key);
        if (c == 0)
            return &file->entries[mid].value;
        if (c < 0)
            high = mid;
        else
            low = mid + 1;
    }
    return NULL;
}

const struct gguf_tensor *gguf_find_tensor(const struct gguf *file, const char *name)
{
    struct gguf_str wanted = {name, strlen(name)};
    uint64_t low = 0, high = file->n_tensors;
    while (low < high) {
        uint64_t mid = low + (high - low) / 2;
        const struct gguf_tensor *t = &file->tensors[file->by_name[mid]];
        int c = compare_str(wanted, t->name);
        if (c == 0)
            return t;
        if (c < 0)
            high = mid;
        else
            low = mid + 1;
    }
    return NULL;
}

/* ---- parsing ---- */

static int parse_error(const struct gguf *file, const struct reader *r, struct error *err, const char *what, uint64_t i)
{
    return error_set(err, -EINVAL, "GGUF: %s %llu: %s (at byte %llu)", what, (unsigned long long)i, r->error,
                     (unsigned long long)(r->at - file->base));
}

static int parse_header(struct gguf *file, struct reader *r, struct error *err)
{
    const uint8_t *magic;
    uint32_t version = 0;
    if (!read_bytes(r, 4, &magic) || memcmp(magic, "GGUF", 4) != 0)
        return error_set(err, -EINVAL, "GGUF: the file does not start with the magic \"GGUF\"");
    if (!read_u32(r, &version) || !read_u64(r, &file->n_tensors) || !read_u64(r, &file->n_entries))
        return error_set(err, -EINVAL, "GGUF: the file ends inside its header");
    if (version == 0x02000000 || version == 0x03000000)
        return error_set(err, -EINVAL, "GGUF: big-endian files are not supported");
    if (version != 2 && version != 3)
        return error_set(err, -EINVAL, "GGUF: version %u is not supported (2 and 3 are)", version);
    uint64_t left = (uint64_t)(r->end - r->at);
    if (file->n_entries > MAX_ENTRIES || file->n_entries > left / MIN_ENTRY_BYTES)
        return error_set(err, -EINVAL, "GGUF: %llu metadata entries do not fit (at most %d, and in the file)",
                         (unsigned long long)file->n_entries, MAX_ENTRIES);
    if (file->n_tensors > MAX_TENSORS || file->n_tensors > left / MIN_TENSOR_BYTES)
        return error_set(err, -EINVAL, "GGUF: %llu tensors do not fit (at most %d, and in the file)",
                         (unsigned long long)file->n_tensors, MAX_TENSORS);
    return 0;
}

static int parse_entries(struct gguf *file, struct reader *r, struct error *err)
{
    file->entries = calloc(file->n_entries + 1, sizeof(*file->entries));
    if (!file->entries)
        return -ENOMEM;
    for (uint64_t i = 0; i < file->n_entries; i++) {
        struct gguf_entry *e = &file->entries[i];
        if (!read_str(r, &e->key) || !read_value(r, &e->value))
            return parse_error(file, r, err, "metadata entry", i);
        if (e->key.len == 0 || e->key.len > MAX_KEY_BYTES)
            return error_set(err, -EINVAL, "GGUF: metadata entry %llu: the key has %llu bytes (1 to %d)", (unsigned long long)i,
                             (unsigned long long)e->key.len, MAX_KEY_BYTES);
    }
    qsort(file->entries, file->n_entries, sizeof(*file->entries), compare_entries);
    for (uint64_t i = 1; i < file->n_entries; i++)
        if (compare_entries(&file->entries[i - 1], &file->entries[i]) == 0)
            return error_set(err, -EINVAL, "GGUF: metadata key \"%.*s\" occurs twice", (int)file->entries[i].key.len,
                             file->entries[i].key.data);
    return 0;
}

static int parse_alignment(struct gguf *file, struct error *err)
{
    file->alignment = DEFAULT_ALIGNMENT;
    int r = gguf_get_u64(file, "general.alignment", &file->alignment);
    if (r == -ENOENT)
        return 0;
    if (r < 0 || file->alignment < MIN_ALIGNMENT || file->alignment > MAX_ALIGNMENT || (file->alignment & (file->alignment - 1)))
        return error_set(err, -EINVAL, "GGUF: general.alignment must be a power of two from %d to %d", MIN_ALIGNMENT,
                         MAX_ALIGNMENT);
    return 0;
}

static bool multiply_u64(uint64_t a, uint64_t b, uint64_t *ret_product)
{
    return !__builtin_mul_overflow(a, b, ret_product);
}

/* Whole rows of blocks only; false on overflow. */
static bool tensor_bytes(const struct gguf_tensor *t, const struct ggml_type_info *info, uint64_t *ret_bytes)
{
    uint64_t n = t->dims[0] / info->block_values;
    if (t->dims[0] % info->block_values != 0)
        return false;
    for (uint32_t d = 1; d < 4; d++)
        if (!multiply_u64(n, t->dims[d], &n))
            return false;
    return multiply_u64(n, info->block_bytes, ret_bytes);
}

static bool read_tensor_shape(struct reader *r, struct gguf_tensor *t, uint64_t *ret_offset)
{
    if (!read_str(r, &t->name) || !read_u32(r, &t->n_dims))
        return false;
    if (t->name.len == 0 || t->name.len > MAX_TENSOR_NAME_BYTES)
        return read_fail(r, "the name is empty or too long");
    if (t->n_dims < 1 || t->n_dims > 4)
        return read_fail(r, "the number of dimensions is not 1 to 4");
    for (uint32_t d = 0; d < 4; d++)
        t->dims[d] = 1;
    for (uint32_t d = 0; d < t->n_dims; d++)
        if (!read_u64(r, &t->dims[d]))
            return false;
    return read_u32(r, &t->ggml_type) && read_u64(r, ret_offset);
}

/* Reads one descriptor. Its offset is kept in `offsets`, because the data starts only after the last descriptor. */
static bool read_tensor(const struct gguf *file, struct reader *r, struct gguf_tensor *t, uint64_t *ret_offset)
{
    if (!read_tensor_shape(r, t, ret_offset))
        return false;
    const struct ggml_type_info *info = type_info(t->ggml_type);
    if (!info)
        return read_fail(r, "unknown tensor type");
    if (!tensor_bytes(t, info, &t->bytes))
        return read_fail(r, "the dimensions are too large or no whole number of blocks");
    if (*ret_offset % file->alignment != 0)
        return read_fail(r, "the offset is not aligned");
    return true;
}

static int place_tensors(struct gguf *file, const struct reader *r, const uint64_t *offsets, struct error *err)
{
    uint64_t start = (uint64_t)(r->at - file->base), size = (uint64_t)(file->end - file->base);
    start = (start + file->alignment - 1) / file->alignment * file->alignment;
    uint64_t room = start <= size ? size - start : 0;
    for (uint64_t i = 0; i < file->n_tensors; i++) {
        struct gguf_tensor *t = &file->tensors[i];
        if (offsets[i] > room || t->bytes > room - offsets[i])
            return error_set(err, -EINVAL, "GGUF: tensor \"%.*s\" reaches beyond the end of the file (truncated download?)",
                             (int)t->name.len, t->name.data);
        /* An empty tensor may sit at the end of a file that has no padding. */
        t->data = t->bytes ? file->base + start + offsets[i] : file->end;
    }
    return 0;
}

static int sort_names(struct gguf *file, struct error *err)
{
    file->by_name = calloc(file->n_tensors + 1, sizeof(*file->by_name));
    if (!file->by_name)
        return -ENOMEM;
    for (uint32_t i = 0; i < file->n_tensors; i++)
        file->by_name[i] = i;
    qsort_r(file->by_name, file->n_tensors, sizeof(*file->by_name), compare_names, file->tensors);
    for (uint64_t i = 1; i < file->n_tensors; i++)
        if (compare_names(&file->by_name[i - 1], &file->by_name[i], file->tensors) == 0) {
            struct gguf_str name = file->tensors[file->by_name[i]].name;
            return error_set(err, -EINVAL, "GGUF: tensor \"%.*s\" occurs twice", (int)name.len, name.data);
        }
    return 0;
}

static int parse_tensors(struct gguf *file, struct reader *r, struct error *err)
{
    int result = -ENOMEM;
    uint64_t *offsets = calloc(file->n_tensors + 1, sizeof(*offsets));
    file->tensors = calloc(file->n_tensors + 1, sizeof(*file->tensors));
    if (!offsets || !file->tensors)
        goto fail;
    for (uint64_t i = 0; i < file->n_tensors; i++)
        if (!read_tensor(file, r, &file->tensors[i], &offsets[i])) {
            result = parse_error(file, r, err, "tensor", i);
            goto fail;
        }
    result = place_tensors(file, r, offsets, err);
    if (result < 0)
        goto fail;
    result = sort_names(file, err);
fail:
    free(offsets);
    return result;
}

static int parse_file(struct gguf *file, struct error *err)
{
    struct reader r = {.at = file->base, .end = file->end};
    int result = parse_header(file, &r, err);
    if (result < 0) {
        file->n_entries = file->n_tensors = 0;
        return result;
    }
    if ((result = parse_entries(file, &r, err)) < 0 || (result = parse_alignment(file, err)) < 0)
        return result;
    return parse_tensors(file, &r, err);
}

/* ---- opening ---- */

int gguf_open_memory(const void *data, size_t size, struct gguf **ret_file, struct error *err)
{
    struct gguf *file = calloc(1, sizeof(*file));
    if (!file)
        return error_set(err, -ENOMEM, "GGUF: out of memory");
    static const uint8_t nothing[1];
    file->base = size ? data : nothing;
    file->end = file->base + size;
    int r = parse_file(file, err);
    if (r < 0) {
        if (r == -ENOMEM)
            error_set(err, r, "GGUF: out of memory");
        gguf_close(file);
        return r;
    }
    *ret_file = file;
    return 0;
}

int gguf_open(const char *path, struct gguf **ret_file, struct error *err)
{
    struct file_map map = {0};
    struct error reason = {0};
    int r = file_map_open(path, &map, err);
    if (r < 0)
        return r;
    struct gguf *file;
    r = gguf_open_memory(map.data, map.size, &file, &reason);
    if (r < 0) {
        file_map_close(&map);
        return error_set(err, r, "%s: %s", path, reason.text);
    }
    file->map = map;
    *ret_file = file;
    return 0;
}

void gguf_close(struct gguf *file)
{
    if (!file)
        return;
    free(file->by_name);
    free(file->tensors);
    free(file->entries);
    file_map_close(&file->map);
    free(file);
}

bool gguf_is_file(const char *path)
{
    char magic[4];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return false;
    bool yes = read(fd, magic, sizeof(magic)) == (ssize_t)sizeof(magic) && memcmp(magic, "GGUF", 4) == 0;
    close(fd);
    return yes;
}

/* ---- values ---- */

/* Any integer type as a signed value; false for other types and for u64 beyond INT64_MAX. */
static bool load_integer(const struct gguf_value *v, int64_t *ret_value)
{
    switch (v->type) {
    case GGUF_U8: *ret_value = v->data[0]; return true;
    case GGUF_I8: *ret_value = (int8_t)v->data[0]; return true;
    case GGUF_U16: *ret_value = (uint16_t)(v->data[0] | v->data[1] << 8); return true;
    case GGUF_I16: *ret_value = (int16_t)(v->data[0] | v->data[1] << 8); return true;
    case GGUF_U32: *ret_value = load_u32(v->data); return true;
    case GGUF_I32: *ret_value = (int32_t)load_u32(v->data); return true;
    case GGUF_I64: case GGUF_U64:
        *ret_value = (int64_t)load_u64(v->data);
        return v->type == GGUF_I64 || *ret_value >= 0;
    default: return false;
    }
}

int gguf_get_u64(const struct gguf *file, const char *key, uint64_t *ret_value)
{
    const struct gguf_value *v = gguf_find(file, key);
    if (!v)
        return -ENOENT;
    if (v->type == GGUF_U64) {
        *ret_value = load_u64(v->data);
        return 0;
    }
    int64_t i;
    if (!load_integer(v, &i) || i < 0)
        return -EINVAL;
    *ret_value = (uint64_t)i;
    return 0;
}

int gguf_get_f64(const struct gguf *file, const char *key, double *ret_value)
{
    const struct gguf_value *v = gguf_find(file, key);
    if (!v)
        return -ENOENT;
    int64_t i;
    float f;
    double d;
    if (v->type == GGUF_F32) {
        memcpy(&f, v->data, sizeof(f));
        d = (double)f;
    } else if (v->type == GGUF_F64) {
        memcpy(&d, v->data, sizeof(d));
    } else if (load_integer(v, &i)) {
        d = (double)i;
    } else {
        return -EINVAL;
    }
    *ret_value = d;
    return 0;
}

int gguf_get_bool(const struct gguf *file, const char *key, bool *ret_value)
{
    const struct gguf_value *v = gguf_find(file, key);
    if (!v)
        return -ENOENT;
    if (v->type != GGUF_BOOL)
        return -EINVAL;
    *ret_value = v->data[0] != 0;
    return 0;
}

int gguf_get_str(const struct gguf *file, const char *key, struct gguf_str *ret_value)
{
    const struct gguf_value *v = gguf_find(file, key);
    if (!v)
        return -ENOENT;
    if (v->type != GGUF_STRING)
        return -EINVAL;
    *ret_value = (struct gguf_str){(const char *)v->data + 8, load_u64(v->data)};
    return 0;
}

bool gguf_next_str(const struct gguf_value *array, const uint8_t **cursor, struct gguf_str *ret_str)
{
    struct reader r = {.at = *cursor, .end = array->end};
    if (array->item_type != GGUF_STRING || r.at >= r.end || !read_str(&r, ret_str))
        return false;
    *cursor = r.at;
    return true;
}

uint64_t gguf_n_tensors(const struct gguf *file)
{
    return file->n_tensors;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *file, uint64_t i)
{
    return i < file->n_tensors ? &file->tensors[i] : NULL;
}
