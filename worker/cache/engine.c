/* The engine's own state: configuration, block layout, fingerprint, scratch memory of a unit or a step. */
#include "proto/base/base_assert.h"
#include "worker/cache/engine_private.h"
#include <errno.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>

enum {
    ENGINE_MAX_TOKENS = 1 << 24, /* bound on every count of tokens in the configuration */
    ENGINE_MAX_BATCH = 4096,
    LOGIT_ROWS = 16,             /* prompt rows whose logits are computed together */
    COMPARE_BYTES = 256 << 10,   /* of a private block beside the pool's, at a time */
    LOAD_STAGING = 256 << 20,    /* of a prompt's cached slices on their way in: 912 blocks of 128 tokens of Llama-3.1-8B in K8V4 */
    EXTENT_SPARES = 4,           /* private blocks whose memory is kept for the next ones */
    INDEX_SLAB = 16 << 20,       /* of index copies in one allocation: 14 blocks of Llama-3.1-8B */
    LOAD_GROUP = 4 << 20,        /* of them under one event: long beside what an event and a wait cost, short beside a layer */
    /* Part of the fingerprint: raise it when the arithmetic behind a block's bytes changes, so that blocks of an older build are not mixed in. */
    ENGINE_NUMERICS_VERSION = 4,
};

static int check_range(struct error *err, const char *name, int64_t value, int64_t min, int64_t max)
{
    if (value >= min && value <= max)
        return 0;
    return error_set(err, -EINVAL, "%s is %lld; allowed are %lld to %lld", name, (long long)value, (long long)min, (long long)max);
}

static int check_config(const struct engine_config *c, const struct model *model, struct error *err)
{
    const struct {
        const char *name;
        int64_t value, min, max;
    } limits[] = {
        {"format", c->format, 0, KV_FORMAT_COUNT - 1},
        {"budget", c->budget, 0, ENGINE_MAX_TOKENS},
        {"recent", c->recent, 0, ENGINE_MAX_TOKENS},
        {"fetch", c->fetch, 0, INT32_MAX},
        {"chunk", c->chunk, 1, INT32_MAX},
        {"values", c->values, PREFILL_CONSISTENT, PREFILL_EXACT},
        {"order", c->order, PREFILL_LAYER_MAJOR, PREFILL_CHUNK_MAJOR},
        {"bridge", c->bridge, BRIDGE_DEVICE, BRIDGE_AUTO},
        {"max_context", c->max_context, 1, model->config.max_context},
        {"max_batch", c->max_batch, 1, ENGINE_MAX_BATCH},
    };
    for (size_t i = 0; i < ARRAY_LEN(limits); i++)
        if (check_range(err, limits[i].name, limits[i].value, limits[i].min, limits[i].max) < 0)
            return -EINVAL;
    if (c->fetch_unit != 0 && c->fetch_unit != SUBPAGE_TOKENS && c->fetch_unit != BLOCK_TOKENS)
        return error_set(err, -EINVAL, "fetch_unit is %d; allowed are %d and %d", c->fetch_unit, SUBPAGE_TOKENS, BLOCK_TOKENS);
    if (model_is_sharded(&model->config) && !model->collective_ops)
        return error_set(err, -EINVAL, "rank %d of %d has no group to compute with", model->config.shard.rank, model->config.shard.n_ranks);
    return c->selector ? 0 : error_set(err, -EINVAL, "no selector; there are %s", selector_names());
}

/* Weights and sums are not the same on every sort of device, so neither are the last bits of a block: those of a CPU and of a GPU live side by side in one pool, under roots of their
 * own, and neither is taken for the other.
 * Exact prefill leaves other bytes in lossy blocks than consistent prefill does, and its runs must not start from decoded values: its blocks live under a root of
 * their own and are never looked up. In the bf16 format the two are the same thing. */
