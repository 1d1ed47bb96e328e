/* The store and its client library as they are meant to be used, over real processes. */
#include "tests/system/store_fixture.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { N_POOL_BLOCKS = (1 << 20) / STORE_BLOCK_BYTES };

static struct store_fixture f;

static void setup(void)
{
    store_fixture_init(&f, "1M", 30);
}

static void teardown(void)
{
    store_fixture_fini(&f);
}

TestSuite(kvstore_put, .init = setup, .fini = teardown, .timeout = 120);

/* The store rewrites its statistics page in the turn of its loop that follows the answer; each round trip lets it take turns. */
static uint64_t used_bytes_after_turns(struct kv_client *client, uint64_t expected)
{
    struct kv_store_info info = {0};
    for (int i = 0; i < 1000; i++) {
        kv_client_info(client, &info);
        if (info.pool_used_bytes == expected)
            break;
        store_found(client, 1, 1);
    }
    return info.pool_used_bytes;
}

Test(kvstore_put, test_block_of_one_client_is_read_by_another)
{
    struct kv_client *a = store_fixture_client(&f, "a"), *b = store_fixture_client(&f, "b");
    struct kv_lease leases[3], found[4];
    const struct block_key keys[4] = {store_key(1), store_key(2), store_key(3), store_key(4)};
    struct kv_store_info info;

    for (uint32_t i = 0; i < 3; i++)
        store_put(a, 1 + i, i, i, &leases[i]);
    cr_assert_eq(kv_client_lookup(b, keys, 4, STORE_WAIT_US, found), 3);
    for (uint32_t i = 0; i < 3; i++) {
        cr_assert(store_filled(&found[i], 1 + i));
        cr_assert_eq(found[i].checksum, leases[i].checksum);
        cr_assert_neq(found[i].data, leases[i].data); /* each client has a mapping of its own */
    }
    kv_client_info(b, &info);
    cr_assert_eq(info.pool_bytes, 1 << 20);
    cr_assert_eq(used_bytes_after_turns(b, 3 * STORE_BLOCK_BYTES), 3 * STORE_BLOCK_BYTES);
    kv_client_release(b, found, 3);
    kv_client_release(a, leases, 3);
    cr_assert_null(found[0].data);
    kv_client_free(a);
    kv_client_free(b);
}

Test(kvstore_put, test_lookup_of_nothing_and_of_too_much)
{
    static struct block_key keys[KV_BLOCKS_MAX + 1];
    static struct kv_lease leases[KV_BLOCKS_MAX + 1];
    struct kv_client *a = store_fixture_client(&f, "a");

    cr_assert_eq(kv_client_lookup(a, keys, 0, STORE_WAIT_US, leases), 0);
    cr_assert_eq(kv_client_lookup(a, keys, KV_BLOCKS_MAX, STORE_WAIT_US, leases), 0);
    cr_assert_eq(kv_client_lookup(a, keys, KV_BLOCKS_MAX + 1, STORE_WAIT_US, leases), -E2BIG);
    kv_client_free(a);
}

Test(kvstore_put, test_second_writer_of_a_key_is_told_so)
{
    struct kv_client *a = store_fixture_client(&f, "a"), *b = store_fixture_client(&f, "b");
    const struct kv_reserve_block block = store_block(1, 0, 0);
    enum kv_reserve_status status;
    struct kv_lease la = {0}, lb = {0}, *list[1] = {&la};

    cr_assert_eq(kv_client_reserve(a, &block, 1, STORE_WAIT_US, &status, &la), 1);
    cr_assert_eq(status, KV_RESERVE_GRANTED);
    cr_assert_eq(kv_client_reserve(b, &block, 1, STORE_WAIT_US, &status, &lb), 1);
    cr_assert_eq(status, KV_RESERVE_BUSY);
    cr_assert_eq(store_found(b, 1, 1), 0);
    store_fill(&la, 1);
    cr_assert_eq(kv_client_seal(a, list, 1), 0);
    cr_assert_eq(store_found(a, 1, 1), 1); /* the seal is done: requests of a client keep their order */
    cr_assert_eq(kv_client_reserve(b, &block, 1, STORE_WAIT_US, &status, &lb), 1);
    cr_assert_eq(status, KV_RESERVE_EXISTS);
    cr_assert(store_filled(&lb, 1));
    kv_client_free(a);
    kv_client_free(b);
}

Test(kvstore_put, test_full_pool_keeps_what_is_leased_and_evicts_the_rest)
{
    struct kv_client *a = store_fixture_client(&f, "a");
    static struct kv_lease leases[N_POOL_BLOCKS + 1];
    const struct kv_reserve_block more[2] = {store_block(1001, 0, 0), store_block(1002, 1001, 1)};
    enum kv_reserve_status status[2];
    struct kv_lease got[2];

    for (uint32_t i = 0; i < N_POOL_BLOCKS; i++)
        store_put(a, 1 + i, i, i, &leases[i]);
    cr_assert_eq(kv_client_reserve(a, more, 2, STORE_WAIT_US, status, got), 2);
    cr_assert(status[0] == KV_RESERVE_FULL && status[1] == KV_RESERVE_FULL);
    cr_assert_eq(store_found(a, 1, N_POOL_BLOCKS), N_POOL_BLOCKS);
    kv_client_release(a, leases, N_POOL_BLOCKS);
    cr_assert_eq(kv_client_reserve(a, more, 2, STORE_WAIT_US, status, got), 2);
    cr_assert(status[0] == KV_RESERVE_GRANTED && status[1] == KV_RESERVE_GRANTED);
    /* The leaves of the chain went, the beginning is still a prefix. */
    cr_assert_eq(store_found(a, 1, N_POOL_BLOCKS), N_POOL_BLOCKS - 2);
    kv_client_free(a);
}

