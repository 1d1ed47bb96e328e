#include "router/text/template.h"
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "proto/base/json_write.h"
#include "router/text/template_sandbox.h"
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define START_WAIT_MS 30000           /* for the first helper, which the caller waits for */
#define START_DEADLINE_US 30000000ull /* for those after it */
#define ANSWER_TEXT_MAX 400           /* of a reason, in error texts */

/* A frame is a kind or status and a length, both uint32 in this machine's order, and the bytes; see template_helper.py. */
struct frame_head {
    uint32_t status, length;
};
enum { STATUS_OK, STATUS_REFUSED, STATUS_TOO_LARGE, STATUS_BROKEN };

struct template_render {
    struct template_engine *engine;
    struct template_render *next;
    struct loop_source *deadline;
    struct buf request;     /* the whole frame; empty once it is on its way */
    uint64_t deadline_us;
    template_cb *cb;        /* NULL: cancelled */
    void *arg;
};

/* One process, until it has been waited for: a new one need not wait until the old one is gone. */
struct template_helper {
    struct template_engine *engine;
    struct template_helper *next;
    pid_t pid;
    struct loop_source *exit;
    bool gone;              /* it has ended, but its last words may still be in the socket */
};

enum engine_state { ENGINE_DOWN, ENGINE_STARTING, ENGINE_READY, ENGINE_BUSY };

struct template_engine {
    struct loop *loop;
    char *python;
    struct buf first;                 /* the frame that a new helper gets */
    enum engine_state state;
    struct template_helper *helper;   /* NULL when DOWN */
    struct template_helper *helpers;  /* this one and those that were killed and not waited for yet */
    int fd;
    struct loop_source *io;
    struct loop_source *start_timer;  /* also runs the queue in a later turn of the loop */
    struct buf out;                   /* going to the helper; out_done bytes have gone */
    size_t out_done;
    struct buf in;                    /* coming from it */
    struct template_render *queue;    /* the first one is being rendered when BUSY */
    struct template_render **tail;
    size_t n_queue;
};

static void engine_io(int fd, int events, void *arg);
static void run_queue(struct template_engine *e);

/* Processes. */

static void reap_helper(struct template_helper *h, int wait_options)
{
    struct template_helper **at = &h->engine->helpers;
    while (*at != h)
        at = &(*at)->next;
    *at = h->next;
    waitpid(h->pid, NULL, wait_options);
    loop_source_free(h->exit);
    free(h);
}

static void drop_helper(struct template_engine *e);

static void helper_gone(pid_t pid, void *arg)
{
    struct template_helper *h = arg;
    struct template_engine *e = h->engine;
    (void)pid;
    h->gone = true;
    if (e->helper != h) {
        reap_helper(h, WNOHANG);
    } else if (e->state == ENGINE_READY) {
        drop_helper(e); /* its socket's end would say the same */
        run_queue(e);
    } /* else what it wrote last is still to be read, and the socket's end comes behind it */
}

/* A large request's memory is not kept. */
static void reset_out(struct template_engine *e)
{
    buf_fini(&e->out);
    buf_init(&e->out, SIZE_MAX / 2);
    e->out_done = 0;
}

/* Ends the helper, if there is one, and forgets what was on its way. */
static void drop_helper(struct template_engine *e)
{
    struct template_helper *h = e->helper;
    if (!h)
        return;
    loop_source_free(e->io);
    e->io = NULL;
    close(e->fd);
    e->fd = -1;
    e->helper = NULL;
    e->state = ENGINE_DOWN;
    buf_fini(&e->in);
    reset_out(e);
    loop_timer_disarm(e->start_timer);
    if (h->gone)
        reap_helper(h, WNOHANG);
    else
        kill(h->pid, SIGKILL); /* helper_gone frees it */
}

static int start_helper(struct template_engine *e, struct error *err)
{
    struct template_helper *h = calloc(1, sizeof *h);
    if (!h)
        return error_set(err, -ENOMEM, "out of memory");
    int r = template_sandbox_start(e->python, &e->fd, &h->pid, err);
    if (r < 0) {
        free(h);
        return r;
    }
    r = loop_pid_add(e->loop, h->pid, helper_gone, h, &h->exit);
    if (r < 0) {
        kill(h->pid, SIGKILL);
        waitpid(h->pid, NULL, 0);
        close(e->fd);
        e->fd = -1;
        free(h);
        return error_set(err, r, "the template helper cannot be watched: %s", strerror(-r));
    }
    h->engine = e;
    h->next = e->helpers;
    e->helpers = e->helper = h;
    e->state = ENGINE_STARTING;
    r = loop_fd_add(e->loop, e->fd, LOOP_READ, engine_io, e, &e->io);
    if (r == 0)
        r = buf_append(&e->out, e->first.data, e->first.len);
    if (r == 0)
        r = loop_fd_set_events(e->io, LOOP_READ | LOOP_WRITE);
    if (r < 0) {
        drop_helper(e);
        return error_set(err, r, "the template helper cannot be started: %s", strerror(-r));
    }
    template_sandbox_allow_cpu(h->pid, START_DEADLINE_US / 1000000);
    return 0;
}

