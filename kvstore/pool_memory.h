/* The pool's memory: one memfd of mode 0600, filled at once so that no later access can fail, sealed against a change of its size (a client that
 * shrank it would kill the others with SIGBUS). The store hands the descriptor out and never maps it itself. */
#pragma once
#include "proto/base/error.h"
#include <stdint.h>

/* Creates and fills the memfd; takes about half a second a GiB. -ENOMEM with a text when memory or a limit is short, or the errno of a
 * system call. The caller closes the descriptor. */
int pool_memory_create(uint64_t bytes, int *ret_fd, struct error *err);
