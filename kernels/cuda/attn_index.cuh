/* Scores of sub-pages by their 2-bit index entries: for each query head e, the log-sum-exp of the logits over the page's slow tokens. The logits are the CPU's to the bit
 * (kernels/cpu/attn_index.h has the algebra): q = step * qi with |qi| <= 127, codes and qi multiplied as integers, on tensor cores.
 *
 * Sequences that share a block share its index, so an entry is read and expanded once for all of them. Query heads of items with the same layer and KV head are the columns of a tile, up to 64;
 * a warp takes a sub-page, and a lane an item: it looks up where the item's entry lies. Items whose entries are one and the same are done together: the codes, expanded in registers as the 16
 * rows (tokens) of mma.m16n8k32, times eight queries at a time. Items with other blocks at this place take turns, so who shares with whom changes the time and nothing else. */
#pragma once
#include "kernels/cuda/attn_decode.cuh"
#include "kernels/cuda/block_page.cuh"
#include <errno.h>

enum {
    TILE_ROWS = 64,  /* query heads of a tile, */
    TILE_ITEMS = 32, /* of as many items: a lane each */
    TILE_PAGES = 64, /* sub-pages of a block of threads */
    TILE_WARPS = 8,
};

struct index_tile_items {
    int32_t first, n; /* in the order */
};

struct index_tiles {
    const int32_t *order; /* indices of items, those of a tile together */
    const struct index_tile_items *tiles;
};

template <int D> struct index_tile {
    enum { LD = D + 16 }; /* eight rows of a column of words lie in different banks */
    int8_t query[TILE_ROWS * LD];
    float step_code[TILE_ROWS], step_sum[TILE_ROWS], step_middle[TILE_ROWS];
    int32_t item[TILE_ITEMS];
    /* The items' slow_pages, which all warps need for every sub-page, and lie far apart in memory; layer and KV head are the same for all. */
    const struct kv_block *blocks[TILE_ITEMS];
    const uint16_t *masks[TILE_ITEMS];
    int32_t n_subpages[TILE_ITEMS], layer, kv_head;
    float *e[TILE_ROWS];       /* of the row's head and sub-page 0 */
    uint8_t owner[TILE_ROWS], head[TILE_ROWS]; /* which of the items, and which of its heads; of rows behind the last one the last item */
};

/* One row of the tile by one warp; zeros for NULL. */
template <int D> DEVICE void index_quantize(struct index_tile<D> *tile, int row, const float *q, float scale)
{
    const int lane = (int)threadIdx.x % 32;
    float largest = 0;
    int sum = 0;
    for (int c = lane; c < D; c += 32)
        largest = fmaxf(largest, q ? fabsf(q[c] * scale) : 0.0f);
    largest = warp_max(largest);
    const bool none = !(largest > 0x1p-100f);
    const float factor = none ? 0.0f : 127.0f / largest;
    for (int c = lane; c < D; c += 32) {
        float x = q ? q[c] * scale * factor : 0.0f;
        x = x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x;
        const int code = (int)rintf(x);
        tile->query[row * index_tile<D>::LD + c] = (int8_t)code;
        sum += code;
    }
    sum = (int)__reduce_add_sync(0xFFFFFFFFu, (unsigned)sum);
    if (lane == 0) {
        const float step = none ? 0.0f : largest / 127.0f;
        tile->step_code[row] = step * 64.0f;
        tile->step_sum[row] = step * (float)sum;
        tile->step_middle[row] = tile->step_sum[row] * 31.5f;
    }
}

/* An entry in a warp's registers: lane l has tokens l / 4 and l / 4 + 8, of each 16 dims those four that it multiplies, a byte each. */
template <int D> struct index_entry {
    uint32_t codes[2][D / 16];
    float step[2], min[2];
};

template <int D> DEVICE void index_read(struct index_entry<D> *e, const struct block_layout &layout, const uint8_t *entry)
{
    const int lane = (int)threadIdx.x % 32;
    const uint32_t *words = reinterpret_cast<const uint32_t *>(entry);
    UNROLL for (int half = 0; half < 2; half++) {
        const int t = lane / 4 + 8 * half;
        UNROLL for (int g = 0; g < D / 16; g++)
            e->codes[half][g] = words[g * SUBPAGE_TOKENS + t] >> 2 * (lane % 4) & 0x03030303u;
        e->step[half] = fp16_to_float(page_fp16(entry, layout.index_step, t));
        e->min[half] = fp16_to_float(page_fp16(entry, layout.index_min, t));
    }
}

