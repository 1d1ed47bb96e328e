/* Any bytes as a GGUF file: what opens can be read from end to end, and a configuration that is returned keeps its bounds. */
#include "formats/gguf.h"
#include "worker/model/model_config.h"
#include <stdlib.h>
#include <string.h>

static volatile uint64_t sink; /* keeps the reads */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint64_t sum_bytes(const void *data, uint64_t n)
{
    uint64_t sum = 0;
    for (uint64_t i = 0; i < n; i++)
        sum += ((const uint8_t *)data)[i];
    return sum;
}

static uint64_t read_tensors(const struct gguf *file)
{
    uint64_t sum = 0;
    for (uint64_t i = 0; i < gguf_n_tensors(file); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(file, i);
        sum += sum_bytes(t->data, t->bytes) + sum_bytes(t->name.data, t->name.len);
    }
    return sum;
}

static uint64_t read_words(const struct gguf *file)
{
    const struct gguf_value *words = gguf_find(file, "tokenizer.ggml.tokens");
    struct gguf_str s;
    uint64_t sum = 0;
    if (!words)
        return 0;
    const uint8_t *cursor = words->data;
    while (gguf_next_str(words, &cursor, &s))
        sum += sum_bytes(s.data, s.len);
    return sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct gguf *file;
    struct model_config config;
    struct error err;
    if (gguf_open_memory(data, size, &file, &err) < 0)
        return 0;
    sink += read_tensors(file) + read_words(file);
    if (model_config_from_gguf(file, &config, &err) >= 0 &&
        (config.head_dim % 32 != 0 || config.head_dim > MODEL_MAX_HEAD_DIM || config.n_heads % config.n_kv_heads != 0 || config.n_layers > MODEL_MAX_LAYERS))
        abort();
    gguf_close(file);
    return 0;
}
