/* Blocks made while decoding on their way to the pool. Each is complete in a private extent before the store is asked, and attention reads it there until the bytes are in the
 * pool; so a decode step never waits for the store, and an answer that never comes costs nothing but the memory that admission has counted. */
#include "worker/cache/engine_private.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct block_move {
    struct kv_client *store;
    struct sequence *seq; /* NULL: the sequence is gone */
    int block;
};

/* What a block made while decoding depends on beside its tokens: what was attended when it was made. The prompt's length is part of that: before it tokens
 * attend everything, behind it the tiers. */
static void make_key(struct sequence *seq, int block)
{
    const struct engine_config *c = &seq->engine->config;
    const struct block_key *parent = block ? &seq->keys[block - 1] : &seq->root;
    const int32_t *tokens = seq->tokens + (size_t)block * BLOCK_TOKENS;
    if (c->reuse_generated) {
        block_key_next(parent, tokens, &seq->keys[block]);
        return;
    }
    char tag[160];
    const int n = snprintf(tag, sizeof(tag), "selector=%s budget=%d recent=%d fetch_pages=%d prompt=%d", c->selector->name, c->budget, c->recent,
                           seq->engine->fetch_pages, seq->plan.n_prompt);
    ASSERT(n > 0 && (size_t)n < sizeof(tag));
    block_key_next_generated(parent, tokens, tag, (size_t)n, &seq->keys[block]);
}

/* From here on attention reads the pool's copy. */
static void adopt(struct sequence *seq, int block, const struct kv_lease *lease)
{
    sequence_block_free_private(seq, block);
    seq->leases[block] = *lease;
    seq->blocks[block].place = BLOCK_SEALED;
    seq->blocks[block].data = lease->data;
    page_lists_repoint(seq, block);
}

static void on_granted(struct sequence *seq, int block, struct kv_lease *lease)
{
    memcpy(lease->data, seq->blocks[block].data, lease->length);
    struct kv_lease *const leases[] = {lease};
    if (kv_client_seal(seq->engine->store, leases, 1) < 0) {
        kv_client_release(seq->engine->store, lease, 1);
        return;
    }
    seq->stats.bytes_to_pool += lease->length;
    adopt(seq, block, lease);
}

/* The same key need not mean the same bytes here (with reuse_generated another request may have made the block otherwise), and a sequence must go on with its own. */
static void on_exists(struct sequence *seq, int block, struct kv_lease *lease)
{
    if (memcmp(lease->data, seq->blocks[block].data, lease->length) == 0)
        adopt(seq, block, lease);
    else
        kv_client_release(seq->engine->store, lease, 1);
}

static void on_reserved(int result, const enum kv_reserve_status *status, const struct kv_lease *leases, int n, void *arg)
{
    struct block_move *move = arg;
    struct sequence *seq = move->seq;
    const bool leased = result >= 0 && n == 1 && (status[0] == KV_RESERVE_GRANTED || status[0] == KV_RESERVE_EXISTS);

    if (seq)
        seq->blocks[move->block].move = NULL;
    if (leased) {
        struct kv_lease lease = leases[0];
        if (!seq || lease.length != seq->engine->layout.block_bytes[move->block == 0])
            kv_client_release(move->store, &lease, 1);
        else if (status[0] == KV_RESERVE_GRANTED)
            on_granted(seq, move->block, &lease);
        else
            on_exists(seq, move->block, &lease);
    }
    free(move);
}

void block_move_start(struct sequence *seq, int block)
{
    if (!seq->shared)
        return;
    make_key(seq, block);
    struct block_move *move = calloc(1, sizeof(*move));
    if (!move)
        return;
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
    if (kv_client_reserve_async(seq->engine->store, &wanted, 1, on_reserved, move) < 0) {
        seq->blocks[block].move = NULL;
        free(move);
    }
}

void block_move_orphan(struct block_move *move)
{
    move->seq = NULL;
}
