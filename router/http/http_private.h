/* Shared by the files of router/http only. */
#pragma once
#include "proto/base/buf.h"
#include "router/http/http_exchange.h"
#include "router/http/http_server.h"
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/http.h>
#include <event2/keyvalq_struct.h>
#include <event2/listener.h>
#include <netinet/in.h>

enum {
    HTTP_BACKLOG = 4096,              /* of the listening socket */
    HTTP_PIPELINED_BYTES_MAX = 65536, /* read ahead while a stream is open */
    HTTP_STREAM_PENDING_MAX = 8 << 20, /* bytes of one stream gathered in one loop turn */
    HTTP_REQUEST_ID_MAX = 128,
};

struct http_link { /* of an intrusive list with a head */
    struct http_link *prev, *next;
};

struct http_conns;

struct http_server {
    struct http_server *next;        /* of the process's */
    struct loop *loop;
    struct http_config config;
    struct evhttp *evhttp;
    struct evconnlistener *listener; /* owned by evhttp once bound */
    struct http_conns *conns;
    struct loop_source *resume_timer; /* accepting again after running out of descriptors */
    struct loop_source *flush_timer;  /* armed for the end of the turn while `dirty` is not empty */
    struct loop_source *sweep_timer;  /* once a second */
    struct http_link open;            /* every exchange */
    struct http_link dirty;           /* streams with pending bytes */
    struct http_link streams;         /* streams that have begun */
    size_t n_open;
    uint64_t n_cut, next_id;
    uint64_t id_salt;                 /* makes request ids differ between processes */
    uint16_t port;
    bool draining;
};

struct http_exchange {
    struct http_server *server;
    struct evhttp_request *req;      /* evhttp's */
    struct evhttp_connection *evcon; /* evhttp's */
    struct loop_source *closed;      /* the peer hung up */
    http_gone_cb *gone;
    void *gone_arg;
    uint64_t start_us;
    uint64_t quiet_since_us;         /* of a stream: when something was last sent */
    uint64_t stalled_since_us;       /* 0: the reader keeps up */
    struct buf pending;              /* of a stream: bytes of this loop turn */
    struct http_link open, dirty, streams;
    bool streaming, overflowed;
    char id[HTTP_REQUEST_ID_MAX + 1];
};

/* -- http_exchange.c -- */
/* Wraps a request and hands it on; on failure the request has been answered. */
struct http_exchange *http_exchange_create(struct http_server *server, struct evhttp_request *req);
/* Frees the exchange and forgets the evhttp objects, which live on. */
void http_exchange_detach(struct http_exchange *exchange);
/* Closes the connection: the gone callback is called and everything is freed. */
void http_exchange_cut(struct http_exchange *exchange);
void http_exchange_set_common_headers(struct http_exchange *exchange);

/* -- http_stream.c -- */
void http_stream_flush_dirty(struct http_server *server);
void http_stream_sweep(struct http_server *server);

/* -- http_conn.c: connections by descriptor, for deadlines on requests that trickle in -- */
int http_conns_create(struct http_server *server, struct http_conns **ret_conns);
void http_conns_free(struct http_conns *conns);
struct bufferevent *http_conns_accept(struct event_base *base, void *conns); /* evhttp's bufferevent factory */
void http_conns_busy(struct http_conns *conns, int fd);     /* a whole request was read */
void http_conns_flushing(struct http_conns *conns, int fd); /* the reply is written, not yet sent */
void http_conns_idle(struct http_conns *conns, int fd, bool more); /* the reply was sent; `more`: the next request has begun to arrive */
/* True if a NUL byte ever arrived: evhttp would cut a header's value there and go on, and no request of this API has one. */
bool http_conns_saw_nul(struct http_conns *conns, int fd);
void http_conns_sweep(struct http_conns *conns);
size_t http_conns_n_active(const struct http_conns *conns); /* with a request in hand or a reply not yet sent */

/* -- http_guard.c -- */
/* NULL if the headers are sound, else why they are refused. */
const char *http_guard_check(struct evhttp_request *req);

/* -- lists -- */
static inline void http_list_init(struct http_link *head)
{
    head->prev = head->next = head;
}
static inline bool http_list_linked(const struct http_link *link)
{
    return link->next != NULL && link->next != link;
}
static inline void http_list_add(struct http_link *head, struct http_link *link)
{
    link->prev = head->prev;
    link->next = head;
    head->prev->next = link;
    head->prev = link;
}
static inline void http_list_remove(struct http_link *link)
{
    if (!http_list_linked(link))
        return;
    link->prev->next = link->next;
    link->next->prev = link->prev;
    link->prev = link->next = link;
}
#define HTTP_LIST_OWNER(link, field) ((struct http_exchange *)((char *)(link) - offsetof(struct http_exchange, field)))
