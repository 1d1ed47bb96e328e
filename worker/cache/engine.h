/* The engine: sequences over one model on one device. Layer-major consistent prefill, tiered cache, decode as one batch (docs/cache.md).
 * Single-threaded: the owner of the device and the loop makes every call. Work comes in small units, so that the scheduler can look at messages
 * and run decode steps between them.
 *
 * Coverage: per sequence, layer and KV head the positions 0..n-1 are split into kept (fast), recent (fast) and slow (pool or private blocks).
 * Determinism: what a sequence computes depends on its tokens and this configuration alone, never on chunk, batch, threads, instruction set, or
 * whether the prefix came from the pool. */
#pragma once
#include "kernels/kernels.h"
#include "kvstore/client/kv_client.h"
#include "proto/base/error.h"
#include "proto/block_layout.h"
#include "worker/cache/page_cache.h"
#include <stdbool.h>
#include <stdint.h>

struct model;
struct engine;
struct sequence;
struct selector_ops;
struct scorer_ops;

enum prefill_values { PREFILL_CONSISTENT, PREFILL_EXACT };       /* attend earlier blocks as the pool holds them, or unquantized */
enum prefill_order { PREFILL_LAYER_MAJOR, PREFILL_CHUNK_MAJOR }; /* chunk-major keeps every layer's KV: the baseline to measure against */
/* Where a prompt's hidden states wait between two layers. Host: in pinned memory, and on the device two chunks of them at any length. Auto: on the device when the request fits there as it is
 * admitted, beside what runs, and otherwise on the host. The choice changes nothing that is computed, and there is none (device) where the device's memory is the host's, and with chunk-major order,
 * which has one chunk of them anyway. */
enum bridge_place { BRIDGE_DEVICE, BRIDGE_HOST, BRIDGE_AUTO };

#define PAGE_CACHE_AUTO SIZE_MAX

/* The other ranks of a tensor-parallel group. Every rank has an engine of the same configuration and makes the same calls in the same order (worker/group sees to that). What they may find
 * differently they agree on inside the call: how much of a prompt or an answer the pool has (each rank has blocks of its own), whether there is memory, and whether a rank's own heads made
 * numbers that no block holds. So every call has the same result on all ranks. */
struct engine_peers {
    /* Replaces values[i] by the least of all ranks, n <= max_batch or 4. Blocks. Negative: the group has broken. */
    int (*least)(void *arg, int32_t *values, int n);
    void *arg;
};

struct engine_config {
    enum kv_format format;
    const struct selector_ops *selector;
    int budget;                 /* kept entries per KV head, on average over layers and heads, sinks and observation window included; 0: none beyond the recent window */
    int recent;                 /* newest tokens per KV head that stay on the device in bf16, >= 0; the incomplete last block always does */
    bool answer_stays;          /* no token behind the prompt leaves the recent window, which then has a row for each: what methods that drop entries do, since their slow tier is lost */
    int fetch;                  /* slow tokens attended per step and KV head, rounded up to whole fetch units; INT32_MAX: all */
    int fetch_unit;             /* tokens chosen together: SUBPAGE_TOKENS, BLOCK_TOKENS, or 0 for the former */
    const struct scorer_ops *scorer; /* who chooses them; NULL: index2 */
    int chunk;                  /* prompt tokens a prefill unit, >= 1 */
    enum prefill_values values; /* with exact values prefixes are not reused and blocks have a fingerprint of their own, except in bf16, where the two are the same */
    enum prefill_order order;
    enum bridge_place bridge;
    size_t load_staging;        /* device bytes, at most, for a prompt's cached blocks of one layer on their way from the pool, at least two slices; 0: 256 MiB. Not used where the device's
                                 * memory is the host's. */
    size_t index_slab;          /* device bytes, at most, of index copies that are allocated together, at least one and at most 64 copies; 0: 16 MiB. Not used where the device's memory is the host's. */
    int max_context;            /* tokens a sequence, prompt and answer */
    int max_batch;              /* sequences in one decode step */
    bool reuse_generated;       /* blocks made while decoding may serve other prompts, once their answer is over */
    size_t page_cache;          /* device bytes for fetched sub-pages, at most, and never more than admission leaves; 0: none; PAGE_CACHE_AUTO: all that admission leaves, none without a
                                 * memory_limit. It changes what is counted as traffic, never what is attended. */
    size_t memory_limit;        /* device bytes beyond the weights for admission; 0: no limit */
    uint64_t store_deadline_us; /* for lookups and reservations before prefill */
    bool eager_steps;           /* every decode step is submitted op by op, also where the device could replay it (device_ops.step_begin). It changes nothing that is computed. */
    const struct engine_peers *peers; /* borrowed; NULL: this engine is alone */
};

struct sequence_request {
    const int32_t *prompt;      /* copied */
    int n_prompt;               /* >= 1 */
    int max_new;                /* tokens that may be appended */
    const int32_t *answer;      /* copied: the first n_answer of them, when another worker has made them; NULL */
    int n_answer;               /* Where the pool has their blocks, the end of prefill finds them appended, to the bit as if they had been: sequence_tokens tells how many.
                                 * The last one never is, since its logits are wanted. */
    const void *salt;
    size_t n_salt;
    bool no_cache;              /* neither look up nor put */
    bool prompt_logprobs;       /* implies no prefix lookup */
    uint32_t tag;               /* the caller's own number for it: sequence_tag */
};

