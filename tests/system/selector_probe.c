/* What the selectors choose, for a test that computes the same from the formulas (test_selectors.py). Everything goes through the engine's own code and ops.
 *
 *   selector_probe case IN OUT                      each selector on the queries and keys of a file
 *   selector_probe engine MODEL IN OUT KEYS         each selector in the engine over a model and a prompt; KEYS gets the queries and keys of every layer
 *
 * Files are little-endian and trusted. IN of a case: int32 n_heads, n_kv_heads, head_dim, n_keys, first, last, n_free, n_threads; queries fp32 [n_keys, n_heads, head_dim]; keys
 * bf16 [n_kv_heads, n_keys, head_dim]. IN of an engine: int32 budget, recent, chunk, n_threads, n_prompt; int32 tokens [n_prompt]. KEYS: int32 n_layers, n_heads, n_kv_heads,
 * head_dim; for each layer queries and keys as above. OUT: a line of text for each selector, layer and KV head: name, layer, head, then the positions. */
#include "worker/cache/coverage.h"
#include "worker/cache/engine.h"
#include "worker/cache/selector.h"
#include "worker/model/model.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const names[] = {"h2o", "snapkv", "pyramidkv", "adakv", "chunkkv", "keydiff", "tova", "streaming"};
enum { N_NAMES = sizeof(names) / sizeof(names[0]) };

static void fail(const char *what, int r)
{
    fprintf(stderr, "selector_probe: %s: %d\n", what, r);
    exit(1);
}

static FILE *open_file(const char *path, const char *mode)
{
    FILE *file = fopen(path, mode);
    if (!file)
        fail(path, -1);
    return file;
}

static void *read_array(FILE *file, size_t n, size_t size)
{
    void *x = calloc(n + 1, size);
    if (!x || fread(x, size, n, file) != n)
        fail("the input is too short", 0);
    return x;
}

static void write_line(FILE *out, const char *name, int layer, int head, const int32_t *positions, int n)
{
    fprintf(out, "%s %d %d", name, layer, head);
    for (int i = 0; i < n; i++)
        fprintf(out, " %d", positions[i]);
    fputc('\n', out);
}

/* ---- case ---- */

struct probe_case {
    int32_t n_heads, n_kv_heads, head_dim, n_keys, first, last, n_free, n_threads;
};

struct probe_device {
    struct device *device;
    struct stream *stream;
};

static void open_device(struct probe_device *d, int n_threads)
{
    const struct device_config config = {.n_threads = n_threads};
    int r = cpu_device_ops()->open(&config, &d->device);
    if (r >= 0)
        r = cpu_device_ops()->stream_create(d->device, &d->stream);
    if (r < 0)
        fail("the device", r);
}

static void close_device(struct probe_device *d)
{
    cpu_device_ops()->stream_free(d->stream);
    cpu_device_ops()->close(d->device);
}

/* Column sums over the whole prompt, in calls of 50 queries. */
static float *column_sums(const struct probe_case *c, struct stream *stream, const float *q, const bf16_t *k, float scale)
{
    const int row = c->n_heads * c->head_dim;
    float *sums = calloc((size_t)c->n_kv_heads * (size_t)c->n_keys, sizeof(float));
    float *out = calloc((size_t)(BLOCK_TOKENS * row), sizeof(float)), *ml = calloc((size_t)(BLOCK_TOKENS * c->n_heads), 2 * sizeof(float));
    for (int pos = 0, n, r; pos < c->n_keys; pos += n) {
        const int in_block = BLOCK_TOKENS - pos % BLOCK_TOKENS, left = c->n_keys - pos;
        n = in_block < 50 ? in_block : 50;
        n = n < left ? n : left;
        const struct attn_prefill_params p = {.q = q + (int64_t)pos * row, .pos0 = pos, .n_q = n, .k = k, .v = k, .head_stride = (int64_t)c->n_keys * c->head_dim,
                                              .n_heads = c->n_heads, .n_kv_heads = c->n_kv_heads, .head_dim = c->head_dim, .scale = scale, .out = out, .ret_ml = ml};
        const struct column_sum_params sum = {.attn = &p, .sums = sums, .sum_stride = c->n_keys};
        if ((r = cpu_kernel_ops()->attn_prefill(stream, &p)) < 0 || (r = cpu_kernel_ops()->attn_column_sums(stream, &sum)) < 0)
            fail("column sums", r);
    }
    free(out);
    free(ml);
    return sums;
}

