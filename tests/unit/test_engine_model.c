/* The engine over the real model (models/SmolLM2-135M-Instruct.Q4_1.gguf): against logits that transformers computed, bit for bit against itself, and how much memory
 * it takes. Skipped where the model or the reference is not there. */
#include "tests/unit/real_model.h"
#include "worker/cache/selector.h"
#include <criterion/criterion.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_TOKENS = 8192, N_TOP = 20 };

static struct engine_config default_config(void)
{
    return (struct engine_config){
        .format = KV_FORMAT_K8V4,
        .selector = &selector_snapkv,
        .budget = 256,
        .recent = 128,
        .fetch = 256,
        .chunk = 512,
        .max_context = MAX_TOKENS,
        .max_batch = 8,
    };
}

static struct engine *open_engine(struct real_model *m, const struct engine_config *config)
{
    struct engine *engine;
    struct error err;
    cr_assert(engine_create(config, m->model, NULL, &engine, &err) >= 0, "%s", err.text);
    return engine;
}

static struct sequence *prefilled(struct engine *engine, const int32_t *tokens, int n_prompt, int max_new)
{
    return real_model_prefilled(engine, &(struct sequence_request){.prompt = tokens, .n_prompt = n_prompt, .max_new = max_new});
}

static int n_vocab(const struct real_model *m)
{
    return m->model->config.n_vocab;
}

/* ---- the reference ---- */

struct reference {
    int32_t tokens[1024];
    int n_tokens, n_positions;
    struct {
        int pos, ids[N_TOP];
        double logits[N_TOP], logsumexp;
    } at[32];
};

static void read_reference(struct reference *ref)
{
    const char *shared = getenv("TIDEPOOL_SHARED");
    char file[4096];
    json_error_t why;
    snprintf(file, sizeof(file), "%s/fixtures/logits_smollm2.json", shared ? shared : "../shared");
    if (access(file, R_OK) < 0)
        cr_skip_test("skipped: %s is not here", file);
    json_t *root = json_load_file(file, 0, &why);
    cr_assert(root, "%s: %s", file, why.text);
    json_t *tokens = json_object_get(root, "token_ids"), *positions = json_object_get(root, "positions");
    ref->n_tokens = (int)json_array_size(tokens);
    ref->n_positions = (int)json_array_size(positions);
    cr_assert(ref->n_tokens <= 1024 && ref->n_positions <= 32);
    for (int i = 0; i < ref->n_tokens; i++)
        ref->tokens[i] = (int32_t)json_integer_value(json_array_get(tokens, (size_t)i));
    for (int i = 0; i < ref->n_positions; i++) {
        json_t *p = json_array_get(positions, (size_t)i);
        ref->at[i].pos = (int)json_integer_value(json_object_get(p, "pos"));
        ref->at[i].logsumexp = json_number_value(json_object_get(p, "logsumexp"));
        for (int k = 0; k < N_TOP; k++) {
            ref->at[i].ids[k] = (int)json_integer_value(json_array_get(json_object_get(p, "ids"), (size_t)k));
            ref->at[i].logits[k] = json_number_value(json_array_get(json_object_get(p, "logits"), (size_t)k));
        }
    }
    json_decref(root);
}

/* KL(reference || got), the tokens beyond the largest 20 taken as one; checks the argmax where the reference is sure. */
static double divergence(const struct reference *ref, int i, const float *got, int n)
{
    double max = -INFINITY, sum = 0, kl = 0, p_rest = 1, q_rest = 1;
    int top = 0;
    for (int t = 0; t < n; t++) {
        top = got[t] > got[top] ? t : top;
        max = fmax(max, (double)got[t]);
    }
    for (int t = 0; t < n; t++)
        sum += exp((double)got[t] - max);
    for (int k = 0; k < N_TOP; k++) {
        const double log_p = ref->at[i].logits[k] - ref->at[i].logsumexp, log_q = (double)got[ref->at[i].ids[k]] - max - log(sum);
        kl += exp(log_p) * (log_p - log_q);
        p_rest -= exp(log_p);
        q_rest -= exp(log_q);
    }
    if (ref->at[i].logits[0] - ref->at[i].logits[1] > 0.1)
        cr_expect(top == ref->at[i].ids[0], "position %d: token %d, want %d", ref->at[i].pos, top, ref->at[i].ids[0]);
    return kl + (p_rest > 1e-9 && q_rest > 1e-9 ? p_rest * log(p_rest / q_rest) : 0);
}

