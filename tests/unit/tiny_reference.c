#include "tests/unit/tiny_reference.h"
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { D = TINY_HEAD_DIM, Q_DIM = TINY_HEADS * D, KV_DIM = TINY_KV_HEADS * D };

static void matvec(const float *w, const double *x, int n_rows, int n_cols, double *y)
{
    for (int i = 0; i < n_rows; i++) {
        y[i] = 0;
        for (int j = 0; j < n_cols; j++)
            y[i] += (double)w[i * n_cols + j] * x[j];
    }
}

static void norm(const float *gamma, const double *x, double *y)
{
    double sum = 0;
    for (int i = 0; i < TINY_DIM; i++)
        sum += x[i] * x[i];
    for (int i = 0; i < TINY_DIM; i++)
        y[i] = x[i] / sqrt(sum / TINY_DIM + 1e-5) * (double)gamma[i];
}

/* RoPE on pairs (2i, 2i+1), then the Sylvester-Hadamard matrix over sqrt(d). */
static void rotate(const struct model_config *c, double *x, int pos)
{
    double y[D];
    for (int i = 0; i < D / 2; i++) {
        const double angle = pos * c->rope.inv_freq[i], a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cos(angle) - b * sin(angle);
        x[2 * i + 1] = a * sin(angle) + b * cos(angle);
    }
    for (int i = 0; i < D; i++) {
        y[i] = 0;
        for (int j = 0; j < D; j++)
            y[i] += (__builtin_popcount((unsigned)(i & j)) & 1 ? -x[j] : x[j]) / sqrt(D);
    }
    memcpy(x, y, sizeof(y));
}

/* The bias of a head at a position, as RoPE and rotation turn it. */
static void rotated_bias(const struct model_config *c, const float *bias, int pos, double *y)
{
    for (int i = 0; i < D; i++)
        y[i] = (double)bias[i];
    rotate(c, y, pos);
}

static double round_bf16(double x)
{
    const float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    float y;
    memcpy(&y, &bits, 4);
    return (double)y;
}

/* keys and values are [n, KV_DIM]. */
static void attend(const double *q, const double *keys, const double *values, int n, double *out)
{
    double *p = malloc((size_t)n * sizeof(*p));
    for (int h = 0; h < TINY_HEADS; h++) {
        const int kv = h / (TINY_HEADS / TINY_KV_HEADS) * D;
        double max = -INFINITY, sum = 0;
        for (int i = 0; i < n; i++) {
            p[i] = 0;
            for (int c = 0; c < D; c++)
                p[i] += q[h * D + c] * keys[i * KV_DIM + kv + c] / sqrt(D);
            max = fmax(max, p[i]);
        }
        for (int i = 0; i < n; i++)
            sum += p[i] = exp(p[i] - max);
        for (int c = 0; c < D; c++) {
            out[h * D + c] = 0;
            for (int i = 0; i < n; i++)
                out[h * D + c] += p[i] / sum * values[i * KV_DIM + kv + c];
        }
    }
    free(p);
}

static void mlp(const struct tiny_layer *s, const float *gamma, double *x)
{
    double y[TINY_DIM], gate[TINY_FFN], up[TINY_FFN], down[TINY_DIM];
    norm(gamma, x, y);
    matvec(s->gate, y, TINY_FFN, TINY_DIM, gate);
    matvec(s->up, y, TINY_FFN, TINY_DIM, up);
    for (int i = 0; i < TINY_FFN; i++)
        gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
    matvec(s->down, gate, TINY_DIM, TINY_FFN, down);
    for (int i = 0; i < TINY_DIM; i++)
        x[i] += down[i];
}

