/* A real tidepool-kvstore for a test: its own process, socket in a temporary folder. All failures are Criterion assertions. */
#pragma once
#include "kvstore/client/kv_client.h"
#include <sys/types.h>

struct store_process {
    char folder[64], socket[96];
    pid_t pid;
};

/* `pool_size` as the option takes it, e.g. "64M". */
void store_process_start(struct store_process *store, const char *pool_size);
/* Again on the same socket after a kill. */
void store_process_restart(struct store_process *store, const char *pool_size);
void store_process_kill(struct store_process *store); /* SIGKILL, reaped */
void store_process_end(struct store_process *store);  /* kills if it lives, removes the folder */
/* A client that is connected when this returns. */
struct kv_client *store_process_client(struct store_process *store, struct loop *loop, const char *name);
/* Runs the loop until the client is connected (or not). */
void store_process_wait(struct loop *loop, const struct kv_client *client, bool connected);
