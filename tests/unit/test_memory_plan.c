/* A plan is what a run takes: by tag, at its peak and in steady state, to the byte. */
#include "tests/unit/engine_fixture.h"
#include "worker/cache/memory_plan.h"
#include "worker/cache/scorer.h"
#include "worker/model/known_models.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TOKENS = 1800 };
static int32_t tokens[MAX_TOKENS];
static struct fixture f;

static void setup(void)
{
    fixture_tokens(9, tokens, MAX_TOKENS);
    cr_assert(fixture_open(&f, (struct fixture_params){.n_threads = 2}));
}
static void teardown(void)
{
    fixture_expect_no_memory(&f);
    fixture_close(&f);
}
TestSuite(memory_plan, .init = setup, .fini = teardown, .timeout = 200);

static struct memory_plan_params plan_params(const struct engine_config *config, int n_prompt, int max_new)
{
    return (struct memory_plan_params){
        .model = &f.model.config,
        .dev = f.dev,
        .ops = f.model.ops,
        .device = f.device,
        .stream = f.stream,
        .engine = *config,
        .n_prompt = n_prompt,
        .max_new = max_new,
    };
}

static struct memory_plan make_plan(const struct memory_plan_params *params)
{
    struct memory_plan plan;
    struct error err = {""};
    cr_assert(memory_plan_init(params, &plan, &err) >= 0, "%s", err.text);
    return plan;
}

struct shape {
    struct engine_config config;
    int n_prompt, max_new;
};

static void describe(const struct shape *s, char text[256])
{
    const struct engine_config *c = &s->config;
    snprintf(text, 256, "%d + %d tokens, %s, %s, %s, order %d, budget %d, recent %d, fetch %d of %d, chunk %d, batch %d", s->n_prompt, s->max_new, kv_format_name(c->format),
             c->selector->name, c->scorer ? c->scorer->name : "index2", c->order, c->budget, c->recent, c->fetch, c->fetch_unit, c->chunk, c->max_batch);
}

/* Of what is beyond the weights. */
static void expect_tags(const struct shape *s, const char *what, const size_t bytes[MEM_TAG_COUNT], const size_t planned[MEM_TAG_COUNT])
{
    char text[256];
    describe(s, text);
    for (int tag = 0; tag < MEM_TAG_COUNT; tag++) {
        const size_t held = bytes[tag] - (tag == MEM_WEIGHTS ? f.at_start.now[MEM_WEIGHTS] : 0);
        cr_expect(held == planned[tag], "%s: %s: %s has %zu bytes, planned were %zu", text, what, mem_tag_name((enum mem_tag)tag), held, planned[tag]);
    }
}

static void run_and_compare(const struct shape *s)
{
    struct device_memory_stats stats;
    const struct memory_plan_params params = plan_params(&s->config, s->n_prompt, s->max_new);
    const struct memory_plan plan = make_plan(&params);
    f.dev->memory_stats(f.device, &stats);
    cr_expect(memcmp(stats.now, f.at_start.now, sizeof(stats.now)) == 0, "a plan allocates nothing");

    f.dev->reset_peaks(f.device);
    struct engine *engine = fixture_engine(&f, &s->config, NULL);
    cr_expect(engine_workspace_bytes(engine) == plan.fixed);
    cr_expect(engine_sequence_bytes(engine, s->n_prompt, s->max_new) == plan.sequence);
    const struct sequence_request request = {.prompt = tokens, .n_prompt = s->n_prompt, .max_new = s->max_new};
    struct sequence *seq;
    cr_assert(sequence_create(engine, &request, &seq, NULL) >= 0);
    f.dev->memory_stats(f.device, &stats);
    expect_tags(s, "prompt", stats.now, plan.prefill);
    int r;
    while ((r = sequence_prefill_step(seq)) > 0)
        ;
    cr_assert(r == 0);
    for (int i = 0; i < s->max_new; i++)
        cr_assert(engine_decode(engine, &seq, &tokens[s->n_prompt + i], 1) >= 0);
    f.dev->memory_stats(f.device, &stats);
    expect_tags(s, "peak", stats.peak, plan.peak);
    expect_tags(s, "end of the answer", stats.now, plan.decode);
    cr_expect(stats.total_peak - f.at_start.now[MEM_WEIGHTS] == plan.peak_total);
    sequence_free(seq);
    engine_free(engine);
}

