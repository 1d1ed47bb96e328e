#include "tests/kernels/kernel_test.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

bool kernel_test_open(enum cpu_isa isa, int n_threads, struct device **ret_device, struct stream **ret_stream)
{
    const struct device_ops *ops = cpu_device_ops();
    int rc = ops->open(&(struct device_config){.n_threads = n_threads, .isa = isa}, ret_device);
    if (rc == -ENODEV) {
        cr_log_warn("instruction set %d is not on this machine: skipped", (int)isa);
        return false;
    }
    cr_assert_eq(rc, 0, "open: %s", strerror(-rc));
    cr_assert_eq(ops->stream_create(*ret_device, ret_stream), 0);
    return true;
}

void kernel_test_close(struct device *device, struct stream *stream)
{
    cpu_device_ops()->stream_free(stream);
    cpu_device_ops()->close(device);
}

uint64_t kernel_test_bits(uint64_t seed, uint64_t index)
{
    uint64_t z = (seed * 0x9E3779B97F4A7C15ull) ^ (index + 1) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

double kernel_test_uniform(uint64_t seed, uint64_t index, double lo, double hi)
{
    return lo + (hi - lo) * ((double)(kernel_test_bits(seed, index) >> 11) * 0x1p-53);
}

void kernel_test_fill(float *x, int64_t n, uint64_t seed, float lo, float hi)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)kernel_test_uniform(seed, (uint64_t)i, lo, hi);
}

void kernel_test_expect_same(const char *what, const float *expected, const float *actual, int64_t n)
{
    if (memcmp(expected, actual, (size_t)n * sizeof *expected) == 0)
        return;
    for (int64_t i = 0; i < n; i++)
        cr_assert(memcmp(&expected[i], &actual[i], sizeof *expected) == 0, "%s: element %lld is %a, expected %a", what, (long long)i, actual[i],
                  expected[i]);
}
