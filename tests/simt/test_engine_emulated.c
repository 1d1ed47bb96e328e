/* The worker's engine on the emulated GPU, prompt to answer without a pool. Streams are lazy, so the host faults where it touches device memory. Weights are bf16 there and fp32 on the CPU, so
 * logits are close, not equal. */
#include "tests/simt/simt.h"
#include "tests/unit/engine_fixture.h"
#include "worker/cache/memory_plan.h"
#include "worker/model/known_models.h"
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

kernel_backend_fn tidepool_cuda_backend;

enum { PROMPT = 300, LONG_PROMPT = 2180, ANSWER = 6, ROWS = ANSWER + 1 };

static size_t libraries; /* bytes that libraries had taken at the end of the last run */

static float *run_prompt(const struct kernel_backend *backend, const struct engine_config *config, float key_bias, int n_prompt)
{
    struct fixture f;
    int32_t tokens[LONG_PROMPT + ANSWER];
    fixture_use_backend(backend);
    fixture_tokens(3, tokens, n_prompt + ANSWER);
    cr_assert(fixture_open(&f, (struct fixture_params){.n_layers = 2, .key_bias = key_bias}));
    struct engine *engine = fixture_engine(&f, config, NULL);
    float *logits = fixture_logits(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = n_prompt, .n_decode = ANSWER}, NULL);
    struct device_memory_stats stats;
    backend->device->memory_stats(f.device, &stats);
    libraries = stats.now[MEM_LIBRARIES];
    engine_free(engine);
    fixture_expect_no_memory(&f);
    fixture_close(&f);
    return logits;
}

static float *run(const struct kernel_backend *backend, const struct engine_config *config, float key_bias)
{
    return run_prompt(backend, config, key_bias, PROMPT);
}

static double nmse(const float *expected, const float *actual)
{
    double error = 0, power = 0;
    for (int i = 0; i < ROWS * TINY_VOCAB; i++) {
        error += ((double)actual[i] - expected[i]) * ((double)actual[i] - expected[i]);
        power += (double)expected[i] * expected[i];
    }
    return error / power;
}

static void compare(const struct engine_config *config, float key_bias)
{
    float *expected = run(cpu_backend(), config, key_bias);
    for (uint64_t seed = 0; seed < 2; seed++) {
        simt_configure(seed, false);
        float *actual = run(tidepool_cuda_backend(), config, key_bias);
        cr_assert_lt(nmse(expected, actual), 5e-3, "NMSE %g, seed %d", nmse(expected, actual), (int)seed);
        free(actual);
    }
    free(expected);
}

Test(engine_emulated, everything_is_attended)
{
    struct engine_config config = fixture_config();
    config.fetch = INT32_MAX;
    compare(&config, 0);
}

Test(engine_emulated, some_pages_are_fetched)
{
    struct engine_config config = fixture_config();
    compare(&config, 0);
}

Test(engine_emulated, bf16_and_exact_values)
{
    struct engine_config config = fixture_config();
    config.format = KV_FORMAT_BF16;
    config.values = PREFILL_EXACT;
    compare(&config, 0);
}

Test(engine_emulated, every_selector_runs)
{
    for (int i = 0; i < FIXTURE_SELECTORS; i++) {
        struct engine_config config = fixture_config();
        config.selector = fixture_selectors[i];
        config.fetch = INT32_MAX; /* what is kept is then attended as well as what is not, so that near ties of scores do not show */
        compare(&config, 0);
    }
}

Test(engine_emulated, key_biases_are_added)
{
    struct engine_config config = fixture_config();
    config.fetch = INT32_MAX;
    compare(&config, 20);
}

/* From its third chunk on the prompt's prefixes are cuDNN's, over K and V with more room than there are tokens. Without it the own kernel gives close values, and other last bits. */
Test(engine_emulated, prefixes_by_cudnn)
{
    struct engine_config config = fixture_config();
    config.fetch = INT32_MAX;
    config.chunk = 700;
    float *expected = run_prompt(cpu_backend(), &config, 0, LONG_PROMPT), *actual = run_prompt(tidepool_cuda_backend(), &config, 0, LONG_PROMPT);
    cr_assert_lt(nmse(expected, actual), 5e-3, "NMSE %g", nmse(expected, actual));
    cr_expect(libraries > 0, "a plan takes nothing");
    cr_assert_eq(setenv("TIDEPOOL_CUDNN", "off", 1), 0);
    float *without = run_prompt(tidepool_cuda_backend(), &config, 0, LONG_PROMPT);
    cr_assert_lt(nmse(expected, without), 5e-3, "NMSE %g", nmse(expected, without));
    cr_expect_eq(libraries, 0);
    cr_expect(memcmp(actual, without, sizeof(float) * ROWS * TINY_VOCAB) != 0, "cuDNN was not used");
    free(expected), free(actual), free(without);
}

/* The goal for one prompt of 131,072 tokens at a budget of 4,096: 1.17 GiB of device memory beside the weights, the key index and what libraries take for themselves. */
Test(engine_emulated, long_prompt_is_planned_within_the_goal)
{
    const struct kernel_backend *backend = tidepool_cuda_backend();
    struct model_config model;
    struct memory_plan plan;
    struct error err = {""};
    struct memory_plan_params params = {.model = &model, .dev = backend->device, .ops = backend->ops, .engine = fixture_config(), .n_prompt = 130560, .max_new = 512, .pool = true};
    struct engine_config *config = &params.engine;
    config->budget = 4096, config->recent = 128, config->fetch = 512, config->chunk = 1024;
    config->bridge = BRIDGE_HOST;
    config->max_context = params.n_prompt + params.max_new;
    cr_assert_eq(known_model_config("Llama-3.1-8B", &model, &err), 0, "%s", err.text);
    cr_assert_eq(backend->device->open(&(struct device_config){.n_threads = 1}, &params.device), 0);
    cr_assert_eq(backend->device->stream_create(params.device, &params.stream), 0);
    cr_assert_geq(memory_plan_init(&params, &plan, &err), 0, "%s", err.text);
    const size_t bytes = plan.peak_total - plan.prefill[MEM_INDEX] - plan.prefill[MEM_LIBRARIES];
    cr_expect_leq(bytes, (size_t)(1.17 * 1024 * 1024 * 1024), "%.1f MiB", (double)bytes / (1 << 20));
    backend->device->stream_free(params.stream);
    backend->device->close(params.device);
}