static void run_selector(const struct probe_case *c, struct probe_device *d, const char *name, const float *q, const bf16_t *k, const float *sums, float scale, FILE *out)
{
    const struct selector_ops *s = selector_find(name);
    const struct selector_shape shape = {.n_kv_heads = c->n_kv_heads, .n_keys = c->n_keys, .n_candidates = c->last - c->first, .n_free = c->n_free};
    const int n_window = s->n_window < c->n_keys ? s->n_window : c->n_keys;
    const size_t bytes = s->scratch_bytes(&shape);
    int32_t *n = calloc((size_t)c->n_kv_heads, sizeof(*n)), *indices = calloc((size_t)c->n_kv_heads * (size_t)c->n_free, sizeof(*indices)), *from = indices;
    struct selector_input in = {
        .dev = cpu_device_ops(), .ops = cpu_kernel_ops(), .stream = d->stream, .q = n_window ? q + (int64_t)(c->n_keys - n_window) * c->n_heads * c->head_dim : NULL,
        .n_window = n_window, .column_sums = s->all_queries ? sums : NULL, .k = k, .head_stride = (int64_t)c->n_keys * c->head_dim, .n_keys = c->n_keys,
        .n_heads = c->n_heads, .n_kv_heads = c->n_kv_heads, .head_dim = c->head_dim, .scale = scale, .first = c->first, .last = c->last, .n_free = c->n_free,
    };
    int r = bytes ? in.dev->alloc(d->device, MEM_WORKSPACE, bytes, &in.scratch) : 0;
    if (r >= 0)
        r = s->select(&in, n, indices);
    if (r < 0)
        fail(name, r);
    for (int h = 0; h < c->n_kv_heads; h++) {
        write_line(out, name, 0, h, from, n[h]);
        from += n[h];
    }
    in.dev->free(d->device, in.scratch);
    free(n);
    free(indices);
}

static void run_case(const char *in_path, const char *out_path)
{
    FILE *in = open_file(in_path, "rb"), *out = open_file(out_path, "w");
    struct probe_case *c = read_array(in, 1, sizeof(*c));
    float *q = read_array(in, (size_t)c->n_keys * (size_t)(c->n_heads * c->head_dim), sizeof(*q));
    bf16_t *k = read_array(in, (size_t)c->n_keys * (size_t)(c->n_kv_heads * c->head_dim), sizeof(*k));
    const float scale = 0.125f;
    struct probe_device d;
    open_device(&d, c->n_threads);
    float *sums = column_sums(c, d.stream, q, k, scale);
    for (int i = 0; i < N_NAMES; i++)
        run_selector(c, &d, names[i], q, k, sums, scale, out);
    close_device(&d);
    free(sums), free(q), free(k), free(c);
    fclose(in);
    fclose(out);
}

/* ---- engine ---- */

/* Queries and keys as attn_prefill sees them. Layer-major, so a call at position 0 opens the next layer. In the bf16 format keys do not change behind it. */
struct recording {
    int layer, n_layers, n_prompt;
    float **q;   /* [n_layers][n_prompt, n_heads, head_dim] */
    bf16_t **k;  /* [n_layers][n_kv_heads, n_prompt, head_dim] */
};
static struct recording recording;

static int record_attn_prefill(struct stream *s, const struct attn_prefill_params *p)
{
    struct recording *r = &recording;
    const size_t row = (size_t)p->n_heads * (size_t)p->head_dim, d = (size_t)p->head_dim;
    r->layer += p->pos0 == 0;
    if (r->layer < r->n_layers) {
        memcpy(r->q[r->layer] + (size_t)p->pos0 * row, p->q, (size_t)p->n_q * row * sizeof(float));
        for (int h = 0; h < p->n_kv_heads; h++)
            memcpy(r->k[r->layer] + ((size_t)h * (size_t)r->n_prompt + (size_t)p->pos0) * d, p->k + h * p->head_stride + p->pos0 * p->head_dim,
                   (size_t)p->n_q * d * sizeof(bf16_t));
    }
    return cpu_kernel_ops()->attn_prefill(s, p);
}

