/* The blocks of one sequence: their keys, where their bytes lie, and what a layer's completion does with them. A block that the pool does not take has the same bytes in a
 * private extent, so results never depend on the store's answers. */
#include "proto/base/clock.h"
#include "worker/cache/engine_private.h"
#include <errno.h>
#include <stdlib.h>

static uint64_t block_length(const struct sequence *seq, int block)
{
    return seq->engine->layout.block_bytes[block == 0];
}

static void make_prompt_keys(struct sequence *seq, const struct sequence_request *request)
{
    block_key_root(seq->engine->fingerprint, request->salt, request->n_salt, &seq->root);
    const struct block_key *parent = &seq->root;
    for (int b = 0; b < seq->plan.n_prompt_blocks; b++) {
        block_key_next(parent, seq->tokens + (size_t)b * BLOCK_TOKENS, &seq->keys[b]);
        parent = &seq->keys[b];
    }
}

/* Takes the lease on a sealed block. A length that is not this layout's means another program's block under this key: it is not used. */
static bool adopt_sealed(struct sequence *seq, int block)
{
    struct kv_lease *lease = &seq->leases[block];
    if (lease->length != block_length(seq, block)) {
        kv_client_release(seq->engine->store, lease, 1);
        return false;
    }
    seq->blocks[block].place = BLOCK_SEALED;
    seq->blocks[block].data = lease->data;
    return true;
}

static uint64_t left_us(uint64_t end_us)
{
    const uint64_t now_us = clock_now_us();
    return now_us < end_us ? end_us - now_us : 0;
}

static int piece(int n)
{
    return n < KV_BLOCKS_MAX ? n : KV_BLOCKS_MAX;
}

/* Leases of the longest sealed run of keys[first..last-1], taken or not. */
static int lookup_run(struct sequence *seq, int first, int last, uint64_t end_us)
{
    int found = first;
    for (int asked = first; found == asked && asked < last; asked += piece(last - asked)) {
        const int r = kv_client_lookup(seq->engine->store, seq->keys + asked, piece(last - asked), left_us(end_us), seq->leases + asked);
        found += r > 0 ? r : 0;
    }
    return found - first;
}

int sequence_blocks_lookup(struct sequence *seq, int first, int last, uint64_t end_us)
{
    const int n = lookup_run(seq, first, last, end_us);
    int hits = 0;
    while (hits < n && adopt_sealed(seq, first + hits))
        hits++;
    kv_client_release(seq->engine->store, seq->leases + first + hits, n - hits);
    return hits;
}

/* The reusable prefix. It ends before the tokens whose queries the selector observes and before the last token, whose logits are wanted. A selector that observes all queries
 * leaves none. */
static void lookup_prefix(struct sequence *seq, const struct sequence_request *request, uint64_t end_us)
{
    const int computed = seq->plan.n_window > 1 ? seq->plan.n_window : 1;
    const int limit = (seq->plan.n_prompt - computed) / BLOCK_TOKENS;
    if (!seq->engine->reuse || request->prompt_logprobs || seq->plan.all_queries || limit <= 0)
        return;
    const int hits = sequence_blocks_lookup(seq, 0, limit, end_us);
    seq->n_cached = hits * BLOCK_TOKENS;
    for (int b = 0; b < hits; b++)
        seq->stats.bytes_loaded += block_length(seq, b);
}

static void adopt_reserved(struct sequence *seq, int block, enum kv_reserve_status status)
{
    struct kv_lease *lease = &seq->leases[block];
    if (status == KV_RESERVE_EXISTS && adopt_sealed(seq, block)) {
        seq->stats.bytes_loaded += seq->engine->attended ? lease->length : 0; /* exact prefill has its own values */
    } else if (status == KV_RESERVE_GRANTED) {
        seq->blocks[block].place = BLOCK_GRANTED;
        seq->blocks[block].data = lease->data;
    }
}

