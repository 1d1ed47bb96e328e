/* How much memory a pool may take: what the host has available, what the control groups of this process (v1 or v2, each level) leave, and the limit
 * on the size of files, which holds for a memfd too. Filling more would call the out-of-memory killer instead of returning an error. */
#pragma once
#include "proto/base/error.h"
#include <stdint.h>

/* Where to read: "" for the real system, or the folder of a test that holds proc/ and sys/. */
struct memory_limits_source {
    const char *root;
};

/* The least of all limits in bytes. `ret_name` (static text) says which one it is. -EIO when the system cannot be read. */
int memory_limits_read(const struct memory_limits_source *source, uint64_t *ret_bytes, const char **ret_name, struct error *err);
