/* Rows of scores from those of parts of a layer's heads: sums over the parts in their order, then the largest of neighbours; an element a thread, which adds up what its neighbourhood needs
 * itself (from cache, and only heads that several ranks have are pooled here). Reads 4 bytes a part and element. The bits of kernels/cpu/merge_scores.c. */
#include "kernels/cuda/elementwise.cuh"
#include "kernels/merge_check.h"

struct merge_args {
    const float *parts;
    float *scores;
    int64_t n_columns, first, n_scored;
    int n_rows, pool;
    int32_t row_first[SCORE_PARTS_MAX + 1];
    float share[SCORE_PARTS_MAX];
};
static_assert(sizeof(struct merge_args) <= 4096, "arguments of a kernel");

DEVICE float merged(const struct merge_args &a, int row, int64_t column)
{
    float sum = 0;
    for (int part = a.row_first[row]; part < a.row_first[row + 1]; part++)
        sum += a.share[part] * a.parts[part * a.n_columns + column];
    return sum;
}

__global__ void merge_scores_kernel(const struct merge_args a)
{
    EACH_ELEMENT(i, a.n_rows * a.n_scored)
    {
        const int row = (int)(i / a.n_scored);
        const int64_t column = a.first + i % a.n_scored, half = a.pool / 2;
        const int64_t from = column > half ? column - half : 0, to = column + half < a.n_columns ? column + half : a.n_columns - 1;
        float most = merged(a, row, column);
        for (int64_t j = from; j <= to; j++) {
            const float x = j == column ? most : merged(a, row, j);
            most = x > most ? x : most;
        }
        a.scores[i] = most;
    }
}

extern "C" int cuda_merge_scores(struct stream *s, const struct score_merge_params *p)
{
    int r = merge_check(p);
    if (r < 0)
        return r;
    struct merge_args a = {};
    a.parts = p->parts;
    a.scores = p->scores;
    a.n_columns = p->n_columns;
    a.first = p->first;
    a.n_scored = p->last - p->first;
    a.n_rows = p->n_rows;
    a.pool = p->pool;
    for (int i = 0; i <= p->n_rows; i++)
        a.row_first[i] = p->row_first[i];
    for (int i = 0; i < p->row_first[p->n_rows]; i++)
        a.share[i] = p->share[i];
    return LAUNCH(merge_scores_kernel, blocks_for(a.n_rows * a.n_scored), BLOCK_THREADS, 0, s, a);
}
