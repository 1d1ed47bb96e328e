/* Reads one layer's slices of blocks back to bf16: block_page_read.h for each (block, KV head, sub-page). */
#include "kernels/cpu/block_page_read.h"
#include "kernels/cpu/ops.h"
#include <errno.h>

struct decode_args {
    const struct block_params *blocks;
    int64_t per_block; /* tasks */
};

static void decode_task(void *arg, int64_t task, int thread)
{
    const struct decode_args *a = arg;
    const struct block_params *p = &a->blocks[task / a->per_block];
    uint32_t head = (uint32_t)(task % a->per_block / BLOCK_SUBPAGES), subpage = (uint32_t)(task % BLOCK_SUBPAGES);
    int64_t at = head * p->head_stride + (int64_t)subpage * SUBPAGE_TOKENS * p->layout->head_dim;
    (void)thread;
    page_read(block_subpage_layout(p->layout, p->first, subpage), p->slice + block_subpage_offset(p->layout, p->first, head, subpage), (int)p->layout->head_dim,
                 p->k + at, p->v + at);
    index_copy(p, head, subpage);
}

int ISA(block_decode)(struct stream *s, const struct block_params *blocks, int n)
{
    if (n < 0)
        return -EINVAL;
    if (n == 0)
        return 0;
    struct decode_args a = {.blocks = blocks, .per_block = (int64_t)blocks->layout->n_kv_heads * BLOCK_SUBPAGES};
    cpu_run(s, n * a.per_block, decode_task, &a);
    return 0;
}
