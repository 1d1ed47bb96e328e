/* What each store holds, kept in the prefix index: block events by SUB, and a snapshot by DEALER at the start, after a gap and when the
 * connection was lost. Events that arrive while a snapshot is on its way are kept and applied behind it. A connection that breaks empties the
 * store's part of the index at once: its pool may be gone. */
#include "proto/base/base_assert.h"
#include "proto/base/capped_alloc.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include "proto/wire/store.pb-c.h"
#include "router/route/message_parts.h"
#include "router/route/route_private.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

enum {
    FEED_BATCH = 50,
    FEED_PENDING_MAX = 4096,        /* event messages kept during a snapshot */
    FEED_RECEIVE_HWM = 100000,
    FEED_KEYS_MAX = 4096,           /* a message */
    FEED_SNAPSHOT_TIMEOUT_US = 5000000,
    FEED_RECONNECT_MS = 100,
    FEED_RECONNECT_MS_MAX = 5000,
};

enum feed_state { FEED_DOWN, FEED_SNAPSHOT, FEED_EXACT };

struct pending_event {
    struct pending_event *next;
    size_t len;
    uint8_t body[];
};

struct store_feed {
    struct route *route;
    int number;
    enum feed_state state;
    char event_endpoint[ROUTE_ENDPOINT_MAX + 1], snapshot_endpoint[ROUTE_ENDPOINT_MAX + 1];
    void *events, *snapshots, *monitor;
    struct loop_source *events_source, *snapshots_source, *monitor_source;
    uint8_t uuid[16];
    uint64_t sequence;      /* of the last event in the index */
    uint64_t attempt;       /* request id of the snapshot that is awaited */
    uint64_t asked_us;
    bool parts_begun;       /* the first part of it has come */
    struct pending_event *pending, **pending_last;
    size_t n_pending;
};

static void drop_pending(struct store_feed *feed)
{
    while (feed->pending) {
        struct pending_event *event = feed->pending;
        feed->pending = event->next;
        free(event);
    }
    feed->pending_last = &feed->pending;
    feed->n_pending = 0;
}

/* -- snapshots -- */

static void ask_snapshot(struct store_feed *feed)
{
    uint8_t head[FRAME_HEADER_BYTES];
    struct frame_header header = {.type = STORE_SNAPSHOT_REQUEST, .request_id = ++feed->attempt};
    frame_header_encode(&header, head);
    drop_pending(feed);
    feed->state = FEED_SNAPSHOT;
    feed->parts_begun = false;
    feed->asked_us = clock_now_us();
    feed->route->counters.snapshots++;
    if (zmq_send(feed->snapshots, head, sizeof(head), ZMQ_SNDMORE | ZMQ_DONTWAIT) >= 0)
        (void)zmq_send(feed->snapshots, "", 0, ZMQ_DONTWAIT); /* asked again after a while if it gets lost */
    loop_zmq_kick(feed->snapshots_source);
}

static bool keys_are_sound(const ProtobufCBinaryData *keys, size_t n)
{
    if (n > FEED_KEYS_MAX)
        return false;
    for (size_t i = 0; i < n; i++)
        if (keys[i].len != BLOCK_KEY_BYTES)
            return false;
    return true;
}

static void add_keys(struct store_feed *feed, const ProtobufCBinaryData *keys, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        struct block_key key;
        memcpy(key.bytes, keys[i].data, BLOCK_KEY_BYTES);
        if (prefix_index_add(feed->route->index, feed->number, &key) < 0)
            return; /* full: what is not known is not a hit */
    }
}

static void remove_keys(struct store_feed *feed, const ProtobufCBinaryData *keys, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        struct block_key key;
        memcpy(key.bytes, keys[i].data, BLOCK_KEY_BYTES);
        prefix_index_remove(feed->route->index, feed->number, &key);
    }
}

/* -- events -- */

