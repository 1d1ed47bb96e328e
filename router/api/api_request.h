/* The body of a chat, completion or tokenize request, parsed and checked. Parsing touches nothing shared, so it runs on any thread.
 *
 * Every bad value is refused with the field's name and what is allowed. Fields that would change the answer and are not supported are refused
 * too; fields that nobody knows are ignored and listed in `unknown`. A field with the value null counts as absent. */
#pragma once
#include "formats/json.h"
#include "proto/base/buf.h"
#include "router/api/api_error.h"
#include "router/route/route.h"
#include "router/text/stop_text.h"
#include "router/text/tokenizer.h"
#include <stdbool.h>
#include <stdint.h>

enum {
    API_N_MAX = 64,                /* answers to one prompt */
    API_PROMPTS_MAX = 128,         /* prompts in one completion request */
    API_CHOICES_MAX = 128,         /* prompts x n */
    API_STOPS_MAX = 32,
    API_STOP_IDS_MAX = 256,
    API_LOGIT_BIAS_MAX = 1024,
    API_SALT_MAX = 1024,
    API_MESSAGES_MAX = 65536,
    API_UNKNOWN_MAX = 8,
    API_COMPLETION_MAX_TOKENS = 16, /* OpenAI's default for completions */
};

enum api_kind { API_CHAT = 1, API_COMPLETION = 2, API_TOKENIZE_CHAT = 4, API_TOKENIZE = 8 };

struct api_prompt { /* text or token ids */
    char *text;     /* owned; NULL: ids */
    size_t len;
    uint32_t *ids;  /* owned */
    uint32_t n_ids;
};

struct api_request {
    enum api_kind kind;
    char *model;               /* NULL: not given */
    /* chat */
    struct buf messages;       /* JSON array for the template: roles checked, content flattened, special tokens' text neutralized */
    struct buf template_vars;  /* members of a JSON object, without its braces: documents, chat_template_kwargs */
    struct buf last_content;   /* of the last message, as it stands in `messages` before escaping */
    bool add_generation_prompt, continue_final_message;
    /* completions */
    struct api_prompt *prompts; /* [n_prompts] */
    uint32_t n_prompts;
    bool echo;
    /* both */
    bool add_special_tokens;
    bool parse_special, return_token_strs; /* tokenize */
    int64_t max_tokens;        /* -1: not given */
    int64_t min_tokens, n, seed;
    bool has_seed, stream, include_usage, ignore_eos, skip_special_tokens, include_stop, return_token_ids, no_cache;
    struct route_sampling sampling; /* logit_bias is owned */
    struct stop_string stops[API_STOPS_MAX]; /* texts are owned */
    uint32_t n_stops;
    uint32_t stop_ids[API_STOP_IDS_MAX];
    uint32_t n_stop_ids;
    struct buf cache_salt;
    char unknown[API_UNKNOWN_MAX][64]; /* names of fields that were ignored */
    uint32_t n_unknown;
};

static inline bool api_kind_is_chat(enum api_kind kind)
{
    return kind == API_CHAT || kind == API_TOKENIZE_CHAT;
}

/* True if the body is an object with a member `name`; says nothing about the rest. */
bool api_request_has(const char *body, size_t len, const char *name);
/* `tok` gives the vocabulary's size and the special tokens. On failure err says why and the request is empty. */
int api_request_parse(enum api_kind kind, const char *body, size_t len, const struct tokenizer *tok, struct api_request *ret, struct api_error *err);
void api_request_fini(struct api_request *request);
