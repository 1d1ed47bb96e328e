#include "formats/gguf.h"
#include "gguf_build.h"
#include "worker/model/model.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIM = 64, N_HEADS = 2, HEAD_DIM = 32, FFN = 96, VOCAB = 20 };

/* What is wrong with the file; NULL and 0: nothing. */
struct defect {
    const char *name;      /* of the tensor in question */
    bool missing, extra, transposed;
    uint32_t type;         /* another ggml type */
    uint32_t type_bytes;   /* of the whole tensor in it */
    float first;           /* another first value */
};

static void add_tensor(struct gguf_build *b, const char *name, uint64_t rows, uint64_t cols, const struct defect *defect)
{
    static float values[VOCAB * FFN * 8];
    const uint64_t dims[] = {cols, rows}, transposed[] = {rows, cols};
    size_t n = rows * cols;
    bool hit = defect->name && strcmp(defect->name, name) == 0;
    cr_assert_leq(n, sizeof(values) / sizeof(values[0]));
    for (size_t i = 0; i < n; i++)
        values[i] = (float)(i % 17) / 16.0f;
    if (hit && defect->missing)
        return;
    if (hit && defect->first != 0)
        values[0] = defect->first;
    uint32_t n_dims = rows == 1 ? 1 : 2;
    if (hit && defect->type)
        gguf_build_tensor(b, name, defect->type, n_dims, dims, NULL, defect->type_bytes);
    else
        gguf_build_tensor(b, name, 0, n_dims, hit && defect->transposed ? transposed : dims, values, n * sizeof(float));
}

/* One layer; names by `arch`. qwen2's biases are left out unless `biases`. */
static void build_model(struct gguf_build *b, const char *arch, bool biases, const struct defect *defect)
{
    static const struct {
        const char *name;
        uint64_t rows, cols;
        bool bias;
    } tensors[] = {
        {"token_embd.weight", VOCAB, DIM, false},      {"output_norm.weight", 1, DIM, false},       {"blk.0.attn_norm.weight", 1, DIM, false},
        {"blk.0.attn_q.weight", DIM, DIM, false},      {"blk.0.attn_k.weight", HEAD_DIM, DIM, false}, {"blk.0.attn_v.weight", HEAD_DIM, DIM, false},
        {"blk.0.attn_output.weight", DIM, DIM, false}, {"blk.0.ffn_norm.weight", 1, DIM, false},    {"blk.0.ffn_gate.weight", FFN, DIM, false},
        {"blk.0.ffn_up.weight", FFN, DIM, false},      {"blk.0.ffn_down.weight", DIM, FFN, false},  {"blk.0.attn_q.bias", 1, DIM, true},
        {"blk.0.attn_k.bias", 1, HEAD_DIM, true},      {"blk.0.attn_v.bias", 1, HEAD_DIM, true},
    };
    static const struct gguf_number numbers[] = {{"block_count", 1}, {"context_length", 256}, {"embedding_length", DIM}, {"feed_forward_length", FFN},
                                                 {"attention.head_count", N_HEADS}, {"attention.head_count_kv", 1}};
    gguf_build_init(b);
    gguf_build_model(b, arch, numbers, sizeof(numbers) / sizeof(numbers[0]));
    for (size_t i = 0; i < sizeof(tensors) / sizeof(tensors[0]); i++)
        if (!tensors[i].bias || biases)
            add_tensor(b, tensors[i].name, tensors[i].rows, tensors[i].cols, defect);
    if (defect->extra)
        add_tensor(b, defect->name, 1, DIM, &(struct defect){0});
}

struct opened {
    struct buf file;
    struct weight_source source;
    struct model_config config;
    struct device *device;
    struct stream *stream;
    uint64_t done, total; /* as the progress callback saw them last */
    int n_progress;
};

static void open_build(struct opened *o, struct gguf_build *b)
{
    const struct device_config config = {.n_threads = 1};
    struct error err;
    *o = (struct opened){0};
    buf_init(&o->file, 1 << 20);
    gguf_build_finish(b, &o->file);
    gguf_build_fini(b);
    cr_assert_eq(gguf_open_memory(o->file.data, o->file.len, &o->source.gguf, &err), 0, "%s", err.text);
    cr_assert_eq(model_config_from_gguf(o->source.gguf, &o->config, &err), 0, "%s", err.text);
    cr_assert_eq(cpu_device_ops()->open(&config, &o->device), 0);
    cr_assert_eq(cpu_device_ops()->stream_create(o->device, &o->stream), 0);
}

/* Closing the device asserts that nothing is left allocated. */
static void close_build(struct opened *o)
{
    cpu_device_ops()->stream_free(o->stream);
    cpu_device_ops()->close(o->device);
    weight_source_close(&o->source);
    buf_fini(&o->file);
}

