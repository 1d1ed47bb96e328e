/* A model over several ranks answers like one. Ranks are processes with the CPU backend, over shared memory. */
#include "tests/unit/rank_model.h"
#include "tests/unit/rank_run.h"
#include "worker/cache/selector.h"
#include "worker/model/model_shard.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { N_PROMPT = 300, N_DECODE = 64, VOCAB = 160 };

static int32_t prompt[N_PROMPT];
static char path[64];

static void setup(void)
{
    for (int i = 0; i < N_PROMPT; i++)
        prompt[i] = i * i % 97 * 31 % VOCAB;
    strcpy(path, "/tmp/tidepool-ranks-XXXXXX");
    close(mkstemp(path));
}
static void teardown(void)
{
    unlink(path);
}
TestSuite(tensor_parallel, .init = setup, .fini = teardown, .timeout = 100);

static struct engine_config config(void)
{
    return (struct engine_config){
        .format = KV_FORMAT_K8V4,
        .selector = &selector_snapkv,
        .budget = 64,
        .recent = 32,
        .fetch = 64,
        .chunk = 96,
        .max_context = 512,
        .max_batch = 1,
        .store_deadline_us = 1000000,
    };
}

/* 1 rank against each of n_ranks[]. */
static void expect_like_one(const struct rank_model *model, struct engine_config engine, const int *n_ranks, int n)
{
    struct rank_run run = {.path = path, .backend = cpu_backend(), .config = engine, .prompt = prompt, .n_prompt = N_PROMPT, .n_decode = N_DECODE, .n_ranks = 1};
    struct rank_answer one, several;
    rank_model_write(model, path);
    rank_run(&run, &one);
    bool varies = false;
    for (int i = 1; i <= N_DECODE; i++)
        varies |= one.tokens[i] != one.tokens[0];
    cr_assert(varies, "an answer of one token says nothing");
    for (int i = 0; i < n; i++) {
        run.n_ranks = n_ranks[i];
        rank_run(&run, &several);
        cr_expect(memcmp(one.fingerprint, several.fingerprint, FINGERPRINT_BYTES) != 0);
        const double divergence = rank_answers_compare(&one, &several, 0);
        cr_expect(divergence < 1e-6, "%s: %d ranks diverge by %g", engine.selector->name, run.n_ranks, divergence);
        rank_answer_free(&several);
    }
    rank_answer_free(&one);
}

/* Heads and columns of the MLP come out uneven: 2 + 1 KV heads, 96 + 64 columns. */
Test(tensor_parallel, test_llama_over_two_and_three_ranks)
{
    static const struct rank_model model = {.arch = "llama", .n_layers = 3, .dim = 96, .n_heads = 6, .n_kv_heads = 3, .head_dim = 32, .ffn_dim = 160, .n_vocab = VOCAB, .context = 512, .tied = true,
                                            .n_dtypes = 1, .dtypes = {WEIGHT_F32}};
    expect_like_one(&model, config(), (const int[]){2, 3}, 2);
}

/* Biases of q, k and v like their rows, of o and down once; keys without the large ones; blocks of 32 columns; a head of its own. */
Test(tensor_parallel, test_qwen2_with_quantized_weights)
{
    static const struct rank_model model = {.arch = "qwen2", .n_layers = 2, .dim = 128, .n_heads = 9, .n_kv_heads = 3, .head_dim = 32, .ffn_dim = 224, .n_vocab = VOCAB, .context = 512,
                                            .n_dtypes = 4, .dtypes = {WEIGHT_Q8_0, WEIGHT_Q4_0, WEIGHT_Q4_1, WEIGHT_Q5_0}};
    expect_like_one(&model, config(), (const int[]){2, 3}, 2);
}

/* Blocks of 256 columns: a rank's heads end inside one, and its columns of the MLP with one. */
Test(tensor_parallel, test_weights_whose_blocks_are_wider_than_a_ranks_heads)
{
    static const struct rank_model model = {.arch = "llama", .n_layers = 2, .dim = 256, .n_heads = 8, .n_kv_heads = 4, .head_dim = 32, .ffn_dim = 768, .n_vocab = VOCAB, .context = 512,
                                            .n_dtypes = 3, .dtypes = {WEIGHT_Q4_K, WEIGHT_Q6_K, WEIGHT_Q5_K}};
    expect_like_one(&model, config(), (const int[]){2, 3}, 2);
}

