#include "bench/fidelity/lab/drift_engine.h"
#include "bench/fidelity/lab/drift.h"
#include "kernels/sample_one.h"
#include "worker/cache/engine.h"
#include "worker/cache/selector.h"
#include <string.h>

/* Logits behind one position of the prompt, by the lab's hidden state. */
struct head {
    struct model_workspace ws;
    float *logits; /* [n_vocab] */
};

static int lab_logits(const struct lab_context *c, int position, struct head *head)
{
    return model_logits(c->model, c->hidden + (int64_t)position * c->model->config.dim, 1, &head->ws, head->logits);
}

/* The raw log-probability that the engine reports for `token`: `sample` gives that of a given one. */
static int lab_logprob(const struct lab_context *c, int position, int32_t token, struct head *head, float *ret_logprob)
{
    const struct model *m = c->model;
    const struct sample_params p = {.top_p = 1, .repetition_penalty = 1, .given = &token};
    struct sample_result result;
    int r = lab_logits(c, position, head);
    if (r >= 0)
        r = sample_one(m->ops, m->stream, head->logits, m->config.n_vocab, &p, &result);
    if (r >= 0)
        *ret_logprob = result.logprob;
    return r;
}

static bool same_bits(const float *a, const float *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

static int count_different(const struct lab_context *c, const int32_t *tokens, const struct sequence *seq, struct head *head, int *ret_n)
{
    const float *last = sequence_logits(seq), *logprobs = sequence_prompt_logprobs(seq);
    int n = 0, r = lab_logits(c, c->n_tokens - 1, head);
    for (int i = 0; r >= 0 && i < c->model->config.n_vocab; i++)
        n += !same_bits(&last[i], &head->logits[i]);
    for (int i = c->n_tokens - 1 - DRIFT_EVERY; r >= 0 && i >= 0; i -= DRIFT_EVERY) {
        float logprob = 0;
        r = lab_logprob(c, i, tokens[i + 1], head, &logprob);
        n += r >= 0 && !same_bits(&logprob, &logprobs[i]);
    }
    *ret_n = n;
    return r;
}

static int compare_with(struct engine *engine, const struct lab_context *c, const int32_t *tokens, struct head *head, int *ret_n, struct error *err)
{
    const struct sequence_request request = {.prompt = tokens, .n_prompt = c->n_tokens, .max_new = 1, .no_cache = true, .prompt_logprobs = true};
    struct sequence *seq;
    int r = sequence_create(engine, &request, &seq, err);
    if (r < 0)
        return r;
    while ((r = sequence_prefill_step(seq)) > 0)
        ;
    if (r >= 0)
        r = count_different(c, tokens, seq, head, ret_n);
    sequence_free(seq);
    return r;
}

static int head_init(const struct model *m, struct head *head)
{
    int r = model_workspace_init(&head->ws, m, 1, 0);
    if (r >= 0)
        r = m->dev->alloc(m->device, MEM_WORKSPACE, (size_t)m->config.n_vocab * sizeof(float), (void **)&head->logits);
    return r;
}

static void head_fini(const struct model *m, struct head *head)
{
    m->dev->free(m->device, head->logits);
    if (head->ws.memory)
        model_workspace_fini(&head->ws, m);
}

int drift_engine_compare(const struct lab_context *c, struct model *model, const int32_t *tokens, enum lab_values values, int chunk, int *ret_n_different, struct error *err)
{
    const struct engine_config config = {
        .format = KV_FORMAT_K8V4,
        .selector = &selector_streaming,
        .budget = SELECT_SINKS + SELECT_MANDATORY,
        .recent = BLOCK_TOKENS,
        .chunk = chunk,
        .values = values == LAB_VALUES_EXACT ? PREFILL_EXACT : PREFILL_CONSISTENT,
        .order = PREFILL_LAYER_MAJOR,
        .max_context = c->n_tokens + 1,
        .max_batch = 1,
    };
    struct engine *engine = NULL;
    struct head head = {0};
    int r = engine_create(&config, model, NULL, &engine, err);
    if (r >= 0)
        r = head_init(model, &head);
    if (r >= 0)
        r = compare_with(engine, c, tokens, &head, ret_n_different, err);
    head_fini(model, &head);
    engine_free(engine);
    return r;
}