Test(memory_plan, test_borders_of_blocks_and_chunks)
{
    static const int prompts[] = {1, 15, 16, 17, 31, 32, 33, 95, 96, 97, 127, 128, 129, 159, 160, 161, 255, 256, 257, 384, 385, 1000};
    for (size_t i = 0; i < sizeof(prompts) / sizeof(prompts[0]); i++)
        for (int order = PREFILL_LAYER_MAJOR; order <= PREFILL_CHUNK_MAJOR; order++) {
            struct shape s = {.config = fixture_config(), .n_prompt = prompts[i], .max_new = (int)(i % 3) * 130};
            s.config.order = (enum prefill_order)order;
            run_and_compare(&s);
        }
}

static int pick(uint64_t *state, const int *from, size_t n)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return from[(*state >> 33) % n];
}
#define PICK(state, ...) pick(state, (const int[]){__VA_ARGS__}, sizeof((const int[]){__VA_ARGS__}) / sizeof(int))

Test(memory_plan, test_many_configurations)
{
    static const struct scorer_ops *const scorers[] = {&scorer_index2, &scorer_minmax, &scorer_mean, &scorer_meanvar, &scorer_recent, &scorer_oracle};
    uint64_t state = 3;
    char names[256], *name, *rest = NULL;
    for (int round = 0; round < 12; round++) {
        snprintf(names, sizeof(names), "%s", selector_names());
        for (name = strtok_r(names, ", ", &rest); name; name = strtok_r(NULL, ", ", &rest)) {
            struct shape s = {.config = fixture_config()};
            s.config.selector = selector_find(name);
            cr_assert_not_null(s.config.selector, "%s", name);
            s.config.format = (enum kv_format)PICK(&state, KV_FORMAT_K8V4, KV_FORMAT_K8V8, KV_FORMAT_BF16);
            s.config.order = (enum prefill_order)PICK(&state, PREFILL_LAYER_MAJOR, PREFILL_CHUNK_MAJOR);
            s.config.values = (enum prefill_values)PICK(&state, PREFILL_CONSISTENT, PREFILL_EXACT);
            s.config.budget = PICK(&state, 0, 3, 36, 37, 64, 200, 5000);
            s.config.recent = PICK(&state, 0, 1, 32, 127, 128, 300);
            s.config.fetch = PICK(&state, 0, 16, 100, 512, INT32_MAX);
            s.config.chunk = PICK(&state, 17, 96, 128, 200, 1024);
            s.config.max_batch = PICK(&state, 1, 8, 40);
            s.config.fetch_unit = PICK(&state, SUBPAGE_TOKENS, BLOCK_TOKENS);
            s.config.scorer = scorers[PICK(&state, 0, 1, 2, 3, 4, 5)];
            s.n_prompt = PICK(&state, 1, 30, 129, 260, 511, 512, 700);
            s.max_new = PICK(&state, 0, 1, 60, 200, 400);
            run_and_compare(&s);
        }
    }
}

/* Tables of key biases are part of the workspace, kept positions part of the fast tier. */
Test(memory_plan, test_model_with_key_biases)
{
    fixture_close(&f);
    cr_assert(fixture_open(&f, (struct fixture_params){.n_threads = 2, .key_bias = 60}));
    cr_assert(f.model.config.qkv_bias);
    for (int order = PREFILL_LAYER_MAJOR; order <= PREFILL_CHUNK_MAJOR; order++) {
        struct shape s = {.config = fixture_config(), .n_prompt = 600, .max_new = 150};
        s.config.order = (enum prefill_order)order;
        run_and_compare(&s);
    }
}

