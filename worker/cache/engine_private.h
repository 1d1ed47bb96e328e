/* What the files of worker/cache share. An engine owns its scratch memory and counts what its sequences hold; a sequence owns everything else. All of it belongs
 * to the thread that owns the device. */
#pragma once
#include "proto/base/base_assert.h"
#include "worker/cache/device_blocks.h"
#include "worker/cache/engine.h"
#include "worker/cache/scorer.h"
#include "worker/cache/selector.h"
#include "worker/model/model.h"
#include <errno.h>

static inline int min_int(int a, int b)
{
    return a < b ? a : b;
}

/* Bytes of a piece of device memory: what lies behind it begins on 64 again, as allocations do. */
static inline size_t round64(size_t bytes)
{
    return (bytes + 63) & ~(size_t)63;
}

/* ---- plan: what follows from n_prompt, max_new and the configuration alone (sequence_plan.c) ---- */
struct sequence_plan {
    int n_prompt, n_total;        /* n_total = n_prompt + max_new: positions there can ever be */
    int recent_first;             /* first recent position when the prompt is done, a multiple of BLOCK_TOKENS */
    int recent_rows;              /* capacity of the recent window */
    int n_sinks, n_free, n_tail;  /* kept rows: positions 0..n_sinks-1, the selector's, and tail_first..tail_first+n_tail-1 */
    int free_first, free_last;    /* the selector's candidates */
    int tail_first;
    int n_kept;                   /* n_sinks + n_free + n_tail: of a KV head, on average over layers and heads (the selector may share n_free unevenly) */
    int64_t kept_rows;            /* of all layers and KV heads: the sum of sequence_plan_layer_rows() */
    int layer_rows_max;           /* the largest of them */
    int n_window;                 /* queries that the selector observes */
    bool all_queries;             /* it observes all of them, by their column sums */
    int n_prompt_blocks;          /* full blocks of the prompt */
    int n_blocks;                 /* blocks there can ever be */
    int n_pages;                  /* slow sub-pages per layer and KV head there can ever be */
    int n_resident;               /* layers whose full KV is resident during prefill */
    int active_rows;              /* positions that one KV head of it has room for, >= n_prompt */
    bool bridge_on_host;          /* sequence_plan_choose decides these two */
    bool stage_loads;             /* cached blocks come in by copies while the layer before is computed */
    size_t fast_bytes, kept_bytes, table_bytes, masks_bytes, summaries_bytes, active_kv_bytes, window_bytes, columns_bytes, selector_bytes, indices_bytes, logits_bytes, bad_bytes;
    size_t block_bytes[2];        /* staging of one private block; [1]: of block 0 */
};

/* First recent position when n tokens have K and V: the largest multiple of BLOCK_TOKENS that leaves `recent` tokens behind it. */
static inline int recent_first(int n, int recent)
{
    return n > recent ? (n - recent) / BLOCK_TOKENS * BLOCK_TOKENS : 0;
}

