/* A worker with several ranks: options, the followers' command lines, and how the parts of the group are put together. */
#include "worker/sched/worker_private.h"

#include "proto/base/base_assert.h"
#include "proto/base/log.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { USAGE_US = 1000000 };

static uint64_t timeout_us(const struct worker *w)
{
    return (uint64_t)w->options->tp_timeout * 1000000;
}

/* ---- options ---- */

static int check_options(const struct worker_options *o, struct error *err)
{
    if (o->tp_rank >= o->engine.tp)
        return error_set(err, -EINVAL, "--tp-rank %lld: ranks of --tp %lld are 0 to %lld", (long long)o->tp_rank, (long long)o->engine.tp, (long long)o->engine.tp - 1);
    if (o->tp_rank > 0 && !o->tp_leader)
        return error_set(err, -EINVAL, "--tp-rank %lld: a follower needs --tp-leader", (long long)o->tp_rank);
    if (o->tp_rank == 0 && o->tp_leader)
        return error_set(err, -EINVAL, "--tp-leader %s: only a follower has a leader; which one is it (--tp-rank)?", o->tp_leader);
    if (o->tp_listen && (o->engine.tp == 1 || o->tp_rank > 0))
        return error_set(err, -EINVAL, "--tp-listen %s: only the leader of --tp 2 or more listens", o->tp_listen);
    if (o->tp_rank == 0 && !o->router)
        return error_set(err, -EINVAL, "--router is required: ZeroMQ endpoint of the router");
    return 0;
}

/* Before anybody is started: a model that cannot be split so often is refused by the one who was asked. */
static int check_split(const struct worker_options *o, struct error *err)
{
    struct model_config whole, part;
    struct error reason = {""};
    int rc = model_config_load(o->model, &whole, err);
    if (rc < 0)
        return rc;
    rc = model_shard_split(&whole, 0, (int)o->engine.tp, 1, &part, &reason);
    return rc < 0 ? error_set(err, rc, "--tp %lld: %.400s", (long long)o->engine.tp, reason.text) : 0;
}

/* What has to be the same on every rank. */
static int make_settings(struct worker *w, struct error *err)
{
    size_t n = 0;
    struct option option;
    for (size_t i = 0; options_at(&worker_option_set, i, w->options, &option); i++) {
        char value[256];
        if (!(option.spec->tags & ENGINE_OPTION_COMMON) || options_format(&option, value, sizeof(value)) < 0)
            continue;
        n += (size_t)snprintf(w->settings + n, sizeof(w->settings) - n, "%s%s=%s", n ? " " : "", option.spec->name, value);
        if (n >= sizeof(w->settings))
            return error_set(err, -EINVAL, "the options are longer than %zu characters", sizeof(w->settings));
    }
    return 0;
}

/* ---- the followers' command lines ---- */

enum { ARGS_MAX = 80 };
struct command_line {
    char *args[ARGS_MAX + 1];
    int n;
    bool failed;
};

