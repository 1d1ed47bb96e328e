/* Reads one layer's slice of a block back to bf16: block_page_read.h for each (KV head, sub-page). */
#include "kernels/cpu/block_page_read.h"
#include "kernels/cpu/ops.h"
#include <errno.h>

static void decode_task(void *arg, int64_t task, int thread)
{
    const struct block_params *p = arg;
    uint32_t head = (uint32_t)(task / BLOCK_SUBPAGES), subpage = (uint32_t)(task % BLOCK_SUBPAGES);
    int64_t at = head * p->head_stride + (int64_t)subpage * SUBPAGE_TOKENS * p->layout->head_dim;
    (void)thread;
    page_read(block_subpage_layout(p->layout, p->first, subpage), p->slice + block_subpage_offset(p->layout, p->first, head, subpage), (int)p->layout->head_dim,
                 p->k + at, p->v + at);
}

int ISA(block_decode)(struct stream *s, const struct block_params *p)
{
    cpu_run(s, (int64_t)p->layout->n_kv_heads * BLOCK_SUBPAGES, decode_task, (void *)p);
    return 0;
}
