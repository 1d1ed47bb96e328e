#include "tests/bench/gpu/bench_pool.h"
#include "kvstore/pool.h"
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { FILL_THREADS_MAX = 64 };

struct kv_client {
    struct pool pool;
    struct lease_owner owner;
    const struct device_ops *dev;
    struct device *device;
    uint8_t *base;
    uint64_t bytes;
    bool registered;
};

/* ---- memory ---- */

struct fill {
    uint8_t *base;
    uint64_t bytes;
    int error;
};

static void *fill_thread(void *arg)
{
    struct fill *f = arg;
    f->error = madvise(f->base, f->bytes, MADV_POPULATE_WRITE) < 0 ? errno : 0;
    return NULL;
}

static int fill(uint8_t *base, uint64_t bytes, int n_threads)
{
    pthread_t threads[FILL_THREADS_MAX];
    struct fill fills[FILL_THREADS_MAX];
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), piece = (bytes / (uint64_t)n_threads + page - 1) / page * page;
    int n = 0, error = 0;
    for (uint64_t at = 0; at < bytes; at += piece) {
        fills[n] = (struct fill){.base = base + at, .bytes = bytes - at < piece ? bytes - at : piece};
        if (pthread_create(&threads[n], NULL, fill_thread, &fills[n]) != 0) {
            error = EAGAIN;
            break;
        }
        n++;
    }
    for (int i = 0; i < n; i++) {
        pthread_join(threads[i], NULL);
        error = fills[i].error ? fills[i].error : error;
    }
    return -error;
}

