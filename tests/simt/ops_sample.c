/* Sampling: the same tokens as the CPU from the same Philox numbers. */
#include "tests/simt/ops_test.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N_VOCAB = 3001 };

static const struct logit_bias bias[] = {{5, 4.5f}, {2990, -3}, {5, .25f}};
static const struct token_count counts[] = {{7, 2, 0}, {8, 0, 3}, {100, 1, 1}};
static const int32_t banned[] = {0, 5, 2999};

static void compare(struct ops_test *t, const char *what, const float *logits, const float *device_logits, const struct sample_params *p)
{
    struct sample_result expected, actual;
    int cpu = t->cpu_ops->sample(t->cpu, logits, N_VOCAB, p, &expected), gpu = t->gpu_ops->sample(t->gpu, device_logits, N_VOCAB, p, &actual);
    what = ops_test_shape("sample %s, position %d", what, (int)p->position);
    ops_test_true(t, what, cpu == gpu);
    if (cpu < 0 || gpu < 0)
        return;
    ops_test_true(t, what, expected.token == actual.token && expected.n_top == actual.n_top && fabsf(expected.logprob - actual.logprob) < 1e-5f);
    for (int i = 0; i < expected.n_top; i++)
        ops_test_true(t, what, expected.top[i].token == actual.top[i].token && fabsf(expected.top[i].logprob - actual.top[i].logprob) < 1e-5f);
}

void test_ops_sample(struct ops_test *t)
{
    const struct sample_params plain = {.temperature = 1, .top_p = 1, .repetition_penalty = 1};
    float *logits = ops_test_floats(t, N_VOCAB, 2);
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
    for (int i = 0; i < N_VOCAB; i++)
        logits[i] = -INFINITY;
    device_logits = ops_test_upload(t, logits, sizeof *logits * N_VOCAB);
    compare(t, "nothing to draw", logits, device_logits, &plain);
    p = plain, p.top_p = 2;
    ops_test_true(t, "a parameter outside its range", t->gpu_ops->sample(t->gpu, device_logits, N_VOCAB, &p, &(struct sample_result){0}) == -EINVAL);
    p = plain, p.banned = (int32_t[]){N_VOCAB}, p.n_banned = 1;
    ops_test_true(t, "an id outside", t->gpu_ops->sample(t->gpu, device_logits, N_VOCAB, &p, &(struct sample_result){0}) == -EINVAL);
    free(logits);
}
