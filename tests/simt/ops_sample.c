/* Sampling: the same tokens as the CPU from the same Philox numbers. */
#include "kernels/sample_one.h"
#include "tests/simt/ops_test.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>

enum { N_VOCAB = 3001 };

static const struct logit_bias bias[] = {{5, 4.5f}, {2990, -3}, {5, .25f}};
static const struct token_count counts[] = {{7, 2, 0}, {8, 0, 3}, {100, 1, 1}};
static const int32_t banned[] = {0, 5, 2999};

static void compare(struct ops_test *t, const char *what, const float *logits, const float *device_logits, const struct sample_params *p)
{
    struct sample_result expected = {0}, actual = {0};
    int cpu = sample_one(t->cpu_ops, t->cpu, logits, N_VOCAB, p, &expected), gpu = sample_one(t->gpu_ops, t->gpu, device_logits, N_VOCAB, p, &actual);
    what = ops_test_shape("sample %s, position %d", what, (int)p->position);
    ops_test_true(t, what, cpu == gpu);
    if (cpu < 0 || gpu < 0)
        return;
    ops_test_true(t, what, expected.token == actual.token && expected.n_top == actual.n_top && fabsf(expected.logprob - actual.logprob) < 1e-5f);
    for (int i = 0; i < expected.n_top; i++)
        ops_test_true(t, what, expected.top[i].token == actual.top[i].token && fabsf(expected.top[i].logprob - actual.top[i].logprob) < 1e-5f);
}

/* Row i of a call: every option comes and goes. */
static struct sample_params mixed(int i)
{
    static const int32_t given = 77;
    return (struct sample_params){.temperature = i % 3 == 2 ? 0 : 1, .top_p = i % 4 == 1 ? .7f : 1, .min_p = i % 5 == 3 ? .01f : 0, .top_k = i % 4 == 3 ? 40 : 0, .seed = 5, .position = (uint64_t)i,
                                  .repetition_penalty = i % 2 ? 1.3f : 1, .presence_penalty = i % 6 == 2 ? 1 : 0, .bias = bias, .n_bias = i % 3, .counts = counts, .n_counts = 3,
                                  .banned = banned, .n_banned = i % 5 == 1 ? 3 : 0, .n_top = i % 3, .given = i == 8 ? &given : NULL};
}

/* Rows of one call are as alone; those that are refused, or have nothing to draw from, fail alone. */
static void batch(struct ops_test *t, const float *logits)
{
    enum { ROWS = 11, REFUSED = 3, EMPTY = 6 };
    const size_t bytes = sizeof *logits * N_VOCAB;
    struct sample_row rows[ROWS];
    float *none = ops_test_alloc(bytes);
    for (int i = 0; i < N_VOCAB; i++)
        none[i] = -INFINITY;
    const float *device_logits[] = {ops_test_upload(t, logits, bytes), ops_test_upload(t, logits + N_VOCAB, bytes), ops_test_upload(t, none, bytes)};
    for (int i = 0; i < ROWS; i++)
        rows[i] = (struct sample_row){.logits = device_logits[i == EMPTY ? 2 : i % 2], .params = mixed(i), .status = 1};
    rows[REFUSED].params.top_p = -1;
    ops_test_true(t, "sample of many", t->gpu_ops->sample(t->gpu, rows, ROWS, N_VOCAB) == 0);
    for (int i = 0; i < ROWS; i++) {
        struct sample_result alone = {0}, expected = {0};
        const char *what = ops_test_shape("sample of %d rows, row %d", (int)ROWS, i);
        ops_test_true(t, what, rows[i].status == (i == REFUSED || i == EMPTY ? -EINVAL : 0));
        if (rows[i].status < 0)
            continue;
        ops_test_true(t, what, sample_one(t->gpu_ops, t->gpu, rows[i].logits, N_VOCAB, &rows[i].params, &alone) == 0);
        ops_test_true(t, what, sample_one(t->cpu_ops, t->cpu, logits + i % 2 * N_VOCAB, N_VOCAB, &rows[i].params, &expected) == 0);
        ops_test_true(t, what, rows[i].result.token == alone.token && rows[i].result.token == expected.token && rows[i].result.n_top == alone.n_top);
        ops_test_same(t, what, &alone.logprob, &rows[i].result.logprob, sizeof alone.logprob);
        ops_test_same(t, what, alone.top, rows[i].result.top, sizeof *alone.top * (size_t)alone.n_top);
    }
    free(none);
}

