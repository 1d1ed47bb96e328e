#include "kernels/cuda/nccl_api.h"
#include "kernels/cuda/runtime_library.h"
#include "proto/base/base_assert.h"
#include <dlfcn.h>
#include <errno.h>

int nccl_api_load(const struct nccl_api **ret_api, struct error *err)
{
    static struct nccl_api loaded;
    static bool is_loaded;
    struct nccl_api api;
    const struct library_call calls[] = {
        {"ncclGetVersion", &api.get_version},
        {"ncclGetUniqueId", &api.get_unique_id},
        {"ncclCommInitRankConfig", &api.comm_init_rank_config},
        {"ncclCommGetAsyncError", &api.comm_get_async_error},
        {"ncclCommAbort", &api.comm_abort},
        {"ncclAllReduce", &api.all_reduce},
        {"ncclAllGather", &api.all_gather},
        {"ncclGetErrorString", &api.get_error_string},
    };
    void *library;
    int version = 0;
    if (is_loaded) {
        *ret_api = &loaded;
        return 0;
    }
    int r = runtime_library_open("libnccl.so.2", "several GPUs need NCCL: ", calls, ARRAY_LEN(calls), &library, err);
    if (r < 0)
        return r;
    if (api.get_version(&version) != NCCL_SUCCESS || version < NCCL_VERSION_LEAST) {
        dlclose(library);
        return error_set(err, -ENOTSUP, "libnccl.so.2 has version %d; at least %d is needed", version, NCCL_VERSION_LEAST);
    }
    loaded = api;
    is_loaded = true;
    *ret_api = &loaded;
    return 0;
}
