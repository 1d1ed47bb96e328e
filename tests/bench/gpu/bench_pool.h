/* kv_client.h in one process: the kvstore's own bookkeeping (kvstore/pool.h) over a memfd of this process, without the process and the socket between. For benches of the engine where
 * there is neither ZeroMQ nor protobuf-c. Nothing is checksummed: nobody else writes there. Linked as objects, it stands before the real client's library. */
#pragma once
#include "kernels/device.h"
#include "kvstore/client/kv_client.h"

struct bench_pool_params {
    uint64_t bytes;
    int n_threads;                   /* that touch the memory for the first time; 1..64 */
    const struct device_ops *dev;    /* the pool is registered with the device, */
    struct device *device;           /*   which outlives it */
};

struct bench_pool_times {
    double fill_s, register_s;
};

/* A sealed memfd as kvstore's, filled and registered when it returns. -ENOMEM, the errno of a system call, or the device's error. */
int bench_pool_create(const struct bench_pool_params *params, struct kv_client **ret_store, struct bench_pool_times *ret_times, struct error *err);
void bench_pool_free(struct kv_client *store); /* all leases are released by then; NULL is fine */
uint64_t bench_pool_used(const struct kv_client *store);