/* Each position is the end of a prompt of its own; every second one, since that is what the test takes its time for. */
static double prefill_kl(struct real_model *m, const struct reference *ref, enum kv_format format)
{
    struct engine_config config = default_config();
    double sum = 0;
    config.format = format;
    struct engine *engine = open_engine(m, &config);
    int n = 0;
    for (int i = ref->n_positions - 1; i >= 0; i -= 2, n++) {
        struct sequence *seq = prefilled(engine, ref->tokens, ref->at[i].pos + 1, 0);
        sum += divergence(ref, i, sequence_logits(seq), n_vocab(m));
        sequence_free(seq);
    }
    engine_free(engine);
    return sum / n;
}

Test(engine_model, test_prefill_logits_against_transformers)
{
    static struct reference ref;
    struct real_model m;
    read_reference(&ref);
    cr_assert(real_model_open(&m, 2, CPU_ISA_AUTO));
    const double bf16 = prefill_kl(&m, &ref, KV_FORMAT_BF16), k8v4 = prefill_kl(&m, &ref, KV_FORMAT_K8V4);
    fprintf(stderr, "mean KL to the reference, prefill: bf16 %.3g, k8v4 %.3g\n", bf16, k8v4);
    cr_expect(bf16 < 1e-4 && k8v4 < 1e-3);
    real_model_close(&m);
}

/* One prompt token, then every other token through decoding: most positions lie in the slow tier by then. */
static double decode_kl(struct real_model *m, const struct reference *ref, enum kv_format format, int fetch)
{
    struct engine_config config = default_config();
    double sum = 0;
    config.format = format;
    config.fetch = fetch;
    config.recent = 0;
    struct engine *engine = open_engine(m, &config);
    struct sequence *seq = prefilled(engine, ref->tokens, 1, ref->n_tokens - 1);
    for (int i = 0, pos = 0; i < ref->n_positions; i++) {
        for (; pos < ref->at[i].pos; pos++)
            cr_assert(engine_decode(engine, &seq, &ref->tokens[pos + 1], 1) >= 0);
        sum += divergence(ref, i, sequence_logits(seq), n_vocab(m));
    }
    sequence_free(seq);
    engine_free(engine);
    return sum / ref->n_positions;
}

Test(engine_model, test_decode_logits_against_transformers)
{
    static struct reference ref;
    struct real_model m;
    read_reference(&ref);
    cr_assert(real_model_open(&m, 2, CPU_ISA_AUTO));
    const double bf16 = decode_kl(&m, &ref, KV_FORMAT_BF16, INT32_MAX), k8v4 = decode_kl(&m, &ref, KV_FORMAT_K8V4, INT32_MAX);
    fprintf(stderr, "mean KL to the reference, decoding, everything fetched: bf16 %.3g, k8v4 %.3g\n", bf16, k8v4);
    cr_expect(bf16 < 1e-4 && k8v4 < 1e-3);
    real_model_close(&m);
}

/* ---- the same bits ---- */

static void random_tokens(int32_t *tokens, int n, int vocab)
{
    uint64_t state = 3;
    for (int i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        tokens[i] = i > 60 && state >> 62 == 0 ? tokens[i - 50] : (int32_t)((state >> 33) % (uint64_t)vocab);
    }
}

