/* One store a socket: checks the folder, takes a lock file beside the socket (PATH.lock, left in place, empty) and removes what a killed store left. Comes
 * before anything else at start, so that a second store neither takes memory nor binds over the first one's endpoints. */
#pragma once
#include "proto/base/error.h"

/* The folder must belong to this user with mode 700; it is made if missing. The lock is held while the caller keeps the descriptor open.
 * -EADDRINUSE: another store runs; -EPERM, -ENAMETOOLONG, or the errno of a system call. */
int socket_claim(const char *socket_path, int *ret_lock_fd, struct error *err);
