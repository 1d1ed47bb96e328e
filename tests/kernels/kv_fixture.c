#include "tests/kernels/kv_fixture.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

void fixture_open(struct fixture *f)
{
    static const struct { enum cpu_isa isa; int n_threads; } variants[FIXTURE_DEVICES] = {
        {CPU_ISA_PLAIN, 1}, {CPU_ISA_AVX2, 1}, {CPU_ISA_AVX2, 2}, {CPU_ISA_AVX512, 1}, {CPU_ISA_AVX512, 3},
    };
    *f = (struct fixture){.ops = cpu_kernel_ops()};
    for (int i = 0; i < FIXTURE_DEVICES; i++) {
        struct fixture_device *d = &f->devices[f->n];
        struct device_config config = {.n_threads = variants[i].n_threads, .isa = variants[i].isa};
        int r = cpu_device_ops()->open(&config, &d->device);
        if (r == -ENODEV)
            continue;
        ASSERT(r == 0);
        ASSERT(cpu_device_ops()->stream_create(d->device, &d->stream) == 0);
        d->isa = variants[i].isa;
        d->n_threads = variants[i].n_threads;
        f->n++;
    }
}

void fixture_close(struct fixture *f)
{
    for (int i = 0; i < f->n; i++) {
        cpu_device_ops()->stream_free(f->devices[i].stream);
        cpu_device_ops()->close(f->devices[i].device);
    }
}

void *aligned_zeros(size_t bytes)
{
    bytes = (bytes + 63) & ~(size_t)63;
    void *p = aligned_alloc(64, bytes ? bytes : 64);
    ASSERT(p);
    memset(p, 0, bytes);
    return p;
}

float *random_floats(struct ref_rng *rng, size_t n, double scale)
{
    float *x = aligned_zeros(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(scale * ref_gaussian(rng));
    return x;
}

uint16_t *random_bf16(struct ref_rng *rng, size_t n, double scale)
{
    uint16_t *x = aligned_zeros(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = ref_bf16_bits(scale * ref_gaussian(rng));
    return x;
}

double *widen_floats(const float *x, size_t n)
{
    double *y = aligned_zeros(n * sizeof *y);
    for (size_t i = 0; i < n; i++)
        y[i] = x[i];
    return y;
}

double *widen_bf16(const uint16_t *x, size_t n)
{
    double *y = aligned_zeros(n * sizeof *y);
    for (size_t i = 0; i < n; i++)
        y[i] = ref_bf16_value(x[i]);
    return y;
}

double max_difference(const float *a, const double *b, size_t n)
{
    double max = 0;
    for (size_t i = 0; i < n; i++)
        max = fabs(a[i] - b[i]) > max || isnan(a[i]) ? fabs(a[i] - b[i]) : max;
    return max;
}

double max_magnitude(const double *b, size_t n)
{
    double max = 0;
    for (size_t i = 0; i < n; i++)
        max = fabs(b[i]) > max ? fabs(b[i]) : max;
    return max;
}
