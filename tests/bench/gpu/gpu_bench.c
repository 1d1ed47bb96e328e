/* tidepool-gpubench: the worker's engine in one process, over a pool in a memfd, on a GPU (or the CPU): prefill and decode of a model of a real shape with random weights, or of a real
 * GGUF. Needs neither a router nor a kvstore process, so it can be built where there is nothing but CUDA (build.sh). */
#include "tests/bench/gpu/gpu_bench.h"
#include "kernels/backend.h"
#include "proto/base/base_assert.h"
#include "proto/base/clock.h"
#include "proto/base/options.h"
#include "proto/option_choices.h"
#include "tests/bench/gpu/bench_pool.h"
#include "worker/cache/selector.h"
#include "worker/model/known_models.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CONTEXT_MAX = 1 << 21 /* of random weights, whatever the shape was trained with: an answer may follow a prompt of that length */ };

struct options {
    const char *shape, *model, *selector, *prefill_lengths, *chunks, *bridges, *batches, *fetches, *page_caches;
    int64_t budget, recent, decode_context, decode_steps, ops_context, pool_size, threads, seed;
    int device, format;
    bool json, graphs;
};

#define FIELD(f) .offset = offsetof(struct options, f)
static const struct option_spec specs[] = {
    {.name = "shape", .kind = OPTION_STR, FIELD(shape), .fallback = "llama-3.1-8b", .metavar = "NAME|FILE", .help = "random weights in the shape of a known model, or of a config.json"},
    {.name = "model", .kind = OPTION_STR, FIELD(model), .optional = true, .metavar = "PATH", .help = "a GGUF file or a Hugging Face folder, in place of --shape"},
    {.name = "device", .kind = OPTION_ENUM, FIELD(device), .fallback = "auto", .choices = device_choices, .help = "what computes"},
    {.name = "kv-format", .kind = OPTION_ENUM, FIELD(format), .fallback = "k8v4", .choices = kv_format_choices, .help = "what the pool holds"},
    {.name = "selector", .kind = OPTION_STR, FIELD(selector), .fallback = "snapkv", .metavar = "NAME", .help = "who chooses the entries that stay in the fast tier"},
    {.name = "budget", .kind = OPTION_INT, FIELD(budget), .fallback = "4096", .min = 0, .max = 1 << 24, .metavar = "N", .help = "kept entries per layer and KV head"},
    {.name = "recent", .kind = OPTION_INT, FIELD(recent), .fallback = "128", .min = 0, .max = 1 << 24, .metavar = "N", .help = "newest tokens per layer and KV head"},
    {.name = "prefill", .kind = OPTION_STR, FIELD(prefill_lengths), .fallback = "8192,32768,131072", .metavar = "LIST", .help = "prompt lengths in tokens; none: no prefill is measured"},
    {.name = "chunks", .kind = OPTION_STR, FIELD(chunks), .fallback = "1024,2048", .metavar = "LIST", .help = "prompt tokens computed at a time; decoding takes the last one"},
    {.name = "bridges", .kind = OPTION_STR, FIELD(bridges), .fallback = "device,host", .metavar = "LIST", .help = "where hidden states lie between layers: device, host, or both; a CPU has one place"},
    {.name = "decode", .kind = OPTION_STR, FIELD(batches), .fallback = "1,4,16,32,64", .metavar = "LIST", .help = "sequences decoded together, ascending; none: no decoding is measured"},
    {.name = "decode-context", .kind = OPTION_INT, FIELD(decode_context), .fallback = "130048", .min = 256, .max = 1 << 24, .metavar = "N", .help = "tokens before each answer"},
    {.name = "decode-steps", .kind = OPTION_INT, FIELD(decode_steps), .fallback = "64", .min = 1, .max = 100000, .metavar = "N", .help = "tokens decoded a measurement"},
    {.name = "fetch", .kind = OPTION_STR, FIELD(fetches), .fallback = "512,2048", .metavar = "LIST", .help = "slow tokens attended per step, layer and KV head"},
    {.name = "page-cache", .kind = OPTION_STR, FIELD(page_caches), .fallback = "32,4,1", .metavar = "LIST", .help = "device memory for fetched sub-pages in GiB, 0: none"},
    {.name = "graphs", .kind = OPTION_BOOL, FIELD(graphs), .fallback = "on", .help = "decode steps are captured as CUDA graphs and replayed while they stay the same"},
    {.name = "ops-context", .kind = OPTION_INT, FIELD(ops_context), .fallback = "131072", .min = 0, .max = 1 << 22, .metavar = "N", .help = "keys over which single ops are measured; 0: they are not"},
    {.name = "pool-size", .kind = OPTION_BYTES, FIELD(pool_size), .fallback = "32G", .min = 1 << 20, .max = INT64_MAX, .metavar = "BYTES", .help = "of the pool in host memory"},
    {.name = "threads", .kind = OPTION_INT, FIELD(threads), .fallback = "0", .min = 0, .max = 64, .metavar = "N", .help = "of the CPU, for computing there and for filling the pool; 0: one a processor"},
    {.name = "seed", .kind = OPTION_INT, FIELD(seed), .fallback = "1", .min = 0, .max = INT64_MAX, .metavar = "N", .help = "of the random weights"},
    {.name = "json", .kind = OPTION_BOOL, FIELD(json), .fallback = "off", .help = "one JSON object a figure on stderr, beside the tables"},
};
static const struct option_set option_set = {
    .program = "tidepool-gpubench",
    .summary = "Measures prefill and decoding of one worker's engine in one process.",
    .examples = "  tidepool-gpubench --shape llama-3.1-8b --prefill 131072 --decode none --ops-context 0\n"
                "  tidepool-gpubench --shape smollm2-135m --device cpu --prefill 2048 --chunks 512 --decode 1,8 --decode-context 2048 --ops-context 4096 --budget 256 --pool-size 1G\n",
    .specs = specs,
    .n_specs = ARRAY_LEN(specs),
};

