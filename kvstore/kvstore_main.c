/* tidepool-kvstore: one process a host that owns the pool of KV blocks. Workers map it, the router listens to its events. */
#include "kvstore/event_stream.h"
#include "kvstore/pool.h"
#include "kvstore/pool_memory.h"
#include "kvstore/server.h"
#include "kvstore/socket_claim.h"
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "proto/base/loop.h"
#include "proto/base/options.h"
#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

struct store_options {
    const char *socket, *event_endpoint, *snapshot_endpoint;
    int64_t pool_size, lease_timeout;
    int log_level, log_format;
};

#define FIELD(name) .offset = offsetof(struct store_options, name)
static const struct option_spec specs[] = {
    {.name = "socket", .kind = OPTION_STR, FIELD(socket), .metavar = "PATH",
     .help = "unix socket for workers; its folder belongs to this user, mode 700 (made if missing)"},
    {.name = "pool-size", .kind = OPTION_BYTES, FIELD(pool_size), .fallback = "2G", .metavar = "BYTES", .min = 1 << 20, .max = INT64_C(1) << 46,
     .help = "memory of the pool, taken at start"},
    {.name = "event-endpoint", .kind = OPTION_STR, FIELD(event_endpoint), .optional = true, .metavar = "ENDPOINT",
     .help = "ZeroMQ endpoint of block events; default: ipc:// beside the socket"},
    {.name = "snapshot-endpoint", .kind = OPTION_STR, FIELD(snapshot_endpoint), .optional = true, .metavar = "ENDPOINT",
     .help = "ZeroMQ endpoint of snapshots; default: ipc:// beside the socket"},
    {.name = "lease-timeout", .kind = OPTION_INT, FIELD(lease_timeout), .fallback = "30", .metavar = "SECONDS", .min = 1, .max = 86400,
     .help = "silence of a client after which it is reported as unresponsive (its leases stay)"},
    {.name = "log-level", .kind = OPTION_ENUM, FIELD(log_level), .fallback = "info", .choices = log_level_choices, .help = "least level that is logged"},
    {.name = "log-format", .kind = OPTION_ENUM, FIELD(log_format), .fallback = "logfmt", .choices = log_format_choices, .help = "form of a log line"},
};
#undef FIELD

static const struct option_set option_set = {
    .program = "tidepool-kvstore",
    .summary = "Owns a host's pool of quantized KV blocks in shared memory and hands leases on them to workers.",
    .examples = "  tidepool-kvstore --socket /run/user/1000/tidepool/kvstore.sock\n"
                "  tidepool-kvstore --socket /run/tidepool/kvstore.sock --pool-size 64G --log-format json\n",
    .specs = specs,
    .n_specs = ARRAY_LEN(specs),
};

struct store {
    struct store_options options;
    char event_endpoint[256], snapshot_endpoint[256];
    uint8_t uuid[16];
    struct loop *loop;
    struct loop_source *sigterm, *sigint;
    struct event_stream *events;
    struct pool pool;
    bool pool_ready;
    int pool_fd, lock_fd;
    struct server *server;
};

/* "<socket without .sock><suffix>" as an ipc:// endpoint. */
static int endpoint_default(const char *given, const char *socket, const char *suffix, char *ret_endpoint, size_t size, struct error *err)
{
    size_t n = strlen(socket);
    int length;

    if (n > 5 && strcmp(socket + n - 5, ".sock") == 0)
        n -= 5;
    length = given ? snprintf(ret_endpoint, size, "%s", given) : snprintf(ret_endpoint, size, "ipc://%.*s%s", (int)n, socket, suffix);
    if (length < 0 || (size_t)length >= size)
        return error_set(err, -ENAMETOOLONG, "endpoint %s: longer than %zu characters", given ? given : socket, size - 1);
    return 0;
}

static void stop(int signal, void *arg)
{
    struct store *store = arg;

    LOG_INFO("stopping", LOG_INT("signal", signal));
    loop_stop(store->loop);
}

/* Each client takes a socket and a pidfd: room for all of them, as far as the system allows. */
static void raise_file_limit(void)
{
    enum { FILES_WANTED = 2 * SERVER_CLIENTS_MAX + 64 };
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur >= FILES_WANTED)
        return;
    limit.rlim_cur = limit.rlim_max < FILES_WANTED ? limit.rlim_max : FILES_WANTED;
    if (setrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur < FILES_WANTED)
        LOG_WARN("open_file_limit_low", LOG_INT("limit", limit.rlim_cur), LOG_INT("wanted", FILES_WANTED));
}

