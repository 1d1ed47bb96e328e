/* A worker of the tests of this folder: a device with a small model, and a client of a real kvstore whose mappings that device knows. All failures are Criterion assertions. */
#pragma once
#include "tests/system/store_fixture.h"
#include "tests/unit/engine_fixture.h"

struct side {
    struct fixture f;
    struct kv_client *client;
    uint8_t *pool;
    uint64_t pool_bytes;
    int refusals; /* of mappings still to come */
    int n_mapped, n_unmapped;
};

/* The store of all sides; the test initializes it. */
extern struct store_fixture side_store;

/* The first `refusals` mappings are refused. */
void side_open(struct side *side, const struct kernel_backend *backend, int n_layers, int refusals);
/* One mapping came and went, nothing is registered (the device asserts it) or allocated any more. */
void side_close(struct side *side);
/* Logits [1 + n_decode, vocab] of the run, the caller's to free; with the pool or without. The store's answers are taken between the steps, and coverage is checked. */
float *side_logits(struct side *side, const struct engine_config *config, const struct fixture_run *run, bool pooled, struct sequence_stats *ret_stats);