/* In the order of their numbers; a gap asks for a snapshot. */
static void apply(struct store_feed *feed, const Tidepool__Store__BlockEvents *events)
{
    bool same_store = memcmp(events->store_uuid.data, feed->uuid, sizeof(feed->uuid)) == 0;
    if (same_store && events->sequence <= feed->sequence)
        return;
    if (!same_store || events->sequence != feed->sequence + 1) {
        feed->route->counters.store_gaps++;
        LOG_INFO("store_gap", LOG_INT("store", feed->number), LOG_INT("expected", feed->sequence + 1), LOG_INT("got", events->sequence),
                 LOG_INT("same_store", same_store));
        ask_snapshot(feed);
        return;
    }
    remove_keys(feed, events->evicted, events->n_evicted); /* within a message these come first */
    add_keys(feed, events->stored, events->n_stored);
    feed->sequence = events->sequence;
}

static void apply_body(struct store_feed *feed, const uint8_t *body, size_t len)
{
    struct capped_alloc alloc;
    capped_alloc_init(&alloc, ROUTE_UNPACK_BYTES_MAX);
    Tidepool__Store__BlockEvents *events = tidepool__store__block_events__unpack(&alloc.pb, len, body);
    if (events && events->store_uuid.len == 16 && keys_are_sound(events->stored, events->n_stored) &&
        keys_are_sound(events->evicted, events->n_evicted))
        apply(feed, events);
    else
        feed->route->counters.malformed++;
    if (events)
        tidepool__store__block_events__free_unpacked(events, &alloc.pb);
}

static void keep_event(struct store_feed *feed, const uint8_t *body, size_t len)
{
    struct pending_event *event = feed->n_pending < FEED_PENDING_MAX ? malloc(sizeof(*event) + len) : NULL;
    if (!event) {
        ask_snapshot(feed); /* too much has happened since: from the start */
        return;
    }
    event->next = NULL;
    event->len = len;
    memcpy(event->body, body, len);
    *feed->pending_last = event;
    feed->pending_last = &event->next;
    feed->n_pending++;
}

static void take_event(struct store_feed *feed, const uint8_t *body, size_t len)
{
    if (feed->state == FEED_EXACT)
        apply_body(feed, body, len);
    else if (feed->state == FEED_SNAPSHOT)
        keep_event(feed, body, len);
}

static void snapshot_is_complete(struct store_feed *feed)
{
    struct pending_event *event = feed->pending;
    feed->pending = NULL;
    drop_pending(feed);
    feed->state = FEED_EXACT;
    while (event) {
        struct pending_event *next = event->next;
        if (feed->state == FEED_EXACT)
            apply_body(feed, event->body, event->len);
        free(event);
        event = next;
    }
    LOG_INFO("store_snapshot", LOG_INT("store", feed->number), LOG_INT("blocks", prefix_index_store_blocks(feed->route->index, feed->number)),
             LOG_INT("sequence", feed->sequence));
}

static void take_snapshot_part(struct store_feed *feed, const Tidepool__Store__Snapshot *part)
{
    if (!feed->parts_begun) {
        prefix_index_drop(feed->route->index, feed->number);
        memcpy(feed->uuid, part->store_uuid.data, sizeof(feed->uuid));
        feed->sequence = part->sequence;
        feed->parts_begun = true;
    } else if (memcmp(feed->uuid, part->store_uuid.data, sizeof(feed->uuid)) != 0 || feed->sequence != part->sequence) {
        ask_snapshot(feed); /* parts of two different moments */
        return;
    }
    add_keys(feed, part->keys, part->n_keys);
    feed->asked_us = clock_now_us();
    if (!part->more)
        snapshot_is_complete(feed);
}

static void take_snapshot(struct store_feed *feed, const uint8_t *body, size_t len)
{
    struct capped_alloc alloc;
    capped_alloc_init(&alloc, ROUTE_UNPACK_BYTES_MAX);
    Tidepool__Store__Snapshot *part = tidepool__store__snapshot__unpack(&alloc.pb, len, body);
    if (part && part->store_uuid.len == 16 && keys_are_sound(part->keys, part->n_keys))
        take_snapshot_part(feed, part);
    else
        feed->route->counters.malformed++;
    if (part)
        tidepool__store__snapshot__free_unpacked(part, &alloc.pb);
}

