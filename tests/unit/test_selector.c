/* Selectors against plain transcriptions of their formulas (research: SnapKV with max pooling 7 per query head, then the group's mean). */
#include "worker/cache/selector.h"
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 6, KV_HEADS = 2, GROUP = HEADS / KV_HEADS, DIM = 64, MAX_KEYS = 1500 };

static struct device *device;
static struct stream *stream;
static float q[32 * HEADS * DIM];
static bf16_t keys[KV_HEADS * MAX_KEYS * DIM];

static float noise(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)((int64_t)(*state >> 40) - (1 << 23)) / (1 << 22);
}

static bf16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bf16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static float from_bf16(bf16_t x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

static void setup(void)
{
    const struct device_config config = {.n_threads = 2};
    uint64_t state = 1;
    cr_assert(cpu_device_ops()->open(&config, &device) >= 0);
    cr_assert(cpu_device_ops()->stream_create(device, &stream) >= 0);
    for (size_t i = 0; i < sizeof(q) / sizeof(q[0]); i++)
        q[i] = noise(&state);
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++)
        keys[i] = to_bf16(noise(&state));
}
static void teardown(void)
{
    cpu_device_ops()->stream_free(stream);
    cpu_device_ops()->close(device);
}
TestSuite(selector, .init = setup, .fini = teardown);

/* a[w][i] of one query head, mean over w, for the keys before the window. */
static void window_mean(int head, int n_keys, int n_window, double *ret)
{
    static double logits[MAX_KEYS];
    memset(ret, 0, (size_t)n_keys * sizeof(*ret));
    for (int w = 0; w < n_window; w++) {
        const int n = n_keys - n_window + w + 1;
        double max = -INFINITY, sum = 0;
        for (int i = 0; i < n; i++) {
            double dot = 0;
            for (int c = 0; c < DIM; c++)
                dot += (double)q[(w * HEADS + head) * DIM + c] * from_bf16(keys[((head / GROUP) * MAX_KEYS + i) * DIM + c]);
            logits[i] = dot / 8;
            max = fmax(max, logits[i]);
        }
        for (int i = 0; i < n; i++)
            sum += exp(logits[i] - max);
        for (int i = 0; i < n_keys - n_window; i++)
            ret[i] += exp(logits[i] - max) / sum / n_window;
    }
}

static void snapkv_scores(int kv_head, int n_keys, int n_window, double *ret)
{
    static double mean[MAX_KEYS];
    memset(ret, 0, (size_t)n_keys * sizeof(*ret));
    for (int g = 0; g < GROUP; g++) {
        window_mean(kv_head * GROUP + g, n_keys, n_window, mean);
        for (int i = 0; i < n_keys; i++) {
            double max = 0;
            for (int j = i - 3; j <= i + 3; j++)
                if (j >= 0 && j < n_keys)
                    max = fmax(max, mean[j]);
            ret[i] += max / GROUP;
        }
    }
}

static void run(const struct selector_ops *selector, int n_keys, int first, int last, int n_free, int32_t *indices)
{
    struct selector_input in = {
        .dev = cpu_device_ops(),
        .ops = cpu_kernel_ops(),
        .stream = stream,
        .q = q,
        .n_window = n_keys < selector->n_window ? n_keys : selector->n_window,
        .k = keys,
        .head_stride = MAX_KEYS * DIM,
        .n_keys = n_keys,
        .n_heads = HEADS,
        .n_kv_heads = KV_HEADS,
        .head_dim = DIM,
        .scale = 0.125f,
        .first = first,
        .last = last,
        .n_free = n_free,
    };
    const struct selector_shape shape = {.n_kv_heads = KV_HEADS, .n_keys = n_keys, .n_candidates = last - first, .n_free = n_free};
    const size_t bytes = selector->scratch_bytes(&shape);
    int32_t n_of_head[KV_HEADS];
    if (bytes)
        cr_assert(in.dev->alloc(device, MEM_WORKSPACE, bytes, &in.scratch) >= 0);
    cr_assert(selector->select(&in, n_of_head, indices) >= 0);
    for (int h = 0; h < KV_HEADS; h++)
        cr_assert(n_of_head[h] == n_free);
    in.dev->free(device, in.scratch);
}

