#include "worker/group/rank_group_private.h"

#include "proto/base/base_assert.h"
#include "proto/wire/group.pb-c.h"
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* ---- the end of the group ---- */

int group_broken(struct rank_group *g, int rank, const char *why)
{
    if (!*g->failure.text)
        error_set(&g->failure, -EIO, "rank %d: %s", rank, why);
    if (g->watch)
        rank_watch_trip(g->watch);
    return -EIO;
}

/* What the watch has seen counts as well: nobody starts work that cannot end. */
static bool is_broken(struct rank_group *g)
{
    const int gone = g->watch ? rank_watch_gone(g->watch) : -1;
    if (gone >= 0 && !*g->failure.text)
        (void)group_broken(g, gone + 1, "its process has ended");
    return *g->failure.text != '\0';
}

const char *rank_group_failure(struct rank_group *g)
{
    return g && is_broken(g) ? g->failure.text : "";
}

static const char *reason(int error)
{
    return error == -ETIMEDOUT ? "it does not answer" : error == -ECONNRESET || error == -ECANCELED ? "its process has ended" : strerror(-error);
}

/* ---- commands ---- */

static int send_all(struct rank_group *g, enum group_frame type, const ProtobufCMessage *message)
{
    if (is_broken(g))
        return -EIO;
    for (int i = 0; i < g->n_peers; i++) {
        const int rc = rank_link_send(&g->peers[i].link, type, message, g->config.timeout_us);
        if (rc < 0)
            return group_broken(g, i + 1, reason(rc));
    }
    return 0;
}

/* An engine that fails because its collectives do: the watch may know which rank it was. */
static int result_of(struct rank_group *g, int result)
{
    if (result == -EIO)
        (void)(is_broken(g) || group_broken(g, 0, "the engine or its collectives failed"));
    return result;
}

static int take_tag(struct rank_group *g, uint32_t *ret_tag)
{
    for (uint32_t i = 0; i < RANK_SEQUENCES_MAX; i++) {
        if (g->used[i])
            continue;
        *ret_tag = i;
        return 0;
    }
    return -EAGAIN;
}

int group_sequence_create(struct rank_group *g, struct engine *engine, const struct sequence_request *request, struct sequence **ret_sequence, struct error *err)
{
    struct sequence_request tagged = *request;
    Tidepool__Group__Create message = TIDEPOOL__GROUP__CREATE__INIT;
    if (!g)
        return sequence_create(engine, request, ret_sequence, err);
    if (take_tag(g, &tagged.tag) < 0)
        return error_set(err, -EAGAIN, "the group has %d sequences already", RANK_SEQUENCES_MAX);
    message.sequence = tagged.tag;
    message.prompt = (uint32_t *)request->prompt;
    message.n_prompt = (size_t)request->n_prompt;
    message.max_new = (uint32_t)request->max_new;
    message.answer = (uint32_t *)request->answer;
    message.n_answer = (size_t)request->n_answer;
    message.salt = (ProtobufCBinaryData){.len = request->n_salt, .data = (uint8_t *)request->salt};
    message.no_cache = request->no_cache;
    message.prompt_logprobs = request->prompt_logprobs;
    int rc = send_all(g, GROUP_CREATE, &message.base);
    if (rc < 0)
        return error_set(err, rc, "%s", g->failure.text);
    rc = result_of(g, sequence_create(engine, &tagged, ret_sequence, err));
    g->used[tagged.tag] = rc >= 0;
    return rc;
}

int group_sequence_prefill_step(struct rank_group *g, struct sequence *sequence)
{
    Tidepool__Group__Prefill message = TIDEPOOL__GROUP__PREFILL__INIT;
    if (!g)
        return sequence_prefill_step(sequence);
    message.sequence = sequence_tag(sequence);
    const int rc = send_all(g, GROUP_PREFILL, &message.base);
    return rc < 0 ? rc : result_of(g, sequence_prefill_step(sequence));
}

int group_decode(struct rank_group *g, struct engine *engine, struct sequence **sequences, const int32_t *tokens, int n)
{
    Tidepool__Group__Decode message = TIDEPOOL__GROUP__DECODE__INIT;
    uint32_t tags[RANK_SEQUENCES_MAX];
    if (!g)
        return engine_decode(engine, sequences, tokens, n);
    ASSERT(n >= 1 && n <= RANK_SEQUENCES_MAX);
    for (int i = 0; i < n; i++)
        tags[i] = sequence_tag(sequences[i]);
    message.sequences = tags;
    message.tokens = (uint32_t *)tokens;
    message.n_sequences = message.n_tokens = (size_t)n;
    const int rc = send_all(g, GROUP_DECODE, &message.base);
    return rc < 0 ? rc : result_of(g, engine_decode(engine, sequences, tokens, n));
}

