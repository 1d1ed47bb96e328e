#include "kvstore/client/kv_client_private.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* A descriptor from the socket may be anything: only a memfd that has the size and cannot shrink is safe to touch. */
static int check_fd(int fd, uint64_t bytes, const char *what, struct error *err)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);

    if (fstat(fd, &st) < 0)
        return error_set(err, -errno, "%s: %s", what, strerror(errno));
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return error_set(err, -EPROTO, "%s: not a memfd sealed against shrinking", what);
    if ((uint64_t)st.st_size < bytes)
        return error_set(err, -EPROTO, "%s: %lld bytes instead of %llu", what, (long long)st.st_size, (unsigned long long)bytes);
    return 0;
}

int kv_mapping_create(int pool_fd, int stats_fd, uint64_t bytes, struct kv_mapping **ret_mapping, struct error *err)
{
    struct kv_mapping *mapping;
    void *base, *stats;
    int rc = check_fd(pool_fd, bytes, "the pool's descriptor", err);

    if (rc == 0)
        rc = check_fd(stats_fd, STATS_PAGE_BYTES, "the statistics page's descriptor", err);
    if (rc < 0)
        return rc;
    mapping = calloc(1, sizeof *mapping);
    if (!mapping)
        return error_set(err, -ENOMEM, "out of memory");
    mapping->fd = -1;
    base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, pool_fd, 0);
    if (base == MAP_FAILED) {
        rc = error_set(err, -errno, "mapping %llu bytes of the pool: %s", (unsigned long long)bytes, strerror(errno));
        goto fail;
    }
    mapping->base = base;
    mapping->bytes = bytes;
    stats = mmap(NULL, STATS_PAGE_BYTES, PROT_READ, MAP_SHARED, stats_fd, 0);
    if (stats == MAP_FAILED) {
        rc = error_set(err, -errno, "mapping the statistics page: %s", strerror(errno));
        goto fail;
    }
    mapping->stats = stats;
    if (mapping->stats->magic != STATS_PAGE_MAGIC || mapping->stats->version != STATS_PAGE_VERSION) {
        rc = error_set(err, -EPROTO, "the statistics page has another layout");
        goto fail;
    }
    *ret_mapping = mapping;
    return 0;
fail:
    kv_mapping_free(mapping);
    return rc;
}

void kv_mapping_free(struct kv_mapping *mapping)
{
    if (!mapping)
        return;
    if (mapping->stats)
        munmap(mapping->stats, STATS_PAGE_BYTES);
    if (mapping->on_unmap)
        mapping->on_unmap(mapping->base, mapping->arg);
    if (mapping->base)
        munmap(mapping->base, mapping->bytes);
    if (mapping->fd >= 0)
        close(mapping->fd);
    free(mapping);
}
