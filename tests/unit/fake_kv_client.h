/* kv_client.h inside the test's own process: a store whose every answer the test decides, for what a real one gives only by accident (busy, full, late, gone at this very
 * call). Linked as objects, it stands before the real
 * client's library. */
#pragma once
#include "kvstore/client/kv_client.h"

struct kv_client *fake_store_create(void);
void fake_store_free(struct kv_client *store); /* answers what is outstanding with -ECANCELED; asserts that no lease is held */

/* The answers from now on. */
struct fake_answers {
    int lookup_error;       /* negative: lookups fail */
    int lookup_max;         /* at most this many blocks of a run, < 0: no limit */
    int reserve_error;      /* negative: reservations fail, also the asynchronous ones */
    int full_from;          /* blocks at this position and behind get FULL, < 0: none */
    int busy_every;         /* every n-th new block is BUSY, 0: none */
    int seal_error;         /* negative: seals fail, the block is not published */
};
void fake_store_answer(struct kv_client *store, struct fake_answers answers);
/* Answers what was asked asynchronously, in order; returns how many. */
int fake_store_pump(struct kv_client *store);
int fake_store_n_pending(const struct kv_client *store);
/* Published blocks; leases held; writes that were granted and neither sealed nor released. */
int fake_store_n_blocks(const struct kv_client *store);
int fake_store_n_leases(const struct kv_client *store);
int fake_store_n_granted(const struct kv_client *store);
/* Forgets every published block whose position is at or behind `position`. No leases may be held. */
void fake_store_drop_from(struct kv_client *store, uint32_t position);
/* Flips a bit of every published block at `position`. */
void fake_store_scribble(struct kv_client *store, uint32_t position);
