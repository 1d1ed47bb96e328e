/* Many copies by one call of the driver (cudaMemcpyBatchAsync), where there is one, else one after the other. A loop of copies costs 3 us each, which pieces of less than a MiB do not hide: 96 KiB in
 * batches were measured at 38 GB/s on an H200 with CUDA 13.0, in a loop at 19; 192 KiB at 44 and 28. */
#include "kernels/cuda/submit.h"
#include <errno.h>

enum { BATCH_PIECES = 256 /* of one call of the driver */ };

struct batch {
    struct stream *stream;
    void *dsts[BATCH_PIECES];
    const void *srcs[BATCH_PIECES];
    size_t bytes[BATCH_PIECES];
    size_t n;
};

static int in_a_loop(const struct batch *b)
{
    int r = 0;
    for (size_t i = 0; r == 0 && i < b->n; i++)
        r = submit_copy(b->stream, b->dsts[i], b->srcs[i], b->bytes[i]);
    return r;
}

static int flush(struct batch *b)
{
    struct device *device = b->stream->device;
    int r = b->n < 2 || device->no_batches ? in_a_loop(b) : submit_copies(b->stream, b->dsts, b->srcs, b->bytes, b->n);
    if (r == -ENOTSUP || r == -EINVAL) { /* a driver that does not take them; what is wrong with a copy itself the loop will say */
        r = in_a_loop(b);
        device->no_batches |= r == 0;
    }
    b->n = 0;
    return r;
}

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* In pieces that do not cross what was registered. */
static int add(struct batch *b, const struct device_copy *copy)
{
    struct device *device = b->stream->device;
    uint8_t *dst = copy->dst;
    const uint8_t *src = copy->src;
    int r = 0;
    for (size_t at = 0, n; r == 0 && at < copy->bytes; at += n) {
        n = min_size(copy->bytes - at, min_size(device_registered_left(device, dst + at), device_registered_left(device, src + at)));
        b->dsts[b->n] = dst + at;
        b->srcs[b->n] = src + at;
        b->bytes[b->n] = n;
        if (++b->n == BATCH_PIECES)
            r = flush(b);
    }
    return r;
}

int stream_copy_batch(struct stream *s, const struct device_copy *copies, int n)
{
    struct batch b;
    int r = 0;
    b.stream = s;
    b.n = 0;
    for (int i = 0; r == 0 && i < n; i++)
        r = add(&b, &copies[i]);
    return r == 0 ? flush(&b) : r;
}