/* Every chosen candidate scores at least what every other does; fp32 against double leaves a little room. */
static void expect_best(const double *scores, int first, int last, const int32_t *chosen, int n)
{
    double worst_in = INFINITY, best_out = -INFINITY;
    int j = 0;
    for (int i = first; i < last; i++) {
        if (j < n && chosen[j] == i) {
            worst_in = fmin(worst_in, scores[i]);
            j++;
        } else {
            best_out = fmax(best_out, scores[i]);
        }
    }
    cr_assert(j == n, "chosen are %d ascending candidates", j);
    cr_assert(worst_in >= best_out * (1 - 1e-5), "%g is kept, %g is not", worst_in, best_out);
}

Test(selector, test_snapkv_keeps_what_the_window_attends)
{
    static const struct {
        int n_keys, first, last, n_free;
    } cases[] = {{1500, 4, 1280, 200}, {400, 4, 368, 28}, {129, 4, 97, 1}, {140, 4, 100, 96}, {1056, 0, 1024, 512}};
    static double scores[MAX_KEYS];
    static int32_t indices[KV_HEADS * 600];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        run(&selector_snapkv, cases[i].n_keys, cases[i].first, cases[i].last, cases[i].n_free, indices);
        for (int h = 0; h < KV_HEADS; h++) {
            snapkv_scores(h, cases[i].n_keys, 32, scores);
            expect_best(scores, cases[i].first, cases[i].last, indices + h * cases[i].n_free, cases[i].n_free);
        }
    }
}

Test(selector, test_streaming_keeps_the_newest)
{
    int32_t indices[KV_HEADS * 10];
    run(&selector_streaming, 500, 4, 400, 10, indices);
    for (int h = 0; h < KV_HEADS; h++)
        for (int i = 0; i < 10; i++)
            cr_assert(indices[h * 10 + i] == 390 + i);
}

/* The exact line of PyramidKV, its ends as its formula has them, and never a row more or less in all layers together. */
Test(selector, test_pyramid_budgets)
{
    const struct selector_budget known = {.n_layers = 30, .n_keys = 8192, .n_candidates = 8128, .n_free = 2048};
    cr_expect(selector_pyramidkv.layer_free(&known, 0) == 3994 && selector_pyramidkv.layer_free(&known, 29) == 102);
    const struct selector_budget clipped = {.n_layers = 30, .n_keys = 8192, .n_candidates = 5000, .n_free = 4000};
    cr_expect(selector_pyramidkv.layer_free(&clipped, 0) == 5000 && selector_pyramidkv.layer_free(&clipped, 29) == 3000);
    const struct selector_budget short_prompt = {.n_layers = 30, .n_keys = 4095, .n_candidates = 4000, .n_free = 2048};
    cr_expect(selector_pyramidkv.layer_free(&short_prompt, 0) == 2048 && selector_pyramidkv.layer_free(&short_prompt, 29) == 2048);
    for (int n_layers = 1; n_layers < 40; n_layers++) {
        for (int64_t n_free = 1; n_free < 300; n_free += 7) {
            for (int64_t n_candidates = n_free; n_candidates < 700; n_candidates += 53) {
                const struct selector_budget b = {.n_layers = n_layers, .n_keys = 1000, .n_candidates = n_candidates, .n_free = n_free};
                int64_t total = 0, before = n_candidates;
                for (int layer = 0; layer < n_layers; layer++) {
                    const int64_t n = selector_pyramidkv.layer_free(&b, layer);
                    cr_assert(n >= 0 && n <= before && n <= selector_pyramidkv.head_free_max(4, n_free));
                    total += n;
                    before = n;
                }
                cr_assert(total == n_layers * n_free, "%d layers of %d: %d", n_layers, (int)n_free, (int)total);
            }
        }
    }
}

Test(selector, test_find_by_name)
{
    char names[256], *rest = names, *name;
    int n = 0;
    snprintf(names, sizeof(names), "%s", selector_names());
    while ((name = strsep(&rest, ", ")))
        if (*name) {
            cr_expect(selector_find(name) && strcmp(selector_find(name)->name, name) == 0, "%s", name);
            n++;
        }
    cr_expect(n == 8);
    cr_expect(selector_find("snapkv") == &selector_snapkv);
    cr_expect(selector_find("streaming") == &selector_streaming);
    cr_expect(selector_find("") == NULL && selector_find("snapkv ") == NULL);
}
