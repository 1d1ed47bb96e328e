/* Reading the parts of a tokenizer.json. Each part is an object whose "type" may stand anywhere in it, so its fields are found first, as raw text, and
 * read in the order that the type asks for. */
#pragma once
#include "formats/json.h"
#include "router/text/tokenizer_private.h"

#define PART_TYPE_MAX 48

struct json_part {
    const char *name;  /* in error texts */
    const char *base;  /* of the whole text, so that errors carry its byte position */
    struct error *err;
};

/* All return 0 or a negative errno with the reason set. Fields that are absent have data NULL; absent and null give the fallback, or -EINVAL with
 * `what` where there is none. */
int part_fail(struct json_part *p, const char *what); /* -EINVAL */
int part_unsupported(struct json_part *p, const char *type); /* -ENOTSUP */
int part_fields(struct json_part *p, const struct json_str *text, const char *const names[], struct json_str ret_fields[], size_t n);
/* A NUL-terminated copy that the caller frees. */
int part_string(struct json_part *p, const struct json_str *field, const char *what, char **ret_text, size_t *ret_len);
int part_bool(struct json_part *p, const struct json_str *field, bool fallback, const char *what, bool *ret_value);
int part_int(struct json_part *p, const struct json_str *field, int64_t fallback, const char *what, int64_t *ret_value);
int part_type(struct json_part *p, const struct json_str *type, char ret_type[PART_TYPE_MAX]);
typedef int part_item_fn(struct json_part *p, const struct json_str *item, void *arg);
int part_items(struct json_part *p, const struct json_str *field, const char *what, part_item_fn *take, void *arg);

int json_read_normalizer(struct json_part *p, const struct json_str *text, struct normalizer *norm);
/* *ret_byte_level: the pieces are bytes. */
int json_read_pretokenizer(struct json_part *p, const struct json_str *text, struct pretokenizer *pt, bool *ret_byte_level);
int json_read_post_processor(struct json_part *p, const struct json_str *text, struct tokenizer *tok);
/* Gives every token the bytes it decodes to. `text` NULL: no decoder. */
int json_read_decoder(struct json_part *p, const struct json_str *text, struct tokenizer *tok);