void group_sequence_free(struct rank_group *g, struct sequence *sequence, bool retire_answer)
{
    Tidepool__Group__Free message = TIDEPOOL__GROUP__FREE__INIT;
    if (!sequence)
        return;
    if (g) {
        message.sequence = sequence_tag(sequence);
        message.retire_answer = retire_answer;
        (void)send_all(g, GROUP_FREE, &message.base);
        g->used[sequence_tag(sequence)] = false;
    }
    if (retire_answer)
        sequence_retire_answer(sequence);
    sequence_free(sequence);
}

/* ---- what followers say of themselves ---- */

/* The loop may not be there yet, and may not run: then it ends when it begins to. */
static void want_drain(struct rank_group *g)
{
    g->drain = true;
    if (g->loop)
        loop_stop(g->loop);
}

/* What a follower may say at any time, in place of an answer too. Returns whether it is that. */
static bool take_aside(struct rank_peer *peer, const struct rank_message *message)
{
    if (message->type == GROUP_DRAIN)
        want_drain(peer->group);
    else if (message->type == GROUP_USAGE)
        peer->usage = message->usage;
    else
        return false;
    return true;
}

/* The frame that is there, which nobody has asked for: Drain, Usage, or the end. */
static int take_unasked(struct rank_peer *peer)
{
    struct rank_group *g = peer->group;
    const int rank = (int)(peer - g->peers) + 1;
    struct frame_header header;
    struct rank_message message;
    struct error err = {""};
    const uint8_t *body;
    int rc = rank_link_receive(&peer->link, g->config.timeout_us, &header, &body);
    if (rc < 0)
        return group_broken(g, rank, reason(rc));
    rc = rank_message_parse(&header, body, &message, &err);
    const bool aside = rc >= 0 && take_aside(peer, &message);
    rank_message_fini(&message);
    return aside ? 0 : group_broken(g, rank, rc < 0 ? err.text : "it speaks without being asked");
}

static void on_peer(int fd, int events, void *arg)
{
    struct rank_peer *peer = arg;
    (void)fd, (void)events;
    int rc;
    do
        rc = take_unasked(peer);
    while (rc >= 0 && rank_link_has_frame(&peer->link));
    if (rc < 0) {
        loop_fd_set_events(peer->source, 0);
        loop_stop(peer->group->loop);
    }
}

static void on_gone(int fd, int events, void *arg)
{
    struct rank_group *g = arg;
    (void)fd, (void)events;
    loop_fd_set_events(g->gone_source, 0);
    (void)is_broken(g);
    loop_stop(g->loop);
}

int rank_group_serve(struct rank_group *g, struct loop *loop)
{
    g->loop = loop;
    int rc = loop_fd_add(loop, rank_watch_fd(g->watch), LOOP_READ, on_gone, g, &g->gone_source);
    for (int i = 0; rc >= 0 && i < g->n_peers; i++)
        rc = loop_fd_add(loop, g->peers[i].link.fd, LOOP_READ, on_peer, &g->peers[i], &g->peers[i].source);
    return rc;
}

bool rank_group_take_drain(struct rank_group *g)
{
    const bool drain = g && g->drain;
    if (drain)
        g->drain = false;
    return drain;
}

/* ---- agreement ---- */

int peer_receive(struct rank_peer *peer, enum group_frame type, uint64_t timeout_us, struct rank_message *ret_message, struct error *err)
{
    for (;;) {
        struct frame_header header;
        const uint8_t *body;
        int rc = rank_link_receive(&peer->link, timeout_us, &header, &body);
        if (rc < 0)
            return error_set(err, rc, "%s", reason(rc));
        rc = rank_message_parse(&header, body, ret_message, err);
        if (rc < 0 || ret_message->type == type)
            return rc;
        const bool aside = take_aside(peer, ret_message);
        rank_message_fini(ret_message);
        if (!aside)
            return error_set(err, -EPROTO, "it sent %s instead of %s", group_frame_name(header.type), group_frame_name(type));
    }
}

static int take_values(struct rank_group *g, int i, int32_t *values, int n)
{
    struct rank_message message;
    struct error err = {""};
    if (peer_receive(&g->peers[i], GROUP_AGREE, g->config.timeout_us, &message, &err) < 0)
        return group_broken(g, i + 1, err.text);
    const int n_theirs = message.n;
    for (int j = 0; n_theirs == n && j < n; j++)
        if (message.values[j] < values[j])
            values[j] = message.values[j];
    rank_message_fini(&message);
    return n_theirs == n ? 0 : group_broken(g, i + 1, "it agrees on something else");
}

