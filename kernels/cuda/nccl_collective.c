/* Collectives over NCCL, one communicator a device. Non-blocking: a call that other ranks have to answer returns at once, and whoever waits, waits here, polling, with a deadline and an eye on what
 * NCCL itself found out; a communicator that cannot go on is aborted, which ends its kernels. NCCL sees the end of a peer's process over sockets and InfiniBand only, not over NVLink: there it is the
 * deadline, or `abort` by whoever watches the processes.
 *
 * all_gather: rows are packed into staging memory piece by piece, gathered there and unpacked (gather_columns.cu). */
#include "kernels/cuda/nccl_collective.h"
#include "kernels/cuda/gather_columns.cuh"
#include "kernels/cuda/library_memory.h"
#include "kernels/cuda/nccl_api.h"
#include "kernels/cuda/submit.h"
#include "proto/base/clock.h"
#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    STAGING_BYTES = 8 << 20,
    STAGING_FLOATS = STAGING_BYTES / 4,
    POLLS = 2000, /* before a wait starts to sleep between two looks: some milliseconds */
    POLL_SLEEP_NS = 20000,
};
static_assert(STAGING_FLOATS >= COLLECTIVE_MAX_RANKS * 1024, "a piece has some columns of every rank");
static_assert(sizeof(struct nccl_id) == COLLECTIVE_ID_BYTES, "an id is NCCL's");

struct collective {
    const struct nccl_api *api;
    struct device *device;
    nccl_comm comm;         /* NULL once aborted */
    int rank, n_ranks;
    int64_t gather_columns;
    uint64_t deadline_us;
    int error;              /* 0, or what broke it */
    atomic_bool aborted;    /* by `abort`; the owner thread has to act on it */
    struct stream *last;    /* stream of the last collective */
    void *staging;          /* [STAGING_FLOATS] */
    size_t library_bytes;   /* what NCCL took of the device for it */
};

/* ---- breaking ---- */

static int break_with(struct collective *c, int error)
{
    if (c->error == 0)
        c->error = error;
    if (c->comm)
        c->api->comm_abort(c->comm);
    c->comm = NULL;
    return c->error;
}

static int nccl_error(int result)
{
    switch (result) {
    case NCCL_SUCCESS:
    case NCCL_IN_PROGRESS:
        return 0;
    case NCCL_REMOTE_ERROR:
        return -ECONNRESET;
    default:
        return -EIO;
    }
}

/* 0 while there is nothing wrong; else breaks the communicator. ret_busy: NCCL has something to do before the next call. */
static int check(struct collective *c, bool *ret_busy)
{
    int state = NCCL_SUCCESS;
    if (c->error < 0)
        return c->error;
    if (atomic_load(&c->aborted))
        return break_with(c, -ECONNRESET);
    const int r = c->api->comm_get_async_error(c->comm, &state);
    const int error = r != NCCL_SUCCESS ? nccl_error(r) : nccl_error(state);
    *ret_busy = state == NCCL_IN_PROGRESS;
    return error < 0 ? break_with(c, error) : 0;
}

static void pause_between(int poll)
{
    const struct timespec nap = {.tv_nsec = POLL_SLEEP_NS};
    if (poll >= POLLS)
        nanosleep(&nap, NULL);
}

/* Until a call that has returned `result` is under way. */
static int settle(struct collective *c, int result)
{
    const uint64_t end_us = clock_now_us() + c->deadline_us;
    bool busy = result == NCCL_IN_PROGRESS;
    if (nccl_error(result) < 0)
        return break_with(c, nccl_error(result));
    for (int poll = 0; busy; poll++) {
        int r = check(c, &busy);
        if (r < 0)
            return r;
        if (busy && clock_now_us() >= end_us)
            return break_with(c, -ETIMEDOUT);
        if (busy)
            pause_between(poll);
    }
    return 0;
}

/* ---- waiting for the device ---- */

static cudaError_t query_stream(void *stream)
{
    return cudaStreamQuery((cudaStream_t)stream);
}

static cudaError_t query_event(void *event)
{
    return cudaEventQuery((cudaEvent_t)event);
}

/* A broken communicator has no kernels left, so the driver may be waited for. */
static int wait_until(struct collective *c, cudaError_t (*query)(void *), void *what)
{
    const uint64_t end_us = clock_now_us() + c->deadline_us;
    cudaError_t state;
    bool busy;
    int r = 0;
    for (int poll = 0; (state = query(what)) == cudaErrorNotReady; poll++) {
        cudaGetLastError();
        r = check(c, &busy);
        if (r == 0 && clock_now_us() >= end_us)
            r = break_with(c, -ETIMEDOUT);
        if (r < 0) {
            cuda_error(cudaDeviceSynchronize());
            return r;
        }
        pause_between(poll);
    }
    r = cuda_error(state);
    return r < 0 ? r : check(c, &busy);
}

