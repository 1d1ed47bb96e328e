/* Shared by the files of router/route only. */
#pragma once
#include "proto/wire/engine.pb-c.h"
#include "proto/wire/frame.h"
#include "router/route/prefix_index.h"
#include "router/route/route.h"
#include <protobuf-c/protobuf-c.h>
#include <sys/types.h>

enum {
    ROUTE_WORKERS_MAX = 256,
    ROUTE_IDENTITY_MAX = 255,
    ROUTE_NAME_MAX = 63,
    ROUTE_DESCRIPTION_MAX = 511,
    ROUTE_EOS_MAX = 64,
    ROUTE_BEATS_MISSED_MAX = 5,
    ROUTE_MALFORMED_MAX = 100,           /* messages of a worker before it is dropped */
    ROUTE_OUT_BYTES_MAX = 64 << 20,      /* waiting for one worker to take them */
    ROUTE_UNPACK_BYTES_MAX = 64 << 20,   /* memory of one unpacked message */
    ROUTE_DECODE_LOAD_TOKENS = 64,       /* what a decoding request counts beside prefill work */
    ROUTE_PREDICT_US = 5000000,
    ROUTE_ENDPOINT_MAX = 255,
    ROUTE_REQUEST_ID_MAX = 128,
    ROUTE_INDEX_ENTRIES_MAX = 16 << 20,
};

struct route_link { struct route_link *prev, *next; };

enum worker_state {
    WORKER_READY,
    WORKER_UNHEALTHY, /* beats, but its engine makes no progress */
    WORKER_DRAINING,  /* finishes what it has */
    WORKER_LOST,      /* silent or gone; remembered so that a return is noticed */
};

struct out_message {
    struct out_message *next;
    uint8_t header[FRAME_HEADER_BYTES];
    uint8_t *body;    /* owned */
    size_t len;
};

struct worker {
    struct route *route;
    enum worker_state state;
    uint8_t identity[ROUTE_IDENTITY_MAX];
    size_t n_identity;
    char name[ROUTE_NAME_MAX + 1], description[ROUTE_DESCRIPTION_MAX + 1];
    uint8_t boot_uuid[16], fingerprint[FINGERPRINT_BYTES];
    uint32_t context_length, vocab_size, max_running;
    uint32_t eos_ids[ROUTE_EOS_MAX], n_eos_ids;
    bool prefix_reuse, store_connected, busy;
    struct store_feed *feed;      /* shared by the workers of one store; or NULL */
    pid_t pid;
    struct loop_source *pid_source;
    /* liveness */
    uint64_t heard_us, progress, progress_us;
    uint32_t malformed;
    /* as it last reported */
    uint32_t n_running, n_prefilling, n_waiting;
    uint64_t device_bytes, device_peak_bytes, pool_bytes, pool_used_bytes;
    uint64_t page_cache_bytes, page_cache_used_bytes, page_cache_hits, page_cache_misses;
    /* as the router counts */
    struct route_link requests;   /* with this worker, oldest first */
    uint32_t n_inflight;
    uint64_t load_tokens, last_sent, dispatched;
    /* messages that ZeroMQ would not take yet */
    struct out_message *out_first, **out_last;
    size_t out_bytes;
};

enum request_place { REQUEST_QUEUED, REQUEST_SENT, REQUEST_MOVING };

struct route_request {
    struct route *route;
    struct route_job job;         /* id, stop_ids and logit_bias are owned copies */
    char id[ROUTE_REQUEST_ID_MAX + 1];
    enum request_place place;
    struct route_link link;       /* in the queue, a worker's list or the moving list */
    struct worker *worker;        /* REQUEST_SENT */
    struct worker *avoid;         /* failed it last */
    uint64_t wire_id;             /* of this attempt */
    struct route_request *wire_next; /* chain of the table by wire id */
    uint64_t submitted_us, queued_us;
    uint64_t load_tokens;         /* its share of the worker's */
    uint32_t max_tokens;          /* fixed when first sent */
    uint32_t *generated;          /* [n_generated] */
    uint32_t n_generated, cap_generated;
    uint32_t retries;
    bool prefilled_told, ended;   /* ended: the last of `generated` is a stop id */
    uint32_t *eos_ids, n_eos_ids; /* of the worker it was first sent to, with the caller's own */
};

enum { ROUTE_WIRE_BUCKETS = 4096 };