void sequence_plan_init(const struct engine *engine, int n_prompt, int max_new, struct sequence_plan *ret_plan);
/* What the selector chooses in `layer`: this many a KV head on average, n_kv_heads times as many in the layer. All layers together have n_layers * n_free. */
int sequence_plan_layer_free(const struct engine *engine, const struct sequence_plan *plan, int layer);
/* Kept rows of all KV heads that `layer` has room for: what there are, unless the heads compete with those of other ranks. */
int sequence_plan_layer_rows(const struct engine *engine, const struct sequence_plan *plan, int layer);
/* Chunks of n_new tokens that have to be computed. */
int sequence_plan_chunks(const struct engine *engine, int n_new);
/* Bridge for n_new tokens that have to be computed: of the device, and of pinned host memory (0: all of it is on the device). */
size_t sequence_plan_bridge_bytes(const struct engine *engine, const struct sequence_plan *plan, int n_new);
size_t sequence_plan_host_bridge_bytes(const struct engine *engine, const struct sequence_plan *plan, int n_new);
/* Cached slices of a layer on their way from the pool, when all but n_new tokens of the prompt are. */
size_t sequence_plan_load_bytes(const struct engine *engine, const struct sequence_plan *plan, int n_new);
/* Index copies of blocks 0..last-1 when they are in the pool. */
int sequence_plan_indices(const struct engine *engine, const struct sequence_plan *plan, int last);
/* What the slabs of n index copies take, as if no two sequences shared one; and what they take beyond those that are there or promised. */
size_t engine_slabs_bytes(const struct engine *engine, int n);
size_t engine_index_bytes(const struct engine *engine, int n);
/* Staging of blocks first..last-1 when they are private. */
size_t sequence_plan_staging_bytes(const struct sequence_plan *plan, int first, int last);
/* The pieces of device memory that a sequence allocates at admission, when n_new of its tokens have to be computed; 0 bytes: none. Private blocks apart. */
enum { PIECE_FAST, PIECE_KEPT, PIECE_TABLE, PIECE_MASKS, PIECE_SUMMARIES, PIECE_LOGITS, PIECE_BAD, PIECE_ACTIVE_KV, PIECE_BRIDGE, PIECE_LOADS, PIECE_WINDOW, PIECE_COLUMNS, PIECE_INDICES, PIECE_COUNT };
struct sequence_piece {
    enum mem_tag tag;
    size_t bytes;
    bool prefill; /* given back when the prompt is done */
};
void sequence_plan_pieces(const struct engine *engine, const struct sequence_plan *plan, int n_new, struct sequence_piece ret_pieces[PIECE_COUNT]);
/* Their sums while the prompt is computed, and after it. */
size_t sequence_plan_prefill_bytes(const struct engine *engine, const struct sequence_plan *plan, int n_new);
size_t sequence_plan_decode_bytes(const struct engine *engine, const struct sequence_plan *plan);
/* The larger of the two, with what private blocks hold beside them while the prompt is computed, and at the end. Index copies apart. */
size_t sequence_plan_peak_bytes(const struct engine *engine, const struct sequence_plan *plan, int n_new, size_t prompt_blocks, size_t all_blocks);
/* What a sequence is admitted by, before the store has been asked. */
size_t sequence_plan_admission_bytes(const struct engine *engine, const struct sequence_plan *plan, bool pool);
/* Bookkeeping in host memory: a sequence's (without log-probabilities of the prompt; sequence.c), and the engine's (engine.c). */
size_t sequence_host_bytes(struct engine *engine, const struct sequence_plan *plan);
size_t engine_host_bytes(const struct engine *engine);
/* Chooses bridge_on_host, where the configuration leaves it open, and stage_loads so that the sequence fits now, if it can; what a copy of its own would cost comes first, what saves
 * memory last. As engine_bytes_fit. */
int sequence_plan_choose(const struct engine *engine, struct sequence_plan *plan, int n_new, size_t prompt_blocks, size_t all_blocks, int n_indices, size_t *ret_bytes, struct error *err);
/* 1 if `bytes` and so many index copies more fit now, 0 if they have to wait, -E2BIG if they can never fit. */
int engine_bytes_fit(const struct engine *engine, size_t bytes, int n_indices, struct error *err);
/* Everything that is promised: fixed_bytes, committed_bytes and the slabs of index copies. */
size_t engine_promised_bytes(const struct engine *engine);
/* Empty slabs, which nobody was promised. */
size_t engine_spare_bytes(const struct engine *engine);
void engine_trim(struct engine *engine);

/* ---- engine (engine.c) ---- */
/* What the engine holds under MEM_WORKSPACE and MEM_STAGING, in bytes, but for floats. */
struct engine_sizes {
    size_t hidden_floats, rope_floats, logits_floats;
    size_t scratch;     /* the first two of them */
    size_t activations; /* model_workspace, with what is shared: */
    size_t shared;      /* own, logits and a selector's scratch in one place; behind it, at shared_ops, the ops' scratch, unless products need some */
    size_t shared_ops;
    bool ops_apart;
    size_t selector;    /* the most that selecting takes */
    size_t bias;        /* key_bias_tables */
    size_t ops;         /* what an op takes for the time of its call */
    size_t own;         /* exact K and V of a chunk; 0 with exact values */
    size_t slice;       /* one of the staging area's */
    size_t staging;     /* MEM_STAGING, as the only one here: slices of two chunks between the pool and the device; 0 where ops read and write the pool */
    size_t load_slice;  /* of a cached slice on its way in, and how many of them are loaded under one event, and at most at a time: */
    int load_group, load_groups; /* a power of two of blocks, at most PREFIX_LOAD_BLOCKS; 0 where ops read the pool as fast as their own memory */
    size_t collective;  /* what a rank's communicator holds of the device, */
    size_t collective_host; /* and of the host */
    size_t step;        /* MEM_WORKSPACE, and pinned host memory: small arguments of a decode step, where the device keeps steps */
    size_t counts;      /* MEM_WORKSPACE: what a step attends, where the device counts; 0 where the host reads its memory */
    size_t index;       /* MEM_INDEX of one block of the pool that can become slow; 0: the scorer reads none, or reads it in the pool */
    int index_pieces;   /* of them that a slab has */
    bool device_blocks; /* the device has memory of its own */
    size_t libraries;   /* MEM_LIBRARIES, as the device had when the engine was planned */
    size_t pages;       /* MEM_PAGE_CACHE: what fetching takes beside the slots; 0 where pages are read where they lie */
    size_t compare;     /* host memory: a piece of a private block beside the pool's; 0 where the host reads device memory */
};

