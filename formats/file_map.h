/* A regular file mapped read-only, as a whole. The mapping is private: another process that writes to the file may still be seen, and one that
 * truncates it ends this process with SIGBUS, so model files are replaced by rename and not rewritten in place. Any thread may read. */
#pragma once
#include "proto/base/error.h"
#include <stddef.h>

struct file_map {
    const void *data; /* NULL when empty or closed */
    size_t size;      /* bytes */
};

/* Errors: the errno of open, fstat or mmap; -EINVAL when it is no regular file. An empty file gives an empty map. */
int file_map_open(const char *path, struct file_map *ret_map, struct error *err);
void file_map_close(struct file_map *map); /* leaves an empty map */
