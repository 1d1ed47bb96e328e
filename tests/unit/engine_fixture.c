#include "tests/unit/engine_fixture.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct device_ops *device_in_use;
static const struct kernel_ops *ops_in_use;
static const struct fixture *opened_last;

void fixture_use_backend(const struct kernel_backend *backend)
{
    device_in_use = backend->device;
    ops_in_use = backend->ops;
}

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static float *random_floats(uint64_t *state, int64_t n, float std)
{
    float *x = malloc((size_t)n * sizeof(float));
    cr_assert(x);
    for (int64_t i = 0; i < n; i++)
        x[i] = std * 1.732f * ((float)(next_random(state) >> 40) / (1 << 23) - 1);
    return x;
}

static void *device_alloc(struct fixture *f, size_t bytes)
{
    void *p;
    cr_assert(f->dev->alloc(f->device, MEM_WEIGHTS, bytes, &p) >= 0);
    return p;
}

static struct weight pack(struct fixture *f, const float *source, int64_t n_rows, int64_t n_cols)
{
    const struct kernel_ops *ops = f->model.ops;
    void *packed = device_alloc(f, ops->weight_bytes(WEIGHT_F32, n_rows, n_cols));
    cr_assert(ops->weight_pack(f->stream, WEIGHT_F32, n_rows, n_cols, source, packed) >= 0);
    return (struct weight){.dtype = WEIGHT_F32, .n_rows = n_rows, .n_cols = n_cols, .packed = packed};
}

static float *norm_weights(struct fixture *f)
{
    float *w = device_alloc(f, TINY_DIM * sizeof(float)), host[TINY_DIM];
    for (int i = 0; i < TINY_DIM; i++)
        host[i] = 1 + 0.01f * (float)(i % 7);
    cr_assert(f->dev->copy(f->stream, w, host, sizeof(host)) >= 0);
    return w;
}

static void make_layer(struct fixture *f, int layer, uint64_t *state)
{
    const int q_dim = TINY_HEADS * TINY_HEAD_DIM, kv_dim = TINY_KV_HEADS * TINY_HEAD_DIM;
    struct tiny_layer *s = &f->source[layer];
    struct model_layer_weights *w = &f->model.weights.layers[layer];
    s->q = random_floats(state, q_dim * TINY_DIM, 0.2f);
    s->k = random_floats(state, kv_dim * TINY_DIM, 0.2f);
    s->v = random_floats(state, kv_dim * TINY_DIM, 0.12f);
    s->o = random_floats(state, TINY_DIM * q_dim, 0.06f);
    s->gate = random_floats(state, TINY_FFN * TINY_DIM, 0.12f);
    s->up = random_floats(state, TINY_FFN * TINY_DIM, 0.12f);
    s->down = random_floats(state, TINY_DIM * TINY_FFN, 0.1f);
    *w = (struct model_layer_weights){
        .attn_norm = norm_weights(f),
        .ffn_norm = norm_weights(f),
        .q.w = pack(f, s->q, q_dim, TINY_DIM),
        .k.w = pack(f, s->k, kv_dim, TINY_DIM),
        .v.w = pack(f, s->v, kv_dim, TINY_DIM),
        .o.w = pack(f, s->o, TINY_DIM, q_dim),
        .gate.w = pack(f, s->gate, TINY_FFN, TINY_DIM),
        .up.w = pack(f, s->up, TINY_FFN, TINY_DIM),
        .down.w = pack(f, s->down, TINY_DIM, TINY_FFN),
    };
}

/* Pairs are neighbours: ROPE_INTERLEAVED. */
static bool is_biased(int channel)
{
    const int pair = channel % TINY_HEAD_DIM / 2;
    return pair == 1 || pair == TINY_HEAD_DIM / 2 - 2;
}

