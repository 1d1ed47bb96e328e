/* The exact-once invariant made checkable: per layer and KV head each position lies in exactly one of kept, recent and slow. For tests and debugging; reads a sequence, owner
 * thread. */
#pragma once
#include "worker/cache/engine.h"

/* 0, or -EINVAL naming the first position, layer and KV head that is covered twice or not at all, or a page that lies elsewhere than its block. Only after prefill. */
int coverage_check(const struct sequence *seq, struct error *err);
/* Kept positions of one layer and KV head, ascending; borrowed. Only after prefill. */
const int32_t *coverage_kept(const struct sequence *seq, int layer, int kv_head, int *ret_n);
/* First recent position. */
int coverage_recent_first(const struct sequence *seq);
/* Bytes of a block of the sequence as attention reads them (layout.block_bytes of the engine's format); NULL when there is none. Borrowed. */
const uint8_t *coverage_block(const struct sequence *seq, int block);
