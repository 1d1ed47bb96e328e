/* A backend: a device table and an op table that belong together. The CPU's is always there; CUDA's is a plugin, libtidepool_cuda.so, loaded when it is asked for.
 * Startup only, one thread. */
#pragma once
#include "kernels/collective.h"
#include "kernels/kernels.h"
#include "proto/base/error.h"

enum {
    KERNEL_BACKEND_ABI = 4,
    KERNEL_BACKEND_TABLE_BYTES = sizeof(struct device_ops) + sizeof(struct kernel_ops) + sizeof(struct collective_ops),
};

struct kernel_backend {
    uint32_t abi;          /* KERNEL_BACKEND_ABI of the headers that it was built with */
    uint32_t table_bytes;  /* KERNEL_BACKEND_TABLE_BYTES there */
    const char *name;      /* "cpu", "cuda" */
    const struct device_ops *device;
    const struct kernel_ops *ops;
    const struct kernel_ops *stored_ops; /* the same on weights that stay in the file's format, where `ops` keeps them in a larger one; else `ops` itself */
    const struct collective_ops *collective; /* for ranks of a group that all use this backend */
    const char *missing;   /* what it cannot do yet, comma-separated: those ops return -ENOTSUP; "" when complete */
};

enum backend_choice { BACKEND_AUTO, BACKEND_CPU, BACKEND_CUDA };

const struct kernel_backend *cpu_backend(void);

/* AUTO: CUDA where the plugin loads, is complete and opens a device, else the CPU, with the reason in ret_note (an empty text: nothing to say). CUDA: that or an error.
 * -ENXIO, also with AUTO: there are GPUs, but none of the ordinal; the text says how many.
 * -ENODEV: no plugin, or no driver or device behind it; -ENOTSUP: built from other headers, or incomplete. err says which. The plugin stays loaded. */
int backend_open(enum backend_choice choice, const struct device_config *config, const struct kernel_backend **ret_backend, struct device **ret_device, struct error *ret_note, struct error *err);

/* Exported by the plugin under this name. */
#define KERNEL_BACKEND_SYMBOL "tidepool_cuda_backend"
typedef const struct kernel_backend *kernel_backend_fn(void);

/* Whether a loaded backend can be used with these headers, for whatever the worker asks of it. Pure. */
int backend_check(const struct kernel_backend *backend, struct error *err);
