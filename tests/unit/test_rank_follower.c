/* A follower whose leader is the test: frames lie in its socket before it reads them, so that everything runs on one thread. What a leader may do wrong ends the follower with a reason, and
 * what it does right reaches the engine. */
#include "proto/wire/group.pb-c.h"
#include "tests/unit/engine_fixture.h"
#include "worker/group/rank_follower.h"
#include "worker/group/rank_link.h"
#include "worker/group/rank_message.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { N_PROMPT = 300, SOON_US = 20000 };

static struct fixture f;
static struct rank_link leader; /* the test's end */
static struct rank_follower *follower;
static struct engine *engine;
static struct loop *loop;
static char address[16];
static struct error err;
static int end_result, n_ends;
static char end_why[256];
static uint64_t usage_us = 3600000000;
static struct rank_usage usage;

static void setup(void)
{
    int fds[2];
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    rank_link_init(&leader, fds[0]);
    snprintf(address, sizeof(address), "fd:%d", fds[1]);
    cr_assert_eq(loop_create(&loop), 0);
    cr_assert(fixture_open(&f, (struct fixture_params){0}));
}

static void teardown(void)
{
    rank_follower_end_sequences(follower);
    engine_free(engine);
    rank_follower_free(follower);
    rank_link_fini(&leader);
    loop_free(loop);
    fixture_expect_no_memory(&f);
    fixture_close(&f);
}
TestSuite(rank_follower, .init = setup, .fini = teardown, .timeout = 60);

static void say(enum group_frame type, const void *message)
{
    cr_assert_eq(rank_link_send(&leader, type, message, SOON_US), 0);
}

static int join(uint64_t timeout_us)
{
    const struct rank_follower_config config = {.degree = 2, .rank = 1, .leader = address, .timeout_us = timeout_us, .settings = "budget=64 recent=32", .usage_us = usage_us};
    uint8_t id[COLLECTIVE_ID_BYTES];
    const int rc = rank_follower_join(&config, &follower, id, &err);
    for (int i = 0; rc >= 0 && i < COLLECTIVE_ID_BYTES; i++)
        cr_assert_eq(id[i], i);
    return rc;
}

static void welcome(void)
{
    Tidepool__Group__Welcome message = TIDEPOOL__GROUP__WELCOME__INIT;
    uint8_t id[COLLECTIVE_ID_BYTES];
    for (int i = 0; i < COLLECTIVE_ID_BYTES; i++)
        id[i] = (uint8_t)i;
    message.communicator = (ProtobufCBinaryData){.len = sizeof(id), .data = id};
    say(GROUP_WELCOME, &message);
}

static void on_ended(void *arg, int result, const char *why)
{
    (void)arg;
    n_ends++;
    end_result = result;
    snprintf(end_why, sizeof(end_why), "%s", why);
}

static void on_usage(void *arg, struct rank_usage *ret_usage)
{
    (void)arg;
    *ret_usage = usage;
}

/* Joined, loaded and serving an engine. */
static void start(void)
{
    const struct rank_identity identity = {.backend = "cpu", .model_name = "tiny"};
    const Tidepool__Group__Start go = TIDEPOOL__GROUP__START__INIT;
    struct engine_config config = fixture_config();
    welcome();
    cr_assert_eq(join(SOON_US), 0, "%s", err.text);
    say(GROUP_START, &go);
    cr_assert_eq(rank_follower_load(follower, &identity, &err), 0, "%s", err.text);
    config.peers = rank_follower_peers(follower);
    engine = fixture_engine(&f, &config, NULL);
    const struct rank_follower_owner owner = {.ended = on_ended, .usage = on_usage};
    cr_assert_eq(rank_follower_serve(follower, loop, engine, &owner), 0);
}

static void poll_loop(void)
{
    for (int i = 0; i < 200 && !n_ends; i++)
        cr_assert_eq(loop_poll(loop), 0);
}

static void expect_end(int result, const char *why)
{
    poll_loop();
    cr_expect(n_ends == 1 && end_result == result && strstr(end_why, why), "%d ends, %d \"%s\" instead of %d \"%s\"", n_ends, end_result, end_why, result, why);
}

static void agree(int n, int32_t value)
{
    Tidepool__Group__Agree message = TIDEPOOL__GROUP__AGREE__INIT;
    int32_t values[8];
    for (int i = 0; i < n; i++)
        values[i] = value;
    message.values = values;
    message.n_values = (size_t)n;
    say(GROUP_AGREE, &message);
}

static void create(uint32_t sequence, uint32_t token)
{
    Tidepool__Group__Create message = TIDEPOOL__GROUP__CREATE__INIT;
    uint32_t prompt[N_PROMPT];
    for (int i = 0; i < N_PROMPT; i++)
        prompt[i] = token;
    message.sequence = sequence;
    message.prompt = prompt;
    message.n_prompt = N_PROMPT;
    message.max_new = 300;
    say(GROUP_CREATE, &message);
}

