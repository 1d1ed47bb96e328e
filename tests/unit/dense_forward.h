/* A whole dense forward pass over model_*: full attention over bf16 K and V, no cache tiers. For tests. */
#pragma once
#include "worker/model/model.h"

struct dense_device {
    struct device *device;
    struct stream *stream;
    struct model *model;
};

/* Opens the CPU device and the model; what fails fails the test. */
void dense_open(struct dense_device *d, const char *path, int n_threads, enum cpu_isa isa);
void dense_close(struct dense_device *d);
/* Logits [n_positions, n_vocab] after the tokens at `positions` (ascending) of tokens[n], `chunk` tokens at a time, layer by layer. 0 or the error of an op. */
int dense_forward(const struct dense_device *d, const int32_t *tokens, int n, int chunk, const int32_t *positions, int n_positions, float *ret_logits);
