/* From the body of a request to prompts of token ids. What takes time for a long prompt (parsing, tokenizing, hashing blocks) runs on the pool's
 * threads; a chat goes through the template's helper process in between. */
#include "proto/base/base_assert.h"
#include "proto/base/log.h"
#include "router/api/api_private.h"
#include <assert.h>
#include <errno.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>

/* -- on a thread of the pool -- */

/* What a caller writes never meets another tenant's salt, nor the shared namespace of those who write none. */
static size_t make_salt(const struct generation *g, uint8_t ret_salt[PROMPT_SALT_MAX])
{
    const struct api_config *config = &g->api->config;
    uint8_t tenant[32] = {0};
    bool by_key = config->salt_by_key && g->tenant;
    if (!g->req.cache_salt.len && !by_key)
        return 0;
    if (by_key)
        http_auth_tenant_id(config->auth, g->tenant, tenant);
    crypto_generichash(ret_salt, PROMPT_SALT_MAX, g->req.cache_salt.data, g->req.cache_salt.len, tenant, sizeof(tenant));
    return PROMPT_SALT_MAX;
}

static const char *prompt_field(const struct generation *g)
{
    return api_kind_is_chat(g->req.kind) ? "messages" : "prompt";
}

/* Takes over ids. */
static int add_prompt(struct generation *g, struct token_ids *ids)
{
    uint8_t salt[PROMPT_SALT_MAX];
    static_assert(sizeof(ids->data[0]) == sizeof(uint32_t), "token ids are 32 bits");
    if (g->req.kind == API_TOKENIZE || g->req.kind == API_TOKENIZE_CHAT) {
        g->ids = *ids;
        *ids = (struct token_ids){.n = 0};
        return 0;
    }
    if (ids->n == 0 || ids->n > UINT32_MAX)
        return api_error_set(&g->err, 400, prompt_field(g), "invalid_value", "the prompt has no tokens");
    size_t n_salt = make_salt(g, salt);
    if (prompt_create((uint32_t *)ids->data, (uint32_t)ids->n, salt, n_salt, &g->prompts[g->n_prompts]) < 0)
        return api_error_set(&g->err, 503, NULL, NULL, "out of memory");
    for (int i = 0; i < g->n_fingerprints; i++)
        prompt_block_keys(g->prompts[g->n_prompts], g->fingerprints[i]);
    g->n_prompts++;
    *ids = (struct token_ids){.n = 0};
    return 0;
}

static int encode_failed(struct generation *g, int rc, const struct error *why)
{
    if (rc == -ENOMEM)
        return api_error_set(&g->err, 503, NULL, NULL, "out of memory");
    return api_error_set(&g->err, 400, prompt_field(g), "invalid_value", "the text cannot be tokenized: %s", why->text);
}

static int encode_prompt(struct generation *g, const struct api_prompt *from)
{
    struct token_ids ids = {.n = 0};
    struct error why = {.text = ""};
    int rc = 0;
    if (from->text) {
        int flags = (g->req.parse_special ? TOKENIZE_PARSE_SPECIAL : 0) | (g->req.add_special_tokens ? TOKENIZE_ADD_SPECIAL : 0);
        rc = tokenizer_encode(g->api->config.tok, from->text, from->len, flags, &ids, &why);
        if (rc >= 0 && g->req.add_special_tokens)
            render_drop_double_bos(g->api->config.tok, &ids);
    } else {
        for (uint32_t i = 0; i < from->n_ids && rc >= 0; i++)
            rc = token_ids_append(&ids, (int32_t)from->ids[i]);
    }
    rc = rc < 0 ? encode_failed(g, rc, &why) : add_prompt(g, &ids);
    token_ids_fini(&ids);
    return rc;
}

static void run_parse(void *arg)
{
    struct generation *g = arg;
    enum api_kind kind = g->req.kind;
    if (kind == API_TOKENIZE && api_request_has(g->body, g->body_len, "messages"))
        kind = API_TOKENIZE_CHAT;
    if (api_request_parse(kind, g->body, g->body_len, g->api->config.tok, &g->req, &g->err) < 0 || api_kind_is_chat(kind))
        return;
    g->prompts = calloc(g->req.n_prompts, sizeof(struct prompt *));
    if (!g->prompts)
        api_error_set(&g->err, 503, NULL, NULL, "out of memory");
    for (uint32_t i = 0; i < g->req.n_prompts && !g->err.status; i++)
        encode_prompt(g, &g->req.prompts[i]);
}

