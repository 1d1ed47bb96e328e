/* The OpenAI-compatible API over http/, text/ and route/: routes, generation, status. Loop thread only. */
#pragma once
#include "proto/base/error.h"
#include "proto/base/loop.h"
#include "router/http/http_auth.h"
#include "router/http/http_server.h"
#include "router/route/route.h"
#include "router/text/template.h"
#include "router/text/tokenizer.h"
#include <stdbool.h>

struct api;

struct api_config {
    struct loop *loop;
    struct route *route;
    struct http_auth *auth;
    const struct tokenizer *tok;
    struct template_engine *templates; /* NULL: the model has no chat template, chat is refused */
    const char *model;                 /* its id in the API */
    const char *model_path;            /* "root" of /v1/models: the file's name without its folder */
    const char *version;
    int work_threads;
    bool salt_by_key;                  /* callers with different API keys do not share cached prefixes */
    uint64_t template_timeout_us;
    uint32_t keepalive_s;              /* a stream begins after so long at the latest */
};

/* Everything in the config is borrowed for the api's life. */
int api_create(const struct api_config *config, struct api **ret_api, struct error *err);
/* Every exchange must have ended. NULL is fine. */
void api_free(struct api *api);
/* For http_config: the handler of all exchanges, with the api as its argument. */
void api_handle(struct http_exchange *exchange, void *api);
/* The HTTP server, for metrics; before the loop runs. */
void api_set_http(struct api *api, struct http_server *http);
/* From now on generation is refused with 503 and /health says so; what runs goes on. */
void api_drain(struct api *api);
/* Generations that have not ended. */
uint32_t api_n_generations(const struct api *api);
/* Ends them all: streams get an error and [DONE], others 503. */
void api_abort_all(struct api *api, const char *why);