static void note_progress(void *arg, uint64_t done, uint64_t total)
{
    struct opened *o = arg;
    cr_expect_gt(done, o->done);
    o->done = done;
    o->total = total;
    o->n_progress++;
}

static int load(struct opened *o, struct model_weights *ret, struct error *err)
{
    const struct model_weights_params p = {
        .config = &o->config,
        .source = &o->source,
        .dev = cpu_device_ops(),
        .ops = cpu_kernel_ops(),
        .device = o->device,
        .stream = o->stream,
        .progress = note_progress,
        .progress_arg = o,
    };
    return model_weights_load(&p, ret, err);
}

static void check_refused(const char *arch, bool biases, struct defect defect, int code, const char *expected)
{
    struct gguf_build b;
    struct opened o;
    struct model_weights weights;
    struct error err = {0};
    build_model(&b, arch, biases, &defect);
    open_build(&o, &b);
    cr_expect_eq(load(&o, &weights, &err), code, "expected \"%s\"", expected);
    cr_expect(strstr(err.text, expected), "\"%s\" does not contain \"%s\"", err.text, expected);
    cr_expect_eq(o.n_progress, 0);
    close_build(&o);
}

Test(model_weights, wrong_tensors_are_named)
{
    check_refused("llama", false, (struct defect){.name = "blk.0.ffn_up.weight", .missing = true}, -EINVAL, "blk.0.ffn_up.weight is missing");
    check_refused("llama", false, (struct defect){.name = "blk.0.attn_k.weight", .transposed = true}, -EINVAL, "blk.0.attn_k.weight: its shape is [64, 32]");
    check_refused("llama", false, (struct defect){.name = "blk.0.attn_q.weight", .type = 7, .type_bytes = DIM * DIM / 32 * 24}, -ENOTSUP, "type Q5_1");
    check_refused("llama", false, (struct defect){.name = "output_norm.weight", .type = 8, .type_bytes = DIM / 32 * 34}, -ENOTSUP, "a vector must be");
    check_refused("qwen2", true, (struct defect){.name = "blk.0.attn_v.bias", .missing = true}, -EINVAL, "blk.0.attn_v.bias is missing");
}

