/* A leader whose followers are the test: they connect and write before it reads, so that everything runs on one thread. Who does not belong to the group is named, and a follower that does
 * something wrong at work ends the group with a reason. */
#include "proto/wire/group.pb-c.h"
#include "tests/unit/engine_fixture.h"
#include "worker/group/rank_group.h"
#include "worker/group/rank_link.h"
#include "worker/group/rank_message.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { N_PROMPT = 300, SOON_US = 20000, N_RANKS = 3 };
#define SETTINGS "budget=64 recent=32"

static struct fixture f;
static struct rank_link ends[N_RANKS]; /* the test's, by rank; 0 is not used */
static struct rank_group *group;
static struct engine *engine;
static struct loop *loop;
static char folder[32] = "/tmp/tidepool-ranks-XXXXXX", path[64];
static struct error err;
static const uint8_t id[COLLECTIVE_ID_BYTES] = {9, 8, 7};
static const struct rank_identity identity = {.backend = "cpu", .model_name = "tiny", .model = {1, 2, 3}};

static void setup(void)
{
    const struct rank_group_config config = {.degree = N_RANKS, .timeout_us = SOON_US, .settings = SETTINGS};
    cr_assert_not_null(mkdtemp(folder));
    snprintf(path, sizeof(path), "%s/leader", folder);
    cr_assert_eq(loop_create(&loop), 0);
    cr_assert(fixture_open(&f, (struct fixture_params){0}));
    for (int i = 0; i < N_RANKS; i++)
        rank_link_init(&ends[i], -1);
    cr_assert_eq(rank_group_create(&config, &group, &err), 0);
    cr_assert_eq(rank_group_listen(group, path, &err), 0, "%s", err.text);
}

static void teardown(void)
{
    for (int i = 0; i < N_RANKS; i++)
        rank_link_fini(&ends[i]);
    rank_group_free(group);
    engine_free(engine);
    loop_free(loop);
    cr_expect(access(path, F_OK) < 0);
    rmdir(folder);
    fixture_expect_no_memory(&f);
    fixture_close(&f);
}
TestSuite(rank_group, .init = setup, .fini = teardown, .timeout = 60);

static void say(int rank, enum group_frame type, const void *message)
{
    cr_assert_eq(rank_link_send(&ends[rank], type, message, SOON_US), 0);
}

static void connect_end(int rank)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    cr_assert(fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0);
    rank_link_fini(&ends[rank]);
    rank_link_init(&ends[rank], fd);
}

static void hello(int end, uint32_t version, uint32_t degree, uint32_t rank, const char *settings)
{
    Tidepool__Group__Hello message = TIDEPOOL__GROUP__HELLO__INIT;
    connect_end(end);
    message.version = version;
    message.degree = degree;
    message.rank = rank;
    message.settings = (char *)settings;
    say(end, GROUP_HELLO, &message);
}

static void good_hello(int rank)
{
    hello(rank, FRAME_VERSION, N_RANKS, (uint32_t)rank, SETTINGS);
}

static void expect_heard(int rank, enum group_frame type, const char *text)
{
    struct rank_message m;
    struct frame_header header;
    const uint8_t *body;
    cr_assert_eq(rank_link_receive(&ends[rank], SOON_US, &header, &body), 0);
    cr_assert_eq(rank_message_parse(&header, body, &m, &err), 0, "%s", err.text);
    cr_assert_eq(m.type, type, "rank %d heard %s", rank, group_frame_name((uint16_t)m.type));
    cr_expect(!text || strstr(m.text, text), "%s", m.text);
    rank_message_fini(&m);
}

static void loaded(int rank, const char *backend, uint8_t first)
{
    Tidepool__Group__Loaded message = TIDEPOOL__GROUP__LOADED__INIT;
    uint8_t model[RANK_MODEL_BYTES] = {first, 2, 3};
    message.backend = (char *)backend;
    message.model_name = (char *)"tiny";
    message.model = (ProtobufCBinaryData){.len = sizeof(model), .data = model};
    say(rank, GROUP_LOADED, &message);
}

