/* Shared by the files that parse requests. */
#pragma once
#include "router/api/api_request.h"

struct parse {
    struct json j;
    struct api_request *r;
    struct api_error *err;
    const struct tokenizer *tok;
    bool model_wants_logprobs; /* chat: "logprobs": true */
    int64_t top_logprobs;      /* chat; -1: not given */
    int64_t best_of;
    bool has_stream_options, has_tools, tools_off, has_messages, has_prompt, add_generation_given, newer_max;
};

/* Value parsers. Each consumes the value that is next and returns 0, or sets the error and returns -EINVAL. `name` is the field as the client knows it. */
int parse_int(struct parse *p, const char *name, int64_t min, int64_t max, int64_t *ret);
int parse_double(struct parse *p, const char *name, double min, double max, double *ret);
int parse_bool(struct parse *p, const char *name, bool *ret);
int parse_text(struct parse *p, const char *name, struct json_str *ret);
/* "name must be <what>, not <what it is>". */
int parse_wrong_type(struct parse *p, const char *name, const char *must_be);
/* The JSON itself is broken: 400 with the position. */
int parse_broken(struct parse *p);
/* True if the next value is null, which is consumed. */
bool parse_is_null(struct parse *p);

/* -- api_messages.c -- */
int parse_messages(struct parse *p);
int parse_documents(struct parse *p);
int parse_template_kwargs(struct parse *p);
int parse_tools(struct parse *p);
/* -- api_prompt.c -- */
int parse_prompt(struct parse *p);
/* -- api_sampling.c -- */
int parse_stop(struct parse *p);
int parse_stop_token_ids(struct parse *p);
int parse_logit_bias(struct parse *p);
/* -- api_unsupported.c -- */
/* 1: the field is known and its value harmless (consumed); 0: not one of these; -EINVAL: it would change the answer. */
int parse_unsupported(struct parse *p, const struct json_str *name);
