#include "tests/kernels/kv_sequence.h"
#include "proto/base/base_assert.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Tokens of one block: pages with masks, kept rows. */
static void split_block(struct kv_sequence *s, struct ref_rng *rng, int block, const uint16_t *k, const uint16_t *v, double kept_share)
{
    for (int sub = 0; sub < BLOCK_SUBPAGES; sub++) {
        const int subpage = block * BLOCK_SUBPAGES + sub;
        for (int t = 0; t < SUBPAGE_TOKENS; t++) {
            size_t at = ((size_t)sub * SUBPAGE_TOKENS + (size_t)t) * (size_t)s->d, row = (size_t)s->d * sizeof *k;
            if (ref_uniform(rng) >= kept_share) {
                s->masks[subpage] |= (uint16_t)(1 << t);
                continue;
            }
            memcpy(s->kept_k + (size_t)s->n_kept * s->d, k + at, row);
            memcpy(s->kept_v + (size_t)s->n_kept * s->d, v + at, row);
            s->kept_positions[s->n_kept] = subpage * SUBPAGE_TOKENS + t;
            s->n_kept++;
        }
        const struct slow_pages slow = kv_sequence_slow(s);
        if (s->masks[subpage])
            s->pages[s->n_pages++] = kv_page_at(&s->layout, &slow, subpage);
    }
}

void kv_sequence_make(struct kv_sequence *s, struct fixture *f, enum kv_format format, int d, int n_blocks, int n_recent, double kept_share, uint64_t seed)
{
    struct ref_rng rng = {seed};
    *s = (struct kv_sequence){.d = d, .n_blocks = n_blocks, .n_recent = n_recent};
    ASSERT(block_layout_init(&s->layout, format, 1, 1, (uint32_t)d) == 0);
    size_t slice_bytes = s->layout.slice_bytes[1], rows = (size_t)n_blocks * BLOCK_TOKENS * d;
    s->pool = aligned_zeros(slice_bytes * (size_t)n_blocks);
    s->kept_k = aligned_zeros(rows * 2);
    s->kept_v = aligned_zeros(rows * 2);
    s->kept_positions = aligned_zeros(sizeof(int32_t) * (size_t)n_blocks * BLOCK_TOKENS);
    s->blocks = aligned_zeros(sizeof *s->blocks * (size_t)n_blocks);
    s->masks = aligned_zeros(sizeof *s->masks * (size_t)n_blocks * BLOCK_SUBPAGES);
    s->pages = aligned_zeros(sizeof *s->pages * (size_t)n_blocks * BLOCK_SUBPAGES);
    s->recent_k = random_bf16(&rng, (size_t)n_recent * d, 1);
    s->recent_v = random_bf16(&rng, (size_t)n_recent * d, 1);
    int32_t n_bad = 0;
    for (int b = 0; b < n_blocks; b++) {
        uint16_t *k = random_bf16(&rng, BLOCK_TOKENS * (size_t)d, 1), *v = random_bf16(&rng, BLOCK_TOKENS * (size_t)d, 1);
        struct block_params p = {.layout = &s->layout, .first = b == 0, .slice = s->pool + slice_bytes * (size_t)b, .k = k, .v = v, .head_stride = BLOCK_TOKENS * d};
        ASSERT(f->ops->block_encode(f->devices[0].stream, &p, 1, true, &n_bad) == 0 && n_bad == 0);
        s->blocks[b].data = p.slice;
        split_block(s, &rng, b, k, v, kept_share);
        free(k);
        free(v);
    }
}

void kv_sequence_bias(struct kv_sequence *s, int n_pairs, double size, uint64_t seed)
{
    struct ref_rng rng = {seed};
    bias_fixture_make(&s->bias, &rng, 1, s->d, s->n_blocks * BLOCK_TOKENS + s->n_recent, &n_pairs, size);
}

const struct key_bias *kv_sequence_key_bias(const struct kv_sequence *s)
{
    return s->bias.first ? &s->bias.bias : NULL;
}

double kv_sequence_term(const struct kv_sequence *s, const float *q, float scale, int64_t pos)
{
    return s->bias.first ? bias_fixture_term(&s->bias, 0, q, pos) * (double)scale : 0;
}

void kv_sequence_free(struct kv_sequence *s)
{
    bias_fixture_free(&s->bias);
    free(s->kept_positions);
    free(s->pool);
    free(s->kept_k);
    free(s->kept_v);
    free(s->recent_k);
    free(s->recent_v);
    free(s->pages);
    free(s->masks);
    free(s->blocks);
}