Test(model_weights, unknown_tensors_are_refused)
{
    static const char *const names[] = {"blk.0.attn_q_norm.weight", "blk.1.attn_norm.weight", "blk.x.attn_norm.weight", "output_norm.bias", "extra"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        check_refused("llama", false, (struct defect){.name = names[i], .extra = true}, -ENOTSUP, names[i]);
}

static void load_ok(const char *arch, bool biases, struct defect defect, uint8_t digest[WEIGHTS_DIGEST_BYTES])
{
    struct gguf_build b;
    struct opened o;
    struct model_weights w;
    struct error err;
    build_model(&b, arch, biases, &defect);
    open_build(&o, &b);
    cr_assert_eq(load(&o, &w, &err), 0, "%s", err.text);
    memcpy(digest, w.digest, WEIGHTS_DIGEST_BYTES);
    cr_expect_eq(w.layers[0].attn_norm[3], 3.0f / 16);
    cr_expect_eq(w.head.packed, w.embedding.packed);
    cr_expect_eq(w.layers[0].q.bias != NULL, biases);
    cr_expect_null(w.layers[0].down.bias);
    cr_expect(w.layers[0].gate.w.n_rows == FFN && w.layers[0].gate.w.n_cols == DIM);
    cr_expect(o.done == o.total && o.total == w.file_bytes);
    model_weights_fini(&w, cpu_device_ops(), o.device);
    close_build(&o);
}

Test(model_weights, digest_follows_the_bytes)
{
    uint8_t one[WEIGHTS_DIGEST_BYTES], again[WEIGHTS_DIGEST_BYTES], other[WEIGHTS_DIGEST_BYTES], biased[WEIGHTS_DIGEST_BYTES];
    load_ok("llama", false, (struct defect){0}, one);
    load_ok("llama", false, (struct defect){0}, again);
    load_ok("llama", false, (struct defect){.name = "blk.0.ffn_down.weight", .first = 0.5f}, other);
    load_ok("qwen2", true, (struct defect){0}, biased);
    cr_expect_arr_eq(one, again, sizeof(one));
    cr_expect_arr_neq(one, other, sizeof(one));
    cr_expect_arr_neq(one, biased, sizeof(one));
}

Test(model_weights, memory_that_runs_out_is_given_back)
{
    struct gguf_build b;
    struct opened o;
    struct model_weights w;
    struct error err = {0};
    struct device_config config = {.n_threads = 1};
    struct device_memory_stats stats;
    build_model(&b, "llama", false, &(struct defect){0});
    open_build(&o, &b);
    cpu_device_ops()->memory_stats(o.device, &stats);
    cpu_device_ops()->stream_free(o.stream);
    cpu_device_ops()->close(o.device);
    /* Room for what the device itself takes and for the first tensors. */
    config.memory_limit = stats.total_now + 40000;
    cr_assert_eq(cpu_device_ops()->open(&config, &o.device), 0);
    cr_assert_eq(cpu_device_ops()->stream_create(o.device, &o.stream), 0);
    cr_expect_eq(load(&o, &w, &err), -ENOMEM);
    cr_expect(strstr(err.text, "no memory"), "%s", err.text);
    cr_expect_gt(o.n_progress, 0);
    close_build(&o);
}

Test(model_weights, fingerprint_follows_what_the_cache_depends_on)
{
    static const struct {
        enum kv_format format;
        int tp_degree, tp_rank;
        float eps;
        double freq;
    } cases[] = {{KV_FORMAT_K8V4, 1, 0, 1e-5f, 0.5}, {KV_FORMAT_K8V8, 1, 0, 1e-5f, 0.5}, {KV_FORMAT_K8V4, 2, 0, 1e-5f, 0.5},
                 {KV_FORMAT_K8V4, 2, 1, 1e-5f, 0.5}, {KV_FORMAT_K8V4, 1, 0, 2e-5f, 0.5}, {KV_FORMAT_K8V4, 1, 0, 1e-5f, 0.25}};
    enum { N = sizeof(cases) / sizeof(cases[0]) };
    uint8_t prints[N + 1][FINGERPRINT_BYTES];
    struct model m = {.config = {.n_layers = 1, .rope = {.n_freqs = 1, .factor = 1}}};
    for (int i = 0; i < N; i++) {
        m.config.rms_eps = cases[i].eps;
        m.config.rope.inv_freq[0] = cases[i].freq;
        model_fingerprint(&m, cases[i].format, cases[i].tp_degree, cases[i].tp_rank, prints[i]);
    }
    m.weights.digest[31] = 1;
    model_fingerprint(&m, KV_FORMAT_K8V4, 1, 0, prints[N]);
    for (int i = 0; i <= N; i++)
        for (int j = 0; j < i; j++)
            cr_expect_arr_neq(prints[i], prints[j], FINGERPRINT_BYTES, "cases %d and %d", i, j);
}

Test(model_weights, workspace_is_what_was_predicted)
{
    static const int sizes[] = {1, 7, 512, 1500};
    struct model m = {.config = {.n_heads = 4, .n_kv_heads = 2, .head_dim = 64, .dim = 200, .ffn_dim = 700}, .dev = cpu_device_ops(), .ops = cpu_kernel_ops()};
    cr_assert_eq(cpu_device_ops()->open(&(struct device_config){.n_threads = 1}, &m.device), 0);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct model_workspace ws;
        struct device_memory_stats stats;
        size_t n = (size_t)sizes[i];
        cr_assert_eq(model_workspace_init(&ws, &m, sizes[i], 0), 0);
        cpu_device_ops()->memory_stats(m.device, &stats);
        cr_expect_geq(stats.now[MEM_WORKSPACE], model_workspace_bytes(m.ops, &m.config, sizes[i], 0));
        cr_expect_eq(ws.bytes, model_workspace_bytes(m.ops, &m.config, sizes[i], 0));
        const char *end = (char *)ws.memory + ws.bytes;
        cr_expect((char *)(ws.v + n * 128) <= end && (char *)(ws.up + (size_t)ws.mlp_rows * 700) <= end);
        cr_expect(ws.q >= (float *)ws.attn_out + n * 256 && ws.gate >= (float *)ws.norm + n * 256);
        cr_expect(ws.k >= ws.q + n * 256 && ws.v >= ws.k + n * 128 && ws.up >= ws.gate + (size_t)ws.mlp_rows * 700);
        model_workspace_fini(&ws, &m);
    }
    struct model_workspace ws;
    cr_expect_eq(model_workspace_init(&ws, &m, 0, 0), -EINVAL);
    cpu_device_ops()->close(m.device);
}

static const char tiny_qwen2[] = "{\"architectures\":[\"Qwen2ForCausalLM\"],\"hidden_size\":64,\"intermediate_size\":96,\"num_hidden_layers\":2,\"num_attention_heads\":2,"
                                 "\"num_key_value_heads\":1,\"vocab_size\":300,\"max_position_embeddings\":256,\"rms_norm_eps\":1e-05,\"tie_word_embeddings\":false,\"rope_theta\":10000.0}";

