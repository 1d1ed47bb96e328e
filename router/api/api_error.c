#include "router/api/api_error.h"
#include "router/http/http_exchange.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

int api_error_set(struct api_error *err, int status, const char *param, const char *code, const char *fmt, ...)
{
    if (err->status)
        return -EINVAL;
    err->status = status;
    err->code = code;
    snprintf(err->param, sizeof(err->param), "%s", param ? param : "");
    va_list args;
    va_start(args, fmt);
    vsnprintf(err->message, sizeof(err->message), fmt, args);
    va_end(args);
    return -EINVAL;
}

void api_error_write(const struct api_error *err, struct json_writer *w)
{
    json_write_object(w);
    json_write_kobject(w, "error");
    json_write_kstr(w, "message", err->message);
    json_write_kstr(w, "type", http_error_type(err->status));
    json_write_key(w, "param");
    err->param[0] ? json_write_str(w, err->param) : json_write_null(w);
    json_write_key(w, "code");
    err->code ? json_write_str(w, err->code) : json_write_null(w);
    json_write_object_end(w);
    json_write_object_end(w);
}
