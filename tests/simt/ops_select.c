/* Selection: the k largest, gathered rows. */
#include "tests/simt/ops_test.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>

/* `distinct`: how many different values there are, so that ties are met; 0: all differ. */
static void topk(struct ops_test *t, int n_rows, int n, int k, int distinct)
{
    const size_t count = (size_t)n_rows * (size_t)n, bytes = sizeof(int32_t) * (size_t)n_rows * (size_t)k;
    float *scores = ops_test_floats(t, count, 1);
    for (size_t i = 0; i < count; i++) {
        if (distinct > 0)
            scores[i] = floorf(scores[i] * (float)distinct / 4);
        if (i % 13 == 5)
            scores[i] = i % 2 ? NAN : -0.0f;
        if (i % 29 == 3)
            scores[i] = i % 2 ? INFINITY : -INFINITY;
    }
    int32_t *expected = ops_test_alloc(bytes), *indices = ops_test_room(t, bytes);
    float *dscores = ops_test_upload(t, scores, count * sizeof *scores);
    t->cpu_ops->topk(t->cpu, scores, n_rows, n, k, expected);
    ops_test_true(t, "topk", t->gpu_ops->topk(t->gpu, dscores, n_rows, n, k, indices) == 0);
    int32_t *actual = ops_test_download(t, indices, bytes);
    ops_test_same(t, ops_test_shape("topk [%d, %d] k %d, %d values", n_rows, n, k, distinct), expected, actual, bytes);
    free(scores), free(expected), free(actual);
}

static void gather_rows(struct ops_test *t, int n, int d, int offset)
{
    enum { ROWS = 50 };
    const size_t bytes = sizeof(uint16_t) * (size_t)(n * d);
    uint16_t *k = ops_test_bf16(t, (size_t)(ROWS * d + offset), 1), *v = ops_test_bf16(t, (size_t)(ROWS * d + offset), 1);
    int32_t *indices = ops_test_alloc(sizeof *indices * (size_t)n);
    for (int i = 0; i < n; i++)
        indices[i] = (int32_t)ops_test_uniform(t, 0, ROWS);
    uint16_t *ek = ops_test_alloc(bytes), *ev = ops_test_alloc(bytes), *dk = ops_test_room(t, bytes), *dv = ops_test_room(t, bytes);
    uint16_t *gk = ops_test_upload(t, k, sizeof *k * (size_t)(ROWS * d + offset)), *gv = ops_test_upload(t, v, sizeof *v * (size_t)(ROWS * d + offset));
    int32_t *gi = ops_test_upload(t, indices, sizeof *indices * (size_t)n);
    t->cpu_ops->gather_rows(t->cpu, k + offset, v + offset, indices, n, d, ek, ev);
    ops_test_true(t, "gather_rows", t->gpu_ops->gather_rows(t->gpu, gk + offset, gv + offset, gi, n, d, dk, dv) == 0);
    uint16_t *ak = ops_test_download(t, dk, bytes), *av = ops_test_download(t, dv, bytes);
    const char *shape = ops_test_shape("gather_rows [%d, %d] from element %d", n, d, offset);
    ops_test_same(t, shape, ek, ak, bytes);
    ops_test_same(t, shape, ev, av, bytes);
    free(k), free(v), free(indices), free(ek), free(ev), free(ak), free(av);
}

void test_ops_select(struct ops_test *t)
{
    topk(t, 1, 1, 1, 0);
    topk(t, 2, 31, 31, 0);
    topk(t, 3, 100, 17, 5);
    topk(t, 2, 2500, 700, 40);
    topk(t, 1, 1024, 1, 3);
    ops_test_true(t, "more than there are", t->gpu_ops->topk(t->gpu, NULL, 1, 5, 6, NULL) == -EINVAL);
    gather_rows(t, 9, 64, 0);
    gather_rows(t, 300, 96, 0);
    gather_rows(t, 5, 48, 3); /* not on 16 bytes */
    gather_rows(t, 5, 7, 0);
}
