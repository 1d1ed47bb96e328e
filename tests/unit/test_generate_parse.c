#include "worker/sched/generate_parse.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <string.h>

static const struct job_limits limits = {.n_vocab = 100, .max_context = 50};

static uint32_t prompt[60] = {1, 2, 99}, generated[60] = {4, 5}, stop_ids[300] = {7};
static Tidepool__Engine__LogitBias bias, *bias_list[1] = {&bias};
static Tidepool__Engine__Sampling sampling;
static Tidepool__Engine__Generate message;

static void setup(void)
{
    static uint8_t salt[] = {1, 0, 2};

    bias = (Tidepool__Engine__LogitBias)TIDEPOOL__ENGINE__LOGIT_BIAS__INIT;
    bias.token = 3;
    bias.bias = -INFINITY;
    sampling = (Tidepool__Engine__Sampling)TIDEPOOL__ENGINE__SAMPLING__INIT;
    sampling.temperature = 0.5f;
    sampling.top_k = 40;
    sampling.seed = UINT64_MAX;
    sampling.logprobs = true;
    sampling.n_logprobs = 20;
    sampling.n_logit_bias = 1;
    sampling.logit_bias = bias_list;
    message = (Tidepool__Engine__Generate)TIDEPOOL__ENGINE__GENERATE__INIT;
    message.prompt = prompt;
    message.n_prompt = 3;
    message.generated = generated;
    message.n_generated = 2;
    message.max_tokens = 10;
    message.min_tokens = 2;
    message.stop_ids = stop_ids;
    message.n_stop_ids = 1;
    message.sampling = &sampling;
    message.cache_salt = (ProtobufCBinaryData){sizeof salt, salt};
    message.no_cache = true;
}

TestSuite(generate_parse, .init = setup);

Test(generate_parse, test_every_field_arrives)
{
    struct job_params p;
    struct error err;

    cr_assert_eq(generate_parse(&message, 42, &limits, &p, &err), 0);
    cr_assert(p.id == 42 && p.n_prompt == 3 && p.prompt[2] == 99);
    cr_assert(p.n_generated == 2 && p.generated[1] == 5);
    cr_assert(p.max_tokens == 10 && p.min_tokens == 2);
    cr_assert(p.n_stop_ids == 1 && p.stop_ids[0] == 7);
    cr_assert(p.sampling.temperature == 0.5f && p.sampling.top_k == 40 && p.sampling.seed == UINT64_MAX && p.sampling.n_top == 20);
    cr_assert(p.sampling.top_p == 1 && p.sampling.repetition_penalty == 1);
    cr_assert(p.sampling.n_bias == 1 && p.sampling.bias[0].token == 3 && isinf(p.sampling.bias[0].bias));
    cr_assert(p.n_salt == 3 && memcmp(p.salt, "\1\0\2", 3) == 0);
    cr_assert(p.no_cache && !p.prompt_logprobs);
    job_params_free(&p);
}

Test(generate_parse, test_no_alternatives_without_logprobs)
{
    struct job_params p;
    struct error err;

    sampling.logprobs = false;
    cr_assert_eq(generate_parse(&message, 1, &limits, &p, &err), 0);
    cr_assert_eq(p.sampling.n_top, 0);
    job_params_free(&p);
    message.sampling = NULL;
    cr_assert_eq(generate_parse(&message, 1, &limits, &p, &err), 0);
    cr_assert_eq(p.sampling.temperature, 0);
    job_params_free(&p);
}

static void refused(int code, const char *text)
{
    struct job_params p;
    struct error err = {""};

    cr_assert_eq(generate_parse(&message, 1, &limits, &p, &err), code, "%s", text);
    cr_assert(strstr(err.text, text), "%s", err.text);
    setup();
}

Test(generate_parse, test_fields_out_of_range_are_named)
{
    message.n_prompt = 0;
    refused(-EINVAL, "prompt has no tokens");
    prompt[1] = 100;
    refused(-EINVAL, "prompt[1] is 100");
    prompt[1] = 2;
    generated[0] = UINT32_MAX;
    refused(-EINVAL, "generated[0]");
    generated[0] = 4;
    stop_ids[0] = 1000;
    refused(-EINVAL, "stop_ids[0]");
    stop_ids[0] = 7;
    message.max_tokens = 0;
    refused(-EINVAL, "max_tokens");
    message.max_tokens = 48;
    refused(-E2BIG, "the context holds 50");
    message.max_tokens = UINT32_MAX;
    refused(-E2BIG, "the context holds 50");
    message.n_prompt = 60;
    refused(-E2BIG, "60 tokens");
    message.min_tokens = 11;
    refused(-EINVAL, "min_tokens");
    message.n_generated = 11;
    refused(-EINVAL, "generated has 11");
    message.n_stop_ids = JOB_STOP_IDS_MAX + 1;
    refused(-EINVAL, "stop_ids has");
    message.cache_salt.len = JOB_SALT_MAX + 1;
    refused(-EINVAL, "cache_salt");
    sampling.temperature = NAN;
    refused(-EINVAL, "temperature");
    sampling.temperature = -1;
    refused(-EINVAL, "temperature");
    sampling.top_p = 1.5f;
    refused(-EINVAL, "top_p");
    sampling.min_p = -0.1f;
    refused(-EINVAL, "min_p");
    sampling.frequency_penalty = INFINITY;
    refused(-EINVAL, "frequency_penalty");
    sampling.n_logprobs = 21;
    refused(-EINVAL, "n_logprobs");
    bias.token = 100;
    refused(-EINVAL, "logit_bias[0]");
    bias.bias = NAN;
    refused(-EINVAL, "logit_bias[0]");
}
