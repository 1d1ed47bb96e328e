/* The loader, with a real plugin beside this program: the CUDA backend built over the emulator. */
#include "kernels/backend.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

static int open_choice(enum backend_choice choice, const char **ret_name, struct error *note, struct error *err)
{
    const struct device_config config = {.n_threads = 1};
    const struct kernel_backend *backend;
    struct device *device;
    int r = backend_open(choice, &config, &backend, &device, note, err);
    if (r == 0) {
        *ret_name = backend->name;
        cr_assert_str_eq(backend->device->name, backend->name);
        backend->device->close(device);
    }
    return r;
}

Test(backend, the_cpu_needs_no_plugin)
{
    const char *name;
    struct error note, err;
    cr_assert_eq(open_choice(BACKEND_CPU, &name, &note, &err), 0);
    cr_assert_str_eq(name, "cpu");
    cr_assert_str_eq(note.text, "");
}

Test(backend, auto_and_cuda_take_the_plugin)
{
    static const enum backend_choice choices[] = {BACKEND_AUTO, BACKEND_CUDA};
    for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++) {
        const char *name;
        struct error note, err;
        cr_assert_eq(open_choice(choices[i], &name, &note, &err), 0);
        cr_assert_str_eq(name, "cuda");
        cr_assert_str_eq(note.text, "");
    }
}

/* Whoever names a GPU that is not there does not mean the CPU. */
Test(backend, a_gpu_beyond_the_last_is_refused)
{
    static const enum backend_choice choices[] = {BACKEND_AUTO, BACKEND_CUDA};
    const struct device_config config = {.n_threads = 1, .ordinal = 1};
    for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++) {
        const struct kernel_backend *backend;
        struct device *device;
        struct error note, err;
        cr_assert_eq(backend_open(choices[i], &config, &backend, &device, &note, &err), -ENXIO);
        cr_assert_not_null(strstr(err.text, "no GPU 1: this host has 1, from 0 to 0"), "%s", err.text);
    }
}

Test(backend, an_incomplete_plugin_is_refused)
{
    struct kernel_backend backend = *cpu_backend();
    struct error err;
    backend.missing = "an op";
    cr_assert_eq(backend_check(&backend, &err), -ENOTSUP);
    cr_assert_not_null(strstr(err.text, "lacks an op"), "%s", err.text);
}

Test(backend, a_plugin_of_other_headers_is_refused)
{
    struct kernel_backend backend = *cpu_backend();
    struct error err;
    cr_assert_eq(backend_check(&backend, &err), 0);
    backend.abi++;
    cr_assert_eq(backend_check(&backend, &err), -ENOTSUP);
    backend.abi--;
    backend.table_bytes += sizeof(void *);
    cr_assert_eq(backend_check(&backend, &err), -ENOTSUP);
}

Test(backend, a_plugin_with_an_empty_slot_is_refused)
{
    struct kernel_backend backend = *cpu_backend();
    struct kernel_ops ops = *backend.ops;
    struct error err;
    ops.topk = NULL;
    backend.ops = &ops;
    cr_assert_eq(backend_check(&backend, &err), -ENOTSUP);
    cr_assert_not_null(strstr(err.text, "slot"), "%s", err.text);
}

Test(backend, a_device_that_cannot_be_opened_is_an_error)
{
    const struct device_config config = {.n_threads = 0};
    const struct kernel_backend *backend;
    struct device *device;
    struct error note, err;
    cr_assert_eq(backend_open(BACKEND_CPU, &config, &backend, &device, &note, &err), -EINVAL);
}
