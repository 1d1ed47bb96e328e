/* Fast rows of decode attention, a block a partial of 256 of them; grid [parts, items], blocks beyond an item's parts leave at once. A partial has two steps: logits to (m, l) and to the weights
 * exp(logit - m), rounded to bf16; then o, the weights times the values. They run in one launch, or in two with the choice of pages between them, which needs the log-sum-exp alone: then the
 * weights wait where o will be, and the values are read while the gather stream fetches what was chosen. Both ways give the same bits.
 *
 * A warp has every fourth 16 rows of the part, and a tile of shared memory for each: keys arrive by cp.async, all at once, and where a tile's keys have been used its values come.
 * Weights of a part: [16 tiles, group, 16 rows]. */
#pragma once
#include "kernels/cuda/attn_decode_parts.cuh"

enum decode_rows_pass { DECODE_ROWS_NONE, DECODE_ROWS_WHOLE, DECODE_ROWS_LOGITS, DECODE_ROWS_VALUES };
enum { ROW_TILES = DECODE_ROWS / 16 / DECODE_WARPS /* of a warp */ };
static_assert((int)DECODE_PART_ROW * sizeof(float) == DECODE_ROWS * sizeof(uint16_t), "the weights take what is between o's heads");

struct row_part {
    struct kv_rows rows;
    int first, n; /* rows first .. first + n - 1 */
    float *ml, *o;
};

DEVICE struct row_part row_part_of(const struct decode_args &a, const struct decode_item &item, int part)
{
    const int run = part >= item.n_row_parts[0], first = (part - (run ? item.n_row_parts[0] : 0)) * DECODE_ROWS;
    return {item.rows[run], first, min(item.rows[run].n - first, (int)DECODE_ROWS), item.ml + 2 * part * a.group, decode_part_o(a, item, part)};
}

/* The first row, in the part, of this warp's tile i. */
DEVICE int row_tile_at(int i)
{
    return (i * DECODE_WARPS + (int)threadIdx.x / 32) * 16;
}

/* Begins to copy the part's rows at, at + 1, ..., of keys or of values; behind the last one zeros. A group of copies of its own, with nothing in it for a tile without rows. */
template <int D> DEVICE void row_tile_copy(uint16_t *tile, const uint16_t *rows, const struct row_part &p, int at)
{
    for (int i = (int)threadIdx.x % 32; at < p.n && i < 16 * (D / 8); i += 32) {
        const int row = i / (D / 8), c = i % (D / 8) * 8;
        const bool there = at + row < p.n;
        copy_async16(tile + row * (D + 8) + c, rows + (there ? (int64_t)(p.first + at + row) * D + c : 0), there);
    }
    copy_async_commit();
}

/* Logits of the warp's tiles, -inf behind the last row; the copies of their keys are the last ROW_TILES groups. With `then_values` each tile goes on to its values. */
template <int D>
DEVICE void row_logits(const struct decode_args &a, const struct decode_item &item, const struct row_part &p, const struct attn_tile_rows<D> &r, uint16_t *tiles, bool then_values,
                       float s[ROW_TILES][2][4])
{
    const int lane = (int)threadIdx.x % 32;
    UNROLL for (int i = 0; i < ROW_TILES; i++) {
        const int at = row_tile_at(i);
        uint16_t *tile = tiles + i * decode_shared<D>::TILE;
        copy_async_wait<ROW_TILES - 1>();
        __syncwarp();
        if (at < p.n)
            attn_tile_logits<D, 16>(r, tile, a.scale, s[i]);
        UNROLL for (int n = 0; n < 2; n++)
            UNROLL for (int j = 0; j < 4; j++) {
                const int h = lane / 4 + j / 2 * 8, key = at + n * 8 + lane % 4 * 2 + j % 2, row = p.first + key;
                s[i][n][j] = key < p.n ? decode_logit(a, item, h, p.rows.positions ? p.rows.positions[row] : p.rows.pos0 + row, s[i][n][j]) : -INFINITY;
            }
        __syncwarp(); /* values may come over the keys */
        if (then_values)
            row_tile_copy<D>(tile, p.rows.v, p, at);
        else
            copy_async_commit();
    }
}

