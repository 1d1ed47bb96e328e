#include "tests/bench/timed_ops.h"
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include <stdlib.h>

/* name, parameters with types, arguments */
#define TIMED(X)                                                                                                                                    \
    X(matmul, (struct stream * s, const void *x, int64_t n, int64_t ld_x, const struct matmul_out *outs, int n_outs), (s, x, n, ld_x, outs, n_outs)) \
    X(embed, (struct stream * s, const struct weight *w, const int32_t *ids, int n, float *y), (s, w, ids, n, y))                                     \
    X(rmsnorm, (struct stream * s, const float *x, const float *gamma, float eps, int64_t n, int64_t dim, void *y), (s, x, gamma, eps, n, dim, y))   \
    X(silu_mul, (struct stream * s, const float *gate, const float *up, int64_t n, int64_t dim, void *out, int64_t ld_out), (s, gate, up, n, dim, out, ld_out))              \
    X(rope_table, (struct stream * s, const double *inv_freq, int n_freq, double factor, const int32_t *positions, int n, float *table),             \
      (s, inv_freq, n_freq, factor, positions, n, table))                                                                                            \
    X(qkv_finish, (struct stream * s, const struct qkv_params *p), (s, p))                                                                           \
    X(attn_prefill, (struct stream * s, const struct attn_prefill_params *p), (s, p))                                                                \
    X(attn_decode, (struct stream * s, struct attn_decode_params *p), (s, p))                                                                        \
    X(window_scores, (struct stream * s, const struct window_score_params *p), (s, p))                                                               \
    X(keydiff_scores, (struct stream * s, const struct keydiff_params *p), (s, p))                                                                   \
    X(merge_scores, (struct stream * s, const struct score_merge_params *p), (s, p))                                                                 \
    X(attn_column_sums, (struct stream * s, const struct column_sum_params *p), (s, p))                                                              \
    X(topk, (struct stream * s, const float *scores, int n_rows, int64_t n, int64_t k, int32_t *indices), (s, scores, n_rows, n, k, indices))         \
    X(gather_rows, (struct stream * s, const bf16_t *k, const bf16_t *v, const int32_t *indices, int64_t n, int head_dim, bf16_t *dst_k, bf16_t *dst_v), \
      (s, k, v, indices, n, head_dim, dst_k, dst_v))                                                                                                 \
    X(block_encode, (struct stream * s, const struct block_params *blocks, int n, bool attended, int32_t *bad), (s, blocks, n, attended, bad))       \
    X(block_decode, (struct stream * s, const struct block_params *blocks, int n), (s, blocks, n))                                                   \
    X(sample, (struct stream * s, struct sample_row *rows, int n, int n_vocab), (s, rows, n, n_vocab))

#define OP_ENUM(name, params, args) OP_##name,
enum { TIMED(OP_ENUM) OP_COUNT };
#define OP_NAME(name, params, args) #name,
static const char *const op_names[] = {TIMED(OP_NAME)};

static struct op_time {
    uint64_t ns, calls;
    int op;
} times[OP_COUNT];
static const struct kernel_ops *inner;
static struct kernel_ops outer;

#define OP_FUNCTION(name, params, args)                                                                                                              \
    static int timed_##name params                                                                                                                   \
    {                                                                                                                                                \
        const uint64_t start = clock_now_ns();                                                                                                       \
        const int r = inner->name args;                                                                                                              \
        times[OP_##name].ns += clock_now_ns() - start;                                                                                               \
        times[OP_##name].calls++;                                                                                                                    \
        return r;                                                                                                                                    \
    }
TIMED(OP_FUNCTION)

const struct kernel_ops *timed_ops(const struct kernel_ops *ops)
{
    inner = ops;
    outer = *ops;
#define OP_SET(name, params, args) outer.name = timed_##name;
    TIMED(OP_SET)
    return &outer;
}

void timed_ops_reset(void)
{
    for (int i = 0; i < OP_COUNT; i++)
        times[i] = (struct op_time){.op = i};
}

static int longer(const void *a, const void *b)
{
    const struct op_time *x = a, *y = b;
    return (x->ns < y->ns) - (x->ns > y->ns);
}

void timed_ops_print(FILE *out, double wall_us)
{
    struct op_time sorted[OP_COUNT];
    double rest = wall_us;
    for (int i = 0; i < OP_COUNT; i++)
        sorted[i] = times[i];
    qsort(sorted, OP_COUNT, sizeof(sorted[0]), longer);
    for (int i = 0; i < OP_COUNT && sorted[i].calls; i++) {
        const double us = (double)sorted[i].ns / 1000;
        rest -= us;
        fprintf(out, "  %-16s %10.0f us %5.1f %% %9llu calls\n", op_names[sorted[i].op], us, 100 * us / wall_us, (unsigned long long)sorted[i].calls);
    }
    fprintf(out, "  %-16s %10.0f us %5.1f %%\n", "outside ops", rest, 100 * rest / wall_us);
}
