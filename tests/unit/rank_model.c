#include "tests/unit/rank_model.h"
#include "tests/unit/gguf_build.h"
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Stored formats: random codes behind scales that are powers of two and give the values a mean of 0 and a deviation of some 0.07. Offsets are those of GGUF's blocks. */
static const struct {
    uint32_t ggml_type;
    int columns, bytes;
    struct { int at; uint16_t half; } scales[2];
    int n_scales;
} stored[WEIGHT_DTYPE_COUNT] = {
    [WEIGHT_F32] = {.ggml_type = 0, .columns = 1, .bytes = 4},
    [WEIGHT_F16] = {.ggml_type = 1, .columns = 1, .bytes = 2},
    [WEIGHT_BF16] = {.ggml_type = 30, .columns = 1, .bytes = 2},
    [WEIGHT_Q8_0] = {8, 32, 34, {{0, 0x1400}}, 1},
    [WEIGHT_Q4_0] = {2, 32, 18, {{0, 0x2400}}, 1},
    [WEIGHT_Q4_1] = {3, 32, 20, {{0, 0x2400}, {2, 0xaf80}}, 2},   /* m = -7.5 d */
    [WEIGHT_Q5_0] = {6, 32, 22, {{0, 0x2000}}, 1},
    [WEIGHT_Q4_K] = {12, 256, 144, {{0, 0x0c00}, {2, 0x1780}}, 2}, /* dmin = 7.5 d */
    [WEIGHT_Q5_K] = {13, 256, 176, {{0, 0x0800}, {2, 0x1780}}, 2}, /* dmin = 15 d */
    [WEIGHT_Q6_K] = {14, 256, 210, {{208, 0x0400}}, 1},
};

struct writer {
    const struct rank_model *model;
    struct gguf_build build;
    uint64_t state;
    int n_matrices;
};