/* Lists that do not fit into one piece of arguments: several launches; one that never fits fails alone. */
static void long_lists(struct ops_test *t, const float *logits)
{
    enum { ROWS = 5, LONG = 100000, TOO_LONG = 300000 };
    struct logit_bias *list = ops_test_alloc(sizeof *list * TOO_LONG);
    const float *device_logits = ops_test_upload(t, logits, sizeof *logits * N_VOCAB);
    struct sample_row rows[ROWS];
    for (int i = 0; i < TOO_LONG; i++)
        list[i] = (struct logit_bias){i % N_VOCAB, i == LONG - 1 ? 60 : 0};
    for (int i = 0; i < ROWS; i++) {
        rows[i] = (struct sample_row){.logits = device_logits, .params = {.top_p = 1, .repetition_penalty = 1, .bias = list, .n_bias = i == 1 ? TOO_LONG : i == 3 ? 1 : LONG}};
    }
    ops_test_true(t, "sample with long lists", t->gpu_ops->sample(t->gpu, rows, ROWS, N_VOCAB) == 0);
    for (int i = 0; i < ROWS; i++) {
        const int32_t expected = i == 3 ? 500 : (LONG - 1) % N_VOCAB;
        ops_test_true(t, "a row with a long list", i == 1 ? rows[i].status == -ENOTSUP : rows[i].status == 0 && rows[i].result.token == expected);
    }
    free(list);
}

void test_ops_sample(struct ops_test *t)
{
    const struct sample_params plain = {.temperature = 1, .top_p = 1, .repetition_penalty = 1};
    float *logits = ops_test_floats(t, 2 * N_VOCAB, 2);
    logits[17] = NAN, logits[18] = -INFINITY, logits[500] = logits[501] = 9;
    float *device_logits = ops_test_upload(t, logits, sizeof *logits * N_VOCAB);
    for (int i = 0; i < 4; i++) {
        struct sample_params p = plain;
        p.seed = 77, p.position = (uint64_t)i;
        compare(t, "plain", logits, device_logits, &p);
        p.top_k = 40, p.temperature = .8f, p.n_top = 5;
        compare(t, "top-k", logits, device_logits, &p);
        p.top_k = 0, p.top_p = .7f;
        compare(t, "top-p", logits, device_logits, &p);
        p.top_k = 100, p.min_p = .01f;
        compare(t, "all filters", logits, device_logits, &p);
        p.bias = bias, p.n_bias = 3, p.counts = counts, p.n_counts = 3, p.banned = banned, p.n_banned = 3;
        p.presence_penalty = .5f, p.frequency_penalty = .25f, p.repetition_penalty = 1.2f;
        compare(t, "everything", logits, device_logits, &p);
    }
    struct sample_params p = plain;
    p.temperature = 0, p.n_top = 32;
    compare(t, "greedy", logits, device_logits, &p);
    p.temperature = 2, p.top_p = 0;
    compare(t, "top-p of 0", logits, device_logits, &p);
    p = plain, p.top_k = 1;
    compare(t, "top-k of 1, two equal", logits, device_logits, &p);
    p = plain, p.temperature = 1e-6f;
    compare(t, "cold", logits, device_logits, &p);
    p = plain, p.banned = banned, p.n_banned = 3, p.temperature = 0;
    compare(t, "greedy with bans", logits, device_logits, &p);
    batch(t, logits);
    long_lists(t, logits);
    for (int i = 0; i < N_VOCAB; i++)
        logits[i] = -INFINITY;
    device_logits = ops_test_upload(t, logits, sizeof *logits * N_VOCAB);
    compare(t, "nothing to draw", logits, device_logits, &plain);
    p = plain, p.top_p = 2;
    ops_test_true(t, "a parameter outside its range", sample_one(t->gpu_ops, t->gpu, device_logits, N_VOCAB, &p, &(struct sample_result){0}) == -EINVAL);
    p = plain, p.banned = (int32_t[]){N_VOCAB}, p.n_banned = 1;
    ops_test_true(t, "an id outside", sample_one(t->gpu_ops, t->gpu, device_logits, N_VOCAB, &p, &(struct sample_result){0}) == -EINVAL);
    free(logits);
}