/* Slices between the pool and the device (slice_staging.c). */
enum { STAGING_HALVES = 2 };
struct slice_staging {
    uint8_t *slices;              /* [STAGING_HALVES][n_chunk_blocks] of sizes.slice bytes, or NULL: ops read and write the pool */
    struct staging_half {
        struct device_event *loaded, *used, *left;
    } halves[STAGING_HALVES];
    int half;                     /* at work, or the next */
    int newest;                   /* that slices have left last */
};

/* Slices on their way to the pool (block_writes.c). */
enum { WRITE_SEALS = 8 };
struct block_writes {
    struct write_seal {
        struct sequence *seq;     /* NULL: it is gone */
        int first, n;             /* blocks */
        struct device_event *left;
    } seals[WRITE_SEALS];         /* a queue in the order of the copies */
    int first_seal, n_seals;
    int32_t *n_bad;               /* pinned [WRITE_SEALS]: values out of range, as the blocks left */
};

/* The page cache of a device with memory of its own (device_pages.c). */
struct device_pages {
    struct device_page_cache *cache; /* or NULL */
    void *memory;                    /* its fixed part, [sizes.pages] */
    void *extents[DEVICE_PAGE_EXTENTS_MAX];
    size_t extent_bytes;             /* 0: there are never any */
    int n_extents, n_max;
    struct page_cache_stats stats;   /* as of the last step or change of size */
};

struct engine {
    struct engine_config config;
    struct model *model;          /* borrowed */
    struct kv_client *store;      /* borrowed, or NULL */
    bool pool_usable;             /* engine_use_pool */
    struct block_layout layout;
    uint8_t fingerprint[FINGERPRINT_BYTES];
    bool attended;                /* prefill attends earlier blocks as the pool gives them back */
    bool reuse;                   /* prompts may start from the pool's blocks */
    int fetch_pages;              /* of whole units; INT32_MAX: all */
    size_t summary_bytes;         /* of one sub-page, the sequence's own; 0: the scorer needs none */
    int n_max;                    /* tokens a unit or a step */
    int n_chunk_blocks;           /* blocks that a chunk can complete */
    int own_rows;                 /* positions of a chunk, from the start of its first block on */
    int n_logit_rows;

    struct engine_sizes sizes;
    enum bridge_place bridge;     /* config.bridge where there is a choice, else BRIDGE_DEVICE */
    struct stream *in, *out;      /* copies from and to the host beside the model's stream; NULL where the device's memory is the host's */
    struct model_workspace ws;
    const struct selector_ranks *ranks; /* selector_ranks, where there are several; else NULL */
    struct selector_ranks selector_ranks;
    struct key_bias_tables bias;  /* what ops need of key biases, for every position of a context */
    void *op_scratch;             /* the stream's; a piece of its own only where products need it (sizes.ops_apart) */
    void *step_args;              /* [sizes.step] or NULL */
    bf16_t *own;                  /* [k, v][n_kv_heads, own_rows, head_dim]: a chunk's keys and values as computed, from the start of its first block on; NULL with exact values */
    struct slice_staging staging; /* one layer's slices of a chunk's blocks each half */
    struct block_writes writes;
    uint8_t *compare;             /* host: [sizes.compare], or NULL */
    void *scratch;                /* one piece of MEM_WORKSPACE for hidden states and RoPE */
    float *hidden;                /* [max_batch, dim] of a decode step */
    float *rope;                  /* [n_max, head_dim / 2, 2] */
    int rope_first, rope_n;       /* consecutive positions that the table is for; rope_n 0: others */
    float *logits;                /* [n_logit_rows, n_vocab] */
    struct kv_dst *dst;           /* [n_max] */
    int32_t *positions;           /* [n_max] */
    struct block_params *slices;  /* blocks of one call: a chunk completes them, a unit loads them, or one block of an answer has all layers */
    struct device_copy *copies;   /* of their slices, as many */
    struct attn_decode_item *items; /* [max_batch * n_kv_heads] */
    int32_t *chosen;              /* [max_batch * n_kv_heads, fetch_pages], or NULL when all are fetched, or the device counts */
    struct page_counts *counts;   /* [max_batch] device, or NULL when the host counts */
    struct page_counts *host_counts; /* [max_batch] */
    uint16_t *mask_rows;          /* [n_kv_heads, max_context / SUBPAGE_TOKENS] masks of one layer on their way to the device */
    struct device_blocks *device_blocks; /* NULL where the host's memory is the device's */
    struct device_slabs *extents; /* of private blocks, one a slab, but for blocks 0, which are longer; there, too: blocks of answers come and go, and no step is to wait for that */

