/* A sequence from admission to its end. Everything it can ever need is allocated or promised here, so that it never runs out half-way. */
#include "worker/cache/engine_private.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SALT = 1024 };

static int check_tokens(const int32_t *tokens, int n, int n_vocab, const char *what, struct error *err)
{
    for (int i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= n_vocab)
            return error_set(err, -EINVAL, "token %d of the %s is %d; the vocabulary has %d", i, what, tokens[i], n_vocab);
    return 0;
}

static int check_request(const struct engine *engine, const struct sequence_request *request, struct error *err)
{
    const int n_vocab = engine->model->config.n_vocab;
    if (request->n_salt > MAX_SALT)
        return error_set(err, -EINVAL, "the cache salt has %zu bytes; at most %d are allowed", request->n_salt, MAX_SALT);
    int r = engine_admits(engine, request->n_prompt, request->max_new, err);
    if (r < 0)
        return r;
    if (request->n_answer < 0 || request->n_answer > request->max_new)
        return error_set(err, -EINVAL, "%d tokens of the answer are known; it may have %d", request->n_answer, request->max_new);
    if (check_tokens(request->prompt, request->n_prompt, n_vocab, "prompt", err) < 0 || check_tokens(request->answer, request->n_answer, n_vocab, "answer", err) < 0)
        return -EINVAL;
    return r == 0 ? error_set(err, -EAGAIN, "the sequence has to wait for device memory") : 0;
}

/* The host arrays of a sequence are listed once, to be allocated or to be counted. */
struct host_arrays {
    bool count_only;
    bool failed;
    size_t bytes;
};

static void *host_array(struct host_arrays *arrays, size_t n, size_t size)
{
    arrays->bytes += n * size;
    if (arrays->count_only)
        return NULL;
    void *array = calloc(n ? n : 1, size);
    arrays->failed |= !array;
    return array;
}

static void take_host_arrays(struct sequence *seq, bool prompt_logprobs, struct host_arrays *a)
{
    const struct sequence_plan *p = &seq->plan;
    const struct model_config *c = &seq->engine->model->config;
    const size_t n_lists = (size_t)c->n_layers * (size_t)c->n_kv_heads;

    seq->tokens = host_array(a, (size_t)p->n_total, sizeof(*seq->tokens));
    seq->keys = host_array(a, (size_t)p->n_blocks, sizeof(*seq->keys));
    seq->leases = host_array(a, (size_t)p->n_blocks, sizeof(*seq->leases));
    seq->blocks = host_array(a, (size_t)p->n_blocks, sizeof(*seq->blocks));
    seq->layers = host_array(a, (size_t)c->n_layers, sizeof(*seq->layers));
    seq->kept = host_array(a, (size_t)p->kept_rows, sizeof(*seq->kept));
    seq->head_first = host_array(a, (size_t)c->n_layers * ((size_t)c->n_kv_heads + 1), sizeof(*seq->head_first));
    seq->n_prompt_pages = host_array(a, n_lists, sizeof(*seq->n_prompt_pages));
    if (prompt_logprobs)
        seq->prompt_logprobs = host_array(a, (size_t)p->n_prompt - 1, sizeof(float));
}

size_t sequence_host_bytes(struct engine *engine, const struct sequence_plan *plan)
{
    struct sequence seq = {.engine = engine, .plan = *plan};
    struct host_arrays arrays = {.count_only = true};
    take_host_arrays(&seq, false, &arrays);
    return sizeof(seq) + arrays.bytes;
}

/* Each layer's kept rows, one layer after the other. */
static void place_layers(struct sequence *seq)
{
    int64_t first = 0;
    for (int layer = 0; layer < seq->engine->model->config.n_layers; layer++) {
        seq->layers[layer] = (struct layer_rows){.first = first, .n_rows = sequence_plan_layer_rows(seq->engine, &seq->plan, layer)};
        first += seq->layers[layer].n_rows;
    }
    ASSERT(first == seq->plan.kept_rows);
}

static int alloc_host(struct sequence *seq, bool prompt_logprobs)
{
    struct host_arrays arrays = {0};

    take_host_arrays(seq, prompt_logprobs, &arrays);
    if (arrays.failed)
        return -ENOMEM;
    place_layers(seq);
    return 0;
}

