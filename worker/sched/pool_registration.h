/* Makes the pool's mappings known to the device. Where the device's memory is not the host's, pinning takes 0.05 to 0.1 s a GiB: a thread does it, tells its progress in the log, and until it is
 * done the pool counts as one that is not there. A pool that the device does not take is tried again every `retry_us`. Where the memory is the host's there is nothing to do and no thread.
 * All calls and the callback are on the loop's thread. */
#pragma once
#include "kernels/device.h"
#include "proto/base/loop.h"

struct pool_registration;

struct pool_registration_config {
    const struct device_ops *dev; /* borrowed, like device and loop */
    struct device *device;
    struct loop *loop;
    uint64_t retry_us;
    void (*registered)(void *arg); /* from the loop: the newest mapping is there now */
    void *arg;
};

int pool_registration_create(const struct pool_registration_config *config, struct pool_registration **ret); /* -ENOMEM, -errno */
void pool_registration_free(struct pool_registration *registration); /* NULL is fine; mappings that are left are removed */
/* A mapping came; from now on it is the newest. Negative: it cannot even be begun, and nothing is kept. */
int pool_registration_add(struct pool_registration *registration, void *base, size_t bytes);
/* A mapping goes: when this returns, neither device nor thread touches it. Waits for the piece that is being pinned, and for the device. */
void pool_registration_remove(struct pool_registration *registration, void *base);
/* The device may use the newest mapping. */
bool pool_registration_ready(const struct pool_registration *registration);
