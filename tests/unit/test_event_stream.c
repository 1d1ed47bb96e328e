#include "kvstore/event_stream.h"
#include "proto/wire/frame.h"
#include "proto/wire/store.pb-c.h"
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

enum { WAIT_MS = 20000, MANY = 5000 };

static char folder[] = "/tmp/tidepool-test-XXXXXX", events[64], snapshots[64];
static struct loop *loop;
static struct event_stream *stream;
static struct pool_listener listener;
static void *context, *subscriber;

static struct block_key key_of(uint32_t i)
{
    struct block_key key = {{0}};

    memcpy(key.bytes, &i, sizeof i);
    return key;
}

static void stored(uint32_t i, uint64_t *mark)
{
    struct block_key key = key_of(i);

    listener.stored(listener.arg, &key, mark);
}

static void evicted(uint32_t i, uint64_t mark)
{
    struct block_key key = key_of(i);

    listener.evicted(listener.arg, &key, &mark);
}

static bool readable(int ms)
{
    return zmq_poll(&(zmq_pollitem_t){.socket = subscriber, .events = ZMQ_POLLIN}, 1, ms) > 0;
}

static Tidepool__Store__BlockEvents *receive(void)
{
    static uint8_t body[1 << 20];
    uint8_t header[FRAME_HEADER_BYTES];
    int n;

    cr_assert(readable(WAIT_MS));
    cr_assert_eq(zmq_recv(subscriber, header, sizeof header, 0), sizeof header);
    n = zmq_recv(subscriber, body, sizeof body, 0);
    cr_assert_geq(n, 0);
    Tidepool__Store__BlockEvents *e = tidepool__store__block_events__unpack(NULL, (size_t)n, body);
    cr_assert_not_null(e);
    return e;
}

/* The next message has this many of each. */
static uint64_t expect(size_t n_stored, size_t n_evicted)
{
    Tidepool__Store__BlockEvents *e = receive();
    uint64_t sequence = e->sequence;

    cr_assert(e->n_stored == n_stored && e->n_evicted == n_evicted, "%zu stored, %zu evicted", e->n_stored, e->n_evicted);
    tidepool__store__block_events__free_unpacked(e, NULL);
    return sequence;
}

static void setup(void)
{
    struct event_stream_config config = {.event_endpoint = events, .snapshot_endpoint = snapshots};
    struct error err = {""};
    uint64_t mark = 0;

    cr_assert_not_null(mkdtemp(folder));
    snprintf(events, sizeof events, "ipc://%s/e", folder);
    snprintf(snapshots, sizeof snapshots, "ipc://%s/s", folder);
    cr_assert_eq(loop_create(&loop), 0);
    cr_assert_eq(event_stream_create(loop, &config, &stream, &err), 0, "%s", err.text);
    listener = event_stream_listener(stream);
    context = zmq_ctx_new();
    subscriber = zmq_socket(context, ZMQ_SUB);
    zmq_setsockopt(subscriber, ZMQ_SUBSCRIBE, "", 0);
    cr_assert_eq(zmq_connect(subscriber, events), 0);
    /* A subscription takes effect some time later: events are made until one is heard. */
    do {
        stored(0, &mark);
        loop_poll(loop);
    } while (!readable(10));
    do {
        tidepool__store__block_events__free_unpacked(receive(), NULL);
    } while (readable(50));
}

static void teardown(void)
{
    zmq_close(subscriber);
    zmq_ctx_term(context);
    event_stream_free(stream);
    loop_free(loop);
    cr_assert_eq(rmdir(folder), 0); /* the sockets are gone */
}

TestSuite(event_stream, .init = setup, .fini = teardown, .timeout = 60);

Test(event_stream, test_one_turn_is_one_message)
{
    uint64_t mark[3] = {0}, last = event_stream_sequence(stream);

    stored(1, &mark[0]);
    stored(2, &mark[1]);
    evicted(0, 1);
    cr_assert_eq(event_stream_sequence(stream), last);
    loop_poll(loop);
    cr_assert_eq(event_stream_sequence(stream), last + 1);
    cr_assert_eq(expect(2, 1), last + 1);
    loop_poll(loop);
    cr_assert_eq(event_stream_sequence(stream), last + 1);
}

/* Stored and gone within a turn: two messages, for within one `evicted` comes first. */
Test(event_stream, test_block_that_comes_and_goes_in_one_turn)
{
    uint64_t mark = 0;

    stored(1, &mark);
    evicted(1, mark);
    loop_poll(loop);
    expect(1, 0);
    expect(0, 1);
}

Test(event_stream, test_block_that_goes_and_comes_in_one_turn)
{
    uint64_t mark = 0;

    stored(1, &mark);
    loop_poll(loop);
    expect(1, 0);
    evicted(1, mark);
    stored(1, &mark);
    loop_poll(loop);
    expect(1, 1);
    evicted(1, mark);
    stored(1, &mark);
    evicted(1, mark); /* and goes again */
    loop_poll(loop);
    expect(1, 1);
    expect(0, 1);
}

Test(event_stream, test_many_changes_are_cut_into_messages_without_gap)
{
    uint64_t mark, first;

    for (uint32_t i = 1; i <= MANY; i++)
        stored(i, &mark);
    loop_poll(loop);
    first = expect(4096, 0);
    cr_assert_eq(expect(MANY - 4096, 0), first + 1);
}