static int async_result;
static enum kv_reserve_status async_status[2];
static struct kv_lease async_leases[2];

static void on_reserved(int result, const enum kv_reserve_status *status, const struct kv_lease *leases, int n, void *arg)
{
    cr_assert_eq(arg, &f);
    cr_assert_eq(n, result < 0 ? 0 : 2);
    for (int i = 0; i < n; i++) {
        async_status[i] = status[i];
        async_leases[i] = leases[i];
    }
    async_result = result;
    loop_stop(f.loop);
}

Test(kvstore_put, test_async_reserve_answers_through_the_loop_only)
{
    struct kv_client *a = store_fixture_client(&f, "a");
    const struct kv_reserve_block blocks[2] = {store_block(1, 0, 0), store_block(2, 1, 1)};
    struct kv_lease lease;

    store_put(a, 1, 0, 0, &lease);
    cr_assert_eq(kv_client_reserve_async(a, blocks, 2, on_reserved, &f), 0);
    /* A waiting call receives the answer on the way, but the callback stays for the loop. */
    cr_assert_eq(store_found(a, 1, 1), 1);
    cr_assert_eq(async_result, 0);
    cr_assert_eq(loop_run(f.loop), 0);
    cr_assert_eq(async_result, 2);
    cr_assert_eq(async_status[0], KV_RESERVE_EXISTS);
    cr_assert(store_filled(&async_leases[0], 1));
    cr_assert_eq(async_status[1], KV_RESERVE_GRANTED);
    kv_client_free(a);
}

Test(kvstore_put, test_async_reserve_ends_once_when_the_store_dies)
{
    struct kv_client *a = store_fixture_client(&f, "a");
    const struct kv_reserve_block blocks[2] = {store_block(1, 0, 0), store_block(2, 1, 1)};

    cr_assert_eq(kill(f.process.pid, SIGSTOP), 0);
    cr_assert_eq(kv_client_reserve_async(a, blocks, 2, on_reserved, &f), 0);
    store_fixture_kill(&f);
    cr_assert_eq(loop_run(f.loop), 0);
    cr_assert_eq(async_result, -ENOTCONN);
    kv_client_free(a);
}

Test(kvstore_put, test_corrupt_block_is_never_handed_out)
{
    struct kv_client *a = store_fixture_client(&f, "a"), *b = store_fixture_client(&f, "b");
    const struct kv_reserve_block block = store_block(2, 1, 1);
    struct kv_lease leases[3], again;
    struct kv_store_info info;
    enum kv_reserve_status status;

    for (uint32_t i = 0; i < 3; i++)
        store_put(a, 1 + i, i, i, &leases[i]);
    leases[1].data[STORE_BLOCK_BYTES - 1] ^= 1; /* a wild write of another process */
    cr_assert_eq(store_found(b, 1, 3), 1);
    kv_client_info(b, &info);
    cr_assert_eq(info.lookups_corrupt, 1);
    cr_assert_eq(store_found(b, 1, 3), 1);
    kv_client_info(b, &info);
    cr_assert_eq(info.lookups_corrupt, 1); /* the store has dropped it */
    cr_assert_eq(kv_client_reserve(b, &block, 1, STORE_WAIT_US, &status, &again), 1);
    cr_assert_eq(status, KV_RESERVE_GRANTED);
    leases[2].data[0] ^= 0x80;
    cr_assert_eq(kv_client_reserve(b, &(struct kv_reserve_block){.key = store_key(3), .parent = store_key(2), .position = 2, .length = STORE_BLOCK_BYTES},
                                   1, STORE_WAIT_US, &status, &again), 1);
    cr_assert_eq(status, KV_RESERVE_BUSY);
    cr_assert_null(again.data);
    kv_client_free(a);
    kv_client_free(b);
}

Test(kvstore_put, test_descriptors_are_private_and_sealed)
{
    struct store_wire wire;
    struct stat st;
    char path[64];
    int fd;

    store_wire_open(&wire, f.socket);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(fstat(wire.fds[i], &st), 0);
        cr_assert_eq(st.st_mode & 0777, 0600);
        cr_assert_lt(ftruncate(wire.fds[i], 0), 0);
        cr_assert_eq(errno, EPERM);
    }
    cr_assert_eq(st.st_size, 4096);
    cr_assert_eq(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, wire.fds[1], 0), MAP_FAILED);
    snprintf(path, sizeof path, "/proc/self/fd/%d", wire.fds[1]);
    fd = open(path, O_RDWR | O_CLOEXEC);
    cr_assert(fd < 0 || mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
    cr_assert_neq(mmap(NULL, 4096, PROT_READ, MAP_SHARED, wire.fds[1], 0), MAP_FAILED);
    store_wire_close(&wire);
}

Test(kvstore_put, test_nothing_of_the_pool_is_left_behind)
{
    struct kv_client *a = store_fixture_client(&f, "a");
    struct kv_lease lease;
    char line[512];
    FILE *maps;

    store_put(a, 1, 0, 0, &lease);
    kv_client_release(a, &lease, 1);
    kv_client_free(a);
    maps = fopen("/proc/self/maps", "re");
    while (fgets(line, sizeof line, maps))
        cr_assert_null(strstr(line, "tidepool-"), "%s", line);
    fclose(maps);
    for (int fd = 3; fd < 256; fd++) {
        char path[64], target[256];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(path, target, sizeof target - 1);
        if (n > 0) {
            target[n] = '\0';
            cr_assert_null(strstr(target, "tidepool-"), "%s", target);
        }
    }
}
