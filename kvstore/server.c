#include "kvstore/server_private.h"

#include "proto/base/clock.h"
#include "proto/base/log.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { LISTEN_BACKLOG = 64, ACCEPTS_PER_CALL = 16, TICK_US = 1000000 };

/* ---- statistics ---- */

static void stats_collect(void *arg, uint64_t *ret_fields)
{
    struct server *server = arg;
    const struct pool *pool = server->pool;
    const struct pool_counters *c = &pool->counters;

    ret_fields[STATS_POOL_BYTES] = pool->extents.bytes;
    ret_fields[STATS_USED_BYTES] = pool->extents.bytes_taken;
    ret_fields[STATS_PINNED_BYTES] = pool->bytes_pinned;
    ret_fields[STATS_BLOCKS] = pool->n_blocks;
    ret_fields[STATS_UNSEALED] = pool->n_unsealed;
    ret_fields[STATS_LEASES] = pool->leases.n_used;
    ret_fields[STATS_CLIENTS] = (uint64_t)server->n_connected;
    ret_fields[STATS_LOOKUPS] = c->lookups;
    ret_fields[STATS_LOOKUP_HITS] = c->lookup_hits;
    ret_fields[STATS_LOOKUP_MISSES] = c->lookup_misses;
    ret_fields[STATS_STORED] = c->stored;
    ret_fields[STATS_EVICTED] = c->evicted;
    ret_fields[STATS_REJECTED_FULL] = c->rejected_full;
    ret_fields[STATS_CORRUPT] = c->corrupt;
    ret_fields[STATS_PROTOCOL_ERRORS] = server->env.protocol_errors;
    ret_fields[STATS_EVENT_SEQUENCE] = event_stream_sequence(server->events);
    ret_fields[STATS_UNRESPONSIVE] = (uint64_t)server->n_unresponsive;
    ret_fields[STATS_DISCARDED] = c->discarded;
}

static void stats_publish(void *arg)
{
    struct server *server = arg;
    uint64_t fields[STATS_FIELD_COUNT];

    server->stats_pending = false;
    stats_collect(server, fields);
    stats_page_write(server->stats, fields);
}

void server_stats_changed(struct server *server)
{
    if (server->stats_pending)
        return;
    server->stats_pending = true;
    loop_timer_arm(server->stats_timer, 0);
}

static int stats_page_create(struct server *server)
{
    int rc;

    server->stats_fd = memfd_create("tidepool-stats", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (server->stats_fd < 0)
        return -errno;
    if (fchmod(server->stats_fd, 0600) < 0)
        return -errno;
    rc = -posix_fallocate(server->stats_fd, 0, STATS_PAGE_BYTES);
    if (rc < 0)
        return rc;
    server->stats = mmap(NULL, STATS_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, server->stats_fd, 0);
    if (server->stats == MAP_FAILED) {
        server->stats = NULL;
        return -errno;
    }
    /* From here on nobody else can map it for writing. */
    if (fcntl(server->stats_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) < 0)
        return -errno;
    server->stats->magic = STATS_PAGE_MAGIC;
    server->stats->version = STATS_PAGE_VERSION;
    server->stats->bytes = sizeof *server->stats;
    return 0;
}

/* ---- the socket ---- */

static int listen_open(struct server *server, struct error *err)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};

    if (strlen(server->socket_path) >= sizeof addr.sun_path)
        return error_set(err, -ENAMETOOLONG, "--socket %s: at most %zu characters", server->socket_path, sizeof addr.sun_path - 1);
    strcpy(addr.sun_path, server->socket_path);
    server->listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (server->listen_fd < 0)
        return error_set(err, -errno, "socket: %s", strerror(errno));
    if (bind(server->listen_fd, (struct sockaddr *)&addr, sizeof addr) < 0)
        return error_set(err, -errno, "--socket %s: %s", addr.sun_path, strerror(errno));
    server->bound = true;
    if (chmod(addr.sun_path, 0600) < 0 || listen(server->listen_fd, LISTEN_BACKLOG) < 0)
        return error_set(err, -errno, "--socket %s: %s", addr.sun_path, strerror(errno));
    return 0;
}

