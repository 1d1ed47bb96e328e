/* The routing core with workers that speak the real protocol over real ZeroMQ sockets, on the same loop, and clients that record what they are told. One fixture a process; all
 * failures are Criterion assertions. */
#pragma once
#include "proto/base/loop.h"
#include "proto/wire/engine.pb-c.h"
#include "proto/wire/frame.h"
#include "router/route/route.h"
#include <stdbool.h>
#include <stdint.h>

enum { CONTEXT = 1000, EOS = 2 };

struct fake_worker {
    char name[16];
    void *socket;
    struct loop_source *source;
    uint64_t epoch, id;         /* id: of the last Generate */
    uint32_t prompt[2048], n_prompt, generated[256], n_generated, max_tokens, n_stop_ids;
    uint64_t seed;
    int n_generate, n_cancel, n_beats, n_acks;
    uint64_t cancelled_id;
};

struct client {
    struct route_request *request;
    uint32_t tokens[256], n_tokens;
    int n_prefilled, n_finished, n_failed;
    bool stopped;
    uint32_t retries, cached;
    enum route_failure failure;
    char text[256], worker[64];
};

extern char route_dir[64]; /* ipc endpoints: r is the route's; e and s are for a store */
extern void *zmq_context;
extern struct loop *loop;
extern struct route *route;

/* For TestSuite's init and fini. */
void route_fixture_open(void);
void route_fixture_close(void);
struct route_config route_defaults(void);
/* With another configuration; for the beginning of a test. */
void route_restart(struct route_config config);

/* Turns the loop until the condition holds. */
#define UNTIL(condition)                         \
    do {                                         \
        guard_arm();                             \
        while (!(condition) && guard_turn())     \
            ;                                    \
        cr_assert(condition, "timed out");       \
        guard_disarm();                          \
    } while (0)
void guard_arm(void);
bool guard_turn(void); /* turns the loop once; false when the time is over */
void guard_disarm(void);

/* -- workers -- */

/* `boot` tells lives of one name apart. */
void fake_connect(struct fake_worker *w, const char *name, int boot);
/* `store` not NULL: with the endpoints of a store in route_dir. Returns when the route has acknowledged it. */
void fake_ready_with(struct fake_worker *w, const char *store);
void fake_start(struct fake_worker *w, const char *name, int boot);
void fake_close(struct fake_worker *w);
void fake_send(struct fake_worker *w, enum engine_frame type, uint64_t id, const ProtobufCMessage *message);
void fake_beat(struct fake_worker *w, uint64_t progress, bool busy);
/* About the request of the last Generate. */
void fake_prefilled(struct fake_worker *w, uint32_t cached);
void fake_tokens_at(struct fake_worker *w, uint64_t epoch, uint32_t first_index, const uint32_t *ids, size_t n);
void fake_tokens(struct fake_worker *w, uint32_t first_index, uint32_t a, uint32_t b);
void fake_finished(struct fake_worker *w, uint32_t completion_tokens);
void fake_failed(struct fake_worker *w, Tidepool__Engine__Failed__Kind kind, const char *text);

/* -- requests -- */

/* As route_submit, whose message is in c->text. */
int client_submit_n(struct client *c, uint32_t n_prompt, uint32_t max_tokens);
/* 10 tokens of prompt, at most 6 of answer. */
void client_submit(struct client *c);
