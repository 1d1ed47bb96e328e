/* Shared by the two readers of model_config. */
#pragma once
#include "worker/model/model_config.h"

/* Checks every bound, fills what follows from the rest (head_dim when 0, attention_scale, rope, max_context with its note). `window` is the
 * sliding window in tokens of the narrowest layer, 0: none. `divisors` as for rope_freqs_init. */
int model_config_finish(struct model_config *c, int64_t window, const float *divisors, struct error *err);
/* Adds an id once; ids outside the vocabulary can never be drawn and are left out, as is what exceeds MODEL_MAX_EOS. */
void model_config_add_eos(struct model_config *c, int64_t id);
