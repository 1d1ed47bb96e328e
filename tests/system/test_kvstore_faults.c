/* What the store and its clients do when one of them dies, hangs or misbehaves. */
#include "tests/system/store_fixture.h"
#include "proto/base/clock.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static struct store_fixture f;
static struct store_wire watch; /* asks for statistics */

static void setup(void)
{
    store_fixture_init(&f, "1M", 1);
    store_wire_open(&watch, f.socket);
}

static void teardown(void)
{
    store_wire_close(&watch);
    store_fixture_fini(&f);
}

TestSuite(kvstore_faults, .init = setup, .fini = teardown, .timeout = 120);

/* ---- clients that die ---- */

enum stage { STAGE_CONNECTED, STAGE_RESERVED, STAGE_WRITTEN, STAGE_SEALED, STAGE_READING, STAGE_RELEASED, N_STAGES };

/* A client in a process of its own that goes up to a stage, says so and waits for its end. */
static pid_t client_start(enum stage stage)
{
    int ready[2];
    char byte = 0;
    pid_t pid;

    cr_assert_eq(pipe(ready), 0);
    pid = fork();
    cr_assert_geq(pid, 0);
    if (pid == 0) {
        struct kv_client *client = store_fixture_client(&f, "victim");
        const struct kv_reserve_block blocks[2] = {store_block(1, 0, 0), store_block(2, 1, 1)};
        const struct block_key keys[2] = {blocks[0].key, blocks[1].key};
        enum kv_reserve_status status[2];
        struct kv_lease leases[2], read[2], *list[2] = {&leases[0], &leases[1]};

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (stage >= STAGE_RESERVED)
            kv_client_reserve(client, blocks, 2, STORE_WAIT_US, status, leases);
        for (uint32_t i = 0; i < 2 && stage >= STAGE_WRITTEN; i++)
            store_fill(&leases[i], 1 + i);
        if (stage >= STAGE_SEALED)
            kv_client_seal(client, list, 2);
        if (stage >= STAGE_READING && kv_client_lookup(client, keys, 2, STORE_WAIT_US, read) != 2)
            _exit(1);
        if (stage >= STAGE_RELEASED) {
            kv_client_release(client, leases, 2);
            kv_client_release(client, read, 2);
        }
        /* One answered request: whatever was sent before it has been handled. */
        kv_client_lookup(client, &(struct block_key){{9}}, 1, STORE_WAIT_US, read);
        if (write(ready[1], &byte, 1) != 1)
            _exit(1);
        for (;;)
            pause();
    }
    close(ready[1]);
    cr_assert_eq(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    return pid;
}

static bool no_leases(const Tidepool__Store__StatsResult *s)
{
    return s->n_read_leases == 0 && s->n_unsealed == 0 && s->n_clients == 1;
}

Test(kvstore_faults, test_killed_client_leaves_no_lease_at_any_stage)
{
    for (enum stage stage = 0; stage < N_STAGES; stage++) {
        bool sealed = stage >= STAGE_SEALED;
        pid_t pid = client_start(stage);
        const Tidepool__Store__StatsResult *s = store_wire_stats(&watch);

        cr_assert_eq(s->n_unsealed, stage == STAGE_RESERVED || stage == STAGE_WRITTEN ? 2 : 0, "stage %d", stage);
        cr_assert_eq(s->n_read_leases, stage == STAGE_SEALED ? 2 : stage == STAGE_READING ? 4 : 0, "stage %d", stage);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        store_await(&watch, no_leases, "leases of a killed client end");
        s = store_wire_stats(&watch);
        cr_assert_eq(s->used_bytes, sealed ? 2 * STORE_BLOCK_BYTES : 0, "stage %d", stage);
        cr_assert_eq(s->pinned_bytes, 0);
        if (!sealed)
            continue;
        /* What was sealed is served; a new store for the next stage. */
        struct kv_client *b = store_fixture_client(&f, "b");
        cr_assert_eq(store_found(b, 1, 2), 2);
        kv_client_free(b);
        store_wire_close(&watch);
        store_fixture_kill(&f);
        store_fixture_restart(&f);
        store_wire_open(&watch, f.socket);
    }
}

static bool unresponsive(const Tidepool__Store__StatsResult *s)
{
    return s->unresponsive == 1;
}

Test(kvstore_faults, test_stopped_client_is_reported_and_keeps_its_leases)
{
    pid_t pid = client_start(STAGE_WRITTEN);
    const Tidepool__Store__StatsResult *s;

    kill(pid, SIGSTOP);
    store_await(&watch, unresponsive, "a stopped client is reported");
    s = store_wire_stats(&watch);
    cr_assert_eq(s->n_unsealed, 2);
    cr_assert_eq(s->pinned_bytes, 2 * STORE_BLOCK_BYTES);
    cr_assert(child_wait_line(&f.process, "event=client_unresponsive", STORE_WAIT_MS));
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    store_await(&watch, no_leases, "its end frees them");
    cr_assert_eq(store_wire_stats(&watch)->unresponsive, 0);
}

static bool closed(const Tidepool__Store__StatsResult *s)
{
    return s->n_clients == 1;
}

/* The process lives on after its socket is gone: its writes may still land, so the extents stay, but others get the keys. */
Test(kvstore_faults, test_unsealed_extents_outlive_the_socket_of_a_living_process)
{
    struct kv_client *a = store_fixture_client(&f, "a"), *b;
    const struct kv_reserve_block blocks[2] = {store_block(1, 0, 0), store_block(2, 1, 1)};
    enum kv_reserve_status status[2];
    struct kv_lease leases[2], lease;
    const Tidepool__Store__StatsResult *s;

    cr_assert_eq(kv_client_reserve(a, blocks, 2, STORE_WAIT_US, status, leases), 2);
    kv_client_free(a); /* without releasing */
    store_await(&watch, closed, "the socket closes");
    s = store_wire_stats(&watch);
    cr_assert_eq(s->used_bytes, 2 * STORE_BLOCK_BYTES);
    b = store_fixture_client(&f, "b");
    store_put(b, 1, 0, 0, &lease);
    cr_assert_eq(store_found(b, 1, 2), 1);
    kv_client_free(b);
}

/* ---- a store that dies or hangs ---- */

static int states[8], n_states;

static void on_state(bool connected, void *arg)
{
    (void)arg;
    states[n_states++ % 8] = connected;
    loop_stop(f.loop);
}

Test(kvstore_faults, test_killed_store_leaves_mappings_and_comes_back_empty)
{
    const struct kv_client_config config = {.socket_path = f.socket, .name = "a", .connect_timeout_us = STORE_WAIT_US, .on_state = on_state};
    const struct kv_reserve_block block = store_block(7, 0, 0);
    enum kv_reserve_status status;
    struct kv_store_info before, after;
    struct kv_lease lease, writing, fresh, *list[1] = {&writing};
    struct kv_client *a;
    struct error err;

    cr_assert_eq(kv_client_create(f.loop, &config, &a, &err), 0);
    cr_assert_eq(loop_run(f.loop), 0);
    cr_assert(n_states == 1 && states[0] == true);
    kv_client_info(a, &before);
    store_put(a, 1, 0, 0, &lease);
    cr_assert_eq(kv_client_reserve(a, &block, 1, STORE_WAIT_US, &status, &writing), 1);
    store_wire_close(&watch);
    store_fixture_kill(&f);
    cr_assert_eq(kv_client_lookup(a, &block.key, 1, STORE_WAIT_US, &fresh), -ENOTCONN);
    cr_assert_eq(kv_client_lookup(a, &block.key, 1, STORE_WAIT_US, &fresh), -ENOTCONN);
    cr_assert(store_filled(&lease, 1));
    store_fill(&writing, 7);
    cr_assert_eq(kv_client_seal(a, list, 1), -ENOTCONN);
    cr_assert_eq(loop_run(f.loop), 0);
    cr_assert(n_states == 2 && states[1] == false);

    store_fixture_restart(&f);
    cr_assert_eq(loop_run(f.loop), 0);
    cr_assert(n_states == 3 && states[2] == true);
    kv_client_info(a, &after);
    cr_assert(after.connected && memcmp(before.store_uuid, after.store_uuid, sizeof before.store_uuid) != 0);
    cr_assert_eq(store_found(a, 1, 1), 0);
    store_put(a, 1, 0, 0, &fresh);
    cr_assert(fresh.mapping != lease.mapping);
    cr_assert(store_filled(&lease, 1) && store_filled(&writing, 7));
    kv_client_release(a, &lease, 1);
    kv_client_release(a, &writing, 1);
    cr_assert_eq(store_found(a, 1, 1), 1);
    kv_client_free(a);
    store_wire_open(&watch, f.socket);
}

Test(kvstore_faults, test_client_without_a_store_keeps_trying)
{
    const struct kv_client_config config = {.socket_path = f.socket, .name = "a", .connect_timeout_us = 1000000, .on_state = on_state};
    struct kv_store_info info;
    struct kv_client *a;
    struct error err;

    store_wire_close(&watch);
    store_fixture_kill(&f);
    cr_assert_eq(kv_client_create(f.loop, &config, &a, &err), 0);
    kv_client_info(a, &info);
    cr_assert(!info.connected && strstr(info.error.text, "refused"), "%s", info.error.text);
    store_fixture_restart(&f);
    cr_assert_eq(loop_run(f.loop), 0);
    cr_assert(n_states == 1 && states[0] == true);
    kv_client_free(a);
    store_wire_open(&watch, f.socket);
}

Test(kvstore_faults, test_stopped_store_costs_a_deadline_and_no_lease)
{
    struct kv_client *a = store_fixture_client(&f, "a");
    const struct kv_reserve_block block = store_block(2, 1, 1);
    const struct block_key key = store_key(1);
    enum kv_reserve_status status;
    struct kv_lease lease, got;
    uint64_t before;

    store_put(a, 1, 0, 0, &lease);
    cr_assert_eq(store_found(a, 1, 1), 1);
    kill(f.process.pid, SIGSTOP);
    before = clock_now_us();
    cr_assert_eq(kv_client_lookup(a, &key, 1, 50000, &got), -ETIMEDOUT);
    cr_assert_eq(kv_client_reserve(a, &block, 1, 50000, &status, &got), -ETIMEDOUT);
    cr_assert_geq(clock_now_us() - before, 100000);
    cr_assert(store_filled(&lease, 1));
    kill(f.process.pid, SIGCONT);
    /* The late answers come in front of this one; their leases go back. */
    cr_assert_eq(store_found(a, 1, 1), 1);
    kv_client_release(a, &lease, 1);
    cr_assert_eq(store_found(a, 1, 1), 1);
    cr_assert_eq(store_wire_stats(&watch)->n_read_leases, 0);
    cr_assert_eq(store_wire_stats(&watch)->n_unsealed, 0);
    kv_client_free(a);
}

/* ---- clients that misbehave ---- */

static ProtobufCMessage *failure_expect(struct store_wire *wire)
{
    ProtobufCMessage *message;
    uint16_t type = 0;

    message = store_wire_receive(wire, &type);
    cr_assert_not_null(message);
    cr_assert_eq(type, STORE_FAILURE);
    return message;
}

/* Expects a Failure that contains `text`, then the end of the connection. */
static void cut_off_expect(struct store_wire *wire, const char *text)
{
    ProtobufCMessage *message = failure_expect(wire);
    uint16_t type;

    cr_assert(strstr(((Tidepool__Store__Failure *)message)->text, text), "%s", ((Tidepool__Store__Failure *)message)->text);
    protobuf_c_message_free_unpacked(message, NULL);
    cr_assert_null(store_wire_receive(wire, &type));
    store_wire_close(wire);
}

Test(kvstore_faults, test_random_bytes_end_the_connection_only)
{
    uint64_t state = 1;

    for (int round = 0; round < 50; round++) {
        struct store_wire wire;
        uint8_t junk[3000];
        for (size_t i = 0; i < sizeof junk; i++) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            junk[i] = (uint8_t)(state >> 56);
        }
        if (round % 2)
            store_wire_open(&wire, f.socket);
        else
            store_wire_connect(&wire, f.socket);
        store_wire_send_raw(&wire, junk, sizeof junk);
        cut_off_expect(&wire, "bad frame header");
    }
    cr_assert_eq(store_wire_stats(&watch)->protocol_errors, 50);
    cr_assert_eq(store_wire_stats(&watch)->n_clients, 1);
}