static void layer(const struct fixture *f, int l, double *hidden, int n)
{
    const struct tiny_layer *s = &f->source[l];
    const struct model_layer_weights *w = &f->model.weights.layers[l];
    double *keys = malloc((size_t)n * KV_DIM * sizeof(*keys)), *values = malloc((size_t)n * KV_DIM * sizeof(*values));
    for (int i = 0; i < n; i++) {
        double *x = hidden + i * TINY_DIM, y[TINY_DIM], q[Q_DIM], o[Q_DIM], projected[TINY_DIM];
        norm(w->attn_norm, x, y);
        matvec(s->q, y, Q_DIM, TINY_DIM, q);
        matvec(s->k, y, KV_DIM, TINY_DIM, keys + i * KV_DIM);
        matvec(s->v, y, KV_DIM, TINY_DIM, values + i * KV_DIM);
        for (int h = 0; h < TINY_HEADS; h++)
            rotate(&f->model.config, q + h * D, i);
        for (int c = 0; s->k_rest && c < KV_DIM; c++)
            keys[i * KV_DIM + c] += (double)s->k_rest[c];
        for (int h = 0; h < TINY_KV_HEADS; h++)
            rotate(&f->model.config, keys + i * KV_DIM + h * D, i);
        for (int c = 0; c < KV_DIM; c++) {
            keys[i * KV_DIM + c] = round_bf16(keys[i * KV_DIM + c]);
            values[i * KV_DIM + c] = round_bf16(values[i * KV_DIM + c]);
        }
        for (int h = 0; s->k_large && h < TINY_KV_HEADS; h++) {
            double bias[D];
            rotated_bias(&f->model.config, s->k_large + h * D, i, bias);
            for (int c = 0; c < D; c++)
                keys[i * KV_DIM + h * D + c] += bias[c];
        }
        attend(q, keys, values, i + 1, o);
        matvec(s->o, o, TINY_DIM, Q_DIM, projected);
        for (int c = 0; c < TINY_DIM; c++)
            x[c] += projected[c];
        mlp(s, w->ffn_norm, x);
    }
    free(keys);
    free(values);
}

void tiny_reference_logits(const struct fixture *f, const int32_t *tokens, int n, double *ret_logits)
{
    double *hidden = malloc((size_t)n * TINY_DIM * sizeof(*hidden)), y[TINY_DIM];
    cr_assert(hidden);
    for (int i = 0; i < n; i++)
        for (int c = 0; c < TINY_DIM; c++)
            hidden[i * TINY_DIM + c] = (double)f->embedding[tokens[i] * TINY_DIM + c];
    for (int l = 0; l < f->model.config.n_layers; l++)
        layer(f, l, hidden, n);
    for (int i = 0; i < n; i++) {
        norm(f->model.weights.final_norm, hidden + i * TINY_DIM, y);
        matvec(f->embedding, y, TINY_VOCAB, TINY_DIM, ret_logits + (size_t)i * TINY_VOCAB);
    }
    free(hidden);
}

/* KL(want || got) of the next-token distributions. */
static double kl(const double *a, const float *b)
{
    double max_a = -INFINITY, max_b = -INFINITY, sum_a = 0, sum_b = 0, sum = 0;
    for (int i = 0; i < TINY_VOCAB; i++) {
        max_a = fmax(max_a, a[i]);
        max_b = fmax(max_b, (double)b[i]);
    }
    for (int i = 0; i < TINY_VOCAB; i++) {
        sum_a += exp(a[i] - max_a);
        sum_b += exp((double)b[i] - max_b);
    }
    for (int i = 0; i < TINY_VOCAB; i++) {
        const double la = a[i] - max_a - log(sum_a), lb = (double)b[i] - max_b - log(sum_b);
        sum += exp(la) * (la - lb);
    }
    return sum;
}

double tiny_reference_mean_kl(const double *want, const float *got, int n_rows, double *ret_max)
{
    double sum = 0, max = 0;
    for (int i = 0; i < n_rows; i++) {
        const double d = kl(want + (size_t)i * TINY_VOCAB, got + (size_t)i * TINY_VOCAB);
        sum += d;
        max = fmax(max, d);
    }
    if (ret_max)
        *ret_max = max;
    return sum / n_rows;
}
