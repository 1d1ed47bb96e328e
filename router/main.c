/* tidepool-router: acquires everything in order, runs the loop, drains, and gives everything back. SIGTERM or SIGINT drains (no new requests, /health
 * says 503, running ones finish); a second one ends at once. */
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "router/api/api_server.h"
#include "router/router_options.h"
#include <errno.h>
#include <signal.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { DRAIN_CHECK_US = 20000, FLUSH_GRACE_US = 1000000, TEMPLATE_FILE_MAX = 1 << 20, HEADERS_BYTES_MAX = 64 << 10, EXIT_CONFIG = 2 };

struct router {
    struct router_options options;
    struct loop *loop;
    struct loop_source *sigterm, *sigint, *drain_timer;
    struct tokenizer *tok;
    struct template_engine *templates;
    struct route *route;
    struct http_auth *auth;
    struct api *api;
    struct http_server *http;
    char *template_text;
    char model[256];
    uint64_t drain_until_us; /* 0: not draining */
    bool aborted;
};

/* -- the model's name and its template -- */

/* "/models/SmolLM2.Q4_1.gguf" -> "SmolLM2.Q4_1"; of a folder its last part. */
static void name_model(struct router *r)
{
    char path[4096];
    snprintf(path, sizeof(path), "%s", r->options.model);
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        path[--n] = 0;
    const char *slash = strrchr(path, '/');
    snprintf(r->model, sizeof(r->model), "%s", slash && slash[1] ? slash + 1 : path);
    n = strlen(r->model);
    if (n > 5 && strcmp(r->model + n - 5, ".gguf") == 0)
        r->model[n - 5] = 0;
    if (r->options.served_model_name)
        snprintf(r->model, sizeof(r->model), "%s", r->options.served_model_name);
}

static int read_template(struct router *r, struct error *err)
{
    const char *path = r->options.chat_template;
    FILE *file = fopen(path, "re");
    if (!file)
        return error_set(err, -errno, "--chat-template %s: %s", path, strerror(errno));
    r->template_text = calloc(1, TEMPLATE_FILE_MAX + 1);
    size_t n = r->template_text ? fread(r->template_text, 1, TEMPLATE_FILE_MAX, file) : 0;
    bool more = fgetc(file) != EOF;
    fclose(file);
    if (!r->template_text)
        return error_set(err, -ENOMEM, "out of memory");
    if (n == 0 || more || memchr(r->template_text, 0, n))
        return error_set(err, -EINVAL, "--chat-template %s: must be a text of 1 to %d bytes", path, TEMPLATE_FILE_MAX);
    return 0;
}

/* The text of a token that a template may print, NUL-terminated; "" if there is none. */
static void token_text(const struct tokenizer *tok, int32_t id, char *text, size_t size)
{
    size_t n = 0;
    const char *found = id == TOKEN_NONE ? NULL : tokenizer_token_text(tok, id, &n);
    if (!found || n >= size)
        n = 0;
    if (n)
        memcpy(text, found, n);
    text[n] = 0;
}

static int start_templates(struct router *r, struct error *err)
{
    char bos[256], eos[256];
    if (r->options.chat_template) {
        int rc = read_template(r, err);
        if (rc < 0)
            return rc;
    }
    struct template_config config = {.text = r->template_text ? r->template_text : tokenizer_chat_template(r->tok), .bos = bos, .eos = eos};
    if (!config.text) {
        LOG_WARN("no_chat_template", LOG_STR("model", r->model));
        return 0;
    }
    token_text(r->tok, tokenizer_bos(r->tok), bos, sizeof(bos));
    token_text(r->tok, tokenizer_eos(r->tok), eos, sizeof(eos));
    return template_engine_create(r->loop, &config, &r->templates, err);
}

/* -- draining -- */