Test(kvstore_faults, test_requests_that_break_the_protocol)
{
    static Tidepool__Store__SealBlock seal_block = TIDEPOOL__STORE__SEAL_BLOCK__INIT;
    static Tidepool__Store__SealBlock *seal_list[5000];
    static uint64_t ids[5000];
    uint8_t short_key[31] = {0}, key[32] = {0};
    Tidepool__Store__Hello hello = TIDEPOOL__STORE__HELLO__INIT;
    Tidepool__Store__Lookup lookup = TIDEPOOL__STORE__LOOKUP__INIT;
    Tidepool__Store__Seal seal = TIDEPOOL__STORE__SEAL__INIT;
    Tidepool__Store__Release release = TIDEPOOL__STORE__RELEASE__INIT;
    Tidepool__Store__ReserveBlock block = TIDEPOOL__STORE__RESERVE_BLOCK__INIT, *block_list[1] = {&block};
    Tidepool__Store__Reserve reserve = TIDEPOOL__STORE__RESERVE__INIT;
    ProtobufCBinaryData keys[1] = {{sizeof short_key, short_key}};
    struct frame_header huge = {.type = STORE_LOOKUP, .body_bytes = 8 << 20};
    uint8_t header[FRAME_HEADER_BYTES];
    struct store_wire wire;

    store_wire_connect(&wire, f.socket);
    store_wire_send(&wire, STORE_LOOKUP, &lookup.base);
    cut_off_expect(&wire, "before Hello");

    store_wire_connect(&wire, f.socket);
    hello.version = 99;
    store_wire_send(&wire, STORE_HELLO, &hello.base);
    cut_off_expect(&wire, "version 99");

    store_wire_open(&wire, f.socket);
    store_wire_send(&wire, STORE_WELCOME, &lookup.base);
    cut_off_expect(&wire, "unknown");

    store_wire_open(&wire, f.socket);
    lookup.n_keys = 1;
    lookup.keys = keys;
    store_wire_send(&wire, STORE_LOOKUP, &lookup.base);
    cut_off_expect(&wire, "a key of 31 bytes");

    store_wire_open(&wire, f.socket);
    frame_header_encode(&huge, header);
    store_wire_send_raw(&wire, header, sizeof header);
    cut_off_expect(&wire, "at most");

    store_wire_open(&wire, f.socket);
    for (int i = 0; i < 5000; i++)
        seal_list[i] = &seal_block;
    seal.n_blocks = 5000;
    seal.blocks = seal_list;
    store_wire_send(&wire, STORE_SEAL, &seal.base);
    cut_off_expect(&wire, "Seal of 5000");

    store_wire_open(&wire, f.socket);
    release.n_leases = 5000;
    release.leases = ids;
    store_wire_send(&wire, STORE_RELEASE, &release.base);
    cut_off_expect(&wire, "Release of 5000");

    store_wire_open(&wire, f.socket);
    block.key = (ProtobufCBinaryData){sizeof key, key};
    reserve.n_blocks = 1;
    reserve.blocks = block_list;
    store_wire_send(&wire, STORE_RESERVE, &reserve.base);
    cut_off_expect(&wire, "0 bytes");

    store_wire_open(&wire, f.socket);
    block.length = 1;
    block.position = 3;
    store_wire_send(&wire, STORE_RESERVE, &reserve.base);
    cut_off_expect(&wire, "position 3");
    cr_assert_eq(store_wire_stats(&watch)->protocol_errors, 9);
}

