/* `tidepool serve`: starts kvstore, workers and router, watches them, waits until the API answers, and ends them in order.
 *
 * Stop order: the router first (it drains: no new requests, running ones finish), then the workers, then the kvstore, so that nobody loses what it needs.
 * Sockets lie in a folder of mode 0700 of this user. */
#include "deploy/commands.h"
#include "deploy/http_client.h"
#include "deploy/program_folder.h"
#include "deploy/serve_options.h"
#include "deploy/supervisor.h"
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"
#include <errno.h>
#include <ftw.h>
#include <limits.h>
#include <stdarg.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { STAGE_ROUTER, STAGE_WORKERS, STAGE_KVSTORE };
enum { ARGS_MAX = 64, HEALTH_FIRST_US = 200 * 1000, HEALTH_LATER_US = 2 * 1000 * 1000, STORE_POLL_US = 20 * 1000, STORE_WAIT_US = 60 * 1000 * 1000 };

struct serve {
    struct serve_options options;
    struct loop *loop;
    struct supervisor *supervisor;
    struct loop_source *sigterm, *sigint, *health_timer, *store_timer;
    struct http_request *health;
    char bin_dir[PATH_MAX], runtime_dir[PATH_MAX], port_file[PATH_MAX + 32];
    bool own_runtime_dir;
    uint16_t port;
    int router; /* number of the child */
    bool announced, start_failed;
    uint64_t started_us;
    int status;
};

/* ---- arguments of the children ---- */

struct args {
    char *v[ARGS_MAX];
    int n;
};

