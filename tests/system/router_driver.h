/* The router's end of the wire for tests of workers: a ROUTER socket, acknowledgements, heartbeats, requests, and a record of all answers. */
#pragma once
#include "proto/wire/engine.pb-c.h"
#include "proto/wire/frame.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { DRIVER_WORKERS_MAX = 4, DRIVER_REQUESTS_MAX = 24, DRIVER_TOKENS_MAX = 40000, DRIVER_PROMPT_MAX = 40000, DRIVER_WAIT_MS = 240000, DRIVER_HEARTBEAT_MS = 100 };

struct driver_worker {
    char identity[256];
    size_t n_identity;
    char name[64];
    uint32_t context_length, vocab_size, eos_id;
    uint8_t store_uuid[16];
    bool has_store;
    int n_ready;                       /* Ready messages so far */
    bool has_beat;
    Tidepool__Engine__Heartbeat beat;  /* the last one */
};

struct driver_request {
    uint32_t tokens[DRIVER_TOKENS_MAX];
    float logprobs[DRIVER_TOKENS_MAX];
    int n_tokens, first_index, n_top;  /* n_top: alternatives of the last token */
    bool prefilled, finished, failed;
    int n_prompt_logprobs;
    uint32_t prompt_tokens, cached_tokens, completion_tokens, stop_id;
    uint64_t page_hits, page_misses, bytes_attended, pages_attended;
    Tidepool__Engine__FinishReason reason;
    Tidepool__Engine__Failed__Kind kind;
    char text[256];
};

struct driver {
    void *context, *socket;
    uint64_t epoch, beat_us;
    bool silent;                       /* neither acknowledges nor beats */
    struct driver_worker workers[DRIVER_WORKERS_MAX];
    int n_workers;
    struct driver_request requests[DRIVER_REQUESTS_MAX]; /* by request id */
};

/* A request: what is 0 is not asked for. */
struct driver_ask {
    int n_prompt, max_tokens;
    uint32_t prompt_seed;      /* of the prompt's tokens, which are repeatable */
    float temperature;
    uint64_t seed;
    uint32_t stop_id;
    const uint32_t *generated; /* [n_generated] first tokens of the answer, made elsewhere */
    int n_generated, n_logprobs;
    bool no_cache, prompt_logprobs;
};

void driver_open(struct driver *d, const char *endpoint);
void driver_close(struct driver *d);
/* Handles messages for up to `ms`, or until the condition holds (NULL: the whole time). Returns whether it held. */
bool driver_pump(struct driver *d, bool (*holds)(struct driver *d, uint64_t arg), uint64_t arg, int ms);
/* The worker of that name, once it is ready. Fails the test at a deadline. */
struct driver_worker *driver_worker(struct driver *d, const char *name);
void driver_send(struct driver *d, struct driver_worker *w, enum engine_frame type, uint64_t id, const ProtobufCMessage *message);
void driver_send_raw(struct driver *d, struct driver_worker *w, const void *header, size_t n_header, const void *body, size_t n_body);
/* Sends the request; its n_prompt is at most DRIVER_PROMPT_MAX. */
void driver_ask(struct driver *d, struct driver_worker *w, uint64_t id, const struct driver_ask *ask);
/* Waits until the request has finished or failed; fails the test at a deadline. */
struct driver_request *driver_end(struct driver *d, uint64_t id);
/* Waits until it has n tokens. */
void driver_tokens(struct driver *d, uint64_t id, int n);
void driver_cancel(struct driver *d, struct driver_worker *w, uint64_t id);
/* Waits until a heartbeat of the worker that comes from here on says that it has nothing to do. */
void driver_idle(struct driver *d, struct driver_worker *w);
/* The n tokens of `a` from `from` on are the first ones of `b`, their log-probabilities within `tolerance`. */
void driver_expect_same(const struct driver_request *a, int from, const struct driver_request *b, int n, float tolerance);
