#include "worker/group/rank_follower.h"

#include "proto/base/clock.h"
#include "proto/wire/group.pb-c.h"
#include "worker/group/rank_group_private.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { CONNECT_AGAIN_US = 50 * 1000, COMMANDS_A_TURN = 16 };

struct rank_follower {
    struct rank_follower_config config;
    struct rank_link link;
    struct rank_watch *watch;
    struct engine_peers agreement;
    struct engine *engine;
    struct sequence *sequences[RANK_SEQUENCES_MAX]; /* by the leader's number */
    struct loop_source *source, *gone_source, *usage_timer, *again; /* again: commands are here that the socket no longer tells of */
    struct rank_follower_owner owner;
    struct rank_usage told;     /* what the leader has heard of this process */
};

/* ---- joining ---- */

static int inherited(const char *text, int *ret_fd)
{
    char *end;
    const long fd = strtol(text, &end, 10);
    const int flags = *text && !*end && fd >= 0 && fd <= 1 << 20 ? fcntl((int)fd, F_GETFL) : -1;
    if (flags < 0 || fcntl((int)fd, F_SETFL, flags | O_NONBLOCK) < 0 || fcntl((int)fd, F_SETFD, FD_CLOEXEC) < 0)
        return -EINVAL;
    *ret_fd = (int)fd;
    return 0;
}

static int connect_once(const struct sockaddr_un *address, int *ret_fd)
{
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    int rc = connect(fd, (const struct sockaddr *)address, sizeof(*address)) < 0 ? -errno : group_check_user(fd);
    if (rc < 0)
        close(fd);
    else
        *ret_fd = fd;
    return rc;
}

/* A leader may be started after its followers. */
static int connect_to(const char *path, uint64_t timeout_us, int *ret_fd)
{
    const uint64_t end_us = clock_now_us() + timeout_us;
    struct sockaddr_un address;
    int rc = group_address(path, &address);
    while (rc >= 0) {
        rc = connect_once(&address, ret_fd);
        if ((rc != -ENOENT && rc != -ECONNREFUSED && rc != -EAGAIN) || clock_now_us() >= end_us)
            return rc;
        (void)poll(NULL, 0, CONNECT_AGAIN_US / 1000);
        rc = 0;
    }
    return rc;
}

static int open_socket(const struct rank_follower_config *config, int *ret_fd, struct error *err)
{
    const bool is_fd = strncmp(config->leader, "fd:", 3) == 0;
    const int rc = is_fd ? inherited(config->leader + 3, ret_fd) : connect_to(config->leader, config->timeout_us, ret_fd);
    if (rc == -ENOENT || rc == -ECONNREFUSED)
        return error_set(err, -ETIMEDOUT, "no leader at %.200s within %llu s", config->leader, (unsigned long long)(config->timeout_us / 1000000));
    return rc < 0 ? error_set(err, rc, "--tp-leader %.200s: %s", config->leader, is_fd ? "no descriptor of a socket" : strerror(-rc)) : 0;
}

/* The next frame, which is of the wanted type or a Refusal. */
static int receive(struct rank_follower *f, enum group_frame type, uint64_t timeout_us, struct rank_message *ret_message, struct error *err)
{
    struct frame_header header;
    const uint8_t *body;
    int rc = rank_link_receive(&f->link, timeout_us, &header, &body);
    if (rc < 0)
        return error_set(err, rc == -ECANCELED ? -ECONNRESET : rc, "%s", rc == -ETIMEDOUT ? "the leader does not answer" : "the leader is gone");
    rc = rank_message_parse(&header, body, ret_message, err);
    if (rc < 0 || ret_message->type == type)
        return rc;
    rc = ret_message->type == GROUP_REFUSAL ? error_set(err, -EINVAL, "the leader has refused this rank: %s", ret_message->text)
                                            : error_set(err, -EPROTO, "the leader sent %s instead of %s", group_frame_name(header.type), group_frame_name(type));
    rank_message_fini(ret_message);
    return rc;
}

