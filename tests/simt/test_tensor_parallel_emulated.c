/* Ranks with an emulated GPU each, and the NCCL backend over the emulator's NCCL: the same tokens as one rank; and what becomes of a rank whose peer dies. */
#include "tests/simt/simt.h"
#include "tests/unit/rank_model.h"
#include "tests/unit/rank_run.h"
#include "worker/cache/selector.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

kernel_backend_fn tidepool_cuda_backend;

enum { N_PROMPT = 150, N_DECODE = 10, VOCAB = 96, LONG = 70001 };
static const uint64_t long_deadline_us = 60000000;

static const struct kernel_backend *gpu(void)
{
    return tidepool_cuda_backend();
}

static void expect_like_one(const struct rank_model *model, struct rank_run run, int n_ranks)
{
    struct rank_answer one, several;
    char path[] = "/tmp/tidepool-ranks-XXXXXX";
    close(mkstemp(path));
    rank_model_write(model, path);
    run.path = path;
    run.n_ranks = 1;
    rank_run(&run, &one);
    run.n_ranks = n_ranks;
    rank_run(&run, &several);
    unlink(path);
    const double divergence = rank_answers_compare(&one, &several, 0);
    cr_expect(divergence < 1e-4, "%d ranks diverge by %g", n_ranks, divergence);
    rank_answer_free(&one);
    rank_answer_free(&several);
}

/* Uneven: 2 + 1 KV heads. Operands are bf16, so sums in another order may round to other bits of what the next layer reads. */
static void run_seed(uint64_t seed, bool threads)
{
    static const struct rank_model model = {.arch = "qwen2", .n_layers = 2, .dim = 64, .n_heads = 6, .n_kv_heads = 3, .head_dim = 64, .ffn_dim = 96, .n_vocab = VOCAB, .context = 512,
                                            .n_dtypes = 2, .dtypes = {WEIGHT_Q8_0, WEIGHT_BF16}};
    int32_t prompt[N_PROMPT];
    for (int i = 0; i < N_PROMPT; i++)
        prompt[i] = i * i % 97 * 31 % VOCAB;
    simt_configure(seed, threads);
    expect_like_one(&model, (struct rank_run){.backend = gpu(), .prompt = prompt, .n_prompt = N_PROMPT, .n_decode = N_DECODE,
        .config = {.format = KV_FORMAT_K8V4, .selector = &selector_snapkv, .budget = 40, .recent = 16, .fetch = 32, .chunk = 100, .max_context = 256, .max_batch = 1}}, 2);
}

Test(tensor_parallel_emulated, test_two_ranks_answer_like_one, .timeout = 100)
{
    run_seed(1, false);
}

Test(tensor_parallel_emulated, test_two_ranks_with_a_thread_for_each_stream, .timeout = 100)
{
    run_seed(2, true);
}

/* Heads of both ranks compete for the layer's rows: scores are gathered by NCCL, and counted beside the rest of the scratch. */
Test(tensor_parallel_emulated, test_heads_of_two_ranks_compete, .timeout = 100)
{
    static const struct rank_model model = {.arch = "llama", .n_layers = 2, .dim = 64, .n_heads = 6, .n_kv_heads = 3, .head_dim = 64, .ffn_dim = 96, .n_vocab = VOCAB, .context = 512,
                                            .n_dtypes = 1, .dtypes = {WEIGHT_F32}};
    int32_t prompt[N_PROMPT];
    for (int i = 0; i < N_PROMPT; i++)
        prompt[i] = i * i % 89 * 31 % VOCAB;
    simt_configure(3, false);
    expect_like_one(&model, (struct rank_run){.backend = gpu(), .prompt = prompt, .n_prompt = N_PROMPT, .n_decode = N_DECODE,
        .config = {.format = KV_FORMAT_K8V4, .selector = &selector_adakv, .budget = 48, .recent = 16, .fetch = 32, .chunk = 100, .max_context = 256, .max_batch = 1}}, 2);
}

/* ---- the collectives themselves ---- */

