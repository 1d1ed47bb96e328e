/* Tensor parallelism (Megatron-LM, arXiv 1909.08053): rank r of n computes some heads of every layer, some columns of every MLP and some rows of the head, and what the ranks add to the residual
 * stream is summed twice a layer. Embedding, norms and the residual stream are whole on every rank. Pure; any thread.
 *
 *   heads        whole KV heads with their query heads, as even as possible, the larger shares first (3 KV heads over 2 ranks: 2 and 1). With more ranks than KV heads a KV head is on several
 *                ranks, each of which has its K and V, and its query heads are split over them. A rank's layer is a layer with fewer heads and the same ratio everywhere in it.
 *   MLP          rows of gate and up, columns of down, in units of a quantization block of down
 *   vocabulary   rows of the head, in units of WEIGHT_ROWS_UNIT; logits are gathered, so n_vocab stays what it is
 *   biases       of q, k, v, gate, up like their rows; of o and down on rank 0, which also adds the residual */
#pragma once
#include "proto/base/error.h"
#include "worker/model/model_config.h"

/* The configuration of one rank: heads, KV heads and ffn_dim are the rank's own, `shard` says of what. `whole` is a whole model. ffn_unit: columns of a block in the down projections (1, 32 or
 * 256; model_weights.h: model_weights_ffn_unit); where the MLP is too narrow for it, smaller units are taken. n_ranks 1 gives the whole model as it is.
 * -EINVAL (rank), -ENOTSUP (more ranks than there are heads for, with the numbers). */
int model_shard_split(const struct model_config *whole, int rank, int n_ranks, int ffn_unit, struct model_config *ret_part, struct error *err);
/* First row of rank's part of the vocabulary, for rank = 0 .. n_ranks (n_vocab): ascending, perhaps equal. */
int64_t model_shard_vocab_first(const struct model_config *config, int rank);

static inline bool model_is_sharded(const struct model_config *config)
{
    return config->shard.n_ranks > 1;
}
