/* Stands in for NCCL: the calls of nccl_api.h over a window of shared memory, so that ranks are processes (or threads) with an emulated device each. A collective is an operation of its stream that
 * blocks until the other ranks have come to it.
 *
 * A peer that is gone: with a thread for each stream the operation hangs until the communicator is aborted, as a kernel over NVLink does; lazily, where it would take the host's thread with it, it
 * ends and the communicator has a remote error, as over a network. An abort ends the collectives of all ranks, of which a real one leaves the others waiting. */
#include "tests/simt/simt_private.h"
#include <atomic>
#include <cerrno>
#include <thread>
#include <unistd.h>
extern "C" {
#include "kernels/cpu/shm_window.h"
#include "kernels/cuda/nccl_api.h"
}

namespace simt {

static const uint64_t peer_deadline_us = 60000000; /* that of the stand-in; who uses it has a shorter one */
enum { COMMUNICATOR_BYTES = 3 << 20, KIND_ALL_REDUCE = 11, KIND_ALL_GATHER = 12, NCCL_INVALID_ARGUMENT = 4 };

struct Communicator {
    struct shm_window *window = nullptr; /* set before state is */
    std::atomic<int> state = {NCCL_IN_PROGRESS};
    std::atomic<bool> aborted = {false};
    int rank = 0, n_ranks = 0;
    ~Communicator() { shm_window_close(window); }
};

} /* namespace simt */

struct ncclComm {
    std::shared_ptr<simt::Communicator> shared; /* operations that are still on their way hold it too */
};

namespace simt {

using Shared = std::shared_ptr<Communicator>;

static int get_version(int *ret_version)
{
    *ret_version = NCCL_VERSION_LEAST;
    return NCCL_SUCCESS;
}

static int get_unique_id(struct nccl_id *ret_id)
{
    return shm_window_make((uint8_t *)ret_id->bytes, nullptr) < 0 ? NCCL_REMOTE_ERROR : NCCL_SUCCESS;
}

static int comm_init(nccl_comm *ret_comm, int n_ranks, struct nccl_id id, int rank, struct nccl_config *config)
{
    if (config->size != sizeof *config || config->magic != NCCL_CONFIG_MAGIC || config->blocking != 0)
        report("NCCL", "the configuration is not the one that is emulated");
    Shared c = std::make_shared<Communicator>();
    library_memory(COMMUNICATOR_BYTES);
    c->rank = rank;
    c->n_ranks = n_ranks;
    *ret_comm = new ncclComm{c};
    std::thread([c, id] {
        const int r = shm_window_open((const uint8_t *)id.bytes, c->rank, c->n_ranks, peer_deadline_us, &c->window, nullptr);
        c->state = r < 0 ? NCCL_REMOTE_ERROR : NCCL_SUCCESS;
    }).detach();
    return NCCL_IN_PROGRESS;
}

static int get_async_error(nccl_comm comm, int *ret_state)
{
    *ret_state = comm->shared->state;
    return NCCL_SUCCESS;
}

static int comm_abort(nccl_comm comm)
{
    Communicator &c = *comm->shared;
    library_memory(-COMMUNICATOR_BYTES);
    c.aborted = true;
    if (c.state != NCCL_IN_PROGRESS && c.window)
        shm_window_break(c.window, -ECONNRESET);
    delete comm;
    return NCCL_SUCCESS;
}

/* False: the ranks will not come together any more, and the operation is over. */
static bool meet(Communicator &c, uint32_t kind, uint64_t n)
{
    const int r = shm_window_exchange(c.window, kind, n);
    if (r == -EPROTO)
        report("NCCL", "the ranks make different calls");
    if (r == 0)
        return true;
    while (options().threads && !c.aborted)
        usleep(1000); /* what hangs is ended by an abort alone */
    c.state = NCCL_REMOTE_ERROR;
    return false;
}

static size_t piece(size_t left)
{
    return left < SHM_SLOT_FLOATS ? left : (size_t)SHM_SLOT_FLOATS;
}

static void put(Communicator &c, const float *from, size_t n)
{
    check::range_read(from, n * sizeof(float));
    memcpy(shm_window_begin(c.window), from, n * sizeof(float));
}

static void reduce(Communicator &c, const float *send, float *recv, size_t n)
{
    for (size_t at = 0, m; at < n; at += m) {
        m = piece(n - at);
        put(c, send + at, m);
        if (!meet(c, KIND_ALL_REDUCE, n - at))
            return;
        check::range_written(recv + at, m * sizeof(float));
        memset(recv + at, 0, m * sizeof(float));
        for (int rank = 0; rank < c.n_ranks; rank++)
            for (size_t i = 0; i < m; i++)
                recv[at + i] += shm_window_slot(c.window, rank)[i];
    }
}

static void gather(Communicator &c, const float *send, float *recv, size_t n)
{
    for (size_t at = 0, m; at < n; at += m) {
        m = piece(n - at);
        put(c, send + at, m);
        if (!meet(c, KIND_ALL_GATHER, n - at))
            return;
        for (int rank = 0; rank < c.n_ranks; rank++) {
            check::range_written(recv + (size_t)rank * n + at, m * sizeof(float));
            memcpy(recv + (size_t)rank * n + at, shm_window_slot(c.window, rank), m * sizeof(float));
        }
    }
}

static bool is_device(const void *memory, size_t floats)
{
    size_t left;
    return memory_find(memory, &left) == MEMORY_DEVICE && left >= floats * sizeof(float);
}

static int all_reduce(const void *send, void *recv, size_t n, int type, int op, nccl_comm comm, cudaStream_t stream)
{
    Shared c = comm->shared;
    if (type != NCCL_FLOAT32 || op != NCCL_SUM || c->state != NCCL_SUCCESS)
        return NCCL_INVALID_ARGUMENT;
    if (!is_device(send, n) || !is_device(recv, n))
        report("NCCL", "all-reduce of memory that is not the device's");
    enqueue(stream, "all-reduce", [=] { reduce(*c, (const float *)send, (float *)recv, n); });
    return NCCL_SUCCESS;
}

static int all_gather(const void *send, void *recv, size_t n, int type, nccl_comm comm, cudaStream_t stream)
{
    Shared c = comm->shared;
    if (type != NCCL_FLOAT32 || c->state != NCCL_SUCCESS)
        return NCCL_INVALID_ARGUMENT;
    if (!is_device(send, n) || !is_device(recv, n * (size_t)c->n_ranks))
        report("NCCL", "all-gather of memory that is not the device's");
    enqueue(stream, "all-gather", [=] { gather(*c, (const float *)send, (float *)recv, n); });
    return NCCL_SUCCESS;
}

static const char *error_string(int)
{
    return "an error of the emulated NCCL";
}

} /* namespace simt */

extern "C" int nccl_api_load(const struct nccl_api **ret_api, struct error *)
{
    static const struct nccl_api api = {
        simt::get_version, simt::get_unique_id, simt::comm_init, simt::get_async_error, simt::comm_abort, simt::all_reduce, simt::all_gather, simt::error_string,
    };
    *ret_api = &api;
    return 0;
}
