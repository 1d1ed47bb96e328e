#include "kernels/cuda/step.h"
#include "kernels/cuda/submit.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- the record ---- */

static bool record_reserve(struct step_record *record, size_t bytes)
{
    size_t room = record->room ? record->room : 4096;
    if (bytes > STEP_RECORD_BYTES_MAX)
        return false;
    while (room < bytes)
        room *= 2;
    uint8_t *memory = room == record->room ? record->bytes : realloc(record->bytes, room);
    if (!memory)
        return false;
    record->bytes = memory;
    record->room = room;
    return true;
}

void step_note(struct step *step, const void *part, size_t bytes)
{
    struct step_record *record = &step->record;
    if (step->mode == STEP_CAPTURE) {
        if (step->blocked || bytes > record->n - step->compared || memcmp(record->bytes + step->compared, part, bytes) != 0)
            step->blocked = true;
        else
            step->compared += bytes;
        return;
    }
    if (step->blocked || (bytes > record->room - record->n && !record_reserve(record, record->n + bytes))) {
        step->blocked = true;
        return;
    }
    memcpy(record->bytes + record->n, part, bytes);
    record->n += bytes;
}

void step_note_begin(struct step *step, const struct stream *s, int kind)
{
    const struct stream *main = s->main;
    int32_t head[2] = {kind, 0};
    for (int i = 0; i < main->n_sides; i++)
        if (main->sides[i] == s)
            head[1] = i + 1;
    step_note(step, head, sizeof head);
}

int step_block(const struct stream *s)
{
    struct step *step = step_noting(s);
    if (!step)
        return 0;
    step->blocked = true;
    return -EAGAIN;
}

/* ---- graphs ---- */

/* Work of the newest graph is over. */
static int wait_launched(struct stream *s)
{
    return device_wait_event(s->device, s->step->launched);
}

static void graph_forget(struct stream *s, struct step_graph *g)
{
    if (g->exec) {
        wait_launched(s);
        cudaGraphExecDestroy(g->exec);
    }
    free(g->record.bytes);
    *g = (struct step_graph){0};
}

static struct step_graph *graph_find(struct step *step)
{
    for (int i = 0; i < STEP_GRAPHS; i++) {
        struct step_graph *g = &step->graphs[i];
        if (g->record.n == step->record.n && g->record.n > 0 && memcmp(g->record.bytes, step->record.bytes, g->record.n) == 0)
            return g;
    }
    return NULL;
}

/* In the place of the one that was not used for longest. NULL: no memory. */
static struct step_graph *graph_remember(struct stream *s)
{
    struct step *step = s->step;
    struct step_graph *g = &step->graphs[0];
    for (int i = 1; i < STEP_GRAPHS; i++)
        if (step->graphs[i].used < g->used)
            g = &step->graphs[i];
    graph_forget(s, g);
    if (step->record.n == 0 || !record_reserve(&g->record, step->record.n))
        return NULL;
    memcpy(g->record.bytes, step->record.bytes, step->record.n);
    g->record.n = step->record.n;
    return g;
}

/* The streams beside this one have come to where it is, and go on behind it. */
static int sides_join(struct stream *s)
{
    int r = 0;
    for (int i = 0; r == 0 && i < s->n_sides; i++) {
        r = submit_record(s->sides[i], s->step->joined[i]);
        if (r == 0)
            r = submit_wait(s, s->step->joined[i]);
    }
    return r;
}

static int sides_follow(struct stream *s, cudaEvent_t event)
{
    int r = submit_record(s, event);
    for (int i = 0; r == 0 && i < s->n_sides; i++)
        r = submit_wait(s->sides[i], event);
    return r;
}

static int graph_launch(struct stream *s, const struct step_graph *g)
{
    struct step *step = s->step;
    int r = sides_join(s);
    if (r == 0 && step->args_used > 0)
        r = submit_copy(s, step->args_device, step->args_host, step->args_used);
    if (r == 0)
        r = submit_record(s, step->args_sent);
    if (r == 0)
        r = cuda_error(cudaGraphLaunch(g->exec, s->cuda));
    return r == 0 ? sides_follow(s, step->launched) : r;
}

/* ---- capture ---- */

/* With STEP_NONE, so that the forks and joins of the streams are in the graph but not in the record. */
static int capture_begin(struct stream *s)
{
    struct step *step = s->step;
    int r = cuda_error(cudaStreamBeginCapture(s->cuda, cudaStreamCaptureModeThreadLocal));
    if (r < 0)
        return r;
    step->compared = 0;
    step->args_used = 0;
    return sides_follow(s, step->fork);
}

static int capture_end(struct stream *s, struct step_graph *g)
{
    cudaGraph_t graph = NULL;
    int r = sides_join(s);
    const int ended = cuda_error(cudaStreamEndCapture(s->cuda, &graph)); /* whatever came before */
    if (r == 0)
        r = ended;
    if (r == 0) /* kernels keep the priority of the stream they were captured from: without the flag the gather would wait behind the compute stream's blocks */
        r = cuda_error(cudaGraphInstantiate(&g->exec, graph, cudaGraphInstantiateFlagUseNodePriority));
    if (graph)
        cudaGraphDestroy(graph);
    cudaGetLastError(); /* of a capture that did not succeed: the ops run without */
    return r;
}

