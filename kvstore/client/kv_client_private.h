/* Shared by the files of kvstore/client only. */
#pragma once
#include "kvstore/client/kv_client.h"
#include "proto/wire/stats_page.h"
#include "proto/base/buf.h"
#include <protobuf-c/protobuf-c.h>
#include <stdint.h>

enum {
    KV_FDS_MAX = 2,                 /* pool, statistics page */
    KV_REQUEST_BACKLOG = 1 << 20,   /* unsent bytes beyond which no new lookup or reservation is taken */
    KV_OUT_MAX = 64 << 20,          /* releases and seals beyond that: the store is taken for broken. 64 MiB are 6 million leases */
    KV_IN_MAX = 2 << 20,            /* bytes of one answer; 4096 extents are 190 KB */
    KV_EXPANDED_MAX = 4 << 20,      /* bytes of an unpacked answer */
    KV_PENDING_MAX = 1024,          /* lookups and reservations that wait for an answer */
};

/* One store's pool in this process. Lives until the client turned to another store and the last lease is released. */
struct kv_mapping {
    struct kv_mapping *next;        /* in the client's list */
    uint8_t *base;
    uint64_t bytes;
    struct stats_page *stats;       /* mapped read-only */
    uint64_t n_leases;
    int fd;                         /* the socket, if this side gave it up: closing it earlier would end the leases */
    void (*on_unmap)(void *base, void *arg); /* NULL: nobody was told of it */
    void *arg;
};

/* Maps both descriptors after checking them; they stay the caller's. -EPROTO, -ENOMEM or the errno of a system call. */
int kv_mapping_create(int pool_fd, int stats_fd, uint64_t bytes, struct kv_mapping **ret_mapping, struct error *err);
void kv_mapping_free(struct kv_mapping *mapping); /* NULL is fine */

enum kv_state { KV_DISCONNECTED, KV_GREETING, KV_CONNECTED };

enum kv_pending_kind { KV_PENDING_LOOKUP, KV_PENDING_RESERVE };

/* A lookup or reservation from its sending to the taking of its result. */
struct kv_pending {
    struct kv_pending *next;
    uint64_t id;
    enum kv_pending_kind kind;
    int n;                          /* keys or blocks asked for */
    bool done;                      /* `result` is set; no longer in client->waiting */
    bool abandoned;                 /* nobody takes the result: leases in it are released */
    int result;                     /* as of the call */
    kv_reserve_cb *cb;              /* NULL: a waiting call */
    void *arg;
    enum kv_reserve_status *status; /* [n], reservations */
    struct kv_lease leases[];       /* [n] */
};

struct kv_pending_list {
    struct kv_pending *first, **last; /* last: the link to append at */
    int n;
};

struct kv_client {
    struct loop *loop;
    char *socket_path, *name;
    uint64_t connect_timeout_us;
    void (*on_state)(bool connected, void *arg);
    int (*on_map)(void *base, uint64_t bytes, void *arg);
    void (*on_unmap)(void *base, void *arg);
    void *arg;

    enum kv_state state;
    int fd;                          /* -1: none */
    int fds[KV_FDS_MAX], n_fds;      /* received, not yet mapped */
    struct loop_source *fd_source;
    struct loop_source *retry_timer; /* DISCONNECTED: next attempt; GREETING: gives up */
    struct loop_source *wake_timer;  /* delivers finished calls and state changes from the loop */
    struct loop_source *beat_timer;  /* CONNECTED: says something now and then */
    uint64_t backoff_us, beat_us;
    bool sent_since_beat;
    uint64_t generation, told_generation; /* counts connections; what on_state said last, 0: not connected */
    struct buf in, out;
    uint64_t next_id;
    struct kv_pending_list waiting, finished;

    struct kv_mapping *mappings;     /* all */
    struct kv_mapping *current;      /* of the connected store, or NULL */
    uint8_t store_uuid[16];
    char event_endpoint[256], snapshot_endpoint[256];
    uint64_t lookups_corrupt;
    struct error error;
};

/* kv_connection.c */
int kv_connect(struct kv_client *client);              /* sends Hello; negative: no store there */
void kv_disconnect(struct kv_client *client, int error, const char *why); /* all waiting calls end with -ENOTCONN */
int kv_flush(struct kv_client *client);                /* sends what can be sent; negative: disconnected */
/* Sends and receives until pred is true. 0, -ETIMEDOUT, -ENOTCONN. */
int kv_wait(struct kv_client *client, bool (*pred)(const struct kv_client *client, const void *arg), const void *arg, uint64_t deadline_us);
/* Appends a request to the output and tries to send it. Negative: not sent, or disconnected. */
int kv_send(struct kv_client *client, uint16_t type, uint64_t id, const ProtobufCMessage *message);
void kv_unlease(struct kv_lease *lease);               /* local part of a release; zeroes the lease */
void kv_mapping_drop_unused(struct kv_client *client);

/* kv_requests.c */
/* An answer of the store. -EPROTO: it makes no sense. */
int kv_answer(struct kv_client *client, uint16_t type, uint64_t id, const uint8_t *body, size_t n);
void kv_finish(struct kv_client *client, struct kv_pending *pending, int result); /* takes it from `waiting` */
void kv_deliver(struct kv_client *client);             /* calls back for finished async calls */

void kv_pending_append(struct kv_pending_list *list, struct kv_pending *pending);
struct kv_pending *kv_pending_pop(struct kv_pending_list *list);
