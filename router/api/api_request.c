/* The top level of a request: a table of fields, then the checks that need more than one of them. */
#include "router/api/api_request.h"
#include "proto/base/base_assert.h"
#include "router/api/api_request_private.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MESSAGES_BYTES_MAX = 64 << 20, ANY = API_CHAT | API_COMPLETION, EVERY = ANY | API_TOKENIZE | API_TOKENIZE_CHAT, CHATS = API_CHAT | API_TOKENIZE_CHAT };

enum field_type { FIELD_INT, FIELD_DOUBLE, FIELD_BOOL, FIELD_SPECIAL };

struct field {
    const char *name;
    int kinds;                 /* set of enum api_kind */
    enum field_type type;
    size_t offset;             /* in struct api_request; doubles go to a float */
    double min, max;
    int (*parse)(struct parse *p); /* FIELD_SPECIAL */
};

#define AT(f) .offset = offsetof(struct api_request, f)

static int parse_model(struct parse *p)
{
    struct json_str name;
    if (parse_text(p, "model", &name) < 0)
        return -EINVAL;
    p->r->model = strndup(name.data, name.len);
    return p->r->model ? 0 : api_error_set(p->err, 503, NULL, NULL, "out of memory");
}

static int parse_seed(struct parse *p)
{
    p->r->has_seed = true;
    return parse_int(p, "seed", INT64_MIN, INT64_MAX, &p->r->seed);
}

static int parse_top_k(struct parse *p)
{
    int64_t top_k;
    if (parse_int(p, "top_k", -1, 1 << 20, &top_k) < 0)
        return -EINVAL;
    p->r->sampling.top_k = top_k < 0 ? 0 : (int32_t)top_k; /* both 0 and -1 mean off */
    return 0;
}

static int parse_logprobs(struct parse *p)
{
    int64_t n;
    if (p->r->kind == API_CHAT)
        return parse_bool(p, "logprobs", &p->model_wants_logprobs);
    if (parse_int(p, "logprobs", 0, ROUTE_TOP_LOGPROBS_MAX, &n) < 0)
        return -EINVAL;
    p->r->sampling.logprobs = true;
    p->r->sampling.n_logprobs = (uint32_t)n;
    return 0;
}

static int parse_top_logprobs(struct parse *p)
{
    return parse_int(p, "top_logprobs", 0, ROUTE_TOP_LOGPROBS_MAX, &p->top_logprobs);
}

static int parse_best_of(struct parse *p)
{
    return parse_int(p, "best_of", 1, API_N_MAX, &p->best_of);
}

static int parse_add_generation(struct parse *p)
{
    p->add_generation_given = true;
    return parse_bool(p, "add_generation_prompt", &p->r->add_generation_prompt);
}

static int parse_stream_options(struct parse *p)
{
    struct json_str key;
    if (json_peek(&p->j) != JSON_OBJECT)
        return parse_wrong_type(p, "stream_options", "an object");
    p->has_stream_options = true;
    json_object(&p->j);
    while (json_next_key(&p->j, &key)) {
        if (json_str_eq(&key, "include_usage") && !parse_is_null(p)) {
            if (parse_bool(p, "stream_options.include_usage", &p->r->include_usage) < 0)
                return -EINVAL;
        } else if (!json_str_eq(&key, "include_usage")) {
            json_skip(&p->j);
        }
    }
    return p->j.error ? parse_broken(p) : 0;
}

static int parse_cache_salt(struct parse *p)
{
    struct json_str salt;
    if (parse_text(p, "cache_salt", &salt) < 0)
        return -EINVAL;
    if (salt.len < 1 || salt.len > API_SALT_MAX)
        return api_error_set(p->err, 400, "cache_salt", "invalid_value", "cache_salt must have 1 to %d bytes, not %zu", API_SALT_MAX, salt.len);
    return buf_append(&p->r->cache_salt, salt.data, salt.len) < 0 ? api_error_set(p->err, 503, NULL, NULL, "out of memory") : 0;
}

static int parse_user(struct parse *p)
{
    struct json_str user;
    return parse_text(p, "user", &user);
}

