/* Steps (device_ops.step_begin): whatever is replayed, captured or submitted op by op, in whatever sequence, the results have the bits of ops without steps. Nothing waits between the steps of a
 * run but step_begin itself; each adds to the same rows, so that none runs twice or not at all. */
#include "tests/simt/ops_test.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N_FREQ = 16, DIM = 2 * N_FREQ, N_MAX = 12, RUN_MAX = 40 };

struct steps_test {
    struct ops_test *t;
    const struct device_ops *dev;
    double inv_freq[N_FREQ];
    struct weight w;                       /* [DIM, DIM] */
    float *gamma, *table, *sum, *normed;   /* device, [DIM] and [N_MAX, DIM] */
    float *results;                        /* device, [RUN_MAX, N_MAX, DIM] */
};

/* One step: what it is given, and how it goes wrong. */
struct one_step {
    int n;            /* rows */
    int position;
    bool waits;       /* between two ops */
    bool changes;     /* the number of rows, in the second pass */
    int fails_with;   /* at its end */
    int n_passes;     /* out */
};

static int ops(struct steps_test *x, struct one_step *step)
{
    const struct kernel_ops *ops = x->t->gpu_ops;
    struct stream *s = x->t->gpu;
    int32_t positions[N_MAX];
    const int n = step->n - (step->changes && step->n_passes++ == 1);
    for (int i = 0; i < n; i++)
        positions[i] = step->position + 7 * i;
    const struct matmul_out out = {.w = &x->w, .y = x->sum, .ld_y = DIM, .residual = x->sum};
    int r = ops->rope_table(s, x->inv_freq, N_FREQ, 1, positions, n, x->table);
    memset(positions, 0xFF, sizeof positions);
    if (r == 0 && step->waits)
        r = x->dev->stream_sync(s);
    if (r == 0)
        r = ops->matmul(s, x->table, n, DIM, &out, 1);
    if (r == 0)
        r = ops->rmsnorm(s, x->sum, x->gamma, 1e-5f, n, DIM, x->normed);
    return r < 0 ? r : step->fails_with;
}

static int run_step(struct steps_test *x, struct one_step *step)
{
    int r = x->dev->step_begin(x->t->gpu);
    if (r < 0)
        return r;
    do
        r = x->dev->step_end(x->t->gpu, ops(x, step));
    while (r == 1);
    return r;
}

/* n steps from zeros on; what each of them left. `bytes` of room for arguments; 0: no steps. */
static float *run(struct steps_test *x, const struct one_step *steps, int n, size_t bytes, struct step_stats *ret_stats)
{
    const size_t row_bytes = sizeof(float) * N_MAX * DIM;
    float zeros[N_MAX * DIM] = {0};
    struct ops_test *t = x->t;
    x->sum = ops_test_upload(t, zeros, sizeof zeros);
    x->normed = ops_test_upload(t, zeros, sizeof zeros);
    x->results = ops_test_room(t, row_bytes * (size_t)n);
    if (bytes)
        ops_test_true(t, "steps_open", x->dev->steps_open(t->gpu, ops_test_room(t, bytes), bytes) == 0);
    for (int i = 0; i < n; i++) {
        struct one_step step = steps[i];
        ops_test_true(t, "a step", run_step(x, &step) == step.fails_with);
        x->dev->copy(t->gpu, x->results + (size_t)i * N_MAX * DIM, x->normed, row_bytes);
    }
    x->dev->step_stats(t->gpu, ret_stats);
    x->dev->steps_close(t->gpu);
    return ops_test_download(t, x->results, row_bytes * (size_t)n);
}

/* With steps and without. */
static void compare(struct steps_test *x, const char *what, const struct one_step *steps, int n, size_t bytes, struct step_stats *ret_stats)
{
    struct step_stats none;
    float *expected = run(x, steps, n, 0, &none), *actual = run(x, steps, n, bytes, ret_stats);
    ops_test_same(x->t, what, expected, actual, sizeof(float) * (size_t)n * N_MAX * DIM);
    ops_test_true(x->t, "without steps nothing is counted", none.eager == 0 && none.captures == 0 && none.replays == 0);
    free(expected);
    free(actual);
}

static bool counted(const struct step_stats *s, uint64_t eager, uint64_t captures, uint64_t replays)
{
    return s->eager == eager && s->captures == captures && s->replays == replays;
}

