/* Routes, authentication, and the api's life. */
#include "router/api/api_server.h"
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "router/api/api_private.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TICK_US = 500000 };

/* -- helpers of the handlers -- */

void api_count(struct api *api, enum metrics_endpoint endpoint, int status)
{
    int hundreds = status / 100;
    if (hundreds >= 0 && hundreds < 6)
        api->metrics.requests[endpoint][hundreds]++;
}

void api_reply_error(struct api *api, struct http_exchange *exchange, enum metrics_endpoint endpoint, const struct api_error *err, uint32_t retry_after_s)
{
    char seconds[16];
    api_count(api, endpoint, err->status);
    if (err->status == 429 || err->status == 503) {
        snprintf(seconds, sizeof(seconds), "%u", retry_after_s ? retry_after_s : API_RETRY_AFTER_S);
        http_exchange_add_header(exchange, "Retry-After", seconds);
    }
    http_reply_error(exchange, err->status, err->param[0] ? err->param : NULL, err->code, err->message);
}

bool api_model_is_served(const struct api *api, const char *name, struct api_error *err)
{
    if (!name || !*name || strcmp(name, api->config.model) == 0)
        return true;
    api_error_set(err, 404, "model", "model_not_found", "the model \"%.100s\" is not served here; this server has \"%s\"", name, api->config.model);
    return false;
}

static bool is_noted(const struct api *api, const char *name)
{
    for (uint32_t i = 0; i < api->n_unknown_names; i++)
        if (strcmp(api->unknown_names[i], name) == 0)
            return true;
    return false;
}

/* Each name once: a client that sends it with every request must not fill the log. */
void api_note_unknown(struct api *api, const struct api_request *req)
{
    for (uint32_t i = 0; i < req->n_unknown; i++) {
        api->metrics.unknown_fields++;
        if (is_noted(api, req->unknown[i]) || api->n_unknown_names == API_UNKNOWN_NAMES_MAX)
            continue;
        snprintf(api->unknown_names[api->n_unknown_names++], sizeof(api->unknown_names[0]), "%s", req->unknown[i]);
        LOG_INFO("unknown_field_ignored", LOG_STR("field", req->unknown[i]));
    }
}

/* -- routes -- */

struct api_path {
    const char *path;
    bool post, open; /* open: needs no key */
    enum metrics_endpoint endpoint;
    void (*get)(struct api *api, struct http_exchange *exchange);
    enum api_kind kind; /* of a generation; 0: none */
};

static const struct api_path paths[] = {
    {"/v1/chat/completions", true, false, ENDPOINT_CHAT, NULL, API_CHAT},
    {"/v1/completions", true, false, ENDPOINT_COMPLETIONS, NULL, API_COMPLETION},
    {"/v1/models", false, false, ENDPOINT_MODELS, handle_models, 0},
    {"/tokenize", true, false, ENDPOINT_TOKENIZE, NULL, API_TOKENIZE},
    {"/detokenize", true, false, ENDPOINT_DETOKENIZE, handle_detokenize, 0},
    {"/health", false, true, ENDPOINT_OTHER, handle_health, 0},
    {"/live", false, true, ENDPOINT_OTHER, handle_live, 0},
    {"/version", false, false, ENDPOINT_OTHER, handle_version, 0},
    {"/metrics", false, false, ENDPOINT_METRICS, handle_metrics, 0},
};

static const char models_prefix[] = "/v1/models/";

static const struct api_path *find_path(const char *path)
{
    for (size_t i = 0; i < ARRAY_LEN(paths); i++)
        if (strcmp(paths[i].path, path) == 0)
            return &paths[i];
    return NULL;
}

static void refuse(struct api *api, struct http_exchange *exchange, enum metrics_endpoint endpoint, int status, const char *code, const char *message)
{
    struct api_error err = {.status = 0};
    api_error_set(&err, status, NULL, code, "%s", message);
    api_reply_error(api, exchange, endpoint, &err, 0);
}

