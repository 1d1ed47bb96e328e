#include "kernels/cuda/runtime_library.h"
#include <dlfcn.h>
#include <errno.h>

int runtime_library_open(const char *name, const char *needed_for, const struct library_call *calls, size_t n_calls, void **ret_library, struct error *err)
{
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return error_set(err, -ENOTSUP, "%s%s", needed_for, dlerror());
    for (size_t i = 0; i < n_calls; i++) {
        void *call = dlsym(library, calls[i].name);
        if (!call) {
            dlclose(library);
            return error_set(err, -ENOTSUP, "%s has no %s", name, calls[i].name);
        }
        *(void **)calls[i].slot = call;
    }
    *ret_library = library;
    return 0;
}