static void args_add(struct args *a, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void args_add(struct args *a, const char *fmt, ...)
{
    va_list ap;
    ASSERT(a->n < ARGS_MAX - 1);
    va_start(ap, fmt);
    if (vasprintf(&a->v[a->n], fmt, ap) < 0)
        a->v[a->n] = NULL;
    va_end(ap);
    ASSERT(a->v[a->n]);
    a->n++;
}

static void args_fini(struct args *a)
{
    for (int i = 0; i < a->n; i++)
        free(a->v[i]);
}

static void args_hand_on(struct args *a, const struct serve_options *options, int target)
{
    struct option option;
    for (size_t i = 0; options_at(&serve_option_set, i, options, &option); i++) {
        char text[PATH_MAX];
        if ((serve_option_targets(i) & target) && options_format(&option, text, sizeof(text)) >= 0)
            args_add(a, "--%s=%s", option.spec->name, text);
    }
}

static int start_child(struct serve *s, const char *name, struct args *a, int stage)
{
    a->v[a->n] = NULL;
    int r = supervisor_start(s->supervisor, name, (const char *const *)a->v, stage);
    args_fini(a);
    if (r < 0)
        LOG_ERROR("child_start_failed", LOG_STR("child", name), LOG_STR("error", strerror(-r)));
    return r;
}

static int start_kvstore(struct serve *s)
{
    struct args a = {.n = 0};
    args_add(&a, "%s/tidepool-kvstore", s->bin_dir);
    args_add(&a, "--socket=%s/kvstore.sock", s->runtime_dir);
    args_hand_on(&a, &s->options, SERVE_KVSTORE);
    return start_child(s, "kvstore", &a, STAGE_KVSTORE);
}

static int start_worker(struct serve *s, int i)
{
    struct args a = {.n = 0};
    char name[32];
    snprintf(name, sizeof(name), "worker-%d", i);
    args_add(&a, "%s/tidepool-worker", s->bin_dir);
    args_add(&a, "--name=%s", name);
    args_add(&a, "--router=ipc://%s/router.sock", s->runtime_dir);
    args_add(&a, "--store=%s/kvstore.sock", s->runtime_dir);
    args_add(&a, "--gpu=%d", (int)(s->options.gpu + i * s->options.engine.tp));
    args_hand_on(&a, &s->options, SERVE_WORKER);
    return start_child(s, name, &a, STAGE_WORKERS);
}

static int start_router(struct serve *s)
{
    struct args a = {.n = 0};
    args_add(&a, "%s/tidepool-router", s->bin_dir);
    args_add(&a, "--endpoint=ipc://%s/router.sock", s->runtime_dir);
    args_add(&a, "--port-file=%s", s->port_file);
    args_hand_on(&a, &s->options, SERVE_ROUTER);
    /* A key on the command line could be read by every user of the host: the router takes it from its environment. */
    if (s->options.api_key)
        setenv("TIDEPOOL_API_KEY", s->options.api_key, 1);
    return start_child(s, "router", &a, STAGE_ROUTER);
}

/* ---- readiness ---- */

static int read_port(struct serve *s)
{
    FILE *f = fopen(s->port_file, "re");
    unsigned port = 0;
    if (!f)
        return -errno;
    int n = fscanf(f, "%u", &port);
    fclose(f);
    if (n != 1 || port == 0 || port > 65535)
        return -EAGAIN;
    s->port = (uint16_t)port;
    return 0;
}

static void announce(struct serve *s)
{
    char url[300], chosen[32];
    /* A router that is started again must be found where it was, also when the port was free to choose. */
    snprintf(chosen, sizeof(chosen), "--port=%u", s->port);
    supervisor_replace_arg(s->supervisor, s->router, "--port=0", chosen);
    snprintf(url, sizeof(url), "http://%s:%u", s->options.host, s->port);
    s->announced = true;
    LOG_INFO("serving", LOG_STR("url", url), LOG_INT("workers", s->options.workers), LOG_INT("ready_ms", (clock_now_us() - s->started_us) / 1000));
    if (!s->options.port_file)
        return;
    /* Written aside and renamed: who waits for the file never reads half of it. */
    char aside[PATH_MAX + 8];
    snprintf(aside, sizeof(aside), "%s.new", s->options.port_file);
    FILE *f = fopen(aside, "we");
    if (!f || fprintf(f, "%u\n", s->port) < 0 || fclose(f) != 0 || rename(aside, s->options.port_file) < 0)
        LOG_WARN("port_file_failed", LOG_STR("path", s->options.port_file), LOG_STR("error", strerror(errno)));
}

static void health_data(int status, const char *data, size_t len, void *arg)
{
    (void)status, (void)data, (void)len, (void)arg;
}

static void health_done(int status, void *arg)
{
    struct serve *s = arg;
    if (status == 200) {
        supervisor_set_ready(s->supervisor, 2 * 1000 * 1000);
        if (!s->announced)
            announce(s);
    }
    loop_timer_arm(s->health_timer, s->announced ? HEALTH_LATER_US : HEALTH_FIRST_US);
}

static void health_due(void *arg)
{
    struct serve *s = arg;
    const struct http_handler handler = {.on_data = health_data, .on_done = health_done, .arg = s};
    const char *host = strcmp(s->options.host, "0.0.0.0") == 0 ? "127.0.0.1" : s->options.host;
    http_request_free(s->health);
    s->health = NULL;
    if (read_port(s) < 0 || http_request_start(s->loop, host, s->port, "/health", NULL, NULL, 0, 5, &handler, &s->health) < 0)
        loop_timer_arm(s->health_timer, HEALTH_FIRST_US);
}

/* ---- life ---- */

static void on_stopped(int status, const char *reason, void *arg)
{
    struct serve *s = arg;
    s->status = s->start_failed ? 1 : status;
    loop_timer_disarm(s->store_timer);
    if (status != 0)
        LOG_ERROR("stopped", LOG_INT("status", status), LOG_STR("reason", reason));
    else
        LOG_INFO("stopped", LOG_INT("status", status));
    loop_stop(s->loop);
}

static void on_signal(int signal, void *arg)
{
    struct serve *s = arg;
    LOG_INFO("stopping", LOG_INT("signal", signal), LOG_INT("drain_timeout_s", s->options.drain_timeout));
    loop_timer_disarm(s->health_timer);
    loop_timer_disarm(s->store_timer);
    supervisor_stop(s->supervisor);
}

static int make_runtime_dir(struct serve *s, struct error *err)
{
    if (s->options.runtime_dir) {
        snprintf(s->runtime_dir, sizeof(s->runtime_dir), "%s", s->options.runtime_dir);
        if (mkdir(s->runtime_dir, 0700) < 0 && errno != EEXIST)
            return error_set(err, -errno, "--runtime-dir %s: %s", s->runtime_dir, strerror(errno));
    } else {
        const char *base = getenv("XDG_RUNTIME_DIR");
        if (!base || access(base, W_OK) < 0)
            base = "/tmp";
        snprintf(s->runtime_dir, sizeof(s->runtime_dir), "%s/tidepool-XXXXXX", base);
        if (!mkdtemp(s->runtime_dir))
            return error_set(err, -errno, "cannot make a folder for sockets in %s: %s", base, strerror(errno));
        s->own_runtime_dir = true;
    }
    /* sun_path holds 108 bytes; the longest name put behind the folder has 24. */
    if (strlen(s->runtime_dir) > 80)
        return error_set(err, -ENAMETOOLONG, "--runtime-dir %s: at most 80 characters, since unix socket paths are short", s->runtime_dir);
    snprintf(s->port_file, sizeof(s->port_file), "%s/router.port", s->runtime_dir);
    unlink(s->port_file);
    return 0;
}

static int remove_entry(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st, (void)flag, (void)ftw;
    return remove(path);
}

static void share_processors(struct serve_options *o)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    if (o->engine.threads == 0)
        o->engine.threads = n > o->workers * o->engine.tp ? n / (o->workers * o->engine.tp) : 1;
}