    struct page_cache *page_cache; /* what a device would hold, counted by the host where it reads the device's memory; or NULL */
    struct device_pages pages;
    size_t fixed_bytes;           /* engine_workspace_bytes */
    size_t committed_bytes;       /* promised to live sequences, */
    int n_indices;                /* and index copies: at no time are there more slabs than these fill, or than there are now (device_slabs.h) */
    int n_sequences;
};

static inline int64_t engine_own_stride(const struct engine *engine)
{
    return (int64_t)engine->own_rows * engine->model->config.head_dim;
}
static inline bf16_t *engine_own_k(const struct engine *engine)
{
    return engine->own;
}
static inline bf16_t *engine_own_v(const struct engine *engine)
{
    return engine->own ? engine->own + engine->model->config.n_kv_heads * engine_own_stride(engine) : NULL;
}
/* First recent position of a sequence whose prompt has n_prompt tokens, when n tokens have K and V. */
static inline int engine_recent_first(const struct engine *engine, int n_prompt, int n)
{
    return recent_first(engine->config.answer_stays && n > n_prompt ? n_prompt : n, engine->config.recent);
}

/* Everything that follows from the configuration alone: checks it and fills config, model, layout, sizes and what is derived in a zeroed engine. Of the model it uses config,
 * dev, ops, device and stream; nothing is allocated, and there need not be weights. -EINVAL. */
int engine_plan(const struct engine_config *config, struct model *model, struct engine *engine, struct error *err);

/* ---- agreement of ranks (engine_peers.c) ---- */
/* values[i] becomes the least of all ranks; nothing happens in an engine alone. */
int engine_agree(const struct engine *engine, int32_t *values, int n);
/* The least of all ranks' results. err keeps its text where it is this rank's own. */
int engine_agree_result(const struct engine *engine, int result, struct error *err);
/* An error in the middle of work that other ranks go on with: they wait for this one, so it is the whole group's end. */
static inline int engine_lone_error(const struct engine *engine, int result)
{
    return result < 0 && engine->config.peers ? -EIO : result;
}

/* ---- page cache and traffic (page_traffic.c) ---- */
/* The page cache by config and engine_promised_bytes, or none. -ENOMEM. */
int page_traffic_open(struct engine *engine);
/* What is promised has changed. */
void page_traffic_fit(struct engine *engine);
/* Counts of a step over n sequences begin at 0. */
int page_traffic_step(struct engine *engine, int n);
/* Where the items of sequence i of the step count, for ret_chosen and ret_counts: the host's memory is read after the call, a device counts by itself. */
void page_traffic_item(struct engine *engine, int i, int kv_head, struct attn_decode_item *item);
/* After the items of one layer: [n * n_kv_heads], sequence after sequence. */
void page_traffic_layer(struct engine *engine, struct sequence **sequences, int n);
/* The step is over: what it attended is in the sequences' statistics. A device is waited for. */
int page_traffic_end(struct engine *engine, struct sequence **sequences, int n);

/* ---- pages on the device (device_pages.c) ---- */
/* Of its fixed part; 0: pages are read where they lie, and what follows does nothing. */
size_t device_pages_bytes(const struct engine *engine);
/* Opens the cache, with slots in at most `bytes`. -ENOMEM. */
int device_pages_open(struct engine *engine, size_t bytes);
void device_pages_close(struct engine *engine);
void device_pages_fit(struct engine *engine, size_t bytes);
/* Takes the statistics; waits for lookups under way, so not while work waits that other ranks have not heard of. Negative: the device has failed. */
int device_pages_refresh(struct engine *engine);

/* ---- slow tier (slow_tier.c) ---- */
/* The block table, as far as blocks have a place: those of the prompt, and those of the answer that were found. */
int slow_tier_init(struct sequence *seq);
/* The layer's masks by its kept positions, and the summaries of its pages. The blocks below plan.recent_first are complete in this layer. */
int slow_tier_build(struct sequence *seq, int layer);
/* Block `block` is complete and leaves the recent window: its entry, and summaries in every layer and KV head. */
int slow_tier_append(struct sequence *seq, int block);
/* The block's bytes lie elsewhere than before: from now on they are read there. */
int slow_tier_place(struct sequence *seq, int block);
/* What attn_decode takes. After slow_tier_build of the layer. */
struct slow_pages slow_tier_pages(const struct sequence *seq, int layer, int kv_head);

