#include "tests/system/tiny_gguf.h"

#include "tests/unit/gguf_build.h"
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 2, DIM = 128, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 32, FFN = 256 };

static uint64_t state;

/* Uniform in -scale .. scale, repeatable. */
static float draw(float scale)
{
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return scale * ((float)(state >> 40) / (1 << 23) - 1);
}

static void matrix(struct gguf_build *b, const char *name, uint64_t rows, uint64_t cols, float scale)
{
    const uint64_t dims[2] = {cols, rows};
    float *values = malloc(rows * cols * sizeof *values);

    cr_assert_not_null(values);
    for (uint64_t i = 0; i < rows * cols; i++)
        values[i] = draw(scale);
    gguf_build_tensor(b, name, 0, 2, dims, values, rows * cols * sizeof *values);
    free(values);
}

static void norm(struct gguf_build *b, const char *name)
{
    const uint64_t dims[1] = {DIM};
    float values[DIM];

    for (int i = 0; i < DIM; i++)
        values[i] = 1 + draw(0.1f);
    gguf_build_tensor(b, name, 0, 1, dims, values, sizeof values);
}

static void layer(struct gguf_build *b, int l)
{
    const struct {
        const char *name;
        uint64_t rows, cols;
    } matrices[] = {
        {"attn_q", HEADS * HEAD_DIM, DIM}, {"attn_k", KV_HEADS * HEAD_DIM, DIM}, {"attn_v", KV_HEADS * HEAD_DIM, DIM},
        {"attn_output", DIM, HEADS * HEAD_DIM}, {"ffn_gate", FFN, DIM}, {"ffn_up", FFN, DIM}, {"ffn_down", DIM, FFN},
    };
    char name[64];

    for (size_t i = 0; i < sizeof matrices / sizeof matrices[0]; i++) {
        snprintf(name, sizeof name, "blk.%d.%s.weight", l, matrices[i].name);
        matrix(b, name, matrices[i].rows, matrices[i].cols, 0.15f);
    }
    snprintf(name, sizeof name, "blk.%d.attn_norm.weight", l);
    norm(b, name);
    snprintf(name, sizeof name, "blk.%d.ffn_norm.weight", l);
    norm(b, name);
}

static void metadata(struct gguf_build *b)
{
    const struct {
        const char *key;
        uint32_t value;
    } numbers[] = {
        {"llama.block_count", LAYERS}, {"llama.context_length", TINY_GGUF_CONTEXT}, {"llama.embedding_length", DIM},
        {"llama.feed_forward_length", FFN}, {"llama.attention.head_count", HEADS}, {"llama.attention.head_count_kv", KV_HEADS},
        {"llama.attention.key_length", HEAD_DIM}, {"llama.attention.value_length", HEAD_DIM}, {"llama.rope.dimension_count", HEAD_DIM},
    };

    gguf_build_str(b, "general.architecture", "llama");
    gguf_build_str(b, "general.name", "tiny");
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        gguf_build_u32(b, numbers[i].key, numbers[i].value);
    gguf_build_f32(b, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    gguf_build_f32(b, "llama.rope.freq_base", 10000);
}

void tiny_gguf_write(const char *path)
{
    struct gguf_build b;
    struct buf out;
    FILE *f;

    state = 42;
    gguf_build_init(&b);
    buf_init(&out, 64 << 20);
    metadata(&b);
    matrix(&b, "token_embd.weight", TINY_GGUF_VOCAB, DIM, 1);
    norm(&b, "output_norm.weight");
    for (int l = 0; l < LAYERS; l++)
        layer(&b, l);
    gguf_build_finish(&b, &out);
    f = fopen(path, "we");
    cr_assert_not_null(f, "%s", path);
    cr_assert_eq(fwrite(out.data, 1, out.len, f), out.len);
    cr_assert_eq(fclose(f), 0);
    buf_fini(&out);
    gguf_build_fini(&b);
}
