/* The few calls of NCCL that are used, as a table: the library is found at run time, and neither its header nor the library is needed to build. Names and layouts are those of nccl.h, 2.18 and later.
 * In the emulator tests/simt/simt_nccl.cpp fills the table. */
#pragma once
#include "proto/base/error.h"
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>

enum { NCCL_SUCCESS = 0, NCCL_REMOTE_ERROR = 6, NCCL_IN_PROGRESS = 7 }; /* of ncclResult_t; the others are errors */
enum { NCCL_FLOAT32 = 7, NCCL_SUM = 0 };
enum { NCCL_ID_BYTES = 128, NCCL_VERSION_LEAST = 21800 };

typedef struct ncclComm *nccl_comm;

struct nccl_id {
    char bytes[NCCL_ID_BYTES];
};

/* ncclConfig_t of version 2.18; later libraries take it by its size. */
struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
};
#define NCCL_CONFIG_MAGIC 0xcafebeefu

struct nccl_api {
    int (*get_version)(int *ret_version);
    int (*get_unique_id)(struct nccl_id *ret_id);
    int (*comm_init_rank_config)(nccl_comm *ret_comm, int n_ranks, struct nccl_id id, int rank, struct nccl_config *config);
    int (*comm_get_async_error)(nccl_comm comm, int *ret_state);
    int (*comm_abort)(nccl_comm comm); /* ends kernels that wait for other ranks, and frees */
    int (*all_reduce)(const void *send, void *recv, size_t n, int type, int op, nccl_comm comm, cudaStream_t stream);
    int (*all_gather)(const void *send, void *recv, size_t n_send, int type, nccl_comm comm, cudaStream_t stream);
    const char *(*get_error_string)(int result);
};

/* Loads libnccl.so.2 once; it stays. -ENOTSUP with the reason when it is not there, lacks a call or is older than NCCL_VERSION_LEAST. */
int nccl_api_load(const struct nccl_api **ret_api, struct error *err);