/* What came behind the frame that was waited for must not wait until the socket is readable again. */
static int take_rest(struct rank_peer *peer)
{
    int rc = 0;
    while (rc >= 0 && (rank_link_next_is(&peer->link, GROUP_DRAIN) || rank_link_next_is(&peer->link, GROUP_USAGE)))
        rc = take_unasked(peer);
    return rc;
}

static int least_of_all(void *arg, int32_t *values, int n)
{
    struct rank_group *g = arg;
    Tidepool__Group__Agree message = TIDEPOOL__GROUP__AGREE__INIT;
    int rc = is_broken(g) ? -EIO : 0;
    for (int i = 0; rc >= 0 && i < g->n_peers; i++)
        rc = take_values(g, i, values, n);
    for (int i = 0; rc >= 0 && i < g->n_peers; i++)
        rc = take_rest(&g->peers[i]);
    message.values = values;
    message.n_values = (size_t)n;
    return rc < 0 ? rc : send_all(g, GROUP_AGREE, &message.base);
}

const struct engine_peers *rank_group_peers(struct rank_group *g)
{
    return &g->agreement;
}

/* ---- figures ---- */

static int add_figures(struct rank_group *g, int i, struct sequence_stats *stats)
{
    struct rank_message message;
    struct error err = {""};
    if (peer_receive(&g->peers[i], GROUP_FIGURES, g->config.timeout_us, &message, &err) < 0)
        return group_broken(g, i + 1, err.text);
    const struct sequence_stats *theirs = &message.figures;
    stats->bytes_loaded += theirs->bytes_loaded;
    stats->bytes_to_pool += theirs->bytes_to_pool;
    stats->pages_attended += theirs->pages_attended;
    stats->bytes_attended += theirs->bytes_attended;
    stats->page_hits += theirs->page_hits;
    stats->page_misses += theirs->page_misses;
    stats->bytes_missed += theirs->bytes_missed;
    stats->tokens_attended += theirs->tokens_attended;
    stats->private_blocks = theirs->private_blocks > INT_MAX - stats->private_blocks ? INT_MAX : stats->private_blocks + theirs->private_blocks;
    rank_message_fini(&message);
    return take_rest(&g->peers[i]);
}

void group_sequence_stats(struct rank_group *g, const struct sequence *sequence, struct sequence_stats *ret_stats)
{
    Tidepool__Group__Ask message = TIDEPOOL__GROUP__ASK__INIT;
    struct sequence_stats all;
    sequence_stats(sequence, ret_stats);
    if (!g)
        return;
    all = *ret_stats;
    message.sequence = sequence_tag(sequence);
    int rc = send_all(g, GROUP_ASK, &message.base);
    for (int i = 0; rc >= 0 && i < g->n_peers; i++)
        rc = add_figures(g, i, &all);
    if (rc >= 0)
        *ret_stats = all;
}

void rank_group_usage(const struct rank_group *g, struct rank_usage *usage)
{
    for (int i = 0; g && i < g->n_peers; i++) {
        const struct rank_usage *theirs = &g->peers[i].usage;
        usage->device_bytes += theirs->device_bytes;
        usage->device_peak_bytes += theirs->device_peak_bytes;
        usage->page_cache_bytes += theirs->page_cache_bytes;
        usage->page_cache_used_bytes += theirs->page_cache_used_bytes;
        usage->page_cache_hits += theirs->page_cache_hits;
        usage->page_cache_misses += theirs->page_cache_misses;
    }
}

/* ---- life ---- */

int rank_group_create(const struct rank_group_config *config, struct rank_group **ret_group, struct error *err)
{
    struct rank_group *g = calloc(1, sizeof(*g));
    ASSERT(config->degree >= 2 && config->degree <= COLLECTIVE_MAX_RANKS);
    if (!g)
        return error_set(err, -ENOMEM, "no memory for a group of ranks");
    g->config = *config;
    g->n_peers = config->degree - 1;
    g->listen_fd = -1;
    g->agreement = (struct engine_peers){.least = least_of_all, .arg = g};
    for (int i = 0; i < g->n_peers; i++) {
        g->peers[i].group = g;
        rank_link_init(&g->peers[i].link, -1);
    }
    *ret_group = g;
    return 0;
}

struct rank_watch *rank_group_watch(struct rank_group *g)
{
    return g->watch;
}