static int map(struct kv_client *store, int n_threads, struct error *err)
{
    const int fd = memfd_create("tidepool-bench", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return error_set(err, -errno, "memfd_create: %s", strerror(errno));
    int r = ftruncate(fd, (off_t)store->bytes) < 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0 ? -errno : 0;
    void *base = r < 0 ? MAP_FAILED : mmap(NULL, store->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    r = r == 0 && base == MAP_FAILED ? -errno : r;
    close(fd);
    if (r < 0)
        return error_set(err, r, "a pool of %llu bytes: %s", (unsigned long long)store->bytes, strerror(-r));
    store->base = base;
    r = fill(store->base, store->bytes, n_threads);
    return r < 0 ? error_set(err, r, "a pool of %llu bytes cannot be filled: %s", (unsigned long long)store->bytes, strerror(-r)) : 0;
}

/* Nobody listens. */
static void on_stored(void *arg, const struct block_key *key, uint64_t *mark)
{
    (void)arg, (void)key, (void)mark;
}

static void on_evicted(void *arg, const struct block_key *key, const uint64_t *mark)
{
    (void)arg, (void)key, (void)mark;
}

int bench_pool_create(const struct bench_pool_params *params, struct kv_client **ret_store, struct bench_pool_times *ret_times, struct error *err)
{
    static const struct pool_listener listener = {.stored = on_stored, .evicted = on_evicted};
    struct kv_client *store = calloc(1, sizeof(*store));
    uint64_t start = clock_now_ns();
    if (!store)
        return error_set(err, -ENOMEM, "no memory for the pool");
    ASSERT(params->n_threads >= 1 && params->n_threads <= FILL_THREADS_MAX);
    store->dev = params->dev;
    store->device = params->device;
    store->bytes = params->bytes / EXTENT_GRANULE * EXTENT_GRANULE;
    lease_owner_init(&store->owner);
    int r = pool_init(&store->pool, store->bytes, &listener);
    if (r < 0) {
        free(store);
        return error_set(err, r, "a pool of %llu bytes: %s", (unsigned long long)params->bytes, strerror(-r));
    }
    r = map(store, params->n_threads, err);
    if (r < 0)
        goto fail;
    ret_times->fill_s = (double)(clock_now_ns() - start) / 1e9;
    start = clock_now_ns();
    r = store->dev->host_register(store->device, store->base, store->bytes, NULL, NULL);
    if (r < 0) {
        error_set(err, r, "the pool cannot be registered with the device: %s", strerror(-r));
        goto fail;
    }
    store->registered = true;
    ret_times->register_s = (double)(clock_now_ns() - start) / 1e9;
    *ret_store = store;
    return 0;
fail:
    bench_pool_free(store);
    return r;
}

void bench_pool_free(struct kv_client *store)
{
    if (!store)
        return;
    ASSERT(store->owner.n_leases == 0);
    if (store->registered)
        store->dev->host_unregister(store->device, store->base);
    if (store->base)
        munmap(store->base, store->bytes);
    pool_fini(&store->pool);
    free(store);
}

uint64_t bench_pool_used(const struct kv_client *store)
{
    return store->pool.extents.bytes_taken;
}

/* ---- the client's calls ---- */

static struct kv_lease lease_of(const struct kv_client *store, const struct pool_extent *extent)
{
    return (struct kv_lease){.id = extent->lease, .data = store->base + extent->offset, .length = extent->length};
}

int kv_client_lookup(struct kv_client *client, const struct block_key *keys, int n, uint64_t deadline_us, struct kv_lease *ret_leases)
{
    (void)deadline_us;
    struct pool_extent *extents = calloc((size_t)n + 1, sizeof(*extents));
    if (!extents)
        return -ENOMEM;
    const int found = pool_lookup(&client->pool, &client->owner, keys, n, extents);
    for (int i = 0; i < found; i++)
        ret_leases[i] = lease_of(client, &extents[i]);
    free(extents);
    return found;
}

static enum kv_reserve_status reserve(struct kv_client *client, const struct kv_reserve_block *block, struct kv_lease *ret_lease)
{
    static const enum kv_reserve_status status[] = {[POOL_RESERVE_GRANTED] = KV_RESERVE_GRANTED, [POOL_RESERVE_EXISTS] = KV_RESERVE_EXISTS,
                                                    [POOL_RESERVE_BUSY] = KV_RESERVE_BUSY, [POOL_RESERVE_FULL] = KV_RESERVE_FULL};
    const struct pool_reserve_request request = {.key = block->key, .parent = block->parent, .first = block->first, .position = block->position, .length = block->length};
    struct pool_extent extent;
    const enum pool_reserve_status r = pool_reserve(&client->pool, &client->owner, &request, &extent);
    *ret_lease = r == POOL_RESERVE_GRANTED || r == POOL_RESERVE_EXISTS ? lease_of(client, &extent) : (struct kv_lease){0};
    return status[r];
}

int kv_client_reserve(struct kv_client *client, const struct kv_reserve_block *blocks, int n, uint64_t deadline_us, enum kv_reserve_status *ret_status, struct kv_lease *ret_leases)
{
    (void)deadline_us;
    for (int i = 0; i < n; i++)
        ret_status[i] = reserve(client, &blocks[i], &ret_leases[i]);
    return n;
}

/* Nothing is asynchronous here: the answer comes before the call returns, as it may from a real store. */
int kv_client_reserve_async(struct kv_client *client, const struct kv_reserve_block *blocks, int n, kv_reserve_cb *cb, void *arg)
{
    enum kv_reserve_status status;
    struct kv_lease lease;
    if (n != 1)
        return -E2BIG; /* the engine moves one block at a time */
    status = reserve(client, blocks, &lease);
    cb(1, &status, &lease, 1, arg);
    return 0;
}

int kv_client_seal(struct kv_client *client, struct kv_lease *const *leases, int n)
{
    for (int i = 0; i < n; i++)
        if (!pool_seal(&client->pool, &client->owner, leases[i]->id, 0))
            return -EINVAL;
    return 0;
}

static void end_leases(struct kv_client *client, struct kv_lease *leases, int n, bool (*end)(struct pool *, struct lease_owner *, uint64_t))
{
    for (int i = 0; i < n; i++) {
        if (leases[i].id)
            ASSERT(end(&client->pool, &client->owner, leases[i].id));
        leases[i] = (struct kv_lease){0};
    }
}

void kv_client_release(struct kv_client *client, struct kv_lease *leases, int n)
{
    end_leases(client, leases, n, pool_release);
}

void kv_client_discard(struct kv_client *client, struct kv_lease *leases, int n)
{
    end_leases(client, leases, n, pool_discard);
}