static void add(struct command_line *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void add(struct command_line *c, const char *fmt, ...)
{
    va_list ap;
    ASSERT(c->n < ARGS_MAX);
    va_start(ap, fmt);
    if (vasprintf(&c->args[c->n], fmt, ap) < 0) {
        c->args[c->n] = NULL;
        c->failed = true;
    } else {
        c->n++;
    }
    va_end(ap);
}

static void command_line_fini(struct command_line *c)
{
    for (int i = 0; i < c->n; i++)
        free(c->args[i]);
}

/* Every option as it is in effect here, wherever it came from. */
static void make_command_line(const struct worker_options *o, int rank, struct command_line *c)
{
    add(c, "tidepool-worker");
    struct option option;
    for (size_t i = 0; options_at(&worker_option_set, i, o, &option); i++) {
        char value[4096];
        if (!(option.spec->tags & WORKER_OPTION_OF_RANK) && options_format(&option, value, sizeof(value)) >= 0)
            add(c, "--%s=%s", option.spec->name, value);
    }
    add(c, "--name=%.58s.%d", o->name, rank);
    add(c, "--gpu=%lld", (long long)o->gpu + rank);
    add(c, "--tp-rank=%d", rank);
    add(c, "--tp-leader=fd:%d", RANK_CHILD_FD);
}

static int start_follower(struct worker *w, int rank, struct error *err)
{
    struct command_line c = {.n = 0};
    make_command_line(w->options, rank, &c);
    const int rc = c.failed ? error_set(err, -ENOMEM, "no memory for the command line of rank %d", rank)
                            : rank_group_start(w->group, rank, (const char *const *)c.args, err);
    command_line_fini(&c);
    if (rc >= 0)
        LOG_INFO("rank_started", LOG_INT("rank", rank), LOG_INT("pid", rank_group_pid(w->group, rank)));
    return rc;
}

/* ---- the group, step by step ---- */

int worker_ranks_start(struct worker *w, struct error *err)
{
    const struct worker_options *o = w->options;
    const struct rank_group_config config = {.degree = (int)o->engine.tp, .timeout_us = timeout_us(w), .settings = w->settings};
    int rc = check_options(o, err);
    if (rc < 0 || o->engine.tp == 1)
        return rc;
    rc = make_settings(w, err);
    if (rc < 0 || o->tp_rank > 0)
        return rc;
    rc = check_split(o, err);
    if (rc < 0)
        return rc;
    rc = rank_group_create(&config, &w->group, err);
    if (rc < 0)
        return rc;
    if (o->tp_listen)
        return rank_group_listen(w->group, o->tp_listen, err);
    /* The file has been read. A follower has all of it on its command line. */
    unsetenv("TIDEPOOL_CONFIG");
    unsetenv("TIDEPOOL_TP_LISTEN");
    for (int rank = 1; rc >= 0 && rank < o->engine.tp; rank++)
        rc = start_follower(w, rank, err);
    return rc;
}

static int join_leader(struct worker *w, struct error *err)
{
    const struct worker_options *o = w->options;
    const struct rank_follower_config config = {
        .degree = (int)o->engine.tp, .rank = (int)o->tp_rank, .leader = o->tp_leader, .timeout_us = timeout_us(w), .settings = w->settings, .usage_us = USAGE_US};
    return rank_follower_join(&config, &w->follower, w->communicator, err);
}

int worker_ranks_meet(struct worker *w, struct error *err)
{
    if (w->options->engine.tp == 1)
        return 0;
    if (!w->group)
        return join_leader(w, err);
    int rc = w->collective_ops->make_id((int)w->options->engine.tp, w->communicator, err);
    return rc < 0 ? rc : rank_group_meet(w->group, w->communicator, err);
}

static struct rank_watch *watch_of(struct worker *w)
{
    return w->group ? rank_group_watch(w->group) : rank_follower_watch(w->follower);
}

static int open_collective(struct worker *w, struct error *err)
{
    struct collective_config config = {
        .device = w->device,
        .rank = (int)w->options->tp_rank,
        .n_ranks = (int)w->options->engine.tp,
        .gather_columns = model_gather_columns(&w->model->config),
        .deadline_us = timeout_us(w),
    };
    memcpy(config.id, w->communicator, sizeof(config.id));
    int rc = w->collective_ops->open(&config, &w->collective, err);
    if (rc < 0)
        return rc;
    rank_watch_collective(watch_of(w), w->collective_ops, w->collective);
    model_join(w->model, w->collective_ops, w->collective);
    LOG_INFO("ranks_joined", LOG_INT("rank", config.rank), LOG_INT("ranks", config.n_ranks), LOG_STR("collectives", w->collective_ops->name));
    return 0;
}

int worker_ranks_load(struct worker *w, struct error *err)
{
    struct rank_identity identity = {.backend = w->dev->name, .model_name = w->model_id};
    if (w->options->engine.tp == 1)
        return 0;
    model_family(w->model, identity.model);
    int rc = w->group ? rank_group_load(w->group, &identity, err) : rank_follower_load(w->follower, &identity, err);
    return rc < 0 ? rc : open_collective(w, err);
}

const struct engine_peers *worker_ranks_peers(struct worker *w)
{
    return w->group ? rank_group_peers(w->group) : w->follower ? rank_follower_peers(w->follower) : NULL;
}

int worker_ranks_ready(struct worker *w, struct error *err)
{
    const struct engine_peers *peers = worker_ranks_peers(w);
    int32_t all = 0;
    if (!peers || peers->least(peers->arg, &all, 1) >= 0)
        return 0;
    return error_set(err, -EIO, "%s", w->group ? rank_group_failure(w->group) : "the leader or another rank has no engine; its log says why");
}

/* ---- a follower at work ---- */

static void on_usage(void *arg, struct rank_usage *ret_usage)
{
    worker_usage(arg, ret_usage);
}

static void on_ended(void *arg, int result, const char *why)
{
    struct worker *w = arg;
    if (result < 0)
        LOG_ERROR("rank_ended", LOG_INT("rank", w->options->tp_rank), LOG_STR("why", why));
    w->follower_result = result;
    w->stopped = true;
    loop_stop(w->loop);
}

int worker_follow(struct worker *w)
{
    const struct rank_follower_owner owner = {.ended = on_ended, .usage = on_usage, .arg = w};
    int rc = rank_follower_serve(w->follower, w->loop, w->engine, &owner);
    while (rc >= 0 && !w->stopped)
        rc = loop_run(w->loop);
    if (rc < 0)
        LOG_ERROR("loop_failed", LOG_STR("error", strerror(-rc)));
    return rc < 0 || w->follower_result < 0;
}

/* ---- the end ---- */

void worker_ranks_stop(struct worker *w)
{
    rank_group_free(w->group);
    w->group = NULL;
    rank_follower_end_sequences(w->follower);
}

void worker_ranks_free(struct worker *w)
{
    if (w->follower)
        rank_watch_collective(rank_follower_watch(w->follower), NULL, NULL);
    if (w->collective)
        w->collective_ops->close(w->collective);
    w->collective = NULL;
}