/* The dot products of the entry's tokens with queries first .. first + 7: [2 * half + column], columns 2 (lane % 4) and the next. */
template <int D> DEVICE void index_dots(const struct index_tile<D> &tile, const struct index_entry<D> &e, int first, int32_t dot[4])
{
    const int lane = (int)threadIdx.x % 32;
    const uint32_t *query = reinterpret_cast<const uint32_t *>(tile.query + (first + lane / 4) * index_tile<D>::LD) + lane % 4;
    dot[0] = dot[1] = dot[2] = dot[3] = 0;
    UNROLL for (int c = 0; c < D / 32; c++) {
        const uint32_t a[4] = {e.codes[0][2 * c], e.codes[1][2 * c], e.codes[0][2 * c + 1], e.codes[1][2 * c + 1]}, b[2] = {query[8 * c], query[8 * c + 4]};
        mma_s8(dot, a, b, dot);
    }
}

/* The largest of a column's 16 tokens, and the sum of their exponentials beside it. */
DEVICE void index_column_sum(float s0, float s1, float *ret_m, float *ret_sum)
{
    float m = fmaxf(s0, s1);
    for (int x = 4; x < 32; x *= 2)
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, x));
    float sum = exp_nonpositive(s0 - m) + exp_nonpositive(s1 - m); /* -inf - -inf: NaN, so 0 */
    for (int x = 4; x < 32; x *= 2)
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, x);
    *ret_m = m;
    *ret_sum = sum;
}

/* e of the items whose bit is set in `users`, for the sub-page whose entry they share. tokens: the mask of this lane's item. All lanes know each column's sum; those with lane / 4 = i keep columns
 * 8 i .. 8 i + 7, so that logarithms are taken, and e stored, once for all columns and not in every round. */