/* The queue. */

static void free_render(struct template_render *render)
{
    loop_source_free(render->deadline);
    buf_fini(&render->request);
    free(render);
}

static void unlink_render(struct template_engine *e, struct template_render *render)
{
    struct template_render **at = &e->queue;
    while (*at != render)
        at = &(*at)->next;
    *at = render->next;
    if (e->tail == &render->next)
        e->tail = at;
    e->n_queue--;
}

/* Takes the render out of the queue and answers it. The callback may start new renders. */
static void finish_render(struct template_render *render, int code, const char *text, size_t len)
{
    template_cb *cb = render->cb;
    void *arg = render->arg;
    unlink_render(render->engine, render);
    free_render(render);
    if (cb)
        cb(arg, code, text, len);
}

static void fail_render(struct template_render *render, int code, const char *reason)
{
    finish_render(render, code, reason, strlen(reason));
}

/* Every render that waits now fails; those that callbacks add meanwhile stay. */
static void fail_all(struct template_engine *e, int code, const char *reason)
{
    for (size_t n = e->n_queue; n > 0 && e->queue; n--)
        fail_render(e->queue, code, reason);
}

static void render_late(void *arg)
{
    struct template_render *render = arg;
    struct template_engine *e = render->engine;
    bool running = e->state == ENGINE_BUSY && e->queue == render;
    if (running)
        drop_helper(e);
    fail_render(render, -ETIMEDOUT, running ? "rendering the chat template took too long" : "the chat template was not rendered in time");
    run_queue(e);
}

/* Starts the next render, and a helper for it if there is none. */
static void run_queue(struct template_engine *e)
{
    struct error err;
    if (!e->queue || e->state == ENGINE_BUSY || e->state == ENGINE_STARTING)
        return;
    if (e->state == ENGINE_DOWN) {
        if (start_helper(e, &err) < 0)
            fail_all(e, -EIO, err.text);
        else
            loop_timer_arm(e->start_timer, START_DEADLINE_US);
        return;
    }
    struct template_render *render = e->queue;
    uint64_t now = clock_now_us();
    unsigned seconds = render->deadline_us > now ? (unsigned)((render->deadline_us - now) / 1000000) : 0;
    template_sandbox_allow_cpu(e->helper->pid, seconds + 1);
    reset_out(e);
    e->out = render->request;
    buf_init(&render->request, 0);
    e->state = ENGINE_BUSY;
    if (loop_fd_set_events(e->io, LOOP_READ | LOOP_WRITE) < 0) {
        drop_helper(e);
        fail_render(render, -EIO, "the template helper cannot be written to");
    }
}

static void start_timer_fired(void *arg)
{
    struct template_engine *e = arg;
    if (e->state == ENGINE_STARTING) {
        drop_helper(e);
        fail_all(e, -EIO, "the template helper did not start in time");
    }
    run_queue(e);
}

/* Frames. */

/* The helper is of no use any more: what it was rendering fails, the rest gets a new one. One that could not start fails all, since the next one would
 * hardly fare better. */
static void helper_failed(struct template_engine *e, const char *reason)
{
    enum engine_state before = e->state;
    drop_helper(e);
    if (before == ENGINE_BUSY)
        fail_render(e->queue, -EIO, reason);
    else if (before == ENGINE_STARTING)
        fail_all(e, -EIO, reason);
    run_queue(e);
}

static int code_of(uint32_t status)
{
    static const int codes[] = {[STATUS_OK] = 0, [STATUS_REFUSED] = -EINVAL, [STATUS_TOO_LARGE] = -ENOBUFS, [STATUS_BROKEN] = -EIO};
    return status < ARRAY_LEN(codes) ? codes[status] : -EIO;
}

static void frame_arrived(struct template_engine *e, uint32_t status, const char *text, size_t len)
{
    char reason[ANSWER_TEXT_MAX + 1];
    if (e->state == ENGINE_BUSY) {
        struct template_render *render = e->queue;
        /* The text lies in the input buffer, which the next frame may move: the state must let none begin before the callback is over. */
        struct buf answer = e->in;
        buf_init(&e->in, answer.max);
        e->state = ENGINE_READY;
        finish_render(render, code_of(status), text, len);
        buf_fini(&answer);
        run_queue(e);
        return;
    }
    if (e->state == ENGINE_STARTING && status == STATUS_OK) {
        loop_timer_disarm(e->start_timer);
        e->state = ENGINE_READY;
        buf_clear(&e->in);
        run_queue(e);
        return;
    }
    snprintf(reason, sizeof reason, "%.*s", (int)(len < ANSWER_TEXT_MAX ? len : ANSWER_TEXT_MAX), text);
    helper_failed(e, e->state == ENGINE_STARTING ? reason : "the template helper spoke out of turn");
}