static void make_fingerprint(struct engine *engine)
{
    struct {
        char domain[20];
        uint8_t numerics, exact, arithmetic, pad;
        uint8_t model[FINGERPRINT_BYTES];
    } in = {.domain = "tidepool engine", .numerics = ENGINE_NUMERICS_VERSION, .exact = !engine->attended};
    struct device_properties properties;
    engine->model->dev->properties(engine->model->device, &properties);
    in.arithmetic = properties.arithmetic;
    const struct model_config *c = &engine->model->config;
    model_fingerprint(engine->model, engine->layout.format, model_is_sharded(c) ? c->shard.n_ranks : 1, c->shard.rank, in.model);
    crypto_generichash(engine->fingerprint, sizeof(engine->fingerprint), (const uint8_t *)&in, sizeof(in), NULL, 0);
}

/* The most kept rows that one KV head of a layer can get. */
static int kept_rows_max(const struct engine *engine)
{
    const struct engine_config *config = &engine->config;
    const struct selector_shape shape = {.n_kv_heads = engine->model->config.n_kv_heads, .ranks = engine->ranks};
    const int64_t most = config->selector->head_free_max(selector_n_kv_heads(&shape), config->budget);
    return most < config->max_context ? (int)most : config->max_context;
}

/* The most that is asked of the ops. */
static struct op_bounds op_bounds_of(const struct engine *engine)
{
    const struct engine_config *config = &engine->config;
    const struct model_config *c = &engine->model->config;
    return (struct op_bounds){
        .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads,
        .head_dim = c->head_dim,
        .n_vocab = c->n_vocab,
        .n_items = config->max_batch * c->n_kv_heads,
        .n_samples = config->max_batch,
        .n_rows = {kept_rows_max(engine), config->answer_stays ? config->max_context : min_int(config->recent + BLOCK_TOKENS, config->max_context)},
        .n_pages = config->max_context / SUBPAGE_TOKENS,
        .fetch_pages = engine->fetch_pages,
        .scorer = config->scorer->kernel,
        .fetch_blocks = config->fetch_unit == BLOCK_TOKENS,
        .n_keys = config->max_context,
        .n_queries = config->chunk,
        .n_window = config->selector->n_window,
        .n_bias_pairs = c->qkv_bias ? KEY_BIAS_PAIRS_MAX : 0,
    };
}

/* Floats in whole cache lines. */
static size_t line_floats(int64_t n)
{
    return ((size_t)n + 15) / 16 * 16;
}

/* Pieces of less than 96 KiB, slices of small models, cross the bus at less than a third of its rate, which they can afford. */
static void size_loads(const struct engine *engine, struct engine_sizes *s)
{
    const size_t limit = engine->config.load_staging ? engine->config.load_staging : LOAD_STAGING;
    const size_t group = limit / 2 < LOAD_GROUP ? limit / 2 : LOAD_GROUP;
    s->load_slice = round64(engine->layout.slice_bytes[1]);
    s->load_group = 1;
    while (s->load_group < PREFIX_LOAD_BLOCKS && 2 * (size_t)s->load_group * s->load_slice <= group)
        s->load_group *= 2;
    const size_t n = limit / ((size_t)s->load_group * s->load_slice);
    s->load_groups = n < 2 ? 2 : n < INT16_MAX ? (int)n : INT16_MAX;
}

static void size_index(const struct engine *engine, struct engine_sizes *s)
{
    s->index = round64(block_index_bytes(&engine->layout));
    const size_t n = (engine->config.index_slab ? engine->config.index_slab : INDEX_SLAB) / s->index;
    s->index_pieces = n < 1 ? 1 : n < DEVICE_SLAB_PIECES_MAX ? (int)n : DEVICE_SLAB_PIECES_MAX;
}

/* What the MLP's memory has room for while it is not at work. A chunk's own rows are done with when the layer's attention is, logits come after the last layer, and a selector when all chunks of
 * a layer are done: one place for the three. */
