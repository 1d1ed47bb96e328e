/* tidepool-enginebench: one model, one engine, no router: prefill and decode tokens/s at given lengths, arena peaks by tag, and where the time goes by op. Without
 * --store blocks stay in private extents, and every byte of the slow tier is attended as a pool's would be; with it the sequences of a batch share the prompt's blocks,
 * and the last one's time to the first token is that of a prompt whose prefix is in the pool. */
#include "proto/base/base_assert.h"
#include "kvstore/client/kv_client.h"
#include "proto/base/clock.h"
#include "proto/base/loop.h"
#include "proto/base/options.h"
#include "proto/option_choices.h"
#include "tests/bench/timed_ops.h"
#include "worker/cache/engine.h"
#include "worker/cache/selector.h"
#include "worker/model/model.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct options {
    const char *model, *store, *ids, *lengths, *selector;
    int64_t decode, batch, threads, budget, recent, fetch, chunk;
    int isa, format, values, order;
    bool json, ops;
};

static const char *const orders[] = {"layer-major", "chunk-major", NULL};

#define FIELD(f) offsetof(struct options, f)
static const struct option_spec specs[] = {
    {.name = "model", .kind = OPTION_STR, .offset = FIELD(model), .fallback = "models/SmolLM2-135M-Instruct.Q4_1.gguf", .metavar = "PATH", .help = "GGUF file or Hugging Face folder"},
    {.name = "store", .kind = OPTION_STR, .offset = FIELD(store), .optional = true, .metavar = "PATH", .help = "unix socket of a kvstore: sequences share their prefix"},
    {.name = "ids", .kind = OPTION_STR, .offset = FIELD(ids), .optional = true, .metavar = "FILE", .help = "token ids of the prompt, separated by spaces; one run at their length"},
    {.name = "lengths", .kind = OPTION_STR, .offset = FIELD(lengths), .fallback = "512,2048,8000", .metavar = "LIST", .help = "prompt lengths in tokens, of random ids, when --ids is not given"},
    {.name = "decode", .kind = OPTION_INT, .offset = FIELD(decode), .fallback = "48", .min = 0, .max = 100000, .metavar = "N", .help = "tokens decoded behind each prompt"},
    {.name = "batch", .kind = OPTION_INT, .offset = FIELD(batch), .fallback = "1", .min = 1, .max = 256, .metavar = "N", .help = "sequences decoded together"},
    {.name = "threads", .kind = OPTION_INT, .offset = FIELD(threads), .fallback = "2", .min = 1, .max = 256, .metavar = "N", .help = "compute threads"},
    {.name = "isa", .kind = OPTION_ENUM, .offset = FIELD(isa), .fallback = "auto", .choices = isa_choices, .help = "instruction set"},
    {.name = "kv-format", .kind = OPTION_ENUM, .offset = FIELD(format), .fallback = "k8v4", .choices = kv_format_choices, .help = "format of the blocks"},
    {.name = "selector", .kind = OPTION_STR, .offset = FIELD(selector), .fallback = "snapkv", .metavar = "NAME", .help = "who chooses the entries that stay in the fast tier"},
    {.name = "budget", .kind = OPTION_INT, .offset = FIELD(budget), .fallback = "512", .min = 0, .max = 1 << 24, .metavar = "N", .help = "kept tokens per KV head"},
    {.name = "recent", .kind = OPTION_INT, .offset = FIELD(recent), .fallback = "128", .min = 0, .max = 1 << 24, .metavar = "N", .help = "newest tokens kept exact"},
    {.name = "fetch", .kind = OPTION_INT, .offset = FIELD(fetch), .fallback = "512", .min = 0, .max = INT32_MAX, .max_word = "all", .metavar = "N", .help = "slow tokens attended per step and KV head"},
    {.name = "chunk", .kind = OPTION_INT, .offset = FIELD(chunk), .fallback = "512", .min = 1, .max = 1 << 24, .metavar = "N", .help = "prompt tokens a unit"},
    {.name = "prefill", .kind = OPTION_ENUM, .offset = FIELD(values), .fallback = "consistent", .choices = prefill_choices, .help = "what earlier blocks are attended as"},
    {.name = "order", .kind = OPTION_ENUM, .offset = FIELD(order), .fallback = "layer-major", .choices = orders, .help = "schedule of the prompt"},
    {.name = "ops", .kind = OPTION_BOOL, .offset = FIELD(ops), .fallback = "off", .help = "show the time spent in each op"},
    {.name = "json", .kind = OPTION_BOOL, .offset = FIELD(json), .fallback = "off", .help = "one JSON object a length instead of text"},
};
static const struct option_set option_set = {
    .program = "tidepool-enginebench",
    .summary = "Measures prefill and decode of one engine without a server.",
    .examples = "  tidepool-enginebench --lengths 512,2048 --ops\n  tidepool-enginebench --ids ids.txt --decode 48 --json\n",
    .specs = specs,
    .n_specs = ARRAY_LEN(specs),
};