static void open_random(const struct opened *o, uint64_t seed, struct model **ret_model)
{
    struct model_config config;
    struct error err = {0};
    cr_assert_geq(model_config_from_json(tiny_qwen2, sizeof(tiny_qwen2) - 1, NULL, 0, &config, &err), 0, "%s", err.text);
    const struct model_open_params p = {.random = &config, .random_seed = seed, .dev = cpu_device_ops(), .ops = cpu_kernel_ops(), .device = o->device, .stream = o->stream};
    cr_assert_geq(model_open(&p, ret_model, &err), 0, "%s", err.text);
}

/* A product's element is the same whatever else is computed with it, so lots of rows, of columns, and both are as good as all at once. */
Test(model_weights, mlp_in_lots_of_rows_and_columns_gives_the_same_bits)
{
    enum { N = 5, DIM_ = 64 };
    static const struct { size_t rows, outputs; } lots[] = {{N, SIZE_MAX}, {2, SIZE_MAX}, {N, N * 70}, {2, 2 * 32 + 1}, {3, 1}};
    struct opened o = {0};
    struct model *m;
    float expected[N * DIM_], x[N * DIM_];
    cr_assert_eq(cpu_device_ops()->open(&(struct device_config){.n_threads = 1}, &o.device), 0);
    cr_assert_eq(cpu_device_ops()->stream_create(o.device, &o.stream), 0);
    open_random(&o, 5, &m);
    for (size_t i = 0; i < sizeof(lots) / sizeof(lots[0]); i++) {
        struct kernel_ops ops = *cpu_kernel_ops();
        struct model_workspace ws;
        ops.matmul_rows = lots[i].rows, ops.matmul_outputs = lots[i].outputs;
        m->ops = &ops;
        cr_assert_eq(model_workspace_init(&ws, m, N, 100), 0);
        cr_expect_eq(ws.bytes, model_workspace_bytes(&ops, &m->config, N, 100));
        cr_expect((char *)ws.shared >= (char *)(ws.v + N * 32) && (char *)ws.shared + 100 <= (char *)ws.memory + ws.bytes);
        cr_expect((char *)(ws.up + ws.lot) <= (char *)ws.memory + ws.bytes);
        for (int j = 0; j < N * DIM_; j++) {
            x[j] = sinf((float)j);
            ((float *)ws.attn_out)[j] = cosf((float)j);
        }
        cr_assert_eq(model_layer_out(m, 0, x, N, &ws), 0);
        if (i == 0)
            memcpy(expected, x, sizeof(x));
        cr_expect_arr_eq(x, expected, sizeof(x), "rows %zu, outputs %zu", lots[i].rows, lots[i].outputs);
        model_workspace_fini(&ws, m);
    }
    model_close(m);
    cpu_device_ops()->stream_free(o.stream);
    cpu_device_ops()->close(o.device);
}

Test(model_weights, random_weights_are_whole_finite_and_of_their_seed)
{
    struct opened o = {0};
    struct model *m[3];
    float x[300], logits[300];
    struct model_workspace ws;
    cr_assert_eq(cpu_device_ops()->open(&(struct device_config){.n_threads = 1}, &o.device), 0);
    cr_assert_eq(cpu_device_ops()->stream_create(o.device, &o.stream), 0);
    for (int i = 0; i < 3; i++)
        open_random(&o, i < 2 ? 5 : 6, &m[i]);
    cr_expect_arr_eq(m[0]->weights.digest, m[1]->weights.digest, WEIGHTS_DIGEST_BYTES);
    cr_expect_arr_neq(m[0]->weights.digest, m[2]->weights.digest, WEIGHTS_DIGEST_BYTES);
    cr_expect_not_null(m[0]->weights.layers[1].k.bias);
    cr_expect_null(m[0]->weights.layers[1].o.bias);
    cr_expect_neq(m[0]->weights.head.packed, m[0]->weights.embedding.packed);
    cr_assert_eq(model_workspace_init(&ws, m[0], 1, 0), 0);
    cr_assert_eq(model_embed(m[0], &(int32_t){299}, 1, x), 0);
    cr_assert_eq(model_logits(m[0], x, 1, &ws, logits), 0);
    double squares = 0;
    for (int i = 0; i < 300; i++)
        squares += (double)logits[i] * (double)logits[i] / 300;
    cr_expect(squares > 1e-3 && squares < 1, "%g", squares); /* 64 products of a norm near 1 and a weight near 0.02 */
    model_workspace_fini(&ws, m[0]);
    for (int i = 0; i < 3; i++)
        model_close(m[i]);
    cpu_device_ops()->stream_free(o.stream);
    cpu_device_ops()->close(o.device);
}