static void start_recording(const struct model_config *c, int n_prompt)
{
    recording = (struct recording){.layer = -1, .n_layers = c->n_layers, .n_prompt = n_prompt};
    recording.q = calloc((size_t)c->n_layers, sizeof(*recording.q));
    recording.k = calloc((size_t)c->n_layers, sizeof(*recording.k));
    for (int i = 0; recording.q && recording.k && i < c->n_layers; i++) {
        recording.q[i] = calloc((size_t)n_prompt * (size_t)(c->n_heads * c->head_dim), sizeof(float));
        recording.k[i] = calloc((size_t)n_prompt * (size_t)(c->n_kv_heads * c->head_dim), sizeof(bf16_t));
    }
}

static void write_recording(const struct model_config *c, const char *path)
{
    FILE *out = open_file(path, "wb");
    const int32_t head[] = {c->n_layers, c->n_heads, c->n_kv_heads, c->head_dim};
    fwrite(head, sizeof(head), 1, out);
    for (int i = 0; i < c->n_layers; i++) {
        fwrite(recording.q[i], sizeof(float), (size_t)recording.n_prompt * (size_t)(c->n_heads * c->head_dim), out);
        fwrite(recording.k[i], sizeof(bf16_t), (size_t)recording.n_prompt * (size_t)(c->n_kv_heads * c->head_dim), out);
        free(recording.q[i]);
        free(recording.k[i]);
    }
    free(recording.q);
    free(recording.k);
    recording = (struct recording){0};
    fclose(out);
}

struct probe_engine {
    int32_t budget, recent, chunk, n_threads, n_prompt;
};

static void run_prompt(struct model *model, const struct probe_engine *e, const int32_t *tokens, const char *name, FILE *out)
{
    const struct engine_config config = {.format = KV_FORMAT_BF16, .selector = selector_find(name), .budget = e->budget, .recent = e->recent, .fetch = 256, .chunk = e->chunk,
                                         .max_context = e->n_prompt + 1, .max_batch = 1};
    const struct sequence_request request = {.prompt = tokens, .n_prompt = e->n_prompt, .max_new = 1};
    struct engine *engine;
    struct sequence *seq = NULL;
    struct error err;
    int r = engine_create(&config, model, NULL, &engine, &err);
    if (r >= 0)
        r = sequence_create(engine, &request, &seq, &err);
    if (r < 0)
        fail(err.text, r);
    while ((r = sequence_prefill_step(seq)) > 0)
        ;
    if (r < 0 || coverage_check(seq, &err) < 0)
        fail(name, r);
    for (int layer = 0; layer < model->config.n_layers; layer++) {
        for (int h = 0; h < model->config.n_kv_heads; h++) {
            int n;
            const int32_t *kept = coverage_kept(seq, layer, h, &n);
            write_line(out, name, layer, h, kept, n);
        }
    }
    sequence_free(seq);
    engine_free(engine);
}

/* H2O comes first: with it every query goes through attention, in the last layer too. */
static void run_engine(const char *model_path, const char *in_path, const char *out_path, const char *keys_path)
{
    FILE *in = open_file(in_path, "rb"), *out = open_file(out_path, "w");
    struct probe_engine *e = read_array(in, 1, sizeof(*e));
    int32_t *tokens = read_array(in, (size_t)e->n_prompt, sizeof(*tokens));
    struct kernel_ops ops = *cpu_kernel_ops();
    struct probe_device d;
    struct model *model;
    struct error err;
    ops.attn_prefill = record_attn_prefill;
    open_device(&d, e->n_threads);
    const struct model_open_params p = {.path = model_path, .dev = cpu_device_ops(), .ops = &ops, .device = d.device, .stream = d.stream};
    if (model_open(&p, &model, &err) < 0)
        fail(err.text, -1);
    start_recording(&model->config, e->n_prompt);
    for (int i = 0; i < N_NAMES; i++) {
        run_prompt(model, e, tokens, names[i], out);
        if (i == 0)
            write_recording(&model->config, keys_path);
    }
    model_close(model);
    close_device(&d);
    free(tokens), free(e);
    fclose(in);
    fclose(out);
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "case") == 0)
        run_case(argv[2], argv[3]);
    else if (argc == 6 && strcmp(argv[1], "engine") == 0)
        run_engine(argv[2], argv[3], argv[4], argv[5]);
    else
        fail("usage: selector_probe case IN OUT | engine MODEL IN OUT KEYS", 2);
    return 0;
}
