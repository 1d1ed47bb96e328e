/* The library through which workers use the kvstore: maps the pool, takes leases, puts blocks in two phases. One thread owns a client and its
 * loop. Calls with a `deadline_us` (relative) block at most that long: they wait on the socket only, the loop does not run. The async ones
 * answer through the loop and never block. When the store is gone every call returns -ENOTCONN at once and the client reconnects by itself
 * with back-off (100 ms .. 5 s); mappings of an earlier store stay valid until their last lease is released, so running sequences go on.
 * A store that is stopped but not dead is not left: while leases are held on its pool the socket stays open, for closing it would end them.
 * Follows docs/design.md, "When things fail", and plasma's create/seal protocol. */
#pragma once
#include "proto/base/error.h"
#include "proto/base/loop.h"
#include "proto/block_key.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kv_client;

struct kv_client_config {
    const char *socket_path;
    const char *name;                            /* for the store's logs */
    uint64_t connect_timeout_us;
    void (*on_state)(bool connected, void *arg); /* or NULL; called from the loop */
    /* Both or none. A pool was mapped, before any lease on it: a negative errno refuses it, and the client takes that as a store that is not there. on_unmap: it goes, and nobody
     * may touch it when that returns. From the loop or any call of this client; they must not call it. */
    int (*on_map)(void *base, uint64_t bytes, void *arg);
    void (*on_unmap)(void *base, void *arg);
    void *arg;
};

/* A block in the pool that this client holds a lease on. `data` points into the mapping; data..data+length lies inside it. Whoever stored the block
 * chose `length`: a reader that expects a certain one compares. */
struct kv_lease {
    uint64_t id;
    uint8_t *data;
    uint64_t length, checksum;
    struct kv_mapping *mapping;                  /* private; keeps the mapping alive */
};

enum kv_reserve_status { KV_RESERVE_GRANTED, KV_RESERVE_EXISTS, KV_RESERVE_BUSY, KV_RESERVE_FULL };
struct kv_reserve_block {
    struct block_key key, parent;
    bool first;                                  /* no parent */
    uint32_t position;
    uint64_t length;
};

struct kv_store_info {
    bool connected;
    uint8_t store_uuid[16];
    uint64_t pool_bytes, pool_used_bytes;        /* the latter from the store's statistics page: for display only */
    uint64_t lookups_corrupt;                    /* blocks whose bytes did not match their checksum, since kv_client_create */
    char event_endpoint[256], snapshot_endpoint[256];
    struct error error;                          /* why the last connection or attempt failed; "" while connected */
};

/* Succeeds when the store is not there yet: the client keeps trying. */
int kv_client_create(struct loop *loop, const struct kv_client_config *config, struct kv_client **ret_client, struct error *err);
/* Ends every lease; not from a callback of this client. Unsealed blocks that were not released stay reserved until the process ends. NULL is fine. */
void kv_client_free(struct kv_client *client);
void kv_client_info(const struct kv_client *client, struct kv_store_info *ret);

enum { KV_BLOCKS_MAX = 4096 };                   /* blocks a call; more is -E2BIG */

/* Longest sealed run from the start of keys[n]; verifies XXH3 of each block and reports corrupt ones (the run ends there). Returns the number
 * of leases written, or -ETIMEDOUT, -ENOTCONN, -ENOMEM, -E2BIG, -EAGAIN (too much waits for the store already). The deadline bounds the wait for the
 * store; reading the blocks for their checksums comes on top. */
int kv_client_lookup(struct kv_client *client, const struct block_key *keys, int n, uint64_t deadline_us, struct kv_lease *ret_leases);
/* Returns n (or an error as above). status[n] and leases[n]: valid for GRANTED (write `length` bytes at data, then seal) and EXISTS (sealed, checksum
 * verified; a corrupt one is reported and comes back as BUSY). */
int kv_client_reserve(struct kv_client *client, const struct kv_reserve_block *blocks, int n, uint64_t deadline_us,
                      enum kv_reserve_status *ret_status, struct kv_lease *ret_leases);
/* The same without waiting: `cb` gets n results, or a negative errno with no results, exactly once; kv_client_free answers what is outstanding with
 * -ECANCELED (such a callback must not call the client). */
typedef void kv_reserve_cb(int result, const enum kv_reserve_status *status, const struct kv_lease *leases, int n, void *arg);
int kv_client_reserve_async(struct kv_client *client, const struct kv_reserve_block *blocks, int n, kv_reserve_cb *cb, void *arg);
/* Computes XXH3-64 over each block and seals; does not wait for the answer. The leases stay, now as read leases. -ENOTCONN: a lease belongs to a
 * store that is gone; its memory stays readable and private to this process, the other blocks are sealed all the same. */
int kv_client_seal(struct kv_client *client, struct kv_lease *const *leases, int n);
/* Ends leases (unsealed ones are abandoned: nothing may write there any more); does not wait. Zeroes them; zeroed leases are skipped. */
void kv_client_release(struct kv_client *client, struct kv_lease *leases, int n);
/* The same for blocks that are of no more use to anybody, leaves of a chain first: those that nobody else leases and that have no children leave the pool. */
void kv_client_discard(struct kv_client *client, struct kv_lease *leases, int n);