struct sequence_stats {
    int n_prompt, n_cached, n_tokens;
    int n_restored;             /* tokens of the answer that came from the pool */
    uint64_t bytes_loaded;      /* blocks of the pool that the run started from: the prefix, what exists behind it, and blocks of the answer */
    uint64_t bytes_to_pool;
    uint64_t pages_attended;    /* slow sub-pages of decode steps, over layers and KV heads, wherever they lie */
    uint64_t bytes_attended;    /* theirs */
    uint64_t page_hits, page_misses; /* those of them that lie in the pool: the page cache had them or not (all, without one). Private blocks are on the device already */
    uint64_t bytes_missed;      /* of the misses: what a device has to fetch, the traffic of decoding */
    uint64_t tokens_attended;   /* the same for tokens of all tiers, the step's own included */
    int units_done, units_total; /* prefill */
    int private_blocks;         /* blocks the pool did not take */
};

int engine_create(const struct engine_config *config, struct model *model, struct kv_client *store /* NULL: no pool */,
                  struct engine **ret_engine, struct error *err);
void engine_free(struct engine *engine);
/* Whether the store's newest mapping may be used, at first it may. While it may not (the device cannot read it yet) the pool counts as one that is not there: new sequences share nothing, and
 * blocks of others stay where they are. */
void engine_use_pool(struct engine *engine, bool use);
/* Device bytes of the engine itself, held from its creation on: activations of a unit or a step, the most that an op takes for the time of its call, and what the device
 * has for itself. */
size_t engine_workspace_bytes(const struct engine *engine);
/* Device bytes that a sequence needs beyond the weights and the engine's workspace: admission is arithmetic. It is the peak of a run without cached prefix, while its prompt is
 * computed or at the end of its answer, whichever is larger; staging counts every block there can be without a store, and those made while decoding with one. With BRIDGE_AUTO it is
 * what it needs where nothing else runs. */
size_t engine_sequence_bytes(const struct engine *engine, int n_prompt, int max_new);
/* What the configuration makes of retrieval, in bytes. */
struct engine_retrieval {
    int fetch_tokens;           /* the fetch budget in whole units; INT32_MAX: all */
    uint64_t step_bytes;        /* sub-pages that one sequence attends in one step at most, over layers and KV heads, in a context of max_context */
    size_t subpage_bytes;       /* one sub-page of one KV head and layer in the slow tier, */
    size_t index_bytes;         /* what the scorer reads of it when it scores, shared by all that share the block; */
    size_t summary_bytes;       /* what it reads of the sequence's own: one or the other, or neither */
};
void engine_retrieval(const struct engine *engine, struct engine_retrieval *ret);
/* 1 if it fits now, 0 if it has to wait, -E2BIG with a text naming the numbers if it can never fit. */
int engine_admits(const struct engine *engine, int n_prompt, int max_new, struct error *err);

/* Admits, looks the prefix up (bounded by store_deadline_us) and reserves the blocks to come. -E2BIG, -EAGAIN (does not fit now), -ENOMEM. */
int sequence_create(struct engine *engine, const struct sequence_request *request, struct sequence **ret_sequence, struct error *err);
/* Cancels at any stage; leases are released, reserved blocks abandoned. NULL is fine. */
void sequence_free(struct sequence *sequence);
/* Before sequence_free, when nobody will go on with the answer (it is complete, or not wanted any more): its blocks leave the pool, unless another sequence has them; with
 * reuse_generated they get a prompt's keys first, in the background. */
void sequence_retire_answer(struct sequence *sequence);
/* One unit of prefill: one chunk of one layer, some cached blocks of a layer, or a layer's selection. 1: more to do; 0: done, sequence_logits is valid; negative: failed, free it.
 * -ERANGE: its keys or values are not finite, or too large for the format's codes. With peers any other error is the end of the group (-EIO). */
int sequence_prefill_step(struct sequence *sequence);
/* Logits [vocab] for the token after the last one, valid until the next step of this sequence. NULL when a step found keys or values (as -ERANGE above) in it: it alone has failed then, and
 * can only be freed. */
const float *sequence_logits(const struct sequence *sequence);
/* Log-probabilities of prompt[i+1] given prompt[..i], [n_prompt - 1], when asked for; else NULL. */
const float *sequence_prompt_logprobs(const struct sequence *sequence);
/* Appends tokens[i] to sequences[i], distinct, n <= max_batch, and computes the next logits of each. -EINVAL (not prefilled, full, a token that is none) and -ENOMEM
 * leave the sequences as they were; after any other error (with peers: -EIO, the end of the group) they can only be freed. */
int engine_decode(struct engine *engine, struct sequence **sequences, const int32_t *tokens, int n);
/* Zeros when there is no page cache. */
void engine_page_cache_stats(const struct engine *engine, struct page_cache_stats *ret);
/* What became of the decode steps so far; zeros where the device keeps none. */
void engine_step_stats(const struct engine *engine, struct step_stats *ret);
void sequence_stats(const struct sequence *sequence, struct sequence_stats *ret);
const int32_t *sequence_tokens(const struct sequence *sequence, int *ret_n);
uint32_t sequence_tag(const struct sequence *sequence);
/* 32 bytes: root of the block keys of this engine. */
void engine_fingerprint(const struct engine *engine, uint8_t ret_fingerprint[32]);
