/* The engine on the emulated GPU over a real kvstore: blocks go to the pool and come back by copies of the device and by kernels that read the registered mapping. The host
 * faults where it touches device memory, and a kernel's pointer to memory that nobody registered is reported. */
#include "proto/base/clock.h"
#include "tests/simt/pool_side.h"
#include "tests/simt/simt.h"
#include "worker/cache/memory_plan.h"
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

kernel_backend_fn tidepool_cuda_backend;

/* A block is complete while the answer is decoded. The last 32 tokens of the prompt are observed, so two of its blocks can be found. */
enum { PROMPT = 300, ANSWER = 90, ROWS = ANSWER + 1, CACHED = 256 };

static int32_t tokens[PROMPT + ANSWER];
static const struct fixture_run all = {.tokens = tokens, .n_prompt = PROMPT, .n_decode = ANSWER}, prompt_only = {.tokens = tokens, .n_prompt = PROMPT};

static void setup(void)
{
    fixture_tokens(5, tokens, PROMPT + ANSWER);
    store_fixture_init(&side_store, "8M", 60);
}
static void teardown(void)
{
    store_fixture_fini(&side_store);
}
TestSuite(pool_emulated, .init = setup, .fini = teardown, .timeout = 200);

/* Without the pool, cold, and warm are one: the private block that decoding makes is moved to the pool, and found there by the second run. */
static void cold_and_warm(enum kv_format format, uint64_t seed)
{
    struct engine_config config = fixture_config();
    struct sequence_stats stats;
    struct side side;
    config.format = format;
    simt_configure(seed, false);
    side_open(&side, tidepool_cuda_backend(), 2, 0);
    float *want = side_logits(&side, &config, &all, false, &stats);
    float *cold = side_logits(&side, &config, &all, true, &stats);
    cr_expect(stats.n_cached == 0 && stats.bytes_to_pool > 0 && stats.private_blocks == 0, "%d private", stats.private_blocks);
    config.chunk = 70;
    float *warm = side_logits(&side, &config, &all, true, &stats);
    cr_expect(stats.n_cached == CACHED && stats.bytes_to_pool == 0 && stats.private_blocks == 0, "%d cached, %d private", stats.n_cached, stats.private_blocks);
    fixture_expect_same(want, cold, ROWS, "cold");
    fixture_expect_same(want, warm, ROWS, "warm");
    free(warm);
    free(cold);
    free(want);
    side_close(&side);
}

Test(pool_emulated, cold_and_warm_k8v4)
{
    cold_and_warm(KV_FORMAT_K8V4, 0);
}
Test(pool_emulated, cold_and_warm_k8v8)
{
    cold_and_warm(KV_FORMAT_K8V8, 1);
}
Test(pool_emulated, cold_and_warm_bf16)
{
    cold_and_warm(KV_FORMAT_BF16, 2);
}

/* Last bits differ between the two, so their blocks lie side by side in one pool and neither takes the other's. */
Test(pool_emulated, a_cpu_and_a_gpu_share_a_pool_but_no_blocks)
{
    const struct engine_config config = fixture_config();
    const struct kernel_backend *const backends[] = {cpu_backend(), tidepool_cuda_backend(), cpu_backend(), tidepool_cuda_backend()};
    float *logits[4];
    for (int i = 0; i < 4; i++) {
        struct sequence_stats stats;
        struct side side;
        side_open(&side, backends[i], 2, 0);
        logits[i] = side_logits(&side, &config, &prompt_only, true, &stats);
        cr_expect(stats.n_cached == (i < 2 ? 0 : CACHED), "run %d: %d cached", i, stats.n_cached);
        cr_expect((stats.bytes_to_pool > 0) == (i < 2), "run %d", i);
        side_close(&side);
    }
    fixture_expect_same(logits[0], logits[2], 1, "CPU");
    fixture_expect_same(logits[1], logits[3], 1, "GPU");
    for (int i = 0; i < 4; i++)
        free(logits[i]);
}

static struct side *watched;
static int n_coded;
static int watched_encode(struct stream *s, const struct block_params *blocks, int n, bool attended, int32_t *bad)
{
    n_coded += n;
    for (int i = 0; i < n; i++)
        cr_assert((uint64_t)(blocks[i].slice - watched->pool) >= watched->pool_bytes, "a kernel writes to the pool");
    return tidepool_cuda_backend()->ops->block_encode(s, blocks, n, attended, bad);
}

Test(pool_emulated, no_kernel_writes_to_the_pool)
{
    const struct engine_config config = fixture_config();
    struct kernel_backend backend = *tidepool_cuda_backend();
    struct kernel_ops ops = *backend.ops;
    struct sequence_stats stats;
    struct side side;
    ops.block_encode = watched_encode;
    backend.ops = &ops;
    watched = &side;
    side_open(&side, &backend, 2, 0);
    free(side_logits(&side, &config, &prompt_only, true, &stats));
    cr_expect(n_coded == 4 && stats.bytes_to_pool > 0, "%d slices", n_coded);
    side_close(&side);
}

