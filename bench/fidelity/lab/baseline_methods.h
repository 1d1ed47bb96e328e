/* The arrays that this folder adds to the table of methods. */
#pragma once
#include "bench/fidelity/method.h"

/* Caches of others (GROUP_BASELINE), one file each. */
extern const struct fidelity_methods headinfer_methods, kivi_methods, kvquant_methods, diffkv_methods, ttkv_methods, quest_methods, shadowkv_methods;
/* What a prefill does to the prompt (GROUP_CONTROL, GROUP_DRIFT): prefill_methods.c. */
extern const struct fidelity_methods eviction_methods, drift_methods;
