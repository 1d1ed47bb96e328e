/* Fields that other servers know. Those that would change the answer are refused unless their value is the one that changes nothing; the others are
 * taken without a word. Refusals are 400, not 501: client libraries ask again after a 5xx, and asking again does not help. */
#include "router/api/api_request_private.h"
#include <errno.h>
#include <string.h>

/* What a value of a refused field may be. */
enum harmless { NOTHING, FALSE_ONLY, ZERO_ONLY, EMPTY_ONLY, TEXT_FORMAT, TOOL_CHOICE, TEXT_MODALITY };

struct refused {
    const char *name;
    enum harmless harmless;
    const char *allowed;
};

static const struct refused refused[] = {
    {"response_format", TEXT_FORMAT, "only {\"type\": \"text\"} is supported"},
    {"tool_choice", TOOL_CHOICE, "only \"none\" and \"auto\" are supported"},
    {"functions", EMPTY_ONLY, "function calls are not supported"},
    {"function_call", TOOL_CHOICE, "only \"none\" and \"auto\" are supported"},
    {"suffix", EMPTY_ONLY, "insertion is not supported"},
    {"modalities", TEXT_MODALITY, "only [\"text\"] is supported"},
    {"audio", NOTHING, "audio is not supported"},
    {"web_search_options", NOTHING, "web search is not supported"},
    {"structured_outputs", NOTHING, "constrained output is not supported"},
    {"guided_json", NOTHING, "constrained output is not supported"},
    {"guided_regex", NOTHING, "constrained output is not supported"},
    {"guided_choice", NOTHING, "constrained output is not supported"},
    {"guided_grammar", NOTHING, "constrained output is not supported"},
    {"grammar", EMPTY_ONLY, "constrained output is not supported"},
    {"json_schema", NOTHING, "constrained output is not supported"},
    {"allowed_token_ids", EMPTY_ONLY, "use logit_bias"},
    {"bad_words", EMPTY_ONLY, "use logit_bias"},
    {"prompt_logprobs", ZERO_ONLY, "use /v1/completions with echo and logprobs"},
    {"truncate_prompt_tokens", NOTHING, "shorten the prompt before sending it"},
    {"chat_template", EMPTY_ONLY, "the server's own template is used (--chat-template)"},
    {"use_beam_search", FALSE_ONLY, "beam search is not supported"},
    {"priority", ZERO_ONLY, "there are no priorities"},
    {"echo", FALSE_ONLY, "echo belongs to /v1/completions"},
};

static const char *const ignored[] = {
    "parallel_tool_calls", "reasoning_effort", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "verbosity", "prediction", "spaces_between_special_tokens", "length_penalty", "request_id", "detokenize", "mm_processor_kwargs",
};

static bool empty_container(const struct json_str *raw)
{
    for (size_t i = 1; i + 1 < raw->len; i++)
        if (!strchr(" \t\r\n", raw->data[i]))
            return false;
    return true;
}

/* The type member of {"type": "text"}. */
static bool is_text_format(const struct json_str *raw)
{
    struct json j;
    struct json_str key, value = {.data = "", .len = 0};
    bool text = false;
    json_init(&j, raw->data, raw->len);
    json_object(&j);
    while (json_next_key(&j, &key)) {
        if (json_str_eq(&key, "type") && json_peek(&j) == JSON_STRING) {
            json_string(&j, &value);
            text = json_str_eq(&value, "text");
        } else {
            json_skip(&j);
        }
    }
    json_fini(&j);
    return text;
}

static bool is_text_modality(const struct json_str *raw)
{
    struct json j;
    struct json_str item = {.data = "", .len = 0};
    bool text = true;
    json_init(&j, raw->data, raw->len);
    if (json_peek(&j) == JSON_ARRAY && json_array(&j) == 0)
        while (json_next_item(&j))
            text = json_peek(&j) == JSON_STRING && json_string(&j, &item) == 0 && json_str_eq(&item, "text") && text;
    text = text && json_end(&j) >= 0;
    json_fini(&j);
    return text;
}

static bool is_harmless(enum harmless harmless, enum json_type type, const struct json_str *raw)
{
    switch (harmless) {
    case NOTHING: return false;
    case FALSE_ONLY: return type == JSON_BOOL && raw->data[0] == 'f';
    case ZERO_ONLY: return (type == JSON_NUMBER && raw->len == 1 && raw->data[0] == '0') || (type == JSON_BOOL && raw->data[0] == 'f');
    case EMPTY_ONLY: return (type == JSON_STRING && raw->len == 2) || ((type == JSON_ARRAY || type == JSON_OBJECT) && empty_container(raw));
    case TEXT_FORMAT: return type == JSON_OBJECT && is_text_format(raw);
    case TOOL_CHOICE: return type == JSON_STRING && (json_str_eq(raw, "\"none\"") || json_str_eq(raw, "\"auto\""));
    case TEXT_MODALITY: return type == JSON_ARRAY && is_text_modality(raw);
    }
    return false;
}

static int check_refused(struct parse *p, const struct refused *field)
{
    struct json_str raw;
    enum json_type type = json_peek(&p->j);
    if (type == JSON_NULL)
        return json_null(&p->j) < 0 ? parse_broken(p) : 1;
    if (json_raw(&p->j, &raw) < 0)
        return parse_broken(p);
    if (!is_harmless(field->harmless, type, &raw))
        return api_error_set(p->err, 400, field->name, "unsupported_parameter", "%s is not supported here: %s", field->name, field->allowed);
    if (strcmp(field->name, "tool_choice") == 0 && json_str_eq(&raw, "\"none\""))
        p->tools_off = true;
    return 1;
}

int parse_unsupported(struct parse *p, const struct json_str *name)
{
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++)
        if (json_str_eq(name, refused[i].name))
            return check_refused(p, &refused[i]);
    for (size_t i = 0; i < sizeof(ignored) / sizeof(ignored[0]); i++)
        if (json_str_eq(name, ignored[i]))
            return json_skip(&p->j) < 0 ? parse_broken(p) : 1;
    return 0;
}
