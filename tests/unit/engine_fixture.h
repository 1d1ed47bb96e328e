/* A small random transformer, on the CPU unless another backend is set, and runs of the engine over it: what the engine's tests share. All failures are Criterion assertions. */
#pragma once
#include "kernels/backend.h"
#include "worker/cache/coverage.h"
#include "worker/cache/engine.h"
#include "worker/cache/selector.h"
#include "worker/model/model.h"

enum { TINY_DIM = 64, TINY_HEADS = 4, TINY_KV_HEADS = 2, TINY_HEAD_DIM = 32, TINY_FFN = 96, TINY_VOCAB = 160, TINY_CONTEXT = 4096, TINY_MAX_LAYERS = 8 };

/* Row-major source of the packed weights, for a reference in plain C. */
struct tiny_layer {
    float *q, *k, *v, *o, *gate, *up, *down;
    float *k_rest, *k_large; /* K's bias, the part that stays in the key and the part that does not; or NULL */
};

struct fixture {
    const struct device_ops *dev;
    struct device *device;
    struct stream *stream;
    struct model model;
    struct tiny_layer source[TINY_MAX_LAYERS];
    float *embedding; /* [vocab, dim], also the head */
    struct device_memory_stats at_start; /* weights loaded, no engine */
};

struct fixture_params {
    int n_layers;  /* 0: 3 */
    int n_threads; /* 0: 1 */
    enum cpu_isa isa;
    float key_bias; /* a slow and a fast RoPE pair of every KV head carry a bias of this many of the keys' deviations, and the queries' rows there are a twentieth of what they were */
};

/* What fixtures that are opened from now on run on; at first the CPU. One fixture at a time on any other, since logits are read through the device of the fixture opened last. */
void fixture_use_backend(const struct kernel_backend *backend);
/* The same weights for the same n_layers, whatever the threads and the instruction set. Returns false when this processor lacks the instruction set. */
bool fixture_open(struct fixture *f, struct fixture_params params);
/* The same on a device of the caller's choice, e.g. one with a memory limit. */
bool fixture_open_device(struct fixture *f, const struct device_config *config, int n_layers);
void fixture_close(struct fixture *f);
/* From now on a sequence with this token in it has NaN from there on; no other has. */
void fixture_poison_token(struct fixture *f, int32_t token);

/* All selectors. */
enum { FIXTURE_SELECTORS = 8 };
extern const struct selector_ops *const fixture_selectors[FIXTURE_SELECTORS];
/* k8v4, snapkv, budget 64, recent 32, fetch 64, chunk 96, layer-major, consistent; room for all tests. */
struct engine_config fixture_config(void);
struct engine *fixture_engine(struct fixture *f, const struct engine_config *config, struct kv_client *store);
/* Repeatable tokens with structure: spans that come back, so that attention has something to find. */
void fixture_tokens(uint64_t seed, int32_t *tokens, int n);

struct fixture_run {
    const int32_t *tokens; /* [n_prompt + n_decode] */
    int n_prompt, n_decode;
    bool no_cache, prompt_logprobs;
};
/* Prefills and feeds the other tokens; returns logits [1 + n_decode, vocab] (the caller frees) and checks coverage after every step. */
float *fixture_logits(struct engine *engine, const struct fixture_run *run, struct sequence_stats *ret_stats);
/* The same by a fixture of its own, which leaves no memory behind; NULL when this processor lacks the instruction set. */
float *fixture_run_logits(struct fixture_params params, const struct engine_config *config, const struct fixture_run *run);
struct sequence *fixture_prefilled(struct engine *engine, const struct fixture_run *run);
void fixture_decode(struct engine *engine, struct sequence *seq, int32_t token);
/* The logits as they are now, from wherever the device has them to row [vocab]. */
void fixture_read_logits(const struct sequence *seq, float *row);
/* Both are logits as above; names the first row that differs. */
void fixture_expect_same(const float *a, const float *b, int n_rows, const char *what);
/* The logits of fixture_run_logits are those of `want`; says so on stderr where this processor cannot tell. */
void fixture_expect_run_same(const float *want, struct fixture_params params, const struct engine_config *config, const struct fixture_run *run, const char *what);
/* Everything beside the weights has been given back. */
void fixture_expect_no_memory(const struct fixture *f);
