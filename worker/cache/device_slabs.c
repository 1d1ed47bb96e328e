#include "worker/cache/device_slabs.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <stdlib.h>

struct device_slab {
    uint8_t *memory;
    uint64_t vacant;                   /* a bit a piece */
    int n_used;
    struct device_slab *before, *after; /* among those with vacant pieces, or (after) the empty ones */
};

struct device_slabs {
    const struct device_ops *dev;
    struct device *device;
    enum mem_tag tag;
    size_t piece_bytes;
    int n_pieces;
    int n_used;                        /* slabs with pieces in use */
    struct device_slab *open;          /* of them those with vacant pieces */
    struct device_slab *spare;         /* those without */
    int n_spare, spares_max;
};

int device_slabs_create(const struct device_ops *dev, struct device *device, enum mem_tag tag, size_t piece_bytes, int pieces, int spares, struct device_slabs **ret_slabs)
{
    ASSERT(piece_bytes > 0 && pieces >= 1 && pieces <= DEVICE_SLAB_PIECES_MAX);
    struct device_slabs *s = calloc(1, sizeof(*s));
    if (!s)
        return -ENOMEM;
    *s = (struct device_slabs){.dev = dev, .device = device, .tag = tag, .piece_bytes = piece_bytes, .n_pieces = pieces, .spares_max = spares};
    *ret_slabs = s;
    return 0;
}

void device_slabs_free(struct device_slabs *s)
{
    if (!s)
        return;
    ASSERT(s->n_used == 0);
    device_slabs_trim(s);
    free(s);
}

static size_t slab_bytes(const struct device_slabs *s)
{
    return (size_t)s->n_pieces * s->piece_bytes;
}

static void open_link(struct device_slabs *s, struct device_slab *slab)
{
    slab->before = NULL;
    slab->after = s->open;
    if (s->open)
        s->open->before = slab;
    s->open = slab;
}

static void open_unlink(struct device_slabs *s, struct device_slab *slab)
{
    *(slab->before ? &slab->before->after : &s->open) = slab->after;
    if (slab->after)
        slab->after->before = slab->before;
}

static int slab_create(struct device_slabs *s, struct device_slab **ret_slab)
{
    struct device_slab *slab = calloc(1, sizeof(*slab));
    void *memory;
    if (!slab)
        return -ENOMEM;
    const int r = s->dev->alloc(s->device, s->tag, slab_bytes(s), &memory);
    if (r < 0) {
        free(slab);
        return r;
    }
    slab->memory = memory;
    slab->vacant = ~(uint64_t)0 >> (DEVICE_SLAB_PIECES_MAX - s->n_pieces);
    *ret_slab = slab;
    return 0;
}

static void slab_free(struct device_slabs *s, struct device_slab *slab)
{
    s->dev->free(s->device, slab->memory);
    free(slab);
}

static struct device_slab *spare_pop(struct device_slabs *s)
{
    struct device_slab *slab = s->spare;
    s->spare = slab->after;
    s->n_spare--;
    return slab;
}

/* One that has a vacant piece is open and used from here on. */
static int slab_open(struct device_slabs *s)
{
    struct device_slab *slab = s->spare ? spare_pop(s) : NULL;
    const int r = slab ? 0 : slab_create(s, &slab);
    if (r < 0)
        return r;
    s->n_used++;
    open_link(s, slab);
    return 0;
}

int device_slabs_take(struct device_slabs *s, struct device_piece *ret_piece)
{
    const int r = s->open ? 0 : slab_open(s);
    if (r < 0)
        return r;
    struct device_slab *slab = s->open;
    const int i = __builtin_ctzll(slab->vacant);
    slab->vacant &= slab->vacant - 1;
    slab->n_used++;
    if (!slab->vacant)
        open_unlink(s, slab);
    *ret_piece = (struct device_piece){.memory = slab->memory + (size_t)i * s->piece_bytes, .slab = slab};
    return 0;
}

void device_slabs_give(struct device_slabs *s, struct device_piece piece)
{
    struct device_slab *slab = piece.slab;
    if (!piece.memory)
        return;
    const uint64_t bit = (uint64_t)1 << ((size_t)(piece.memory - slab->memory) / s->piece_bytes);
    ASSERT(slab->n_used > 0 && !(slab->vacant & bit));
    if (!slab->vacant)
        open_link(s, slab);
    slab->vacant |= bit;
    if (--slab->n_used > 0)
        return;
    open_unlink(s, slab);
    s->n_used--;
    if (s->n_spare == s->spares_max) {
        slab_free(s, slab);
        return;
    }
    slab->after = s->spare;
    s->spare = slab;
    s->n_spare++;
}

size_t device_slabs_used(const struct device_slabs *s)
{
    return s ? (size_t)s->n_used * slab_bytes(s) : 0;
}

size_t device_slabs_spare(const struct device_slabs *s)
{
    return s ? (size_t)s->n_spare * slab_bytes(s) : 0;
}

void device_slabs_trim(struct device_slabs *s)
{
    while (s && s->spare)
        slab_free(s, spare_pop(s));
}