static int say_hello(struct rank_follower *f, uint8_t ret_communicator[COLLECTIVE_ID_BYTES], struct error *err)
{
    Tidepool__Group__Hello hello = TIDEPOOL__GROUP__HELLO__INIT;
    struct rank_message welcome;
    hello.version = FRAME_VERSION;
    hello.degree = (uint32_t)f->config.degree;
    hello.rank = (uint32_t)f->config.rank;
    hello.settings = (char *)f->config.settings;
    int rc = rank_link_send(&f->link, GROUP_HELLO, &hello.base, f->config.timeout_us);
    if (rc < 0)
        return error_set(err, -ECONNRESET, "the leader is gone");
    /* The leader waits for the others that long; it must not be taken for gone while it does. */
    rc = receive(f, GROUP_WELCOME, 2 * f->config.timeout_us, &welcome, err);
    if (rc < 0)
        return rc;
    memcpy(ret_communicator, welcome.communicator, COLLECTIVE_ID_BYTES);
    rank_message_fini(&welcome);
    return 0;
}

static int least_of_all(void *arg, int32_t *values, int n)
{
    struct rank_follower *f = arg;
    Tidepool__Group__Agree message = TIDEPOOL__GROUP__AGREE__INIT;
    struct rank_message answer;
    message.values = values;
    message.n_values = (size_t)n;
    int rc = rank_link_send(&f->link, GROUP_AGREE, &message.base, f->config.timeout_us);
    if (rc >= 0)
        rc = receive(f, GROUP_AGREE, 2 * f->config.timeout_us, &answer, NULL);
    if (rc < 0)
        return rc;
    rc = answer.n == n ? 0 : -EPROTO;
    if (rc == 0)
        memcpy(values, answer.values, (size_t)n * sizeof(*values));
    rank_message_fini(&answer);
    return rc;
}

int rank_follower_join(const struct rank_follower_config *config, struct rank_follower **ret_follower, uint8_t ret_communicator[COLLECTIVE_ID_BYTES], struct error *err)
{
    struct rank_follower *f = calloc(1, sizeof(*f));
    int fd = -1;
    if (!f)
        return error_set(err, -ENOMEM, "no memory for a follower");
    f->config = *config;
    f->agreement = (struct engine_peers){.least = least_of_all, .arg = f};
    rank_link_init(&f->link, -1);
    int rc = open_socket(config, &fd, err);
    if (rc < 0)
        goto fail;
    f->link.fd = fd;
    rc = say_hello(f, ret_communicator, err);
    if (rc < 0)
        goto fail;
    const struct rank_watch_config watch = {.fds = &f->link.fd, .n = 1, .grace_us = GROUP_GRACE_US};
    rc = rank_watch_create(&watch, &f->watch);
    if (rc < 0) {
        error_set(err, rc, "no watch over the leader: %s", strerror(-rc));
        goto fail;
    }
    *ret_follower = f;
    return 0;
fail:
    rank_follower_free(f);
    return rc;
}

int rank_follower_load(struct rank_follower *f, const struct rank_identity *identity, struct error *err)
{
    Tidepool__Group__Loaded loaded = TIDEPOOL__GROUP__LOADED__INIT;
    struct rank_message start;
    loaded.backend = (char *)identity->backend;
    loaded.model_name = (char *)identity->model_name;
    loaded.model = (ProtobufCBinaryData){.len = sizeof(identity->model), .data = (uint8_t *)identity->model};
    int rc = rank_link_send(&f->link, GROUP_LOADED, &loaded.base, f->config.timeout_us);
    if (rc < 0)
        return error_set(err, -ECONNRESET, "the leader is gone");
    rc = receive(f, GROUP_START, GROUP_LOAD_US_MAX, &start, err);
    if (rc >= 0)
        rank_message_fini(&start);
    return rc;
}

struct rank_watch *rank_follower_watch(struct rank_follower *f)
{
    return f->watch;
}

const struct engine_peers *rank_follower_peers(struct rank_follower *f)
{
    return &f->agreement;
}

/* ---- commands ---- */

static int do_create(struct rank_follower *f, const struct rank_message *m, struct error *err)
{
    if (f->sequences[m->sequence])
        return error_set(err, -EPROTO, "a second sequence %u", m->sequence);
    return sequence_create(f->engine, &m->request, &f->sequences[m->sequence], err);
}

