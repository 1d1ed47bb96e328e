#include "kvstore/client/kv_client_private.h"

#include "proto/wire/frame.h"
#include "proto/wire/store.pb-c.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BACKOFF_MIN_US = 100000, NAME_MAX_BYTES = 64 };

/* ---- timers ---- */

/* A store that came and went between two turns of the loop is told as gone and back: it is another one. */
static void tell_state(struct kv_client *client)
{
    uint64_t now = client->state == KV_CONNECTED ? client->generation : 0, told = client->told_generation;

    client->told_generation = now;
    if (!client->on_state || now == told)
        return;
    if (told)
        client->on_state(false, client->arg);
    if (now)
        client->on_state(true, client->arg);
}

static void wake(void *arg)
{
    struct kv_client *client = arg;

    kv_deliver(client);
    tell_state(client);
    if (client->finished.first)
        loop_timer_arm(client->wake_timer, 0);
}

static void retry(void *arg)
{
    struct kv_client *client = arg;

    if (client->state == KV_GREETING)
        kv_disconnect(client, -ETIMEDOUT, "no Welcome from the store");
    else if (client->state == KV_DISCONNECTED)
        (void)kv_connect(client);
}

/* Shows the store that this process is not stopped, unless other requests did. A store that does not even read is not sent more. */
static void beat(void *arg)
{
    struct kv_client *client = arg;
    Tidepool__Store__Stats stats = TIDEPOOL__STORE__STATS__INIT;

    loop_timer_arm(client->beat_timer, client->beat_us);
    if (!client->sent_since_beat && client->out.len == 0)
        (void)kv_send(client, STORE_STATS, client->next_id++, &stats.base);
    client->sent_since_beat = false;
}

/* ---- life ---- */

static bool greeted(const struct kv_client *client, const void *arg)
{
    (void)arg;
    return client->state != KV_GREETING;
}

static int create_sources(struct kv_client *client)
{
    int rc = loop_timer_add(client->loop, retry, client, &client->retry_timer);

    if (rc == 0)
        rc = loop_timer_add(client->loop, wake, client, &client->wake_timer);
    if (rc == 0)
        rc = loop_timer_add(client->loop, beat, client, &client->beat_timer);
    return rc;
}

int kv_client_create(struct loop *loop, const struct kv_client_config *config, struct kv_client **ret_client, struct error *err)
{
    struct kv_client *client;
    int rc;

    if (!config->socket_path || !config->name || strlen(config->name) > NAME_MAX_BYTES)
        return error_set(err, -EINVAL, "a kvstore client needs a socket path and a name of at most %d bytes", NAME_MAX_BYTES);
    client = calloc(1, sizeof *client);
    if (!client)
        return error_set(err, -ENOMEM, "out of memory");
    client->loop = loop;
    client->fd = -1;
    client->connect_timeout_us = config->connect_timeout_us ? config->connect_timeout_us : 1;
    client->on_state = config->on_state;
    client->on_map = config->on_map;
    client->on_unmap = config->on_unmap;
    client->arg = config->arg;
    client->backoff_us = BACKOFF_MIN_US;
    client->next_id = 1;
    buf_init(&client->in, KV_IN_MAX + (128 << 10));
    buf_init(&client->out, KV_OUT_MAX);
    client->socket_path = strdup(config->socket_path);
    client->name = strdup(config->name);
    rc = client->socket_path && client->name ? create_sources(client) : -ENOMEM;
    if (rc < 0) {
        kv_client_free(client);
        return error_set(err, rc, "kvstore client: %s", strerror(-rc));
    }
    /* Whether the store answers or not: from here on the client takes care of it. */
    if (kv_connect(client) == 0)
        (void)kv_wait(client, greeted, NULL, client->connect_timeout_us);
    *ret_client = client;
    return 0;
}

/* Callers hear that their asynchronous calls are over, so that what they keep for the answer is not lost. */
static void pending_list_free(struct kv_pending_list *list)
{
    struct kv_pending *pending;

    while ((pending = kv_pending_pop(list))) {
        if (pending->cb)
            pending->cb(-ECANCELED, NULL, NULL, 0, pending->arg);
        free(pending->status);
        free(pending);
    }
}

void kv_client_free(struct kv_client *client)
{
    if (!client)
        return;
    loop_source_free(client->fd_source);
    loop_source_free(client->retry_timer);
    loop_source_free(client->wake_timer);
    loop_source_free(client->beat_timer);
    if (client->fd >= 0)
        close(client->fd);
    while (client->n_fds)
        close(client->fds[--client->n_fds]);
    while (client->mappings) {
        struct kv_mapping *mapping = client->mappings;
        client->mappings = mapping->next;
        kv_mapping_free(mapping);
    }
    pending_list_free(&client->waiting);
    pending_list_free(&client->finished);
    buf_fini(&client->in);
    buf_fini(&client->out);
    free(client->name);
    free(client->socket_path);
    free(client);
}

void kv_client_info(const struct kv_client *client, struct kv_store_info *ret)
{
    uint64_t fields[STATS_FIELD_COUNT];

    *ret = (struct kv_store_info){.connected = client->state == KV_CONNECTED, .lookups_corrupt = client->lookups_corrupt};
    ret->error = client->error;
    if (!ret->connected)
        return;
    memcpy(ret->store_uuid, client->store_uuid, sizeof ret->store_uuid);
    ret->pool_bytes = client->current->bytes;
    if (stats_page_read(client->current->stats, fields) == 0)
        ret->pool_used_bytes = fields[STATS_USED_BYTES];
    strcpy(ret->event_endpoint, client->event_endpoint);
    strcpy(ret->snapshot_endpoint, client->snapshot_endpoint);
}
