/* Equal pieces of device memory, cut from slabs: on a GPU each allocation is a call that may wait for the device, and giving one back always does. A piece that is given back is handed out
 * again at once: whoever uses a piece does so in the order of one stream, or sees to an event.
 *
 * A slab is allocated only when no other has a free piece, so there are never more of them than the most pieces ever in use at a time fill. Some that have become empty are kept until somebody wants
 * their memory (device_slabs_trim), so that pieces that come and go do not allocate and free in turn.
 *
 * Owner thread only. Host memory: about 50 bytes a slab. */
#pragma once
#include "kernels/device.h"

enum { DEVICE_SLAB_PIECES_MAX = 64 };

struct device_slabs;
struct device_slab;

struct device_piece {
    uint8_t *memory;          /* 64-byte aligned when piece_bytes is a multiple of 64; NULL: none */
    struct device_slab *slab; /* it is of */
};

/* 1 <= pieces <= DEVICE_SLAB_PIECES_MAX of piece_bytes > 0 a slab; at most `spares` empty slabs are kept. -ENOMEM. */
int device_slabs_create(const struct device_ops *dev, struct device *device, enum mem_tag tag, size_t piece_bytes, int pieces, int spares, struct device_slabs **ret_slabs);
void device_slabs_free(struct device_slabs *slabs); /* NULL is fine; asserts that all pieces are back */
/* Contents undefined. -ENOMEM. */
int device_slabs_take(struct device_slabs *slabs, struct device_piece *ret_piece);
void device_slabs_give(struct device_slabs *slabs, struct device_piece piece); /* without memory: nothing happens */
/* Bytes of slabs with pieces in use, and of the empty ones. NULL: none. */
size_t device_slabs_used(const struct device_slabs *slabs);
size_t device_slabs_spare(const struct device_slabs *slabs);
/* Gives the empty ones back. NULL is fine. */
void device_slabs_trim(struct device_slabs *slabs);
