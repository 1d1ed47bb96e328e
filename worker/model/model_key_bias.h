/* Key biases too large for the cache's codes (Qwen2, Qwen2.5): which RoPE pairs have one, and what attention needs to put it back (kernels.h: struct key_bias).
 * Owner thread of the device.
 *
 * A pair is marked by the weights alone. A head's own key has the energy E = sum over its rows r and columns c of (W[r][c] gamma[c])^2, what it would have for an input of
 * independent components; after the rotation every dimension of a key has a share of all biases, so what counts is their energy B = sum of b^2 against E. The pairs of largest
 * bias are marked (ties: lower pair) until those left have at most E, since each marked pair costs time wherever there are logits, and biases of that size cost little: spread over all
 * pairs with B = E, leaving them in the keys gives a KL of .0116 where marking 22 pairs a head gives .0109; with B = 4 E it is .065, .0356 with those marked that this rule marks, .0339
 * with B down to E / 16 (SmolLM2-135M, 1,536 tokens, k8v4, snapkv 256, fetch 256). At most KEY_BIAS_PAIRS_MAX of a head are, and what then is left is coded with the key. Sums are in double in a fixed order, so the marks are the same on every machine. */
#pragma once
#include "kernels/kernels.h"
#include "proto/base/error.h"
#include "worker/model/model_config.h"
#include <stddef.h>

struct model;

enum { KEY_BIAS_DIGEST_BYTES = 32 };

struct layer_key_bias {
    const int32_t *first, *pair; /* as in struct key_bias; device memory */
    const float *u;
    int n_pairs;                 /* 0: none, and the pointers are NULL */
};

struct model_key_bias {
    struct layer_key_bias *layers; /* host [n_layers]; NULL: this model has no key biases */
    void *memory;                  /* device: all of the above */
    int n_pairs;                   /* marked in all layers and heads */
    uint8_t digest[KEY_BIAS_DIGEST_BYTES]; /* BLAKE2b-256 of the marks */
};

/* Device bytes (MEM_WEIGHTS) of the marks: room for as many as there may be, so that the configuration alone decides. 0 without key biases. */
size_t model_key_bias_bytes(const struct model_config *config);
/* Marks the pairs of a loaded model, takes their biases out of weights.layers[].k.bias and fills model->key_bias. Nothing to do where no layer has a key bias; where
 * one has, config.qkv_bias is set, whatever the file said.
 * -ENOMEM, or the error of an op. */
int model_key_bias_split(struct model *model, struct error *err);
void model_key_bias_fini(struct model *model); /* a zeroed model->key_bias is fine */

/* The bias of every layer with the tables of positions 0 .. n_positions-1, as ops take it. */
struct key_bias_tables {
    struct key_bias *layers; /* host [n_layers], or NULL */
    const struct model *model;
    void *memory;            /* device, MEM_WORKSPACE */
};
/* Device bytes of the tables; 0 without key biases. From the configuration alone. */
size_t key_bias_tables_bytes(const struct model_config *config, int n_positions);
/* -ENOMEM, or the error of an op. */
int key_bias_tables_init(struct key_bias_tables *ret_tables, const struct model *model, int n_positions);
void key_bias_tables_fini(struct key_bias_tables *tables); /* a zeroed struct is fine */
/* What an op of this layer takes: NULL where no pair is marked. */
const struct key_bias *key_bias_of(const struct key_bias_tables *tables, int layer);