/* One piece of device memory, or NULL for 0 bytes. */
static int alloc_device(const struct sequence *seq, enum mem_tag tag, size_t bytes, void *ret_memory)
{
    const struct model *m = seq->engine->model;
    void *memory = NULL;
    int r = bytes ? m->dev->alloc(m->device, tag, bytes, &memory) : 0;
    if (r >= 0)
        memcpy(ret_memory, &memory, sizeof(memory));
    return r;
}

static int alloc_device_memory(struct sequence *seq)
{
    struct prefill *f = &seq->prefill;
    void *const where[PIECE_COUNT] = {
        [PIECE_FAST] = &seq->fast,     [PIECE_KEPT] = &seq->kept_device, [PIECE_TABLE] = &seq->table,  [PIECE_MASKS] = &seq->masks,
        [PIECE_SUMMARIES] = &seq->summaries, [PIECE_LOGITS] = &seq->logits, [PIECE_ACTIVE_KV] = &f->active, [PIECE_BRIDGE] = &f->bridge.rows,
        [PIECE_WINDOW] = &f->window,   [PIECE_COLUMNS] = &f->columns,    [PIECE_INDICES] = &f->indices,
        [PIECE_LOADS] = &f->loads.ring, [PIECE_BAD] = &seq->bad,
    };
    struct sequence_piece pieces[PIECE_COUNT];
    int r = 0;
    ASSERT(seq->plan.selector_bytes <= seq->engine->sizes.selector);
    sequence_plan_pieces(seq->engine, &seq->plan, f->n_new, pieces);
    for (int i = 0; r >= 0 && i < PIECE_COUNT; i++)
        r = alloc_device(seq, pieces[i].tag, pieces[i].bytes, where[i]);
    if (r >= 0)
        r = seq->engine->model->dev->copy(seq->engine->model->stream, seq->bad, &seq->n_bad, sizeof(*seq->bad));
    if (r >= 0)
        r = bridge_open(seq);
    return r >= 0 ? prefix_load_open(seq) : r;
}

/* What a rank does without the others. A sequence that has begun is in *seq after an error, too. */
static int begin(struct engine *engine, const struct sequence_request *request, struct sequence **seq, struct error *err)
{
    int r = check_request(engine, request, err);
    if (r < 0)
        return r;
    struct sequence *s = *seq = calloc(1, sizeof(*s));
    if (!s)
        return error_set(err, -ENOMEM, "no memory for a sequence");
    s->engine = engine;
    s->tag = request->tag;
    engine->n_sequences++;
    sequence_plan_init(engine, request->n_prompt, request->max_new, &s->plan);
    s->recent_first = s->plan.recent_first;
    s->shared = engine->store && engine->pool_usable && !request->no_cache;
    r = alloc_host(s, request->prompt_logprobs);
    if (r < 0)
        return error_set(err, r, "no host memory for a sequence of %d tokens", s->plan.n_total);
    memcpy(s->tokens, request->prompt, (size_t)request->n_prompt * sizeof(*s->tokens));
    if (request->n_answer)
        memcpy(s->tokens + request->n_prompt, request->answer, (size_t)request->n_answer * sizeof(*s->tokens));
    sequence_blocks_find(s, request);
    return 0;
}

/* What the pool has of a sequence is what it has for every rank. A block that it has for this one alone is taken when the prompt gets there, like any that another run has made. */
static int agree_on_found(const struct engine *engine, struct sequence *seq, int result, struct error *err)
{
    int32_t found[] = {result, seq ? seq->n_cached : 0, seq ? seq->n_restorable : 0};
    if (!engine->config.peers)
        return result;
    int r = engine_agree(engine, found, ARRAY_LEN(found));
    if (r < 0)
        return error_set(err, r, "the group of ranks has broken");
    if (found[0] < 0)
        return result == found[0] ? result : error_set(err, found[0], "another rank cannot take the sequence: %s", strerror(-found[0]));
    seq->n_cached = found[1];
    answer_blocks_trim(seq, found[2]);
    return 0;
}

