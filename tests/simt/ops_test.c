#include "tests/simt/ops_test.h"
#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

kernel_backend_fn tidepool_cuda_backend;

static void need(bool condition, const char *what)
{
    if (condition)
        return;
    printf("ops_test: %s failed\n", what);
    exit(2);
}

void *ops_test_alloc(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 64) / 64 * 64);
    need(memory, "malloc");
    memset(memory, 0xFF, bytes);
    return memory;
}

static void *room(struct ops_test *t, size_t bytes)
{
    void *device;
    need(t->n_buffers < OPS_TEST_BUFFERS, "a test with fewer buffers");
    need(t->gpu_backend->device->alloc(t->gpu_device, MEM_WORKSPACE, bytes, &device) == 0, "device memory");
    t->buffers[t->n_buffers++] = device;
    return device;
}

/* OPS_TEST_ROOM_UNWRITTEN: the emulator's checked build fills allocations itself, and knows then that nobody wrote them. */
void *ops_test_room(struct ops_test *t, size_t bytes)
{
#ifdef OPS_TEST_ROOM_UNWRITTEN
    return room(t, bytes);
#else
    void *host = ops_test_alloc(bytes), *device = ops_test_upload(t, host, bytes);
    free(host);
    return device;
#endif
}

void *ops_test_upload(struct ops_test *t, const void *src, size_t bytes)
{
    void *device = room(t, bytes);
    need(t->gpu_backend->device->copy(t->gpu, device, src, bytes) == 0, "copy");
    return device;
}

void *ops_test_download(struct ops_test *t, const void *device, size_t bytes)
{
    void *host = ops_test_alloc(bytes);
    need(t->gpu_backend->device->copy(t->gpu, host, device, bytes) == 0 && t->gpu_backend->device->stream_sync(t->gpu) == 0, "copy from the device");
    return host;
}

static uint16_t bf16_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

void ops_test_round_inputs(struct ops_test *t, float *x, size_t n)
{
    for (size_t i = 0; t->gpu_ops->input_bytes == sizeof(uint16_t) && i < n; i++)
        x[i] = ops_test_bf16_value(bf16_of(x[i]));
}

void *ops_test_room_inputs(struct ops_test *t, size_t n)
{
    return ops_test_room(t, n * t->gpu_ops->input_bytes);
}

void *ops_test_upload_inputs(struct ops_test *t, const float *src, size_t n)
{
    if (t->gpu_ops->input_bytes == sizeof *src)
        return ops_test_upload(t, src, n * sizeof *src);
    uint16_t *rounded = ops_test_alloc(n * sizeof *rounded);
    for (size_t i = 0; i < n; i++)
        rounded[i] = bf16_of(src[i]);
    void *device = ops_test_upload(t, rounded, n * sizeof *rounded);
    free(rounded);
    return device;
}

float *ops_test_download_inputs(struct ops_test *t, const void *device, size_t n)
{
    void *inputs = ops_test_download(t, device, n * t->gpu_ops->input_bytes);
    if (t->gpu_ops->input_bytes == sizeof(float))
        return inputs;
    float *x = ops_test_alloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = ops_test_bf16_value(((uint16_t *)inputs)[i]);
    free(inputs);
    return x;
}

void ops_test_free_buffers(struct ops_test *t)
{
    t->gpu_backend->device->stream_sync(t->gpu);
    for (; t->n_buffers > 0; t->n_buffers--)
        t->gpu_backend->device->free(t->gpu_device, t->buffers[t->n_buffers - 1]);
}

double ops_test_uniform(struct ops_test *t, double low, double high)
{
    uint64_t z = t->random += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return low + (high - low) * ((double)((z ^ z >> 31) >> 11) * 0x1p-53);
}

float *ops_test_floats(struct ops_test *t, size_t n, double scale)
{
    float *x = ops_test_alloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) {
        double sum = 0;
        for (int j = 0; j < 4; j++)
            sum += ops_test_uniform(t, -1, 1);
        x[i] = (float)(sum * scale * 0.866);
    }
    return x;
}