/* Reads what is there. 1 when a whole frame has come, 0 to wait, or a negative errno when the helper is gone or talks nonsense. */
static int read_some(struct template_engine *e)
{
    struct frame_head head = {0};
    size_t want = sizeof head;
    for (;;) {
        if (e->in.len >= sizeof head) {
            memcpy(&head, e->in.data, sizeof head);
            if (head.length > TEMPLATE_OUTPUT_MAX)
                return -EPROTO;
            want = sizeof head + head.length;
            if (e->in.len == want)
                return 1;
        }
        int r = buf_reserve(&e->in, want - e->in.len);
        if (r < 0)
            return r;
        ssize_t n = read(e->fd, e->in.data + e->in.len, want - e->in.len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 && errno == EAGAIN ? 0 : -EPIPE;
        e->in.len += (size_t)n;
    }
}

static int write_some(struct template_engine *e)
{
    while (e->out_done < e->out.len) {
        ssize_t n = send(e->fd, e->out.data + e->out_done, e->out.len - e->out_done, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN ? 0 : -EPIPE;
        e->out_done += (size_t)n;
    }
    reset_out(e);
    return loop_fd_set_events(e->io, LOOP_READ);
}

static void engine_io(int fd, int events, void *arg)
{
    struct template_engine *e = arg;
    (void)fd;
    /* A helper that could not start has answered and gone: its answer counts, not that writing to it fails. */
    int written = events & LOOP_WRITE ? write_some(e) : 0;
    int r = read_some(e);
    if (r == 1) {
        struct frame_head head;
        memcpy(&head, e->in.data, sizeof head);
        frame_arrived(e, head.status, (const char *)e->in.data + sizeof head, head.length);
    } else if (r < 0 || written < 0) {
        helper_failed(e, e->state == ENGINE_STARTING ? "the template helper ended while it started" : "the template helper ended while it rendered");
    }
}

/* Waits for the first helper's first answer. */
static int wait_until_ready(struct template_engine *e, struct error *err)
{
    uint64_t end = clock_now_us() + START_WAIT_MS * 1000ull;
    int r = 0;
    while (r == 0) {
        uint64_t now = clock_now_us();
        struct pollfd p = {.fd = e->fd, .events = (short)(POLLIN | (e->out_done < e->out.len ? POLLOUT : 0))};
        if (now >= end)
            return error_set(err, -ETIMEDOUT, "the template helper did not start within %d s", START_WAIT_MS / 1000);
        if (poll(&p, 1, (int)((end - now) / 1000 + 1)) < 0 && errno != EINTR)
            return error_set(err, -errno, "poll: %s", strerror(errno));
        if (p.revents & POLLOUT)
            write_some(e);
        r = read_some(e);
    }
    if (r < 0)
        return error_set(err, -ENOENT, "the template helper (%s) ended while it started", e->python);
    struct frame_head head;
    memcpy(&head, e->in.data, sizeof head);
    const char *text = (const char *)e->in.data + sizeof head;
    if (head.status != STATUS_OK)
        return error_set(err, head.status == STATUS_REFUSED ? -EINVAL : -ENOENT, "%s: %.*s", head.status == STATUS_REFUSED ? "the chat template is refused" : e->python,
                         (int)(head.length < ANSWER_TEXT_MAX ? head.length : ANSWER_TEXT_MAX), text);
    buf_clear(&e->in);
    e->state = ENGINE_READY;
    return 0;
}

static int write_first_frame(struct template_engine *e, const struct template_config *config)
{
    struct buf json, filter;
    struct json_writer w;
    buf_init(&json, TEMPLATE_BYTES_MAX * 8);
    buf_init(&filter, 65536);
    int r = template_sandbox_filter(&filter);
    json_write_begin(&w, &json);
    json_write_object(&w);
    json_write_kstr(&w, "template", config->text);
    json_write_kstr(&w, "bos", config->bos ? config->bos : "");
    json_write_kstr(&w, "eos", config->eos ? config->eos : "");
    json_write_kint(&w, "limit", TEMPLATE_OUTPUT_MAX);
    json_write_kstr(&w, "filter", buf_cstr(&filter));
    json_write_object_end(&w);
    if (r == 0)
        r = json_write_end(&w);
    struct frame_head head = {.length = (uint32_t)json.len};
    if (r == 0)
        r = buf_append(&e->first, &head, sizeof head);
    if (r == 0)
        r = buf_append(&e->first, json.data, json.len);
    buf_fini(&filter);
    buf_fini(&json);
    return r;
}

static const char *choose_python(const struct template_config *config)
{
    const char *python = config->python ? config->python : getenv("TIDEPOOL_PYTHON");
    return python && *python ? python : "/usr/bin/python3";
}

int template_engine_create(struct loop *loop, const struct template_config *config, struct template_engine **ret_engine, struct error *err)
{
    if (strlen(config->text) > TEMPLATE_BYTES_MAX)
        return error_set(err, -E2BIG, "the chat template is longer than %zu bytes", TEMPLATE_BYTES_MAX);
    struct template_engine *e = calloc(1, sizeof *e);
    if (!e)
        return error_set(err, -ENOMEM, "out of memory");
    e->loop = loop;
    e->fd = -1;
    e->tail = &e->queue;
    buf_init(&e->first, SIZE_MAX / 2);
    buf_init(&e->out, SIZE_MAX / 2);
    buf_init(&e->in, TEMPLATE_OUTPUT_MAX + sizeof(struct frame_head));
    e->python = strdup(choose_python(config));
    int r = e->python ? write_first_frame(e, config) : -ENOMEM;
    if (r == 0)
        r = loop_timer_add(loop, start_timer_fired, e, &e->start_timer);
    if (r < 0) {
        error_set(err, r, "out of memory");
        goto fail;
    }
    r = start_helper(e, err);
    if (r == 0)
        r = wait_until_ready(e, err);
    if (r < 0)
        goto fail;
    *ret_engine = e;
    return 0;
fail:
    template_engine_free(e);
    return r;
}

void template_engine_free(struct template_engine *e)
{
    if (!e)
        return;
    while (e->queue) {
        struct template_render *next = e->queue->next;
        free_render(e->queue);
        e->queue = next;
    }
    drop_helper(e);
    /* Nobody may run the loop again, so they are waited for here; after SIGKILL that is short. */
    while (e->helpers)
        reap_helper(e->helpers, 0);
    loop_source_free(e->start_timer);
    buf_fini(&e->first);
    buf_fini(&e->out);
    buf_fini(&e->in);
    free(e->python);
    free(e);
}

pid_t template_engine_pid(const struct template_engine *e)
{
    return e->helper ? e->helper->pid : -1;
}

/* {"messages": ..., "options": ...} */
static int write_request(struct buf *out, const char *messages, size_t n_messages, const char *options, size_t n_options)
{
    static const char a[] = "{\"messages\":", b[] = ",\"options\":";
    struct frame_head head = {.length = (uint32_t)(sizeof a - 1 + n_messages + sizeof b - 1 + n_options + 1)};
    buf_init(out, sizeof head + head.length);
    int r = buf_reserve(out, sizeof head + head.length);
    if (r < 0)
        return r;
    buf_append(out, &head, sizeof head);
    buf_append(out, a, sizeof a - 1);
    buf_append(out, messages, n_messages);
    buf_append(out, b, sizeof b - 1);
    buf_append(out, options, n_options);
    buf_append(out, "}", 1);
    return 0;
}

int template_render(struct template_engine *e, const char *messages, size_t n_messages, const char *options, size_t n_options, uint64_t deadline_us, template_cb *cb, void *arg,
                    struct template_render **ret_render)
{
    if (e->n_queue == TEMPLATE_QUEUE_MAX)
        return -EAGAIN;
    if (n_messages > TEMPLATE_INPUT_MAX || n_options > TEMPLATE_INPUT_MAX - n_messages)
        return -E2BIG;
    struct template_render *render = calloc(1, sizeof *render);
    if (!render)
        return -ENOMEM;
    render->engine = e;
    render->cb = cb;
    render->arg = arg;
    render->deadline_us = clock_now_us() + deadline_us;
    int r = write_request(&render->request, messages, n_messages, options, n_options);
    if (r == 0)
        r = loop_timer_add(e->loop, render_late, render, &render->deadline);
    if (r == 0)
        r = loop_timer_arm(render->deadline, deadline_us);
    /* From the loop, so that no callback comes before this call returns. While a helper starts, its answer runs the queue. */
    if (r == 0 && e->state != ENGINE_STARTING && e->state != ENGINE_BUSY)
        r = loop_timer_arm(e->start_timer, 0);
    if (r < 0) {
        free_render(render);
        return r;
    }
    *e->tail = render;
    e->tail = &render->next;
    e->n_queue++;
    *ret_render = render;
    return 0;
}

void template_cancel(struct template_render *render)
{
    struct template_engine *e = render->engine;
    render->cb = NULL;
    if (e->state == ENGINE_BUSY && e->queue == render)
        return; /* its answer is awaited, and thrown away */
    unlink_render(e, render);
    free_render(render);
}