struct end {
    int rank;
    uint8_t id[COLLECTIVE_ID_BYTES];
    uint64_t deadline_us;
    struct device *device;
    struct stream *stream;
    struct collective *collective;
};

static int end_open(struct end *e)
{
    const struct device_config device = {0};
    if (gpu()->device->open(&device, &e->device) < 0 || gpu()->device->stream_create(e->device, &e->stream) < 0)
        return -ENODEV;
    struct collective_config config = {.device = e->device, .rank = e->rank, .n_ranks = 2, .gather_columns = LONG, .deadline_us = e->deadline_us};
    memcpy(config.id, e->id, sizeof(config.id));
    return gpu()->collective->open(&config, &e->collective, NULL);
}

static void end_close(struct end *e)
{
    gpu()->collective->close(e->collective);
    gpu()->device->stream_free(e->stream);
    gpu()->device->close(e->device);
}

static float value(int rank, int64_t i)
{
    return (float)((rank * 7919 + i * 104729) % 1000003) * (rank ? -1.7e-3f : 2.9e2f);
}

/* Device memory with n floats of this end. */
static float *upload(struct end *e, const float *host, int64_t n)
{
    void *memory;
    if (gpu()->device->alloc(e->device, MEM_WORKSPACE, (size_t)n * sizeof(float), &memory) < 0 || gpu()->device->copy(e->stream, memory, host, (size_t)n * sizeof(float)) < 0)
        return NULL;
    return memory;
}

static int check_reduce(struct end *e, int64_t n)
{
    static float host[LONG];
    for (int64_t i = 0; i < n; i++)
        host[i] = value(e->rank, i);
    float *data = upload(e, host, n);
    if (!data || gpu()->collective->all_reduce(e->collective, e->stream, data, n) < 0 || gpu()->device->copy(e->stream, host, data, (size_t)n * sizeof(float)) < 0 ||
        gpu()->device->stream_sync(e->stream) < 0)
        return -1;
    gpu()->device->free(e->device, data);
    for (int64_t i = 0; i < n; i++)
        if (host[i] != value(0, i) + value(1, i))
            return -2;
    return 0;
}

/* Rank 0 has columns 0 .. split - 1. */
static int check_gather(struct end *e, int64_t n_rows, int64_t ld, int64_t split, int64_t last)
{
    static float host[2 * LONG];
    const int64_t first[] = {0, split, last};
    const size_t bytes = (size_t)(n_rows * ld) * sizeof(float);
    for (int64_t i = 0; i < n_rows * ld; i++)
        host[i] = i % ld >= first[e->rank] && i % ld < first[e->rank + 1] ? (float)i : -1;
    float *data = upload(e, host, n_rows * ld);
    if (!data || gpu()->collective->all_gather(e->collective, e->stream, data, n_rows, ld, first) < 0 || gpu()->device->copy(e->stream, host, data, bytes) < 0 ||
        gpu()->device->stream_sync(e->stream) < 0)
        return -3;
    gpu()->device->free(e->device, data);
    for (int64_t i = 0; i < n_rows * ld; i++)
        if (host[i] != (i % ld < last ? (float)i : -1))
            return -4;
    return 0;
}

/* What NCCL has taken for itself is counted, and is neither the arena's nor free. */
static int check_libraries(struct end *e)
{
    struct device_memory_stats stats;
    struct device_properties properties;
    gpu()->device->memory_stats(e->device, &stats);
    gpu()->device->properties(e->device, &properties);
    return stats.now[MEM_LIBRARIES] == 3 << 20 && properties.library_bytes == 3 << 20 && gpu()->device->free_memory(e->device) == properties.memory_bytes - stats.total_now ? 0 : -10;
}

static int check_all(struct end *e)
{
    int r = check_libraries(e);
    r = r ? r : check_reduce(e, 1);
    r = r ? r : check_reduce(e, LONG);
    r = r ? r : check_gather(e, 1, 100, 40, 100);
    r = r ? r : check_gather(e, 7, 133, 64, 100);
    r = r ? r : check_gather(e, 3, 64, 64, 64);
    r = r ? r : check_gather(e, 2, LONG, 1, LONG);
    return r ? r : gpu()->collective->status(e->collective);
}