/* -- sockets -- */

static void take(struct store_feed *feed, zmq_msg_t *head, zmq_msg_t *body)
{
    struct frame_header header;
    if (frame_header_decode(zmq_msg_data(head), zmq_msg_size(head), &header) < 0 || header.body_bytes != zmq_msg_size(body))
        feed->route->counters.malformed++;
    else if (header.type == STORE_BLOCK_EVENTS)
        take_event(feed, zmq_msg_data(body), zmq_msg_size(body));
    else if (header.type == STORE_SNAPSHOT && feed->state == FEED_SNAPSHOT && header.request_id == feed->attempt)
        take_snapshot(feed, zmq_msg_data(body), zmq_msg_size(body));
}

static void drain(struct store_feed *feed, void *socket)
{
    for (int i = 0; i < FEED_BATCH; i++) {
        zmq_msg_t parts[2];
        const int n = message_parts_receive(socket, parts, 2);
        if (n == 2)
            take(feed, &parts[0], &parts[1]);
        else if (n > 0)
            feed->route->counters.malformed++;
        message_parts_close(parts, 2);
        if (n < 0)
            return;
    }
}

static void on_events(void *arg)
{
    drain(arg, ((struct store_feed *)arg)->events);
}

static void on_snapshots(void *arg)
{
    drain(arg, ((struct store_feed *)arg)->snapshots);
}

static void take_monitor_event(struct store_feed *feed, uint16_t event)
{
    if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) {
        ask_snapshot(feed);
    } else if (event == ZMQ_EVENT_DISCONNECTED && feed->state != FEED_DOWN) {
        LOG_WARN("store_lost", LOG_INT("store", feed->number), LOG_STR("endpoint", feed->event_endpoint));
        feed->state = FEED_DOWN;
        drop_pending(feed);
        prefix_index_drop(feed->route->index, feed->number);
    }
}

/* Connected and disconnected, as the I/O thread sees it: part one begins with the event's number, 16 bits in host order. */
static void on_monitor(void *arg)
{
    struct store_feed *feed = arg;
    for (int i = 0; i < FEED_BATCH; i++) {
        zmq_msg_t first;
        uint16_t event = 0;
        const int n = message_parts_receive(feed->monitor, &first, 1);
        if (n > 0 && zmq_msg_size(&first) >= sizeof(event))
            memcpy(&event, zmq_msg_data(&first), sizeof(event));
        message_parts_close(&first, 1);
        if (n < 0)
            return;
        take_monitor_event(feed, event);
    }
}

static int connect_socket(struct store_feed *feed, int type, void **ret_socket)
{
    const int64_t message_max = FRAME_BODY_MAX + FRAME_HEADER_BYTES;
    const struct { int option, value; } options[] = {
        {ZMQ_LINGER, 0}, {ZMQ_RCVHWM, FEED_RECEIVE_HWM}, {ZMQ_RECONNECT_IVL, FEED_RECONNECT_MS},
        {ZMQ_RECONNECT_IVL_MAX, FEED_RECONNECT_MS_MAX}, {ZMQ_IPV6, 1},
    };
    void *socket = *ret_socket = zmq_socket(feed->route->zmq_context, type);
    if (!socket)
        return -zmq_errno();
    for (size_t i = 0; i < ARRAY_LEN(options); i++)
        if (zmq_setsockopt(socket, options[i].option, &options[i].value, sizeof(int)) < 0)
            return -zmq_errno();
    return zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &message_max, sizeof(message_max)) < 0 ? -zmq_errno() : 0;
}

