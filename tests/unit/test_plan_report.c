/* `tidepool plan`: models by name and by file, what it says and what it refuses. */
#include "worker/cache/selector.h"
#include "worker/model/known_models.h"
#include "worker/model/model.h"
#include "worker/plan/plan_report.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REAL_MODEL "models/SmolLM2-135M-Instruct.Q4_1.gguf"

enum { ARGS_MAX = 24 };

/* Arguments as on the command line, separated by blanks. */
static int make(const char *arguments, struct plan_options *options, struct plan_report *report, struct error *err)
{
    static char text[1024];
    char *argv[ARGS_MAX] = {"tidepool plan"}, *rest = NULL;
    int argc = 1;
    snprintf(text, sizeof(text), "%s", arguments);
    for (char *word = strtok_r(text, " ", &rest); word && argc < ARGS_MAX - 1; word = strtok_r(NULL, " ", &rest))
        argv[argc++] = word;
    *err = (struct error){""};
    int r = options_parse(&plan_option_set, argc, argv, options, NULL, err);
    return r < 0 ? r : plan_report_make(options, report, err);
}

static void make_ok(const char *arguments, struct plan_options *options, struct plan_report *report)
{
    struct error err;
    cr_assert(make(arguments, options, report, &err) >= 0, "%s: %s", arguments, err.text);
}

static void expect_refused(const char *arguments, const char *expected)
{
    struct plan_options options;
    static struct plan_report report;
    struct error err;
    cr_expect(make(arguments, &options, &report, &err) < 0, "%s", arguments);
    cr_expect(strstr(err.text, expected), "%s: \"%s\" does not contain \"%s\"", arguments, err.text, expected);
}

/* Twice the number of parameters that their publishers state. */
Test(plan_report, test_known_models_have_their_published_sizes)
{
    static const struct {
        const char *name;
        uint64_t parameters;
    } published[] = {
        {"Llama-3.1-8B", 8030261248},           {"Llama-3.1-70B", 70553706496}, {"Mistral-7B", 7248023552},     {"Qwen2.5-32B", 32763876352},
        {"DeepSeek-R1-Distill-14B", 14770033664}, {"SmolLM2-135M", 134515008},    {"SmolLM2-1.7B", 1711376384},
    };
    for (size_t i = 0; i < sizeof(published) / sizeof(published[0]); i++) {
        struct plan_options options;
        static struct plan_report report;
        char arguments[128];
        cr_expect_str_eq(known_model_name((int)i), published[i].name);
        snprintf(arguments, sizeof(arguments), "--model %s --threads 1", published[i].name);
        make_ok(arguments, &options, &report);
        cr_expect(report.bf16.file_bytes == 2 * published[i].parameters, "%s has %llu parameters", published[i].name,
                  (unsigned long long)report.bf16.file_bytes / 2);
        cr_expect(report.context == report.model.max_context);
    }
    cr_expect(known_model_name(sizeof(published) / sizeof(published[0])) == NULL);
}

/* By hand: 128 KiB of K and V a token in Llama-3.1-8B, one layer of 32; 4 bytes x 4096 a token between layers. */
Test(plan_report, test_llama_8b_at_131072)
{
    struct plan_options options;
    static struct plan_report report;
    make_ok("--model llama-3.1-8b --context 131072 --max-new 0 --budget 4096 --threads 2 --max-running 1 --device-memory 24G", &options, &report);
    const struct memory_plan *layer = &report.orders[PLAN_LAYER], *chunk = &report.orders[PLAN_CHUNK], *one_shot = &report.orders[PLAN_ONE_SHOT];
    cr_expect(layer->peak[MEM_ACTIVE_KV] == (size_t)131072 * 4096);
    cr_expect(chunk->peak[MEM_ACTIVE_KV] == (size_t)131072 * 4096 * 32 && one_shot->peak[MEM_ACTIVE_KV] == chunk->peak[MEM_ACTIVE_KV]);
    cr_expect(layer->peak[MEM_BRIDGE] == (size_t)131072 * 4096 * 4 && chunk->peak[MEM_BRIDGE] == (size_t)512 * 4096 * 4);
    /* 32 of the budget lie in the recent window. */
    cr_expect(layer->n_kept == 4064 && layer->recent_rows == 256);
    cr_expect(layer->peak[MEM_FAST] == (size_t)(4064 + 256) * 4096 * 32);
    cr_expect(layer->block_bytes[0] == (size_t)63488 * 128);
    cr_expect(layer->peak_total < chunk->peak_total && chunk->peak_total < one_shot->peak_total);
    cr_expect(report.fits[PLAN_LAYER].prefilling > 0 && report.fits[PLAN_CHUNK].prefilling == 0 && report.longest[PLAN_LAYER] == 131072);
    cr_expect(report.longest[PLAN_CHUNK] < 80000 && report.longest[PLAN_ONE_SHOT] < report.longest[PLAN_CHUNK]);
}

