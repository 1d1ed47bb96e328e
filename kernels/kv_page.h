/* One sub-page of the slow tier, found in a sequence's block table. For the CPU and for GPU kernels. */
#pragma once
#include "kernels/kernels.h"

struct kv_page {
    const uint8_t *page;  /* its bytes; format by `sink` */
    const uint8_t *index; /* its index entry */
    uint16_t tokens;      /* mask of its slow tokens */
    bool sink;            /* the BF16 sub-page of block 0 */
    int32_t subpage;      /* its place in the sequence: first position / SUBPAGE_TOKENS */
};

BLOCK_LAYOUT_INLINE struct kv_page kv_page_at(const struct block_layout *l, const struct slow_pages *slow, int subpage)
{
    const struct kv_block *block = &slow->blocks[subpage / BLOCK_SUBPAGES];
    const bool first = subpage < BLOCK_SUBPAGES;
    const uint32_t layer = (uint32_t)slow->layer, head = (uint32_t)slow->kv_head, place = (uint32_t)(subpage % BLOCK_SUBPAGES);
    const uint8_t *slice = block->data + block_slice_offset(l, first, layer);
    struct kv_page page;
    page.page = slice + block_subpage_offset(l, first, head, place);
    page.index = block->index ? block->index + block_index_copy_offset(l, layer, head, place) : slice + block_index_offset(l, first, head, place);
    page.tokens = slow->masks[subpage];
    page.sink = first && place == 0;
    page.subpage = subpage;
    return page;
}
