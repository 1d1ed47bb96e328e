#include "bench/fidelity/engine_method.h"

const struct fidelity_methods *const fidelity_method_lists[] = {
    &engine_methods,
    NULL,
};