/* The model does what it did, but for a bias on keys that the queries' small rows make bearable. */
static void add_key_bias(struct fixture *f, int layer, float sigmas)
{
    const int q_dim = TINY_HEADS * TINY_HEAD_DIM, kv_dim = TINY_KV_HEADS * TINY_HEAD_DIM;
    struct tiny_layer *s = &f->source[layer];
    struct model_layer_weights *w = &f->model.weights.layers[layer];
    float bias[TINY_KV_HEADS * TINY_HEAD_DIM];
    s->k_rest = calloc((size_t)kv_dim, sizeof(float));
    s->k_large = calloc((size_t)kv_dim, sizeof(float));
    cr_assert(s->k_rest && s->k_large);
    for (int i = 0; i < q_dim * TINY_DIM; i++)
        if (is_biased(i / TINY_DIM))
            s->q[i] /= 20;
    for (int i = 0; i < kv_dim; i++) {
        float *part = is_biased(i) ? s->k_large : s->k_rest;
        bias[i] = part[i] = is_biased(i) ? sigmas * 1.6f * (i % 3 ? 0.8f : -0.6f) : 0.1f * (float)(i % 5 - 2);
    }
    f->dev->free(f->device, (void *)w->q.w.packed);
    w->q.w = pack(f, s->q, q_dim, TINY_DIM);
    w->k.bias = device_alloc(f, sizeof(bias));
    cr_assert(f->dev->copy(f->stream, w->k.bias, bias, sizeof(bias)) >= 0);
}

static void make_config(struct model_config *c, int n_layers)
{
    *c = (struct model_config){
        .n_layers = n_layers,
        .dim = TINY_DIM,
        .n_heads = TINY_HEADS,
        .n_kv_heads = TINY_KV_HEADS,
        .head_dim = TINY_HEAD_DIM,
        .ffn_dim = TINY_FFN,
        .n_vocab = TINY_VOCAB,
        .rms_eps = 1e-5f,
        .attention_scale = 1 / sqrtf(TINY_HEAD_DIM),
        .rope_style = ROPE_INTERLEAVED,
        .rope_scaling = {.theta = 10000},
        .tied_embeddings = true,
        .trained_context = TINY_CONTEXT,
        .max_context = TINY_CONTEXT,
    };
    cr_assert(rope_freqs_init(&c->rope_scaling, TINY_HEAD_DIM, NULL, &c->rope, NULL) >= 0);
}

bool fixture_open(struct fixture *f, struct fixture_params params)
{
    const struct device_config config = {.n_threads = params.n_threads ? params.n_threads : 1, .isa = params.isa};
    if (!fixture_open_device(f, &config, params.n_layers ? params.n_layers : 3))
        return false;
    if (params.key_bias > 0) {
        struct error err = {0};
        for (int l = 0; l < f->model.weights.n_layers; l++)
            add_key_bias(f, l, params.key_bias);
        cr_assert(model_key_bias_split(&f->model, &err) >= 0, "%s", err.text);
        f->dev->memory_stats(f->device, &f->at_start);
    }
    return true;
}

bool fixture_open_device(struct fixture *f, const struct device_config *config, int n_layers)
{
    uint64_t state = 7;
    *f = (struct fixture){.dev = device_in_use ? device_in_use : cpu_device_ops()};
    opened_last = f;
    int r = f->dev->open(config, &f->device);
    if (r == -ENODEV)
        return false;
    cr_assert(r >= 0);
    cr_assert(f->dev->stream_create(f->device, &f->stream) >= 0);
    f->model = (struct model){.dev = f->dev, .ops = ops_in_use ? ops_in_use : cpu_kernel_ops(), .device = f->device, .stream = f->stream};
    make_config(&f->model.config, n_layers);
    struct model_weights *w = &f->model.weights;
    w->n_layers = f->model.config.n_layers;
    w->layers = calloc((size_t)w->n_layers, sizeof(*w->layers));
    cr_assert(w->layers && w->n_layers <= TINY_MAX_LAYERS);
    f->embedding = random_floats(&state, TINY_VOCAB * TINY_DIM, 1);
    w->embedding = w->head = pack(f, f->embedding, TINY_VOCAB, TINY_DIM);
    w->final_norm = norm_weights(f);
    for (int l = 0; l < w->n_layers; l++)
        make_layer(f, l, &state);
    memset(w->digest, w->n_layers, sizeof(w->digest));
    f->dev->memory_stats(f->device, &f->at_start);
    return true;
}

