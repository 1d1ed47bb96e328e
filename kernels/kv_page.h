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

/* Where one block's sub-pages and index entries lie, for one layer and KV head. */
struct kv_block_pages {
    const uint8_t *pages, *index;
    uint32_t first_bytes, page_bytes, index_bytes; /* of sub-page 0, of each other one, of an entry */
    bool first;
};

BLOCK_LAYOUT_INLINE struct kv_block_pages kv_block_pages_at(const struct block_layout *l, const struct slow_pages *slow, int block)
{
    const struct kv_block *b = &slow->blocks[block];
    const uint32_t layer = (uint32_t)slow->layer, head = (uint32_t)slow->kv_head;
    struct kv_block_pages p;
    p.first = block == 0;
    const uint8_t *slice = b->data + block_slice_offset(l, p.first, layer);
    p.pages = slice + block_subpage_offset(l, p.first, head, 0);
    p.index = b->index ? b->index + block_index_copy_offset(l, layer, head, 0) : slice + block_index_offset(l, p.first, head, 0);
    p.first_bytes = p.first ? l->sink.bytes : l->page.bytes;
    p.page_bytes = l->page.bytes;
    p.index_bytes = l->index_entry_bytes;
    return p;
}

BLOCK_LAYOUT_INLINE struct kv_page kv_block_page(const struct kv_block_pages *p, const struct slow_pages *slow, int subpage)
{
    const uint32_t place = (uint32_t)subpage % BLOCK_SUBPAGES;
    struct kv_page page;
    page.page = place ? p->pages + p->first_bytes + (place - 1) * p->page_bytes : p->pages;
    page.index = p->index + place * p->index_bytes;
    page.tokens = slow->masks[subpage];
    page.sink = p->first && place == 0;
    page.subpage = subpage;
    return page;
}

/* A sub-page's bytes for its summary: in the block's slice, or in those that lie apart (page_summary_params.slices, the first of them block first_block's). */
BLOCK_LAYOUT_INLINE const uint8_t *kv_summary_page(const struct block_layout *l, const struct slow_pages *slow, const uint8_t *slices, uint64_t slice_stride, int first_block, int subpage)
{
    const int block = subpage / BLOCK_SUBPAGES;
    const uint8_t *slice = slices ? slices + (uint64_t)(block - first_block) * slice_stride : slow->blocks[block].data + block_slice_offset(l, block == 0, (uint32_t)slow->layer);
    return slice + block_subpage_offset(l, block == 0, (uint32_t)slow->kv_head, (uint32_t)subpage % BLOCK_SUBPAGES);
}

BLOCK_LAYOUT_INLINE struct kv_page kv_page_at(const struct block_layout *l, const struct slow_pages *slow, int subpage)
{
    const struct kv_block_pages block = kv_block_pages_at(l, slow, subpage / BLOCK_SUBPAGES);
    return kv_block_page(&block, slow, subpage);
}