/* Logits behind the prompt and behind each of n_decode tokens. */
static float *logits_of(struct real_model *m, const struct engine_config *config, const int32_t *tokens, int n_prompt, int n_decode)
{
    const size_t row = (size_t)n_vocab(m);
    float *logits = malloc((size_t)(n_decode + 1) * row * sizeof(float));
    struct engine *engine = open_engine(m, config);
    struct sequence *seq = prefilled(engine, tokens, n_prompt, n_decode);
    cr_assert(logits);
    memcpy(logits, sequence_logits(seq), row * sizeof(float));
    for (int i = 0; i < n_decode; i++) {
        cr_assert(engine_decode(engine, &seq, &tokens[n_prompt + i], 1) >= 0);
        memcpy(logits + (size_t)(i + 1) * row, sequence_logits(seq), row * sizeof(float));
    }
    sequence_free(seq);
    engine_free(engine);
    return logits;
}

static void expect_same(struct real_model *m, const struct engine_config *config, const int32_t *tokens, int n_prompt, int n_decode, const float *want,
                        const char *what)
{
    float *got = logits_of(m, config, tokens, n_prompt, n_decode);
    cr_expect(memcmp(want, got, (size_t)(n_decode + 1) * (size_t)n_vocab(m) * sizeof(float)) == 0, "%s differs", what);
    free(got);
}

Test(engine_model, test_same_bits_for_chunks_threads_and_orders)
{
    enum { N_PROMPT = 550, N_DECODE = 4 };
    static const int chunks[] = {64, 128, MAX_TOKENS};
    static int32_t tokens[N_PROMPT + N_DECODE];
    struct real_model one, two;
    cr_assert(real_model_open(&one, 1, CPU_ISA_AUTO) && real_model_open(&two, 2, CPU_ISA_AUTO));
    random_tokens(tokens, N_PROMPT + N_DECODE, n_vocab(&one));
    struct engine_config config = default_config();
    float *want = logits_of(&two, &config, tokens, N_PROMPT, N_DECODE);
    expect_same(&one, &config, tokens, N_PROMPT, N_DECODE, want, "one thread");
    for (int i = 0; i < 3; i++) {
        config.chunk = chunks[i];
        expect_same(&two, &config, tokens, N_PROMPT, N_DECODE, want, "chunk size");
    }
    config.order = PREFILL_CHUNK_MAJOR;
    config.chunk = 200;
    expect_same(&two, &config, tokens, N_PROMPT, N_DECODE, want, "chunk-major");
    free(want);
    real_model_close(&one);
    real_model_close(&two);
}

/* The prompt is short: one whole block and a part, with everything but a few tokens slow. Plain C is slow, so it has a prompt without a whole block, in one format (the tiny models of
 * test_engine_bits run in all, with blocks). */
Test(engine_model, test_same_bits_for_instruction_sets)
{
    enum { N_PROMPT = 140, N_PLAIN = 24, N_DECODE = 3 };
    static const enum cpu_isa isas[] = {CPU_ISA_AVX2, CPU_ISA_AVX512};
    static int32_t tokens[N_PROMPT + N_DECODE];
    struct engine_config config = default_config();
    struct real_model best, m;
    config.recent = 0;
    config.budget = 40;
    config.fetch = 48;
    cr_assert(real_model_open(&best, 2, CPU_ISA_AUTO));
    random_tokens(tokens, N_PROMPT + N_DECODE, n_vocab(&best));
    for (int format = 0; format < KV_FORMAT_COUNT; format += 2) {
        config.format = format;
        float *want = logits_of(&best, &config, tokens, N_PROMPT, N_DECODE);
        for (int i = 0; i < 2; i++) {
            if (!real_model_open(&m, 2, isas[i]))
                continue;
            expect_same(&m, &config, tokens, N_PROMPT, N_DECODE, want, "instruction set");
            real_model_close(&m);
        }
        free(want);
    }
    config.format = KV_FORMAT_K8V4;
    float *want = logits_of(&best, &config, tokens, N_PLAIN, N_DECODE);
    cr_assert(real_model_open(&m, 2, CPU_ISA_PLAIN));
    expect_same(&m, &config, tokens, N_PLAIN, N_DECODE, want, "plain C");
    real_model_close(&m);
    free(want);
    real_model_close(&best);
}