/* ---- what the parts use ---- */

double bench_seconds(void)
{
    return (double)clock_now_ns() / 1e9;
}

static uint64_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

void bench_prompt(const struct gpu_bench *b, uint64_t document, uint64_t question, int n, int tail, int32_t *ret_tokens)
{
    const uint64_t n_vocab = (uint64_t)b->model->config.n_vocab;
    uint64_t common = document, own = document ^ (question + 1) << 32;
    for (int i = 0; i < n; i++)
        ret_tokens[i] = (int32_t)(next_random(i < n - tail ? &common : &own) % n_vocab);
}

void bench_memory_text(const struct device_memory_stats *stats, char *text, size_t size)
{
    size_t used = 0;
    text[0] = 0;
    for (int tag = 0; tag < MEM_TAG_COUNT; tag++)
        if (tag != MEM_WEIGHTS && stats->peak[tag] && used < size)
            used += (size_t)snprintf(text + used, size - used, "%s%s %.1f", used ? " + " : "", mem_tag_name((enum mem_tag)tag), (double)stats->peak[tag] / (1 << 20));
    if (used < size)
        snprintf(text + used, size - used, "; together %.1f", (double)(stats->total_peak - stats->now[MEM_WEIGHTS]) / (1 << 20));
}

bool bench_goes_on(int result, const char *row, struct error *err)
{
    if (result == -EIO || result == -ENODEV)
        return false;
    printf("| %s | %s |\n", row, err->text[0] ? err->text : strerror(-result));
    fflush(stdout);
    err->text[0] = 0;
    return true;
}

/* ---- options ---- */

static int parse_list(const char *name, const char *text, int64_t min, int64_t max, int64_t unit, struct bench_list *list, struct error *err)
{
    list->n = 0;
    if (strcmp(text, "none") == 0)
        return 0;
    for (const char *at = text; *at;) {
        char *end;
        const long long value = strtoll(at, &end, 10);
        if (end == at || (*end && *end != ',') || value < min || value > max || list->n == BENCH_LIST_MAX)
            return error_set(err, -EINVAL, "--%s %s: up to %d numbers from %lld to %lld with commas between, or none", name, text, BENCH_LIST_MAX, (long long)min, (long long)max);
        list->values[list->n++] = value * unit;
        at = *end ? end + 1 : end;
    }
    return 0;
}

static int parse_bridges(const char *text, bool *ret_bridges, struct error *err)
{
    ret_bridges[0] = strcmp(text, "device") == 0 || strcmp(text, "device,host") == 0;
    ret_bridges[1] = strcmp(text, "host") == 0 || strcmp(text, "device,host") == 0;
    return ret_bridges[0] || ret_bridges[1] ? 0 : error_set(err, -EINVAL, "--bridges %s: device, host, or device,host", text);
}

static int parse_lists(const struct options *o, struct gpu_bench *b, struct error *err)
{
    int r = parse_bridges(o->bridges, b->bridges, err);
    if (r >= 0)
        r = parse_list("prefill", o->prefill_lengths, 129, 1 << 24, 1, &b->prefill_lengths, err);
    if (r >= 0)
        r = parse_list("chunks", o->chunks, 1, 1 << 20, 1, &b->chunks, err);
    if (r >= 0)
        r = parse_list("decode", o->batches, 1, 256, 1, &b->batches, err);
    if (r >= 0)
        r = parse_list("fetch", o->fetches, 0, 1 << 24, 1, &b->fetches, err);
    if (r >= 0)
        r = parse_list("page-cache", o->page_caches, 0, 1 << 20, 1 << 30, &b->page_caches, err);
    for (int i = 1; r >= 0 && i < b->batches.n; i++)
        if (b->batches.values[i] < b->batches.values[i - 1])
            r = error_set(err, -EINVAL, "--decode %s: in ascending order", o->batches);
    if (r >= 0 && (b->chunks.n == 0 || (b->batches.n && (b->fetches.n == 0 || b->page_caches.n == 0))))
        r = error_set(err, -EINVAL, "--chunks, --fetch and --page-cache need one number at least");
    return r;
}