void fixture_poison_token(struct fixture *f, int32_t token)
{
    struct model_weights *w = &f->model.weights;
    const struct weight old = w->embedding;
    for (int i = 0; i < TINY_DIM; i++)
        f->embedding[token * TINY_DIM + i] = NAN;
    w->embedding = w->head = pack(f, f->embedding, TINY_VOCAB, TINY_DIM);
    f->dev->free(f->device, (void *)old.packed);
}

static void free_layer(struct fixture *f, int layer)
{
    struct model_layer_weights *w = &f->model.weights.layers[layer];
    struct tiny_layer *s = &f->source[layer];
    const struct model_linear *linears[] = {&w->q, &w->k, &w->v, &w->o, &w->gate, &w->up, &w->down};
    float *sources[] = {s->q, s->k, s->v, s->o, s->gate, s->up, s->down};
    for (size_t i = 0; i < 7; i++) {
        f->dev->free(f->device, (void *)linears[i]->w.packed);
        free(sources[i]);
    }
    free(s->k_rest);
    free(s->k_large);
    f->dev->free(f->device, w->k.bias);
    f->dev->free(f->device, w->attn_norm);
    f->dev->free(f->device, w->ffn_norm);
}

void fixture_close(struct fixture *f)
{
    for (int l = 0; l < f->model.weights.n_layers; l++)
        free_layer(f, l);
    model_key_bias_fini(&f->model);
    f->dev->free(f->device, f->model.weights.final_norm);
    f->dev->free(f->device, (void *)f->model.weights.embedding.packed);
    free(f->embedding);
    free(f->model.weights.layers);
    f->dev->stream_free(f->stream);
    f->dev->close(f->device);
}

const struct selector_ops *const fixture_selectors[FIXTURE_SELECTORS] = {
    &selector_snapkv, &selector_pyramidkv, &selector_adakv, &selector_chunkkv, &selector_keydiff, &selector_h2o, &selector_tova, &selector_streaming,
};

struct engine_config fixture_config(void)
{
    return (struct engine_config){
        .format = KV_FORMAT_K8V4,
        .selector = &selector_snapkv,
        .budget = 64,
        .recent = 32,
        .fetch = 64,
        .chunk = 96,
        .values = PREFILL_CONSISTENT,
        .order = PREFILL_LAYER_MAJOR,
        .max_context = TINY_CONTEXT,
        .max_batch = 8,
        .store_deadline_us = 5000000,
    };
}

struct engine *fixture_engine(struct fixture *f, const struct engine_config *config, struct kv_client *store)
{
    struct engine *engine;
    struct error err = {0};
    cr_assert(engine_create(config, &f->model, store, &engine, &err) >= 0, "%s", err.text);
    return engine;
}

void fixture_tokens(uint64_t seed, int32_t *tokens, int n)
{
    uint64_t state = seed * 1000003 + 17;
    for (int i = 0; i < n;) {
        const int span = 3 + (int)(next_random(&state) % 12);
        const bool again = i > 40 && next_random(&state) % 2;
        const int from = again ? (int)(next_random(&state) % (uint64_t)(i - 20)) : 0;
        for (int j = 0; j < span && i < n; j++, i++)
            tokens[i] = again ? tokens[from + j] : (int32_t)(next_random(&state) % TINY_VOCAB);
    }
}