struct route {
    struct route_config config;
    void *zmq_context, *socket;
    struct loop_source *socket_source, *beat_timer, *dispatch_timer, *out_timer;
    uint64_t epoch, next_wire_id, next_dispatch;
    struct worker *workers[ROUTE_WORKERS_MAX];
    uint32_t n_workers;
    struct route_link queue, moving;
    uint32_t n_queued, n_running;
    uint64_t queued_tokens;
    struct route_request *by_wire_id[ROUTE_WIRE_BUCKETS];
    struct prefix_index *index;
    struct store_feed *feeds[PREFIX_STORES_MAX];
    struct route_counters counters;
    double seconds_per_request;   /* moving average, for Retry-After */
    bool same_host;               /* the endpoint is ipc: pids mean something */
};

/* -- worker_table.c -- */
struct worker *worker_find(struct route *route, const uint8_t *identity, size_t n);
struct worker *worker_add(struct route *route, const uint8_t *identity, size_t n);
void worker_free(struct worker *worker); /* has no requests */
/* Lost workers of that name, which has been taken up by `except`. */
void worker_forget_lost(struct route *route, const char *name, const struct worker *except);
bool worker_takes(const struct worker *worker); /* ready, with room */
const char *worker_state_name(enum worker_state state);
/* Its requests go to the moving list, from where request_settle_moved takes them. */
void worker_set_lost(struct worker *worker, const char *why);
void worker_set_unhealthy(struct worker *worker);

/* -- worker_link.c: the ROUTER socket -- */
int worker_link_open(struct route *route, struct error *err);
void worker_link_close(struct route *route);
/* Packs and sends, or keeps the message until ZeroMQ takes it. A worker that is gone, or whose backlog is too long, becomes lost. */
int worker_link_send(struct worker *worker, enum engine_frame type, uint64_t request_id, const ProtobufCMessage *message);
void worker_link_drop_backlog(struct worker *worker);

/* -- worker_ready.c -- */
void worker_on_ready(struct route *route, const uint8_t *identity, size_t n_identity, const uint8_t *body, size_t len);

/* -- worker_messages.c -- */
/* -EPROTO for a message that makes no sense. */
int worker_on_message(struct worker *worker, const struct frame_header *header, const uint8_t *body);

/* -- liveness.c -- */
int liveness_start(struct route *route);
void liveness_watch_pid(struct worker *worker);

/* -- request.c -- */
struct route_request *request_find(struct route *route, uint64_t wire_id);
void request_table_add(struct route_request *request);
void request_table_remove(struct route_request *request);
int request_create(struct route *route, const struct route_job *job, struct route_request **ret_request);
void request_free(struct route_request *request);
void request_queue(struct route_request *request, bool front);
/* Takes it out of whatever list it is in, and out of the counts. */
void request_unlink(struct route_request *request);
int request_append(struct route_request *request, uint32_t token);
bool request_is_stop(const struct route_request *request, uint32_t token);
/* The terminal callbacks; they free the request. */
void request_finish(struct route_request *request, const struct route_finished *finished);
void request_fail(struct route_request *request, enum route_failure failure, const char *text);
/* The worker could not finish it: again from the front of the queue, or the end of it. */
void request_retry(struct route_request *request, const char *why);
void request_settle_moved(struct route *route);

/* -- dispatch.c -- */
/* Runs the queue at the end of this turn. */
void dispatch_kick(struct route *route);
void dispatch_run(void *route);
void dispatch_expire(struct route *route, uint64_t now_us);
/* 0, or -EMSGSIZE with a text. */
int dispatch_check_length(uint32_t n_prompt, uint32_t max_tokens, uint32_t context_length, struct error *err);

/* -- store_feed.c -- */
struct store_feed *store_feed_get(struct route *route, const char *event_endpoint, const char *snapshot_endpoint);
int store_feed_number(const struct store_feed *feed);
void store_feed_tick(struct route *route, uint64_t now_us);
void store_feed_close_all(struct route *route);

/* -- lists -- */
static inline void route_list_init(struct route_link *head) { head->prev = head->next = head; }
static inline bool route_list_is_empty(const struct route_link *head) { return head->next == head; }
static inline void route_list_insert(struct route_link *after, struct route_link *link)
{
    link->prev = after;
    link->next = after->next;
    after->next->prev = link;
    after->next = link;
}
static inline void route_list_remove(struct route_link *link)
{
    link->prev->next = link->next;
    link->next->prev = link->prev;
    link->prev = link->next = link;
}
#define ROUTE_REQUEST_OF(link_) ((struct route_request *)((char *)(link_) - offsetof(struct route_request, link)))
