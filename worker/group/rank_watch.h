/* Notices when another process of the group is gone, also while this one's thread computes or waits in a collective: a thread that does nothing but watch the sockets. It breaks the
 * communicator, so that the wait ends, and makes a descriptor readable, so that the loop ends. A process that does not end by itself within `grace_us` of that is ended here. */
#pragma once
#include <stdint.h>

struct rank_watch;
struct collective;
struct collective_ops;

struct rank_watch_config {
    const int *fds;    /* [n] sockets, read by their owner; not closed before rank_watch_free */
    int n;
    uint64_t grace_us; /* 0: as long as it likes, until rank_watch_limit */
};

/* -ENOMEM, or the errno of a system call. */
int rank_watch_create(const struct rank_watch_config *config, struct rank_watch **ret_watch);
/* Ends the thread. NULL is fine. */
void rank_watch_free(struct rank_watch *watch);
/* Readable for ever once a peer is gone, or rank_watch_trip was called. */
int rank_watch_fd(const struct rank_watch *watch);
/* The number in `fds` of the first peer that is gone, or -1. Any thread. */
int rank_watch_gone(const struct rank_watch *watch);
/* What it breaks; NULL before the communicator is closed. Broken at once if a peer is gone already. */
void rank_watch_collective(struct rank_watch *watch, const struct collective_ops *ops, struct collective *collective);
/* From now on a process that does not end by itself is ended. */
void rank_watch_limit(struct rank_watch *watch, uint64_t grace_us);
/* The owner has found out itself that the group is at its end. */
void rank_watch_trip(struct rank_watch *watch);