/* All are there, have loaded, and the leader has an engine. */
static void start(void)
{
    struct engine_config config = fixture_config();
    good_hello(2);
    good_hello(1);
    cr_assert_eq(rank_group_meet(group, id, &err), 0, "%s", err.text);
    loaded(1, "cpu", 1);
    loaded(2, "cpu", 1);
    cr_assert_eq(rank_group_load(group, &identity, &err), 0, "%s", err.text);
    for (int rank = 1; rank < N_RANKS; rank++) {
        expect_heard(rank, GROUP_WELCOME, NULL);
        expect_heard(rank, GROUP_START, NULL);
    }
    cr_assert_eq(rank_group_serve(group, loop), 0);
    config.peers = rank_group_peers(group);
    engine = fixture_engine(&f, &config, NULL);
}

static void agree(int rank, int n, int32_t value)
{
    Tidepool__Group__Agree message = TIDEPOOL__GROUP__AGREE__INIT;
    int32_t values[8];
    for (int i = 0; i < n; i++)
        values[i] = value;
    message.values = values;
    message.n_values = (size_t)n;
    say(rank, GROUP_AGREE, &message);
}

static void drain(int rank)
{
    const Tidepool__Group__Drain message = TIDEPOOL__GROUP__DRAIN__INIT;
    say(rank, GROUP_DRAIN, &message);
}

static int create(struct sequence **ret_sequence)
{
    int32_t tokens[N_PROMPT];
    const struct sequence_request request = {.prompt = tokens, .n_prompt = N_PROMPT, .max_new = 10};
    fixture_tokens(3, tokens, N_PROMPT);
    return group_sequence_create(group, engine, &request, ret_sequence, &err);
}

static void expect_broken(const char *text)
{
    struct sequence *seq = NULL;
    cr_expect(strstr(rank_group_failure(group), text), "\"%s\" instead of \"%s\"", rank_group_failure(group), text);
    cr_expect(create(&seq) == -EIO && !seq);
}

/* ---- meeting ---- */

static void expect_refused(int end, const char *text)
{
    cr_expect_eq(rank_group_meet(group, id, &err), -EINVAL);
    cr_expect(strstr(err.text, text), "\"%s\" instead of \"%s\"", err.text, text);
    expect_heard(end, GROUP_REFUSAL, text);
}

Test(rank_group, test_rank_that_does_not_come_is_named)
{
    good_hello(2);
    cr_expect_eq(rank_group_meet(group, id, &err), -ETIMEDOUT);
    cr_expect(strstr(err.text, "rank 1 has not joined"), "%s", err.text);
}

/* Somebody who says nothing, leaves at once, or talks nonsense is not waited for. */
Test(rank_group, test_strangers_are_sent_away)
{
    static const uint8_t junk[FRAME_HEADER_BYTES] = {1};
    connect_end(1);
    cr_assert_eq(write(ends[1].fd, junk, sizeof(junk)), (ssize_t)sizeof(junk));
    connect_end(1);
    start();
}

Test(rank_group, test_follower_of_another_version)
{
    hello(1, FRAME_VERSION + 1, N_RANKS, 1, SETTINGS);
    expect_refused(1, "version 2");
}

Test(rank_group, test_follower_of_another_degree)
{
    hello(1, FRAME_VERSION, 4, 1, SETTINGS);
    expect_refused(1, "--tp 4");
}

Test(rank_group, test_follower_with_a_rank_that_is_none)
{
    hello(1, FRAME_VERSION, N_RANKS, 3, SETTINGS);
    expect_refused(1, "--tp-rank 3");
}

Test(rank_group, test_follower_that_is_there_twice)
{
    good_hello(1);
    hello(2, FRAME_VERSION, N_RANKS, 1, SETTINGS);
    expect_refused(2, "--tp-rank 1 is there twice");
}

Test(rank_group, test_follower_with_another_setting)
{
    hello(1, FRAME_VERSION, N_RANKS, 1, "budget=64 recent=33");
    expect_refused(1, "recent=33, the leader with recent=32");
}

Test(rank_group, test_follower_with_a_setting_less)
{
    hello(1, FRAME_VERSION, N_RANKS, 1, "budget=64");
    expect_refused(1, "with less, the leader with recent=32");
}