Test(memory_plan, test_one_shot_is_one_chunk)
{
    struct shape s = {.config = fixture_config(), .n_prompt = 777, .max_new = 20};
    s.config.order = PREFILL_CHUNK_MAJOR;
    s.config.chunk = s.n_prompt;
    run_and_compare(&s);
}

/* As many sequences start as the plan says, whatever the limit, and one alone leaves to the page cache what it says. */
Test(memory_plan, test_fit_is_what_admission_allows)
{
    struct engine_config config = fixture_config();
    config.page_cache = PAGE_CACHE_AUTO;
    const struct memory_plan_params params = plan_params(&config, 300, 200);
    const struct memory_plan plan = make_plan(&params);
    struct block_layout layout;
    cr_assert(block_layout_init(&layout, config.format, 3, TINY_KV_HEADS, TINY_HEAD_DIM) >= 0);
    for (int i = 0; i < 9; i++) {
        config.memory_limit = plan.fixed + plan.sequence * 9 / 10 + (size_t)i * plan.sequence / 3;
        const struct memory_fit fit = memory_plan_fit(&plan, config.memory_limit);
        struct engine *engine = fixture_engine(&f, &config, NULL);
        struct sequence *seqs[32];
        struct page_cache_stats cache;
        size_t n = 0;
        int r;
        while (n < 32 && (r = engine_admits(engine, 300, 200, NULL)) == 1) {
            seqs[n++] = fixture_prefilled(engine, &(struct fixture_run){.tokens = tokens, .n_prompt = 300, .n_decode = 200});
            engine_page_cache_stats(engine, &cache);
            if (n == 1)
                cr_expect(cache.capacity_bytes == fit.page_cache / layout.page.bytes * layout.page.bytes, "%zu of %zu", cache.capacity_bytes, fit.page_cache);
        }
        cr_expect(n == fit.prefilling && fit.running >= n, "limit %zu: %zu started, %zu planned", config.memory_limit, n, fit.prefilling);
        cr_expect(r == (n == 0 ? -E2BIG : 0));
        while (n)
            sequence_free(seqs[--n]);
        engine_free(engine);
    }
}

Test(memory_plan, test_longest_context_is_at_the_border)
{
    struct engine_config config = fixture_config();
    struct memory_plan_params params = plan_params(&config, 100, 30);
    struct error err = {""};
    int context;
    for (size_t limit = 1 << 20; limit < 6 << 20; limit += 777777) {
        cr_assert(memory_plan_longest(&params, limit, &context, &err) >= 0, "%s", err.text);
        for (int more = 0; more <= 1 && context; more++) {
            params.n_prompt = context + more - params.max_new;
            params.engine.max_context = context + more;
            if (params.engine.max_context <= TINY_CONTEXT)
                cr_expect((make_plan(&params).peak_total <= limit) == !more, "limit %zu, context %d", limit, params.engine.max_context);
        }
    }
    cr_assert(memory_plan_longest(&params, 1000, &context, &err) >= 0 && context == 0);
    cr_assert(memory_plan_longest(&params, SIZE_MAX, &context, &err) >= 0 && context == TINY_CONTEXT);
}

/* malloc adds at most a header and rounding an array; large ones are mapped in pages. The sanitizers' malloc does not count. */
Test(memory_plan, test_host_bookkeeping)
{
#if defined(__SANITIZE_ADDRESS__) || defined(TIDEPOOL_SANITIZED)
    cr_skip_test("mallinfo2 knows nothing of this malloc");
#endif
    struct engine_config config = fixture_config();
    const struct memory_plan_params params = plan_params(&config, 1500, 300);
    const struct memory_plan plan = make_plan(&params);
    struct engine *engine = fixture_engine(&f, &config, NULL);
    const struct sequence_request request = {.prompt = tokens, .n_prompt = 1500, .max_new = 300};
    struct device_memory_stats before, after;
    struct sequence *seq;
    f.dev->memory_stats(f.device, &before);
    const struct mallinfo2 heap = mallinfo2();
    cr_assert(sequence_create(engine, &request, &seq, NULL) >= 0);
    const struct mallinfo2 held = mallinfo2();
    f.dev->memory_stats(f.device, &after);
    /* Device memory below 1 MiB a piece comes from the same heap: 14 blocks and 7 pieces. */
    const size_t device = after.total_now - before.total_now, grown = held.uordblks + held.hblkhd - heap.uordblks - heap.hblkhd;
    cr_expect(grown >= plan.host_sequence, "%zu of %zu", grown, plan.host_sequence);
    cr_expect(grown - device < plan.host_sequence + 12 * 4096 + 22 * 256, "%zu grown, %zu device, %zu planned", grown, device, plan.host_sequence);
    sequence_free(seq);
    engine_free(engine);
}

