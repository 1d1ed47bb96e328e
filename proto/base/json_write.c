#include "proto/base/json_write.h"
#include "proto/base/base_assert.h"
#include "proto/base/utf8.h"
#include <errno.h>
#include <math.h>
#include <string.h>

enum { JSON_WRITE_DEPTH_MAX = 32 };

void json_write_begin(struct json_writer *w, struct buf *out)
{
    *w = (struct json_writer){.out = out};
}

static void fail(struct json_writer *w, int error)
{
    if (w->error == 0)
        w->error = error;
}

int json_write_end(struct json_writer *w)
{
    if (w->depth != 0 || w->after_key)
        fail(w, -EINVAL);
    return w->error;
}

static void put(struct json_writer *w, const void *data, size_t n)
{
    if (w->error)
        return;
    int rc = buf_append(w->out, data, n);
    if (rc < 0)
        fail(w, rc);
}

static void put_str(struct json_writer *w, const char *s)
{
    put(w, s, strlen(s));
}

/* The bit of the container that is open now; only valid at depth > 0. */
static uint32_t depth_bit(const struct json_writer *w)
{
    return 1u << (w->depth - 1);
}

/* What stands before a value or a key: a comma, unless it is the first of its container. */
static void put_comma(struct json_writer *w)
{
    if (w->depth == 0)
        return;
    if (w->first & depth_bit(w))
        w->first &= ~depth_bit(w);
    else
        put_str(w, ",");
}

/* Inside an object a value needs its key first. */
static void begin_value(struct json_writer *w)
{
    if (w->error)
        return;
    if (w->after_key) {
        w->after_key = false;
        return;
    }
    if (w->depth > 0 && (w->object & depth_bit(w))) {
        fail(w, -EINVAL);
        return;
    }
    put_comma(w);
}

static void open_container(struct json_writer *w, bool object)
{
    begin_value(w);
    if (w->error)
        return;
    if (w->depth == JSON_WRITE_DEPTH_MAX) {
        fail(w, -EINVAL);
        return;
    }
    w->depth++;
    w->first |= depth_bit(w);
    w->object = object ? w->object | depth_bit(w) : w->object & ~depth_bit(w);
    put_str(w, object ? "{" : "[");
}

static void close_container(struct json_writer *w, bool object)
{
    if (w->error)
        return;
    if (w->depth == 0 || w->after_key || !!(w->object & depth_bit(w)) != object) {
        fail(w, -EINVAL);
        return;
    }
    w->depth--;
    put_str(w, object ? "}" : "]");
}

void json_write_object(struct json_writer *w)
{
    open_container(w, true);
}

void json_write_object_end(struct json_writer *w)
{
    close_container(w, true);
}

void json_write_array(struct json_writer *w)
{
    open_container(w, false);
}

void json_write_array_end(struct json_writer *w)
{
    close_container(w, false);
}

/* How many bytes at s can be copied as they are. */
static size_t plain_run(const uint8_t *s, size_t n)
{
    size_t i = 0;
    while (i < n) {
        if (s[i] < 0x20 || s[i] == '"' || s[i] == '\\')
            break;
        size_t len;
        if (utf8_next(s + i, n - i, &len) != UTF8_CHAR)
            break;
        i += len;
    }
    return i;
}

static void put_escaped(struct json_writer *w, uint8_t c)
{
    static const char *const names[0x20] = {
        ['\b'] = "\\b", ['\t'] = "\\t", ['\n'] = "\\n", ['\f'] = "\\f", ['\r'] = "\\r"};
    if (c == '"') {
        put_str(w, "\\\"");
    } else if (c == '\\') {
        put_str(w, "\\\\");
    } else if (c < 0x20 && names[c]) {
        put_str(w, names[c]);
    } else if (c < 0x20) {
        char text[8];
        snprintf(text, sizeof(text), "\\u%04x", c);
        put_str(w, text);
    } else {
        put_str(w, "\xEF\xBF\xBD");
    }
}

static void put_quoted(struct json_writer *w, const char *s, size_t n)
{
    const uint8_t *p = (const uint8_t *)s;
    put_str(w, "\"");
    for (size_t i = 0; i < n;) {
        size_t run = plain_run(p + i, n - i);
        put(w, p + i, run);
        i += run;
        if (i < n)
            put_escaped(w, p[i++]);
    }
    put_str(w, "\"");
}

void json_write_key(struct json_writer *w, const char *key)
{
    if (w->error)
        return;
    if (w->depth == 0 || w->after_key || !(w->object & depth_bit(w))) {
        fail(w, -EINVAL);
        return;
    }
    put_comma(w);
    put_quoted(w, key, strlen(key));
    put_str(w, ":");
    w->after_key = true;
}

void json_write_str_n(struct json_writer *w, const char *s, size_t n)
{
    begin_value(w);
    put_quoted(w, s, n);
}

void json_write_str(struct json_writer *w, const char *s)
{
    json_write_str_n(w, s, strlen(s));
}

void json_write_int(struct json_writer *w, int64_t v)
{
    char text[32];
    snprintf(text, sizeof(text), "%lld", (long long)v);
    json_write_raw(w, text, strlen(text));
}

int json_double_text(double v, char text[JSON_DOUBLE_TEXT])
{
    int n = 0;
    for (int digits = 1; digits <= 17; digits++) {
        n = snprintf(text, JSON_DOUBLE_TEXT, "%.*g", digits, v);
        /* Most doubles need 1 to 9 digits or all 17; trying the rest costs little beside the write. */
        if (strtod(text, NULL) == v)
            break;
    }
    return n;
}

void json_write_double(struct json_writer *w, double v)
{
    if (!isfinite(v)) {
        json_write_null(w);
        return;
    }
    char text[JSON_DOUBLE_TEXT];
    int n = json_double_text(v, text);
    json_write_raw(w, text, (size_t)n);
}

void json_write_bool(struct json_writer *w, bool v)
{
    json_write_raw(w, v ? "true" : "false", v ? 4 : 5);
}

void json_write_null(struct json_writer *w)
{
    json_write_raw(w, "null", 4);
}

void json_write_raw(struct json_writer *w, const char *json, size_t n)
{
    begin_value(w);
    put(w, json, n);
}

void json_write_kstr(struct json_writer *w, const char *key, const char *s)
{
    json_write_key(w, key);
    json_write_str(w, s);
}

void json_write_kint(struct json_writer *w, const char *key, int64_t v)
{
    json_write_key(w, key);
    json_write_int(w, v);
}

void json_write_kdouble(struct json_writer *w, const char *key, double v)
{
    json_write_key(w, key);
    json_write_double(w, v);
}

void json_write_kbool(struct json_writer *w, const char *key, bool v)
{
    json_write_key(w, key);
    json_write_bool(w, v);
}

void json_write_knull(struct json_writer *w, const char *key)
{
    json_write_key(w, key);
    json_write_null(w);
}

void json_write_kobject(struct json_writer *w, const char *key)
{
    json_write_key(w, key);
    json_write_object(w);
}

void json_write_karray(struct json_writer *w, const char *key)
{
    json_write_key(w, key);
    json_write_array(w);
}