static void meet(void)
{
    good_hello(1);
    good_hello(2);
    cr_assert_eq(rank_group_meet(group, id, &err), 0, "%s", err.text);
    expect_heard(2, GROUP_WELCOME, NULL);
}

Test(rank_group, test_follower_with_another_model)
{
    meet();
    loaded(1, "cpu", 1);
    loaded(2, "cpu", 77);
    cr_expect_eq(rank_group_load(group, &identity, &err), -EINVAL);
    cr_expect(strstr(err.text, "--model of rank 2"), "%s", err.text);
    expect_heard(2, GROUP_REFUSAL, "--model of rank 2");
}

Test(rank_group, test_follower_on_another_device)
{
    meet();
    loaded(1, "cuda", 1);
    cr_expect_eq(rank_group_load(group, &identity, &err), -EINVAL);
    cr_expect(strstr(err.text, "rank 1 computes on cuda, the leader on cpu"), "%s", err.text);
}

/* Nobody waits for a model that another rank will never load. */
Test(rank_group, test_follower_that_is_gone_while_another_loads)
{
    meet();
    rank_link_fini(&ends[2]);
    cr_expect_eq(rank_group_load(group, &identity, &err), -ECONNRESET);
    cr_expect(strstr(err.text, "rank 2 has closed"), "%s", err.text);
}

Test(rank_group, test_second_leader_at_the_same_place)
{
    const struct rank_group_config config = {.degree = 2, .timeout_us = SOON_US, .settings = SETTINGS};
    struct rank_group *second;
    cr_assert_eq(rank_group_create(&config, &second, &err), 0);
    cr_expect_eq(rank_group_listen(second, path, &err), -EADDRINUSE);
    rank_group_free(second);
    good_hello(1);
    good_hello(2);
    cr_expect_eq(rank_group_meet(group, id, &err), 0, "%s", err.text);
}

/* ---- at work ---- */

Test(rank_group, test_calls_go_to_every_rank_and_values_to_the_least)
{
    struct sequence *seq;
    int n;
    start();
    for (int rank = 1; rank < N_RANKS; rank++) {
        agree(rank, 3, 0);
        agree(rank, 1, 0);
    }
    cr_assert_eq(create(&seq), 0, "%s", err.text);
    sequence_tokens(seq, &n);
    cr_expect(n == N_PROMPT && sequence_tag(seq) == 0);
    agree(1, 1, 0);
    agree(2, 1, -ERANGE);
    int rc;
    for (int unit = 0; (rc = group_sequence_prefill_step(group, seq)) > 0; unit++)
        cr_assert_lt(unit, 6);
    cr_expect_eq(rc, -ERANGE);
    group_sequence_free(group, seq, true);
    for (int rank = 1; rank < N_RANKS; rank++) {
        expect_heard(rank, GROUP_CREATE, NULL);
        expect_heard(rank, GROUP_AGREE, NULL);
        expect_heard(rank, GROUP_AGREE, NULL);
        for (int unit = 0; unit < 5; unit++)
            expect_heard(rank, GROUP_PREFILL, NULL);
        expect_heard(rank, GROUP_AGREE, NULL);
        expect_heard(rank, GROUP_FREE, NULL);
    }
    cr_expect_str_empty(rank_group_failure(group));
}

Test(rank_group, test_follower_that_agrees_on_something_else)
{
    struct sequence *seq = NULL;
    start();
    agree(1, 3, 0);
    agree(2, 2, 0);
    cr_expect(create(&seq) == -EIO && !seq);
    expect_broken("rank 2: it agrees on something else");
}

Test(rank_group, test_follower_that_does_not_answer)
{
    struct sequence *seq = NULL;
    start();
    agree(1, 3, 0);
    cr_expect(create(&seq) == -EIO && !seq);
    expect_broken("rank 2: it does not answer");
}

Test(rank_group, test_follower_that_speaks_without_being_asked)
{
    start();
    agree(2, 1, 0);
    cr_assert_eq(loop_run(loop), 0);
    expect_broken("rank 2: it speaks without being asked");
}