/* A rank's K, V, heads and MLP are its share, hidden states and logits are whole. */
Test(plan_report, test_a_rank_of_two)
{
    struct plan_options options;
    static struct plan_report one, rank;
    make_ok("--model llama-3.1-8b --context 131072 --max-new 0 --budget 4096 --threads 2 --max-running 1", &options, &one);
    make_ok("--model llama-3.1-8b --context 131072 --max-new 0 --budget 4096 --threads 2 --max-running 1 --tp 2", &options, &rank);
    const struct memory_plan *a = &one.orders[PLAN_LAYER], *b = &rank.orders[PLAN_LAYER];
    cr_expect(rank.whole.n_heads == 32 && rank.model.n_heads == 16 && rank.model.n_kv_heads == 4 && rank.model.ffn_dim == 7168);
    cr_expect(2 * b->peak[MEM_ACTIVE_KV] == a->peak[MEM_ACTIVE_KV] && 2 * b->peak[MEM_FAST] == a->peak[MEM_FAST]);
    cr_expect(b->peak[MEM_BRIDGE] == a->peak[MEM_BRIDGE]);
    cr_expect(2 * b->block_bytes[0] == a->block_bytes[0]);
    cr_expect(rank.weights < one.weights && 2 * rank.weights > one.weights); /* the embedding is whole on every rank */
}

Test(plan_report, test_wrong_use_is_refused_with_the_option)
{
    expect_refused("--model no-such-model", "Qwen2.5-32B");
    expect_refused("--model SmolLM2-135M --context 8193", "--context 8193: SmolLM2-135M allows at most 8192");
    expect_refused("--model SmolLM2-135M --context 512", "--max-new 512");
    expect_refused("--model SmolLM2-135M --selector nobody", "--selector (command line): the value \"nobody\"");
    expect_refused("--model SmolLM2-135M --weights q4_k", "--weights q4_k");
    expect_refused("--model SmolLM2-135M --chunk 0", "chunk");
    expect_refused("--model Llama-3.1-8B --tp 33", "--tp 33: 32 heads");
    expect_refused("--model Llama-3.1-8B --tp 65", "tp");
    expect_refused("--model /dev/null", "/dev/null");
}

static void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "we");
    cr_assert_not_null(file);
    fputs(text, file);
    fclose(file);
}

Test(plan_report, test_config_json_and_folder_without_weights)
{
    struct plan_options options;
    static struct plan_report by_file, by_folder;
    char folder[] = "/tmp/tidepool-plan-XXXXXX", path[64], arguments[128];
    cr_assert_not_null(mkdtemp(folder));
    snprintf(path, sizeof(path), "%s/config.json", folder);
    write_file(path, "{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":256,\"intermediate_size\":512,\"num_hidden_layers\":3,\"num_attention_heads\":4,"
                     "\"num_key_value_heads\":2,\"vocab_size\":1000,\"max_position_embeddings\":2048,\"rms_norm_eps\":1e-05}");
    snprintf(arguments, sizeof(arguments), "--model %s --threads 1 --weights q4_k", path);
    make_ok(arguments, &options, &by_file);
    cr_expect(by_file.stored.file_bytes == 0 && by_file.context == 2048);
    cr_expect_str_eq(by_file.weights_name, "q4_k");
    cr_expect(by_file.weights < by_file.bf16.device_bytes / 3);
    snprintf(arguments, sizeof(arguments), "--model %s --threads 1", folder);
    make_ok(arguments, &options, &by_folder);
    cr_expect(by_folder.weights == by_file.bf16.device_bytes && by_folder.orders[PLAN_CHUNK].peak_total == by_file.orders[PLAN_CHUNK].peak_total);
    write_file(path, "{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":-1}");
    expect_refused(arguments, "hidden_size");
    unlink(path);
    rmdir(folder);
}