int nccl_wait_stream(struct collective *c, cudaStream_t stream)
{
    return wait_until(c, query_stream, stream);
}

int nccl_wait_event(struct collective *c, cudaEvent_t event)
{
    return wait_until(c, query_event, event);
}

int nccl_wait_all(struct collective *c)
{
    return c->last ? nccl_wait_stream(c, c->last->cuda) : c->error;
}

void nccl_forget_stream(struct collective *c, const struct stream *stream)
{
    if (c->last == stream)
        c->last = NULL;
}

/* ---- opening ---- */

static int nccl_make_id(int n_ranks, uint8_t ret_id[COLLECTIVE_ID_BYTES], struct error *err)
{
    const struct nccl_api *api;
    struct nccl_id id;
    if (n_ranks < 2 || n_ranks > COLLECTIVE_MAX_RANKS)
        return error_set(err, -EINVAL, "a group has 2 to %d ranks, not %d", COLLECTIVE_MAX_RANKS, n_ranks);
    int r = nccl_api_load(&api, err);
    if (r < 0)
        return r;
    r = api->get_unique_id(&id);
    if (r != NCCL_SUCCESS)
        return error_set(err, -EIO, "NCCL makes no id: %s", api->get_error_string(r));
    memcpy(ret_id, &id, sizeof(id));
    return 0;
}

static void nccl_close(struct collective *c)
{
    if (!c)
        return;
    if (c->device->collective == c)
        c->device->collective = NULL;
    if (c->comm)
        c->api->comm_abort(c->comm);
    library_memory_return(c->device, c->library_bytes);
    cuda_arena_free(&c->device->arena, c->staging);
    free(c);
}

static int join(struct collective *c, const struct collective_config *config, struct error *err)
{
    struct nccl_config nccl = {
        .size = sizeof(nccl),
        .magic = NCCL_CONFIG_MAGIC,
        .version = NCCL_VERSION_LEAST,
        .blocking = 0,
        .cga_cluster_size = INT_MIN, /* INT_MIN: as NCCL thinks best */
        .min_ctas = INT_MIN,
        .max_ctas = INT_MIN,
        .split_share = INT_MIN,
    };
    struct nccl_id id;
    memcpy(&id, config->id, sizeof(id));
    const int result = c->api->comm_init_rank_config(&c->comm, config->n_ranks, id, config->rank, &nccl);
    int r = settle(c, result);
    if (r < 0)
        return error_set(err, r, "rank %d of %d: NCCL does not start: %s", config->rank, config->n_ranks, nccl_error(result) < 0 ? c->api->get_error_string(result) : strerror(-r));
    return 0;
}