static const struct field fields[] = {
    {"messages", CHATS, FIELD_SPECIAL, .parse = parse_messages},
    {"prompt", API_COMPLETION | API_TOKENIZE, FIELD_SPECIAL, .parse = parse_prompt},
    {"model", EVERY, FIELD_SPECIAL, .parse = parse_model},
    {"max_tokens", API_CHAT, FIELD_INT, AT(max_tokens), 1, INT32_MAX},
    {"max_tokens", API_COMPLETION, FIELD_INT, AT(max_tokens), 0, INT32_MAX},
    {"min_tokens", ANY, FIELD_INT, AT(min_tokens), 0, INT32_MAX},
    {"n", ANY, FIELD_INT, AT(n), 1, API_N_MAX},
    {"temperature", ANY, FIELD_DOUBLE, AT(sampling.temperature), 0, 2},
    {"top_p", ANY, FIELD_DOUBLE, AT(sampling.top_p), 0, 1},
    {"top_k", ANY, FIELD_SPECIAL, .parse = parse_top_k},
    {"min_p", ANY, FIELD_DOUBLE, AT(sampling.min_p), 0, 1},
    {"presence_penalty", ANY, FIELD_DOUBLE, AT(sampling.presence_penalty), -2, 2},
    {"frequency_penalty", ANY, FIELD_DOUBLE, AT(sampling.frequency_penalty), -2, 2},
    {"repetition_penalty", ANY, FIELD_DOUBLE, AT(sampling.repetition_penalty), 0.01, 10},
    {"seed", ANY, FIELD_SPECIAL, .parse = parse_seed},
    {"stop", ANY, FIELD_SPECIAL, .parse = parse_stop},
    {"stop_token_ids", ANY, FIELD_SPECIAL, .parse = parse_stop_token_ids},
    {"logit_bias", ANY, FIELD_SPECIAL, .parse = parse_logit_bias},
    {"logprobs", ANY, FIELD_SPECIAL, .parse = parse_logprobs},
    {"top_logprobs", API_CHAT, FIELD_SPECIAL, .parse = parse_top_logprobs},
    {"stream", ANY, FIELD_BOOL, AT(stream), 0, 0},
    {"stream_options", ANY, FIELD_SPECIAL, .parse = parse_stream_options},
    {"ignore_eos", ANY, FIELD_BOOL, AT(ignore_eos), 0, 0},
    {"skip_special_tokens", ANY, FIELD_BOOL, AT(skip_special_tokens), 0, 0},
    {"include_stop_str_in_output", ANY, FIELD_BOOL, AT(include_stop), 0, 0},
    {"return_token_ids", ANY, FIELD_BOOL, AT(return_token_ids), 0, 0},
    {"no_cache", ANY, FIELD_BOOL, AT(no_cache), 0, 0},
    {"echo", API_COMPLETION, FIELD_BOOL, AT(echo), 0, 0},
    {"best_of", API_COMPLETION, FIELD_SPECIAL, .parse = parse_best_of},
    {"add_special_tokens", EVERY, FIELD_BOOL, AT(add_special_tokens), 0, 0},
    {"parse_special", API_TOKENIZE, FIELD_BOOL, AT(parse_special), 0, 0},
    {"return_token_strs", API_TOKENIZE | API_TOKENIZE_CHAT, FIELD_BOOL, AT(return_token_strs), 0, 0},
    {"add_generation_prompt", CHATS, FIELD_SPECIAL, .parse = parse_add_generation},
    {"continue_final_message", CHATS, FIELD_BOOL, AT(continue_final_message), 0, 0},
    {"chat_template_kwargs", CHATS, FIELD_SPECIAL, .parse = parse_template_kwargs},
    {"documents", CHATS, FIELD_SPECIAL, .parse = parse_documents},
    {"tools", CHATS, FIELD_SPECIAL, .parse = parse_tools},
    {"cache_salt", ANY, FIELD_SPECIAL, .parse = parse_cache_salt},
    {"user", ANY, FIELD_SPECIAL, .parse = parse_user},
};

static int parse_field(struct parse *p, const struct field *field)
{
    char *at = (char *)p->r + field->offset;
    double value;
    switch (field->type) {
    case FIELD_INT:
        return parse_int(p, field->name, (int64_t)field->min, (int64_t)field->max, (int64_t *)at);
    case FIELD_BOOL:
        return parse_bool(p, field->name, (bool *)at);
    case FIELD_DOUBLE:
        if (parse_double(p, field->name, field->min, field->max, &value) < 0)
            return -EINVAL;
        *(float *)at = (float)value;
        return 0;
    case FIELD_SPECIAL:
        return field->parse(p);
    }
    return -EINVAL;
}