Test(plan_report, test_json_has_every_tag_and_text_every_order)
{
    struct plan_options options;
    static struct plan_report report;
    struct buf out;
    make_ok("--model SmolLM2-1.7B --context 4096 --device-memory 8G --workers 2 --threads 1", &options, &report);
    buf_init(&out, 1 << 20);
    cr_assert(plan_report_json(&report, &out) == 0);
    json_t *root = json_loads(buf_cstr(&out), 0, NULL);
    cr_assert_not_null(root);
    for (int order = 0; order < PLAN_ORDER_COUNT; order++) {
        const json_t *plan = json_object_get(root, plan_order_names[order]);
        json_int_t sum = 0;
        for (int tag = 0; tag < MEM_TAG_COUNT; tag++)
            sum += json_integer_value(json_object_get(json_object_get(plan, "prefill_bytes"), mem_tag_name((enum mem_tag)tag)));
        cr_expect(sum <= json_integer_value(json_object_get(plan, "peak_total_bytes")) && sum > 0);
        cr_expect(json_integer_value(json_object_get(plan, "peak_total_bytes")) == (json_int_t)report.orders[order].peak_total);
        cr_expect(json_integer_value(json_object_get(json_object_get(plan, "fits"), "running")) == (json_int_t)report.fits[order].running);
    }
    json_decref(root);
    buf_clear(&out);
    cr_assert(plan_report_text(&report, &out) == 0);
    for (int order = 0; order < PLAN_ORDER_COUNT; order++)
        cr_expect(strstr(buf_cstr(&out), plan_order_names[order]));
    cr_expect(strstr(buf_cstr(&out), "--memory-limit"));
    buf_fini(&out);
}

/* The real model, loaded and run: weights, peaks and steady state are what the plan from its file's header says. */
Test(plan_report, test_real_model_takes_what_was_planned, .timeout = 300)
{
    enum { N_PROMPT = 280, MAX_NEW = 20 };
    struct plan_options options;
    static struct plan_report report;
    struct error err = {""};
    if (access(REAL_MODEL, R_OK) < 0)
        cr_skip_test("no %s: deploy/get-model.sh fetches it", REAL_MODEL);
    make_ok("--model " REAL_MODEL " --context 300 --max-new 20 --chunk 128 --threads 2 --pool=off --budget 128 --recent 64", &options, &report);

    const struct device_ops *dev = cpu_device_ops();
    const struct device_config device_config = {.n_threads = 2};
    struct model_open_params open = {.path = REAL_MODEL, .dev = dev, .ops = cpu_kernel_ops()};
    struct device_memory_stats stats;
    struct model *model;
    struct engine *engine;
    struct sequence *seq;
    cr_assert(dev->open(&device_config, &open.device) >= 0 && dev->stream_create(open.device, &open.stream) >= 0);
    cr_assert(model_open(&open, &model, &err) >= 0, "%s", err.text);
    dev->memory_stats(open.device, &stats);
    cr_expect(stats.now[MEM_WEIGHTS] == report.weights, "%zu of weights, %zu planned", stats.now[MEM_WEIGHTS], report.weights);
    const struct engine_config config = {.selector = selector_find("snapkv"), .budget = 128, .recent = 64, .fetch = 512, .chunk = 128, .max_context = 300, .max_batch = 8};
    cr_assert(engine_create(&config, model, NULL, &engine, &err) >= 0, "%s", err.text);
    int32_t tokens[N_PROMPT];
    for (int i = 0; i < N_PROMPT; i++)
        tokens[i] = 100 + i * 37 % 4000;
    const struct sequence_request request = {.prompt = tokens, .n_prompt = N_PROMPT, .max_new = MAX_NEW};
    cr_assert(sequence_create(engine, &request, &seq, &err) >= 0, "%s", err.text);
    int r;
    while ((r = sequence_prefill_step(seq)) > 0)
        ;
    for (int i = 0; r >= 0 && i < MAX_NEW; i++)
        r = engine_decode(engine, &seq, &tokens[i], 1);
    cr_assert(r >= 0);
    dev->memory_stats(open.device, &stats);
    const struct memory_plan *plan = &report.orders[PLAN_LAYER];
    for (int tag = 0; tag < MEM_TAG_COUNT; tag++) {
        if (tag == MEM_WEIGHTS)
            continue;
        cr_expect(stats.peak[tag] == plan->peak[tag], "%s: %zu, planned %zu", mem_tag_name((enum mem_tag)tag), stats.peak[tag], plan->peak[tag]);
        cr_expect(stats.now[tag] == plan->decode[tag], "%s at the end: %zu, planned %zu", mem_tag_name((enum mem_tag)tag), stats.now[tag], plan->decode[tag]);
    }
    cr_expect(stats.total_peak == report.weights + plan->peak_total);
    sequence_free(seq);
    engine_free(engine);
    model_close(model);
    dev->stream_free(open.stream);
    dev->close(open.device);
}