/* Workers go on without a store, but what they compute before they find it stays private. Its socket appears when the pool is allocated; a store that takes
 * very long is not waited for. */
static void store_due(void *arg)
{
    struct serve *s = arg;
    char path[PATH_MAX + 32];
    int r = 0;
    snprintf(path, sizeof(path), "%s/kvstore.sock", s->runtime_dir);
    if (access(path, F_OK) < 0 && clock_now_us() - s->started_us < STORE_WAIT_US) {
        loop_timer_arm(s->store_timer, STORE_POLL_US);
        return;
    }
    for (int i = 0; r >= 0 && i < s->options.workers; i++)
        r = start_worker(s, i);
    if (r >= 0)
        r = s->router = start_router(s);
    if (r >= 0)
        r = loop_timer_arm(s->health_timer, HEALTH_FIRST_US);
    if (r < 0) {
        s->start_failed = true;
        supervisor_stop(s->supervisor);
    }
}

static int serve_start(struct serve *s)
{
    const struct supervisor_config config = {.on_stopped = on_stopped, .arg = s, .stop_timeout_us = (uint64_t)s->options.drain_timeout * 1000000 + 1000000};
    int r = loop_create(&s->loop);
    if (r >= 0)
        r = supervisor_create(s->loop, &config, &s->supervisor);
    if (r >= 0)
        r = loop_signal_add(s->loop, SIGTERM, on_signal, s, &s->sigterm);
    if (r >= 0)
        r = loop_signal_add(s->loop, SIGINT, on_signal, s, &s->sigint);
    if (r >= 0)
        r = loop_timer_add(s->loop, health_due, s, &s->health_timer);
    if (r >= 0)
        r = loop_timer_add(s->loop, store_due, s, &s->store_timer);
    if (r >= 0)
        r = start_kvstore(s);
    if (r >= 0)
        r = loop_timer_arm(s->store_timer, STORE_POLL_US);
    return r;
}

static void serve_fini(struct serve *s)
{
    http_request_free(s->health);
    loop_source_free(s->health_timer);
    loop_source_free(s->store_timer);
    loop_source_free(s->sigint);
    loop_source_free(s->sigterm);
    supervisor_free(s->supervisor);
    loop_free(s->loop);
    if (s->own_runtime_dir)
        nftw(s->runtime_dir, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
    if (s->options.port_file && s->announced)
        unlink(s->options.port_file);
}

int serve_command(int argc, char **argv)
{
    struct serve s = {.status = 1, .started_us = clock_now_us()};
    struct error err = {.text = ""};
    int r = options_parse(&serve_option_set, argc, argv, &s.options, NULL, &err);
    if (r > 0)
        return 0;
    if (r < 0) {
        fprintf(stderr, "tidepool serve: %s\n", err.text);
        return 2;
    }
    /* The file has been read. A child would read it too, and refuse what is not its own. */
    unsetenv("TIDEPOOL_CONFIG");
    log_init("serve", s.options.log_level, s.options.log_format);
    if (access(s.options.model, R_OK) < 0) {
        fprintf(stderr, "tidepool serve: --model %s: %s; deploy/get-model.sh fetches a small one\n", s.options.model, strerror(errno));
        return 2;
    }
    share_processors(&s.options);
    r = program_folder(s.bin_dir, sizeof(s.bin_dir));
    if (r >= 0)
        r = make_runtime_dir(&s, &err);
    if (r >= 0)
        r = serve_start(&s);
    if (r >= 0)
        r = loop_run(s.loop);
    else
        fprintf(stderr, "tidepool serve: %s\n", err.text[0] ? err.text : strerror(-r));
    serve_fini(&s);
    return r < 0 ? 1 : s.status;
}