static void prefill(uint32_t sequence)
{
    Tidepool__Group__Prefill message = TIDEPOOL__GROUP__PREFILL__INIT;
    message.sequence = sequence;
    say(GROUP_PREFILL, &message);
}

static void decode(uint32_t sequence, uint32_t token)
{
    Tidepool__Group__Decode message = TIDEPOOL__GROUP__DECODE__INIT;
    message.sequences = &sequence;
    message.tokens = &token;
    message.n_sequences = message.n_tokens = 1;
    say(GROUP_DECODE, &message);
}

static void release(uint32_t sequence)
{
    Tidepool__Group__Free message = TIDEPOOL__GROUP__FREE__INIT;
    message.sequence = sequence;
    message.retire_answer = true;
    say(GROUP_FREE, &message);
}

/* The next frame from the follower. */
static enum group_frame heard(struct rank_message *ret_message)
{
    struct frame_header header;
    const uint8_t *body;
    cr_assert_eq(rank_link_receive(&leader, SOON_US, &header, &body), 0);
    cr_assert_eq(rank_message_parse(&header, body, ret_message, &err), 0, "%s", err.text);
    return ret_message->type;
}

static void expect_values(int n, int32_t first)
{
    struct rank_message m;
    cr_assert_eq(heard(&m), GROUP_AGREE);
    cr_expect(m.n == n && m.values[0] == first, "%d values from %d on", m.n, m.values[0]);
    rank_message_fini(&m);
}

/* ---- joining ---- */

Test(rank_follower, test_says_who_it_is)
{
    struct rank_message m;
    start();
    cr_assert_eq(heard(&m), GROUP_HELLO);
    cr_expect(m.version == FRAME_VERSION && m.degree == 2 && m.rank == 1 && strcmp(m.settings, "budget=64 recent=32") == 0);
    rank_message_fini(&m);
    cr_assert_eq(heard(&m), GROUP_LOADED);
    cr_expect(strcmp(m.backend, "cpu") == 0 && strcmp(m.model_name, "tiny") == 0);
    rank_message_fini(&m);
}

Test(rank_follower, test_refusal_is_handed_on)
{
    Tidepool__Group__Refusal message = TIDEPOOL__GROUP__REFUSAL__INIT;
    message.text = (char *)"there is no place";
    say(GROUP_REFUSAL, &message);
    cr_expect_eq(join(SOON_US), -EINVAL);
    cr_expect(strstr(err.text, "there is no place"), "%s", err.text);
}

Test(rank_follower, test_leader_that_says_nothing_or_something_else)
{
    cr_expect_eq(join(SOON_US), -ETIMEDOUT);
    cr_expect(strstr(err.text, "does not answer"), "%s", err.text);
}

Test(rank_follower, test_leader_that_begins_with_another_message)
{
    agree(1, 0);
    cr_expect_eq(join(SOON_US), -EPROTO);
    cr_expect(strstr(err.text, "Agree instead of Welcome"), "%s", err.text);
}

Test(rank_follower, test_leader_that_is_gone)
{
    rank_link_fini(&leader);
    cr_expect_eq(join(SOON_US), -ECONNRESET);
}

Test(rank_follower, test_no_leader_at_the_address)
{
    snprintf(address, sizeof(address), "no/such");
    cr_expect_eq(join(SOON_US), -ETIMEDOUT);
    cr_expect(strstr(err.text, "no leader at no/such"), "%s", err.text);
}

/* ---- commands ---- */

/* A sequence from its creation to its end, beside another; what it agrees on comes in order. */
Test(rank_follower, test_makes_the_leaders_calls)
{
    struct rank_message m;
    start();
    cr_assert(heard(&m) == GROUP_HELLO);
    rank_message_fini(&m);
    cr_assert(heard(&m) == GROUP_LOADED);
    rank_message_fini(&m);
    for (uint32_t s = 0; s < 2; s++) {
        create(s * 255, 7 + s);
        agree(3, 0); /* found: no error, nothing in the pool */
        agree(1, 0); /* memory */
        for (int layer = 0; layer < 3; layer++) {
            for (int unit = 0; unit < 5; unit++) {
                prefill(s * 255);
                if (unit == 4)
                    agree(1, 0);
            }
        }
        for (uint32_t i = 0; i < 84; i++) {
            decode(s * 255, i);
            if (i == 83) {
                agree(1, 0); /* the block's memory */
                agree(1, 0); /* and numbers */
            }
        }
        poll_loop();
        cr_assert_eq(n_ends, 0, "%s", end_why);
        expect_values(3, 0);
        expect_values(1, 0);
        for (int i = 0; i < 5; i++)
            expect_values(1, 0);
    }
    release(0);
    release(255);
    create(0, 1);
    agree(3, 0);
    agree(1, -ENOMEM); /* another rank has none: so there is no sequence 0 */
    prefill(0);
    expect_end(-EPROTO, "no sequence 0");
}

