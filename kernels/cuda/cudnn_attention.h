/* Attention of a chunk's queries over the whole of a prefix (no mask) by cuDNN's SDPA operation, where the library is there. Plans take 45 to 825 ms to build, so each is built once for the most
 * queries and keys it will see, with the true numbers in device memory, and kept. Owner thread only.
 * Facts about the operation: cuDNN's C graph API; O is divided by l, STATS is m + log l in natural units, and with an empty prefix STATS stays unwritten: never ask for one. */
#pragma once
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

struct cudnn_attention;
struct device;

struct cudnn_attention_shape {
    int n_heads, n_kv_heads, head_dim;
    int64_t max_queries; /* rows of Q, O and STATS */
    int64_t max_keys;    /* rows of one head of K and V: the distance between heads */
    float scale;
};

struct cudnn_attention_run {
    const void *q;        /* bf16 [max_queries, n_heads, d] */
    const void *k, *v;    /* bf16 [n_kv_heads, max_keys, d] */
    void *o;              /* bf16 [max_queries, n_heads, d] */
    float *stats;         /* [n_heads, max_queries] */
    const int32_t *lengths; /* device: queries, then keys, both >= 1 */
    void *workspace;      /* CUDNN_ATTENTION_WORKSPACE bytes */
    cudaStream_t stream;
};

enum { CUDNN_ATTENTION_PLANS = 256, CUDNN_ATTENTION_WORKSPACE = 1 << 20 };

/* Whether the environment has TIDEPOOL_CUDNN=require: for tests, where what cuDNN does not do shall fail instead of being done by the own kernel. */
bool cudnn_attention_required(void);
/* NULL when there is no cuDNN; ret_version is then 0. The device, which outlives it, counts what plans take of its memory. */
struct cudnn_attention *cudnn_attention_open(struct device *device, size_t *ret_version);
void cudnn_attention_close(struct cudnn_attention *attention); /* NULL is fine */
/* Submits. -ENOTSUP: cuDNN has no plan for the shape within the workspace, or did not execute it, which is remembered, or there are as many plans as are kept: somebody else has to do it. If it is the
 * device that failed, that one will hear of it. -EIO in the place of -ENOTSUP where cuDNN is required, with a line on stderr. */
int cudnn_attention_forward(struct cudnn_attention *attention, const struct cudnn_attention_shape *shape, const struct cudnn_attention_run *run);
#ifdef __cplusplus
}
#endif
