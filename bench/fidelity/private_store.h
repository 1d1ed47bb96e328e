/* A kvstore for one run: a process of its own in a folder of its own, so that rows find each other's prefixes and nobody else's. It ends with this process, whatever ends it. */
#pragma once
#include "kvstore/client/kv_client.h"
#include <limits.h>
#include <sys/types.h>

struct private_store {
    pid_t pid;
    char folder[PATH_MAX];
    struct loop *loop;
    struct kv_client *client;
};

/* Starts tidepool-kvstore, which stands beside this program, and connects. Blocks until both is done. -ENOENT (no such program), -ETIMEDOUT, -ENOMEM ... */
int private_store_start(struct private_store *store, uint64_t pool_bytes, struct error *err);
void private_store_stop(struct private_store *store); /* a zeroed one is fine */
