/* A byte that chooses the endpoint, then the body of a request. What is taken is within the limits, and what goes to the template's process is JSON
 * without the text of a special token; what is refused says why. */
#include "../unit/tiny_tokenizer.h"
#include "router/api/api_request.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool holds)
{
    if (!holds)
        abort();
}

static void must_be_json(const char *text, size_t len)
{
    struct json j;
    json_init(&j, text, len);
    json_skip(&j);
    must(json_end(&j) == 0);
    json_fini(&j);
}

static void check_template_input(struct api_request *r)
{
    struct buf vars;
    must_be_json((const char *)r->messages.data, r->messages.len);
    must(!memmem(r->messages.data, r->messages.len, "<|im_end|>", 10));
    buf_init(&vars, r->template_vars.len + 2);
    buf_append(&vars, "{", 1);
    buf_append(&vars, r->template_vars.data, r->template_vars.len);
    buf_append(&vars, "}", 1);
    must_be_json((const char *)vars.data, vars.len);
    buf_fini(&vars);
}

static void check_taken(struct api_request *r, const struct tokenizer *tok)
{
    const struct route_sampling *s = &r->sampling;
    must(r->n >= 1 && r->n <= API_N_MAX && r->max_tokens >= -1 && r->min_tokens >= 0);
    must(s->temperature >= 0 && s->temperature <= 2 && s->top_p > 0 && s->top_p <= 1 && s->repetition_penalty > 0);
    must(s->n_logprobs <= ROUTE_TOP_LOGPROBS_MAX && s->n_logit_bias <= API_LOGIT_BIAS_MAX && r->n_stops <= API_STOPS_MAX);
    for (uint32_t i = 0; i < r->n_stop_ids; i++)
        must(r->stop_ids[i] < tokenizer_n_vocab(tok));
    for (uint32_t i = 0; i < r->n_prompts; i++)
        for (uint32_t k = 0; k < r->prompts[i].n_ids; k++)
            must(r->prompts[i].ids[k] < tokenizer_n_vocab(tok));
    if (api_kind_is_chat(r->kind))
        check_template_input(r);
    else
        must(r->n_prompts >= 1 && r->n_prompts * r->n <= API_CHOICES_MAX);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const enum api_kind kinds[] = {API_CHAT, API_COMPLETION, API_TOKENIZE_CHAT, API_TOKENIZE};
    static struct tokenizer *tok;
    struct api_request request;
    struct api_error err = {.status = 0};
    if (!tok)
        tok = tiny_tokenizer_open();
    if (size == 0)
        return 0;
    enum api_kind kind = kinds[data[0] % 4];
    int rc = api_request_parse(kind, (const char *)data + 1, size - 1, tok, &request, &err);
    api_request_has((const char *)data + 1, size - 1, "messages");
    if (rc == 0)
        check_taken(&request, tok);
    else
        must(err.status >= 400 && err.message[0]);
    api_request_fini(&request);
    return 0;
}
