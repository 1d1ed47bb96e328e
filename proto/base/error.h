/* A human-readable reason that goes with a negative errno. The caller owns the storage; functions that take one
 * write it on failure only and accept NULL. The text names the field, the value and what is allowed. */
#pragma once

struct error {
    char text[512];
};

/* Formats the reason (truncated to fit) and returns `code`, so that `return error_set(err, -EINVAL, ...)` works. */
int error_set(struct error *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
