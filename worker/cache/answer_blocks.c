/* Blocks made while decoding. A token attends the blocks before its own in the values that the pool gives back and its own block as computed, behind the prompt as in it:
 * a block is coded the moment its last token is there, and what the code gives back replaces its rows in the recent window. So the state of a sequence at the end of a
 * block is that of its prompt and what its blocks hold, and whoever has the blocks can go on from there to the bit. Keeping the exact rows until the block leaves the window
 * was rejected: the rows of a window depend on the exact rows of the window before, layer by layer, so nothing short of decoding all over again would give them back. */
#include "worker/cache/engine_private.h"

/* The block that is complete when there are n tokens, or -1. An answer that stays in the window has none. */
static int completed_block(const struct sequence *seq, int n_tokens)
{
    return n_tokens % BLOCK_TOKENS == 0 && n_tokens / BLOCK_TOKENS <= seq->plan.n_blocks ? n_tokens / BLOCK_TOKENS - 1 : -1;
}

int answer_block_prepare(struct sequence *seq)
{
    const int block = completed_block(seq, seq->n_tokens + 1);
    if (block < 0 || seq->blocks[block].place != BLOCK_ABSENT)
        return 0;
    return sequence_block_alloc_private(seq, block);
}

/* A block's rows in the recent window. */
static struct fast_rows window_rows(const struct sequence *seq, int layer, int block)
{
    const int64_t row = (int64_t)block * BLOCK_TOKENS - seq->recent_first;
    struct fast_rows rows = fast_tier_rows(seq, layer);
    rows.recent_k += row * seq->engine->model->config.head_dim;
    rows.recent_v += row * seq->engine->model->config.head_dim;
    return rows;
}

/* engine->slices become those of the block in all layers, with its rows in the recent window. */
static void window_slices(struct sequence *seq, int block)
{
    for (int layer = 0; layer < seq->engine->model->config.n_layers; layer++) {
        const struct fast_rows rows = window_rows(seq, layer, block);
        seq->engine->slices[layer] = sequence_block_params(seq, layer, block, rows.recent_k, rows.recent_v, rows.recent_stride);
    }
}

int answer_block_complete(struct sequence *seq)
{
    const struct engine *e = seq->engine;
    const struct model *m = e->model;
    const int block = completed_block(seq, seq->n_tokens);
    if (block < 0)
        return 0;
    window_slices(seq, block);
    int r = m->ops->block_encode(m->stream, e->slices, m->config.n_layers, e->attended, seq->bad);
    if (r >= 0)
        r = sequence_blocks_check(seq);
    if (r >= 0)
        block_move_start(seq, block);
    return r;
}

/* The last token has to be decoded, for its logits. Exact rows are in no block: then all is decoded again. */
void answer_blocks_lookup(struct sequence *seq, const struct sequence_request *request, uint64_t end_us)
{
    const struct engine *e = seq->engine;
    const int first = seq->plan.n_prompt_blocks, last = (request->n_prompt + request->n_answer - 1) / BLOCK_TOKENS;
    if (!e->reuse || e->config.answer_stays || last <= first)
        return;
    for (int b = first; b < last; b++)
        block_move_make_key(seq, b);
    const int found = sequence_blocks_lookup(seq, first, last, end_us);
    if (found > 0)
        seq->n_restorable = (first + found) * BLOCK_TOKENS;
}

void answer_blocks_trim(struct sequence *seq, int n_restorable)
{
    const int first = n_restorable ? n_restorable / BLOCK_TOKENS : seq->plan.n_prompt_blocks;
    for (int b = first; b < seq->n_restorable / BLOCK_TOKENS; b++) {
        kv_client_release(seq->engine->store, &seq->leases[b], 1);
        seq->blocks[b].place = BLOCK_ABSENT;
        seq->blocks[b].data = NULL;
    }
    seq->n_restorable = n_restorable;
}

/* The store drops a block only when it has no children left, so the leases go in reverse. */
static void discard_leases(struct sequence *seq, int first)
{
    struct kv_lease *leases = seq->leases + first;
    const int n = seq->plan.n_blocks - first;
    for (int i = 0; i < n / 2; i++) {
        const struct kv_lease last = leases[n - 1 - i];
        leases[n - 1 - i] = leases[i];
        leases[i] = last;
    }
    kv_client_discard(seq->engine->store, leases, n);
}

void sequence_retire_answer(struct sequence *seq)
{
    const int first = seq->plan.n_prompt_blocks;
    int n_run = 0;
    if (!seq->shared)
        return;
    while (first + n_run < seq->plan.n_blocks && seq->blocks[first + n_run].place == BLOCK_SEALED)
        n_run++;
    sequence_blocks_wait(seq); /* an index may be on its way out of a block that is about to be somebody else's */
    /* The table still points to these blocks: from here on the sequence can only be freed. */
    seq->phase = SEQUENCE_FAILED;
    for (int b = first; b < seq->plan.n_blocks; b++)
        if (seq->blocks[b].place == BLOCK_SEALED)
            seq->blocks[b].place = BLOCK_ABSENT;
    if (seq->engine->config.reuse_generated)
        block_publish_start(seq, first, n_run);
    discard_leases(seq, first);
}

/* engine->slices are decoded by way of the staging area, some layers at a time. */
static int decode_staged(struct sequence *seq, int block)
{
    struct engine *e = seq->engine;
    const struct model *m = e->model;
    int r = 0;
    for (int layer = 0, n; r >= 0 && layer < m->config.n_layers; layer += n) {
        n = m->config.n_layers - layer < e->n_chunk_blocks ? m->config.n_layers - layer : e->n_chunk_blocks;
        for (int i = 0; i < n; i++) {
            e->copies[i] = slice_copy_in(seq, layer + i, block, slice_staging_at(e, i));
            e->slices[layer + i].slice = slice_staging_at(e, i);
        }
        r = slice_staging_read(e, n);
        if (r >= 0)
            r = m->ops->block_decode(m->stream, e->slices + layer, n);
        r = slice_staging_end(e, r);
    }
    return r;
}

static int restore_window(struct sequence *seq, int block)
{
    struct engine *e = seq->engine;
    const struct model *m = e->model;
    window_slices(seq, block);
    seq->stats.bytes_loaded += seq->leases[block].length;
    return e->staging.slices ? decode_staged(seq, block) : m->ops->block_decode(m->stream, e->slices, m->config.n_layers);
}

int answer_blocks_restore(struct sequence *seq)
{
    if (seq->n_restorable == 0)
        return 0;
    const int first = engine_recent_first(seq->engine, seq->plan.n_prompt, seq->n_restorable);
    int r = 0;
    for (int b = seq->recent_first / BLOCK_TOKENS; r >= 0 && b < first / BLOCK_TOKENS; b++)
        r = slow_tier_append(seq, b);
    seq->recent_first = first;
    for (int b = first / BLOCK_TOKENS; r >= 0 && b < seq->n_restorable / BLOCK_TOKENS; b++)
        r = restore_window(seq, b);
    if (r >= 0)
        seq->n_tokens = seq->n_restorable;
    return r;
}
