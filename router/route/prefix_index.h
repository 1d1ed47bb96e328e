/* Which blocks which store's pool holds, by content address: what the router knows about prefixes. A hint, never a promise: the worker asks the
 * store again. One thread.
 *
 * An open-addressing table of key -> set of stores. A request's blocks are looked up in order until no store has all of them so far.
 * Predicted blocks (a worker was just asked to compute them) count for a few seconds, so that a burst of requests with one prefix is not scattered
 * over the hosts before the first block event arrives. */
#pragma once
#include "proto/block_key.h"
#include <stddef.h>
#include <stdint.h>

enum { PREFIX_STORES_MAX = 64 };

struct prefix_index;

/* Holds at most `entries_max` blocks; beyond, new ones are not taken. */
int prefix_index_create(size_t entries_max, struct prefix_index **ret_index);
void prefix_index_free(struct prefix_index *index);
/* 0; -ENOSPC beyond the limit; -ENOMEM. `store` < PREFIX_STORES_MAX. */
int prefix_index_add(struct prefix_index *index, int store, const struct block_key *key);
void prefix_index_remove(struct prefix_index *index, int store, const struct block_key *key);
/* Forgets everything about a store. */
void prefix_index_drop(struct prefix_index *index, int store);
/* The store will have keys[n] soon: counts for ttl_us from now_us. Best effort. */
void prefix_index_predict(struct prefix_index *index, int store, const struct block_key *keys, size_t n, uint64_t now_us, uint64_t ttl_us);
/* ret_blocks[s] = length of the longest run from keys[0] that store s holds, for each s < n_stores. */
void prefix_index_match(const struct prefix_index *index, const struct block_key *keys, size_t n, uint64_t now_us, int n_stores, uint32_t *ret_blocks);
/* Blocks known of a store, and entries in all. */
size_t prefix_index_store_blocks(const struct prefix_index *index, int store);
size_t prefix_index_entries(const struct prefix_index *index);
