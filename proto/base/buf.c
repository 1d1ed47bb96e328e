#include "proto/base/buf.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <stdarg.h>
#include <string.h>

enum { BUF_FIRST_CAP = 64 };

void buf_init(struct buf *b, size_t max)
{
    *b = (struct buf){.max = max};
}

void buf_fini(struct buf *b)
{
    free(b->data);
    buf_init(b, b->max);
}

/* One byte more than `cap` is allocated, so that buf_cstr always has room for its NUL. */
int buf_reserve(struct buf *b, size_t n)
{
    if (b->len > b->max || n > b->max - b->len)
        return -ENOBUFS;
    size_t need = b->len + n;
    if (need <= b->cap && b->data)
        return 0;
    size_t cap = b->cap < BUF_FIRST_CAP ? BUF_FIRST_CAP : b->cap;
    while (cap < need)
        cap = cap > SIZE_MAX / 2 ? need : cap * 2;
    if (cap > b->max)
        cap = b->max;
    if (cap == SIZE_MAX)
        return -ENOMEM;
    uint8_t *data = realloc(b->data, cap + 1);
    if (!data)
        return -ENOMEM;
    b->data = data;
    b->cap = cap;
    return 0;
}

int buf_append(struct buf *b, const void *data, size_t n)
{
    if (n == 0)
        return 0;
    int rc = buf_reserve(b, n);
    if (rc < 0)
        return rc;
    memcpy(b->data + b->len, data, n);
    b->len += n;
    return 0;
}

int buf_append_str(struct buf *b, const char *s)
{
    return buf_append(b, s, strlen(s));
}

int buf_printf(struct buf *b, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    va_list again;
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, fmt, args);
    int rc = n < 0 ? -EINVAL : buf_reserve(b, (size_t)n);
    if (rc == 0) {
        /* The NUL lands in the byte behind `cap`. */
        vsnprintf((char *)b->data + b->len, (size_t)n + 1, fmt, again);
        b->len += (size_t)n;
    }
    va_end(again);
    va_end(args);
    return rc;
}

void buf_consume(struct buf *b, size_t n)
{
    ASSERT(n <= b->len);
    if (n == 0)
        return;
    b->len -= n;
    if (b->len)
        memmove(b->data, b->data + n, b->len);
}

void buf_clear(struct buf *b)
{
    b->len = 0;
}

const char *buf_cstr(struct buf *b)
{
    if (!b->data)
        return "";
    b->data[b->len] = '\0';
    return (const char *)b->data;
}
