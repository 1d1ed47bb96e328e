/* What a router hears of the pool: events without gaps, snapshots that agree with them. */
#include "tests/system/store_fixture.h"
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

enum { N_KEYS = 8000, TIMEOUT_MS = 20000 };

/* A subscriber's idea of the pool. */
static struct {
    bool has[N_KEYS];
    uint64_t sequence;
} view;

static uint64_t snapshot_id, received_id; /* request ids: the last one sent, of the message received last */

static struct store_fixture f;
static struct kv_client *client;
static void *context, *events, *snapshots;

static void *socket_open(int type, const char *endpoint)
{
    void *socket = zmq_socket(context, type);
    int timeout = TIMEOUT_MS, zero = 0;

    zmq_setsockopt(socket, ZMQ_RCVTIMEO, &timeout, sizeof timeout);
    zmq_setsockopt(socket, ZMQ_LINGER, &zero, sizeof zero);
    if (type == ZMQ_SUB)
        zmq_setsockopt(socket, ZMQ_SUBSCRIBE, "", 0);
    zmq_setsockopt(socket, ZMQ_RCVHWM, &zero, sizeof zero);
    cr_assert_eq(zmq_connect(socket, endpoint), 0);
    return socket;
}

static void start(const char *pool_size)
{
    struct kv_store_info info;

    store_fixture_init(&f, pool_size, 30);
    client = store_fixture_client(&f, "writer");
    kv_client_info(client, &info);
    context = zmq_ctx_new();
    events = socket_open(ZMQ_SUB, info.event_endpoint);
    snapshots = socket_open(ZMQ_DEALER, info.snapshot_endpoint);
}

static void setup(void)
{
    start("1M");
}

static void setup_large(void)
{
    start("48M");
}

static void teardown(void)
{
    kv_client_free(client);
    zmq_close(events);
    zmq_close(snapshots);
    zmq_ctx_term(context);
    store_fixture_fini(&f);
}

TestSuite(kvstore_events, .init = setup, .fini = teardown, .timeout = 120);
TestSuite(kvstore_events_large, .init = setup_large, .fini = teardown, .timeout = 120);

/* Receives header and body. NULL if nothing comes within `timeout_ms`. */
static ProtobufCMessage *receive(void *socket, uint16_t type, const ProtobufCMessageDescriptor *descriptor, int timeout_ms)
{
    static uint8_t body[1 << 20];
    uint8_t bytes[FRAME_HEADER_BYTES];
    struct frame_header header;
    zmq_pollitem_t item = {.socket = socket, .events = ZMQ_POLLIN};
    int n;

    if (zmq_poll(&item, 1, timeout_ms) <= 0)
        return NULL;
    cr_assert_eq(zmq_recv(socket, bytes, sizeof bytes, 0), sizeof bytes);
    cr_assert_eq(frame_header_decode(bytes, sizeof bytes, &header), 0);
    cr_assert_eq(header.type, type);
    received_id = header.request_id;
    n = zmq_recv(socket, body, sizeof body, 0);
    cr_assert_eq(n, (int)header.body_bytes);
    return protobuf_c_message_unpack(descriptor, NULL, (size_t)n, body);
}

static uint32_t number_of(const ProtobufCBinaryData *key)
{
    uint32_t i;

    cr_assert_eq(key->len, BLOCK_KEY_BYTES);
    memcpy(&i, key->data, sizeof i);
    cr_assert_lt(i, N_KEYS);
    return i;
}

static bool event_apply(int timeout_ms)
{
    Tidepool__Store__BlockEvents *e =
        (Tidepool__Store__BlockEvents *)receive(events, STORE_BLOCK_EVENTS, &tidepool__store__block_events__descriptor, timeout_ms);

    if (!e)
        return false;
    if (e->sequence > view.sequence) {
        cr_assert_eq(e->sequence, view.sequence + 1, "gap between %lu and %lu", view.sequence, e->sequence);
        view.sequence = e->sequence;
        for (size_t i = 0; i < e->n_evicted; i++)
            view.has[number_of(&e->evicted[i])] = false;
        for (size_t i = 0; i < e->n_stored; i++)
            view.has[number_of(&e->stored[i])] = true;
    }
    tidepool__store__block_events__free_unpacked(e, NULL);
    return true;
}