struct sequence *fixture_prefilled(struct engine *engine, const struct fixture_run *run)
{
    const struct sequence_request request = {
        .prompt = run->tokens,
        .n_prompt = run->n_prompt,
        .max_new = run->n_decode,
        .no_cache = run->no_cache,
        .prompt_logprobs = run->prompt_logprobs,
    };
    struct sequence *seq;
    struct error err = {0};
    int r = sequence_create(engine, &request, &seq, &err);
    cr_assert(r >= 0, "%s", err.text);
    while ((r = sequence_prefill_step(seq)) > 0)
        ;
    cr_assert(r == 0, "prefill gives %d", r);
    cr_assert(coverage_check(seq, &err) >= 0, "%s", err.text);
    return seq;
}

void fixture_decode(struct engine *engine, struct sequence *seq, int32_t token)
{
    struct error err = {0};
    const int r = engine_decode(engine, &seq, &token, 1);
    cr_assert(r >= 0, "decode gives %d", r);
    cr_assert(coverage_check(seq, &err) >= 0, "%s", err.text);
}

/* Whose device it is does not matter on the CPU, where several fixtures may be open. */
void fixture_read_logits(const struct sequence *seq, float *row)
{
    const struct fixture *f = opened_last;
    cr_assert(f->dev->copy(f->stream, row, sequence_logits(seq), TINY_VOCAB * sizeof(float)) >= 0);
    cr_assert(f->dev->stream_sync(f->stream) >= 0);
}

float *fixture_logits(struct engine *engine, const struct fixture_run *run, struct sequence_stats *ret_stats)
{
    float *logits = malloc((size_t)(run->n_decode + 1) * TINY_VOCAB * sizeof(float));
    cr_assert(logits);
    struct sequence *seq = fixture_prefilled(engine, run);
    fixture_read_logits(seq, logits);
    for (int i = 0; i < run->n_decode; i++) {
        fixture_decode(engine, seq, run->tokens[run->n_prompt + i]);
        fixture_read_logits(seq, logits + (size_t)(i + 1) * TINY_VOCAB);
    }
    for (int i = 0; i < TINY_VOCAB; i++)
        cr_assert(isfinite(logits[i]));
    if (ret_stats)
        sequence_stats(seq, ret_stats);
    sequence_free(seq);
    return logits;
}

void fixture_expect_same(const float *a, const float *b, int n_rows, const char *what)
{
    for (int i = 0; i < n_rows; i++)
        cr_assert(memcmp(a + (size_t)i * TINY_VOCAB, b + (size_t)i * TINY_VOCAB, TINY_VOCAB * sizeof(float)) == 0, "%s: logits %d differ", what, i);
}

void fixture_expect_no_memory(const struct fixture *f)
{
    struct device_memory_stats stats;
    f->dev->memory_stats(f->device, &stats);
    for (int tag = 0; tag < MEM_LIBRARIES; tag++) /* libraries keep what they have built */
        cr_expect(stats.now[tag] == f->at_start.now[tag], "%s holds %zu bytes", mem_tag_name(tag), stats.now[tag]);
    cr_expect(stats.n_allocations == f->at_start.n_allocations);
}

float *fixture_run_logits(struct fixture_params params, const struct engine_config *config, const struct fixture_run *run)
{
    struct fixture f;
    if (!fixture_open(&f, params))
        return NULL;
    struct engine *engine = fixture_engine(&f, config, NULL);
    float *logits = fixture_logits(engine, run, NULL);
    engine_free(engine);
    fixture_expect_no_memory(&f);
    fixture_close(&f);
    return logits;
}

void fixture_expect_run_same(const float *want, struct fixture_params params, const struct engine_config *config, const struct fixture_run *run, const char *what)
{
    float *got = fixture_run_logits(params, config, run);
    if (!got) {
        fprintf(stderr, "skipped: this processor cannot do %s\n", what);
        return;
    }
    fixture_expect_same(want, got, 1 + run->n_decode, what);
    free(got);
}
