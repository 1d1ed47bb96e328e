#include "bench/fidelity/engine_method.h"
#include "bench/fidelity/lab/baseline_methods.h"

const struct fidelity_methods *const fidelity_method_lists[] = {
    &engine_methods,
    &headinfer_methods,
    &kivi_methods,
    &kvquant_methods,
    &diffkv_methods,
    &ttkv_methods,
    &quest_methods,
    &shadowkv_methods,
    &eviction_methods,
    &drift_methods,
    NULL,
};
