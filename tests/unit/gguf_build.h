/* Writes GGUF v3 files in memory, for tests. Out of memory ends the test program. */
#pragma once
#include "proto/base/buf.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gguf_build {
    struct buf entries, tensors, data;
    uint64_t n_entries, n_tensors;
};

void gguf_build_init(struct gguf_build *b);
void gguf_build_fini(struct gguf_build *b);
/* An entry with the given GGUF type number and its raw bytes. */
void gguf_build_raw(struct gguf_build *b, const char *key, uint32_t type, const void *value, size_t n);
void gguf_build_u32(struct gguf_build *b, const char *key, uint32_t value);
void gguf_build_f32(struct gguf_build *b, const char *key, float value);
void gguf_build_bool(struct gguf_build *b, const char *key, bool value);
void gguf_build_str(struct gguf_build *b, const char *key, const char *value);
void gguf_build_strings(struct gguf_build *b, const char *key, const char *const *values, uint64_t n);
struct gguf_number {
    const char *key; /* without the architecture's name in front */
    uint32_t value;
};
/* What every model has: its architecture, n numbers under its name, and an RMS norm's epsilon of 1e-5. */
void gguf_build_model(struct gguf_build *b, const char *arch, const struct gguf_number *numbers, size_t n);
/* dims[0] is the contiguous one. The data is padded to 32 bytes; NULL: zeros. */
void gguf_build_tensor(struct gguf_build *b, const char *name, uint32_t type, uint32_t n_dims, const uint64_t *dims, const void *data, size_t bytes);
/* The whole file in `out` (initialized by the caller). */
void gguf_build_finish(const struct gguf_build *b, struct buf *out);
