/* The few calls of cuDNN's backend (C graph) API that are used, as a table: the library is found at run time, and neither its headers nor the library is needed to build. Values are those of
 * cudnn_graph.h, version 9; where that header is at hand cudnn_api.c holds them to it.
 * In the emulator tests/simt/simt_cudnn.cpp fills the table. */
#pragma once
#include "proto/base/error.h"
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CUDNN_OK = 0 }; /* of cudnnStatus_t; the others are errors */
enum { CUDNN_VERSION_LEAST = 91900 }; /* the one that SDPA was tried with */

enum cudnn_descriptor_kind {
    CUDNN_ENGINE_CONFIG = 3,
    CUDNN_ENGINE_HEURISTICS = 4,
    CUDNN_EXECUTION_PLAN = 5,
    CUDNN_OPERATION_GRAPH = 15,
    CUDNN_VARIANT_PACK = 16,
    CUDNN_TENSOR = 17,
    CUDNN_SDPA_FORWARD = 41,
};

enum cudnn_attribute {
    CUDNN_HEURISTICS_MODE = 200,
    CUDNN_HEURISTICS_GRAPH = 201,
    CUDNN_HEURISTICS_RESULTS = 202,
    CUDNN_PLAN_HANDLE = 400,
    CUDNN_PLAN_ENGINE_CONFIG = 401,
    CUDNN_PLAN_WORKSPACE_SIZE = 402,
    CUDNN_GRAPH_HANDLE = 800,
    CUDNN_GRAPH_OPERATIONS = 801,
    CUDNN_TENSOR_ALIGNMENT = 900,
    CUDNN_TENSOR_DATA_TYPE = 901,
    CUDNN_TENSOR_DIMENSIONS = 902,
    CUDNN_TENSOR_STRIDES = 903,
    CUDNN_TENSOR_ID = 906,
    CUDNN_TENSOR_IS_BY_VALUE = 908,
    CUDNN_PACK_IDS = 1000,
    CUDNN_PACK_POINTERS = 1001,
    CUDNN_PACK_WORKSPACE = 1003,
    CUDNN_SDPA_Q = 2800,
    CUDNN_SDPA_K = 2801,
    CUDNN_SDPA_V = 2802,
    CUDNN_SDPA_O = 2803,
    CUDNN_SDPA_STATS = 2804,
    CUDNN_SDPA_SCALE = 2805,
    CUDNN_SDPA_LENGTH_Q = 2809,
    CUDNN_SDPA_LENGTH_KV = 2810,
};

enum cudnn_value_type {
    CUDNN_VALUE_HANDLE = 0,
    CUDNN_VALUE_DATA_TYPE = 1,
    CUDNN_VALUE_BOOLEAN = 2,
    CUDNN_VALUE_INT64 = 3,
    CUDNN_VALUE_POINTER = 6,
    CUDNN_VALUE_HEURISTICS_MODE = 8,
    CUDNN_VALUE_DESCRIPTOR = 15,
};

enum cudnn_data_type { CUDNN_FLOAT32 = 0, CUDNN_INT32 = 4, CUDNN_BFLOAT16 = 9 };
enum { CUDNN_HEURISTICS_A = 3 };

typedef struct cudnnContext *cudnn_handle;
typedef void *cudnn_descriptor;

struct cudnn_api {
    size_t (*get_version)(void);
    int (*create)(cudnn_handle *ret_handle);
    int (*destroy)(cudnn_handle handle);
    int (*set_stream)(cudnn_handle handle, cudaStream_t stream);
    int (*descriptor_create)(int kind, cudnn_descriptor *ret_descriptor);
    int (*descriptor_destroy)(cudnn_descriptor descriptor);
    int (*descriptor_finalize)(cudnn_descriptor descriptor);
    int (*attribute_set)(cudnn_descriptor descriptor, int attribute, int value_type, int64_t n, const void *values);
    int (*attribute_get)(cudnn_descriptor descriptor, int attribute, int value_type, int64_t n_room, int64_t *ret_n, void *ret_values);
    int (*execute)(cudnn_handle handle, cudnn_descriptor plan, cudnn_descriptor pack);
};

/* Loads libcudnn.so.9 once; it stays. -ENOTSUP with the reason when it is not there, lacks a call, is older than CUDNN_VERSION_LEAST, or the environment has TIDEPOOL_CUDNN=off. */
int cudnn_api_load(const struct cudnn_api **ret_api, struct error *err);
