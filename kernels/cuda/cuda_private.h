/* What the files of kernels/cuda share: the device behind the opaque handles, and what an op needs of it. C, and C++ for the .cu files. */
#pragma once
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#ifdef __cplusplus
extern "C" { /* the project's headers are C */
#endif
#include "kernels/collective.h"
#include "kernels/cuda/cuda_arena.h"
#include "kernels/kernels.h"

enum {
    CUDA_ARGS_BYTES = 8 << 20,            /* of a stream's ring for small host arrays */
    CUDA_ARGS_MAX_BYTES = CUDA_ARGS_BYTES / 4, /* of one of them: so the last three stay intact whatever wraps */
    CUDA_EXPANDED_BYTES = 16 << 20,       /* of an op's scratch, for expanded weights */
    CUDA_BLAS_WORKSPACE_BYTES = 32 << 20, /* cuBLAS asks for as much on Hopper; given to it, so that it allocates nothing of its own */
    CUDA_TEMP_ALIGN = 256,
    CUDA_MAX_REGISTERED = 16,
    STREAM_SIDES_MAX = 2,
};

struct device {
    struct cuda_arena arena;
    struct cudaDeviceProp properties;
    int ordinal;
    cublasHandle_t blas;
    cudaStream_t blas_stream; /* that the handle has been given, with the workspace; NULL: none */
    void *blas_workspace;
    struct stream *blas_owner;  /* who used it last; NULL: nobody that is still there */
    cudaEvent_t blas_event;
    pthread_mutex_t registered_lock; /* of the next: another thread registers */
    struct { void *base; size_t bytes; } registered[CUDA_MAX_REGISTERED];
    bool no_batches; /* the driver has no cudaMemcpyBatchAsync */
    size_t library_bytes;        /* library_memory.h */
    struct collective *collective; /* the one that is open, or NULL */
    struct cudnn_attention *cudnn; /* or NULL */
    size_t cudnn_version;
};

struct step;

struct stream {
    struct device *device;
    cudaStream_t cuda;
    /* A stream beside another (stream_side_open) has that one here; every other itself. */
    struct stream *main;
    struct stream *sides[STREAM_SIDES_MAX];
    int n_sides;
    struct step *step; /* of the main stream, when steps have been opened (step.h) */
    /* Small arrays of the host for kernels: written to pinned memory, copied to the same place of the device's. Begun anew only after the stream has been waited for. */
    uint8_t *args_host, *args_device;
    size_t args_used;
    /* Scratch that the owner set aside; ops take from it and give all back at their end, and the stream's order keeps their uses apart. */
    uint8_t *scratch;
    size_t scratch_bytes, scratch_used;
    void *overflow;   /* what the scratch had no room for: one piece of the arena */
};

struct device_event {
    struct device *device;
    cudaEvent_t cuda;
};

/* 0 or the negative errno of a CUDA error: -ENOMEM, -ENODEV, -EINVAL, -ENOTSUP, else -EIO (the device or the driver failed; it stays so). */
int cuda_error(cudaError_t error);
int cublas_error(cublasStatus_t status);

/* What a piece of the ring takes. */
static inline size_t stream_args_rounded(size_t bytes)
{
    return (bytes + 15) & ~(size_t)15;
}

/* Copies a small array of the host into the ring; ret_device is its address there, 16-byte aligned, valid for what the op submits that uses at most three. -ENOTSUP beyond
 * CUDA_ARGS_MAX_BYTES. */
int stream_args(struct stream *s, const void *src, size_t bytes, const void **ret_device);
/* Room in the ring on both sides: for what the caller fills in and sends, and for results that come back. */
int stream_args_room(struct stream *s, size_t bytes, void **ret_host, void **ret_device);
int stream_args_send(struct stream *s, void *device, const void *host, size_t bytes);
/* A stream beside `main`, of the highest priority, to which ops submit parts of their work; it has no ring and no scratch. -ENOTSUP: there are STREAM_SIDES_MAX. Closing waits for it; NULL is
 * fine. */
int stream_side_open(struct stream *main, struct stream **ret_side);
void stream_side_close(struct stream *side);
/* Waits for everything submitted. */
int stream_wait_idle(struct stream *s);
/* The same for a CUDA stream that is none of the project's. Every wait of the host goes through these two, for a collective whose peer is gone never ends by itself (nccl_collective.h). */
int device_wait_stream(const struct device *device, cudaStream_t stream);
int device_wait_event(const struct device *device, cudaEvent_t event);

/* Scratch for one op, CUDA_TEMP_ALIGN aligned (the stream's own may lose as much to it): one piece at a time. stream_temp_end when all work on it has been submitted. */
int stream_temp(struct stream *s, size_t bytes, void **ret_memory);
int stream_temp_end(struct stream *s, int result);

/* cuBLAS' workspace is from now on this stream's: it waits for whoever had it, until another stream asks: then what this one has submitted comes first. */
int stream_take_blas(struct stream *s);

/* What is left at this address of the piece that it was registered with; SIZE_MAX where it was not. A copy must not cross from one registered piece into the next. */
size_t device_registered_left(struct device *device, const void *address);
int stream_copy_batch(struct stream *s, const struct device_copy *copies, int n);

/* n rounded up to an eighth of the power of two below it, for grids that grow with a sequence: so that the launches of a step stay the same ones for a while (step.h). Kernels leave at once where
 * there is nothing. */
static inline int64_t launch_round(int64_t n)
{
    int64_t step = 1;
    while (n / step >= 16)
        step *= 2;
    return (n + step - 1) / step * step;
}

static inline int64_t ceil_div64(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

/* The ops, one a .cu or .c file. */
size_t cuda_weight_bytes(enum weight_dtype dtype, int64_t n_rows, int64_t n_cols);
int cuda_weight_pack(struct stream *s, enum weight_dtype dtype, int64_t n_rows, int64_t n_cols, const void *src, void *packed);
int cuda_matmul(struct stream *s, const void *x, int64_t n, int64_t ld_x, const struct matmul_out *outs, int n_outs);
int cuda_embed(struct stream *s, const struct weight *w, const int32_t *ids, int n, float *y);
int cuda_rmsnorm(struct stream *s, const float *x, const float *gamma, float eps, int64_t n, int64_t dim, void *y);
int cuda_silu_mul(struct stream *s, const float *gate, const float *up, int64_t n, int64_t dim, void *out, int64_t ld_out);
int cuda_rope_table(struct stream *s, const double *inv_freq, int n_freq, double factor, const int32_t *positions, int n, float *table);
int cuda_qkv_finish(struct stream *s, const struct qkv_params *p);
int cuda_attn_decode(struct stream *s, struct attn_decode_params *p);
size_t cuda_attn_decode_scratch(const struct op_bounds *b);
size_t cuda_attn_decode_args(int n_items);
int cuda_page_summaries(struct stream *s, const struct page_summary_params *p);
int cuda_window_scores(struct stream *s, const struct window_score_params *p);
size_t cuda_window_scores_scratch(const struct op_bounds *b);
int cuda_keydiff_scores(struct stream *s, const struct keydiff_params *p);
size_t cuda_keydiff_scores_scratch(const struct op_bounds *b);
int cuda_merge_scores(struct stream *s, const struct score_merge_params *p);
int cuda_attn_column_sums(struct stream *s, const struct column_sum_params *p);
size_t cuda_attn_prefill_scratch(const struct stream *s, const struct op_bounds *b);
int cuda_attn_prefill(struct stream *s, const struct attn_prefill_params *p);
int cuda_sample(struct stream *s, struct sample_row *rows, int n, int n_vocab);
size_t cuda_sample_scratch(const struct op_bounds *b);
int cuda_block_encode(struct stream *s, const struct block_params *blocks, int n, bool attended, int32_t *bad);
int cuda_block_decode(struct stream *s, const struct block_params *blocks, int n);
int cuda_gather_rows(struct stream *s, const bf16_t *k, const bf16_t *v, const int32_t *indices, int64_t n, int head_dim, bf16_t *dst_k, bf16_t *dst_v);
int cuda_topk(struct stream *s, const float *scores, int n_rows, int64_t n, int64_t k, int32_t *indices);
size_t cuda_page_cache_bytes(const struct device_page_cache_config *config);
int cuda_page_cache_open(struct stream *s, const struct device_page_cache_config *config, void *memory, struct device_page_cache **ret_cache);
void cuda_page_cache_close(struct device_page_cache *cache);
int cuda_page_cache_resize(struct device_page_cache *cache, void *const *extents, int n_extents);
int cuda_page_cache_stats(struct device_page_cache *cache, struct device_page_cache_stats *ret);
int cuda_page_cache_fetch(struct device_page_cache *cache, const struct fetch_page *pages, int n, const uint8_t **ret_pages);

/* Columns of a packed weight from one row to the next: bf16 rows start on 16 bytes. */
static inline int64_t cuda_weight_ld(int64_t n_cols)
{
    return (n_cols + 7) / 8 * 8;
}

const struct device_ops *cuda_device_ops(void);
const struct kernel_ops *cuda_kernel_ops(void);
#ifdef __cplusplus
}
#endif
