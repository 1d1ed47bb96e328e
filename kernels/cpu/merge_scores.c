/* Rows of scores from those of parts of a layer's heads: sums over the parts in their order, then the largest of neighbours. A task is a run of columns of one row; it adds up those that its
 * neighbourhoods reach into on both sides, too. */
#include "kernels/cpu/ops.h"
#include "kernels/merge_check.h"

enum { MERGE_TASK = 1024 };

struct merge_args {
    const struct score_merge_params *p;
    int64_t tasks_of_row;
};

/* Columns from .. to - 1 of row `row`, added up. */
static void add_parts(const struct score_merge_params *p, int64_t row, int64_t from, int64_t to, float *sums)
{
    for (int64_t i = from; i < to; i += LANES) {
        const int n = to - i < LANES ? (int)(to - i) : LANES;
        v16 sum = v16_zero();
        for (int part = p->row_first[row]; part < p->row_first[row + 1]; part++)
            sum = v16_add(sum, v16_mul(v16_set1(p->share[part]), v16_load_n(p->parts + part * p->n_columns + i, n)));
        v16_store_n(sums + i - from, sum, n);
    }
}

static void merge_task(void *arg, int64_t task, int thread)
{
    const struct merge_args *a = arg;
    const struct score_merge_params *p = a->p;
    const int64_t row = task / a->tasks_of_row, half = p->pool / 2;
    const int64_t start = p->first + task % a->tasks_of_row * MERGE_TASK, end = start + MERGE_TASK < p->last ? start + MERGE_TASK : p->last;
    const int64_t from = start > half ? start - half : 0, to = end + half < p->n_columns ? end + half : p->n_columns;
    float sums[MERGE_TASK + MERGE_POOL_MAX];
    float *out = p->scores + row * (p->last - p->first) - p->first;
    (void)thread;
    add_parts(p, row, from, to, sums);
    for (int64_t i = start; i < end; i++) {
        float most = sums[i - from];
        for (int64_t j = i > half ? i - half : 0; j <= i + half && j < p->n_columns; j++)
            most = sums[j - from] > most ? sums[j - from] : most;
        out[i] = most;
    }
}

int ISA(merge_scores)(struct stream *s, const struct score_merge_params *p)
{
    int r = merge_check(p);
    if (r < 0)
        return r;
    struct merge_args a = {.p = p, .tasks_of_row = (p->last - p->first + MERGE_TASK - 1) / MERGE_TASK};
    cpu_run(s, p->n_rows * a.tasks_of_row, merge_task, &a);
    return 0;
}
