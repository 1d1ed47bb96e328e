/* A shared library that is found at run time, and the calls that are wanted of it. Startup only, owner thread. */
#pragma once
#include "proto/base/error.h"
#include <stddef.h>

struct library_call {
    const char *name;
    void *slot; /* of a function pointer */
};

/* Opens `name` (by the loader's search path) and fills the slots. -ENOTSUP: it is not there, whose text begins with `needed_for`, or lacks a call; nothing stays open then. */
int runtime_library_open(const char *name, const char *needed_for, const struct library_call *calls, size_t n_calls, void **ret_library, struct error *err);