Test(rank_follower, test_stop_is_a_good_end)
{
    const Tidepool__Group__Stop message = TIDEPOOL__GROUP__STOP__INIT;
    start();
    create(3, 1);
    agree(3, 0);
    agree(1, 0);
    say(GROUP_STOP, &message);
    expect_end(0, "");
}

/* An id that is none is refused by every rank alike and harms nobody. */
Test(rank_follower, test_wrong_token_ends_a_request_only)
{
    start();
    create(3, TINY_VOCAB);
    agree(3, -EINVAL);
    poll_loop();
    cr_assert_eq(n_ends, 0, "%s", end_why);
    create(3, 1);
    agree(3, 0);
    agree(1, 0);
    poll_loop();
    cr_assert_eq(n_ends, 0, "%s", end_why);
    decode(3, 1); /* its prompt is not done, which every rank sees alike */
    poll_loop();
    cr_assert_eq(n_ends, 0, "%s", end_why);
}

Test(rank_follower, test_sequence_that_is_there_already)
{
    start();
    for (int i = 0; i < 2; i++) {
        create(3, 1);
        agree(3, 0);
        agree(1, 0);
    }
    expect_end(-EPROTO, "a second sequence 3");
}

Test(rank_follower, test_sequences_that_are_not_there)
{
    start();
    decode(9, 1);
    expect_end(-EPROTO, "no sequence 9");
}

Test(rank_follower, test_free_of_what_is_not_there)
{
    start();
    release(200);
    expect_end(-EPROTO, "no sequence 200");
}

Test(rank_follower, test_agreement_on_something_else)
{
    start();
    create(3, 1);
    agree(2, 0);
    expect_end(-EIO, "broken");
}

Test(rank_follower, test_command_in_the_middle_of_an_agreement)
{
    start();
    create(3, 1);
    prefill(3);
    expect_end(-EIO, "broken");
}

Test(rank_follower, test_message_of_the_other_direction)
{
    const Tidepool__Group__Drain message = TIDEPOOL__GROUP__DRAIN__INIT;
    start();
    say(GROUP_DRAIN, &message);
    expect_end(-EPROTO, "Drain");
}

Test(rank_follower, test_number_beyond_all_sequences)
{
    start();
    prefill(RANK_SEQUENCES_MAX);
    expect_end(-EPROTO, "sequence is out of its range");
}

Test(rank_follower, test_bytes_that_are_no_frame)
{
    uint8_t junk[FRAME_HEADER_BYTES] = {1, 2, 3};
    start();
    cr_assert_eq(write(leader.fd, junk, sizeof(junk)), (ssize_t)sizeof(junk));
    expect_end(-ECONNRESET, "no frame");
}

Test(rank_follower, test_leader_that_is_gone_is_the_end)
{
    start();
    create(3, 1);
    rank_link_fini(&leader);
    expect_end(-EIO, "broken");
}

Test(rank_follower, test_drain_is_asked_for)
{
    static const enum group_frame frames[] = {GROUP_HELLO, GROUP_LOADED, GROUP_DRAIN};
    start();
    rank_follower_drain(follower);
    for (size_t i = 0; i < sizeof(frames) / sizeof(frames[0]); i++) {
        struct rank_message m;
        cr_expect_eq(heard(&m), frames[i]);
        rank_message_fini(&m);
    }
}

static void expect_usage(uint64_t device_bytes)
{
    struct rank_message m;
    cr_assert_eq(heard(&m), GROUP_USAGE);
    cr_expect(m.usage.device_bytes == device_bytes && m.usage.page_cache_misses == 5);
    rank_message_fini(&m);
}

/* Once, and again when it has changed; of a sequence, when it is asked. */
Test(rank_follower, test_says_what_it_holds)
{
    Tidepool__Group__Ask ask = TIDEPOOL__GROUP__ASK__INIT;
    struct rank_message m;
    usage_us = 1;
    usage = (struct rank_usage){.device_bytes = 77, .page_cache_misses = 5};
    start();
    for (int i = 0; i < 2; i++) {
        heard(&m);
        rank_message_fini(&m);
    }
    poll_loop();
    expect_usage(77);
    usage.device_bytes = 78;
    poll_loop();
    expect_usage(78);
    create(9, 1);
    agree(3, 0);
    agree(1, 0);
    ask.sequence = 9;
    poll_loop();
    expect_values(3, 0);
    expect_values(1, 0);
    say(GROUP_ASK, &ask);
    poll_loop();
    cr_assert_eq(heard(&m), GROUP_FIGURES);
    cr_expect(m.figures.bytes_attended == 0 && m.figures.private_blocks > 0);
    rank_message_fini(&m);
    ask.sequence = 8;
    say(GROUP_ASK, &ask);
    expect_end(-EPROTO, "no sequence 8");
}