static void refuse_method(struct api *api, struct http_exchange *exchange, const struct api_path *path)
{
    http_exchange_add_header(exchange, "Allow", path->post ? "POST, OPTIONS" : "GET, HEAD, OPTIONS");
    refuse(api, exchange, path->endpoint, 405, "method_not_allowed", path->post ? "this path takes POST" : "this path takes GET");
}

static bool authorize(struct api *api, struct http_exchange *exchange, const struct api_path *path, int *ret_tenant)
{
    *ret_tenant = 0;
    if ((path && path->open) || http_auth_check(api->config.auth, exchange, ret_tenant))
        return true;
    http_exchange_add_header(exchange, "WWW-Authenticate", "Bearer");
    refuse(api, exchange, path ? path->endpoint : ENDPOINT_OTHER, 401, "invalid_api_key", "a valid API key is needed: Authorization: Bearer KEY");
    return false;
}

static void start(struct api *api, struct http_exchange *exchange, const struct api_path *path, int tenant)
{
    if (api->draining && path->kind)
        refuse(api, exchange, path->endpoint, 503, "draining", "this server is shutting down");
    else if (path->kind)
        generation_start(api, exchange, path->kind, tenant);
    else
        path->get(api, exchange);
}

void api_handle(struct http_exchange *exchange, void *arg)
{
    struct api *api = arg;
    const char *name = http_exchange_path(exchange);
    const struct api_path *path = find_path(name);
    bool is_get = http_exchange_method(exchange) == HTTP_GET || http_exchange_method(exchange) == HTTP_HEAD;
    int tenant;
    if (!authorize(api, exchange, path, &tenant))
        return;
    if (!path && is_get && strncmp(name, models_prefix, strlen(models_prefix)) == 0)
        handle_model(api, exchange, name + strlen(models_prefix));
    else if (!path)
        refuse(api, exchange, ENDPOINT_OTHER, 404, "not_found", "there is nothing at this path");
    else if (path->post == is_get)
        refuse_method(api, exchange, path);
    else
        start(api, exchange, path, tenant);
}

/* -- life -- */

static void on_tick(void *arg)
{
    struct api *api = arg;
    generation_tick(api);
    loop_timer_arm(api->tick_timer, TICK_US);
}

int api_create(const struct api_config *config, struct api **ret_api, struct error *err)
{
    struct api *api = calloc(1, sizeof(*api));
    if (!api)
        return error_set(err, -ENOMEM, "out of memory");
    api->config = *config;
    api->started_s = clock_wall_s();
    metrics_init(&api->metrics);
    int rc = work_pool_create(config->loop, config->work_threads, &api->pool);
    if (rc >= 0)
        rc = loop_timer_add(config->loop, on_tick, api, &api->tick_timer);
    if (rc < 0) {
        api_free(api);
        return error_set(err, rc, "cannot start the API: %s", strerror(-rc));
    }
    loop_timer_arm(api->tick_timer, TICK_US);
    *ret_api = api;
    return 0;
}

void api_free(struct api *api)
{
    if (!api)
        return;
    work_pool_free(api->pool);
    while (api->generations) { /* those that a thread had */
        api->generations->working = false;
        generation_free(api->generations);
    }
    loop_source_free(api->tick_timer);
    free(api);
}

void api_set_http(struct api *api, struct http_server *http)
{
    api->http = http;
}

void api_drain(struct api *api)
{
    api->draining = true;
}

uint32_t api_n_generations(const struct api *api)
{
    return api->n_generations;
}

void api_abort_all(struct api *api, const char *why)
{
    struct generation *g = api->generations;
    while (g) {
        struct generation *next = g->next;
        if (g->exchange && !g->working) {
            api_error_set(&g->err, 503, NULL, "shutting_down", "%s", why);
            generation_fail(g);
        }
        g = next;
    }
}
