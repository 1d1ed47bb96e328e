/* The prompt of /v1/completions: a string, a list of strings, a list of token ids, or a list of lists of token ids. */
#include "router/api/api_request_private.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char must_be[] = "a string, a list of strings, a list of token ids or a list of lists of token ids";

static struct api_prompt *new_prompt(struct parse *p)
{
    struct api_request *r = p->r;
    if (r->n_prompts == API_PROMPTS_MAX) {
        api_error_set(p->err, 400, "prompt", "invalid_value", "prompt may hold at most %d prompts", API_PROMPTS_MAX);
        return NULL;
    }
    if (!r->prompts)
        r->prompts = calloc(API_PROMPTS_MAX, sizeof(*r->prompts));
    if (!r->prompts) {
        api_error_set(p->err, 503, NULL, NULL, "out of memory");
        return NULL;
    }
    return &r->prompts[r->n_prompts++];
}

static int parse_text_prompt(struct parse *p)
{
    struct json_str text;
    struct api_prompt *prompt = new_prompt(p);
    if (!prompt || parse_text(p, "prompt", &text) < 0)
        return -EINVAL;
    prompt->text = malloc(text.len + 1);
    if (!prompt->text)
        return api_error_set(p->err, 503, NULL, NULL, "out of memory");
    memcpy(prompt->text, text.data, text.len);
    prompt->text[text.len] = 0;
    prompt->len = text.len;
    return 0;
}

static int add_id(struct parse *p, struct api_prompt *prompt, uint32_t *cap)
{
    int64_t id;
    if (parse_int(p, "prompt", 0, (int64_t)tokenizer_n_vocab(p->tok) - 1, &id) < 0)
        return -EINVAL;
    if (prompt->n_ids == *cap) {
        uint32_t bigger = *cap ? *cap * 2 : 256;
        uint32_t *ids = realloc(prompt->ids, bigger * sizeof(*ids));
        if (!ids)
            return api_error_set(p->err, 503, NULL, NULL, "out of memory");
        prompt->ids = ids;
        *cap = bigger;
    }
    prompt->ids[prompt->n_ids++] = (uint32_t)id;
    return 0;
}

/* The items of an array that was opened, the first of them already found: token ids to its end. */
static int parse_ids(struct parse *p)
{
    struct api_prompt *prompt = new_prompt(p);
    uint32_t cap = 0;
    if (!prompt)
        return -EINVAL;
    do {
        if (add_id(p, prompt, &cap) < 0)
            return -EINVAL;
    } while (json_next_item(&p->j));
    return 0;
}

static int parse_item(struct parse *p, enum json_type type)
{
    if (json_peek(&p->j) != type)
        return parse_wrong_type(p, "prompt", must_be);
    if (type == JSON_STRING)
        return parse_text_prompt(p);
    if (type != JSON_ARRAY)
        return parse_wrong_type(p, "prompt", must_be);
    json_array(&p->j);
    if (json_next_item(&p->j))
        return parse_ids(p);
    return p->j.error ? parse_broken(p) : api_error_set(p->err, 400, "prompt", "invalid_value", "prompt holds an empty list of token ids");
}

int parse_prompt(struct parse *p)
{
    enum json_type type = json_peek(&p->j);
    p->has_prompt = true;
    if (type == JSON_STRING)
        return parse_text_prompt(p);
    if (type != JSON_ARRAY)
        return parse_wrong_type(p, "prompt", must_be);
    json_array(&p->j);
    if (!json_next_item(&p->j))
        return p->j.error ? parse_broken(p) : api_error_set(p->err, 400, "prompt", "invalid_value", "prompt must not be empty");
    type = json_peek(&p->j);
    int rc;
    if (type == JSON_NUMBER) {
        rc = parse_ids(p);
    } else {
        do
            rc = parse_item(p, type);
        while (rc >= 0 && json_next_item(&p->j));
    }
    return rc >= 0 && p->j.error ? parse_broken(p) : rc;
}