static int do_prefill(struct rank_follower *f, const struct rank_message *m, struct error *err)
{
    if (!f->sequences[m->sequence])
        return error_set(err, -EPROTO, "no sequence %u", m->sequence);
    const int rc = sequence_prefill_step(f->sequences[m->sequence]);
    return rc < 0 ? error_set(err, rc, "prefill: %s", strerror(-rc)) : 0;
}

static int do_decode(struct rank_follower *f, const struct rank_message *m, struct error *err)
{
    struct sequence *batch[RANK_SEQUENCES_MAX];
    for (int i = 0; i < m->n; i++) {
        batch[i] = f->sequences[m->sequences[i]];
        if (!batch[i])
            return error_set(err, -EPROTO, "no sequence %u", m->sequences[i]);
    }
    const int rc = engine_decode(f->engine, batch, m->tokens, m->n);
    return rc < 0 ? error_set(err, rc, "decode: %s", strerror(-rc)) : 0;
}

static int do_free(struct rank_follower *f, const struct rank_message *m, struct error *err)
{
    struct sequence **sequence = &f->sequences[m->sequence];
    if (!*sequence)
        return error_set(err, -EPROTO, "no sequence %u", m->sequence);
    if (m->retire_answer)
        sequence_retire_answer(*sequence);
    sequence_free(*sequence);
    *sequence = NULL;
    return 0;
}

static int do_ask(struct rank_follower *f, const struct rank_message *m, struct error *err)
{
    Tidepool__Group__Figures figures = TIDEPOOL__GROUP__FIGURES__INIT;
    struct sequence_stats stats;
    if (!f->sequences[m->sequence])
        return error_set(err, -EPROTO, "no sequence %u", m->sequence);
    sequence_stats(f->sequences[m->sequence], &stats);
    figures.bytes_loaded = stats.bytes_loaded;
    figures.bytes_to_pool = stats.bytes_to_pool;
    figures.pages_attended = stats.pages_attended;
    figures.bytes_attended = stats.bytes_attended;
    figures.page_hits = stats.page_hits;
    figures.page_misses = stats.page_misses;
    figures.bytes_missed = stats.bytes_missed;
    figures.tokens_attended = stats.tokens_attended;
    figures.private_blocks = (uint32_t)stats.private_blocks;
    return rank_link_send(&f->link, GROUP_FIGURES, &figures.base, f->config.timeout_us) < 0 ? error_set(err, -ECONNRESET, "the leader is gone") : 0;
}

static int do_command(struct rank_follower *f, const struct rank_message *m, struct error *err)
{
    switch (m->type) {
    case GROUP_CREATE:
        return do_create(f, m, err);
    case GROUP_PREFILL:
        return do_prefill(f, m, err);
    case GROUP_DECODE:
        return do_decode(f, m, err);
    case GROUP_FREE:
        return do_free(f, m, err);
    case GROUP_ASK:
        return do_ask(f, m, err);
    default:
        return error_set(err, -EPROTO, "the leader sent %s", group_frame_name((uint16_t)m->type));
    }
}

/* What the ranks have agreed on, or find alike, ends one sequence on all of them; the leader frees it. Anything else is this rank's own and the group's end. */
static bool is_agreed(int result)
{
    return result >= 0 || result == -EAGAIN || result == -ENOMEM || result == -E2BIG || result == -EINVAL || result == -ERANGE;
}

static void end(struct rank_follower *f, int result, const char *why)
{
    loop_source_free(f->source);
    loop_source_free(f->gone_source);
    loop_source_free(f->again);
    loop_source_free(f->usage_timer);
    f->source = f->gone_source = f->again = f->usage_timer = NULL;
    if (result < 0)
        rank_watch_trip(f->watch);
    f->owner.ended(f->owner.arg, result, why);
}

