#include "tests/system/store_fixture.h"

#include "proto/base/clock.h"
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void start(struct store_fixture *f)
{
    static char timeout[16];
    const char *argv[] = {program_path("tidepool-kvstore"), "--socket", f->socket, "--pool-size", f->pool_size, "--lease-timeout", timeout, NULL};

    snprintf(timeout, sizeof timeout, "%d", f->lease_timeout_s);
    child_start(&f->process, argv, 0);
    cr_assert(child_wait_line(&f->process, "event=store_ready", STORE_WAIT_MS));
}

void store_fixture_init(struct store_fixture *f, const char *pool_size, int lease_timeout_s)
{
    f->pool_size = pool_size;
    f->lease_timeout_s = lease_timeout_s;
    folder_make(f->folder);
    snprintf(f->socket, sizeof f->socket, "%s/kvstore.sock", f->folder);
    cr_assert_eq(loop_create(&f->loop), 0);
    start(f);
}

void store_fixture_kill(struct store_fixture *f)
{
    child_end(&f->process);
}

void store_fixture_restart(struct store_fixture *f)
{
    start(f);
}

void store_fixture_fini(struct store_fixture *f)
{
    if (f->process.pid > 0) {
        kill(f->process.pid, SIGTERM);
        cr_assert_eq(child_wait(&f->process, STORE_WAIT_MS), 0, "exit status; log:\n%s", f->process.log);
        cr_assert_lt(access(f->socket, F_OK), 0);
    }
    child_end(&f->process);
    loop_free(f->loop);
    folder_remove(f->folder);
}

struct kv_client *store_fixture_client(struct store_fixture *f, const char *name)
{
    const struct kv_client_config config = {.socket_path = f->socket, .name = name, .connect_timeout_us = STORE_WAIT_US};
    struct kv_store_info info;
    struct kv_client *client;
    struct error err;

    cr_assert_eq(kv_client_create(f->loop, &config, &client, &err), 0);
    kv_client_info(client, &info);
    cr_assert(info.connected, "%s", info.error.text);
    return client;
}

struct block_key store_key(uint32_t i)
{
    struct block_key key = {{0}};

    memcpy(key.bytes, &i, sizeof i);
    return key;
}

struct kv_reserve_block store_block(uint32_t i, uint32_t parent, uint32_t position)
{
    return (struct kv_reserve_block){
        .key = store_key(i), .parent = store_key(parent), .first = position == 0, .position = position, .length = STORE_BLOCK_BYTES};
}

void store_fill(const struct kv_lease *lease, uint32_t i)
{
    for (uint64_t b = 0; b < lease->length; b++)
        lease->data[b] = (uint8_t)(b * 31 + i * 7 + (b >> 8));
}

bool store_filled(const struct kv_lease *lease, uint32_t i)
{
    for (uint64_t b = 0; b < lease->length; b++) {
        if (lease->data[b] != (uint8_t)(b * 31 + i * 7 + (b >> 8)))
            return false;
    }
    return true;
}

void store_put(struct kv_client *client, uint32_t i, uint32_t parent, uint32_t position, struct kv_lease *ret_lease)
{
    const struct kv_reserve_block block = store_block(i, parent, position);
    enum kv_reserve_status status;

    cr_assert_eq(kv_client_reserve(client, &block, 1, STORE_WAIT_US, &status, ret_lease), 1);
    cr_assert_eq(status, KV_RESERVE_GRANTED, "block %u: status %d", i, status);
    store_fill(ret_lease, i);
    cr_assert_eq(kv_client_seal(client, &ret_lease, 1), 0);
}

int store_found(struct kv_client *client, uint32_t i, int n)
{
    struct block_key keys[256];
    struct kv_lease leases[256];
    int found;

    for (int k = 0; k < n; k++)
        keys[k] = store_key(i + (uint32_t)k);
    found = kv_client_lookup(client, keys, n, STORE_WAIT_US, leases);
    for (int k = 0; k < found; k++)
        cr_assert(store_filled(&leases[k], i + (uint32_t)k));
    if (found > 0)
        kv_client_release(client, leases, found);
    return found;
}

void store_await(struct store_wire *wire, bool (*holds)(const Tidepool__Store__StatsResult *stats), const char *what)
{
    uint64_t end_us = clock_now_us() + STORE_WAIT_US;

    while (!holds(store_wire_stats(wire)))
        cr_assert_lt(clock_now_us(), end_us, "never came true: %s", what);
}