/* ---- blocks (sequence_blocks.c, block_move.c) ---- */
enum block_place {
    BLOCK_ABSENT,
    BLOCK_PRIVATE, /* an extent of MEM_STAGING */
    BLOCK_GRANTED, /* in the pool, ours to write */
    BLOCK_SEALED,  /* in the pool, read lease */
};

struct block_move;
struct block_copy;
struct sequence_block {
    enum block_place place;
    uint8_t *data;           /* the extent */
    struct device_piece piece; /* that a private one is, of engine->extents */
    struct device_block *device; /* what the device knows of it in the pool; NULL: nothing, or it is not there */
    struct block_move *move; /* on its way to the pool, or NULL */
    bool keep;               /* never moved: the pool has something else under its key */
};

/* Keys, lookup, reservation. Sets n_cached and n_restorable. */
void sequence_blocks_find(struct sequence *seq, const struct sequence_request *request);
/* Private extents for what the pool did not take. -EAGAIN and -E2BIG by memory_limit, -ENOMEM. */
int sequence_blocks_admit(struct sequence *seq, struct error *err);
/* For everything that is on its way to or from the sequence's blocks in the pool: before a lease is given back. */
void sequence_blocks_wait(struct sequence *seq);
void sequence_blocks_fini(struct sequence *seq);
/* What blocks hold beside the pieces: private extents, those to come included; with `prompt` while the prompt is computed. */
size_t sequence_blocks_bytes(const struct sequence *seq, bool prompt);
/* And the index copies of the others. */
int sequence_blocks_indices(const struct sequence *seq);
/* Blocks first .. first+n-1 of the prompt are complete in `layer`: codes them, or takes what the pool already has; the values that the blocks give back are in the layer's K and V then, unless
 * values are exact. What is coded lies in engine->own from its start on (with exact values in the layer's K and V). n <= n_chunk_blocks. */
int sequence_blocks_complete(struct sequence *seq, int layer, int first, int n);
/* The same blocks some time before: what the pool has of them starts to come in. */
int sequence_blocks_load(struct sequence *seq, int layer, int first, int n);
/* Waits for the device. -ERANGE when any block that was coded so far had keys or values that it cannot hold (block_encode). */
int sequence_blocks_check(struct sequence *seq);
/* All layers of blocks first .. first+n-1 of the prompt are coded: they are sealed as soon as their bytes are in the pool and none was out of range, at the latest when the prompt is done. */
int sequence_blocks_finish(struct sequence *seq, int first, int n);
/* All layers of blocks first .. first+n-1 are written and checked, and the device was waited for since. */
void sequence_blocks_seal(struct sequence *seq, int first, int n);
struct block_params sequence_block_params(struct sequence *seq, int layer, int block, bf16_t *k, bf16_t *v, int64_t head_stride);
/* Leases the longest sealed run of keys[first..last-1] and returns its length. A store that does not answer in time has nothing. */
int sequence_blocks_lookup(struct sequence *seq, int first, int last, uint64_t end_us);
int sequence_block_alloc_private(struct sequence *seq, int block);
/* The memory of a private block, as it was; what is in its place is the caller's concern. Only the model's stream uses it still. */
void sequence_extent_free(struct sequence *seq, const struct sequence_block *block);
/* Starts moving a complete private block to the pool; never waits, and when the store does not take it the block stays where it is. */
void block_move_start(struct sequence *seq, int block);
/* Once a step: seals what has arrived in the pool, and tries again with one block that is still private. Behind a refusal it waits for more and more steps. */
void block_move_retry(struct sequence *seq);
/* keys[block] of a block made while decoding, from its parent's. */
void block_move_make_key(struct sequence *seq, int block);
/* Blocks first..first+n-1, all sealed, get a prompt's keys; takes their leases over. */
void block_publish_start(struct sequence *seq, int first, int n);
/* The sequence goes away; the answer still to come releases what it brings. */
void block_move_orphan(struct block_move *move);
/* The same for blocks whose bytes are on their way; the device has been waited for. */
void block_copies_end(struct sequence *seq);