static const struct field *find_field(const struct parse *p, const struct json_str *key)
{
    for (size_t i = 0; i < ARRAY_LEN(fields); i++)
        if ((fields[i].kinds & p->r->kind) && json_str_eq(key, fields[i].name))
            return &fields[i];
    return NULL;
}

static void note_unknown(struct api_request *r, const struct json_str *key)
{
    if (r->n_unknown == API_UNKNOWN_MAX)
        return;
    char *name = r->unknown[r->n_unknown++];
    size_t n = key->len < sizeof(r->unknown[0]) - 1 ? key->len : sizeof(r->unknown[0]) - 1;
    memcpy(name, key->data, n);
    name[n] = 0;
}

static int parse_newer_max(struct parse *p)
{
    int64_t value;
    if (parse_is_null(p))
        return 0;
    if (parse_int(p, "max_completion_tokens", 1, INT32_MAX, &value) < 0)
        return -EINVAL;
    p->r->max_tokens = value;
    p->newer_max = true;
    return 0;
}

static int parse_member(struct parse *p, const struct json_str *key)
{
    /* The newer name of max_tokens wins wherever it stands. */
    if (json_str_eq(key, "max_completion_tokens") && (p->r->kind & ANY))
        return parse_newer_max(p);
    const struct field *field = find_field(p, key);
    if (field && parse_is_null(p))
        return 0;
    if (field && p->newer_max && strcmp(field->name, "max_tokens") == 0) {
        int64_t older = p->r->max_tokens;
        int rc = parse_field(p, field);
        p->r->max_tokens = older;
        return rc;
    }
    if (field)
        return parse_field(p, field);
    int rc = parse_unsupported(p, key);
    if (rc != 0)
        return rc < 0 ? rc : 0;
    note_unknown(p->r, key);
    json_skip(&p->j);
    return 0;
}

static int parse_body(struct parse *p)
{
    struct json_str key;
    if (json_peek(&p->j) != JSON_OBJECT)
        return p->j.error ? parse_broken(p) : api_error_set(p->err, 400, NULL, "invalid_type", "the body must be a JSON object");
    json_object(&p->j);
    while (json_next_key(&p->j, &key))
        if (parse_member(p, &key) < 0)
            return -EINVAL;
    return json_end(&p->j) < 0 ? parse_broken(p) : 0;
}

/* -- checks of more than one field -- */

static int check_logprobs(struct parse *p)
{
    struct api_request *r = p->r;
    if (r->kind != API_CHAT)
        return 0;
    if (p->top_logprobs > 0 && !p->model_wants_logprobs)
        return api_error_set(p->err, 400, "top_logprobs", "invalid_value", "top_logprobs needs logprobs to be true");
    r->sampling.logprobs = p->model_wants_logprobs;
    r->sampling.n_logprobs = p->top_logprobs > 0 ? (uint32_t)p->top_logprobs : 0;
    return 0;
}

static int check_counts(struct parse *p)
{
    struct api_request *r = p->r;
    if (r->kind == API_COMPLETION && r->max_tokens < 0)
        r->max_tokens = API_COMPLETION_MAX_TOKENS;
    if (r->max_tokens == 0 && !r->echo && r->kind == API_COMPLETION)
        return api_error_set(p->err, 400, "max_tokens", "invalid_value", "max_tokens must be at least 1 unless echo is true");
    if (r->max_tokens > 0 && r->min_tokens > r->max_tokens)
        return api_error_set(p->err, 400, "min_tokens", "invalid_value", "min_tokens must be at most max_tokens, which is %lld",
                             (long long)r->max_tokens);
    if (p->best_of > 0 && p->best_of != r->n)
        return api_error_set(p->err, 400, "best_of", "unsupported_parameter", "best_of is not supported; it may only be equal to n");
    if (r->kind == API_COMPLETION && r->n_prompts * r->n > API_CHOICES_MAX)
        return api_error_set(p->err, 400, "n", "invalid_value", "the number of prompts times n must be at most %d", API_CHOICES_MAX);
    return 0;
}