static void reserve_some(struct sequence *seq, int from, int n, struct kv_reserve_block *wanted, enum kv_reserve_status *status, uint64_t end_us)
{
    for (int i = 0; i < n; i++) {
        const int b = from + i;
        wanted[i] = (struct kv_reserve_block){
            .key = seq->keys[b],
            .parent = b ? seq->keys[b - 1] : seq->root,
            .first = b == 0,
            .position = (uint32_t)b,
            .length = block_length(seq, b),
        };
    }
    if (kv_client_reserve(seq->engine->store, wanted, n, left_us(end_us), status, seq->leases + from) < 0)
        return;
    for (int i = 0; i < n; i++)
        adopt_reserved(seq, from + i, status[i]);
}

/* Phase one of the put for the prompt's other full blocks. Whatever fails leaves blocks ABSENT, and they become private. */
static void reserve_rest(struct sequence *seq, uint64_t end_us)
{
    const int n = seq->plan.n_prompt_blocks;
    struct kv_reserve_block *wanted = calloc((size_t)piece(n) + 1, sizeof(*wanted));
    enum kv_reserve_status *status = calloc((size_t)piece(n) + 1, sizeof(*status));
    for (int from = seq->n_cached / BLOCK_TOKENS; wanted && status && from < n; from += piece(n - from))
        reserve_some(seq, from, piece(n - from), wanted, status, end_us);
    free(status);
    free(wanted);
}

int sequence_block_alloc_private(struct sequence *seq, int block)
{
    const struct engine *e = seq->engine;
    const struct model *m = e->model;
    struct device_piece piece = {0};
    void *data;
    const bool pooled = e->extents && block > 0;
    const int r = pooled ? device_slabs_take(e->extents, &piece) : m->dev->alloc(m->device, MEM_STAGING, seq->plan.block_bytes[block == 0], &data);
    if (r < 0)
        return r;
    seq->blocks[block].place = BLOCK_PRIVATE;
    seq->blocks[block].data = pooled ? piece.memory : data;
    seq->blocks[block].piece = piece;
    seq->stats.private_blocks++;
    return 0;
}

void sequence_extent_free(struct sequence *seq, const struct sequence_block *block)
{
    const struct model *m = seq->engine->model;
    if (block->piece.memory)
        device_slabs_give(seq->engine->extents, block->piece);
    else
        m->dev->free(m->device, block->data);
    seq->stats.private_blocks--;
}

static bool is_in_pool(const struct sequence *seq, int block)
{
    return seq->blocks[block].place == BLOCK_GRANTED || seq->blocks[block].place == BLOCK_SEALED;
}

size_t sequence_blocks_bytes(const struct sequence *seq, bool prompt)
{
    size_t bytes = 0;
    for (int b = 0; b < seq->plan.n_blocks; b++)
        if (!is_in_pool(seq, b) && (!prompt || b < seq->plan.n_prompt_blocks || seq->blocks[b].place != BLOCK_ABSENT))
            bytes += seq->plan.block_bytes[b == 0];
    return bytes;
}

int sequence_blocks_indices(const struct sequence *seq)
{
    const int last = sequence_plan_indices(seq->engine, &seq->plan, seq->plan.n_blocks);
    int n = 0;
    for (int b = 0; b < last; b++)
        n += is_in_pool(seq, b);
    return n;
}

/* The ops of the prompt fill it, but for blocks of the answer, of which only those in the recent window are decoded, and for those that exact prefill does not look into. */
static int take_index(struct sequence *seq, int block)
{
    const int r = device_index_take(seq, block);
    const bool apart = seq->blocks[block].place == BLOCK_SEALED && (block >= seq->plan.n_prompt_blocks || !seq->engine->attended);
    return r >= 0 && apart ? device_index_load(seq, block) : r;
}

