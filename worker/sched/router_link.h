/* The worker's end of the wire to the router (proto/wire/engine.proto says who sends what when): one DEALER socket, Ready and heartbeats, epochs, and a
 * queue of its own for what ZeroMQ does not take at once. Nothing is lost without a word: a router that does not take its messages is taken for gone.
 * One thread, on the loop. */
#pragma once
#include "proto/base/error.h"
#include "proto/base/loop.h"
#include "proto/wire/engine.pb-c.h"
#include "proto/wire/frame.h"
#include <stdbool.h>
#include <stdint.h>

struct router_link;

/* Called from the loop. Messages are borrowed for the call. */
struct router_link_events {
    /* The router answered for the first time, or is another one now (`epoch` changed). */
    void (*connected)(void *arg);
    /* All requests of the router that was are void: it is silent, does not read, or another one has taken its place. */
    void (*lost)(void *arg, const char *why);
    void (*generate)(void *arg, uint64_t id, const Tidepool__Engine__Generate *message);
    void (*cancel)(void *arg, uint64_t id);
    void (*drain)(void *arg);
    /* Fill in what they know; the link sets name, boot_uuid, pid and epoch. Pointers must live until the next call. */
    void (*fill_ready)(void *arg, Tidepool__Engine__Ready *ready);
    void (*fill_heartbeat)(void *arg, Tidepool__Engine__Heartbeat *beat);
    void *arg;
};

struct router_link_config {
    const char *endpoint;  /* of the router's ROUTER socket */
    const char *name;      /* 1 to 63 printable characters */
    struct router_link_events events;
};

enum { ROUTER_LINK_OUT_MAX = 64 << 20 }; /* bytes that may wait for the router to take them */

int router_link_create(struct loop *loop, const struct router_link_config *config, struct router_link **ret_link, struct error *err);
/* Gives what was sent up to half a second to leave. NULL is fine. */
void router_link_free(struct router_link *link);
/* Sends Ready again, because what fill_ready says has changed. */
void router_link_announce(struct router_link *link);
/* Queues a message of a request; the caller has set its epoch to router_link_epoch. A failure is dealt with by the link: the router is lost then. */
void router_link_send(struct router_link *link, enum engine_frame type, uint64_t id, const ProtobufCMessage *message);
uint64_t router_link_epoch(const struct router_link *link); /* 0: not connected */
/* Messages that were malformed, of another epoch, or of an unknown type so far. */
uint64_t router_link_dropped(const struct router_link *link);