/* A megabyte of empty submessages would unpack to tens of megabytes. */
Test(kvstore_faults, test_message_that_expands_is_refused)
{
    static uint8_t message[FRAME_HEADER_BYTES + (1 << 20)];
    struct frame_header header = {.type = STORE_RESERVE, .body_bytes = 1 << 20};
    struct store_wire wire;

    frame_header_encode(&header, message);
    for (size_t i = FRAME_HEADER_BYTES; i < sizeof message; i += 2) {
        message[i] = 0x0A;
        message[i + 1] = 0;
    }
    store_wire_open(&wire, f.socket);
    store_wire_send_raw(&wire, message, sizeof message);
    cut_off_expect(&wire, "cannot be parsed");
}

Test(kvstore_faults, test_foreign_lease_numbers_do_nothing)
{
    struct kv_client *a = store_fixture_client(&f, "a");
    struct kv_lease lease, writing;
    const struct kv_reserve_block block = store_block(2, 1, 1);
    enum kv_reserve_status status;
    struct store_wire wire;

    store_put(a, 1, 0, 0, &lease);
    cr_assert_eq(kv_client_reserve(a, &block, 1, STORE_WAIT_US, &status, &writing), 1);
    uint64_t ids[] = {lease.id, writing.id, 0, 1, UINT64_MAX, lease.id + 1};
    Tidepool__Store__Release release = TIDEPOOL__STORE__RELEASE__INIT;
    Tidepool__Store__ReportCorrupt report = TIDEPOOL__STORE__REPORT_CORRUPT__INIT;
    Tidepool__Store__SealBlock seal_block = TIDEPOOL__STORE__SEAL_BLOCK__INIT, *seal_list[1] = {&seal_block};
    Tidepool__Store__Seal seal = TIDEPOOL__STORE__SEAL__INIT;
    ProtobufCMessage *answer;

    store_wire_open(&wire, f.socket);
    report.n_leases = release.n_leases = 6;
    report.leases = release.leases = ids;
    cr_assert(store_wire_send(&wire, STORE_REPORT_CORRUPT, &report.base));
    answer = store_wire_call(&wire, STORE_RELEASE, &release.base, STORE_RELEASE_RESULT);
    cr_assert_eq(((Tidepool__Store__ReleaseResult *)answer)->released, 0);
    protobuf_c_message_free_unpacked(answer, NULL);
    seal_block.lease = writing.id;
    seal.n_blocks = 1;
    seal.blocks = seal_list;
    answer = store_wire_call(&wire, STORE_SEAL, &seal.base, STORE_SEAL_RESULT);
    cr_assert_not(((Tidepool__Store__SealResult *)answer)->sealed[0]);
    protobuf_c_message_free_unpacked(answer, NULL);
    cr_assert_eq(store_found(a, 1, 2), 1);
    store_wire_close(&wire);
    kv_client_free(a);
}