/* The store has answered: what it did not take has to fit here. Blocks made while decoding are promised now and allocated when they are made. */
int sequence_blocks_admit(struct sequence *seq, struct error *err)
{
    const int n_indices = sequence_blocks_indices(seq);
    size_t bytes;
    int r = sequence_plan_choose(seq->engine, &seq->plan, seq->plan.n_prompt - seq->n_cached, sequence_blocks_bytes(seq, true), sequence_blocks_bytes(seq, false), n_indices,
                                 &bytes, err);
    if (r == -E2BIG && seq->engine->store && !seq->engine->pool_usable)
        r = 0; /* with the pool, which is on its way, it may fit */
    if (r < 0)
        return r;
    if (r == 0)
        return error_set(err, -EAGAIN, "the sequence has to wait for %zu bytes of device memory", bytes);
    sequence_commit(seq, bytes, n_indices);
    for (int b = 0; b < seq->plan.n_prompt_blocks; b++) {
        if (seq->blocks[b].place != BLOCK_ABSENT)
            continue;
        r = sequence_block_alloc_private(seq, b);
        if (r < 0)
            return error_set(err, r, "no memory for a block of %zu bytes", seq->plan.block_bytes[b == 0]);
    }
    for (int b = 0; r >= 0 && b < seq->plan.n_blocks; b++)
        r = take_index(seq, b);
    return r < 0 ? error_set(err, r, "no memory for the index of a block") : 0;
}

void sequence_blocks_find(struct sequence *seq, const struct sequence_request *request)
{
    if (!seq->shared)
        return;
    const uint64_t end_us = clock_now_us() + seq->engine->config.store_deadline_us;
    make_prompt_keys(seq, request);
    lookup_prefix(seq, request, end_us);
    reserve_rest(seq, end_us);
    answer_blocks_lookup(seq, request, end_us);
}

/* A sequence may end in the middle of its prompt, with slices on their way to or from blocks that are about to be somebody else's. */
void sequence_blocks_wait(struct sequence *seq)
{
    const struct engine *e = seq->engine;
    struct stream *const streams[] = {e->model->stream, e->in, e->out};
    for (size_t i = 0; seq->blocks && seq->shared && i < ARRAY_LEN(streams); i++)
        if (streams[i])
            (void)e->model->dev->stream_sync(streams[i]); /* a device that has failed writes nothing any more */
}

void sequence_blocks_fini(struct sequence *seq)
{
    sequence_blocks_wait(seq);
    block_writes_forget(seq);
    block_copies_end(seq);
    for (int b = 0; seq->blocks && b < seq->plan.n_blocks; b++) {
        struct sequence_block *block = &seq->blocks[b];
        if (block->move)
            block_move_orphan(block->move);
        device_index_drop(seq, b);
        if (block->place == BLOCK_PRIVATE)
            sequence_extent_free(seq, block);
        else if (block->place != BLOCK_ABSENT)
            kv_client_release(seq->engine->store, &seq->leases[b], 1);
        block->place = BLOCK_ABSENT;
    }
}

struct block_params sequence_block_params(struct sequence *seq, int layer, int block, bf16_t *k, bf16_t *v, int64_t head_stride)
{
    const struct block_layout *layout = &seq->engine->layout;
    return (struct block_params){
        .layout = layout,
        .first = block == 0,
        .slice = seq->blocks[block].data + block_slice_offset(layout, block == 0, (uint32_t)layer),
        .k = k,
        .v = v,
        .head_stride = head_stride,
        .index = device_index_rows(seq, layer, block),
    };
}

/* What the pool has already comes through the staging area, too, where anybody looks into it. */
static bool is_loaded(const struct sequence *seq, int block)
{
    return seq->engine->staging.slices && seq->engine->attended && seq->blocks[block].place == BLOCK_SEALED;
}

/* A block that goes through the staging area, at place i of it. */
static bool is_staged(const struct sequence *seq, int block)
{
    return is_loaded(seq, block) || (seq->engine->staging.slices && seq->blocks[block].place == BLOCK_GRANTED);
}

