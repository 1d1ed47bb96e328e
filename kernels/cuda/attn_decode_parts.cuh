/* Partials of decode attention on tensor cores (attn_tile.cuh): the query heads of a group are the 16 rows of a tile, unused ones zeros. A block of four warps makes one partial of one item;
 * each warp attends 16 tokens at a time, and in the end the warps' results are merged through shared memory. Pages here, fast rows in attn_decode_rows.cuh. */
#pragma once
#include "kernels/cuda/attn_decode.cuh"
#include "kernels/cuda/attn_tile.cuh"
#include "kernels/cuda/block_page.cuh"

/* Shared memory of a partial: queries, then tiles; at the end the warps' results over the tiles. */
template <int D> struct decode_shared {
    enum { LD = D + 8, QUERIES = 16 * LD, TILE = 16 * LD, STAGES = 2 };
    /* bf16 elements: queries and, for each warp, two stages of keys and values */
    enum { ELEMENTS = QUERIES + DECODE_WARPS * STAGES * 2 * TILE };
    enum { O_LD = D + 8 }; /* floats between rows of the warps' o: four of them in different banks */
    static_assert(DECODE_WARPS * 16 * (O_LD + 2) * sizeof(float) <= DECODE_WARPS * STAGES * 2 * TILE * sizeof(uint16_t), "results fit where the tiles were");
};

/* A warp's o of the group's heads to part_o, [warps, 16, O_LD]. */
template <int D> DEVICE void decode_share_o(const struct attn_tile_rows<D> &r, int group, float *part_o)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    UNROLL for (int half = 0; half < 2; half++) {
        const int h = lane / 4 + half * 8;
        float *to = part_o + (warp * 16 + h) * decode_shared<D>::O_LD + lane % 4 * 2;
        UNROLL for (int i = 0; i < D / 8; i++)
            if (h < group)
                *reinterpret_cast<float2 *>(to + i * 8) = make_float2(r.o[i][2 * half], r.o[i][2 * half + 1]);
    }
}

/* The block's warps as one partial, for the group's heads. */
template <int D> DEVICE void decode_merge_warps(struct attn_tile_rows<D> &r, uint16_t *tiles, int group, float *ml, float *o)
{
    typedef struct decode_shared<D> S;
    float *part_o = reinterpret_cast<float *>(tiles), *part_ml = part_o + DECODE_WARPS * 16 * S::O_LD; /* [warps, 16, 2] */
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    attn_tile_sum<D>(r);
    __syncthreads(); /* nobody reads the tiles any more */
    decode_share_o<D>(r, group, part_o);
    UNROLL for (int half = 0; half < 2; half++) {
        const int row = warp * 16 + lane / 4 + half * 8;
        if (lane % 4 == 0) {
            part_ml[2 * row] = r.m[half];
            part_ml[2 * row + 1] = r.l[half];
        }
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < group * D; i += DECODE_THREADS) {
        const int h = i / D, c = i % D;
        float m = -INFINITY, l = 0, sum = 0;
        for (int w = 0; w < DECODE_WARPS; w++)
            m = fmaxf(m, part_ml[2 * (w * 16 + h)]);
        for (int w = 0; w < DECODE_WARPS; w++) {
            const float weight = exp_nonpositive(part_ml[2 * (w * 16 + h)] - m); /* of an empty one 0 */
            l = fmaf(weight, part_ml[2 * (w * 16 + h) + 1], l);
            sum = fmaf(weight, part_o[(w * 16 + h) * S::O_LD + c], sum);
        }
        o[i] = sum;
        if (c == 0) {
            ml[2 * h] = m;
            ml[2 * h + 1] = l;
        }
    }
}

template <int D> DEVICE void decode_queries(const struct decode_args &a, const struct decode_item &item, uint16_t *shared, struct attn_tile_rows<D> &r)
{
    attn_tile_round<D>(shared, a.group, 16, [&](int h) { return item.q + h * D; });
    __syncthreads();
    attn_tile_init<D>(r);
    attn_tile_queries<D>(r, shared);
}