static void size_shared(const struct engine *engine, struct engine_sizes *s)
{
    const struct model *m = engine->model;
    const struct op_bounds products = {0};
    struct sequence_plan longest;
    sequence_plan_init(engine, engine->config.max_context, 0, &longest);
    s->selector = longest.selector_bytes;
    s->shared = s->logits_floats * sizeof(float);
    if (s->shared < s->own)
        s->shared = s->own;
    if (s->shared < s->selector)
        s->shared = s->selector;
    s->ops_apart = m->ops->scratch_bytes(m->stream, &products) > 0;
    s->shared_ops = s->shared;
    if (!s->ops_apart)
        s->shared += s->ops;
    s->activations = model_workspace_bytes(m->ops, &m->config, engine->n_max, s->shared);
}

static void size_engine(struct engine *engine)
{
    const struct model *m = engine->model;
    struct engine_sizes *s = &engine->sizes;
    const struct op_bounds bounds = op_bounds_of(engine);
    struct device_properties properties;

    m->dev->properties(m->device, &properties);
    s->libraries = properties.library_bytes;
    s->hidden_floats = line_floats((int64_t)engine->config.max_batch * m->config.dim);
    s->rope_floats = line_floats((int64_t)engine->n_max * m->config.head_dim);
    s->logits_floats = line_floats((int64_t)engine->n_logit_rows * m->config.n_vocab);
    s->scratch = (s->hidden_floats + s->rope_floats) * sizeof(float);
    s->bias = key_bias_tables_bytes(&m->config, engine->config.max_context);
    s->ops = m->ops->scratch_bytes(m->stream, &bounds);
    if (!engine->config.eager_steps && !model_is_sharded(&m->config)) /* ranks wait for one another within a step */
        s->step = round64(m->ops->step_bytes(&bounds, m->config.n_layers));
    if (model_is_sharded(&m->config)) {
        s->collective = m->collective_ops->device_bytes(m->config.shard.n_ranks, model_gather_columns(&m->config));
        s->collective_host = m->collective_ops->host_bytes(m->config.shard.n_ranks);
    }
    if (engine->attended)
        s->own = round64(2 * (size_t)m->config.n_kv_heads * (size_t)engine->own_rows * (size_t)m->config.head_dim * sizeof(bf16_t));
    if (!properties.host_memory) {
        s->slice = round64(engine->layout.slice_bytes[1]); /* block 0's are the longer ones */
        s->staging = STAGING_HALVES * (size_t)engine->n_chunk_blocks * s->slice;
        s->compare = COMPARE_BYTES;
        s->device_blocks = true;
        if (engine->config.scorer->kernel == PAGE_SCORER_INDEX2 && engine->fetch_pages != INT32_MAX) /* where all is attended nobody scores */
            size_index(engine, s);
        s->counts = round64((size_t)engine->config.max_batch * sizeof(struct page_counts));
        s->pages = device_pages_bytes(engine);
        size_loads(engine, s);
    }
    engine->bridge = properties.host_memory || engine->config.order == PREFILL_CHUNK_MAJOR ? BRIDGE_DEVICE : engine->config.bridge;
    size_shared(engine, s);
    engine->fixed_bytes = properties.fixed_bytes + s->libraries + s->scratch + s->activations + s->bias + (s->ops_apart ? s->ops : 0) + s->step + s->counts + s->staging + s->pages + s->collective;
}