Test(engine_model, test_same_bits_in_a_batch)
{
    enum { BATCH = 8, N_PROMPT = 200, N_DECODE = 4 };
    static int32_t tokens[BATCH][N_PROMPT + N_DECODE];
    struct engine_config config = default_config();
    struct sequence *seqs[BATCH];
    float *want[BATCH];
    struct real_model m;
    config.recent = 64;
    config.fetch = 64;
    config.budget = 64;
    cr_assert(real_model_open(&m, 2, CPU_ISA_AUTO));
    random_tokens(tokens[0], BATCH * (N_PROMPT + N_DECODE), n_vocab(&m));
    struct engine *engine = open_engine(&m, &config);
    for (int i = 0; i < BATCH; i++) {
        want[i] = logits_of(&m, &config, tokens[i], N_PROMPT, N_DECODE);
        seqs[i] = prefilled(engine, tokens[i], N_PROMPT, N_DECODE);
    }
    for (int step = 0; step < N_DECODE; step++) {
        int32_t next[BATCH];
        for (int i = 0; i < BATCH; i++)
            next[i] = tokens[i][N_PROMPT + step];
        cr_assert(engine_decode(engine, seqs, next, BATCH) >= 0);
        for (int i = 0; i < BATCH; i++)
            cr_expect(memcmp(sequence_logits(seqs[i]), want[i] + (size_t)(step + 1) * (size_t)n_vocab(&m), (size_t)n_vocab(&m) * sizeof(float)) == 0);
    }
    for (int i = 0; i < BATCH; i++) {
        sequence_free(seqs[i]);
        free(want[i]);
    }
    engine_free(engine);
    real_model_close(&m);
}

/* ---- memory ---- */

static void peaks(struct real_model *m, enum prefill_order order, int n, const int32_t *tokens, struct device_memory_stats *ret)
{
    struct engine_config config = default_config();
    config.budget = 512;
    config.order = order;
    struct engine *engine = open_engine(m, &config);
    cpu_device_ops()->reset_peaks(m->device);
    struct sequence *seq = prefilled(engine, tokens, n, 0);
    cpu_device_ops()->memory_stats(m->device, ret);
    sequence_free(seq);
    engine_free(engine);
    fprintf(stderr, "%d tokens, %s, peak MiB:", n, order == PREFILL_LAYER_MAJOR ? "layer-major" : "chunk-major");
    for (int tag = 0; tag < MEM_TAG_COUNT; tag++)
        if (ret->peak[tag])
            fprintf(stderr, " %s %.2f", mem_tag_name((enum mem_tag)tag), (double)ret->peak[tag] / (1 << 20));
    fprintf(stderr, "\n");
}

Test(engine_model, test_peaks_by_tag)
{
    static const int lengths[] = {600, 1500};
    static int32_t tokens[1500];
    struct real_model m;
    cr_assert(real_model_open(&m, 2, CPU_ISA_AUTO));
    random_tokens(tokens, 1500, n_vocab(&m));
    const struct model_config *c = &m.model->config;
    for (int i = 0; i < 2; i++) {
        struct device_memory_stats layer, chunk;
        peaks(&m, PREFILL_LAYER_MAJOR, lengths[i], tokens, &layer);
        peaks(&m, PREFILL_CHUNK_MAJOR, lengths[i], tokens, &chunk);
        const size_t one_layer = (size_t)2 * (size_t)c->n_kv_heads * (size_t)c->head_dim * (size_t)lengths[i] * sizeof(bf16_t);
        cr_expect(layer.peak[MEM_ACTIVE_KV] == one_layer);
        cr_expect(chunk.peak[MEM_ACTIVE_KV] == one_layer * (size_t)c->n_layers);
        cr_expect(layer.peak[MEM_FAST] == chunk.peak[MEM_FAST]);
    }
    real_model_close(&m);
}