/* ---- slices between the pool and the device (slice_staging.c), where it has memory of its own ---- */
int slice_staging_open(struct engine *engine); /* -ENOMEM */
void slice_staging_close(struct engine *engine);
/* Slice i of the half at work. */
uint8_t *slice_staging_at(const struct engine *engine, int i);
/* A copy of a block's slice out of the pool. */
struct device_copy slice_copy_in(const struct sequence *seq, int layer, int block, uint8_t *to);
/* The half at work is loaded by engine->copies, n of them, which find in the pool what has been submitted for it. At most once, before begin. */
int slice_staging_load(struct engine *engine, int n);
/* From begin to end ops on the model's stream read and, with `writes`, write the half. `result`: of what was done in between; returned if it is negative. */
int slice_staging_begin(struct engine *engine, bool writes);
/* load and begin, to read. */
int slice_staging_read(struct engine *engine, int n);
int slice_staging_end(struct engine *engine, int result);
/* In place of end: slices leave by engine->copies, n of them. */
int slice_staging_leave(struct engine *engine, int n);

/* ---- slices on their way to the pool (block_writes.c), there ---- */
int block_writes_open(struct engine *engine); /* -ENOMEM */
void block_writes_close(struct engine *engine);
/* The slices of the granted ones of blocks first .. first+n-1 are coded in `layer`, block b's at b - first of the half at work, which ends: they leave. */
int block_writes_leave(struct sequence *seq, int layer, int first, int n);
/* Blocks first .. first+n-1, whose last slices have been submitted, are sealed when they have left. */
int block_writes_seal(struct sequence *seq, int first, int n);
/* Seals what has left; never waits. */
int block_writes_poll(struct engine *engine);
/* What of the sequence is to be sealed is: waits. */
int block_writes_finish(struct sequence *seq);
/* The same for a sequence that goes, on a device that may have failed. */
void block_writes_forget(struct sequence *seq);

/* ---- the pool's blocks on the device (device_index.c) ---- */
/* Block `block`, if it lies in the pool and can become slow, gets its identity and room for its index. -ENOMEM, and nothing has changed. */
int device_index_take(struct sequence *seq, int block);
/* Where block_encode and block_decode are to leave a copy of the layer's index; NULL: nowhere. */
uint8_t *device_index_rows(const struct sequence *seq, int layer, int block);
/* All of the index out of the pool, of a block that nothing codes or decodes here. */
int device_index_load(struct sequence *seq, int block);
/* The block is sealed. */
void device_index_seal(struct sequence *seq, int block);
void device_index_drop(struct sequence *seq, int block);

/* ---- blocks of the answer (answer_blocks.c) ---- */
/* Space for the block that the next token completes, if it does. -ENOMEM. */
int answer_block_prepare(struct sequence *seq);
/* The newest token has completed its block, or has not. A complete one is coded, what the code gives back replaces its rows, and it starts for the pool. -ERANGE
 * as above. */
int answer_block_complete(struct sequence *seq);
/* Leases the blocks of the answer so far that the pool has. */
void answer_blocks_lookup(struct sequence *seq, const struct sequence_request *request, uint64_t end_us);
/* Gives those behind n_restorable (0: all) back, because another rank does not have them. */
void answer_blocks_trim(struct sequence *seq, int n_restorable);
/* The prompt is done: goes on behind the blocks that were found, as if their tokens had been decoded here. */
int answer_blocks_restore(struct sequence *seq);

/* ---- bridge (bridge.c): hidden states between layers ---- */
enum { BRIDGE_CHUNKS = 2 /* of a bridge on the host that are on the device: one computed, in the other's place one leaving and then one coming */ };
struct bridge {
    float *rows;  /* device: layer-major [n_new, dim], chunk-major [chunk, dim]; with `host` [BRIDGE_CHUNKS][chunk, dim] in turn */
    float *host;  /* pinned [n_new, dim], or NULL */
    struct {
        struct device_event *loaded, *computed, *vacant;
    } slots[BRIDGE_CHUNKS]; /* with `host` */
};
/* Host memory and events, where the plan wants them. -ENOMEM. */
int bridge_open(struct sequence *seq);
void bridge_close(struct sequence *seq); /* waits for the device; `rows` are not its concern */
/* Device memory [rows of the chunk, dim] from begin to end. */
float *bridge_rows(const struct sequence *seq, int layer, int chunk);
/* Before the first op on a chunk's rows in a layer, and behind the last, for every chunk of every layer in order. Both only submit. */
int bridge_begin(struct sequence *seq, int layer, int chunk);
int bridge_end(struct sequence *seq, int layer, int chunk);