/* Two KV heads on four ranks: each is on two of them, which share its query heads. What is chosen by the mean over those heads would be chosen otherwise, so all is attended and nothing scored. */
Test(tensor_parallel, test_more_ranks_than_kv_heads)
{
    static const struct rank_model model = {.arch = "llama", .n_layers = 2, .dim = 64, .n_heads = 6, .n_kv_heads = 2, .head_dim = 32, .ffn_dim = 64, .n_vocab = VOCAB, .context = 512,
                                            .n_dtypes = 2, .dtypes = {WEIGHT_BF16, WEIGHT_F16}};
    struct engine_config all = config();
    all.selector = &selector_streaming;
    all.fetch = INT32_MAX;
    expect_like_one(&model, all, (const int[]){3, 4}, 2);
}

/* ---- selectors ---- */

static const struct selector_ops *const selectors[] = {&selector_adakv, &selector_chunkkv, &selector_h2o, &selector_keydiff, &selector_pyramidkv, &selector_snapkv, &selector_streaming, &selector_tova};
enum { N_SELECTORS = sizeof(selectors) / sizeof(selectors[0]) };

/* Heads that attend differently, so that those that compete for rows and those that vote choose otherwise where some are not heard; plan and memory agree on each rank (rank_run). */
static void expect_selectors_like_one(const struct rank_model *model, struct engine_config engine, const int *n_ranks, int n)
{
    for (int i = 0; i < N_SELECTORS; i++) {
        engine.selector = selectors[i];
        expect_like_one(model, engine, n_ranks, n);
    }
}

Test(tensor_parallel, test_every_selector_over_two_and_three_ranks)
{
    static const struct rank_model model = {.arch = "llama", .n_layers = 3, .dim = 96, .n_heads = 6, .n_kv_heads = 3, .head_dim = 32, .ffn_dim = 160, .n_vocab = VOCAB, .context = 512, .tied = true,
                                            .n_dtypes = 1, .dtypes = {WEIGHT_F32}};
    struct engine_config some = config();
    some.fetch = 48;
    expect_selectors_like_one(&model, some, (const int[]){2, 3}, 2);
}

/* Heads that ranks have parts of, in shares of 4 and 3, and one whole beside two parts; key biases too. All is attended: which slow pages are, a rank's own query heads say. */
Test(tensor_parallel, test_every_selector_with_more_ranks_than_kv_heads)
{
    static const struct rank_model model = {.arch = "qwen2", .n_layers = 2, .dim = 96, .n_heads = 14, .n_kv_heads = 2, .head_dim = 32, .ffn_dim = 96, .n_vocab = VOCAB, .context = 512,
                                            .n_dtypes = 1, .dtypes = {WEIGHT_F32}};
    struct engine_config all = config();
    all.fetch = INT32_MAX;
    expect_selectors_like_one(&model, all, (const int[]){3, 4}, 2);
}

/* ---- every type and both file formats ---- */

/* The models of tests/system/make_tiny_models.py: 263 rows of the vocabulary, rows of 256, three sequences in a batch, biases of q, k, v and o, one KV head for both ranks. */
Test(tensor_parallel, test_tiny_models_of_every_kind)
{
    static const char *const names[] = {"type_f16.gguf", "type_q8_0.gguf", "type_q4_0.gguf", "type_q4_1.gguf", "type_q5_0.gguf", "type_q4_k.gguf", "type_q5_k.gguf", "type_q6_k.gguf",
                                        "llama_bias.gguf", "llama_bias", "llama", "mistral", "qwen2"};
    char file[PATH_MAX];
    struct rank_run run = {.path = file, .backend = cpu_backend(), .config = config(), .prompt = prompt, .n_prompt = 140, .n_decode = 6, .n_sequences = 3};
    run.config.max_context = 200;
    run.config.max_batch = 3;
    run.config.selector = &selector_streaming;
    run.config.fetch = INT32_MAX;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        struct rank_answer one, two;
        snprintf(file, sizeof(file), "%s/%s", TIDEPOOL_TINY_MODELS, names[i]);
        if (access(file, R_OK) < 0)
            cr_skip_test("skipped: %s is not there (its maker needs Python with numpy)", names[i]);
        run.n_ranks = 1;
        rank_run(&run, &one);
        run.n_ranks = 2;
        rank_run(&run, &two);
        const double divergence = rank_answers_compare(&one, &two, 1e-3);
        cr_expect(divergence < 1e-5, "%s: 2 ranks diverge by %g", names[i], divergence);
        rank_answer_free(&one);
        rank_answer_free(&two);
    }
}