/* Rank 1 in a process of its own. Rank 0's too: the emulator is opened after the fork. */
static void run_pair(int (*rank_0)(struct end *), int (*rank_1)(struct end *), uint64_t deadline_us)
{
    struct end e = {.deadline_us = deadline_us};
    pid_t ranks[2];
    cr_assert_eq(gpu()->collective->make_id(2, e.id, NULL), 0);
    for (e.rank = 0; e.rank < 2; e.rank++)
        if ((ranks[e.rank] = fork()) == 0) {
            int r = end_open(&e);
            r = r < 0 ? r : e.rank == 0 ? rank_0(&e) : rank_1(&e);
            if (r == 0)
                end_close(&e);
            if (r != 0)
                fprintf(stderr, "rank %d gives %d\n", e.rank, r);
            _exit(r == 0 ? 0 : 1);
        }
    for (int i = 0; i < 2; i++) {
        int status;
        cr_assert_eq(waitpid(ranks[i], &status, 0), ranks[i]);
        cr_expect(WIFEXITED(status) ? WEXITSTATUS(status) == 0 : i == 1 && WTERMSIG(status) == SIGKILL, "rank %d", i);
    }
}

Test(tensor_parallel_emulated, test_sums_and_columns, .timeout = 60)
{
    simt_configure(3, false);
    run_pair(check_all, check_all, long_deadline_us);
}

static int die(struct end *e)
{
    int r = check_reduce(e, 5);
    if (r == 0)
        kill(getpid(), SIGKILL);
    return r;
}

/* The peer is gone: what the stream has to say, and that memory can be freed and all be closed. */
static int outlive(struct end *e, int want)
{
    const float x[5] = {0};
    int r = check_reduce(e, 5);
    float *data = r == 0 ? upload(e, x, 5) : NULL;
    if (!data)
        return -5;
    r = gpu()->collective->all_reduce(e->collective, e->stream, data, 5);
    r = r < 0 ? r : gpu()->device->stream_sync(e->stream);
    gpu()->device->free(e->device, data);
    if (r != want || gpu()->collective->all_reduce(e->collective, e->stream, data, 5) != want || gpu()->collective->status(e->collective) != want)
        return r ? r : -6;
    return gpu()->device->stream_sync(e->stream) == want ? 0 : -7;
}

static int outlive_network(struct end *e)
{
    return outlive(e, -ECONNRESET);
}

static int outlive_nvlink(struct end *e)
{
    return outlive(e, -ETIMEDOUT);
}

/* NCCL has seen it. */
Test(tensor_parallel_emulated, test_dead_rank_that_nccl_reports, .timeout = 60)
{
    simt_configure(0, false);
    run_pair(outlive_network, die, long_deadline_us);
}

/* It has not, and its kernel waits for ever: the deadline ends it. */
Test(tensor_parallel_emulated, test_dead_rank_that_nobody_reports, .timeout = 60)
{
    simt_configure(0, true);
    run_pair(outlive_nvlink, die, 500000);
}

static void *abort_thread(void *arg)
{
    gpu()->collective->abort(((struct end *)arg)->collective);
    return NULL;
}

/* Whoever watches the processes says so from a thread of its own. */
static int outlive_by_abort(struct end *e)
{
    pthread_t thread;
    int r = check_reduce(e, 5);
    if (r < 0 || pthread_create(&thread, NULL, abort_thread, e) != 0)
        return -8;
    const float x[5] = {0};
    float *data = upload(e, x, 5);
    r = gpu()->collective->all_reduce(e->collective, e->stream, data, 5);
    r = r < 0 ? r : gpu()->device->stream_sync(e->stream);
    pthread_join(thread, NULL);
    gpu()->device->free(e->device, data);
    return r == -ECONNRESET ? 0 : -9;
}

Test(tensor_parallel_emulated, test_abort_ends_a_wait, .timeout = 60)
{
    simt_configure(0, true);
    run_pair(outlive_by_abort, die, long_deadline_us);
}
