#include "kvstore/memory_limits.h"

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

struct limit {
    uint64_t bytes;
    const char *name;
};

static void limit_lower(struct limit *limit, uint64_t bytes, const char *name)
{
    if (bytes < limit->bytes)
        *limit = (struct limit){bytes, name};
}

static FILE *open_below(const char *root, const char *path, const char *name)
{
    char full[PATH_MAX];

    if (snprintf(full, sizeof full, "%s%s%s", root, path, name) >= (int)sizeof full)
        return NULL;
    return fopen(full, "re");
}

/* A file that holds one number; "max" and what is not there count as no limit. */
static uint64_t read_number(const char *root, const char *folder, const char *name)
{
    FILE *f = open_below(root, folder, name);
    uint64_t value = UINT64_MAX;

    if (!f)
        return value;
    if (fscanf(f, "%lu", &value) != 1)
        value = UINT64_MAX;
    fclose(f);
    return value;
}

/* Sum of two `key value` lines of a memory.stat: file pages, which the kernel gives up before it kills. */
static uint64_t read_reclaimable(const char *root, const char *folder, const char *key1, const char *key2)
{
    FILE *f = open_below(root, folder, "/memory.stat");
    char key[64];
    uint64_t value, sum = 0;

    if (!f)
        return 0;
    while (fscanf(f, "%63s %lu", key, &value) == 2) {
        if (strcmp(key, key1) == 0 || strcmp(key, key2) == 0)
            sum += value;
    }
    fclose(f);
    return sum;
}

static int read_available(const char *root, struct limit *limit)
{
    FILE *f = open_below(root, "/proc/meminfo", "");
    char line[256];
    uint64_t kib;
    int rc = -EIO;

    if (!f)
        return -EIO;
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "MemAvailable: %lu kB", &kib) == 1) {
            limit_lower(limit, kib * 1024, "memory available on this host (MemAvailable)");
            rc = 0;
        }
    }
    fclose(f);
    return rc;
}

/* One level of the control groups: limit - used + what can be reclaimed. */
static void read_group(const char *root, const char *folder, bool v2, struct limit *limit)
{
    uint64_t max = read_number(root, folder, v2 ? "/memory.max" : "/memory.limit_in_bytes");
    uint64_t used = read_number(root, folder, v2 ? "/memory.current" : "/memory.usage_in_bytes");
    uint64_t reclaimable;

    /* Version 1 writes "no limit" as the largest multiple of a page. */
    if (max >= (uint64_t)INT64_MAX / 4096 * 4096 || used == UINT64_MAX)
        return;
    reclaimable = v2 ? read_reclaimable(root, folder, "inactive_file", "active_file")
                     : read_reclaimable(root, folder, "total_inactive_file", "total_active_file");
    used = used > reclaimable ? used - reclaimable : 0;
    limit_lower(limit, max > used ? max - used : 0, "memory left in this control group (cgroup)");
}

/* Walks from the group of this process up to the root. In a container the path may not be visible below the mount: its root is read all the same. */
static void read_group_path(const char *root, const char *mount, char *group, bool v2, struct limit *limit)
{
    char folder[PATH_MAX];

    for (;;) {
        char *slash;
        if (snprintf(folder, sizeof folder, "%s%s", mount, strcmp(group, "/") == 0 ? "" : group) < (int)sizeof folder)
            read_group(root, folder, v2, limit);
        slash = strrchr(group, '/');
        if (!slash || strcmp(group, "/") == 0)
            return;
        if (slash == group)
            slash[1] = '\0';
        else
            *slash = '\0';
    }
}

static void read_groups(const char *root, struct limit *limit)
{
    FILE *f = open_below(root, "/proc/self/cgroup", "");
    char line[PATH_MAX];

    if (!f)
        return;
    while (fgets(line, sizeof line, f)) {
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group)
            continue;
        *group++ = '\0';
        group[strcspn(group, "\n")] = '\0';
        if (controllers[1] == '\0')
            read_group_path(root, "/sys/fs/cgroup", group, true, limit);
        else if (strstr(controllers, "memory"))
            read_group_path(root, "/sys/fs/cgroup/memory", group, false, limit);
    }
    fclose(f);
}

int memory_limits_read(const struct memory_limits_source *source, uint64_t *ret_bytes, const char **ret_name, struct error *err)
{
    struct limit limit = {UINT64_MAX, ""};
    struct rlimit fsize;

    if (read_available(source->root, &limit) < 0)
        return error_set(err, -EIO, "%s/proc/meminfo cannot be read or has no MemAvailable", source->root);
    read_groups(source->root, &limit);
    if (getrlimit(RLIMIT_FSIZE, &fsize) == 0 && fsize.rlim_cur != RLIM_INFINITY)
        limit_lower(&limit, fsize.rlim_cur, "the limit on file sizes (RLIMIT_FSIZE, ulimit -f)");
    *ret_bytes = limit.bytes;
    *ret_name = limit.name;
    return 0;
}