/* Block first + i of the prompt, in the layer's K and V. */
static struct block_params completed_block(struct sequence *seq, int layer, int first, int i)
{
    const struct engine *e = seq->engine;
    const int d = e->model->config.head_dim;
    const int64_t at = (int64_t)(first + i) * BLOCK_TOKENS * d, own = (int64_t)i * BLOCK_TOKENS * d;
    struct block_params p = sequence_block_params(seq, layer, first + i, prefill_k(seq, layer) + at, prefill_v(seq, layer) + at, prefill_head_stride(seq));
    if (e->own) {
        p.exact_k = engine_own_k(e) + own;
        p.exact_v = engine_own_v(e) + own;
        p.exact_stride = engine_own_stride(e);
    }
    if (is_staged(seq, first + i))
        p.slice = slice_staging_at(e, i);
    return p;
}

/* A sealed block past the cached prefix was made by another run of the same tokens: its bytes are those that coding here would give. Blocks to code are listed from the front of
 * engine->slices, blocks to decode from its end. */
int sequence_blocks_complete(struct sequence *seq, int layer, int first, int n)
{
    struct engine *e = seq->engine;
    const struct model *m = e->model;
    int n_coded = 0, decoded = n, n_staged = 0;
    ASSERT(n <= e->n_chunk_blocks);
    for (int i = 0; i < n; i++) {
        const struct block_params p = completed_block(seq, layer, first, i);
        n_staged += is_staged(seq, first + i);
        if (seq->blocks[first + i].place != BLOCK_SEALED)
            e->slices[n_coded++] = p;
        else
            e->slices[--decoded] = p;
    }
    int r = n_staged ? slice_staging_begin(e, n_coded > 0) : 0;
    if (r >= 0)
        r = m->ops->block_encode(m->stream, e->slices, n_coded, e->attended, seq->bad);
    if (r >= 0 && e->attended)
        r = m->ops->block_decode(m->stream, e->slices + decoded, n - decoded);
    /* Here the layer's slices of these blocks are complete: in the staging area, in private extents, in the pool. */
    if (n_staged == 0)
        return r;
    return r < 0 ? slice_staging_end(e, r) : block_writes_leave(seq, layer, first, n);
}

int sequence_blocks_load(struct sequence *seq, int layer, int first, int n)
{
    struct engine *e = seq->engine;
    int n_copies = 0;
    for (int i = 0; i < n; i++)
        if (is_loaded(seq, first + i))
            e->copies[n_copies++] = slice_copy_in(seq, layer, first + i, slice_staging_at(e, i));
    return n_copies ? slice_staging_load(e, n_copies) : 0;
}

int sequence_blocks_check(struct sequence *seq)
{
    const struct model *m = seq->engine->model;
    int r = m->dev->copy(m->stream, &seq->n_bad, seq->bad, sizeof(seq->n_bad));
    if (r >= 0)
        r = m->dev->stream_sync(m->stream);
    return r < 0 ? r : seq->n_bad ? -ERANGE : 0;
}

/* What does not pass the check ends with the layer. */
int sequence_blocks_finish(struct sequence *seq, int first, int n)
{
    bool granted = false;
    for (int b = first; b < first + n; b++)
        granted |= seq->blocks[b].place == BLOCK_GRANTED;
    if (!granted)
        return 0;
    if (seq->engine->out)
        return block_writes_seal(seq, first, n);
    const int r = sequence_blocks_check(seq);
    if (r >= 0)
        sequence_blocks_seal(seq, first, n);
    return r == -ERANGE ? 0 : r;
}

void sequence_blocks_seal(struct sequence *seq, int first, int n)
{
    for (int b = first; b < first + n; b++) {
        struct kv_lease *lease = &seq->leases[b];
        if (seq->blocks[b].place != BLOCK_GRANTED)
            continue;
        /* When the store is gone the extent stays readable in the mapping for as long as the lease is held; nobody else will find the block. */
        if (kv_client_seal(seq->engine->store, &lease, 1) >= 0) {
            seq->stats.bytes_to_pool += lease->length;
            device_index_seal(seq, b);
        }
        seq->blocks[b].place = BLOCK_SEALED;
    }
}