/* A client that asks and does not read is not read from either; the others are served, and it gets all its answers in the end. */
Test(kvstore_faults, test_client_that_does_not_read_waits)
{
    enum { N = 200, KEYS = 4096 };
    static uint8_t key[32];
    static ProtobufCBinaryData keys[KEYS];
    Tidepool__Store__Lookup lookup = TIDEPOOL__STORE__LOOKUP__INIT;
    struct kv_client *a = store_fixture_client(&f, "a");
    struct kv_lease lease;
    struct store_wire wire;
    int sent = 0, received = 0;

    store_put(a, 0, 0, 0, &lease);
    for (int i = 0; i < KEYS; i++)
        keys[i] = (ProtobufCBinaryData){sizeof key, key};
    lookup.n_keys = KEYS;
    lookup.keys = keys;
    store_wire_open(&wire, f.socket);
    pid_t pid = fork(); /* sends, while this process decides when to read */
    if (pid == 0) {
        while (sent < N && store_wire_send(&wire, STORE_LOOKUP, &lookup.base))
            sent++;
        _exit(sent == N ? 0 : 1);
    }
    for (int i = 0; i < 100; i++)
        cr_assert_eq(store_found(a, 0, 1), 1);
    while (received < N) {
        uint16_t type = 0;
        ProtobufCMessage *message = store_wire_receive(&wire, &type);
        cr_assert_not_null(message);
        cr_assert_eq(type, STORE_LOOKUP_RESULT);
        cr_assert_eq(((Tidepool__Store__LookupResult *)message)->n_extents, KEYS);
        protobuf_c_message_free_unpacked(message, NULL);
        received++;
    }
    int status;
    waitpid(pid, &status, 0);
    cr_assert_eq(status, 0);
    store_wire_close(&wire);
    kv_client_free(a);
}

static bool only_watch(const Tidepool__Store__StatsResult *s)
{
    return s->n_clients == 1 && s->n_read_leases == 0;
}

Test(kvstore_faults, test_client_that_says_nothing_is_cut_off)
{
    struct store_wire wire;
    uint16_t type;

    store_wire_connect(&wire, f.socket);
    cr_assert_null(store_wire_receive(&wire, &type));
    store_wire_close(&wire);
    store_await(&watch, only_watch, "a silent connection is closed");
}
