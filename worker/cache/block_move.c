/* Private blocks on their way to the pool: those made while decoding, and those of the prompt that the pool did not take when the sequence was created (it was full or gone, or
 * another worker was writing them). Each is complete in a private extent before the store is asked, and attention reads it there until the bytes are in the
 * pool; so a decode step never waits for the store, and an answer that never comes costs nothing but the memory that admission has counted. */
#include "worker/cache/engine_private.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Steps from a refusal to the next try. Counted in steps, so that a store that is away costs next to nothing however fast they are. */
enum { RETRY_STEPS_MIN = 8, RETRY_STEPS_MAX = 512, COPY_STEPS = 4 };

struct block_move {
    struct kv_client *store;
    struct sequence *seq; /* NULL: the sequence is gone */
    int block;
};

/* What a block made while decoding depends on beside its tokens: what was attended when it was made. The prompt's length is part of that: before it tokens
 * attend everything, behind it the tiers. */
void block_move_make_key(struct sequence *seq, int block)
{
    const struct engine_config *c = &seq->engine->config;
    const struct block_key *parent = block ? &seq->keys[block - 1] : &seq->root;
    const int32_t *tokens = seq->tokens + (size_t)block * BLOCK_TOKENS;
    char tag[160];
    const int n = snprintf(tag, sizeof(tag), "selector=%s budget=%d recent=%d fetch_pages=%d unit=%d scorer=%s prompt=%d", c->selector->name, c->budget,
                           c->recent, seq->engine->fetch_pages, c->fetch_unit, c->scorer->name, seq->plan.n_prompt);
    ASSERT(n > 0 && (size_t)n < sizeof(tag));
    block_key_next_generated(parent, tokens, tag, (size_t)n, &seq->keys[block]);
}

/* How many indices the block takes when it moves: kernels read none in the pool. */
static int indices_of(const struct sequence *seq, int block)
{
    return block < sequence_plan_indices(seq->engine, &seq->plan, seq->plan.n_blocks);
}

static bool index_fits(const struct sequence *seq, int block)
{
    return engine_bytes_fit(seq->engine, 0, indices_of(seq, block), NULL) > 0;
}

/* From here on attention reads the pool's copy, and the lease is the sequence's. Without memory for its index the block stays where it is (false). */
static bool adopt(struct sequence *seq, int block, const struct kv_lease *lease)
{
    struct sequence_block *b = &seq->blocks[block];
    const struct sequence_block extent = *b;
    const int n_indices = indices_of(seq, block);
    if (!index_fits(seq, block))
        return false;
    sequence_commit(seq, seq->committed_bytes, seq->n_indices + n_indices);
    seq->leases[block] = *lease;
    b->place = BLOCK_SEALED;
    b->data = lease->data;
    b->piece = (struct device_piece){0};
    int r = device_index_take(seq, block);
    if (r == -ENOMEM) {
        *b = extent;
        seq->leases[block] = (struct kv_lease){0}; /* the caller's again, who gives it back */
        sequence_commit(seq, seq->committed_bytes, seq->n_indices - n_indices);
        return false;
    }
    sequence_extent_free(seq, &extent);
    sequence_commit(seq, seq->committed_bytes - seq->plan.block_bytes[block == 0], seq->n_indices);
    if (r >= 0)
        r = device_index_load(seq, block);
    if (r >= 0)
        r = slow_tier_place(seq, block);
    if (r < 0)
        seq->phase = SEQUENCE_FAILED; /* the device has failed */
    return true;
}

/* A granted block whose bytes are on their way. */
struct block_copy {
    struct block_copy *next;
    int block, steps; /* steps: since it was submitted */
    struct kv_lease lease;
    struct device_event *left;
};

static void copy_free(struct sequence *seq, struct block_copy *copy)
{
    seq->engine->model->dev->event_free(copy->left);
    free(copy);
}

