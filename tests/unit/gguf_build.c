#include "gguf_build.h"
#include "proto/base/base_assert.h"
#include <stdio.h>
#include <string.h>

enum { MAX_BYTES = 256 << 20, ALIGNMENT = 32 };

static void put(struct buf *b, const void *data, size_t n)
{
    ASSERT(buf_append(b, data, n) >= 0);
}

static void put_u32(struct buf *b, uint32_t v)
{
    put(b, &v, sizeof(v));
}

static void put_u64(struct buf *b, uint64_t v)
{
    put(b, &v, sizeof(v));
}

static void put_str(struct buf *b, const char *s)
{
    put_u64(b, strlen(s));
    put(b, s, strlen(s));
}

static void pad(struct buf *b, size_t alignment)
{
    static const uint8_t zeros[ALIGNMENT];
    put(b, zeros, (alignment - b->len % alignment) % alignment);
}

void gguf_build_init(struct gguf_build *b)
{
    *b = (struct gguf_build){0};
    buf_init(&b->entries, MAX_BYTES);
    buf_init(&b->tensors, MAX_BYTES);
    buf_init(&b->data, MAX_BYTES);
}

void gguf_build_fini(struct gguf_build *b)
{
    buf_fini(&b->entries);
    buf_fini(&b->tensors);
    buf_fini(&b->data);
}

void gguf_build_raw(struct gguf_build *b, const char *key, uint32_t type, const void *value, size_t n)
{
    put_str(&b->entries, key);
    put_u32(&b->entries, type);
    put(&b->entries, value, n);
    b->n_entries++;
}

void gguf_build_u32(struct gguf_build *b, const char *key, uint32_t value)
{
    gguf_build_raw(b, key, 4, &value, sizeof(value));
}

void gguf_build_f32(struct gguf_build *b, const char *key, float value)
{
    gguf_build_raw(b, key, 6, &value, sizeof(value));
}

void gguf_build_bool(struct gguf_build *b, const char *key, bool value)
{
    uint8_t byte = value;
    gguf_build_raw(b, key, 7, &byte, 1);
}

void gguf_build_str(struct gguf_build *b, const char *key, const char *value)
{
    gguf_build_raw(b, key, 8, NULL, 0);
    put_str(&b->entries, value);
}

void gguf_build_strings(struct gguf_build *b, const char *key, const char *const *values, uint64_t n)
{
    gguf_build_raw(b, key, 9, NULL, 0);
    put_u32(&b->entries, 8);
    put_u64(&b->entries, n);
    for (uint64_t i = 0; i < n; i++)
        put_str(&b->entries, values[i]);
}

void gguf_build_model(struct gguf_build *b, const char *arch, const struct gguf_number *numbers, size_t n)
{
    char key[96];
    gguf_build_str(b, "general.architecture", arch);
    for (size_t i = 0; i < n; i++) {
        snprintf(key, sizeof(key), "%s.%s", arch, numbers[i].key);
        gguf_build_u32(b, key, numbers[i].value);
    }
    snprintf(key, sizeof(key), "%s.attention.layer_norm_rms_epsilon", arch);
    gguf_build_f32(b, key, 1e-5f);
}

void gguf_build_tensor(struct gguf_build *b, const char *name, uint32_t type, uint32_t n_dims, const uint64_t *dims, const void *data, size_t bytes)
{
    put_str(&b->tensors, name);
    put_u32(&b->tensors, n_dims);
    for (uint32_t i = 0; i < n_dims; i++)
        put_u64(&b->tensors, dims[i]);
    put_u32(&b->tensors, type);
    put_u64(&b->tensors, b->data.len);
    if (data) {
        put(&b->data, data, bytes);
    } else {
        ASSERT(buf_reserve(&b->data, bytes) >= 0);
        for (size_t i = 0; i < bytes; i++)
            put(&b->data, "", 1);
    }
    pad(&b->data, ALIGNMENT);
    b->n_tensors++;
}

void gguf_build_finish(const struct gguf_build *b, struct buf *out)
{
    put(out, "GGUF", 4);
    put_u32(out, 3);
    put_u64(out, b->n_tensors);
    put_u64(out, b->n_entries);
    put(out, b->entries.data, b->entries.len);
    put(out, b->tensors.data, b->tensors.len);
    pad(out, ALIGNMENT);
    put(out, b->data.data, b->data.len);
}