static void snapshot_request(void)
{
    Tidepool__Store__SnapshotRequest request = TIDEPOOL__STORE__SNAPSHOT_REQUEST__INIT;
    uint8_t header[FRAME_HEADER_BYTES], body[16];
    size_t n = protobuf_c_message_pack(&request.base, body);

    frame_header_encode(&(struct frame_header){.type = STORE_SNAPSHOT_REQUEST, .body_bytes = (uint32_t)n, .request_id = ++snapshot_id}, header);
    cr_assert_eq(zmq_send(snapshots, header, sizeof header, ZMQ_SNDMORE), sizeof header);
    cr_assert_eq(zmq_send(snapshots, body, n, 0), (int)n);
}

/* Asks for a snapshot and makes it the view. Returns the number of parts. */
static int snapshot_take(void)
{
    int parts = 0;
    bool more = true;

    snapshot_request();
    memset(&view, 0, sizeof view);
    while (more) {
        Tidepool__Store__Snapshot *part =
            (Tidepool__Store__Snapshot *)receive(snapshots, STORE_SNAPSHOT, &tidepool__store__snapshot__descriptor, TIMEOUT_MS);
        cr_assert_not_null(part);
        if (received_id != snapshot_id) {
            /* Of an earlier request. */
            tidepool__store__snapshot__free_unpacked(part, NULL);
            continue;
        }
        cr_assert(parts == 0 || part->sequence == view.sequence);
        view.sequence = part->sequence;
        for (size_t i = 0; i < part->n_keys; i++)
            view.has[number_of(&part->keys[i])] = true;
        more = part->more;
        parts++;
        tidepool__store__snapshot__free_unpacked(part, NULL);
    }
    return parts;
}

/* What is really there, asked block by block. */
static void view_check(void)
{
    for (uint32_t i = 1; i < N_KEYS; i++)
        cr_assert_eq(store_found(client, i, 1) == 1, view.has[i], "block %u", i);
}

/* A subscription takes effect some time after connecting: events are made until one is heard. */
static uint32_t subscribe(void)
{
    uint32_t i = 1;
    struct kv_lease lease;

    do {
        store_put(client, i++, 0, 0, &lease);
        kv_client_release(client, &lease, 1);
        view.sequence = 0;
    } while (zmq_poll(&(zmq_pollitem_t){.socket = events, .events = ZMQ_POLLIN}, 1, 10) == 0);
    return i;
}

Test(kvstore_events, test_events_are_gapless_on_top_of_a_snapshot)
{
    uint32_t next = subscribe();
    struct kv_lease lease;
    uint64_t last;

    cr_assert_eq(snapshot_take(), 1);
    /* Twenty times the pool: evictions too. */
    for (; next < 2600; next++) {
        store_put(client, next, 0, 0, &lease);
        kv_client_release(client, &lease, 1);
        while (event_apply(0))
            ;
    }
    while (event_apply(500))
        ;
    cr_assert_gt(view.sequence, 100);
    view_check();
    /* And a new subscriber ends up with the same. */
    bool before[N_KEYS];
    memcpy(before, view.has, sizeof before);
    last = view.sequence;
    snapshot_take();
    cr_assert_eq(view.sequence, last);
    cr_assert_eq(memcmp(before, view.has, sizeof before), 0);
}

/* Three parts, requested while blocks come: what the snapshot misses, events above its number say. */
Test(kvstore_events_large, test_snapshot_in_parts_while_the_pool_changes)
{
    uint32_t next = subscribe();
    struct kv_lease lease;

    for (; next < 7500; next++) {
        store_put(client, next, 0, 0, &lease);
        kv_client_release(client, &lease, 1);
        if (next % 500 == 0)
            snapshot_request();
        if (next == 5000)
            cr_assert_geq(snapshot_take(), 2);
    }
    while (event_apply(500))
        ;
    view_check();
    cr_assert_eq(snapshot_take(), 3);
    view_check();
}

Test(kvstore_events, test_bad_snapshot_requests_are_dropped)
{
    uint8_t junk[1000] = {1};

    cr_assert_eq(zmq_send(snapshots, junk, 10, 0), 10);
    cr_assert_eq(zmq_send(snapshots, junk, 24, ZMQ_SNDMORE), 24);
    cr_assert_eq(zmq_send(snapshots, junk, 5, 0), 5);
    for (int i = 0; i < 5; i++)
        cr_assert_eq(zmq_send(snapshots, junk, 20, i < 4 ? ZMQ_SNDMORE : 0), 20);
    cr_assert_eq(snapshot_take(), 1);
    cr_assert_eq(view.sequence, 0);
}