struct bench {
    struct options o;
    const struct device_ops *dev;
    struct device *device;
    struct stream *stream;
    struct model *model;
    struct loop *loop;
    struct kv_client *store; /* or NULL */
};

struct figures {
    double prefill_us, first_us, last_us, decode_us; /* time to the logits of the first token: mean, and of the first and last sequence */
    struct device_memory_stats memory; /* peaks of the run */
    struct sequence_stats stats;
    int n_cached_last; /* prompt tokens of the last sequence that came from the pool */
};

static int open_model(struct bench *b, struct error *err)
{
    const struct device_config config = {.n_threads = (int)b->o.threads, .isa = (enum cpu_isa)b->o.isa};
    b->dev = cpu_device_ops();
    int r = b->dev->open(&config, &b->device);
    if (r < 0)
        return error_set(err, r, "the device does not open: %s", strerror(-r));
    r = b->dev->stream_create(b->device, &b->stream);
    if (r < 0)
        return error_set(err, r, "no stream: %s", strerror(-r));
    const struct model_open_params p = {
        .path = b->o.model,
        .dev = b->dev,
        .ops = b->o.ops ? timed_ops(cpu_kernel_ops()) : cpu_kernel_ops(),
        .device = b->device,
        .stream = b->stream,
    };
    return model_open(&p, &b->model, err);
}

static int open_store(struct bench *b, struct error *err)
{
    const struct kv_client_config config = {.socket_path = b->o.store, .name = "enginebench", .connect_timeout_us = 5000000};
    struct kv_store_info info;
    int r = loop_create(&b->loop);
    if (r < 0)
        return error_set(err, r, "no event loop: %s", strerror(-r));
    r = kv_client_create(b->loop, &config, &b->store, err);
    if (r < 0)
        return r;
    kv_client_info(b->store, &info);
    return info.connected ? 0 : error_set(err, -ENOTCONN, "--store %s: %s", b->o.store, info.error.text);
}

static void close_model(struct bench *b)
{
    kv_client_free(b->store);
    loop_free(b->loop);
    model_close(b->model);
    if (b->stream)
        b->dev->stream_free(b->stream);
    if (b->device)
        b->dev->close(b->device);
}

static int open_engine(const struct bench *b, int n_prompt, struct engine **ret_engine, struct error *err)
{
    const struct options *o = &b->o;
    const struct engine_config config = {
        .format = (enum kv_format)o->format,
        .selector = selector_find(o->selector),
        .budget = (int)o->budget,
        .recent = (int)o->recent,
        .fetch = (int)o->fetch,
        .chunk = (int)o->chunk,
        .values = (enum prefill_values)o->values,
        .order = (enum prefill_order)o->order,
        .max_context = n_prompt + (int)o->decode,
        .max_batch = (int)o->batch,
        .store_deadline_us = 5000000,
    };
    return engine_create(&config, b->model, b->store, ret_engine, err);
}

static int prefill(struct bench *b, struct engine *engine, const int32_t *ids, int n, struct sequence **seqs, struct figures *f, struct error *err)
{
    const struct sequence_request request = {.prompt = ids, .n_prompt = n, .max_new = (int)b->o.decode};
    timed_ops_reset();
    const uint64_t start = clock_now_ns();
    uint64_t before = start, now = start;
    for (int i = 0; i < b->o.batch; i++) {
        int r = sequence_create(engine, &request, &seqs[i], err);
        while (r >= 0 && (r = sequence_prefill_step(seqs[i])) > 0)
            ;
        if (r < 0)
            return error_set(err, r, "prefill of %d tokens: %s", n, strerror(-r));
        if (b->loop && loop_poll(b->loop) < 0)
            return error_set(err, -EIO, "the event loop failed");
        now = clock_now_ns();
        f->last_us = (double)(now - before) / 1000;
        f->first_us = i ? f->first_us : f->last_us;
        before = now;
    }
    f->prefill_us = (double)(now - start) / 1000 / (double)b->o.batch;
    if (b->o.ops) {
        printf("prefill of %d tokens, %lld times\n", n, (long long)b->o.batch);
        timed_ops_print(stdout, f->prefill_us * (double)b->o.batch);
    }
    return 0;
}