/* The first warp counts what the cache says of the part's pages. */
DEVICE void decode_count_fetched(const struct decode_args &a, const struct decode_item &item, int first, int n, uintptr_t place)
{
    const int lane = (int)threadIdx.x;
    const int subpage = lane < n ? item.chosen[first + lane] : 0;
    const bool fetched = lane < n && item.slow.blocks[subpage / BLOCK_SUBPAGES].id != 0, missed = fetched && (place & PAGE_MISSED);
    const uint32_t n_fetched = (uint32_t)__popc(__ballot_sync(0xFFFFFFFFu, fetched)), n_missed = (uint32_t)__popc(__ballot_sync(0xFFFFFFFFu, missed));
    const uint32_t sinks = (uint32_t)__popc(__ballot_sync(0xFFFFFFFFu, missed && subpage == 0));
    if (lane != 0 || n_fetched == 0)
        return;
    atomicAdd(&item.counts->hits, n_fetched - n_missed);
    atomicAdd(&item.counts->misses, n_missed);
    atomicAdd((unsigned long long *)&item.counts->bytes_missed, (unsigned long long)(n_missed - sinks) * a.layout.page.bytes + (unsigned long long)sinks * a.layout.sink.bytes);
}

/* Up to 16 sub-pages; a warp takes every fourth, expands it to bf16 in its part of shared memory and attends it. */
template <int D> __global__ void __launch_bounds__(DECODE_THREADS) decode_pages_kernel(const struct decode_args a)
{
    DYNAMIC_SHARED(uint16_t, shared);
    typedef struct decode_shared<D> S;
    const int flat = a.first_part + (int)blockIdx.x, page_part = flat % a.page_parts;
    const struct decode_item &item = a.items[flat / a.page_parts];
    const int part = page_part + item.n_row_parts[0] + item.n_row_parts[1], warp = (int)threadIdx.x / 32;
    const int first = page_part * DECODE_PAGES, n = min(decode_n_chosen(item) - first, (int)DECODE_PAGES);
    if (n <= 0)
        return;
    const uint8_t *const *places = a.places ? a.places + (size_t)blockIdx.x * DECODE_PAGES : nullptr;
    if (places) {
        const uintptr_t place = (int)threadIdx.x < n ? (uintptr_t)places[threadIdx.x] : 0;
        const int arrives = __syncthreads_or((place & PAGE_ARRIVES) != 0);
        if ((arrives != 0) != (a.pass == DECODE_ARRIVED))
            return;
        if (item.counts && threadIdx.x < 32)
            decode_count_fetched(a, item, first, n, place);
    }
    uint16_t *tiles = shared + S::QUERIES, *keys = tiles + warp * S::STAGES * 2 * S::TILE, *values = keys + S::TILE;
    struct attn_tile_rows<D> r;
    decode_queries<D>(a, item, shared, r);
    for (int i = warp; i < n; i += DECODE_WARPS) {
        const struct kv_page page = kv_page_at(&a.layout, &item.slow, item.chosen[first + i]);
        const uint32_t tokens = page.tokens;
        const uint8_t *bytes = places ? reinterpret_cast<const uint8_t *>((uintptr_t)places[i] & ~(uintptr_t)PAGE_BITS) : page.page;
        page_to_tile(page.sink ? a.layout.sink : a.layout.page, bytes, D, S::LD, keys, values);
        __syncwarp();
        attn_tile_step<D, 16>(r, keys, values, a.scale, [&](int h, int key, float s) {
            return tokens >> key & 1 ? decode_logit(a, item, h, (int64_t)page.subpage * SUBPAGE_TOKENS + key, s) : -INFINITY;
        });
        __syncwarp(); /* the next page is written over this one */
    }
    decode_merge_warps<D>(r, tiles, a.group, item.ml + 2 * part * a.group, decode_part_o(a, item, part));
}
