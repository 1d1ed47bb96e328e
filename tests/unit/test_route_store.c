/* What the routing core knows of a store, which speaks the real protocol too. */
#include "proto/wire/store.pb-c.h"
#include "tests/unit/route_fixture.h"
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>
#include <zmq.h>

TestSuite(route_store, .init = route_fixture_open, .fini = route_fixture_close, .timeout = 60);

struct fake_store {
    void *events, *snapshots;
    struct loop_source *source;
    uint64_t sequence;
    int n_snapshots;
    struct block_key keys[8];
    int n_keys;
    uint8_t uuid[16];
};

static void store_send(void *socket, uint16_t type, uint64_t id, const ProtobufCMessage *message)
{
    uint8_t head[FRAME_HEADER_BYTES], body[4096];
    size_t len = protobuf_c_message_pack(message, body);
    frame_header_encode(&(struct frame_header){.type = type, .body_bytes = (uint32_t)len, .request_id = id}, head);
    zmq_send(socket, head, sizeof(head), ZMQ_SNDMORE | ZMQ_DONTWAIT);
    zmq_send(socket, body, len, ZMQ_DONTWAIT);
}

static void on_snapshot_request(void *arg)
{
    struct fake_store *s = arg;
    uint8_t peer[256], head[FRAME_HEADER_BYTES], body[16];
    int n_peer;
    while ((n_peer = zmq_recv(s->snapshots, peer, sizeof(peer), ZMQ_DONTWAIT)) >= 0) {
        struct frame_header header;
        ProtobufCBinaryData keys[8];
        Tidepool__Store__Snapshot part = TIDEPOOL__STORE__SNAPSHOT__INIT;
        zmq_recv(s->snapshots, head, sizeof(head), ZMQ_DONTWAIT);
        zmq_recv(s->snapshots, body, sizeof(body), ZMQ_DONTWAIT);
        cr_assert_eq(frame_header_decode(head, sizeof(head), &header), 0);
        cr_assert_eq(header.type, STORE_SNAPSHOT_REQUEST);
        s->n_snapshots++;
        part.store_uuid = (ProtobufCBinaryData){16, s->uuid};
        part.sequence = s->sequence;
        for (int i = 0; i < s->n_keys; i++) { /* one key a part */
            keys[0] = (ProtobufCBinaryData){32, s->keys[i].bytes};
            part.keys = keys;
            part.n_keys = 1;
            part.more = i + 1 < s->n_keys;
            zmq_send(s->snapshots, peer, (size_t)n_peer, ZMQ_SNDMORE | ZMQ_DONTWAIT);
            store_send(s->snapshots, STORE_SNAPSHOT, header.request_id, &part.base);
        }
    }
}

static void store_open(struct fake_store *s)
{
    char text[160];
    int linger = 0;
    memset(s, 0, sizeof(*s));
    s->uuid[0] = 9;
    s->sequence = 5;
    s->events = zmq_socket(zmq_context, ZMQ_PUB);
    s->snapshots = zmq_socket(zmq_context, ZMQ_ROUTER);
    zmq_setsockopt(s->events, ZMQ_LINGER, &linger, sizeof(linger));
    zmq_setsockopt(s->snapshots, ZMQ_LINGER, &linger, sizeof(linger));
    snprintf(text, sizeof(text), "ipc://%s/e", route_dir);
    cr_assert_eq(zmq_bind(s->events, text), 0);
    snprintf(text, sizeof(text), "ipc://%s/s", route_dir);
    cr_assert_eq(zmq_bind(s->snapshots, text), 0);
    cr_assert_eq(loop_zmq_add(loop, s->snapshots, on_snapshot_request, s, &s->source), 0);
}

static void store_close(struct fake_store *s)
{
    loop_source_free(s->source);
    zmq_close(s->events);
    zmq_close(s->snapshots);
}

static void store_publish(struct fake_store *s, const struct block_key *stored, const struct block_key *evicted)
{
    Tidepool__Store__BlockEvents message = TIDEPOOL__STORE__BLOCK_EVENTS__INIT;
    ProtobufCBinaryData in = {32, stored ? (uint8_t *)stored->bytes : NULL}, out = {32, evicted ? (uint8_t *)evicted->bytes : NULL};
    message.store_uuid = (ProtobufCBinaryData){16, s->uuid};
    message.sequence = ++s->sequence;
    message.stored = &in;
    message.n_stored = stored != NULL;
    message.evicted = &out;
    message.n_evicted = evicted != NULL;
    store_send(s->events, STORE_BLOCK_EVENTS, 0, &message.base);
}

static size_t known(void)
{
    struct route_worker_info info;
    route_worker_info(route, 0, &info);
    return info.store_blocks;
}

static struct block_key numbered(uint8_t n)
{
    struct block_key key = {.bytes = {n}};
    return key;
}

Test(route_store, test_route_follows_a_store_from_snapshot_through_events_and_gaps)
{
    struct fake_worker w;
    struct fake_store s;
    store_open(&s);
    s.n_keys = 3;
    for (int i = 0; i < 3; i++)
        s.keys[i] = numbered((uint8_t)(i + 1));
    fake_connect(&w, "w0", 1);
    fake_ready_with(&w, "store");
    UNTIL(known() == 3);
    struct block_key four = numbered(4), one = numbered(1);
    store_publish(&s, &four, NULL);
    UNTIL(known() == 4);
    store_publish(&s, NULL, &one);
    UNTIL(known() == 3);
    int before = s.n_snapshots;
    s.sequence += 3; /* lost messages */
    s.keys[0] = numbered(7);
    s.n_keys = 1;
    store_publish(&s, &one, NULL);
    UNTIL(s.n_snapshots > before && known() == 1);
    cr_assert_eq(route_counters(route)->store_gaps, 1);
    store_close(&s); /* the store dies: what it held may be gone */
    UNTIL(known() == 0);
    store_open(&s); /* and comes back as another one */
    s.uuid[0] = 77;
    s.n_keys = 2;
    s.keys[0] = numbered(8);
    s.keys[1] = numbered(9);
    UNTIL(known() == 2);
    store_close(&s);
    fake_close(&w);
}
