/* Codes blocks of 128 tokens into one layer's slices, a (block, KV head, sub-page) a task, by the rule of proto/block_layout.h. A token's row is coded into plain arrays,
 * one code a byte, then interleaved. All arithmetic is by element, minima and maxima are exact, and -0 has been made +0, so that the order of a reduction cannot
 * show.
 *
 * With `attended` each sub-page is read back at once, while it is
 * in the cache, so that what prefill attends is by construction what the pool gives back. The layout has no gaps: every byte of the slice is written, and equal tokens
 * make equal bytes. */
#include "kernels/cpu/block_page_read.h"
#include "kernels/cpu/ops.h"
#include <errno.h>
#include <stdatomic.h>

#define CODEC_LIMIT 65504.0f  /* largest finite fp16 */
#define CODEC_BEYOND 65536.0f /* the first bf16 beyond it */

/* 16 values as they are coded: NaN is 0, beyond +-65504 is clamped. *n_bad, 16 lanes, counts those whose magnitude is not below `limit`. */
SPECIALIZE v16 codec_load(const bf16_t *x, float limit, v16i *n_bad)
{
    v16 v = v16_load_bf16(x);
    v16m fits = v16_lt(v16_abs(v), v16_set1(limit));
    *n_bad = v16i_add(*n_bad, v16i_select(fits, v16i_zero(), v16i_set1(1)));
    v = v16_select(v16_eq(v, v), v, v16_zero());
    v = v16_max(v16_min(v, v16_set1(CODEC_LIMIT)), v16_set1(-CODEC_LIMIT));
    return v16_add(v, v16_zero());
}

ALWAYS_INLINE int codec_count(v16i n_bad)
{
    int32_t lane[LANES];
    int n = 0;
    v16i_store(lane, n_bad);
    for (int i = 0; i < LANES; i++)
        n += lane[i];
    return n;
}

/* The fp16 step and minimum of a row with the given extremes. A step that would be negative (the minimum was rounded up past the maximum) or rounds to 0 is 0. */
ALWAYS_INLINE void codec_scale(float low, float high, float levels, uint16_t *ret_step, uint16_t *ret_min)
{
    *ret_min = fp16_from_float(low);
    float step = (high - fp16_to_float(*ret_min)) / levels;
    *ret_step = step > 0 ? fp16_from_float(step) : 0;
}

/* code = clamp(round((x - min) / step)), as int32 lanes. */
SPECIALIZE v16i codec_codes(v16 x, uint16_t step, uint16_t min, float levels)
{
    if (step == 0)
        return v16i_zero();
    v16 c = v16_div(v16_sub(x, v16_set1(fp16_to_float(min))), v16_set1(fp16_to_float(step)));
    return v16_to_i32(v16_max(v16_min(c, v16_set1(levels)), v16_zero())); /* clamped first: the same, and within the conversion's range */
}

/* Codes n values (a multiple of 16, at most KV_MAX_DIM), one byte each. */
SPECIALIZE void codec_row(const bf16_t *x, int n, float levels, float limit, uint8_t *codes, uint16_t *ret_step, uint16_t *ret_min, v16i *n_bad)
{
    v16 v[KV_MAX_DIM / LANES], low = v16_set1(INFINITY), high = v16_set1(-INFINITY);
    for (int c = 0; c < n / LANES; c++) {
        v[c] = codec_load(x + c * LANES, limit, n_bad);
        low = v16_min(low, v[c]);
        high = v16_max(high, v[c]);
    }
    codec_scale(-v16_reduce_max(v16_neg(low)), v16_reduce_max(high), levels, ret_step, ret_min);
    for (int c = 0; c < n / LANES; c++)
        v16i_store_u8(codes + c * LANES, codec_codes(v[c], *ret_step, *ret_min, levels));
}

/* Four codes of one token (dims 4g .. 4g + 3) are one 32-bit word of a page; a group's word of the index is made of the top bits of four of them. */
static void codec_interleave_keys(const uint8_t *codes /* [16, d] */, int d, uint8_t *page_codes /* or NULL */, uint8_t *index_codes)
{
    for (int t = 0; t < SUBPAGE_TOKENS; t++)
        for (int g = 0; g < d / 16; g++) {
            uint32_t w[4];
            memcpy(w, codes + t * d + 16 * g, sizeof w);
            for (int i = 0; page_codes && i < 4; i++)
                memcpy(page_codes + ((4 * g + i) * SUBPAGE_TOKENS + t) * 4, &w[i], 4);
            uint32_t top = (w[0] >> 6 & 0x03030303u) | (w[1] >> 4 & 0x0C0C0C0Cu) | (w[2] >> 2 & 0x30303030u) | (w[3] & 0xC0C0C0C0u);
            memcpy(index_codes + (g * SUBPAGE_TOKENS + t) * 4, &top, 4);
        }
}

/* Keys of a coded or BF16 page, and its index entry. Returns how many inputs the page cannot hold; the index of a BF16 page is only a guide, and clamps what is finite. */
static int codec_encode_keys(const bf16_t *k, int d, const struct block_layout *layout, const struct subpage_layout *l, uint8_t *page, uint8_t *entry)
{
    uint8_t codes[SUBPAGE_TOKENS * KV_MAX_DIM];
    uint16_t step[SUBPAGE_TOKENS], min[SUBPAGE_TOKENS];
    bool coded = l->format != KV_FORMAT_BF16;
    v16i n_bad = v16i_zero();
    for (int t = 0; t < SUBPAGE_TOKENS; t++)
        codec_row(k + t * d, d, 255, coded ? CODEC_BEYOND : INFINITY, codes + t * d, &step[t], &min[t], &n_bad);
    codec_interleave_keys(codes, d, coded ? page + l->keys : NULL, entry);
    memcpy(entry + layout->index_step, step, sizeof step);
    memcpy(entry + layout->index_min, min, sizeof min);
    if (coded) {
        memcpy(page + l->key_step, step, sizeof step);
        memcpy(page + l->key_min, min, sizeof min);
    }
    return codec_count(n_bad);
}