/* ---- how a model is split ---- */

static struct model_config whole(int n_heads, int n_kv_heads, int ffn_dim, int n_vocab)
{
    return (struct model_config){.n_layers = 1, .dim = 64, .n_heads = n_heads, .n_kv_heads = n_kv_heads, .head_dim = 32, .ffn_dim = ffn_dim, .n_vocab = n_vocab};
}

/* The parts follow one another, none is empty, and together they are the whole. */
static void expect_split(const struct model_config *w, int n_ranks, int unit, const int *heads, const int *kv_heads)
{
    int head = 0, ffn = 0;
    for (int rank = 0; rank < n_ranks; rank++) {
        struct model_config c;
        struct error err;
        cr_assert_eq(model_shard_split(w, rank, n_ranks, unit, &c, &err), 0, "%s", err.text);
        cr_expect(c.n_heads == heads[rank] && c.n_kv_heads == kv_heads[rank] && c.n_heads % c.n_kv_heads == 0, "rank %d has %d heads, %d KV heads", rank, c.n_heads, c.n_kv_heads);
        cr_expect(c.shard.first_head == head && c.shard.first_ffn == ffn && c.ffn_dim > 0);
        cr_expect_eq(c.shard.first_kv_head, head / (w->n_heads / w->n_kv_heads));
        cr_expect(c.n_vocab == w->n_vocab && c.shard.all_heads == w->n_heads && c.shard.all_kv_heads == w->n_kv_heads && c.shard.all_ffn == w->ffn_dim);
        cr_expect(model_shard_vocab_first(&c, 0) == 0 && model_shard_vocab_first(&c, n_ranks) == w->n_vocab);
        cr_expect(model_shard_vocab_first(&c, rank) % WEIGHT_ROWS_UNIT == 0 || model_shard_vocab_first(&c, rank) == w->n_vocab);
        head += c.n_heads;
        ffn += c.ffn_dim;
    }
    cr_expect(head == w->n_heads && ffn == w->ffn_dim);
}

Test(tensor_parallel, test_split_of_heads)
{
    const struct model_config three = whole(9, 3, 1536, 1000), two = whole(14, 2, 4864, 20), eight = whole(32, 8, 14336, 128256);
    expect_split(&three, 2, 32, (const int[]){6, 3}, (const int[]){2, 1});
    expect_split(&three, 3, 256, (const int[]){3, 3, 3}, (const int[]){1, 1, 1});
    expect_split(&three, 4, 256, (const int[]){2, 1, 3, 3}, (const int[]){1, 1, 1, 1});
    expect_split(&two, 4, 256, (const int[]){4, 3, 4, 3}, (const int[]){1, 1, 1, 1});
    expect_split(&two, 3, 1, (const int[]){4, 3, 7}, (const int[]){1, 1, 1});
    expect_split(&eight, 8, 256, (const int[]){4, 4, 4, 4, 4, 4, 4, 4}, (const int[]){1, 1, 1, 1, 1, 1, 1, 1});
    expect_split(&eight, 3, 256, (const int[]){12, 12, 8}, (const int[]){3, 3, 2});
}

Test(tensor_parallel, test_split_that_cannot_be)
{
    const struct model_config w = whole(4, 2, 64, 100), narrow = whole(8, 8, 3, 100);
    struct model_config c = {.dim = -1};
    struct error err;
    cr_expect_eq(model_shard_split(&w, 2, 2, 32, &c, &err), -EINVAL);
    cr_expect_eq(model_shard_split(&w, -1, 2, 32, &c, &err), -EINVAL);
    cr_expect_eq(model_shard_split(&w, 0, 0, 32, &c, &err), -EINVAL);
    cr_expect_eq(model_shard_split(&w, 0, 5, 32, &c, &err), -ENOTSUP);
    cr_expect_eq(model_shard_split(&narrow, 0, 4, 32, &c, &err), -ENOTSUP);
    cr_expect(strstr(err.text, "4 ranks") && c.dim == -1, "%s", err.text);
    cr_expect_eq(model_shard_split(&w, 0, 1, 32, &c, &err), 0);
    cr_expect(c.n_heads == 4 && c.shard.n_ranks == 0 && !model_is_sharded(&c));
}