static uint64_t next_bits(struct writer *w)
{
    uint64_t z = (w->state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static float uniform(struct writer *w, float scale)
{
    return scale * ((float)(next_bits(w) >> 40) / (1 << 23) - 1);
}

/* Values of 16 bits are cut, not rounded: any bits do. */
static void put_value(struct writer *w, enum weight_dtype dtype, float scale, uint8_t *to)
{
    union { float f; uint32_t u; } x = {.f = uniform(w, scale)};
    uint16_t half = (uint16_t)(x.u >> 16);
    if (dtype == WEIGHT_F32) {
        memcpy(to, &x, 4);
        return;
    }
    if (dtype == WEIGHT_F16) /* exponents of what is below 1 fit; tiny values become 0 */
        half = (x.u >> 23 & 255) < 113 ? 0 : (uint16_t)((x.u >> 16 & 0x8000) | ((x.u >> 23 & 255) - 112) << 10 | (x.u >> 13 & 0x3ff));
    memcpy(to, &half, 2);
}

static void put_blocks(struct writer *w, enum weight_dtype dtype, int64_t n, float scale, uint8_t *to)
{
    for (int64_t i = 0; i < n; i++, to += stored[dtype].bytes) {
        if (stored[dtype].n_scales == 0) {
            put_value(w, dtype, scale, to);
            continue;
        }
        for (int b = 0; b < stored[dtype].bytes; b++)
            to[b] = (uint8_t)next_bits(w);
        for (int s = 0; s < stored[dtype].n_scales; s++)
            memcpy(to + stored[dtype].scales[s].at, &stored[dtype].scales[s].half, 2);
    }
}

static void tensor(struct writer *w, const char *name, enum weight_dtype dtype, uint64_t rows, uint64_t cols, float scale)
{
    const uint64_t dims[2] = {cols, rows};
    const size_t n = rows * cols / (uint64_t)stored[dtype].columns, bytes = n * (size_t)stored[dtype].bytes;
    uint8_t *data = malloc(bytes);
    cr_assert(data);
    put_blocks(w, dtype, (int64_t)n, scale, data);
    gguf_build_tensor(&w->build, name, stored[dtype].ggml_type, rows == 1 ? 1 : 2, dims, data, bytes);
    free(data);
}

static void matrix(struct writer *w, const char *name, int rows, int cols)
{
    enum weight_dtype dtype = w->model->dtypes[w->n_matrices++ % w->model->n_dtypes];
    if (cols % stored[dtype].columns != 0)
        dtype = WEIGHT_F32;
    tensor(w, name, dtype, (uint64_t)rows, (uint64_t)cols, 0.18f);
}

static void norm(struct writer *w, const char *name)
{
    float values[1024];
    const uint64_t dims[1] = {(uint64_t)w->model->dim};
    cr_assert_leq(w->model->dim, 1024);
    for (int i = 0; i < w->model->dim; i++)
        values[i] = 1 + uniform(w, 0.1f);
    gguf_build_tensor(&w->build, name, 0, 1, dims, values, (size_t)w->model->dim * sizeof(float));
}

/* Of keys: two pairs of each head stand out, as in Qwen2. */
static void bias(struct writer *w, const char *name, int n, bool keys)
{
    float values[1024];
    const uint64_t dims[1] = {(uint64_t)n};
    cr_assert_leq(n, 1024);
    for (int i = 0; i < n; i++)
        values[i] = uniform(w, keys && i % w->model->head_dim % (w->model->head_dim / 2) < 2 ? 12 : 0.2f);
    gguf_build_tensor(&w->build, name, 0, 1, dims, values, (size_t)n * sizeof(float));
}

static void layer(struct writer *w, int l)
{
    const struct rank_model *m = w->model;
    const int q = m->n_heads * m->head_dim, kv = m->n_kv_heads * m->head_dim;
    const struct { const char *name; int rows, cols; bool biased; } matrices[] = {
        {"attn_q", q, m->dim, true}, {"attn_k", kv, m->dim, true}, {"attn_v", kv, m->dim, true}, {"attn_output", m->dim, q, true},
        {"ffn_gate", m->ffn_dim, m->dim, false}, {"ffn_up", m->ffn_dim, m->dim, false}, {"ffn_down", m->dim, m->ffn_dim, true},
    };
    const bool biases = strcmp(m->arch, "qwen2") == 0;
    char name[64];
    for (size_t i = 0; i < sizeof(matrices) / sizeof(matrices[0]); i++) {
        snprintf(name, sizeof(name), "blk.%d.%s.weight", l, matrices[i].name);
        matrix(w, name, matrices[i].rows, matrices[i].cols);
        snprintf(name, sizeof(name), "blk.%d.%s.bias", l, matrices[i].name);
        if (biases && matrices[i].biased)
            bias(w, name, matrices[i].rows, i == 1);
    }
    snprintf(name, sizeof(name), "blk.%d.attn_norm.weight", l);
    norm(w, name);
    snprintf(name, sizeof(name), "blk.%d.ffn_norm.weight", l);
    norm(w, name);
}

static void write_file(const struct gguf_build *build, const char *path)
{
    struct buf out;
    buf_init(&out, 64 << 20);
    gguf_build_finish(build, &out);
    FILE *f = fopen(path, "we");
    cr_assert(f, "%s", path);
    cr_assert(fwrite(out.data, 1, out.len, f) == out.len && fclose(f) == 0);
    buf_fini(&out);
}

void rank_model_write(const struct rank_model *m, const char *path)
{
    struct writer w = {.model = m, .state = 42};
    const struct gguf_number numbers[] = {
        {"block_count", (uint32_t)m->n_layers}, {"context_length", (uint32_t)m->context}, {"embedding_length", (uint32_t)m->dim}, {"feed_forward_length", (uint32_t)m->ffn_dim},
        {"attention.head_count", (uint32_t)m->n_heads}, {"attention.head_count_kv", (uint32_t)m->n_kv_heads}, {"attention.key_length", (uint32_t)m->head_dim},
        {"attention.value_length", (uint32_t)m->head_dim}, {"rope.dimension_count", (uint32_t)m->head_dim},
    };
    gguf_build_init(&w.build);
    gguf_build_model(&w.build, m->arch, numbers, sizeof(numbers) / sizeof(numbers[0]));
    tensor(&w, "token_embd.weight", WEIGHT_F32, (uint64_t)m->n_vocab, (uint64_t)m->dim, m->tied ? 0.15f : 0.5f); /* so small that a tied head does not only repeat */
    norm(&w, "output_norm.weight");
    if (!m->tied)
        matrix(&w, "output.weight", m->n_vocab, m->dim);
    for (int l = 0; l < m->n_layers; l++)
        layer(&w, l);
    write_file(&w.build, path);
    gguf_build_fini(&w.build);
}
