/* Pull parser for JSON text (RFC 8259), strict: no duplicate keys in an object that is walked with json_next_key, no bad UTF-8, no lone surrogates, no numbers beyond
 * double's range, no trailing bytes, nesting at most 64. Works on memory; nothing is copied but strings with escapes. Errors carry the byte
 * position. Not thread-safe. Used for request bodies, config.json, tokenizer.json, safetensors headers and the answers of a helper process.
 *
 *     struct json j; json_init(&j, text, n);
 *     json_object(&j);
 *     while (json_next_key(&j, &key)) {            // false at the closing brace or after an error
 *         if (json_str_eq(&key, "n")) json_int(&j, &n); else json_skip(&j);
 *     }
 *     if (json_end(&j) < 0) report(j.error_text, j.error_pos);
 *
 * After the first error every call does nothing and returns it, so checks may wait until json_end. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum json_type { JSON_ERROR, JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };

struct json_str {
    const char *data; /* UTF-8, not NUL-terminated; valid until json_fini */
    size_t len;
};

struct json {
    const char *text;
    size_t len, pos;
    int error;              /* negative errno, or 0 */
    const char *error_text; /* static */
    size_t error_pos;       /* byte offset */
    struct json_level *levels; /* open containers, private */
    int depth;
    struct json_chunk *strings; /* decoded strings, freed by json_fini */
};

void json_init(struct json *j, const char *text, size_t len);
void json_fini(struct json *j);
/* Type of the next value without consuming it. */
enum json_type json_peek(struct json *j);
int json_object(struct json *j);                           /* consumes '{' */
bool json_next_key(struct json *j, struct json_str *ret_key); /* then consume the value */
int json_array(struct json *j);                            /* consumes '[' */
bool json_next_item(struct json *j);                       /* then consume the value */
int json_string(struct json *j, struct json_str *ret_str);
int json_int(struct json *j, int64_t *ret_value);          /* -ERANGE beyond int64; accepts 1.0 and 1e3 */
int json_double(struct json *j, double *ret_value);
int json_bool(struct json *j, bool *ret_value);
int json_null(struct json *j);
int json_skip(struct json *j);                             /* any value, validated */
/* The next value's text, validated and consumed: borrowed from the input. */
int json_raw(struct json *j, struct json_str *ret_text);
int json_end(struct json *j);                              /* -EINVAL unless everything was consumed */
bool json_str_eq(const struct json_str *s, const char *text);
/* Reports an error of the caller's own at the present position (e.g. "must be a string"); returns -EINVAL. */
int json_fail(struct json *j, const char *static_text);
