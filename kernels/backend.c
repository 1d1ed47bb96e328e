#include "kernels/backend.h"
#include "proto/base/base_assert.h"
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

const struct kernel_backend *cpu_backend(void)
{
    static struct kernel_backend backend;
    backend = (struct kernel_backend){
        .abi = KERNEL_BACKEND_ABI,
        .table_bytes = KERNEL_BACKEND_TABLE_BYTES,
        .name = "cpu",
        .device = cpu_device_ops(),
        .ops = cpu_kernel_ops(),
        .stored_ops = cpu_kernel_ops(),
        .collective = shm_collective_ops(),
        .missing = "",
    };
    return &backend;
}

/* Tables are nothing but function pointers, names, and numbers above 0. */
static bool has_empty_slot(const void *table, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += sizeof(void *))
        if (*(void *const *)((const char *)table + at) == NULL)
            return true;
    return false;
}

int backend_check(const struct kernel_backend *backend, struct error *err)
{
    if (backend->abi != KERNEL_BACKEND_ABI || backend->table_bytes != KERNEL_BACKEND_TABLE_BYTES)
        return error_set(err, -ENOTSUP, "the %s plugin was built from other headers", backend->name);
    if (has_empty_slot(backend->device, sizeof *backend->device) || has_empty_slot(backend->ops, sizeof *backend->ops) || has_empty_slot(backend->stored_ops, sizeof *backend->stored_ops) ||
        has_empty_slot(backend->collective, sizeof *backend->collective))
        return error_set(err, -ENOTSUP, "the %s plugin has an empty slot", backend->name);
    if (*backend->missing)
        return error_set(err, -ENOTSUP, "the %s plugin is incomplete: it lacks %s", backend->name, backend->missing);
    return 0;
}

/* Beside the program, or in the lib folder next to its own: nothing that the environment could redirect. */
static void *plugin_load(struct error *err)
{
    static const char *const places[] = {"%.*s/libtidepool_cuda.so", "%.*s/../lib/libtidepool_cuda.so"};
    char program[PATH_MAX], path[PATH_MAX + 64];
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length <= 0) {
        error_set(err, -ENODEV, "/proc/self/exe cannot be read");
        return NULL;
    }
    program[length] = 0;
    const int folder = (int)(strrchr(program, '/') - program);
    for (size_t i = 0; i < ARRAY_LEN(places); i++) {
        snprintf(path, sizeof path, places[i], folder, program);
        if (access(path, F_OK) != 0)
            continue;
        void *plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!plugin)
            error_set(err, -ENODEV, "%s", dlerror());
        return plugin;
    }
    error_set(err, -ENODEV, "this build has no CUDA plugin");
    return NULL;
}

/* A host with GPUs, but not that one: nobody who named it means the CPU. */
static bool is_beyond(const struct kernel_backend *backend, const struct device_config *config, struct error *err)
{
    const int n = backend->device->count();
    if (n == 0 || config->ordinal < n)
        return false;
    error_set(err, -ENXIO, "there is no GPU %d: this host has %d, from 0 to %d. Workers and ranks take one each from --gpu on: ask for fewer, or for --device cpu", config->ordinal, n, n - 1);
    return true;
}

static int open_cuda(const struct device_config *config, const struct kernel_backend **ret_backend, struct device **ret_device, struct error *err)
{
    void *plugin = plugin_load(err);
    if (!plugin)
        return -ENODEV;
    kernel_backend_fn *get;
    *(void **)&get = dlsym(plugin, KERNEL_BACKEND_SYMBOL);
    if (!get) {
        dlclose(plugin);
        return error_set(err, -ENOTSUP, "the CUDA plugin has no %s", KERNEL_BACKEND_SYMBOL);
    }
    const struct kernel_backend *backend = get();
    int r = backend_check(backend, err);
    if (r == 0) {
        r = is_beyond(backend, config, err) ? -ENXIO : backend->device->open(config, ret_device);
        if (r < 0 && r != -ENXIO)
            error_set(err, r, "CUDA device %d: %s", config->ordinal, strerror(-r));
    }
    if (r < 0)
        dlclose(plugin);
    else
        *ret_backend = backend;
    return r;
}

int backend_open(enum backend_choice choice, const struct device_config *config, const struct kernel_backend **ret_backend, struct device **ret_device, struct error *ret_note, struct error *err)
{
    ret_note->text[0] = 0;
    if (choice != BACKEND_CPU) {
        int r = open_cuda(config, ret_backend, ret_device, choice == BACKEND_CUDA ? err : ret_note);
        if (r == -ENXIO && choice == BACKEND_AUTO)
            return error_set(err, r, "%.400s", ret_note->text);
        if (r == 0 || choice == BACKEND_CUDA)
            return r;
    }
    int r = cpu_device_ops()->open(config, ret_device);
    if (r == -ENODEV)
        return error_set(err, r, "--isa: this processor does not have that instruction set");
    if (r < 0)
        return error_set(err, r, "device: %s", strerror(-r));
    *ret_backend = cpu_backend();
    return 0;
}