/* ---- opening ---- */

static int open_device(const struct options *o, struct gpu_bench *b, struct error *err)
{
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    const struct device_config config = {.n_threads = o->threads ? (int)o->threads : processors < 1 ? 1 : processors > 64 ? 64 : (int)processors};
    const struct kernel_backend *backend;
    struct error note;
    int r = backend_open((enum backend_choice)o->device, &config, &backend, &b->device, &note, err);
    if (r < 0)
        return r;
    if (note.text[0])
        fprintf(stderr, "tidepool-gpubench: no GPU: %s\n", note.text);
    b->dev = backend->device;
    b->ops = backend->ops;
    r = b->dev->stream_create(b->device, &b->stream);
    return r < 0 ? error_set(err, r, "no stream: %s", strerror(-r)) : 0;
}

static int read_shape(const char *shape, struct model_config *ret_config, struct error *err)
{
    char text[65536];
    if (access(shape, R_OK) != 0)
        return known_model_config(shape, ret_config, err);
    const int fd = open(shape, O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text));
    const int error = errno;
    if (fd >= 0)
        close(fd);
    if (n < 0)
        return error_set(err, -error, "%s: %s", shape, strerror(error));
    return model_config_from_json(text, (size_t)n, NULL, 0, ret_config, err);
}

static int open_model(const struct options *o, struct gpu_bench *b, struct error *err)
{
    struct model_config shape;
    struct model_open_params p = {.path = o->model, .random_seed = (uint64_t)o->seed, .dev = b->dev, .ops = b->ops, .device = b->device, .stream = b->stream};
    int r = o->model ? 0 : read_shape(o->shape, &shape, err);
    if (r < 0)
        return r;
    if (!o->model && shape.max_context < CONTEXT_MAX)
        shape.max_context = CONTEXT_MAX; /* noise needs no training */
    p.random = o->model ? NULL : &shape;
    const double start = bench_seconds();
    r = model_open(&p, &b->model, err);
    if (r >= 0)
        printf("%s%s, weights loaded in %.1f s\n", o->model ? b->model->config.name : o->shape, o->model ? "" : " with random weights", bench_seconds() - start);
    return r;
}

static int open_pool(const struct options *o, struct gpu_bench *b, struct error *err)
{
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    const struct bench_pool_params p = {.bytes = (uint64_t)o->pool_size, .n_threads = processors < 1 ? 1 : processors > 32 ? 32 : (int)processors, .dev = b->dev, .device = b->device};
    struct bench_pool_times times;
    int r = bench_pool_create(&p, &b->store, &times, err);
    if (r >= 0)
        printf("pool of %.1f GiB: filled in %.2f s, registered in %.2f s\n", (double)o->pool_size / (1 << 30), times.fill_s, times.register_s);
    return r;
}

static void close_all(struct gpu_bench *b)
{
    model_close(b->model);
    bench_pool_free(b->store);
    if (b->stream)
        b->dev->stream_free(b->stream);
    if (b->device)
        b->dev->close(b->device);
}

static int run(const struct options *o, struct gpu_bench *b, struct error *err)
{
    struct device_properties properties;
    b->json = o->json;
    b->decode_context = o->decode_context;
    b->decode_steps = o->decode_steps;
    b->engine = (struct engine_config){.format = (enum kv_format)o->format, .selector = selector_find(o->selector), .budget = (int)o->budget, .recent = (int)o->recent, .fetch = 512, .eager_steps = !o->graphs};
    int r = b->engine.selector ? parse_lists(o, b, err) : error_set(err, -EINVAL, "--selector %s: there are %s", o->selector, selector_names());
    if (r >= 0)
        r = open_device(o, b, err);
    if (r < 0)
        return r;
    b->dev->properties(b->device, &properties);
    printf("%s; %s, %s, budget %lld, recent %lld\n", properties.name, kv_format_choices[o->format], o->selector, (long long)o->budget, (long long)o->recent);
    r = open_model(o, b, err);
    if (r >= 0)
        r = open_pool(o, b, err);
    if (r >= 0 && o->ops_context)
        r = bench_hot_ops(b, (int)o->ops_context, err);
    if (r >= 0 && b->prefill_lengths.n)
        r = bench_prefill(b, err);
    return r >= 0 ? bench_decode(b, err) : r;
}

int main(int argc, char **argv)
{
    struct gpu_bench b = {0};
    struct options o;
    struct error err = {0};
    int r = options_parse(&option_set, argc, argv, &o, NULL, &err);
    if (r > 0)
        return 0;
    if (r == 0) {
        r = run(&o, &b, &err);
        close_all(&b);
    }
    if (r < 0) {
        fprintf(stderr, "tidepool-gpubench: %s\n", err.text);
        return 1;
    }
    return 0;
}
