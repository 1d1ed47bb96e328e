/* A growable byte buffer with a limit. Not thread-safe. The owner calls buf_fini; a zeroed struct is an empty
 * buffer whose limit is 0, so buf_init comes first. After a failure the contents are as before. */
#pragma once
#include <stddef.h>
#include <stdint.h>

struct buf {
    uint8_t *data; /* [cap], owned */
    size_t len;    /* bytes in use */
    size_t cap;    /* bytes allocated */
    size_t max;    /* len never exceeds this */
};

void buf_init(struct buf *b, size_t max);
void buf_fini(struct buf *b); /* leaves an empty buffer with the same limit */
/* Makes room for n more bytes. -ENOBUFS beyond the limit, -ENOMEM. */
int buf_reserve(struct buf *b, size_t n);
int buf_append(struct buf *b, const void *data, size_t n);
int buf_append_str(struct buf *b, const char *s);
int buf_printf(struct buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Drops the first n bytes (n <= len). */
void buf_consume(struct buf *b, size_t n);
void buf_clear(struct buf *b);
/* The contents as a C string (a NUL is kept behind len, not counted); "" when empty. */
const char *buf_cstr(struct buf *b);
