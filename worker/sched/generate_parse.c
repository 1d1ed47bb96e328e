#include "worker/sched/generate_parse.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Copies n token ids that must lie in the vocabulary. */
static int take_tokens(const char *name, const uint32_t *from, size_t n, int n_vocab, int32_t **ret_tokens, struct error *err)
{
    int32_t *tokens = calloc(n + 1, sizeof *tokens);

    if (!tokens)
        return error_set(err, -ENOMEM, "no memory for %zu tokens", n);
    for (size_t i = 0; i < n; i++) {
        if (from[i] >= (uint32_t)n_vocab) {
            free(tokens);
            return error_set(err, -EINVAL, "%s[%zu] is %u; the vocabulary has %d tokens", name, i, from[i], n_vocab);
        }
        tokens[i] = (int32_t)from[i];
    }
    *ret_tokens = tokens;
    return 0;
}

static int check_lengths(const Tidepool__Engine__Generate *m, const struct job_limits *limits, struct error *err)
{
    if (m->n_prompt == 0)
        return error_set(err, -EINVAL, "the prompt has no tokens");
    if (m->max_tokens == 0)
        return error_set(err, -EINVAL, "max_tokens is 0; at least 1");
    if (m->n_prompt >= (size_t)limits->max_context || m->max_tokens > (size_t)limits->max_context - m->n_prompt)
        return error_set(err, -E2BIG, "the prompt has %zu tokens and max_tokens is %u; the context holds %d together", m->n_prompt, m->max_tokens,
                         limits->max_context);
    if (m->min_tokens > m->max_tokens)
        return error_set(err, -EINVAL, "min_tokens is %u; at most max_tokens, %u", m->min_tokens, m->max_tokens);
    if (m->n_generated > m->max_tokens)
        return error_set(err, -EINVAL, "generated has %zu tokens; at most max_tokens, %u", m->n_generated, m->max_tokens);
    if (m->n_stop_ids > JOB_STOP_IDS_MAX)
        return error_set(err, -EINVAL, "stop_ids has %zu entries; at most %d", m->n_stop_ids, JOB_STOP_IDS_MAX);
    if (m->cache_salt.len > JOB_SALT_MAX)
        return error_set(err, -EINVAL, "cache_salt has %zu bytes; at most %d", m->cache_salt.len, JOB_SALT_MAX);
    return 0;
}

static int check_float(const char *name, float value, float min, float max, struct error *err)
{
    if (value >= min && value <= max)
        return 0;
    return error_set(err, -EINVAL, "%s is %g; from %g to %g", name, (double)value, (double)min, (double)max);
}

/* A field that the sender left out reads as 0; for these two that means "off", which is 1. */
static float one_if_zero(float value)
{
    return value == 0 ? 1 : value;
}

static int check_sampling(const Tidepool__Engine__Sampling *s, struct error *err)
{
    const struct {
        const char *name;
        float value, min, max;
    } floats[] = {
        {"temperature", s->temperature, 0, 100},
        {"top_p", s->top_p, 0, 1},
        {"min_p", s->min_p, 0, 1},
        {"presence_penalty", s->presence_penalty, -100, 100},
        {"frequency_penalty", s->frequency_penalty, -100, 100},
        {"repetition_penalty", s->repetition_penalty, 0, 100},
    };

    for (size_t i = 0; i < sizeof floats / sizeof floats[0]; i++) {
        int rc = check_float(floats[i].name, floats[i].value, floats[i].min, floats[i].max, err);
        if (rc < 0)
            return rc;
    }
    if (s->n_logprobs > JOB_TOP_LOGPROBS_MAX)
        return error_set(err, -EINVAL, "n_logprobs is %u; at most %d", s->n_logprobs, JOB_TOP_LOGPROBS_MAX);
    if (s->n_logit_bias > JOB_BIAS_MAX)
        return error_set(err, -EINVAL, "logit_bias has %zu entries; at most %d", s->n_logit_bias, JOB_BIAS_MAX);
    return 0;
}

static int take_bias(const Tidepool__Engine__Sampling *s, int n_vocab, struct job_params *p, struct error *err)
{
    p->bias = calloc(s->n_logit_bias + 1, sizeof *p->bias);
    if (!p->bias)
        return error_set(err, -ENOMEM, "no memory for logit_bias");
    for (size_t i = 0; i < s->n_logit_bias; i++) {
        const Tidepool__Engine__LogitBias *b = s->logit_bias[i];
        if (b->token >= (uint32_t)n_vocab)
            return error_set(err, -EINVAL, "logit_bias[%zu] is for token %u; the vocabulary has %d tokens", i, b->token, n_vocab);
        if (isnan(b->bias))
            return error_set(err, -EINVAL, "logit_bias[%zu] is not a number", i);
        p->bias[i] = (struct logit_bias){.token = (int32_t)b->token, .bias = b->bias};
    }
    p->sampling.bias = p->bias;
    p->sampling.n_bias = (int)s->n_logit_bias;
    return 0;
}

static int take_sampling(const Tidepool__Engine__Sampling *s, int n_vocab, struct job_params *p, struct error *err)
{
    static const Tidepool__Engine__Sampling none = TIDEPOOL__ENGINE__SAMPLING__INIT;
    int rc;

    if (!s)
        s = &none;
    rc = check_sampling(s, err);
    if (rc < 0)
        return rc;
    p->sampling = (struct sample_params){
        .temperature = s->temperature,
        .top_k = s->top_k,
        .top_p = one_if_zero(s->top_p),
        .min_p = s->min_p,
        .presence_penalty = s->presence_penalty,
        .frequency_penalty = s->frequency_penalty,
        .repetition_penalty = one_if_zero(s->repetition_penalty),
        .seed = s->seed,
        .n_top = s->logprobs ? (int)s->n_logprobs : 0,
    };
    return take_bias(s, n_vocab, p, err);
}

int generate_parse(const Tidepool__Engine__Generate *message, uint64_t id, const struct job_limits *limits, struct job_params *ret_params,
                   struct error *err)
{
    struct job_params p = {
        .id = id,
        .n_prompt = (int)message->n_prompt,
        .n_generated = (int)message->n_generated,
        .max_tokens = (int)message->max_tokens,
        .min_tokens = (int)message->min_tokens,
        .n_stop_ids = (int)message->n_stop_ids,
        .n_salt = (int)message->cache_salt.len,
        .no_cache = message->no_cache,
        .prompt_logprobs = message->prompt_logprobs,
    };
    int rc = check_lengths(message, limits, err);

    if (rc < 0)
        return rc;
    rc = take_tokens("prompt", message->prompt, message->n_prompt, limits->n_vocab, &p.prompt, err);
    if (rc == 0)
        rc = take_tokens("generated", message->generated, message->n_generated, limits->n_vocab, &p.generated, err);
    if (rc == 0)
        rc = take_tokens("stop_ids", message->stop_ids, message->n_stop_ids, limits->n_vocab, &p.stop_ids, err);
    if (rc == 0)
        rc = take_sampling(message->sampling, limits->n_vocab, &p, err);
    if (rc == 0 && p.n_salt) {
        p.salt = malloc((size_t)p.n_salt);
        if (p.salt)
            memcpy(p.salt, message->cache_salt.data, (size_t)p.n_salt);
        else
            rc = error_set(err, -ENOMEM, "no memory for cache_salt");
    }
    if (rc < 0) {
        job_params_free(&p);
        return rc;
    }
    *ret_params = p;
    return 0;
}