/* A sequence that ends in the middle of its prompt: when its blocks are given back nothing is on its way to them any more. */
Test(pool_emulated, nothing_is_written_after_a_release)
{
    struct engine_config config = fixture_config();
    const struct sequence_request request = {.prompt = tokens, .n_prompt = PROMPT, .max_new = 1};
    struct sequence *seq;
    struct error err;
    struct side side;
    config.chunk = BLOCK_TOKENS;
    side_open(&side, tidepool_cuda_backend(), 2, 0);
    struct engine *engine = fixture_engine(&side.f, &config, side.client);
    cr_assert(sequence_create(engine, &request, &seq, &err) >= 0, "%s", err.text);
    uint8_t *before = malloc(side.pool_bytes);
    memcpy(before, side.pool, side.pool_bytes);
    cr_assert_eq(sequence_prefill_step(seq), 1);
    sequence_free(seq);
    cr_expect(memcmp(before, side.pool, side.pool_bytes) != 0, "the first slice was coded and copied");
    memcpy(before, side.pool, side.pool_bytes);
    cr_assert_eq(side.f.dev->stream_sync(side.f.stream), 0);
    cr_expect_eq(memcmp(before, side.pool, side.pool_bytes), 0);
    free(before);
    engine_free(engine);
    side_close(&side);
}

Test(pool_emulated, staging_is_planned_to_the_byte)
{
    const struct engine_config config = fixture_config();
    struct device_properties properties;
    struct device_memory_stats stats;
    struct memory_plan plan;
    struct error err;
    struct side side;
    side_open(&side, tidepool_cuda_backend(), 2, 0);
    struct model *m = &side.f.model;
    const struct memory_plan_params params = {
        .model = &m->config, .engine = config, .dev = m->dev, .ops = m->ops, .device = m->device, .stream = m->stream, .n_prompt = PROMPT, .pool = true};
    cr_assert(memory_plan_init(&params, &plan, &err) >= 0, "%s", err.text);
    struct engine *engine = fixture_engine(&side.f, &config, side.client);
    m->dev->reset_peaks(m->device);
    m->dev->memory_stats(m->device, &stats);
    m->dev->properties(m->device, &properties);
    cr_expect_eq(stats.total_now - side.f.at_start.total_now, engine_workspace_bytes(engine) - properties.fixed_bytes);
    struct sequence *seq = fixture_prefilled(engine, &prompt_only);
    m->dev->memory_stats(m->device, &stats);
    cr_expect(stats.peak[MEM_STAGING] > 0 && stats.peak[MEM_STAGING] == plan.peak[MEM_STAGING], "%zu bytes, planned %zu", stats.peak[MEM_STAGING], plan.peak[MEM_STAGING]);
    sequence_free(seq);
    engine_free(engine);
    side_close(&side);
}

/* A pool that the device does not take is as good as a store that is not there; the client comes back. */
Test(pool_emulated, a_refused_pool_is_no_pool)
{
    const struct engine_config config = fixture_config();
    const uint64_t end_us = clock_now_us() + STORE_WAIT_US;
    struct kv_store_info info;
    struct sequence_stats stats;
    struct side side;
    side_open(&side, tidepool_cuda_backend(), 2, 1);
    kv_client_info(side.client, &info);
    cr_expect(!info.connected && strstr(info.error.text, "refused here"), "%s", info.error.text);
    float *without = side_logits(&side, &config, &prompt_only, true, &stats);
    cr_expect(stats.bytes_to_pool == 0);
    while (!info.connected) {
        cr_assert(clock_now_us() < end_us, "%s", info.error.text);
        loop_poll(side_store.loop);
        kv_client_info(side.client, &info);
    }
    float *with = side_logits(&side, &config, &prompt_only, true, &stats);
    cr_expect(stats.bytes_to_pool > 0);
    fixture_expect_same(without, with, 1, "with the pool");
    free(with);
    free(without);
    side_close(&side);
}

/* Registration is in pieces of 1 GiB. */
Test(pool_emulated, copies_cross_the_pieces_of_a_registration)
{
    const size_t border = (size_t)1 << 30, bytes = border + 8192;
    uint8_t *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct side side;
    void *memory;
    if (base == MAP_FAILED)
        cr_skip_test("no address space of %zu bytes", bytes);
    side_open(&side, tidepool_cuda_backend(), 2, 0);
    const struct device_ops *dev = side.f.dev;
    cr_assert_eq(dev->host_register(side.f.device, base, bytes, NULL, NULL), 0);
    cr_assert_eq(dev->alloc(side.f.device, MEM_STAGING, 300, &memory), 0);
    for (int i = 0; i < 300; i++)
        base[border - 100 + (size_t)i] = (uint8_t)(i * 7);
    cr_assert_eq(dev->copy(side.f.stream, memory, base + border - 100, 300), 0);
    cr_assert_eq(dev->copy(side.f.stream, base + border - 150, memory, 300), 0);
    cr_assert_eq(dev->stream_sync(side.f.stream), 0);
    for (int i = 0; i < 300; i++)
        cr_assert_eq(base[border - 150 + (size_t)i], (uint8_t)(i * 7), "byte %d", i);
    for (int refused = 0; refused < 2; refused++) { /* the same by a batch, and by a driver that has none */
        simt_refuse_batches(refused);
        memset(base + border - 180, 0, 400);
        const struct device_copy copies[] = {{base + border - 170, memory, 150}, {base + border - 20, (uint8_t *)memory + 150, 150}};
        cr_assert_eq(dev->copy_batch(side.f.stream, copies, 2), 0);
        cr_assert_eq(dev->stream_sync(side.f.stream), 0);
        for (int i = 0; i < 300; i++)
            cr_assert_eq(base[border - 170 + (size_t)i], (uint8_t)(i * 7), "byte %d, refused %d", i, refused);
    }
    simt_refuse_batches(false);
    dev->free(side.f.device, memory);
    dev->host_unregister(side.f.device, base);
    munmap(base, bytes);
    side_close(&side);
}