Test(rank_group, test_follower_that_is_gone_stops_the_loop)
{
    start();
    rank_link_fini(&ends[1]);
    cr_assert_eq(loop_run(loop), 0);
    expect_broken("rank 1: its process has ended");
}

/* Also when it comes in the middle of an agreement. */
Test(rank_group, test_drain_is_heard)
{
    struct sequence *seq;
    start();
    cr_expect(!rank_group_take_drain(group));
    drain(1);
    cr_assert_eq(loop_run(loop), 0);
    cr_expect(rank_group_take_drain(group) && !rank_group_take_drain(group));
    for (int rank = 1; rank < N_RANKS; rank++) {
        if (rank == 1)
            drain(rank);
        agree(rank, 3, 0);
        agree(rank, 1, 0);
        if (rank == 2)
            drain(rank);
    }
    cr_assert_eq(create(&seq), 0, "%s", err.text);
    cr_expect(rank_group_take_drain(group));
    group_sequence_free(group, seq, false);
}

static void figures(int rank, uint64_t bytes)
{
    Tidepool__Group__Figures message = TIDEPOOL__GROUP__FIGURES__INIT;
    message.bytes_to_pool = message.bytes_missed = bytes;
    message.private_blocks = 2;
    say(rank, GROUP_FIGURES, &message);
}

static void usage(int rank, uint64_t bytes)
{
    Tidepool__Group__Usage message = TIDEPOOL__GROUP__USAGE__INIT;
    message.device_bytes = message.page_cache_hits = bytes;
    say(rank, GROUP_USAGE, &message);
}

/* A sequence's figures are asked for; what a process holds comes when it likes, before, behind and without them. */
Test(rank_group, test_figures_of_all_ranks_are_added)
{
    struct rank_usage all = {.device_bytes = 1};
    struct sequence_stats own, stats;
    struct sequence *seq;
    start();
    usage(1, 10);
    cr_assert_eq(loop_poll(loop), 0);
    for (int rank = 1; rank < N_RANKS; rank++) {
        agree(rank, 3, 0);
        agree(rank, 1, 0);
    }
    cr_assert_eq(create(&seq), 0, "%s", err.text);
    sequence_stats(seq, &own);
    usage(1, 20);
    drain(1);
    figures(1, 1000);
    figures(2, 500);
    usage(2, 400);
    group_sequence_stats(group, seq, &stats);
    cr_expect(stats.bytes_to_pool == own.bytes_to_pool + 1500 && stats.bytes_missed == 1500 && stats.private_blocks == own.private_blocks + 4 && stats.n_prompt == own.n_prompt);
    cr_assert_eq(loop_run(loop), 0, "what came in place of an answer stops the loop, too");
    cr_expect(rank_group_take_drain(group));
    rank_group_usage(group, &all);
    cr_expect(all.device_bytes == 421 && all.page_cache_hits == 420 && all.device_peak_bytes == 0);
    figures(1, 7);
    group_sequence_stats(group, seq, &stats);
    cr_expect(memcmp(&stats, &own, sizeof(own)) == 0, "of this rank alone");
    expect_broken("rank 2: it does not answer");
    group_sequence_free(group, seq, false);
}

/* Without a group the calls are the engine's. */
Test(rank_group, test_no_group_is_an_engine_alone)
{
    struct engine_config config = fixture_config();
    int32_t tokens[N_PROMPT];
    const struct sequence_request request = {.prompt = tokens, .n_prompt = N_PROMPT, .max_new = 10};
    struct sequence *seq;
    fixture_tokens(3, tokens, N_PROMPT);
    engine = fixture_engine(&f, &config, NULL);
    cr_assert_eq(group_sequence_create(NULL, engine, &request, &seq, &err), 0);
    while (group_sequence_prefill_step(NULL, seq) > 0)
        ;
    cr_expect_eq(group_decode(NULL, engine, &seq, tokens, 1), 0);
    cr_expect(sequence_logits(seq) && *rank_group_failure(NULL) == '\0' && !rank_group_take_drain(NULL));
    group_sequence_free(NULL, seq, true);
    group_sequence_free(NULL, NULL, true);
}