static int check_prompt(struct parse *p)
{
    struct api_request *r = p->r;
    if (api_kind_is_chat(r->kind))
        return 0;
    if (!p->has_prompt)
        return api_error_set(p->err, 400, "prompt", "missing", r->kind == API_TOKENIZE ? "prompt or messages is required" : "prompt is required");
    if (r->kind == API_TOKENIZE && (r->n_prompts != 1 || !r->prompts[0].text))
        return api_error_set(p->err, 400, "prompt", "invalid_type", "prompt must be a string");
    return 0;
}

static int check_chat(struct parse *p)
{
    struct api_request *r = p->r;
    if (!api_kind_is_chat(r->kind))
        return 0;
    if (!p->has_messages)
        return api_error_set(p->err, 400, "messages", "missing", "messages is required");
    if (r->continue_final_message && r->add_generation_prompt && p->add_generation_given)
        return api_error_set(p->err, 400, "continue_final_message", "invalid_value",
                             "continue_final_message and add_generation_prompt cannot both be true");
    if (r->continue_final_message)
        r->add_generation_prompt = false;
    if (p->has_tools && !p->tools_off)
        return api_error_set(p->err, 400, "tools", "unsupported_parameter",
                             "this server does not parse tool calls; leave tools out or set tool_choice to \"none\"");
    return 0;
}

static int check_stream(struct parse *p)
{
    if (p->has_stream_options && !p->r->stream)
        return api_error_set(p->err, 400, "stream_options", "invalid_value", "stream_options is only allowed when stream is true");
    return 0;
}

static void set_defaults(struct api_request *r, enum api_kind kind)
{
    *r = (struct api_request){
        .kind = kind, .max_tokens = -1, .n = 1, .add_generation_prompt = true, .skip_special_tokens = true,
        .add_special_tokens = !api_kind_is_chat(kind), .parse_special = true,
        .sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1},
    };
    buf_init(&r->messages, MESSAGES_BYTES_MAX);
    buf_init(&r->template_vars, MESSAGES_BYTES_MAX);
    buf_init(&r->last_content, MESSAGES_BYTES_MAX);
    buf_init(&r->cache_salt, API_SALT_MAX);
}

/* A nucleus of no mass at all holds the likeliest token. */
static void normalize(struct api_request *r)
{
    if (r->sampling.top_p == 0) {
        r->sampling.top_p = 1;
        r->sampling.top_k = 1;
    }
}

int api_request_parse(enum api_kind kind, const char *body, size_t len, const struct tokenizer *tok, struct api_request *ret, struct api_error *err)
{
    struct parse p = {.r = ret, .err = err, .tok = tok, .top_logprobs = -1};
    set_defaults(ret, kind);
    json_init(&p.j, body, len);
    int rc = parse_body(&p);
    if (rc >= 0 && ((rc = check_prompt(&p)) < 0 || (rc = check_chat(&p)) < 0 || (rc = check_logprobs(&p)) < 0 || (rc = check_counts(&p)) < 0 || (rc = check_stream(&p)) < 0))
        rc = -EINVAL;
    json_fini(&p.j);
    normalize(ret);
    if (rc < 0) {
        api_request_fini(ret);
        set_defaults(ret, kind);
    }
    return rc;
}

bool api_request_has(const char *body, size_t len, const char *name)
{
    struct json j;
    struct json_str key;
    bool found = false;
    json_init(&j, body, len);
    if (json_peek(&j) == JSON_OBJECT && json_object(&j) == 0)
        while (!found && json_next_key(&j, &key)) {
            found = json_str_eq(&key, name);
            json_skip(&j);
        }
    json_fini(&j);
    return found;
}

void api_request_fini(struct api_request *r)
{
    free(r->model);
    for (uint32_t i = 0; i < r->n_prompts; i++) {
        free(r->prompts[i].text);
        free(r->prompts[i].ids);
    }
    free(r->prompts);
    for (uint32_t i = 0; i < r->n_stops; i++)
        free((char *)r->stops[i].text);
    free(r->sampling.logit_bias);
    buf_fini(&r->messages);
    buf_fini(&r->template_vars);
    buf_fini(&r->last_content);
    buf_fini(&r->cache_salt);
    *r = (struct api_request){.kind = r->kind};
}
