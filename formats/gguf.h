/* GGUF v2 and v3 files, little-endian, memory-mapped read-only. Every count, offset, length and size is checked against the file before use; the tensor
 * data of a tensor lies inside the file (offsets are multiples of general.alignment, 8 to 65536). Keys and tensor names are unique; arrays of arrays, more than 65536
 * entries or tensors, and tensor types whose size is not known are refused. Metadata and names are borrowed from the mapping and live until gguf_close. Any thread may read an open file.
 * Format: ggml/docs/gguf.md. */
#pragma once
#include "proto/base/error.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum gguf_type { GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL, GGUF_STRING, GGUF_ARRAY, GGUF_U64, GGUF_I64, GGUF_F64 };

struct gguf;
struct gguf_str { const char *data; uint64_t len; };

struct gguf_value {
    enum gguf_type type;      /* for arrays: GGUF_ARRAY, elements in `item_type` */
    enum gguf_type item_type;
    uint64_t n_items;
    const uint8_t *data;      /* raw little-endian bytes of a scalar, or of the array's items */
    const uint8_t *end;
};

struct gguf_tensor {
    struct gguf_str name;
    uint32_t ggml_type;       /* as in the file: 0 F32, 1 F16, 2 Q4_0, 3 Q4_1, 6 Q5_0, 8 Q8_0, 12 Q4_K, 13 Q5_K, 14 Q6_K, 30 BF16 */
    uint32_t n_dims;
    uint64_t dims[4];         /* dims[0] is the contiguous one (columns) */
    const void *data;         /* inside the mapping */
    uint64_t bytes;
};

/* Errors: the errno of opening or mapping, -EINVAL with the reason, -ENOMEM. */
int gguf_open(const char *path, struct gguf **ret_file, struct error *err);
/* The same over memory that the caller keeps alive (8-byte aligned); for tests and fuzzing. */
int gguf_open_memory(const void *data, size_t size, struct gguf **ret_file, struct error *err);
void gguf_close(struct gguf *file);
/* True if the file starts with the magic. */
bool gguf_is_file(const char *path);

const struct gguf_value *gguf_find(const struct gguf *file, const char *key); /* NULL if absent */
/* -ENOENT when absent, -EINVAL when of another type (any integer type is accepted for u64 if it is in range, any number for f64). */
int gguf_get_u64(const struct gguf *file, const char *key, uint64_t *ret_value);
int gguf_get_f64(const struct gguf *file, const char *key, double *ret_value);
int gguf_get_bool(const struct gguf *file, const char *key, bool *ret_value);
int gguf_get_str(const struct gguf *file, const char *key, struct gguf_str *ret_value);
/* Walks an array of strings: start with cursor = value->data; false at the end. */
bool gguf_next_str(const struct gguf_value *array, const uint8_t **cursor, struct gguf_str *ret_str);

/* "Q4_K"; "unknown" for a number that is not assigned. */
const char *gguf_tensor_type_name(uint32_t ggml_type);
uint64_t gguf_n_tensors(const struct gguf *file);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *file, uint64_t i); /* in file order; NULL beyond the end */
const struct gguf_tensor *gguf_find_tensor(const struct gguf *file, const char *name); /* NULL if absent */