template <int D> DEVICE void index_score_entry(const struct decode_args &a, const struct index_tile<D> &tile, int n_rows, int subpage, const uint8_t *entry, unsigned users, uint32_t tokens)
{
    const int lane = (int)threadIdx.x % 32;
    struct index_entry<D> e;
    float m[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    static_assert(TILE_ROWS == 64, "eight columns for each of the eight lanes that know them");
    index_read<D>(&e, a.layout, entry);
    for (int first = 0; first < n_rows; first += 8) {
        const int last = min(first + 7, n_rows - 1);
        if (!(users & ((2u << last / a.group) - (1u << first / a.group))))
            continue; /* the same for all lanes */
        int32_t dot[4];
        index_dots<D>(tile, e, first, dot);
        UNROLL for (int column = 0; column < 2; column++) {
            const int row = first + lane % 4 * 2 + column, owner = tile.owner[row];
            const uint32_t mask = __shfl_sync(0xFFFFFFFFu, tokens, owner);
            const bool used = row < n_rows && users >> owner & 1;
            float s[2], column_m, column_sum;
            UNROLL for (int half = 0; half < 2; half++) {
                const int t = lane / 4 + 8 * half;
                const float logit = fmaf(e.step[half], fmaf((float)dot[2 * half + column], tile.step_code[row], tile.step_middle[row]), e.min[half] * tile.step_sum[row]);
                s[half] = !used || !(mask >> t & 1) ? -INFINITY
                          : a.bias.first ? decode_logit(a, a.items[tile.item[owner]], tile.head[row], (int64_t)subpage * SUBPAGE_TOKENS + t, logit) : logit;
            }
            index_column_sum(s[0], s[1], &column_m, &column_sum);
            m[column] = lane / 4 == first / 8 ? column_m : m[column];
            sum[column] = lane / 4 == first / 8 ? column_sum : sum[column];
        }
    }
    UNROLL for (int column = 0; column < 2; column++) {
        const int row = lane * 2 + column;
        if (row < n_rows && users >> tile.owner[row] & 1)
            tile.e[row][(int64_t)subpage * a.group] = m[column] + log_float(sum[column]);
    }
}

/* One sub-page by one warp, for all items of the tile. */
template <int D> DEVICE void index_score_subpage(const struct decode_args &a, const struct index_tile<D> &tile, int n_items, int subpage)
{
    const int lane = (int)threadIdx.x % 32;
    const bool there = lane < n_items && subpage < tile.n_subpages[lane];
    const struct slow_pages slow = {there ? tile.blocks[lane] : nullptr, there ? tile.masks[lane] : nullptr, 0, 0, tile.layer, tile.kv_head};
    const uint32_t tokens = there ? slow.masks[subpage] : 0;
    const unsigned long long entry = tokens ? (unsigned long long)kv_page_at(&a.layout, &slow, subpage).index : 0;
    for (int h = 0; there && tokens == 0 && h < a.group; h++)
        tile.e[lane * a.group + h][(int64_t)subpage * a.group] = -INFINITY;
    unsigned left = __ballot_sync(0xFFFFFFFFu, tokens != 0);
    while (left) {
        const int leader = __popc((left & -left) - 1);
        const unsigned long long shared = __shfl_sync(0xFFFFFFFFu, entry, leader);
        const unsigned users = __ballot_sync(0xFFFFFFFFu, entry == shared);
        index_score_entry<D>(a, tile, n_items * a.group, subpage, reinterpret_cast<const uint8_t *>(shared), users, tokens);
        left &= ~users;
    }
}

/* Grid [sub-pages / TILE_PAGES, tiles]. */
template <int D> __global__ void __launch_bounds__(TILE_WARPS * 32) index_score_kernel(const struct decode_args a, const struct index_tiles t)
{
    __shared__ __align__(16) struct index_tile<D> tile;
    const struct index_tile_items items = t.tiles[blockIdx.y];
    const int warp = (int)threadIdx.x / 32, n_rows = items.n * a.group;
    if (items.n == 0)
        return;
    for (int i = (int)threadIdx.x; i < items.n; i += TILE_WARPS * 32) {
        const struct slow_pages &slow = a.items[t.order[items.first + i]].slow;
        tile.item[i] = t.order[items.first + i];
        tile.blocks[i] = slow.blocks;
        tile.masks[i] = slow.masks;
        tile.n_subpages[i] = slow.n_subpages;
        if (i == 0) {
            tile.layer = slow.layer;
            tile.kv_head = slow.kv_head;
        }
    }
    for (int row = (int)threadIdx.x; row < TILE_ROWS; row += TILE_WARPS * 32) {
        const int owner = min(row, n_rows - 1) / a.group, head = row % a.group;
        tile.owner[row] = (uint8_t)owner;
        tile.head[row] = (uint8_t)head;
        tile.e[row] = a.items[t.order[items.first + owner]].e + head;
    }
    for (int row = warp; row < TILE_ROWS; row += TILE_WARPS)
        index_quantize<D>(&tile, row, row < n_rows ? a.items[t.order[items.first + row / a.group]].q + row % a.group * D : nullptr, a.scale);
    __syncthreads(); /* the tile is there */
    for (int i = warp; i < TILE_PAGES; i += TILE_WARPS)
        index_score_subpage<D>(a, tile, items.n, (int)blockIdx.x * TILE_PAGES + i);
}

/* ---- host ---- */

/* Room for the order and the tiles of n items. */
static inline size_t index_tiles_bytes(int n_items)
{
    return (size_t)n_items * (sizeof(int32_t) + sizeof(struct index_tile_items));
}

/* Whether items i and j may stand in one tile. */
static inline bool index_tile_mates(const struct decode_item *items, int32_t i, int32_t j)
{
    return items[i].slow.layer == items[j].slow.layer && items[i].slow.kv_head == items[j].slow.kv_head;
}

/* Puts the scored items in order and cuts them into tiles, in memory of index_tiles_bytes(n_items). A counting sort by KV head, which is how the items of a batch share. Returns the number of tiles,
 * rounded up with empty ones. */
static inline int index_tiles_make(const struct decode_item *items, int n_items, int group, void *memory)
{
    struct index_tile_items *tiles = (struct index_tile_items *)memory;
    int32_t *order = (int32_t *)(tiles + n_items), first[257] = {0};
    const int most = TILE_ROWS / group < TILE_ITEMS ? TILE_ROWS / group : (int)TILE_ITEMS;
    int n = 0, n_tiles = 0;
    for (int i = 0; i < n_items; i++)
        if (items[i].scored)
            first[items[i].slow.kv_head % 256 + 1]++;
    for (int h = 0; h < 256; h++)
        first[h + 1] += first[h];
    n = first[256];
    for (int i = 0; i < n_items; i++)
        if (items[i].scored)
            order[first[items[i].slow.kv_head % 256]++] = i;
    for (int i = 0; i < n; n_tiles++) {
        tiles[n_tiles].first = i;
        for (tiles[n_tiles].n = 0; i < n && tiles[n_tiles].n < most && index_tile_mates(items, order[tiles[n_tiles].first], order[i]); i++)
            tiles[n_tiles].n++;
    }
    const int n_rounded = launch_round(n_tiles) < n_items ? (int)launch_round(n_tiles) : n_items;
    for (int i = n_tiles; i < n_rounded; i++)
        tiles[i].first = tiles[i].n = 0;
    return n_rounded;
}

/* `memory` on the device as index_tiles_make left it. */
static inline struct index_tiles index_tiles_at(const void *memory, int n_items)
{
    struct index_tiles t;
    t.tiles = (const struct index_tile_items *)memory;
    t.order = (const int32_t *)(t.tiles + n_items);
    return t;
}

static inline int index_score_launch(struct stream *s, const struct decode_args &a, const struct index_tiles &t, int n_tiles, int n_subpages)
{
    const dim3 grid((unsigned)ceil_div64(n_subpages, TILE_PAGES), (unsigned)n_tiles);
    switch (a.head_dim) {
    case 32: return LAUNCH((index_score_kernel<32>), grid, TILE_WARPS * 32, 0, s, a, t);
    case 64: return LAUNCH((index_score_kernel<64>), grid, TILE_WARPS * 32, 0, s, a, t);
    case 96: return LAUNCH((index_score_kernel<96>), grid, TILE_WARPS * 32, 0, s, a, t);
    case 128: return LAUNCH((index_score_kernel<128>), grid, TILE_WARPS * 32, 0, s, a, t);
    default: return -ENOTSUP;
    }
}