/* Behind everything that was submitted, since the block's last slices may be on their way. */
static int copy_submit(const struct sequence *seq, const struct block_copy *copy)
{
    const struct engine *e = seq->engine;
    const struct device_ops *dev = e->model->dev;
    struct stream *out = e->out ? e->out : e->model->stream;
    int r = dev->event_record(copy->left, e->model->stream);
    if (r >= 0)
        r = dev->stream_wait(out, copy->left);
    if (r >= 0)
        r = dev->copy(out, copy->lease.data, seq->blocks[copy->block].data, copy->lease.length);
    return r < 0 ? r : dev->event_record(copy->left, out);
}

/* The bytes are in the pool. Whether the block is sealed. */
static bool copy_seal(struct sequence *seq, struct block_copy *copy)
{
    struct kv_lease *const leases[] = {&copy->lease};
    if (kv_client_seal(seq->engine->store, leases, 1) < 0)
        return false;
    seq->stats.bytes_to_pool += copy->lease.length;
    return true;
}

/* The oldest copy is done, or its device has failed. Whether the sequence reads the pool's copy from here on. */
static bool copy_end(struct sequence *seq, bool done)
{
    struct block_copy *copy = seq->copies;
    bool taken = false;
    seq->copies = copy->next;
    if (done && copy_seal(seq, copy))
        taken = adopt(seq, copy->block, &copy->lease);
    if (!taken)
        kv_client_release(seq->engine->store, &copy->lease, 1);
    copy_free(seq, copy);
    return taken;
}

/* Takes the lease. Where the device's memory is the host's the copy is done at once. */
static bool on_granted(struct sequence *seq, int block, struct kv_lease *lease)
{
    const struct engine *e = seq->engine;
    struct block_copy *copy = calloc(1, sizeof(*copy)), **last = &seq->copies;
    if (!copy || e->model->dev->event_create(e->model->device, &copy->left) < 0) {
        kv_client_release(e->store, lease, 1);
        free(copy);
        return false;
    }
    copy->block = block;
    copy->lease = *lease;
    while (*last)
        last = &(*last)->next;
    *last = copy;
    if (copy_submit(seq, copy) < 0) {
        (void)e->model->dev->stream_sync(e->out ? e->out : e->model->stream);
        *last = NULL;
        kv_client_release(e->store, &copy->lease, 1);
        copy_free(seq, copy);
        return false;
    }
    return e->out || copy_end(seq, true);
}

/* Seals what has left. A copy takes a fraction of a step: one that is not done after some is waited for. */
static void poll_copies(struct sequence *seq)
{
    const struct device_ops *dev = seq->engine->model->dev;
    while (seq->copies) {
        int r = dev->event_query(seq->copies->left);
        if (r == 0 && ++seq->copies->steps < COPY_STEPS)
            return;
        if (r == 0)
            r = dev->event_sync(seq->copies->left);
        (void)copy_end(seq, r >= 0);
    }
}

/* Others may go on with an answer whose sequence ends here, and find the block; those of one that is over are of no use. */
void block_copies_end(struct sequence *seq)
{
    const struct device_ops *dev = seq->engine->model->dev;
    while (seq->copies) {
        struct block_copy *copy = seq->copies;
        seq->copies = copy->next;
        if (seq->phase == SEQUENCE_DECODE && dev->event_query(copy->left) > 0)
            (void)copy_seal(seq, copy);
        kv_client_release(seq->engine->store, &copy->lease, 1);
        copy_free(seq, copy);
    }
}

/* Private blocks of a device whose memory the host cannot read come over in pieces. */
static bool has_bytes(const struct sequence *seq, int block, const struct kv_lease *lease)
{
    const struct engine *e = seq->engine;
    const struct model *m = e->model;
    const uint8_t *data = seq->blocks[block].data;
    if (!e->compare)
        return memcmp(lease->data, data, lease->length) == 0;
    for (uint64_t at = 0; at < lease->length; at += e->sizes.compare) {
        const size_t n = lease->length - at < e->sizes.compare ? (size_t)(lease->length - at) : e->sizes.compare;
        if (m->dev->copy(m->stream, e->compare, data + at, n) < 0 || m->dev->stream_sync(m->stream) < 0 || memcmp(lease->data + at, e->compare, n) != 0)
            return false;
    }
    return true;
}

/* The same key means the same bytes; should a store have others, a sequence must go on with its own. On a GPU the last bits of a product may depend on how many rows it had, so there
 * it does happen. */
