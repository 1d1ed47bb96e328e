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

void kernel_test_expect_same(const char *what, const float *expected, const float *actual, int64_t n)
{
    if (memcmp(expected, actual, (size_t)n * sizeof *expected) == 0)
        return;
    for (int64_t i = 0; i < n; i++)
        cr_assert(memcmp(&expected[i], &actual[i], sizeof *expected) == 0, "%s: element %lld is %a, expected %a", what, (long long)i, actual[i],
                  expected[i]);
}
