/* Shared by the files of worker/group only. */
#pragma once
#include "worker/group/rank_group.h"
#include "worker/group/rank_link.h"
#include "worker/group/rank_message.h"

enum {
    GROUP_GRACE_US = 10 * 1000 * 1000,            /* from a rank's death to the end of a process that does not end by itself */
    GROUP_CHILD_STOP_US = 5 * 1000 * 1000,        /* what a child gets to end when it is told to, */
    GROUP_CHILD_BROKEN_US = 2 * 1000 * 1000,      /* and when the group is at its end: one that hangs may be why */
    GROUP_LOAD_US_MAX = 24ll * 3600 * 1000 * 1000, /* loading a model */
};

struct rank_peer { /* a follower, as the leader sees it */
    struct rank_group *group;
    struct rank_link link;        /* fd -1 until it has come */
    pid_t pid;                    /* a child of this process; 0: somebody else's, or reaped */
    struct loop_source *source;
    struct rank_usage usage;      /* as it last said */
};

struct rank_group {
    struct rank_group_config config;
    int n_peers;
    struct rank_peer peers[COLLECTIVE_MAX_RANKS - 1]; /* rank r is peers[r - 1] */
    int listen_fd;                /* -1: none */
    char listen_path[128];
    struct rank_watch *watch;
    struct engine_peers agreement;
    bool used[RANK_SEQUENCES_MAX]; /* tags of live sequences */
    struct error failure;         /* why the group is at its end; "" while it is whole */
    struct loop *loop;
    struct loop_source *gone_source;
    bool drain;                   /* a follower has asked for it */
};

/* Writes down why, once, and breaks the communicator. Returns -EIO. */
int group_broken(struct rank_group *group, int rank, const char *why);
/* Receives a frame of the wanted type from a follower; Drain and Usage may come before it and are remembered. Errors of rank_link_receive and rank_message_parse, -EPROTO for another type. */
int peer_receive(struct rank_peer *peer, enum group_frame type, uint64_t timeout_us, struct rank_message *ret_message, struct error *err);
/* A connection of a user's own to a leader's socket, or a listening one: an address for the path. -ENAMETOOLONG. */
struct sockaddr_un;
int group_address(const char *path, struct sockaddr_un *ret_address);
/* -EPERM: the process at the other end is another user's. */
int group_check_user(int fd);
