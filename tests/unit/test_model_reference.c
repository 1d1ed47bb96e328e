/* The real model against logits that transformers computed in fp32 (shared/fixtures/README.md). The folder of fixtures is $TIDEPOOL_SHARED or ../shared. */
#include "dense_forward.h"
#include "formats/file_map.h"
#include "formats/json.h"
#include <criterion/criterion.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static const char model_path[] = "models/SmolLM2-135M-Instruct.Q4_1.gguf";

enum { MAX_TOKENS = 1024, MAX_POSITIONS = 64, N_TOP = 20 };

struct fixture {
    int32_t tokens[MAX_TOKENS];
    int n_tokens;
    int32_t positions[MAX_POSITIONS];
    int n_positions;
    int32_t ids[MAX_POSITIONS][N_TOP];
    double logits[MAX_POSITIONS][N_TOP];
    double logsumexp[MAX_POSITIONS];
};

static int read_ints(struct json *j, int32_t *values, int max)
{
    int64_t v;
    int n = 0;
    json_array(j);
    while (json_next_item(j)) {
        cr_assert(json_int(j, &v) >= 0 && n < max);
        values[n++] = (int32_t)v;
    }
    return n;
}

static void read_position(struct json *j, struct fixture *f)
{
    struct json_str key;
    int i = f->n_positions++, n = 0;
    int64_t pos;
    cr_assert_lt(i, MAX_POSITIONS);
    json_object(j);
    while (json_next_key(j, &key)) {
        if (json_str_eq(&key, "pos")) {
            json_int(j, &pos);
            f->positions[i] = (int32_t)pos;
        } else if (json_str_eq(&key, "ids")) {
            cr_assert_eq(read_ints(j, f->ids[i], N_TOP), N_TOP);
        } else if (json_str_eq(&key, "logits")) {
            json_array(j);
            while (json_next_item(j))
                cr_assert(n < N_TOP && json_double(j, &f->logits[i][n++]) >= 0);
        } else if (json_str_eq(&key, "logsumexp")) {
            json_double(j, &f->logsumexp[i]);
        } else {
            json_skip(j);
        }
    }
}

static void read_fixture(struct fixture *f)
{
    const char *shared = getenv("TIDEPOOL_SHARED");
    char path[PATH_MAX];
    struct file_map map;
    struct error err;
    struct json j;
    struct json_str key;
    snprintf(path, sizeof(path), "%s/fixtures/logits_smollm2.json", shared ? shared : "../shared");
    if (access(path, R_OK) < 0 || access(model_path, R_OK) < 0)
        cr_skip_test("skipped: %s or %s is not here", path, model_path);
    cr_assert_eq(file_map_open(path, &map, &err), 0, "%s", err.text);
    *f = (struct fixture){0};
    json_init(&j, map.data, map.size);
    json_object(&j);
    while (json_next_key(&j, &key)) {
        if (json_str_eq(&key, "token_ids"))
            f->n_tokens = read_ints(&j, f->tokens, MAX_TOKENS);
        else if (json_str_eq(&key, "positions")) {
            json_array(&j);
            while (json_next_item(&j))
                read_position(&j, f);
        } else
            json_skip(&j);
    }
    cr_assert_eq(json_end(&j), 0, "%s", j.error_text);
    json_fini(&j);
    file_map_close(&map);
}

static double log_sum_exp(const float *x, int n)
{
    double m = -INFINITY, sum = 0;
    for (int i = 0; i < n; i++)
        m = fmax(m, (double)x[i]);
    for (int i = 0; i < n; i++)
        sum += exp((double)x[i] - m);
    return m + log(sum);
}

/* KL(reference || ours) over the top tokens, all others taken as one. */
static double divergence(const struct fixture *f, int i, const float *logits, int n_vocab)
{
    double lse = log_sum_exp(logits, n_vocab), p_rest = 1, q_rest = 1, kl = 0;
    for (int k = 0; k < N_TOP; k++) {
        double log_p = f->logits[i][k] - f->logsumexp[i], log_q = (double)logits[f->ids[i][k]] - lse;
        kl += exp(log_p) * (log_p - log_q);
        p_rest -= exp(log_p);
        q_rest -= exp(log_q);
    }
    return kl + (p_rest > 1e-9 && q_rest > 1e-9 ? p_rest * log(p_rest / q_rest) : 0);
}

static int top_token(const float *logits, int n_vocab)
{
    int best = 0;
    for (int i = 1; i < n_vocab; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

Test(model_reference, smollm2_agrees_with_transformers)
{
    static struct fixture f;
    struct dense_device d;
    read_fixture(&f);
    cr_assert(f.n_tokens == 600 && f.n_positions == 16);
#ifdef TIDEPOOL_SANITIZED
    f.n_positions = 4; /* the way is the same, and takes long */
    f.n_tokens = f.positions[3] + 1;
#endif
    dense_open(&d, model_path, 2, CPU_ISA_AUTO);
    int n_vocab = d.model->config.n_vocab;
    float *logits = calloc((size_t)f.n_positions * (size_t)n_vocab, sizeof(float));
    cr_assert_not_null(logits);
    /* One chunk; all 600 tokens are more than what the MLP takes at a time. */
    cr_assert_eq(dense_forward(&d, f.tokens, f.n_tokens, f.n_tokens, f.positions, f.n_positions, logits), 0);
    double sum = 0;
    for (int i = 0; i < f.n_positions; i++) {
        const float *row = logits + (size_t)i * (size_t)n_vocab;
        sum += divergence(&f, i, row, n_vocab);
        if (f.logits[i][0] - f.logits[i][1] > 0.1)
            cr_expect_eq(top_token(row, n_vocab), f.ids[i][0], "position %d", f.positions[i]);
    }
    cr_expect_lt(sum / f.n_positions, 1e-4, "mean KL is %g", sum / f.n_positions);
    cr_log_info("mean KL %.3g", sum / f.n_positions);
    free(logits);
    dense_close(&d);
}