/* The next token of each sequence, greedy. `rows` is for the time of the call. */
static int next_tokens(struct bench *b, struct sequence **seqs, int n, struct sample_row *rows, int32_t *next)
{
    for (int i = 0; i < n; i++) {
        rows[i] = (struct sample_row){.logits = sequence_logits(seqs[i]), .params = {.top_p = 1, .repetition_penalty = 1}};
        if (!rows[i].logits)
            return -ERANGE;
    }
    int r = b->model->ops->sample(b->stream, rows, n, b->model->config.n_vocab);
    for (int i = 0; r >= 0 && i < n; i++) {
        r = rows[i].status;
        next[i] = rows[i].result.token;
    }
    return r;
}

/* As a server would: the next tokens are known only when the logits are. */
static int decode(struct bench *b, struct engine *engine, struct sequence **seqs, struct sample_row *rows, int32_t *next, struct figures *f, struct error *err)
{
    const int batch = (int)b->o.batch;
    timed_ops_reset();
    const uint64_t start = clock_now_ns();
    for (int64_t step = 0; step < b->o.decode; step++) {
        int r = next_tokens(b, seqs, batch, rows, next);
        if (r < 0)
            return error_set(err, r, "sample: %s", strerror(-r));
        r = engine_decode(engine, seqs, next, batch);
        if (r < 0)
            return error_set(err, r, "decode: %s", strerror(-r));
    }
    f->decode_us = (double)(clock_now_ns() - start) / 1000;
    if (b->o.ops && b->o.decode) {
        printf("decode of %lld tokens, batch of %d\n", (long long)b->o.decode, batch);
        timed_ops_print(stdout, f->decode_us);
    }
    return 0;
}

static int measure(struct bench *b, const int32_t *ids, int n, struct figures *f, struct error *err)
{
    struct engine *engine = NULL;
    struct sequence **seqs = calloc((size_t)b->o.batch, sizeof(*seqs));
    int32_t *next = calloc((size_t)b->o.batch, sizeof(*next));
    struct sample_row *rows = calloc((size_t)b->o.batch, sizeof(*rows));
    int r = seqs && next && rows ? open_engine(b, n, &engine, err) : error_set(err, -ENOMEM, "no memory");
    if (r >= 0) {
        b->dev->reset_peaks(b->device);
        r = prefill(b, engine, ids, n, seqs, f, err);
    }
    if (r >= 0)
        r = decode(b, engine, seqs, rows, next, f, err);
    b->dev->memory_stats(b->device, &f->memory);
    if (r >= 0) {
        sequence_stats(seqs[b->o.batch - 1], &f->stats);
        f->n_cached_last = f->stats.n_cached;
        sequence_stats(seqs[0], &f->stats);
    }
    for (int i = 0; seqs && i < b->o.batch; i++)
        sequence_free(seqs[i]);
    engine_free(engine);
    free(rows);
    free(next);
    free(seqs);
    return r;
}

static void print_figures(const struct bench *b, int n, const struct figures *f)
{
    const double prefill_tps = n * 1e6 / f->prefill_us;
    const double decode_tps = f->decode_us > 0 ? (double)(b->o.decode * b->o.batch) * 1e6 / f->decode_us : 0;
    const double pages = b->o.decode ? (double)f->stats.bytes_attended / (double)b->o.decode : 0;
    if (b->o.json) {
        printf("{\"n_prompt\": %d, \"prefill_tokens_per_s\": %.2f, \"first_prefill_s\": %.6f, \"last_prefill_s\": %.6f, \"n_cached_last\": %d, "
               "\"decode_tokens_per_s\": %.2f, \"pool_bytes_per_token\": %.0f, \"peak_bytes\": {",
               n, prefill_tps, f->first_us / 1e6, f->last_us / 1e6, f->n_cached_last, decode_tps, pages);
        for (int tag = 0; tag < MEM_TAG_COUNT; tag++)
            printf("%s\"%s\": %zu", tag ? ", " : "", mem_tag_name((enum mem_tag)tag), f->memory.peak[tag]);
        printf("}}\n");
        return;
    }
    printf("%d tokens: prefill %.1f tokens/s (%.0f ms), decode %.1f tokens/s, %.0f bytes of the slow tier a token\n  peak MiB:", n, prefill_tps,
           f->prefill_us / 1000, decode_tps, pages);
    for (int tag = 0; tag < MEM_TAG_COUNT; tag++)
        if (f->memory.peak[tag])
            printf(" %s %.2f", mem_tag_name((enum mem_tag)tag), (double)f->memory.peak[tag] / (1 << 20));
    if (b->store)
        printf("\n  time to the first token: %.3f s, of the last sequence %.3f s with %d tokens from the pool", f->first_us / 1e6, f->last_us / 1e6, f->n_cached_last);
    printf("\n");
}

