#include "kvstore/pool_memory.h"

#include "kvstore/memory_limits.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Left to the rest of the host beside the pool: page tables and the store's own index. */
#define MARGIN_BYTES (64ull << 20)

static int check_limits(uint64_t bytes, struct error *err)
{
    const struct memory_limits_source real = {.root = ""};
    const char *name;
    uint64_t limit;
    int rc = memory_limits_read(&real, &limit, &name, err);

    if (rc < 0)
        return rc;
    if (bytes > limit || limit - bytes < MARGIN_BYTES)
        return error_set(err, -ENOMEM, "--pool-size %.1f MiB does not fit: %s allows %.1f MiB, of which %.0f MiB stay free; choose a smaller pool",
                         (double)bytes / (1 << 20), name, (double)limit / (1 << 20), (double)MARGIN_BYTES / (1 << 20));
    return 0;
}

int pool_memory_create(uint64_t bytes, int *ret_fd, struct error *err)
{
    int fd = -1, rc = check_limits(bytes, err);

    if (rc < 0)
        return rc;
    fd = memfd_create("tidepool-pool", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return error_set(err, -errno, "memfd_create: %s", strerror(errno));
    /* A memfd begins as 0777: whoever gets a read-only descriptor, even another user, could open it again for writing through /proc. */
    if (fchmod(fd, 0600) < 0) {
        rc = error_set(err, -errno, "fchmod of the pool: %s", strerror(errno));
        goto fail;
    }
    rc = -posix_fallocate(fd, 0, (off_t)bytes);
    if (rc < 0) {
        rc = error_set(err, rc, "--pool-size %.1f MiB: the memory cannot be allocated: %s", (double)bytes / (1 << 20), strerror(-rc));
        goto fail;
    }
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0) {
        rc = error_set(err, -errno, "sealing the size of the pool: %s", strerror(errno));
        goto fail;
    }
    *ret_fd = fd;
    return 0;
fail:
    close(fd);
    return rc;
}