static int open_monitor(struct store_feed *feed)
{
    char address[64];
    snprintf(address, sizeof(address), "inproc://store-feed-%d", feed->number);
    if (zmq_socket_monitor(feed->events, address, ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED) < 0)
        return -zmq_errno();
    feed->monitor = zmq_socket(feed->route->zmq_context, ZMQ_PAIR);
    return !feed->monitor || zmq_connect(feed->monitor, address) < 0 ? -zmq_errno() : 0;
}

static int open_sockets(struct store_feed *feed)
{
    struct loop *loop = feed->route->config.loop;
    int rc = connect_socket(feed, ZMQ_SUB, &feed->events);
    if (rc >= 0)
        rc = connect_socket(feed, ZMQ_DEALER, &feed->snapshots);
    if (rc >= 0)
        rc = open_monitor(feed);
    if (rc < 0)
        return rc;
    if (zmq_setsockopt(feed->events, ZMQ_SUBSCRIBE, "", 0) < 0 || zmq_connect(feed->events, feed->event_endpoint) < 0 ||
        zmq_connect(feed->snapshots, feed->snapshot_endpoint) < 0)
        return -zmq_errno();
    rc = loop_zmq_add(loop, feed->events, on_events, feed, &feed->events_source);
    if (rc >= 0)
        rc = loop_zmq_add(loop, feed->snapshots, on_snapshots, feed, &feed->snapshots_source);
    if (rc >= 0)
        rc = loop_zmq_add(loop, feed->monitor, on_monitor, feed, &feed->monitor_source);
    return rc;
}

static void feed_free(struct store_feed *feed)
{
    loop_source_free(feed->events_source);
    loop_source_free(feed->snapshots_source);
    loop_source_free(feed->monitor_source);
    if (feed->monitor)
        zmq_close(feed->monitor);
    if (feed->events)
        zmq_close(feed->events);
    if (feed->snapshots)
        zmq_close(feed->snapshots);
    drop_pending(feed);
    free(feed);
}

static struct store_feed *feed_open(struct route *route, int number, const char *event_endpoint, const char *snapshot_endpoint)
{
    struct store_feed *feed = calloc(1, sizeof(*feed));
    if (!feed)
        return NULL;
    feed->route = route;
    feed->number = number;
    feed->pending_last = &feed->pending;
    snprintf(feed->event_endpoint, sizeof(feed->event_endpoint), "%s", event_endpoint);
    snprintf(feed->snapshot_endpoint, sizeof(feed->snapshot_endpoint), "%s", snapshot_endpoint);
    int rc = open_sockets(feed);
    if (rc < 0) {
        LOG_WARN("store_feed_failed", LOG_STR("endpoint", event_endpoint), LOG_STR("error", zmq_strerror(-rc)));
        feed_free(feed);
        return NULL;
    }
    return feed;
}

struct store_feed *store_feed_get(struct route *route, const char *event_endpoint, const char *snapshot_endpoint)
{
    int i = 0;
    for (; i < PREFIX_STORES_MAX && route->feeds[i]; i++)
        if (strcmp(route->feeds[i]->event_endpoint, event_endpoint) == 0 && strcmp(route->feeds[i]->snapshot_endpoint, snapshot_endpoint) == 0)
            return route->feeds[i];
    if (i == PREFIX_STORES_MAX)
        return NULL;
    route->feeds[i] = feed_open(route, i, event_endpoint, snapshot_endpoint);
    return route->feeds[i];
}

int store_feed_number(const struct store_feed *feed)
{
    return feed->number;
}

void store_feed_tick(struct route *route, uint64_t now_us)
{
    for (int i = 0; i < PREFIX_STORES_MAX && route->feeds[i]; i++) {
        struct store_feed *feed = route->feeds[i];
        if (feed->state == FEED_SNAPSHOT && now_us - feed->asked_us > FEED_SNAPSHOT_TIMEOUT_US)
            ask_snapshot(feed);
    }
}

void store_feed_close_all(struct route *route)
{
    for (int i = 0; i < PREFIX_STORES_MAX && route->feeds[i]; i++) {
        feed_free(route->feeds[i]);
        route->feeds[i] = NULL;
    }
}