static void on_drain_check(void *arg)
{
    struct router *r = arg;
    uint64_t now = clock_now_us();
    bool done = api_n_generations(r->api) == 0 && http_server_n_active(r->http) == 0;
    if (!done && now >= r->drain_until_us && !r->aborted) {
        LOG_WARN("drain_timeout", LOG_INT("generations", api_n_generations(r->api)));
        api_abort_all(r->api, "this server is shutting down");
        r->aborted = true;
        r->drain_until_us = now + FLUSH_GRACE_US;
    } else if (done || now >= r->drain_until_us) {
        loop_stop(r->loop);
        return;
    }
    loop_timer_arm(r->drain_timer, DRAIN_CHECK_US);
}

static void on_signal(int signal, void *arg)
{
    struct router *r = arg;
    if (r->drain_until_us) {
        LOG_WARN("stopping_at_once", LOG_INT("signal", signal));
        _exit(128 + signal);
    }
    LOG_INFO("draining", LOG_INT("signal", signal), LOG_INT("generations", api_n_generations(r->api)), LOG_INT("timeout_s", r->options.drain_timeout));
    r->drain_until_us = clock_now_us() + (uint64_t)r->options.drain_timeout * 1000000 + 1;
    api_drain(r->api);
    http_server_drain(r->http);
    loop_timer_arm(r->drain_timer, 0);
}

/* -- start -- */

static int start_loop(struct router *r, struct error *err)
{
    int rc = loop_create(&r->loop);
    if (rc >= 0)
        rc = loop_signal_add(r->loop, SIGTERM, on_signal, r, &r->sigterm);
    if (rc >= 0)
        rc = loop_signal_add(r->loop, SIGINT, on_signal, r, &r->sigint);
    if (rc >= 0)
        rc = loop_timer_add(r->loop, on_drain_check, r, &r->drain_timer);
    return rc < 0 ? error_set(err, rc, "cannot create the event loop: %s", strerror(-rc)) : 0;
}

static int start_route(struct router *r, struct error *err)
{
    const struct router_options *o = &r->options;
    struct route_config config = {
        .loop = r->loop,
        .endpoint = o->endpoint,
        .policy = policy_find(router_policy_name(o)),
        .queue_requests_max = (uint32_t)o->max_queue,
        .queue_tokens_max = (uint64_t)o->max_queue_tokens,
        .worker_wait_us = (uint64_t)o->worker_wait * 1000000,
        .queue_timeout_us = (uint64_t)o->queue_timeout * 1000000,
        .heartbeat_ms = (uint32_t)o->heartbeat_ms,
        .progress_timeout_us = (uint64_t)o->progress_timeout * 1000000,
        .retries_max = (uint32_t)o->retries,
        .lookahead = (uint32_t)o->lookahead,
        .vocab_size = (uint32_t)tokenizer_n_vocab(r->tok),
    };
    ASSERT(config.policy);
    return route_create(&config, &r->route, err);
}

static const char *file_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

static int start_api(struct router *r, struct error *err)
{
    const struct router_options *o = &r->options;
    struct api_config config = {
        .loop = r->loop,
        .route = r->route,
        .auth = r->auth,
        .tok = r->tok,
        .templates = r->templates,
        .model = r->model,
        .model_path = file_name(o->model),
        .version = TIDEPOOL_VERSION,
        .work_threads = (int)o->work_threads,
        .salt_by_key = o->cache_isolation == 1,
        .template_timeout_us = (uint64_t)o->template_timeout * 1000000,
        .keepalive_s = (uint32_t)o->keepalive,
    };
    return api_create(&config, &r->api, err);
}

static int start_http(struct router *r, struct error *err)
{
    const struct router_options *o = &r->options;
    struct http_config config = {
        .host = o->host,
        .port = (uint16_t)o->port,
        .headers_bytes_max = HEADERS_BYTES_MAX,
        .body_bytes_max = (size_t)o->max_body,
        .request_timeout_s = (uint32_t)o->request_timeout,
        .idle_timeout_s = (uint32_t)o->idle_timeout,
        .keepalive_s = (uint32_t)o->keepalive,
        .stream_backlog_max = (size_t)o->stream_backlog,
        .stream_stall_s = (uint32_t)o->stream_stall,
        .allowed_origins = o->allowed_origins,
        .handler = api_handle,
        .arg = r->api,
    };
    int rc = http_server_create(r->loop, &config, &r->http, err);
    if (rc >= 0)
        api_set_http(r->api, r->http);
    return rc;
}