static bool on_exists(struct sequence *seq, int block, struct kv_lease *lease)
{
    const bool fits = index_fits(seq, block), same = fits && has_bytes(seq, block, lease);
    if (same && adopt(seq, block, lease))
        return true;
    seq->blocks[block].keep = fits && !same;
    kv_client_release(seq->engine->store, lease, 1);
    return false;
}

static bool take_lease(struct sequence *seq, int block, enum kv_reserve_status status, struct kv_lease *lease)
{
    if (lease->length != seq->engine->layout.block_bytes[block == 0]) {
        seq->blocks[block].keep = true;
        kv_client_release(seq->engine->store, lease, 1);
        return false;
    }
    return status == KV_RESERVE_GRANTED ? on_granted(seq, block, lease) : on_exists(seq, block, lease);
}

/* The pool that takes one block may have room for more; one that refuses is left alone for a while. */
static void set_retry(struct sequence *seq, bool taken)
{
    const int wait = seq->retry_wait ? 2 * seq->retry_wait : RETRY_STEPS_MIN;
    seq->retry_wait = taken ? 0 : wait < RETRY_STEPS_MAX ? wait : RETRY_STEPS_MAX;
    seq->retry_left = seq->retry_wait;
}

static void on_reserved(int result, const enum kv_reserve_status *status, const struct kv_lease *leases, int n, void *arg)
{
    struct block_move *move = arg;
    struct sequence *seq = move->seq;
    const bool leased = result >= 0 && n == 1 && (status[0] == KV_RESERVE_GRANTED || status[0] == KV_RESERVE_EXISTS);
    struct kv_lease lease = leased ? leases[0] : (struct kv_lease){0};

    bool taken = false;
    if (seq) {
        seq->blocks[move->block].move = NULL;
        seq->n_moves--;
    }
    if (seq && seq->engine->pool_usable) /* another mapping may have come since it was asked for */
        taken = leased && take_lease(seq, move->block, status[0], &lease);
    else
        kv_client_release(move->store, &lease, leased);
    if (seq)
        set_retry(seq, taken);
    free(move);
}

static int start(struct sequence *seq, int block)
{
    if (!seq->engine->pool_usable)
        return -ENOTCONN;
    struct block_move *move = calloc(1, sizeof(*move));
    if (!move)
        return -ENOMEM;
    *move = (struct block_move){.store = seq->engine->store, .seq = seq, .block = block};
    const struct kv_reserve_block wanted = {
        .key = seq->keys[block],
        .parent = block ? seq->keys[block - 1] : seq->root,
        .first = block == 0,
        .position = (uint32_t)block,
        .length = seq->engine->layout.block_bytes[block == 0],
    };
    /* The answer may come before the call returns: `move` must not be touched after a success. */
    seq->blocks[block].move = move;
    seq->n_moves++;
    const int r = kv_client_reserve_async(seq->engine->store, &wanted, 1, on_reserved, move);
    if (r < 0) {
        seq->blocks[block].move = NULL;
        seq->n_moves--;
        free(move);
    }
    return r;
}

void block_move_start(struct sequence *seq, int block)
{
    if (!seq->shared)
        return;
    block_move_make_key(seq, block);
    if (!seq->blocks[block].keep && start(seq, block) < 0)
        set_retry(seq, false);
}

/* The first private block that may go, so that a chain is stored from its root; -1: none. */
static int first_movable(const struct sequence *seq)
{
    for (int b = 0; b < seq->n_tokens / BLOCK_TOKENS; b++)
        if (seq->blocks[b].place == BLOCK_PRIVATE && !seq->blocks[b].keep)
            return b;
    return -1;
}

void block_move_retry(struct sequence *seq)
{
    poll_copies(seq);
    if (!seq->shared || seq->stats.private_blocks == 0 || seq->n_moves > 0 || seq->copies)
        return;
    if (seq->retry_left > 0) {
        seq->retry_left--;
        return;
    }
    const int block = first_movable(seq);
    if (block >= 0 && start(seq, block) < 0)
        set_retry(seq, false);
}

void block_move_orphan(struct block_move *move)
{
    move->seq = NULL;
}