float ops_test_bf16_value(uint16_t bits)
{
    uint32_t u = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

uint16_t *ops_test_bf16(struct ops_test *t, size_t n, double scale)
{
    float *x = ops_test_floats(t, n, scale);
    uint16_t *y = ops_test_alloc(n * sizeof *y);
    for (size_t i = 0; i < n; i++)
        y[i] = bf16_of(x[i]);
    free(x);
    return y;
}

const char *ops_test_shape(const char *format, ...)
{
    static char text[160];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return text;
}

static void failed(struct ops_test *t, const char *what, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void failed(struct ops_test *t, const char *what, const char *format, ...)
{
    va_list arguments;
    t->n_failed++;
    printf("FAIL %s, %s: ", t->test, what);
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
}

/* A NaN or an infinity on one side alone fails. */
void ops_test_nmse(struct ops_test *t, const char *what, const float *expected, const float *actual, size_t n, double limit)
{
    double error = 0, power = 0;
    t->n_checks++;
    for (size_t i = 0; i < n; i++) {
        if (memcmp(&expected[i], &actual[i], sizeof *expected) == 0 && !isfinite(expected[i]))
            continue;
        error += ((double)actual[i] - expected[i]) * ((double)actual[i] - expected[i]);
        power += (double)expected[i] * expected[i];
    }
    if (!(error <= limit * power))
        failed(t, what, "NMSE %.3g, limit %.3g", error / power, limit);
}

void ops_test_same(struct ops_test *t, const char *what, const void *expected, const void *actual, size_t bytes)
{
    const uint8_t *a = expected, *b = actual;
    t->n_checks++;
    for (size_t i = 0; i < bytes; i++)
        if (a[i] != b[i]) {
            failed(t, what, "byte %zu of %zu is %u, expected %u", i, bytes, b[i], a[i]);
            return;
        }
}

void ops_test_true(struct ops_test *t, const char *what, bool condition)
{
    t->n_checks++;
    if (!condition)
        failed(t, what, "does not hold");
}

static void run(struct ops_test *t, const char *name, void (*test)(struct ops_test *))
{
    const int failed_before = t->n_failed, checks_before = t->n_checks;
    t->test = name;
    t->random = 1;
    test(t);
    ops_test_free_buffers(t);
    printf("%s %s: %d checks\n", t->n_failed == failed_before ? "ok  " : "FAIL", name, t->n_checks - checks_before);
}

static const struct { const char *name; void (*run)(struct ops_test *); } tests[] = {
    {"device", test_ops_device}, {"elementwise", test_ops_elementwise}, {"matmul", test_ops_matmul}, {"blocks", test_ops_blocks}, {"select", test_ops_select}, {"attention", test_ops_attention}, {"prefix", test_ops_prefix},
    {"decode", test_ops_decode}, {"page_cache", test_ops_page_cache}, {"decode_fetch", test_ops_decode_fetch}, {"scores", test_ops_scores}, {"sample", test_ops_sample}, {"steps", test_ops_steps},
};

static const struct kernel_backend *plugin_load(const char *path)
{
    kernel_backend_fn *get = NULL;
    void *plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (plugin)
        *(void **)&get = dlsym(plugin, KERNEL_BACKEND_SYMBOL);
    if (!get)
        printf("ops_test: %s\n", dlerror());
    need(get, "loading the plugin");
    return get();
}

/* ops_test [--plugin PATH] [--list | NAME...]: all groups, or those named; of the plugin, or of the backend that is linked in. --list only names them. Exit status 0: all passed, 1: a check failed, 2: it could not run. */
int main(int argc, char **argv)
{
    struct ops_test t = {.cpu_backend = cpu_backend()};
    struct device_properties properties;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
        for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
            printf("%s\n", tests[i].name);
        return 0;
    }
    if (argc > 2 && strcmp(argv[1], "--plugin") == 0) {
        t.gpu_backend = plugin_load(argv[2]);
        argc -= 2, argv += 2;
    } else {
        t.gpu_backend = tidepool_cuda_backend();
    }
    t.gpu_ops = t.gpu_backend->ops;
    t.cpu_ops = t.cpu_backend->ops;
    int r = t.gpu_backend->device->open(&(struct device_config){.n_threads = 1}, &t.gpu_device);
    if (r < 0) {
        printf("ops_test: no device: %s\n", strerror(-r));
        return 2;
    }
    need(t.gpu_backend->device->stream_create(t.gpu_device, &t.gpu) == 0, "stream");
    need(t.cpu_backend->device->open(&(struct device_config){.n_threads = 1}, &t.cpu_device) == 0, "the CPU's device");
    need(t.cpu_backend->device->stream_create(t.cpu_device, &t.cpu) == 0, "the CPU's stream");
    t.gpu_backend->device->properties(t.gpu_device, &properties);
    printf("device %s\n", properties.name);
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        bool named = argc < 2;
        for (int a = 1; a < argc; a++)
            named |= strcmp(argv[a], tests[i].name) == 0;
        if (named)
            run(&t, tests[i].name, tests[i].run);
    }
    t.gpu_backend->device->stream_free(t.gpu);
    t.gpu_backend->device->close(t.gpu_device);
    t.cpu_backend->device->stream_free(t.cpu);
    t.cpu_backend->device->close(t.cpu_device);
    printf("%d checks, %d failed\n", t.n_checks, t.n_failed);
    return t.n_failed > 0;
}