/* ---- cached prefix (prefix_load.c) ---- */
enum { PREFIX_LOAD_BLOCKS = 64 /* a unit */ };
struct prefix_loads {
    uint8_t *ring;   /* device: [n_slots] groups of slices; NULL: where the memory is the host's blocks are decoded from where they lie, elsewhere they come through the staging area when they are wanted */
    int n_groups;    /* a layer */
    int n_slots;
    int issued, done; /* groups over all layers: copies submitted, decoding submitted */
    struct load_slot {
        struct device_event *loaded, *decoded;
    } *slots;        /* [n_slots] */
};
int prefix_load_open(struct sequence *seq); /* events, when there is a ring; -ENOMEM */
void prefix_load_close(struct sequence *seq);
/* Decodes the layer's cached blocks index * PREFIX_LOAD_BLOCKS .. into its full KV. */
int prefix_load_unit(struct sequence *seq, int layer, int index);
/* Between the chunks of a layer: submits a share of the copies for the next one. */
int prefix_load_ahead(struct sequence *seq, int layer);

/* ---- sequences (sequence.c) ---- */
enum sequence_phase { SEQUENCE_PREFILL, SEQUENCE_DECODE, SEQUENCE_FAILED };

/* What a sequence holds only while its prompt is computed. */
struct prefill {
    int n_new;              /* tokens that are computed, n_cached .. n_prompt-1 */
    int n_loads, n_chunks;  /* units a layer */
    int unit, n_units;
    bf16_t *active;         /* [n_resident][k, v][n_kv_heads, active_rows, head_dim] */
    struct bridge bridge;
    struct prefix_loads loads;
    float *window;          /* [n_resident][n_window, n_heads, head_dim] */
    float *columns;         /* column sums [n_resident][n_kv_heads, n_prompt], then (m, l) [chunk, n_heads, 2] of the queries at work; NULL without all_queries */
    int32_t *indices;       /* [plan.layer_rows_max] kept positions of one layer, head after head */
};

/* Where one layer's kept rows lie: fixed at admission. How its KV heads share them is the selector's choice. */
struct layer_rows {
    int64_t first; /* kept rows of the layers before it */
    int n_rows;    /* kept rows that the layer has room for, all KV heads; head_first tells how many there are */
};

struct sequence {
    struct engine *engine;
    enum sequence_phase phase;
    struct sequence_plan plan;
    bool shared;            /* uses the pool */
    bool in_step;           /* marks repeats while a batch is checked */
    uint32_t tag;
    int32_t *tokens;        /* [n_total] */
    int n_tokens;           /* positions with K and V */
    int n_cached;           /* prompt tokens that came from the pool, a multiple of BLOCK_TOKENS */
    int n_restorable;       /* tokens up to the end of the answer's blocks that the pool has; 0: none */

    struct block_key root;
    struct block_key *keys;        /* [n_blocks] */
    struct kv_lease *leases;       /* [n_blocks], held when the block's place says so */
    struct sequence_block *blocks; /* [n_blocks] */
    int n_moves;            /* that the store has been asked for */
    struct block_copy *copies; /* those that it granted and whose bytes are on their way, the oldest first */
    int retry_wait, retry_left; /* steps from the last refusal to the next try, and how many are left; 0: none was refused */

    struct layer_rows *layers; /* [n_layers] */
    int64_t n_kept_rows;    /* of the layers whose prefill is done */
    bf16_t *fast;           /* [n_layers][k, v]{kept [layer's n_rows, head_dim], recent [n_kv_heads, recent_rows, head_dim]} */
    int recent_first;       /* position of recent row 0 */
    int32_t *kept_device;   /* the same as `kept` on the device, for the terms of key biases; NULL for models without any */
    int32_t *kept;          /* host: kept positions, layer after layer, head after head, ascending within a head */
    int32_t *head_first;    /* host: [n_layers, n_kv_heads + 1], first row of each head among the layer's kept rows, then how many rows there are */
    struct kv_block *table; /* [n_pages / BLOCK_SUBPAGES] device */
    uint16_t *masks;        /* [n_layers, n_kv_heads, n_pages] device: slow tokens of each sub-page below the recent window; full behind it */
    int32_t *n_prompt_pages; /* host: [n_layers, n_kv_heads] sub-pages below plan.recent_first with slow tokens */
    uint8_t *summaries;     /* [n_layers, n_kv_heads, n_pages] of engine->summary_bytes; NULL: none */

    struct prefill prefill;
    float *logits;          /* [n_vocab] device */
    int32_t *bad;           /* device: values so far that no block can hold */
    int32_t n_bad;          /* the same, as it was last looked at */
    float *prompt_logprobs; /* [n_prompt - 1] host, or NULL */
    size_t committed_bytes; /* shares of engine->committed_bytes and engine->n_indices */
    int n_indices;
    struct sequence_stats stats;
};

