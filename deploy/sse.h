/* Server-sent events of the OpenAI API, read as they arrive: lines split over pieces are put together. Single-threaded. */
#pragma once
#include "proto/base/buf.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct chat_usage {
    int64_t prompt_tokens, completion_tokens, cached_tokens;
    int64_t bytes_loaded, bytes_attended, bytes_missed; /* -1: not reported */
    char worker[64];         /* "": not reported */
};

struct sse_reader {
    struct buf line;
    struct buf error;        /* message of an error event or error body */
    struct chat_usage usage;
    bool has_usage, finished;
    char finish_reason[32];
    void (*on_text)(const char *text, size_t len, void *arg);
    void *arg;
};

void sse_reader_init(struct sse_reader *r, void (*on_text)(const char *text, size_t len, void *arg), void *arg);
void sse_reader_fini(struct sse_reader *r);
/* -EBADMSG for an event that is no JSON; -ENOBUFS for a line beyond 1 MiB. */
int sse_reader_feed(struct sse_reader *r, const char *data, size_t len);
/* Takes the message out of an OpenAI error body into r->error. */
void sse_reader_error_body(struct sse_reader *r, const char *data, size_t len);