static int alloc_device(struct engine *engine)
{
    const struct engine_sizes *s = &engine->sizes;
    const struct model *m = engine->model;
    int r = model_workspace_init(&engine->ws, m, engine->n_max, s->shared);
    if (r >= 0)
        r = key_bias_tables_init(&engine->bias, m, engine->config.max_context);
    if (r >= 0)
        r = m->dev->alloc(m->device, MEM_WORKSPACE, s->scratch, &engine->scratch);
    if (r >= 0 && s->ops_apart)
        r = m->dev->alloc(m->device, MEM_WORKSPACE, s->ops, &engine->op_scratch);
    if (r >= 0 && s->step)
        r = m->dev->alloc(m->device, MEM_WORKSPACE, s->step, &engine->step_args);
    if (r >= 0 && s->step)
        r = m->dev->steps_open(m->stream, engine->step_args, s->step);
    if (r >= 0 && s->counts)
        r = m->dev->alloc(m->device, MEM_WORKSPACE, s->counts, (void **)&engine->counts);
    if (r >= 0 && s->staging)
        r = slice_staging_open(engine);
    if (r >= 0 && s->staging)
        r = m->dev->copy_stream_create(m->device, &engine->in);
    if (r >= 0 && s->staging)
        r = m->dev->copy_stream_create(m->device, &engine->out);
    if (r >= 0 && s->staging)
        r = block_writes_open(engine);
    if (r >= 0 && s->device_blocks)
        r = device_blocks_create(m->dev, m->device, s->index, s->index_pieces, &engine->device_blocks);
    if (r >= 0 && s->device_blocks)
        r = device_slabs_create(m->dev, m->device, MEM_STAGING, round64(engine->layout.block_bytes[0]), 1, EXTENT_SPARES, &engine->extents);
    if (r < 0)
        return r;
    m->dev->stream_scratch(m->stream, s->ops_apart ? engine->op_scratch : (char *)engine->ws.shared + s->shared_ops, s->ops);
    engine->own = s->own ? engine->ws.shared : NULL;
    engine->logits = engine->ws.shared;
    engine->hidden = engine->scratch;
    engine->rope = engine->hidden + s->hidden_floats;
    return 0;
}

/* The table of chosen pages; none when all are attended, and none where reading it would make the host wait for the device in every layer. */
static size_t chosen_pages(const struct engine *engine)
{
    const size_t n_items = (size_t)engine->config.max_batch * (size_t)engine->model->config.n_kv_heads;
    return engine->fetch_pages == INT32_MAX || engine->sizes.counts ? 0 : n_items * (size_t)engine->fetch_pages + 1;
}

static size_t mask_rows(const struct engine *engine)
{
    return (size_t)engine->model->config.n_kv_heads * (size_t)(engine->config.max_context / SUBPAGE_TOKENS);
}

static size_t host_counts(const struct engine *engine)
{
    return engine->sizes.counts ? (size_t)engine->config.max_batch : 0;
}

/* Blocks of one call: a chunk completes them, a unit loads them, or one block of an answer has all layers. */
static size_t slices_max(const struct engine *engine)
{
    const int most = engine->n_chunk_blocks > PREFIX_LOAD_BLOCKS ? engine->n_chunk_blocks : PREFIX_LOAD_BLOCKS;
    return (size_t)(most > engine->model->config.n_layers ? most : engine->model->config.n_layers);
}

size_t engine_host_bytes(const struct engine *engine)
{
    const size_t n_items = (size_t)engine->config.max_batch * (size_t)engine->model->config.n_kv_heads;
    return sizeof(*engine) + (size_t)engine->n_max * (sizeof(*engine->dst) + sizeof(*engine->positions)) + slices_max(engine) * (sizeof(*engine->slices) + sizeof(*engine->copies)) +
           n_items * sizeof(*engine->items) +
           chosen_pages(engine) * sizeof(*engine->chosen) + mask_rows(engine) * sizeof(*engine->mask_rows) + host_counts(engine) * sizeof(*engine->host_counts) + engine->sizes.compare + engine->sizes.step +
           engine->sizes.collective_host + (engine->sizes.device_blocks ? DEVICE_BLOCKS_HOST_BYTES : 0);
}