/* Logits to weights of the part's maximum, and the part's (m, l), by the whole block. */
DEVICE void row_weights(const struct row_part &p, int group, float s[ROW_TILES][2][4], uint32_t weights[ROW_TILES][4])
{
    __shared__ float part_m[DECODE_WARPS][16], part_l[DECODE_WARPS][16];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
    UNROLL for (int half = 0; half < 2; half++) {
        UNROLL for (int i = 0; i < ROW_TILES; i++)
            UNROLL for (int n = 0; n < 2; n++)
                m[half] = fmaxf(m[half], fmaxf(s[i][n][2 * half], s[i][n][2 * half + 1]));
        for (int x = 1; x < 4; x *= 2) /* the four lanes of a head */
            m[half] = fmaxf(m[half], __shfl_xor_sync(0xFFFFFFFFu, m[half], x));
        if (lane % 4 == 0)
            part_m[warp][lane / 4 + 8 * half] = m[half];
    }
    __syncthreads();
    UNROLL for (int half = 0; half < 2; half++) {
        for (int w = 0; w < DECODE_WARPS; w++)
            m[half] = fmaxf(m[half], part_m[w][lane / 4 + 8 * half]);
        UNROLL for (int i = 0; i < ROW_TILES; i++)
            UNROLL for (int j = 0; j < 4; j++) {
                float &x = s[i][j / 2][2 * half + j % 2];
                x = exp_nonpositive(x - m[half]);
                l[half] += x;
            }
        for (int x = 1; x < 4; x *= 2)
            l[half] += __shfl_xor_sync(0xFFFFFFFFu, l[half], x);
        if (lane % 4 == 0)
            part_l[warp][lane / 4 + 8 * half] = l[half];
    }
    UNROLL for (int i = 0; i < ROW_TILES; i++)
        attn_tile_pack(s[i], weights[i]);
    __syncthreads();
    if ((int)threadIdx.x >= group)
        return;
    float total = 0, max = -INFINITY;
    for (int w = 0; w < DECODE_WARPS; w++) {
        total += part_l[w][threadIdx.x];
        max = fmaxf(max, part_m[w][threadIdx.x]);
    }
    p.ml[2 * threadIdx.x] = max;
    p.ml[2 * threadIdx.x + 1] = total;
}

/* visit(word in memory, word of the fragments) for every word of the weights that this lane has: two rows of a head. */
template <class Visit> DEVICE void row_each_weight(const struct row_part &p, int group, uint32_t weights[ROW_TILES][4], Visit visit)
{
    const int lane = (int)threadIdx.x % 32;
    uint32_t *memory = reinterpret_cast<uint32_t *>(p.o);
    UNROLL for (int i = 0; i < ROW_TILES; i++)
        UNROLL for (int j = 0; j < 4; j++) {
            const int at = row_tile_at(i), h = lane / 4 + j % 2 * 8;
            if (at < p.n && h < group)
                visit(memory[(at / 16 * group + h) * 8 + j / 2 * 4 + lane % 4], weights[i][j]);
        }
}

/* o of the part: weights times values, then the sum of the warps. The copies of the values are the last groups. */
template <int D> DEVICE void row_output(const struct row_part &p, int group, const uint32_t weights[ROW_TILES][4], struct attn_tile_rows<D> &r, uint16_t *tiles)
{
    typedef struct decode_shared<D> S;
    float *part_o = reinterpret_cast<float *>(tiles);
    const int warp = (int)threadIdx.x / 32;
    UNROLL for (int i = 0; i < ROW_TILES; i++) {
        copy_async_wait<ROW_TILES - 1>();
        __syncwarp();
        if (row_tile_at(i) < p.n)
            attn_tile_values<D>(r, weights[i], tiles + (warp * ROW_TILES + i) * S::TILE);
        copy_async_commit(); /* of nothing, so that one more has arrived at the next wait */
    }
    __syncthreads(); /* nobody reads values, or the weights where o goes, any more */
    decode_share_o<D>(r, group, part_o);
    __syncthreads();
    for (int i = (int)threadIdx.x; i < group * D; i += DECODE_THREADS) {
        const float *from = part_o + i / D * S::O_LD + i % D;
        float sum = from[0];
        for (int w = 1; w < DECODE_WARPS; w++)
            sum += from[w * 16 * S::O_LD];
        p.o[i] = sum;
    }
}

template <int D, enum decode_rows_pass PASS> __global__ void __launch_bounds__(DECODE_THREADS) decode_rows_kernel(const struct decode_args a)
{
    DYNAMIC_SHARED(uint16_t, shared);
    typedef struct decode_shared<D> S;
    const struct decode_item &item = a.items[blockIdx.y];
    if ((int)blockIdx.x >= item.n_row_parts[0] + item.n_row_parts[1])
        return;
    const struct row_part p = row_part_of(a, item, (int)blockIdx.x);
    uint16_t *tiles = shared + S::QUERIES, *own = tiles + (int)threadIdx.x / 32 * ROW_TILES * S::TILE;
    static_assert(S::STAGES * 2 == ROW_TILES, "a tile of shared memory for each of the warp's");
    struct attn_tile_rows<D> r;
    uint32_t weights[ROW_TILES][4] = {};
    UNROLL for (int i = 0; i < ROW_TILES; i++)
        row_tile_copy<D>(own + i * S::TILE, PASS == DECODE_ROWS_VALUES ? p.rows.v : p.rows.k, p, row_tile_at(i));
    if (PASS == DECODE_ROWS_VALUES) {
        attn_tile_init<D>(r);
        row_each_weight(p, a.group, weights, [](uint32_t &memory, uint32_t &weight) { weight = memory; });
    } else {
        float s[ROW_TILES][2][4] = {};
        decode_queries<D>(a, item, shared, r);
        row_logits<D>(a, item, p, r, own, PASS == DECODE_ROWS_WHOLE, s);
        row_weights(p, a.group, s, weights);
    }
    if (PASS == DECODE_ROWS_LOGITS)
        row_each_weight(p, a.group, weights, [](uint32_t &memory, uint32_t &weight) { memory = weight; });
    else
        row_output<D>(p, a.group, weights, r, tiles);
}
