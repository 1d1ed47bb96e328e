/* Every tensor type and architecture, in both file formats, against the forward pass of tests/system/make_tiny_models.py. TIDEPOOL_TINY_MODELS is the folder
 * that the script filled. */
#include "dense_forward.h"
#include "formats/file_map.h"
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What NAME.expected holds. */
struct expected {
    struct file_map map;
    int n_tokens, n_positions, n_vocab;
    const int32_t *tokens, *positions;
    const float *logits; /* [n_positions, n_vocab] */
};

static void model_path(const char *name, char path[PATH_MAX])
{
    snprintf(path, PATH_MAX, "%s/%s", TIDEPOOL_TINY_MODELS, name);
    if (access(path, R_OK) < 0)
        cr_skip_test("skipped: %s is not there (its maker needs Python with numpy)", name);
}

static void read_expected(const char *name, struct expected *e)
{
    char path[PATH_MAX], file[256];
    struct error err;
    snprintf(file, sizeof(file), "%s.expected", name);
    model_path(file, path);
    cr_assert_eq(file_map_open(path, &e->map, &err), 0, "%s", err.text);
    const int32_t *header = e->map.data;
    e->n_tokens = header[0];
    e->n_positions = header[1];
    e->n_vocab = header[2];
    e->tokens = header + 3;
    e->positions = e->tokens + e->n_tokens;
    e->logits = (const float *)(e->positions + e->n_positions);
    cr_assert_eq(e->map.size, 4 * (size_t)(3 + e->n_tokens + e->n_positions + e->n_positions * e->n_vocab));
}

/* The weights take what the files' headers say that they will. */
static void expect_measured(const char *path, const struct dense_device *d)
{
    struct device_memory_stats stats;
    struct model_config config;
    struct model_weights_size size;
    struct weight_source source;
    struct error err = {""};
    cr_assert(model_config_load(path, &config, &err) >= 0 && weight_source_open(path, &source, &err) >= 0, "%s", err.text);
    const struct model_weights_params params = {.config = &config, .source = &source, .ops = cpu_kernel_ops()};
    cr_assert(model_weights_measure(&params, WEIGHT_BF16, &size, &err) >= 0, "%s", err.text);
    weight_source_close(&source);
    cpu_device_ops()->memory_stats(d->device, &stats);
    cr_expect(size.device_bytes == stats.now[MEM_WEIGHTS], "%s: %zu measured, %zu loaded", path, size.device_bytes, stats.now[MEM_WEIGHTS]);
    cr_expect(size.file_bytes == d->model->weights.file_bytes && size.has_key_bias == d->model->config.qkv_bias);
}

static float *run(const char *name, const struct expected *e, int chunk, int n_threads, enum cpu_isa isa)
{
    char path[PATH_MAX];
    struct dense_device d;
    float *logits = calloc((size_t)e->n_positions * (size_t)e->n_vocab, sizeof(float));
    cr_assert_not_null(logits);
    model_path(name, path);
    dense_open(&d, path, n_threads, isa);
    cr_assert_eq(d.model->config.n_vocab, e->n_vocab);
    expect_measured(path, &d);
    cr_assert_eq(dense_forward(&d, e->tokens, e->n_tokens, chunk, e->positions, e->n_positions, logits), 0);
    dense_close(&d);
    return logits;
}

static double largest_difference(const float *a, const float *b, size_t n)
{
    double largest = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        largest = d <= largest ? largest : d; /* NaN stays */
    }
    return largest;
}

static const double tolerance = 0.002, rounding_of_kv = 0.05;

static const char *const names[] = {
    "type_f32.gguf",  "type_f16.gguf",  "type_bf16.gguf", "type_q8_0.gguf",  "type_q4_0.gguf",       "type_q4_1.gguf", "type_q5_0.gguf",
    "type_q4_k.gguf", "type_q5_k.gguf", "type_q6_k.gguf", "llama.gguf",      "llama",                "llama_bias.gguf", "llama_bias",
    "mistral.gguf",   "mistral",        "qwen2.gguf",     "qwen2",
};

struct name_param {
    char name[64];
};

static struct criterion_test_params all_names(void)
{
    static struct name_param params[sizeof(names) / sizeof(names[0])];
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        snprintf(params[i].name, sizeof(params[i].name), "%s", names[i]);
    return cr_make_param_array(struct name_param, params, sizeof(params) / sizeof(params[0]));
}

ParameterizedTestParameters(tiny_models, logits_equal_the_reference)
{
    return all_names();
}

ParameterizedTest(const struct name_param *p, tiny_models, logits_equal_the_reference)
{
    struct expected e;
    read_expected(p->name, &e);
    float *logits = run(p->name, &e, 64, 2, CPU_ISA_AUTO);
    double d = largest_difference(logits, e.logits, (size_t)e.n_positions * (size_t)e.n_vocab);
    /* K and V are rounded to bf16: where fp32 and the reference's double fall on two sides of a rounding border, a value differs by 2^-8. */
    cr_expect(d < tolerance, "%s: logits differ by %g", p->name, d);
    free(logits);
    file_map_close(&e.map);
}

ParameterizedTestParameters(tiny_models, bits_do_not_depend_on_chunk_threads_or_instructions)
{
    return all_names();
}

ParameterizedTest(const struct name_param *p, tiny_models, bits_do_not_depend_on_chunk_threads_or_instructions)
{
    struct expected e;
    read_expected(p->name, &e);
    size_t bytes = (size_t)e.n_positions * (size_t)e.n_vocab * sizeof(float);
    float *whole = run(p->name, &e, e.n_tokens, 2, CPU_ISA_AUTO), *chunks = run(p->name, &e, 7, 1, CPU_ISA_AUTO),
          *plain = run(p->name, &e, 128, 2, CPU_ISA_PLAIN);
    cr_expect_arr_eq(whole, chunks, bytes, "%s: chunks of 7 on one thread", p->name);
    cr_expect_arr_eq(whole, plain, bytes, "%s: plain C, chunks of 128", p->name);
    free(whole);
    free(chunks);
    free(plain);
    file_map_close(&e.map);
}

/* The same weights in both formats. Rows of Q and K in another order are rotated into other vectors, which bf16 rounds differently; in the same order the bits are the same. */
static void check_pair(const char *gguf, const char *folder, double limit)
{
    struct expected e;
    read_expected(gguf, &e);
    float *a = run(gguf, &e, 128, 2, CPU_ISA_AUTO), *b = run(folder, &e, 128, 2, CPU_ISA_AUTO);
    double d = largest_difference(a, b, (size_t)e.n_positions * (size_t)e.n_vocab);
    cr_expect(d <= limit, "%s and %s differ by %g", gguf, folder, d);
    free(a);
    free(b);
    file_map_close(&e.map);
}

Test(tiny_models, gguf_and_safetensors_of_the_same_weights_agree)
{
    check_pair("llama.gguf", "llama", rounding_of_kv);
    check_pair("llama_bias.gguf", "llama_bias", rounding_of_kv);
    check_pair("mistral.gguf", "mistral", rounding_of_kv);
    check_pair("qwen2.gguf", "qwen2", 0);
}
