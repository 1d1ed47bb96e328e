/* The slow tier as attention reads it: per layer and KV head the sub-pages that hold slow tokens, in position order, each with the mask of those tokens. A kept token
 * is in its block too, so its bit is clear. Blocks that leave the recent window while decoding have no kept tokens and all their sub-pages. */
#include "worker/cache/engine_private.h"

static struct kv_page make_page(const struct sequence *seq, int layer, int kv_head, int block, int subpage, uint16_t tokens)
{
    const struct block_layout *l = &seq->engine->layout;
    const bool first = block == 0;
    const uint8_t *slice = seq->blocks[block].data + block_slice_offset(l, first, (uint32_t)layer);
    return (struct kv_page){
        .page = slice + block_subpage_offset(l, first, (uint32_t)kv_head, (uint32_t)subpage),
        .index = slice + block_index_offset(l, first, (uint32_t)kv_head, (uint32_t)subpage),
        .tokens = tokens,
        .sink = first && subpage == 0,
        .subpage = block * BLOCK_SUBPAGES + subpage,
    };
}

/* Summaries of pages first .. n-1 of a list. */
static int summarize(struct sequence *seq, int layer, int kv_head, int first)
{
    const struct engine *e = seq->engine;
    const struct page_list *list = sequence_list(seq, layer, kv_head);
    if (e->summary_bytes == 0 || first == list->n)
        return 0;
    const struct page_summary_params p = {
        .scorer = e->config.scorer->kernel,
        .layout = &e->layout,
        .pages = list->pages + first,
        .n_pages = list->n - first,
        .summaries = sequence_summaries(seq, layer, kv_head) + (size_t)first * e->summary_bytes,
    };
    return e->model->ops->page_summaries(e->model->stream, &p);
}

int page_list_build(struct sequence *seq, int layer, int kv_head)
{
    struct page_list *list = sequence_list(seq, layer, kv_head);
    const struct kept_rows kept = sequence_kept(seq, layer, kv_head);
    int j = 0;

    list->n = 0;
    for (int pos = 0; pos < seq->plan.recent_first; pos += SUBPAGE_TOKENS) {
        uint16_t tokens = 0xffff;
        for (; j < kept.n && kept.pos[j] < pos + SUBPAGE_TOKENS; j++)
            tokens &= (uint16_t)~(1u << (kept.pos[j] - pos));
        if (tokens)
            list->pages[list->n++] = make_page(seq, layer, kv_head, pos / BLOCK_TOKENS, pos % BLOCK_TOKENS / SUBPAGE_TOKENS, tokens);
    }
    ASSERT(j == kept.n);
    list->n_at_prompt_end = list->n;
    return summarize(seq, layer, kv_head, 0);
}

int page_lists_append(struct sequence *seq, int block)
{
    const struct model_config *c = &seq->engine->model->config;
    int r = 0;
    for (int layer = 0; r >= 0 && layer < c->n_layers; layer++) {
        for (int h = 0; r >= 0 && h < c->n_kv_heads; h++) {
            struct page_list *list = sequence_list(seq, layer, h);
            ASSERT(list->n + BLOCK_SUBPAGES <= seq->plan.n_pages);
            for (int s = 0; s < BLOCK_SUBPAGES; s++)
                list->pages[list->n++] = make_page(seq, layer, h, block, s, 0xffff);
            r = summarize(seq, layer, h, list->n - BLOCK_SUBPAGES);
        }
    }
    return r;
}

/* A list holds at most BLOCK_SUBPAGES pages of a block, and they come so much before the place they would have in a complete list as pages were left out. */
static void repoint(const struct sequence *seq, struct page_list *list, int block, const uint8_t *to)
{
    const uint8_t *from = seq->blocks[block].data;
    const uint64_t length = seq->engine->layout.block_bytes[block == 0];
    const int left_out = seq->plan.recent_first / SUBPAGE_TOKENS - list->n_at_prompt_end;
    const int full = block * BLOCK_SUBPAGES, end = full + BLOCK_SUBPAGES < list->n ? full + BLOCK_SUBPAGES : list->n;
    for (int i = full > left_out ? full - left_out : 0; i < end; i++) {
        struct kv_page *page = &list->pages[i];
        const uintptr_t offset = (uintptr_t)page->page - (uintptr_t)from;
        if (offset >= length)
            continue;
        page->page = to + offset;
        page->index = to + (page->index - from);
    }
}

void page_lists_repoint(struct sequence *seq, int block, const uint8_t *to)
{
    const struct model_config *c = &seq->engine->model->config;
    for (int layer = 0; layer < c->n_layers; layer++)
        for (int h = 0; h < c->n_kv_heads; h++)
            repoint(seq, sequence_list(seq, layer, h), block, to);
}
