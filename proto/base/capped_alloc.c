#include "proto/base/capped_alloc.h"
#include "proto/base/base_assert.h"
#include <stdalign.h>

/* Stands before each piece, so that freeing can give its bytes back to the allowance. It is counted too: a message of many
 * empty strings costs headers, not contents. */
struct piece {
    alignas(max_align_t) size_t bytes; /* header included */
};

static void *capped_malloc(void *data, size_t n)
{
    struct capped_alloc *alloc = data;
    if (n > SIZE_MAX - sizeof(struct piece))
        return NULL;
    size_t bytes = sizeof(struct piece) + n;
    if (bytes > alloc->max - alloc->used)
        return NULL;
    struct piece *piece = malloc(bytes);
    if (!piece)
        return NULL;
    piece->bytes = bytes;
    alloc->used += bytes;
    return piece + 1;
}

static void capped_free(void *data, void *memory)
{
    struct capped_alloc *alloc = data;
    if (!memory)
        return;
    struct piece *piece = (struct piece *)memory - 1;
    ASSERT(piece->bytes <= alloc->used);
    alloc->used -= piece->bytes;
    free(piece);
}

void capped_alloc_init(struct capped_alloc *alloc, size_t max)
{
    *alloc = (struct capped_alloc){
        .pb = {.alloc = capped_malloc, .free = capped_free, .allocator_data = alloc},
        .max = max,
    };
}