/* Written aside and renamed: who waits for the file never reads half of it. */
static int write_port_file(const struct router *r, struct error *err)
{
    char aside[4096 + 8];
    const char *path = r->options.port_file;
    if (!path)
        return 0;
    snprintf(aside, sizeof(aside), "%s.new", path);
    FILE *file = fopen(aside, "we");
    if (!file || fprintf(file, "%u\n", http_server_port(r->http)) < 0 || fclose(file) != 0 || rename(aside, path) < 0)
        return error_set(err, -errno, "--port-file %s: %s", path, strerror(errno));
    return 0;
}

/* One descriptor a stream: as many as the system lets us have. */
static void raise_descriptor_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static int start(struct router *r, struct error *err)
{
    uint64_t begin = clock_now_us();
    const struct router_options *o = &r->options;
    name_model(r);
    raise_descriptor_limit();
    int rc = start_loop(r, err);
    if (rc >= 0)
        rc = http_auth_create(o->api_key, o->api_key_file, &r->auth, err);
    if (rc >= 0)
        rc = tokenizer_open(o->model, &r->tok, err);
    if (rc >= 0)
        rc = start_templates(r, err);
    if (rc >= 0)
        rc = start_route(r, err);
    if (rc >= 0)
        rc = start_api(r, err);
    if (rc >= 0)
        rc = start_http(r, err);
    if (rc >= 0)
        rc = write_port_file(r, err);
    if (rc >= 0)
        LOG_INFO("listening", LOG_STR("host", o->host), LOG_INT("port", http_server_port(r->http)), LOG_STR("endpoint", o->endpoint),
                 LOG_STR("model", r->model), LOG_STR("tokenizer", tokenizer_describe(r->tok)), LOG_STR("policy", router_policy_name(o)),
                 LOG_INT("start_ms", (clock_now_us() - begin) / 1000));
    return rc;
}

static void stop(struct router *r)
{
    http_server_free(r->http); /* ends the exchanges, and with them what they asked for */
    api_free(r->api);
    route_free(r->route);
    template_engine_free(r->templates);
    tokenizer_close(r->tok);
    http_auth_free(r->auth);
    loop_source_free(r->drain_timer);
    loop_source_free(r->sigint);
    loop_source_free(r->sigterm);
    loop_free(r->loop);
    free(r->template_text);
    if (r->options.port_file)
        unlink(r->options.port_file);
}

/* Starting again would not help. */
static bool is_config_error(int rc)
{
    return rc == -EINVAL || rc == -ENOENT || rc == -EACCES || rc == -ENOTSUP || rc == -EISDIR;
}

int main(int argc, char **argv)
{
    struct router r = {.loop = NULL};
    struct error err = {.text = ""};
    int rc = options_parse(&router_option_set, argc, argv, &r.options, NULL, &err);
    if (rc > 0)
        return 0;
    if (rc < 0) {
        fprintf(stderr, "tidepool-router: %s\n", err.text);
        return EXIT_CONFIG;
    }
    log_init("router", (enum log_level)r.options.log_level, (enum log_format)r.options.log_format);
    signal(SIGPIPE, SIG_IGN);
    if (sodium_init() < 0) {
        LOG_ERROR("start_failed", LOG_STR("error", "libsodium cannot be initialised"));
        return 1;
    }
    rc = start(&r, &err);
    if (rc < 0)
        LOG_ERROR("start_failed", LOG_STR("error", err.text));
    else
        rc = loop_run(r.loop);
    stop(&r);
    if (rc < 0)
        return is_config_error(rc) ? EXIT_CONFIG : 1;
    LOG_INFO("stopped", LOG_INT("status", 0));
    return 0;
}