/* The same shape again and again, with other arguments. */
static void replayed(struct steps_test *x)
{
    struct one_step steps[8] = {{0}};
    struct step_stats stats;
    for (int i = 0; i < 8; i++)
        steps[i] = (struct one_step){.n = 5, .position = 31 * i};
    compare(x, "the same step again", steps, 8, 4096, &stats);
    ops_test_true(x->t, "one goes op by op, one is captured, the others are replayed", counted(&stats, 1, 1, 6));
    compare(x, "no room for the arguments", steps, 8, 64, &stats);
    ops_test_true(x->t, "without room all go op by op", counted(&stats, 8, 0, 0));
}

/* More shapes than graphs are kept, each in turn: none comes back while it is remembered. Then each several times: graphs are given up while they run. */
static void many_shapes(struct steps_test *x)
{
    struct one_step steps[RUN_MAX] = {{0}};
    struct step_stats stats;
    for (int i = 0; i < 20; i++)
        steps[i] = (struct one_step){.n = 1 + i % 10, .position = i};
    compare(x, "ten shapes in turn", steps, 20, 4096, &stats);
    ops_test_true(x->t, "ten shapes in turn go op by op", counted(&stats, 20, 0, 0));
    for (int i = 0; i < 40; i++)
        steps[i] = (struct one_step){.n = 1 + i / 4, .position = i};
    compare(x, "ten shapes, four times each", steps, 40, 4096, &stats);
    ops_test_true(x->t, "ten shapes are captured", counted(&stats, 10, 10, 20));
    for (int i = 0; i < 12; i++)
        steps[i] = (struct one_step){.n = 3 + i % 2, .position = i};
    compare(x, "two shapes in turn", steps, 12, 4096, &stats);
    ops_test_true(x->t, "two graphs are kept", counted(&stats, 2, 2, 8));
}

/* What cannot be a graph, or turns out to be another one, or fails. */
static void odd_steps(struct steps_test *x)
{
    struct one_step steps[6] = {{0}};
    struct step_stats stats;
    for (int i = 0; i < 6; i++)
        steps[i] = (struct one_step){.n = 4, .position = i, .waits = i == 2};
    compare(x, "a step that waits", steps, 6, 4096, &stats);
    ops_test_true(x->t, "a step that waits goes op by op", counted(&stats, 2, 1, 3));
    for (int i = 0; i < 6; i++)
        steps[i] = (struct one_step){.n = 4, .position = i};
    steps[3].fails_with = -ERANGE;
    float *actual = run(x, steps, 6, 4096, &stats);
    ops_test_same(x->t, "a step that failed has submitted nothing", actual + 2 * N_MAX * DIM, actual + 3 * N_MAX * DIM, sizeof(float) * N_MAX * DIM);
    ops_test_true(x->t, "a step that failed is none", counted(&stats, 1, 1, 3));
    free(actual);
}

/* The ops are other ones when they are captured: that is found, and what the last pass did counts. */
static void changed_step(struct steps_test *x)
{
    struct one_step steps[4] = {{.n = 6}, {.n = 6, .position = 5, .changes = true}, {.n = 6, .position = 9}, {.n = 6, .position = 11}};
    struct step_stats stats;
    float *actual = run(x, steps, 4, 4096, &stats);
    ops_test_true(x->t, "what changes is not captured, then or later", counted(&stats, 4, 0, 0));
    steps[1].changes = false;
    float *expected = run(x, steps, 4, 0, &stats);
    ops_test_same(x->t, "a capture that was thrown away", expected, actual, sizeof(float) * 4 * N_MAX * DIM);
    free(expected);
    free(actual);
}

void test_ops_steps(struct ops_test *t)
{
    struct steps_test x = {.t = t, .dev = t->gpu_backend->device};
    float *gamma = ops_test_floats(t, DIM, 1);
    uint16_t *w = ops_test_bf16(t, DIM * DIM, 1);
    for (int i = 0; i < N_FREQ; i++)
        x.inv_freq[i] = pow(100, -(double)i / N_FREQ);
    void *packed = ops_test_room(t, t->gpu_ops->weight_bytes(WEIGHT_BF16, DIM, DIM));
    ops_test_true(t, "weight_pack", t->gpu_ops->weight_pack(t->gpu, WEIGHT_BF16, DIM, DIM, w, packed) == 0);
    x.w = (struct weight){.dtype = WEIGHT_BF16, .n_rows = DIM, .n_cols = DIM, .packed = packed};
    x.gamma = ops_test_upload(t, gamma, sizeof *gamma * DIM);
    x.table = ops_test_room(t, sizeof(float) * N_MAX * DIM);
    replayed(&x);
    many_shapes(&x);
    odd_steps(&x);
    changed_step(&x);
    ops_test_true(t, "no memory for arguments is refused", x.dev->steps_open(t->gpu, NULL, 0) == -EINVAL);
    free(gamma);
    free(w);
}