struct slow_pages kv_sequence_slow(const struct kv_sequence *s)
{
    return (struct slow_pages){.blocks = s->blocks, .masks = s->masks, .n_subpages = s->n_blocks * BLOCK_SUBPAGES, .n_pages = s->n_pages};
}

void kv_sequence_to_pages(const struct kv_sequence *s, int32_t *chosen, int n)
{
    for (int i = 0, page = 0; i < n; i++) {
        while (page < s->n_pages && s->pages[page].subpage != chosen[i])
            page++;
        ASSERT(page < s->n_pages); /* ascending, and none without slow tokens */
        chosen[i] = page;
    }
}

struct attn_decode_item kv_sequence_item(const struct kv_sequence *s, const float *q, float *out, int fetch_pages, int32_t *ret_chosen)
{
    return (struct attn_decode_item){.q = q, .out = out, .slow = kv_sequence_slow(s),
                                     .rows = {{s->kept_k, s->kept_v, s->n_kept, .positions = s->kept_positions},
                                              {s->recent_k, s->recent_v, s->n_recent, .pos0 = s->n_blocks * BLOCK_TOKENS}},
                                     .fetch_pages = fetch_pages, .ret_chosen = ret_chosen};
}

struct ref_attention_result kv_sequence_attention(const struct kv_sequence *s, const float *q, float scale, const int32_t *chosen, int n_chosen, double *out)
{
    size_t d = (size_t)s->d, n_max = (size_t)(s->n_kept + s->n_recent + s->n_pages * SUBPAGE_TOKENS), n = 0;
    double *keys = aligned_zeros((n_max + 1) * d * sizeof *keys), *values = aligned_zeros((n_max + 1) * d * sizeof *values), *query = widen_floats(q, d), *terms = aligned_zeros((n_max + 1) * sizeof *terms);
    for (int i = 0; i < s->n_kept + s->n_recent; i++, n++) {
        bool kept = i < s->n_kept;
        terms[n] = kv_sequence_term(s, q, scale, kept ? s->kept_positions[i] : s->n_blocks * BLOCK_TOKENS + i - s->n_kept);
        for (size_t c = 0; c < d; c++) {
            keys[n * d + c] = ref_bf16_value(kept ? s->kept_k[(size_t)i * d + c] : s->recent_k[(size_t)(i - s->n_kept) * d + c]);
            values[n * d + c] = ref_bf16_value(kept ? s->kept_v[(size_t)i * d + c] : s->recent_v[(size_t)(i - s->n_kept) * d + c]);
        }
    }
    for (int i = 0; i < (chosen ? n_chosen : s->n_pages); i++) {
        const struct kv_page *page = &s->pages[chosen ? chosen[i] : i];
        const struct subpage_layout *l = page->sink ? &s->layout.sink : &s->layout.page;
        for (int t = 0; t < SUBPAGE_TOKENS; t++)
            if (page->tokens >> t & 1) {
                ref_page_key(l, page->page, s->d, t, keys + n * d);
                ref_page_value(l, page->page, s->d, t, values + n * d);
                terms[n] = kv_sequence_term(s, q, scale, (int64_t)page->subpage * SUBPAGE_TOKENS + t);
                n++;
            }
    }
    struct ref_attention_result r = ref_attention(query, keys, values, NULL, terms, (int)n, s->d, scale, out);
    free(keys);
    free(values);
    free(query);
    free(terms);
    return r;
}

double kv_sequence_index_lse(const struct kv_sequence *s, const float *q, float scale, int page)
{
    double m = -INFINITY, l = 0, logit[SUBPAGE_TOKENS], key[256];
    for (int t = 0; t < SUBPAGE_TOKENS; t++) {
        logit[t] = kv_sequence_term(s, q, scale, (int64_t)s->pages[page].subpage * SUBPAGE_TOKENS + t);
        ref_index_key(&s->layout, s->pages[page].index, t, key);
        for (int c = 0; c < s->d; c++)
            logit[t] += key[c] * q[c] * scale;
        if (s->pages[page].tokens >> t & 1)
            m = fmax(m, logit[t]);
    }
    for (int t = 0; t < SUBPAGE_TOKENS; t++)
        l += s->pages[page].tokens >> t & 1 ? exp(logit[t] - m) : 0;
    return m + log(l);
}