static int codec_encode_values(const bf16_t *v, int d, const struct subpage_layout *l, uint8_t *page)
{
    uint8_t codes[SUBPAGE_TOKENS * KV_MAX_DIM];
    bool eight = l->format == KV_FORMAT_K8V8;
    v16i n_bad = v16i_zero();
    for (int t = 0; t < SUBPAGE_TOKENS; t++)
        for (int c = 0; c < d; c += VALUE_GROUP) {
            uint16_t step, min;
            int at = 2 * (c / VALUE_GROUP * SUBPAGE_TOKENS + t);
            codec_row(v + t * d + c, VALUE_GROUP, eight ? 255 : 15, CODEC_BEYOND, codes + t * d + c, &step, &min, &n_bad);
            memcpy(page + l->value_step + at, &step, sizeof step);
            memcpy(page + l->value_min + at, &min, sizeof min);
        }
    if (eight) {
        memcpy(page + l->values, codes, (size_t)SUBPAGE_TOKENS * (size_t)d);
        return codec_count(n_bad);
    }
    for (int half = 0; half < 2; half++)
        for (int c = 0; c < d; c++)
            for (int i = 0; i < 4; i++) {
                const uint8_t *low = codes + (8 * half + i) * d + c;
                page[l->values + (half * d + c) * 4 + i] = (uint8_t)(low[0] | low[4 * d] << 4);
            }
    return codec_count(n_bad);
}

/* A bf16 value as a BF16 page holds it: NaN is 0, an infinity the bf16 nearest to +-65504, all others as they are. */
ALWAYS_INLINE bf16_t codec_bf16(bf16_t x)
{
    if ((x & 0x7F80) != 0x7F80)
        return x;
    return x & 0x7F ? 0 : (bf16_t)((x & 0x8000) | 0x4780);
}

/* keys [d/2][16][2], values [16][d]. Returns how many values were not finite; keys have been counted with the index. */
static int codec_encode_bf16(const bf16_t *k, const bf16_t *v, int d, const struct subpage_layout *l, uint8_t *page)
{
    int n_bad = 0;
    bf16_t *keys = (bf16_t *)(page + l->keys), *values = (bf16_t *)(page + l->values);
    for (int t = 0; t < SUBPAGE_TOKENS; t++)
        for (int c = 0; c < d; c++) {
            keys[(c / 2 * SUBPAGE_TOKENS + t) * 2 + c % 2] = codec_bf16(k[t * d + c]);
            values[t * d + c] = codec_bf16(v[t * d + c]);
            n_bad += (v[t * d + c] & 0x7F80) == 0x7F80;
        }
    return n_bad;
}

static int codec_encode(const bf16_t *k, const bf16_t *v, int d, const struct block_layout *layout, const struct subpage_layout *l, uint8_t *page, uint8_t *entry)
{
    int n_bad = codec_encode_keys(k, d, layout, l, page, entry);
    if (l->format == KV_FORMAT_BF16)
        return n_bad + codec_encode_bf16(k, v, d, l, page);
    return n_bad + codec_encode_values(v, d, l, page);
}

struct encode_args {
    const struct block_params *blocks;
    int64_t per_block; /* tasks */
    bool attended;
    atomic_int n_bad;
};

static void encode_task(void *arg, int64_t task, int thread)
{
    struct encode_args *a = arg;
    const struct block_params *p = &a->blocks[task / a->per_block];
    const struct block_layout *layout = p->layout;
    uint32_t head = (uint32_t)(task % a->per_block / BLOCK_SUBPAGES), subpage = (uint32_t)(task % BLOCK_SUBPAGES);
    int d = (int)layout->head_dim;
    const struct subpage_layout *l = block_subpage_layout(layout, p->first, subpage);
    uint8_t *page = p->slice + block_subpage_offset(layout, p->first, head, subpage), *entry = p->slice + block_index_offset(layout, p->first, head, subpage);
    int64_t row = (int64_t)subpage * SUBPAGE_TOKENS * d, at = head * p->head_stride + row, from = p->exact_k ? head * p->exact_stride + row : at;
    (void)thread;
    int n_bad = codec_encode((p->exact_k ? p->exact_k : p->k) + from, (p->exact_k ? p->exact_v : p->v) + from, d, layout, l, page, entry);
    if (n_bad > 0)
        atomic_fetch_add_explicit(&a->n_bad, n_bad, memory_order_relaxed); /* a sum; the pool orders it before the caller's read */
    if (a->attended)
        page_read(l, page, d, p->k + at, p->v + at);
    index_copy(p, head, subpage);
}

int ISA(block_encode)(struct stream *s, const struct block_params *blocks, int n, bool attended, int32_t *bad)
{
    if (n < 0)
        return -EINVAL;
    if (n == 0)
        return 0;
    struct encode_args a = {.blocks = blocks, .per_block = (int64_t)blocks->layout->n_kv_heads * BLOCK_SUBPAGES, .attended = attended};
    atomic_init(&a.n_bad, 0);
    cpu_run(s, n * a.per_block, encode_task, &a);
    *bad += atomic_load_explicit(&a.n_bad, memory_order_relaxed);
    return 0;
}