static void run_encode(void *arg)
{
    struct generation *g = arg;
    struct token_ids ids = {.n = 0};
    struct error why = {.text = ""};
    size_t len = g->n_rendered;
    g->prompts = calloc(1, sizeof(struct prompt *));
    if (!g->prompts) {
        api_error_set(&g->err, 503, NULL, NULL, "out of memory");
        return;
    }
    if (g->req.continue_final_message && render_cut_at_final_message(&g->req, g->rendered, len, &len) < 0) {
        api_error_set(&g->err, 400, "continue_final_message", "invalid_value",
                      "the chat template does not print the final message's content as it is, so it cannot be continued");
        return;
    }
    int rc = render_encode(g->api->config.tok, g->rendered, len, g->req.add_special_tokens, &ids, &why);
    if (rc < 0)
        encode_failed(g, rc, &why);
    else
        add_prompt(g, &ids);
    token_ids_fini(&ids);
}

/* -- on the loop -- */

static void submit(struct generation *g, void (*run)(void *), void (*done)(void *))
{
    g->work = (struct work){.run = run, .done = done, .arg = g};
    g->working = true;
    work_pool_submit(g->api->pool, &g->work);
}

/* Back from a thread. False if the generation has ended here. */
static bool came_back(struct generation *g)
{
    g->working = false;
    if (!g->exchange) {
        generation_free(g);
        return false;
    }
    if (g->err.status) {
        generation_fail(g);
        return false;
    }
    return true;
}

/* A prompt whose logprobs would not fit a message is refused here, by name. */
static bool check_prompt_logprobs(struct generation *g)
{
    if (!g->req.echo || !g->req.sampling.logprobs)
        return true;
    for (uint32_t i = 0; i < g->n_prompts; i++)
        if ((uint64_t)g->prompts[i]->n * (1 + g->req.sampling.n_logprobs) > API_PROMPT_LOGPROBS_MAX) {
            api_error_set(&g->err, 400, "logprobs", "invalid_value", "echo with logprobs is limited to %d numbers; the prompt has %u tokens",
                          API_PROMPT_LOGPROBS_MAX, g->prompts[i]->n);
            return false;
        }
    return true;
}

static void route(struct generation *g)
{
    if (g->req.kind == API_TOKENIZE || g->req.kind == API_TOKENIZE_CHAT)
        tokenize_reply(g);
    else if (check_prompt_logprobs(g))
        generation_route(g);
    else
        generation_fail(g);
}

static void on_encoded(void *arg)
{
    struct generation *g = arg;
    if (came_back(g))
        route(g);
}

static void on_rendered(void *arg, int code, const char *text, size_t len)
{
    struct generation *g = arg;
    g->render = NULL;
    if (code == 0) {
        g->rendered = malloc(len + 1);
        if (g->rendered) {
            memcpy(g->rendered, text, len);
            g->n_rendered = len;
            submit(g, run_encode, on_encoded);
            return;
        }
        code = -ENOMEM;
    }
    if (code == -EINVAL)
        api_error_set(&g->err, 400, "messages", "template_error", "the chat template refuses these messages: %.*s", len > 400 ? 400 : (int)len, text);
    else if (code == -ENOBUFS)
        api_error_set(&g->err, 400, "messages", "template_error", "the rendered chat is too long");
    else if (code == -ETIMEDOUT)
        api_error_set(&g->err, 503, "messages", "template_timeout", "the chat template did not finish in time");
    else
        api_error_set(&g->err, 500, NULL, "template_failed", "the chat template's process failed");
    generation_fail(g);
}

static void render(struct generation *g)
{
    struct buf options;
    int rc = -ENOTSUP;
    buf_init(&options, g->req.template_vars.max);
    if (g->api->config.templates)
        rc = render_options(&g->req, &options);
    if (rc >= 0)
        rc = template_render(g->api->config.templates, buf_cstr(&g->req.messages), g->req.messages.len, buf_cstr(&options), options.len,
                             g->api->config.template_timeout_us, on_rendered, g, &g->render);
    buf_fini(&options);
    if (rc >= 0)
        return;
    if (rc == -ENOTSUP)
        api_error_set(&g->err, 400, "messages", "no_chat_template", "this model has no chat template; use /v1/completions or start the server with --chat-template");
    else if (rc == -E2BIG || rc == -ENOBUFS)
        api_error_set(&g->err, 413, "messages", NULL, "the messages are too long");
    else
        api_error_set(&g->err, 503, NULL, NULL, "too many chats are being rendered");
    generation_fail(g);
}

static void on_parsed(void *arg)
{
    struct generation *g = arg;
    free(g->body);
    g->body = NULL;
    if (!came_back(g))
        return;
    api_note_unknown(g->api, &g->req);
    if (!api_model_is_served(g->api, g->req.model, &g->err))
        generation_fail(g);
    else if (api_kind_is_chat(g->req.kind))
        render(g);
    else
        route(g);
}

void prepare_start(struct generation *g)
{
    g->n_fingerprints = route_fingerprints(g->api->config.route, g->fingerprints, PROMPT_FINGERPRINTS_MAX);
    submit(g, run_parse, on_parsed);
}