void sequence_commit(struct sequence *seq, size_t bytes, int n_indices);
void sequence_prefill_memory_free(struct sequence *seq);

/* Blocks that can become slow: 0 .. this - 1. */
static inline int sequence_slow_blocks(const struct sequence *seq)
{
    return seq->plan.n_pages / BLOCK_SUBPAGES;
}
static inline size_t sequence_list(const struct sequence *seq, int layer, int kv_head)
{
    return (size_t)layer * (size_t)seq->engine->model->config.n_kv_heads + (size_t)kv_head;
}
/* Summaries of a layer and KV head; NULL when the scorer needs none. */
static inline uint8_t *sequence_summaries(const struct sequence *seq, int layer, int kv_head)
{
    return seq->summaries ? seq->summaries + sequence_list(seq, layer, kv_head) * (size_t)seq->plan.n_pages * seq->engine->summary_bytes : NULL;
}
static inline int32_t *sequence_layer_kept(const struct sequence *seq, int layer)
{
    return seq->kept + seq->layers[layer].first;
}
static inline int32_t *sequence_head_first(const struct sequence *seq, int layer)
{
    return seq->head_first + (int64_t)layer * (seq->engine->model->config.n_kv_heads + 1);
}

/* Kept entries of one layer and KV head: positions, and their rows among the layer's kept rows. */
struct kept_rows {
    const int32_t *pos; /* [n] ascending */
    int first, n;
};
static inline struct kept_rows sequence_kept(const struct sequence *seq, int layer, int kv_head)
{
    const int32_t *first = sequence_head_first(seq, layer) + kv_head;
    return (struct kept_rows){.pos = sequence_layer_kept(seq, layer) + first[0], .first = first[0], .n = first[1] - first[0]};
}

/* ---- fast tier (fast_tier.c) ---- */
/* One layer's rows. Kept row r (counted over all heads, sequence_kept) at kept_k + r * head_dim; recent row r of head h at recent_k + h * recent_stride + r * head_dim. */
struct fast_rows {
    bf16_t *kept_k, *kept_v;
    bf16_t *recent_k, *recent_v;
    int64_t recent_stride;
};
struct fast_rows fast_tier_rows(const struct sequence *seq, int layer);
/* Gathers the kept rows (indices: the layer's kept positions in device memory) and copies the recent ones from the layer's full KV. */
int fast_tier_fill(struct sequence *seq, int layer, const int32_t *indices, const bf16_t *k, const bf16_t *v, int64_t head_stride);
/* Moves the oldest block of the recent window, which is coded already, to the slow tier when the window is full. */
int fast_tier_leave(struct sequence *seq);

/* ---- selection (selection.c) ---- */
/* The layer's prefill is done: choose, gather, list. */
int selection_run(struct sequence *seq, int layer);

/* ---- prefill (prefill.c, prefill_chunk.c) ---- */
void prefill_init(struct sequence *seq);
int prefill_chunk_run(struct sequence *seq, int layer, int chunk);

static inline int prefill_resident(const struct sequence *seq, int layer)
{
    return seq->plan.n_resident == 1 ? 0 : layer;
}
static inline bf16_t *prefill_k(const struct sequence *seq, int layer)
{
    const struct model_config *c = &seq->engine->model->config;
    return seq->prefill.active + (int64_t)prefill_resident(seq, layer) * 2 * c->n_kv_heads * seq->plan.active_rows * c->head_dim;
}
static inline bf16_t *prefill_v(const struct sequence *seq, int layer)
{
    const struct model_config *c = &seq->engine->model->config;
    return prefill_k(seq, layer) + (int64_t)c->n_kv_heads * seq->plan.active_rows * c->head_dim;
}
static inline int64_t prefill_head_stride(const struct sequence *seq)
{
    return (int64_t)seq->plan.active_rows * seq->engine->model->config.head_dim;
}
static inline float *prefill_column_sums(const struct sequence *seq, int layer)
{
    return seq->prefill.columns + (int64_t)prefill_resident(seq, layer) * seq->engine->model->config.n_kv_heads * seq->plan.n_prompt;
}
static inline float *prefill_column_ml(const struct sequence *seq)
{
    return seq->prefill.columns + (int64_t)seq->plan.n_resident * seq->engine->model->config.n_kv_heads * seq->plan.n_prompt;
}
static inline float *prefill_window(const struct sequence *seq, int layer)
{
    const struct model_config *c = &seq->engine->model->config;
    return seq->prefill.window + (int64_t)prefill_resident(seq, layer) * seq->plan.n_window * c->n_heads * c->head_dim;
}
