#include "bench/fidelity/lab/lab_keys.h"
#include "kernels/cpu/half.h"
#include <math.h>
#include <stdbool.h>

static void hadamard(float *x, int b)
{
    const float scale = 1.0f / sqrtf((float)b);
    for (int h = 1; h < b; h *= 2)
        for (int i = 0; i < b; i += 2 * h)
            for (int j = i; j < i + h; j++) {
                const float lo = x[j], hi = x[j + h];
                x[j] = lo + hi;
                x[j + h] = lo - hi;
            }
    for (int i = 0; i < b; i++)
        x[i] *= scale;
}

void lab_rotate(float *x, int64_t n, int head_dim)
{
    const int b = head_dim & -head_dim;
    for (int64_t i = 0; i < n * head_dim; i += b)
        hadamard(x + i, b);
}

/* Turns each pair by its angle, or back. The factor that some RoPE scalings put on cos and sin is a length, so the way back divides by its square. */
static void turn(float *x, const float *rope, int d, enum rope_style style, bool back)
{
    for (int i = 0; i < d / 2; i++) {
        float *a = x + (style == ROPE_INTERLEAVED ? 2 * i : i), *b = style == ROPE_INTERLEAVED ? a + 1 : a + d / 2;
        const float c = rope[2 * i], s = back ? -rope[2 * i + 1] : rope[2 * i + 1];
        const float norm = back ? 1.0f / (c * c + s * s) : 1.0f;
        const float x0 = *a, x1 = *b;
        *a = (x0 * c - x1 * s) * norm;
        *b = (x0 * s + x1 * c) * norm;
    }
}

void lab_keys_read(const bf16_t *rows, int64_t n, int head_dim, enum lab_basis basis, enum rope_style style, const float *rope, float *x)
{
    for (int64_t i = 0; i < n * head_dim; i++)
        x[i] = bf16_to_float(rows[i]);
    if (basis != LAB_ROTATED)
        lab_rotate(x, n, head_dim);
    for (int64_t i = 0; basis == LAB_BEFORE_ROPE && i < n; i++)
        turn(x + i * head_dim, rope + i * head_dim, head_dim, style, true);
}

void lab_keys_write(float *x, int64_t n, int head_dim, enum lab_basis basis, enum rope_style style, const float *rope, bf16_t *rows)
{
    for (int64_t i = 0; basis == LAB_BEFORE_ROPE && i < n; i++)
        turn(x + i * head_dim, rope + i * head_dim, head_dim, style, false);
    if (basis != LAB_ROTATED)
        lab_rotate(x, n, head_dim);
    for (int64_t i = 0; i < n * head_dim; i++)
        rows[i] = bf16_from_float(x[i]);
}
