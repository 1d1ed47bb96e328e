/* One client of the store, without its socket: bytes in, bytes out. Parses frames, checks every number, calls the pool. What a client may make the
 * store hold is bounded: SESSION_IN_MAX bytes of input, an expanded message, and so much output that a client that does not read its answers is not
 * read from either. One thread. */
#pragma once
#include "kvstore/pool.h"
#include "proto/base/buf.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SESSION_IN_MAX = 1 << 20,    /* bytes of one frame */
    SESSION_OUT_PAUSE = 1 << 18, /* with more unsent bytes than this no further request is handled */
    SESSION_NAME_MAX = 64,
};

/* What all sessions of a store share. */
struct session_env {
    struct pool *pool;
    uint8_t store_uuid[16];
    uint64_t lease_timeout_ms;
    const char *event_endpoint, *snapshot_endpoint;
    void (*stats)(void *arg, uint64_t *ret_fields /* [STATS_FIELD_COUNT] */);
    void *arg;
    uint64_t protocol_errors;
};

enum session_state { SESSION_NEW, SESSION_WELCOMED, SESSION_FAILED };

struct session {
    struct session_env *env;
    struct lease_owner owner;
    struct buf in, out;
    enum session_state state;
    char name[SESSION_NAME_MAX + 1];
    char failure[160]; /* why the state is SESSION_FAILED */
};

void session_init(struct session *session, struct session_env *env);
void session_fini(struct session *session); /* the owner's leases are ended by then */
/* Takes n bytes from the client and handles the requests that are complete. -EPROTO: the client broke the protocol; `out` ends with a
 * Failure and no more input is taken. -ENOMEM is treated alike. */
int session_receive(struct session *session, const void *data, size_t n);
/* Handles requests that were left because of SESSION_OUT_PAUSE, after output was sent. As session_receive. */
int session_resume(struct session *session);
/* Whether the session wants more input now. */
bool session_wants_input(const struct session *session);