/* Takes one command. Returns whether more may follow. */
static bool take_command(struct rank_follower *f)
{
    struct frame_header header;
    struct rank_message message;
    struct error err = {""};
    const uint8_t *body;
    int rc = rank_link_receive(&f->link, f->config.timeout_us, &header, &body);
    if (rc < 0) {
        end(f, -ECONNRESET, rc == -EPROTO ? "the leader sent what is no frame" : "the leader is gone");
        return false;
    }
    rc = rank_message_parse(&header, body, &message, &err);
    if (rc >= 0 && message.type == GROUP_STOP) {
        rank_message_fini(&message);
        end(f, 0, "Stop");
        return false;
    }
    if (rc >= 0)
        rc = do_command(f, &message, &err);
    rank_message_fini(&message);
    if (is_agreed(rc))
        return true;
    end(f, rc, err.text);
    return false;
}

/* Some at a time: the answers of the store come from the loop, too. */
static void take_commands(void *arg)
{
    struct rank_follower *f = arg;
    for (int i = 0; i < COMMANDS_A_TURN; i++)
        if (!take_command(f) || !rank_link_has_frame(&f->link))
            return;
    if (loop_timer_arm(f->again, 0) < 0)
        end(f, -ENOMEM, "no timer");
}

static void on_leader(int fd, int events, void *arg)
{
    (void)fd, (void)events;
    take_commands(arg);
}

static void on_gone(int fd, int events, void *arg)
{
    (void)fd, (void)events;
    end(arg, -ECONNRESET, "the leader is gone");
}

static int send_usage(struct rank_follower *f, const struct rank_usage *u)
{
    Tidepool__Group__Usage usage = TIDEPOOL__GROUP__USAGE__INIT;
    usage.device_bytes = u->device_bytes;
    usage.device_peak_bytes = u->device_peak_bytes;
    usage.page_cache_bytes = u->page_cache_bytes;
    usage.page_cache_used_bytes = u->page_cache_used_bytes;
    usage.page_cache_hits = u->page_cache_hits;
    usage.page_cache_misses = u->page_cache_misses;
    return rank_link_send(&f->link, GROUP_USAGE, &usage.base, f->config.timeout_us);
}

static void tell_usage(void *arg)
{
    struct rank_follower *f = arg;
    struct rank_usage usage = {0};
    f->owner.usage(f->owner.arg, &usage);
    if (memcmp(&usage, &f->told, sizeof(usage)) != 0 && send_usage(f, &usage) < 0) {
        end(f, -ECONNRESET, "the leader is gone");
        return;
    }
    f->told = usage;
    if (loop_timer_arm(f->usage_timer, f->config.usage_us) < 0)
        end(f, -ENOMEM, "no timer");
}

int rank_follower_serve(struct rank_follower *f, struct loop *loop, struct engine *engine, const struct rank_follower_owner *owner)
{
    f->engine = engine;
    f->owner = *owner;
    int rc = loop_fd_add(loop, f->link.fd, LOOP_READ, on_leader, f, &f->source);
    if (rc >= 0)
        rc = loop_fd_add(loop, rank_watch_fd(f->watch), LOOP_READ, on_gone, f, &f->gone_source);
    if (rc >= 0)
        rc = loop_timer_add(loop, take_commands, f, &f->again);
    if (rc >= 0)
        rc = loop_timer_add(loop, tell_usage, f, &f->usage_timer);
    return rc < 0 ? rc : loop_timer_arm(f->usage_timer, f->config.usage_us);
}

void rank_follower_drain(struct rank_follower *f)
{
    Tidepool__Group__Drain drain = TIDEPOOL__GROUP__DRAIN__INIT;
    (void)rank_link_send(&f->link, GROUP_DRAIN, &drain.base, f->config.timeout_us);
}

/* ---- life ---- */

void rank_follower_end_sequences(struct rank_follower *f)
{
    for (int i = 0; f && i < RANK_SEQUENCES_MAX; i++) {
        sequence_free(f->sequences[i]);
        f->sequences[i] = NULL;
    }
}

void rank_follower_free(struct rank_follower *f)
{
    if (!f)
        return;
    loop_source_free(f->source);
    loop_source_free(f->gone_source);
    loop_source_free(f->again);
    loop_source_free(f->usage_timer);
    rank_watch_free(f->watch);
    rank_link_fini(&f->link);
    free(f);
}