/* NCCL allocates the most of what it needs when a collective is first called: called here, it is counted before anybody shares the device's memory out, and no request waits for it. */
static int warm_up(struct collective *c)
{
    const size_t part = STAGING_FLOATS / (size_t)c->n_ranks;
    float *staging = c->staging;
    cudaStream_t stream;
    int r = cuda_error(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (r < 0)
        return r;
    r = cuda_error(cudaMemsetAsync(staging, 0, STAGING_BYTES, stream));
    if (r == 0)
        r = settle(c, c->api->all_reduce(staging, staging, STAGING_FLOATS, NCCL_FLOAT32, NCCL_SUM, c->comm, stream));
    if (r == 0)
        r = settle(c, c->api->all_gather(staging + (size_t)c->rank * part, staging, part, NCCL_FLOAT32, c->comm, stream));
    if (r == 0)
        r = nccl_wait_stream(c, stream);
    cudaStreamDestroy(stream);
    return r;
}

static int start(struct collective *c, const struct collective_config *config, struct error *err)
{
    struct library_mark mark;
    library_memory_begin(c->device, &mark);
    int r = join(c, config, err);
    if (r == 0 && (r = warm_up(c)) < 0)
        error_set(err, r, "rank %d of %d: the first collective fails: %s", config->rank, config->n_ranks, strerror(-r));
    c->library_bytes = library_memory_end(c->device, &mark);
    return r;
}

static int nccl_open(const struct collective_config *config, struct collective **ret_collective, struct error *err)
{
    if (config->n_ranks < 2 || config->n_ranks > COLLECTIVE_MAX_RANKS || config->rank < 0 || config->rank >= config->n_ranks || config->deadline_us == 0 || config->gather_columns < 1 ||
        config->device->collective)
        return error_set(err, -EINVAL, "there is no rank %d of %d", config->rank, config->n_ranks);
    struct collective *c = calloc(1, sizeof(*c));
    if (!c)
        return error_set(err, -ENOMEM, "no memory for a rank");
    c->device = config->device;
    c->rank = config->rank;
    c->n_ranks = config->n_ranks;
    c->gather_columns = config->gather_columns;
    c->deadline_us = config->deadline_us;
    int r = nccl_api_load(&c->api, err);
    if (r == 0 && (r = cuda_arena_alloc(&c->device->arena, MEM_WORKSPACE, STAGING_BYTES, &c->staging)) < 0)
        error_set(err, r, "no device memory to gather in");
    if (r == 0)
        r = start(c, config, err);
    if (r < 0) {
        nccl_close(c);
        return r;
    }
    c->device->collective = c;
    *ret_collective = c;
    return 0;
}

/* ---- collectives ---- */

/* Before anything is submitted. */
static int begin(struct collective *c, struct stream *s)
{
    bool busy;
    int r = submit_directly(s);
    if (r < 0)
        return r;
    c->last = s;
    return check(c, &busy);
}

static int nccl_all_reduce(struct collective *c, struct stream *s, float *data, int64_t n)
{
    if (!data || n <= 0)
        return -EINVAL;
    int r = begin(c, s);
    return r < 0 ? r : settle(c, c->api->all_reduce(data, data, (size_t)n, NCCL_FLOAT32, NCCL_SUM, c->comm, s->cuda));
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Columns from .. from + width - 1 of each rank's own, of n_rows rows. */
static int gather_piece(struct collective *c, struct stream *s, struct gather_columns *g, const int64_t *first, int64_t from)
{
    const int64_t part = g->n_rows * g->width;
    float *parts = c->staging;
    for (int i = 0; i < c->n_ranks; i++) {
        const int64_t left = first[i + 1] - first[i] - from;
        g->first[i] = first[i] + from;
        g->n[i] = (int32_t)(left < 0 ? 0 : smaller(left, g->width));
    }
    int r = cuda_pack_columns(s, g, parts);
    if (r == 0)
        r = settle(c, c->api->all_gather(parts + c->rank * part, parts, (size_t)part, NCCL_FLOAT32, c->comm, s->cuda));
    return r < 0 ? r : cuda_unpack_columns(s, g, parts);
}

static int64_t widest_part(const int64_t *first, int n_ranks)
{
    int64_t widest = 0;
    for (int i = 0; i < n_ranks; i++)
        widest = first[i + 1] - first[i] > widest ? first[i + 1] - first[i] : widest;
    return widest;
}

static bool parts_are_valid(const struct collective *c, int64_t ld, const int64_t *first)
{
    for (int i = 0; i < c->n_ranks; i++)
        if (first[i + 1] < first[i])
            return false;
    return first[0] == 0 && first[c->n_ranks] <= ld && first[c->n_ranks] <= c->gather_columns;
}

static int nccl_all_gather(struct collective *c, struct stream *s, float *rows, int64_t n_rows, int64_t ld, const int64_t *first)
{
    if (!rows || n_rows <= 0 || !parts_are_valid(c, ld, first))
        return -EINVAL;
    const int64_t widest = widest_part(first, c->n_ranks), room = STAGING_FLOATS / c->n_ranks, width = smaller(widest, room), step = width ? room / width : n_rows;
    int r = begin(c, s);
    for (int64_t row = 0; r == 0 && row < n_rows; row += step)
        for (int64_t from = 0; r == 0 && from < widest; from += width) {
            struct gather_columns g = {.rows = rows + row * ld, .n_rows = smaller(n_rows - row, step), .ld = ld, .width = width, .rank = c->rank, .n_ranks = c->n_ranks};
            r = gather_piece(c, s, &g, first, from);
        }
    return r;
}

/* ---- */

static int nccl_status(struct collective *c)
{
    bool busy;
    return check(c, &busy);
}

static void nccl_abort(struct collective *c)
{
    atomic_store(&c->aborted, true);
}

static size_t nccl_device_bytes(int n_ranks, int64_t gather_columns)
{
    (void)n_ranks;
    (void)gather_columns;
    return STAGING_BYTES;
}

static size_t nccl_host_bytes(int n_ranks)
{
    (void)n_ranks;
    return sizeof(struct collective);
}

const struct collective_ops *nccl_collective_ops(void)
{
    static const struct collective_ops ops = {
        .name = "nccl",
        .make_id = nccl_make_id,
        .open = nccl_open,
        .close = nccl_close,
        .all_reduce = nccl_all_reduce,
        .all_gather = nccl_all_gather,
        .status = nccl_status,
        .abort = nccl_abort,
        .device_bytes = nccl_device_bytes,
        .host_bytes = nccl_host_bytes,
    };
    return &ops;
}
