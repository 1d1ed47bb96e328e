#include "deploy/sse.h"

#include "formats/json.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { SSE_LINE_MAX = 1 << 20 };

void sse_reader_init(struct sse_reader *r, void (*on_text)(const char *text, size_t len, void *arg), void *arg)
{
    memset(r, 0, sizeof(*r));
    buf_init(&r->line, SSE_LINE_MAX);
    buf_init(&r->error, SSE_LINE_MAX);
    r->usage.bytes_loaded = r->usage.bytes_attended = r->usage.bytes_missed = -1;
    r->on_text = on_text;
    r->arg = arg;
}

void sse_reader_fini(struct sse_reader *r)
{
    buf_fini(&r->line);
    buf_fini(&r->error);
}

static void copy_str(char *dst, size_t size, const struct json_str *s)
{
    snprintf(dst, size, "%.*s", (int)(s->len < size ? s->len : size - 1), s->data);
}

static void read_delta(struct sse_reader *r, struct json *j)
{
    struct json_str key, text;
    json_object(j);
    while (json_next_key(j, &key)) {
        if (json_str_eq(&key, "content") && json_peek(j) == JSON_STRING) {
            if (json_string(j, &text) == 0 && text.len > 0)
                r->on_text(text.data, text.len, r->arg);
        } else {
            json_skip(j);
        }
    }
}

static void read_choices(struct sse_reader *r, struct json *j)
{
    struct json_str key, text;
    json_array(j);
    while (json_next_item(j)) {
        json_object(j);
        while (json_next_key(j, &key)) {
            if (json_str_eq(&key, "delta")) {
                read_delta(r, j);
            } else if (json_str_eq(&key, "finish_reason") && json_peek(j) == JSON_STRING) {
                if (json_string(j, &text) == 0)
                    copy_str(r->finish_reason, sizeof(r->finish_reason), &text);
            } else {
                json_skip(j);
            }
        }
    }
}

static void read_pool_usage(struct sse_reader *r, struct json *j)
{
    struct json_str key, text;
    json_object(j);
    while (json_next_key(j, &key)) {
        if (json_str_eq(&key, "bytes_loaded"))
            json_int(j, &r->usage.bytes_loaded);
        else if (json_str_eq(&key, "bytes_attended"))
            json_int(j, &r->usage.bytes_attended);
        else if (json_str_eq(&key, "bytes_missed"))
            json_int(j, &r->usage.bytes_missed);
        else if (json_str_eq(&key, "worker") && json_peek(j) == JSON_STRING) {
            if (json_string(j, &text) == 0)
                copy_str(r->usage.worker, sizeof(r->usage.worker), &text);
        } else {
            json_skip(j);
        }
    }
}

static void read_prompt_details(struct sse_reader *r, struct json *j)
{
    struct json_str key;
    json_object(j);
    while (json_next_key(j, &key)) {
        if (json_str_eq(&key, "cached_tokens"))
            json_int(j, &r->usage.cached_tokens);
        else
            json_skip(j);
    }
}

static void read_usage(struct sse_reader *r, struct json *j)
{
    struct json_str key;
    if (json_peek(j) != JSON_OBJECT) {
        json_skip(j);
        return;
    }
    json_object(j);
    while (json_next_key(j, &key)) {
        if (json_str_eq(&key, "prompt_tokens"))
            json_int(j, &r->usage.prompt_tokens);
        else if (json_str_eq(&key, "completion_tokens"))
            json_int(j, &r->usage.completion_tokens);
        else if (json_str_eq(&key, "prompt_tokens_details") && json_peek(j) == JSON_OBJECT)
            read_prompt_details(r, j);
        else if (json_str_eq(&key, "tidepool") && json_peek(j) == JSON_OBJECT)
            read_pool_usage(r, j);
        else
            json_skip(j);
    }
    r->has_usage = true;
}

static void read_error(struct sse_reader *r, struct json *j)
{
    struct json_str key, text;
    if (json_peek(j) != JSON_OBJECT) {
        json_skip(j);
        return;
    }
    json_object(j);
    while (json_next_key(j, &key)) {
        if (json_str_eq(&key, "message") && json_peek(j) == JSON_STRING) {
            if (json_string(j, &text) == 0) {
                buf_clear(&r->error);
                buf_append(&r->error, text.data, text.len);
            }
        } else {
            json_skip(j);
        }
    }
}

static int read_event(struct sse_reader *r, const char *text, size_t len)
{
    struct json j;
    struct json_str key;
    json_init(&j, text, len);
    json_object(&j);
    while (json_next_key(&j, &key)) {
        if (json_str_eq(&key, "choices"))
            read_choices(r, &j);
        else if (json_str_eq(&key, "usage"))
            read_usage(r, &j);
        else if (json_str_eq(&key, "error"))
            read_error(r, &j);
        else
            json_skip(&j);
    }
    int status = json_end(&j) < 0 ? -EBADMSG : 0;
    json_fini(&j);
    return status;
}

void sse_reader_error_body(struct sse_reader *r, const char *data, size_t len)
{
    if (read_event(r, data, len) < 0 || r->error.len == 0) {
        buf_clear(&r->error);
        buf_append(&r->error, data, len < 300 ? len : 300);
    }
}

static int read_line(struct sse_reader *r)
{
    const char *line = buf_cstr(&r->line);
    size_t len = r->line.len;
    if (len > 0 && line[len - 1] == '\r')
        len--;
    if (len < 6 || memcmp(line, "data: ", 6) != 0)
        return 0;
    if (len == 12 && memcmp(line + 6, "[DONE]", 6) == 0) {
        r->finished = true;
        return 0;
    }
    return read_event(r, line + 6, len - 6);
}

int sse_reader_feed(struct sse_reader *r, const char *data, size_t len)
{
    while (len > 0) {
        const char *end = memchr(data, '\n', len);
        size_t n = end ? (size_t)(end - data) : len;
        int status = buf_append(&r->line, data, n);
        if (status < 0)
            return status;
        if (!end)
            return 0;
        status = read_line(r);
        buf_clear(&r->line);
        if (status < 0)
            return status;
        data += n + 1;
        len -= n + 1;
    }
    return 0;
}