static void accept_one(struct server *server, int fd)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    int rc;

    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0 || peer.uid != geteuid() || server->n_clients >= SERVER_CLIENTS_MAX) {
        LOG_WARN("client_refused", LOG_INT("uid", peer.uid), LOG_INT("pid", peer.pid), LOG_INT("clients", server->n_clients));
        close(fd);
        return;
    }
    rc = server_client_create(server, fd, peer.pid);
    if (rc < 0)
        LOG_WARN("client_refused", LOG_INT("pid", peer.pid), LOG_STR("error", strerror(-rc)));
}

static void listen_ready(int fd, int events, void *arg)
{
    struct server *server = arg;

    (void)events;
    for (int i = 0; i < ACCEPTS_PER_CALL; i++) {
        int client = accept4(fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (client >= 0) {
            accept_one(server, client);
            continue;
        }
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            /* The connection stays in the backlog: asking again at once would spin. The next tick does. */
            LOG_WARN("accept_paused", LOG_STR("error", strerror(errno)));
            loop_fd_set_events(server->listen_source, 0);
        }
        return;
    }
}

static void tick(void *arg)
{
    struct server *server = arg;
    uint64_t now = clock_now_us();

    for (struct server_client *client = server->clients, *next; client; client = next) {
        next = client->next;
        server_client_tick(client, now);
    }
    loop_fd_set_events(server->listen_source, LOOP_READ);
    loop_timer_arm(server->tick_timer, TICK_US);
}

/* ---- life ---- */

static int copy_config(struct server *server, const struct server_config *config)
{
    server->pool = config->pool;
    server->events = config->events;
    server->pool_fd = config->pool_fd;
    server->lease_timeout_us = config->lease_timeout_us;
    server->socket_path = strdup(config->socket_path);
    server->event_endpoint = strdup(config->event_endpoint);
    server->snapshot_endpoint = strdup(config->snapshot_endpoint);
    server->env = (struct session_env){
        .pool = config->pool,
        .lease_timeout_ms = config->lease_timeout_us / 1000,
        .event_endpoint = server->event_endpoint,
        .snapshot_endpoint = server->snapshot_endpoint,
        .stats = stats_collect,
        .arg = server,
    };
    memcpy(server->env.store_uuid, config->store_uuid, sizeof server->env.store_uuid);
    return server->socket_path && server->event_endpoint && server->snapshot_endpoint ? 0 : -ENOMEM;
}

int server_create(struct loop *loop, const struct server_config *config, struct server **ret_server, struct error *err)
{
    struct server *server = calloc(1, sizeof *server);
    int rc;

    if (!server)
        return error_set(err, -ENOMEM, "out of memory");
    server->loop = loop;
    server->stats_fd = server->listen_fd = -1;
    rc = copy_config(server, config);
    if (rc == 0)
        rc = stats_page_create(server);
    if (rc == 0)
        rc = loop_timer_add(loop, stats_publish, server, &server->stats_timer);
    if (rc == 0)
        rc = loop_timer_add(loop, tick, server, &server->tick_timer);
    if (rc < 0) {
        error_set(err, rc, "statistics page and timers: %s", strerror(-rc));
        goto fail;
    }
    stats_publish(server);
    rc = listen_open(server, err);
    if (rc < 0)
        goto fail;
    rc = loop_fd_add(loop, server->listen_fd, LOOP_READ, listen_ready, server, &server->listen_source);
    if (rc < 0) {
        error_set(err, rc, "event loop: %s", strerror(-rc));
        goto fail;
    }
    loop_timer_arm(server->tick_timer, TICK_US);
    *ret_server = server;
    return 0;
fail:
    server_free(server);
    return rc;
}

void server_free(struct server *server)
{
    if (!server)
        return;
    while (server->clients)
        server_client_free(server->clients);
    loop_source_free(server->listen_source);
    loop_source_free(server->tick_timer);
    loop_source_free(server->stats_timer);
    if (server->listen_fd >= 0)
        close(server->listen_fd);
    if (server->bound)
        unlink(server->socket_path);
    if (server->stats)
        munmap(server->stats, STATS_PAGE_BYTES);
    if (server->stats_fd >= 0)
        close(server->stats_fd);
    free(server->snapshot_endpoint);
    free(server->event_endpoint);
    free(server->socket_path);
    free(server);
}