static int start_loop(struct store *store, struct error *err)
{
    int rc = loop_create(&store->loop);

    if (rc == 0)
        rc = loop_signal_add(store->loop, SIGTERM, stop, store, &store->sigterm);
    if (rc == 0)
        rc = loop_signal_add(store->loop, SIGINT, stop, store, &store->sigint);
    return rc < 0 ? error_set(err, rc, "event loop: %s", strerror(-rc)) : 0;
}

/* The socket comes last: who can connect finds everything in place. */
static int start(struct store *store, struct error *err)
{
    const struct store_options *o = &store->options;
    struct server_config config = {.socket_path = o->socket, .lease_timeout_us = (uint64_t)o->lease_timeout * 1000000};
    struct event_stream_config events = {.event_endpoint = store->event_endpoint, .snapshot_endpoint = store->snapshot_endpoint};
    struct pool_listener listener;
    int rc;

    if (getrandom(store->uuid, sizeof store->uuid, 0) != sizeof store->uuid)
        return error_set(err, -EIO, "no random numbers for the identity of this store");
    rc = endpoint_default(o->event_endpoint, o->socket, "-events.sock", store->event_endpoint, sizeof store->event_endpoint, err);
    if (rc == 0)
        rc = endpoint_default(o->snapshot_endpoint, o->socket, "-snapshot.sock", store->snapshot_endpoint, sizeof store->snapshot_endpoint, err);
    if (rc == 0)
        rc = start_loop(store, err);
    if (rc == 0)
        rc = socket_claim(o->socket, &store->lock_fd, err);
    if (rc == 0)
        rc = pool_memory_create((uint64_t)o->pool_size, &store->pool_fd, err);
    if (rc < 0)
        return rc;
    memcpy(events.store_uuid, store->uuid, sizeof store->uuid);
    rc = event_stream_create(store->loop, &events, &store->events, err);
    if (rc < 0)
        return rc;
    listener = event_stream_listener(store->events);
    rc = pool_init(&store->pool, (uint64_t)o->pool_size, &listener);
    if (rc < 0)
        return error_set(err, rc, "index of the pool: %s", strerror(-rc));
    store->pool_ready = true;
    event_stream_attach(store->events, &store->pool);
    memcpy(config.store_uuid, store->uuid, sizeof store->uuid);
    config.event_endpoint = store->event_endpoint;
    config.snapshot_endpoint = store->snapshot_endpoint;
    config.pool_fd = store->pool_fd;
    config.pool = &store->pool;
    config.events = store->events;
    return server_create(store->loop, &config, &store->server, err);
}

static void end(struct store *store)
{
    server_free(store->server);
    event_stream_free(store->events);
    if (store->pool_ready)
        pool_fini(&store->pool);
    if (store->pool_fd >= 0)
        close(store->pool_fd);
    if (store->lock_fd >= 0)
        close(store->lock_fd);
    loop_source_free(store->sigterm);
    loop_source_free(store->sigint);
    loop_free(store->loop);
}

int main(int argc, char **argv)
{
    struct store store = {.pool_fd = -1, .lock_fd = -1};
    struct error err = {""};
    uint64_t started_us = clock_now_us();
    int rc = options_parse(&option_set, argc, argv, &store.options, NULL, &err);

    if (rc == 1)
        return 0;
    if (rc < 0) {
        fprintf(stderr, "tidepool-kvstore: %s\n", err.text);
        return 2;
    }
    log_init("kvstore", (enum log_level)store.options.log_level, (enum log_format)store.options.log_format);
    /* A limit on file sizes would otherwise end the process with SIGXFSZ instead of an error. */
    signal(SIGXFSZ, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    raise_file_limit();
    rc = start(&store, &err);
    if (rc < 0) {
        LOG_ERROR("start_failed", LOG_STR("error", err.text));
        end(&store);
        return 1;
    }
    LOG_INFO("store_ready", LOG_STR("socket", store.options.socket), LOG_INT("pool_bytes", store.options.pool_size),
             LOG_STR("events", store.event_endpoint), LOG_STR("snapshots", store.snapshot_endpoint),
             LOG_INT("lease_timeout_s", store.options.lease_timeout), LOG_INT("start_ms", (clock_now_us() - started_us) / 1000));
    rc = loop_run(store.loop);
    end(&store);
    LOG_INFO("stopped", LOG_INT("status", rc < 0));
    return rc < 0;
}