Test(memory_plan, test_what_is_refused)
{
    struct engine_config config = fixture_config();
    struct memory_plan_params params = plan_params(&config, 4000, 200);
    struct memory_plan plan;
    struct error err = {""};
    cr_expect(memory_plan_init(&params, &plan, &err) == -E2BIG && strstr(err.text, "4096"), "%s", err.text);
    params = plan_params(&config, 0, 1);
    cr_expect(memory_plan_init(&params, &plan, &err) == -EINVAL);
    params = plan_params(&config, 10, 1);
    params.engine.chunk = 0;
    cr_expect(memory_plan_init(&params, &plan, &err) == -EINVAL && strstr(err.text, "chunk"), "%s", err.text);
    /* An engine that has no room beside itself does not start; the plan tells the border. */
    struct engine *engine;
    params = plan_params(&config, 10, 1);
    config.memory_limit = make_plan(&params).fixed;
    cr_expect(engine_create(&config, &f.model, NULL, &engine, &err) == -EINVAL && strstr(err.text, "--memory-limit"), "%s", err.text);
    config.memory_limit++;
    cr_assert(engine_create(&config, &f.model, NULL, &engine, &err) >= 0, "%s", err.text);
    engine_free(engine);
}

/* A model of real size, admitted without weights: all that a sequence takes for its prompt is allocated at its start, private blocks included, and hardly a page of it is touched. */
static void expect_admitted(const char *name)
{
    struct model model = {.dev = f.dev, .ops = f.model.ops, .device = f.device, .stream = f.stream};
    struct engine_config config = fixture_config();
    struct device_memory_stats stats;
    struct error err = {""};
    cr_assert(known_model_config(name, &model.config, &err) >= 0, "%s", err.text);
    config.max_context = 8192;
    config.budget = 2048;
    config.chunk = 512;
    struct memory_plan_params params = plan_params(&config, config.max_context - 512, 512);
    params.model = &model.config;
    const struct memory_plan plan = make_plan(&params);

    int32_t *prompt = calloc((size_t)params.n_prompt, sizeof(*prompt));
    const struct sequence_request request = {.prompt = prompt, .n_prompt = params.n_prompt, .max_new = 512};
    struct engine *engine;
    struct sequence *seq = NULL;
    cr_assert(prompt);
    cr_assert(engine_create(&config, &model, NULL, &engine, &err) >= 0, "%s", err.text);
    const int r = sequence_create(engine, &request, &seq, &err);
    f.dev->memory_stats(f.device, &stats);
    if (r == -ENOMEM)
        cr_log_warn("%s: this system promises no more memory than it has", name);
    else
        cr_assert(r >= 0, "%s: %s", name, err.text);
    for (int tag = 0; r >= 0 && tag < MEM_TAG_COUNT; tag++)
        if (tag != MEM_WEIGHTS)
            cr_expect(stats.now[tag] == plan.prefill[tag], "%s: %s has %zu bytes, planned were %zu", name, mem_tag_name((enum mem_tag)tag), stats.now[tag], plan.prefill[tag]);
    sequence_free(seq);
    engine_free(engine);
    free(prompt);
}

Test(memory_plan, test_real_shapes_take_what_was_planned)
{
#ifdef TIDEPOOL_SANITIZED
    cr_skip_test("this build fills memory when it is allocated");
#endif
    for (int i = 0; known_model_name(i); i++)
        expect_admitted(known_model_name(i));
}