static int alloc_host(struct engine *engine)
{
    const size_t n_items = (size_t)engine->config.max_batch * (size_t)engine->model->config.n_kv_heads, n_chosen = chosen_pages(engine);
    engine->dst = calloc((size_t)engine->n_max, sizeof(*engine->dst));
    engine->positions = calloc((size_t)engine->n_max, sizeof(*engine->positions));
    engine->slices = calloc(slices_max(engine), sizeof(*engine->slices));
    engine->copies = calloc(slices_max(engine), sizeof(*engine->copies));
    engine->items = calloc(n_items, sizeof(*engine->items));
    engine->mask_rows = calloc(mask_rows(engine) + 1, sizeof(*engine->mask_rows));
    if (n_chosen)
        engine->chosen = calloc(n_chosen, sizeof(*engine->chosen));
    if (engine->sizes.counts)
        engine->host_counts = calloc(host_counts(engine), sizeof(*engine->host_counts));
    if (engine->sizes.compare)
        engine->compare = malloc(engine->sizes.compare);
    if (!engine->dst || !engine->positions || !engine->slices || !engine->copies || !engine->items || !engine->mask_rows || (!engine->chosen && n_chosen) || (!engine->host_counts && engine->sizes.counts) ||
        (!engine->compare && engine->sizes.compare))
        return -ENOMEM;
    return 0;
}

static void derive(struct engine *engine)
{
    struct engine_config *c = &engine->config;
    if (c->chunk > c->max_context)
        c->chunk = c->max_context;
    engine->attended = c->values == PREFILL_CONSISTENT || c->format == KV_FORMAT_BF16;
    engine->reuse = engine->attended;
    if (!c->scorer)
        c->scorer = &scorer_index2;
    if (c->fetch_unit == 0)
        c->fetch_unit = SUBPAGE_TOKENS;
    /* More pages than a context has are all of them; that also bounds the table of chosen pages. */
    const int all_pages = c->max_context / SUBPAGE_TOKENS + 1, n_units = c->fetch / c->fetch_unit + (c->fetch % c->fetch_unit != 0);
    engine->fetch_pages = n_units * (c->fetch_unit / SUBPAGE_TOKENS);
    if (engine->fetch_pages >= all_pages)
        engine->fetch_pages = INT32_MAX;
    /* Where all is attended nobody chooses. */
    engine->summary_bytes = engine->fetch_pages == INT32_MAX ? 0 : page_summary_bytes(c->scorer->kernel, engine->model->config.head_dim);
    engine->n_max = c->chunk > c->max_batch ? c->chunk : c->max_batch;
    /* A chunk may begin behind the first token of a block. */
    engine->own_rows = c->chunk + BLOCK_TOKENS - 1;
    engine->n_chunk_blocks = engine->own_rows / BLOCK_TOKENS;
    engine->n_logit_rows = c->max_batch > LOGIT_ROWS ? c->max_batch : LOGIT_ROWS;
    if (engine->n_logit_rows > engine->n_max)
        engine->n_logit_rows = engine->n_max;
}

int engine_plan(const struct engine_config *config, struct model *model, struct engine *engine, struct error *err)
{
    const struct model_config *c = &model->config;
    int r = check_config(config, model, err);
    if (r < 0)
        return r;
    engine->config = *config;
    engine->model = model;
    derive(engine);
    if (model_is_sharded(c)) {
        engine->ranks = &engine->selector_ranks;
        r = selector_ranks_init(model, &engine->selector_ranks);
        if (r < 0)
            return error_set(err, r, "%d KV heads over %d ranks are more parts than %d", c->shard.all_kv_heads, c->shard.n_ranks, SCORE_PARTS_MAX);
    }
    r = block_layout_init(&engine->layout, config->format, (uint32_t)c->n_layers, (uint32_t)c->n_kv_heads, (uint32_t)c->head_dim);
    if (r < 0)
        return error_set(err, r, "no block layout for %d layers of %d KV heads of %d", c->n_layers, c->n_kv_heads, c->head_dim);
    size_engine(engine);
    if (config->memory_limit && engine->fixed_bytes >= config->memory_limit)
        return error_set(err, -EINVAL, "memory_limit is %zu, and the engine itself takes %zu bytes beyond the weights: allow more (--memory-limit), or lower --chunk or --max-running",
                         config->memory_limit, engine->fixed_bytes);
    return 0;
}