static int run(struct bench *b, const int32_t *ids, int n, struct error *err)
{
    struct figures f = {0};
    const int max = b->model->config.max_context;
    if (n < 1 || n + b->o.decode > max)
        return error_set(err, -EINVAL, "%d prompt tokens and %lld new ones: the model's context is %d", n, (long long)b->o.decode, max);
    int r = measure(b, ids, n, &f, err);
    if (r >= 0)
        print_figures(b, n, &f);
    return r;
}

static int read_ids(const char *path, int n_vocab, int32_t **ret_ids, int *ret_n, struct error *err)
{
    enum { MAX_IDS = 1 << 22 };
    FILE *file = fopen(path, "r");
    if (!file)
        return error_set(err, -errno, "%s: %s", path, strerror(errno));
    int32_t *ids = malloc(MAX_IDS * sizeof(*ids));
    int n = 0;
    long id;
    while (ids && n < MAX_IDS && fscanf(file, "%ld", &id) == 1 && id >= 0 && id < n_vocab)
        ids[n++] = (int32_t)id;
    const bool whole = ids && fscanf(file, " %*c") == EOF;
    fclose(file);
    if (!whole || n == 0) {
        free(ids);
        return error_set(err, -EINVAL, "%s: item %d is no token id below %d", path, n, n_vocab);
    }
    *ret_ids = ids;
    *ret_n = n;
    return 0;
}

static int run_random(struct bench *b, struct error *err)
{
    const int max = b->model->config.max_context;
    int32_t *ids = malloc((size_t)max * sizeof(*ids));
    if (!ids)
        return error_set(err, -ENOMEM, "no memory for %d ids", max);
    uint64_t state = 1;
    for (int i = 0; i < max; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        ids[i] = (int32_t)((state >> 33) % (uint64_t)b->model->config.n_vocab);
    }
    int r = 0;
    for (const char *at = b->o.lengths; r >= 0 && *at;) {
        char *end;
        const long n = strtol(at, &end, 10);
        if (end == at || (*end && *end != ',') || n > max)
            r = error_set(err, -EINVAL, "--lengths %s: a list of lengths up to %d is wanted", b->o.lengths, max);
        else
            r = run(b, ids, (int)n, err);
        at = *end ? end + 1 : end;
    }
    free(ids);
    return r;
}

static int run_all(struct bench *b, struct error *err)
{
    struct device_properties properties;
    int r = selector_find(b->o.selector) ? open_model(b, err) : error_set(err, -EINVAL, "--selector %s: there are %s", b->o.selector, selector_names());
    if (r >= 0 && b->o.store)
        r = open_store(b, err);
    if (r < 0)
        return r;
    b->dev->properties(b->device, &properties);
    if (!b->o.json)
        printf("%s, %s, %s %s, %s, budget %lld, recent %lld, fetch %lld, chunk %lld\n", b->model->config.name, properties.name, kv_format_choices[b->o.format],
               prefill_choices[b->o.values], orders[b->o.order], (long long)b->o.budget, (long long)b->o.recent, (long long)b->o.fetch, (long long)b->o.chunk);
    if (!b->o.ids)
        return run_random(b, err);
    int32_t *ids = NULL;
    int n = 0;
    r = read_ids(b->o.ids, b->model->config.n_vocab, &ids, &n, err);
    if (r < 0)
        return r;
    r = run(b, ids, n, err);
    free(ids);
    return r;
}

int main(int argc, char **argv)
{
    struct bench b = {0};
    struct error err = {0};
    int r = options_parse(&option_set, argc, argv, &b.o, NULL, &err);
    if (r > 0)
        return 0;
    if (r == 0) {
        r = run_all(&b, &err);
        close_model(&b);
    }
    if (r < 0) {
        fprintf(stderr, "tidepool-enginebench: %s\n", err.text);
        return 1;
    }
    return 0;
}