/* A capture that did not become the step is not tried again. */
static void capture_drop(struct step_graph *g)
{
    if (g->exec)
        cudaGraphExecDestroy(g->exec);
    g->exec = NULL;
    g->refused = true;
}

/* ---- steps ---- */

static int events_create(struct step *step)
{
    int r = cuda_error(cudaEventCreateWithFlags(&step->args_sent, cudaEventDisableTiming));
    if (r == 0)
        r = cuda_error(cudaEventCreateWithFlags(&step->fork, cudaEventDisableTiming));
    if (r == 0)
        r = cuda_error(cudaEventCreateWithFlags(&step->launched, cudaEventDisableTiming));
    for (int i = 0; r == 0 && i < STREAM_SIDES_MAX; i++)
        r = cuda_error(cudaEventCreateWithFlags(&step->joined[i], cudaEventDisableTiming));
    return r;
}

static void event_destroy(cudaEvent_t event)
{
    if (event)
        cudaEventDestroy(event);
}

void cuda_steps_close(struct stream *s)
{
    struct step *step = s ? s->step : NULL;
    if (!step)
        return;
    ASSERT(step->mode == STEP_NONE);
    for (int i = 0; i < STEP_GRAPHS; i++)
        graph_forget(s, &step->graphs[i]);
    if (step->args_sent)
        device_wait_event(s->device, step->args_sent);
    event_destroy(step->args_sent);
    event_destroy(step->fork);
    event_destroy(step->launched);
    for (int i = 0; i < STREAM_SIDES_MAX; i++)
        event_destroy(step->joined[i]);
    cudaFreeHost(step->args_host);
    free(step->record.bytes);
    free(step);
    s->step = NULL;
}

int cuda_steps_open(struct stream *s, void *memory, size_t bytes)
{
    void *host = NULL;
    if (!memory || bytes == 0 || s->step)
        return -EINVAL;
    struct step *step = calloc(1, sizeof *step);
    if (!step)
        return -ENOMEM;
    s->step = step;
    int r = events_create(step);
    if (r == 0)
        r = cuda_error(cudaHostAlloc(&host, bytes, cudaHostAllocDefault));
    if (r < 0) {
        cuda_steps_close(s);
        return r;
    }
    step->args_host = host;
    step->args_device = memory;
    step->args_bytes = bytes;
    return 0;
}

int cuda_step_begin(struct stream *s)
{
    struct step *step = s->step;
    if (!step)
        return 0;
    ASSERT(step->mode == STEP_NONE);
    const int r = device_wait_event(s->device, step->args_sent); /* the ops write to where it was sent from */
    if (r < 0)
        return r;
    step->mode = STEP_QUIET;
    step->blocked = false;
    step->record.n = 0;
    step->args_used = 0;
    return 0;
}

static int run_eagerly(struct step *step)
{
    step->mode = STEP_EAGER;
    return 1;
}

/* Everything is noted: a graph of it is launched, or the ops run once more. */
static int quiet_end(struct stream *s, int result)
{
    struct step *step = s->step;
    step->captured = NULL;
    if (step->blocked)
        return run_eagerly(step);
    step->mode = STEP_NONE;
    if (result < 0)
        return result;
    struct step_graph *g = graph_find(step);
    const bool seen = g;
    if (!seen)
        g = graph_remember(s);
    if (g)
        g->used = step->stats.captures + step->stats.replays + step->stats.eager + 1;
    step->captured = g;
    if (g && g->exec) {
        step->stats.replays++;
        return graph_launch(s, g);
    }
    if (!seen || !g || g->refused)
        return run_eagerly(step);
    if (capture_begin(s) < 0) {
        capture_end(s, g);
        capture_drop(g);
        return run_eagerly(step);
    }
    step->mode = STEP_CAPTURE;
    return 1;
}

/* The ops have run into the capture. Whatever keeps it from being the step that was noted, the step can still run without. */
static int capture_done(struct stream *s, int result)
{
    struct step *step = s->step;
    struct step_graph *g = step->captured;
    const bool same = result >= 0 && !step->blocked && step->compared == step->record.n;
    step->mode = STEP_NONE;
    if (capture_end(s, g) < 0 || !same) {
        capture_drop(g);
        return run_eagerly(step);
    }
    step->stats.captures++;
    return graph_launch(s, g);
}

/* What has never run without a graph is not captured: kernels are loaded, and libraries choose, when they run first. */
static int eager_end(struct stream *s, int result)
{
    struct step *step = s->step;
    step->mode = STEP_NONE;
    step->stats.eager++;
    if (result < 0 && step->captured)
        graph_forget(s, step->captured);
    return result < 0 ? result : 0;
}

int cuda_step_end(struct stream *s, int result)
{
    if (!s->step)
        return result < 0 ? result : 0;
    switch (s->step->mode) {
    case STEP_QUIET:
        return quiet_end(s, result);
    case STEP_CAPTURE:
        return capture_done(s, result);
    default:
        ASSERT(s->step->mode == STEP_EAGER);
        return eager_end(s, result);
    }
}

void cuda_step_stats(const struct stream *s, struct step_stats *ret)
{
    *ret = s->step ? s->step->stats : (struct step_stats){0};
}