int engine_create(const struct engine_config *config, struct model *model, struct kv_client *store, struct engine **ret_engine, struct error *err)
{
    int r;
    if (sodium_init() < 0)
        return error_set(err, -ENOSYS, "libsodium does not start");
    struct engine *engine = calloc(1, sizeof(*engine));
    if (!engine)
        return error_set(err, -ENOMEM, "no memory for the engine");
    ASSERT(!model_is_sharded(&model->config) || model->collective);
    engine->model = model;
    engine->store = store;
    engine->pool_usable = true;
    r = engine_plan(config, model, engine, err);
    if (r < 0)
        goto fail;
    make_fingerprint(engine);
    r = alloc_device(engine);
    if (r >= 0)
        r = alloc_host(engine);
    if (r >= 0)
        r = page_traffic_open(engine);
    if (r < 0) {
        error_set(err, r, "no memory for the workspace of %d tokens", engine->n_max);
        goto fail;
    }
    *ret_engine = engine;
    return 0;
fail:
    engine_free(engine);
    return r;
}

void engine_free(struct engine *engine)
{
    if (!engine)
        return;
    ASSERT(engine->n_sequences == 0 && engine->committed_bytes == 0 && engine->n_indices == 0);
    const struct model *m = engine->model;
    if (engine->step_args)
        m->dev->steps_close(m->stream);
    page_cache_free(engine->page_cache);
    device_pages_close(engine);
    free(engine->compare);
    free(engine->host_counts);
    free(engine->chosen);
    free(engine->mask_rows);
    free(engine->items);
    free(engine->copies);
    free(engine->slices);
    free(engine->positions);
    free(engine->dst);
    device_slabs_free(engine->extents);
    device_blocks_free(engine->device_blocks);
    if (engine->ws.memory)
        m->dev->stream_scratch(m->stream, NULL, 0);
    block_writes_close(engine);
    m->dev->stream_free(engine->out);
    m->dev->stream_free(engine->in);
    slice_staging_close(engine);
    m->dev->free(m->device, engine->counts);
    m->dev->free(m->device, engine->step_args);
    m->dev->free(m->device, engine->op_scratch);
    m->dev->free(m->device, engine->scratch);
    key_bias_tables_fini(&engine->bias);
    model_workspace_fini(&engine->ws, m);
    free(engine);
}

void engine_step_stats(const struct engine *engine, struct step_stats *ret)
{
    engine->model->dev->step_stats(engine->model->stream, ret);
}

void engine_use_pool(struct engine *engine, bool use)
{
    engine->pool_usable = use;
}

size_t engine_workspace_bytes(const struct engine *engine)
{
    return engine->fixed_bytes;
}

void engine_fingerprint(const struct engine *engine, uint8_t ret_fingerprint[32])
{
    memcpy(ret_fingerprint, engine->fingerprint, FINGERPRINT_BYTES);
}

void engine_retrieval(const struct engine *engine, struct engine_retrieval *ret)
{
    const struct model_config *c = &engine->model->config;
    const int all_pages = engine->config.max_context / SUBPAGE_TOKENS;
    const bool all = engine->fetch_pages == INT32_MAX;
    *ret = (struct engine_retrieval){
        .fetch_tokens = all ? INT32_MAX : engine->fetch_pages * SUBPAGE_TOKENS,
        .step_bytes = (uint64_t)c->n_layers * (uint64_t)c->n_kv_heads * (uint64_t)(all ? all_pages : engine->fetch_pages) * engine->layout.page.bytes,
        .subpage_bytes = engine->layout.page.bytes,
        .index_bytes = engine->config.scorer == &scorer_index2 ? engine->layout.index_entry_bytes : 0,
        .summary_bytes = engine->summary_bytes,
    };
}
