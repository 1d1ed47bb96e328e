/* The engine held to the lab: the prefill that `tidepool serve` runs gives the very numbers of the lab's, so what is measured on the lab's hidden states is true of the engine's. */
#pragma once
#include "bench/fidelity/lab/lab.h"

/* Prefills tokens [context->n_tokens] with an engine of its own, layer-major, in chunks, attending `values`, and compares the last logits and the log-probability of every
 * DRIFT_EVERY-th prompt token (drift.h) with those that follow from context->hidden. ret_n_different: how many numbers differ in any bit. Blocks. */
int drift_engine_compare(const struct lab_context *context, struct model *model, const int32_t *tokens, enum lab_values values, int chunk, int *ret_n_different, struct error *err);
