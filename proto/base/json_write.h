/* Writes JSON into a buf. Not thread-safe. Commas are placed by the writer; nesting is at most 32. Errors are kept in the writer
 * (the first one wins) and reported by json_write_end, so that call sites need no checks: -ENOBUFS and -ENOMEM from the buf, -EINVAL for
 * a value without a key, a wrong or missing end, and too deep nesting. */
#pragma once
#include "proto/base/buf.h"
#include <stdbool.h>

struct json_writer {
    struct buf *out; /* borrowed */
    int error;       /* first negative errno, or 0 */
    uint32_t first;  /* bit d-1: the next value of the container at depth d is the first */
    uint32_t object; /* bit d-1: the container at depth d is an object */
    int depth;       /* open containers */
    bool after_key;
};

void json_write_begin(struct json_writer *w, struct buf *out);
int json_write_end(struct json_writer *w); /* 0, or the first error */
void json_write_object(struct json_writer *w);
void json_write_object_end(struct json_writer *w);
void json_write_array(struct json_writer *w);
void json_write_array_end(struct json_writer *w);
void json_write_key(struct json_writer *w, const char *key);
/* n bytes of text; ill-formed UTF-8 is written as U+FFFD, so that the output is always valid JSON. */
void json_write_str_n(struct json_writer *w, const char *s, size_t n);
void json_write_str(struct json_writer *w, const char *s);
void json_write_int(struct json_writer *w, int64_t v);
void json_write_double(struct json_writer *w, double v); /* shortest that reads back; NaN and infinities as null */
void json_write_bool(struct json_writer *w, bool v);
void json_write_null(struct json_writer *w);
/* The text of a finite double as json_write_double writes it; returns its length. */
enum { JSON_DOUBLE_TEXT = 32 };
int json_double_text(double v, char text[JSON_DOUBLE_TEXT]);
/* n bytes that are JSON already. */
void json_write_raw(struct json_writer *w, const char *json, size_t n);
/* key and value in one call */
void json_write_kstr(struct json_writer *w, const char *key, const char *s);
void json_write_kint(struct json_writer *w, const char *key, int64_t v);
void json_write_kdouble(struct json_writer *w, const char *key, double v);
void json_write_kbool(struct json_writer *w, const char *key, bool v);
void json_write_knull(struct json_writer *w, const char *key);
void json_write_kobject(struct json_writer *w, const char *key); /* the value's beginning */
void json_write_karray(struct json_writer *w, const char *key);
