#include "kernels/cuda/nccl_api.h"
#include "proto/base/base_assert.h"
#include <dlfcn.h>
#include <errno.h>

static int find_calls(void *library, struct nccl_api *api, struct error *err)
{
    const struct {
        const char *name;
        void *slot; /* of a function pointer */
    } calls[] = {
        {"ncclGetVersion", &api->get_version},
        {"ncclGetUniqueId", &api->get_unique_id},
        {"ncclCommInitRankConfig", &api->comm_init_rank_config},
        {"ncclCommGetAsyncError", &api->comm_get_async_error},
        {"ncclCommAbort", &api->comm_abort},
        {"ncclAllReduce", &api->all_reduce},
        {"ncclAllGather", &api->all_gather},
        {"ncclGetErrorString", &api->get_error_string},
    };
    for (size_t i = 0; i < ARRAY_LEN(calls); i++) {
        void *call = dlsym(library, calls[i].name);
        if (!call)
            return error_set(err, -ENOTSUP, "libnccl.so.2 has no %s", calls[i].name);
        *(void **)calls[i].slot = call;
    }
    return 0;
}

int nccl_api_load(const struct nccl_api **ret_api, struct error *err)
{
    static struct nccl_api loaded;
    static bool is_loaded;
    struct nccl_api api;
    int version = 0;
    if (is_loaded) {
        *ret_api = &loaded;
        return 0;
    }
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return error_set(err, -ENOTSUP, "several GPUs need NCCL: %s", dlerror());
    int r = find_calls(library, &api, err);
    if (r == 0 && (api.get_version(&version) != NCCL_SUCCESS || version < NCCL_VERSION_LEAST))
        r = error_set(err, -ENOTSUP, "libnccl.so.2 has version %d; at least %d is needed", version, NCCL_VERSION_LEAST);
    if (r < 0) {
        dlclose(library);
        return r;
    }
    loaded = api;
    is_loaded = true;
    *ret_api = &loaded;
    return 0;
}