static int take_memory(struct sequence *seq, struct error *err)
{
    int r = sequence_blocks_admit(seq, err);
    if (r < 0)
        return r;
    prefill_init(seq);
    r = alloc_device_memory(seq);
    if (r >= 0)
        r = slow_tier_init(seq);
    return r < 0 ? error_set(err, r, "no memory for a sequence of %d tokens", seq->plan.n_total) : 0;
}

int sequence_create(struct engine *engine, const struct sequence_request *request, struct sequence **ret_sequence, struct error *err)
{
    struct sequence *seq = NULL;
    int r = begin(engine, request, &seq, err);
    r = agree_on_found(engine, seq, r, err);
    if (r >= 0)
        r = engine_agree_result(engine, take_memory(seq, err), err);
    if (r < 0) {
        sequence_free(seq);
        return r;
    }
    *ret_sequence = seq;
    return 0;
}

uint32_t sequence_tag(const struct sequence *seq)
{
    return seq->tag;
}

/* Spare slabs go when their memory is promised to somebody. */
void sequence_commit(struct sequence *seq, size_t bytes, int n_indices)
{
    struct engine *e = seq->engine;
    e->committed_bytes += bytes - seq->committed_bytes;
    e->n_indices += n_indices - seq->n_indices;
    seq->committed_bytes = bytes;
    seq->n_indices = n_indices;
    if (e->config.memory_limit && engine_promised_bytes(e) + engine_spare_bytes(e) > e->config.memory_limit)
        engine_trim(e);
    page_traffic_fit(e);
}

void sequence_prefill_memory_free(struct sequence *seq)
{
    const struct model *m = seq->engine->model;
    struct prefill *f = &seq->prefill;
    m->dev->free(m->device, f->indices);
    m->dev->free(m->device, f->columns);
    m->dev->free(m->device, f->window);
    m->dev->free(m->device, f->loads.ring);
    m->dev->free(m->device, f->bridge.rows);
    m->dev->free(m->device, f->active);
    prefix_load_close(seq);
    bridge_close(seq);
    f->indices = NULL;
    f->columns = f->window = NULL;
    f->active = NULL;
}

void sequence_free(struct sequence *seq)
{
    if (!seq)
        return;
    const struct model *m = seq->engine->model;
    sequence_prefill_memory_free(seq);
    m->dev->free(m->device, seq->bad);
    m->dev->free(m->device, seq->logits);
    m->dev->free(m->device, seq->summaries);
    m->dev->free(m->device, seq->masks);
    m->dev->free(m->device, seq->table);
    m->dev->free(m->device, seq->kept_device);
    m->dev->free(m->device, seq->fast);
    sequence_blocks_fini(seq);
    if (--seq->engine->n_sequences == 0)
        engine_trim(seq->engine);
    sequence_commit(seq, 0, 0);
    free(seq->prompt_logprobs);
    free(seq->n_prompt_pages);
    free(seq->head_first);
    free(seq->kept);
    free(seq->layers);
    free(seq->blocks);
    free(seq->leases);
    free(seq->keys);
    free(seq->tokens);
    free(seq);
}

const float *sequence_logits(const struct sequence *seq)
{
    return seq->phase == SEQUENCE_DECODE ? seq->logits : NULL;
}

const float *sequence_prompt_logprobs(const struct sequence *seq)
{
    return seq->phase == SEQUENCE_DECODE ? seq->prompt_logprobs : NULL;
}

const int32_t *sequence_tokens(const struct sequence *seq, int *ret_n)
{
    *ret_n = seq->phase == SEQUENCE_DECODE ? seq->n_tokens : seq->plan.n_prompt;
    return seq->tokens;
}

void sequence_stats(const struct sequence *seq, struct sequence_stats *ret)
{
    *ret = seq->stats;
    ret->n_prompt = seq->plan.n_prompt;
    ret->n_cached = seq->n_cached;
    ret->n_restored = seq->n_restorable ? seq->n_restorable - seq->plan.n_prompt : 0;
    sequence_tokens(seq, &ret->n_tokens);
    ret->units_done = seq->prefill.unit;
    ret->units_total = seq->prefill.n_units;
}
