/* Weights drawn at random for a model of a given shape, so that a bench can run models whose files are not at hand. Time and memory are those of the real model; what it says is noise.
 * Owner thread only. */
#pragma once
#include "worker/model/model_config.h"
#include "worker/model/weight_source.h"

struct random_weights;

/* Matrices and biases in bf16, uniform with a standard deviation of 0.02, norms near 1. All tensors are windows of one buffer as large as the largest of them, so host memory and time
 * are bounded by that one. The same seed gives the same weights. -ENOMEM. */
int random_weights_create(const struct model_config *config, uint64_t seed, struct random_weights **ret_weights, struct error *err);
void random_weights_free(struct random_weights *weights); /* NULL is fine */
/* Fills all but the name. -ENOENT for a tensor that the configuration does not ask for. */
int random_weights_find(const struct random_weights *weights, enum tensor_role role, int layer, bool bias, struct source_tensor *ret_tensor);
