/* A real tidepool-kvstore on a socket in a folder of its own, and clients of it in the test's process. */
#pragma once
#include "kvstore/client/kv_client.h"
#include "tests/system/child_process.h"
#include "tests/system/store_wire.h"

enum { STORE_BLOCK_BYTES = 8192, STORE_WAIT_MS = 20000, STORE_WAIT_US = 20000000 };

struct store_fixture {
    char folder[64], socket[96];
    const char *pool_size;
    int lease_timeout_s;
    struct child process;
    struct loop *loop; /* of the clients */
};

/* Starts it; `pool_size` as the option takes it ("1M": 128 blocks). */
void store_fixture_init(struct store_fixture *f, const char *pool_size, int lease_timeout_s);
/* Ends it with SIGTERM and checks that nothing is left; after store_fixture_kill only cleans up. */
void store_fixture_fini(struct store_fixture *f);
void store_fixture_kill(struct store_fixture *f);    /* SIGKILL */
void store_fixture_restart(struct store_fixture *f); /* after a kill, same socket */
struct kv_client *store_fixture_client(struct store_fixture *f, const char *name);

/* Key of a numbered block, parent number 0: none. */
struct block_key store_key(uint32_t i);
struct kv_reserve_block store_block(uint32_t i, uint32_t parent, uint32_t position);
/* Reserves, fills with a pattern of `i`, seals; keeps the lease. */
void store_put(struct kv_client *client, uint32_t i, uint32_t parent, uint32_t position, struct kv_lease *ret_lease);
void store_fill(const struct kv_lease *lease, uint32_t i);
bool store_filled(const struct kv_lease *lease, uint32_t i);
/* Number of the blocks i..i+n-1 found; the leases are given back. */
int store_found(struct kv_client *client, uint32_t i, int n);
/* Asks for the statistics until the condition holds: what the store does next is then known. Fails the test at a deadline. */
void store_await(struct store_wire *wire, bool (*holds)(const Tidepool__Store__StatsResult *stats), const char *what);
