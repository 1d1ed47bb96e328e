#include "kernels/cuda/cudnn_api.h"
#include "kernels/cuda/runtime_library.h"
#include "proto/base/base_assert.h"
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#if __has_include(<cudnn_graph.h>) && !defined(CUDART_EMULATED) /* not beside the emulator's headers */
#include <cudnn_graph.h>
#define SAME(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #ours)
SAME(CUDNN_OK, CUDNN_STATUS_SUCCESS);
SAME(CUDNN_ENGINE_CONFIG, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
SAME(CUDNN_ENGINE_HEURISTICS, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
SAME(CUDNN_EXECUTION_PLAN, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
SAME(CUDNN_OPERATION_GRAPH, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
SAME(CUDNN_VARIANT_PACK, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
SAME(CUDNN_TENSOR, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
SAME(CUDNN_HEURISTICS_MODE, CUDNN_ATTR_ENGINEHEUR_MODE);
SAME(CUDNN_HEURISTICS_GRAPH, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
SAME(CUDNN_HEURISTICS_RESULTS, CUDNN_ATTR_ENGINEHEUR_RESULTS);
SAME(CUDNN_PLAN_ENGINE_CONFIG, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
SAME(CUDNN_PLAN_WORKSPACE_SIZE, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
SAME(CUDNN_GRAPH_OPERATIONS, CUDNN_ATTR_OPERATIONGRAPH_OPS);
SAME(CUDNN_TENSOR_ALIGNMENT, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
SAME(CUDNN_TENSOR_DATA_TYPE, CUDNN_ATTR_TENSOR_DATA_TYPE);
SAME(CUDNN_TENSOR_DIMENSIONS, CUDNN_ATTR_TENSOR_DIMENSIONS);
SAME(CUDNN_TENSOR_STRIDES, CUDNN_ATTR_TENSOR_STRIDES);
SAME(CUDNN_TENSOR_ID, CUDNN_ATTR_TENSOR_UNIQUE_ID);
SAME(CUDNN_TENSOR_IS_BY_VALUE, CUDNN_ATTR_TENSOR_IS_BY_VALUE);
SAME(CUDNN_PACK_IDS, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
SAME(CUDNN_PACK_POINTERS, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
SAME(CUDNN_PACK_WORKSPACE, CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
SAME(CUDNN_VALUE_HANDLE, CUDNN_TYPE_HANDLE);
SAME(CUDNN_VALUE_DATA_TYPE, CUDNN_TYPE_DATA_TYPE);
SAME(CUDNN_VALUE_BOOLEAN, CUDNN_TYPE_BOOLEAN);
SAME(CUDNN_VALUE_INT64, CUDNN_TYPE_INT64);
SAME(CUDNN_VALUE_POINTER, CUDNN_TYPE_VOID_PTR);
SAME(CUDNN_VALUE_HEURISTICS_MODE, CUDNN_TYPE_HEUR_MODE);
SAME(CUDNN_VALUE_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR);
SAME(CUDNN_FLOAT32, CUDNN_DATA_FLOAT);
SAME(CUDNN_INT32, CUDNN_DATA_INT32);
SAME(CUDNN_BFLOAT16, CUDNN_DATA_BFLOAT16);
SAME(CUDNN_HEURISTICS_A, CUDNN_HEUR_MODE_A);
#if CUDNN_VERSION >= 91900
SAME(CUDNN_SDPA_FORWARD, CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR);
SAME(CUDNN_SDPA_Q, CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC);
SAME(CUDNN_SDPA_K, CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC);
SAME(CUDNN_SDPA_V, CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC);
SAME(CUDNN_SDPA_O, CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC);
SAME(CUDNN_SDPA_STATS, CUDNN_ATTR_OPERATION_SDPA_FWD_STATSDESC);
SAME(CUDNN_SDPA_SCALE, CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC);
SAME(CUDNN_SDPA_LENGTH_Q, CUDNN_ATTR_OPERATION_SDPA_FWD_SEQ_LEN_QDESC);
SAME(CUDNN_SDPA_LENGTH_KV, CUDNN_ATTR_OPERATION_SDPA_FWD_SEQ_LEN_KVDESC);
#endif
#endif

int cudnn_api_load(const struct cudnn_api **ret_api, struct error *err)
{
    static struct cudnn_api loaded;
    static bool is_loaded;
    const char *wanted = getenv("TIDEPOOL_CUDNN");
    struct cudnn_api api;
    const struct library_call calls[] = {
        {"cudnnGetVersion", &api.get_version},
        {"cudnnCreate", &api.create},
        {"cudnnDestroy", &api.destroy},
        {"cudnnSetStream", &api.set_stream},
        {"cudnnBackendCreateDescriptor", &api.descriptor_create},
        {"cudnnBackendDestroyDescriptor", &api.descriptor_destroy},
        {"cudnnBackendFinalize", &api.descriptor_finalize},
        {"cudnnBackendSetAttribute", &api.attribute_set},
        {"cudnnBackendGetAttribute", &api.attribute_get},
        {"cudnnBackendExecute", &api.execute},
    };
    void *library;
    if (wanted && strcmp(wanted, "off") == 0)
        return error_set(err, -ENOTSUP, "TIDEPOOL_CUDNN is off");
    if (is_loaded) {
        *ret_api = &loaded;
        return 0;
    }
    int r = runtime_library_open("libcudnn.so.9", "", calls, ARRAY_LEN(calls), &library, err);
    if (r < 0)
        return r;
    const size_t version = api.get_version();
    if (version < CUDNN_VERSION_LEAST) {
        dlclose(library);
        return error_set(err, -ENOTSUP, "libcudnn.so.9 has version %zu; at least %d is needed", version, CUDNN_VERSION_LEAST);
    }
    loaded = api;
    is_loaded = true;
    *ret_api = &loaded;
    return 0;
}
