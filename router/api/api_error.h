/* Why a request is refused: everything that OpenAI's error object says. Plain data; the first error wins. */
#pragma once
#include "proto/base/buf.h"
#include "proto/base/json_write.h"
#include <stdbool.h>

struct api_error {
    int status;        /* HTTP; 0: no error */
    char param[64];    /* the field; "": null */
    const char *code;  /* static; NULL: null */
    char message[600];
};

/* Returns -EINVAL, so that `return api_error_set(...)` works. `param` may be NULL and is cut to fit. */
int api_error_set(struct api_error *err, int status, const char *param, const char *code, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));
/* The object {"error": {...}}. */
void api_error_write(const struct api_error *err, struct json_writer *w);
