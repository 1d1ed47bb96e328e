/* Codes blocks of 128 tokens into one layer's slices, by the rule of proto/block_layout.h: the bytes of kernels/cpu/block_encode.c.
 *
 * A block of 128 threads for each (KV head, sub-page), grid [8, n_kv_heads, n]. A thread codes eight neighbours of a row (a token's key, or 32 of its values), a row is done by the lanes that it
 * takes: minimum and maximum by shuffles, then codes to shared memory, one a byte, and the row's scales. Then all threads interleave codes into the page and the index entry, 16 bytes a store.
 * Shared memory: two arrays [16, d] of codes, those of keys d + 8 bytes apart, so that a word of 16 tokens lies in 16 banks; and scales: 8.7 KiB. */
#include "kernels/cuda/block_page.cuh"
#include <errno.h>

enum { ENCODE_THREADS = 128, LANE_ROW = 8 /* elements of a row that a thread codes */, KV_MAX_DIM = 256 };
#define CODEC_LIMIT 65504.0f /* largest finite fp16 */
enum { BEYOND_FP16 = 0x4780, BEYOND_BF16 = 0x7F80 }; /* magnitudes in bf16: the first beyond that limit, infinity */

/* A value as it is coded: NaN is 0, beyond +-65504 is clamped, -0 is +0. */
DEVICE float codec_load(uint16_t bits)
{
    const float x = bf16_to_float(bits);
    if (!(x == x))
        return 0.0f;
    return (x > CODEC_LIMIT ? CODEC_LIMIT : x < -CODEC_LIMIT ? -CODEC_LIMIT : x) + 0.0f;
}

DEVICE bool is_finite16(uint16_t bits)
{
    return (bits & 0x7F80) != 0x7F80;
}

/* Steps and minima of a page's rows, as the page has them: of the tokens' keys; of values by group of channels and token. */
struct block_scales {
    uint16_t key_step[SUBPAGE_TOKENS], key_min[SUBPAGE_TOKENS];
    uint16_t value_step[KV_MAX_DIM / VALUE_GROUP * SUBPAGE_TOKENS], value_min[KV_MAX_DIM / VALUE_GROUP * SUBPAGE_TOKENS];
};

/* One row by `lanes` neighbouring lanes, a power of two, eight elements at `x` for each that is `there`; by whole warps. Codes go to `codes`, on 8 bytes, scales to step_at and min_at by the first lane.
 * Returns how many of this lane's magnitudes are `beyond` or above. */
DEVICE int codec_row(const bf16_t *x, bool there, int lanes, float levels, int beyond, uint8_t *codes, uint16_t *step_at, uint16_t *min_at)
{
    const uint4 words = there ? *reinterpret_cast<const uint4 *>(x) : make_uint4(0, 0, 0, 0);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
    float v[LANE_ROW], low = INFINITY, high = -INFINITY;
    uint32_t code_words[2] = {0, 0};
    int n_bad = 0;
    UNROLL for (int i = 0; i < LANE_ROW; i++) {
        const uint16_t bits = (uint16_t)(word[i / 2] >> i % 2 * 16);
        v[i] = codec_load(bits);
        low = v[i] < low ? v[i] : low;
        high = v[i] > high ? v[i] : high;
        n_bad += there && (bits & 0x7FFF) >= beyond;
    }
    low = there ? low : INFINITY;
    high = there ? high : -INFINITY;
    for (int h = 1; h < lanes; h *= 2) {
        const float other_low = __shfl_xor_sync(0xFFFFFFFFu, low, h), other_high = __shfl_xor_sync(0xFFFFFFFFu, high, h);
        low = other_low < low ? other_low : low;
        high = other_high > high ? other_high : high;
    }
    const uint16_t min = fp16_from_float(low);
    const float min_value = fp16_to_float(min), exact = (high - min_value) / levels;
    const uint16_t step = exact > 0 ? fp16_from_float(exact) : 0;
    const float step_value = fp16_to_float(step);
    UNROLL for (int i = 0; i < LANE_ROW; i++) {
        float code = step == 0 ? 0.0f : (v[i] - min_value) / step_value;
        code = code > levels ? levels : code;
        code = code > 0 ? code : 0;
        code_words[i / 4] |= (uint32_t)rintf(code) << i % 4 * 8; /* ties to even */
    }
    if (there)
        *reinterpret_cast<uint2 *>(codes) = make_uint2(code_words[0], code_words[1]);
    if ((int)threadIdx.x % lanes == 0) {
        *step_at = step;
        *min_at = min;
    }
    return n_bad;
}

/* Rows of key codes in shared memory are this many bytes apart. */
DEVICE int key_ld(int d)
{
    return d + 8;
}

DEVICE int encode_keys(const struct subpage_layout &l, const bf16_t *k, int d, uint8_t *codes, struct block_scales *scales)
{
    const int beyond = l.format == KV_FORMAT_BF16 ? BEYOND_BF16 : BEYOND_FP16;
    int lanes = 1, n_bad = 0;
    while (lanes * LANE_ROW < d)
        lanes *= 2;
    const int c = (int)threadIdx.x % lanes * LANE_ROW;
    for (int t = (int)threadIdx.x / lanes; t < SUBPAGE_TOKENS; t += ENCODE_THREADS / lanes) /* the same for a warp: at most eight rows of it, which divide 16 */
        n_bad += codec_row(k + t * d + c, c < d, lanes, 255, beyond, codes + t * key_ld(d) + c, &scales->key_step[t], &scales->key_min[t]);
    return n_bad;
}

DEVICE int encode_values(const struct subpage_layout &l, const bf16_t *v, int d, uint8_t *codes, struct block_scales *scales)
{
    enum { LANES = VALUE_GROUP / LANE_ROW };
    const int groups = d / VALUE_GROUP, c = (int)threadIdx.x % LANES * LANE_ROW;
    int n_bad = 0;
    for (int row = (int)threadIdx.x / LANES; row < SUBPAGE_TOKENS * groups; row += ENCODE_THREADS / LANES) {
        const int scale = row % groups * SUBPAGE_TOKENS + row / groups, at = row * VALUE_GROUP + c;
        n_bad += codec_row(v + at, true, LANES, l.format == KV_FORMAT_K8V8 ? 255.0f : 15.0f, BEYOND_FP16, codes + at, &scales->value_step[scale], &scales->value_min[scale]);
    }
    return n_bad;
}

/* n fp16, an even number, from shared memory; by all threads. */
DEVICE void put_scales(uint8_t *to, const uint16_t *scales, int n)
{
    for (int i = (int)threadIdx.x; i < n / 2; i += ENCODE_THREADS)
        reinterpret_cast<uint32_t *>(to)[i] = reinterpret_cast<const uint32_t *>(scales)[i];
}

/* Codes of eight tokens in each channel: four in the low nibbles of a word, four in the high ones; four channels a store. */
DEVICE void interleave_nibbles(const uint8_t *codes, int d, uint8_t *to)
{
    for (int i = (int)threadIdx.x; i < 2 * (d / 4); i += ENCODE_THREADS) {
        const uint32_t *tokens = reinterpret_cast<const uint32_t *>(codes + i / (d / 4) * 8 * d) + i % (d / 4); /* of one token after the other: four channels, a byte each */
        uint32_t pair[4], word[4] = {0, 0, 0, 0};
        UNROLL for (int j = 0; j < 4; j++)
            pair[j] = tokens[j * (d / 4)] | tokens[(j + 4) * (d / 4)] << 4;
        UNROLL for (int c = 0; c < 4; c++)
            UNROLL for (int j = 0; j < 4; j++)
                word[c] |= (pair[j] >> 8 * c & 255) << 8 * j;
        reinterpret_cast<uint4 *>(to)[i] = make_uint4(word[0], word[1], word[2], word[3]);
    }
}

/* Words of four codes: of the index (top bits of 16 dims), of keys (dims 4g .. 4g + 3 of four tokens), of values (by nibbles, or as they are). */
DEVICE void interleave(const struct subpage_layout &l, const uint8_t *key_codes, const uint8_t *value_codes, int d, uint8_t *page, uint8_t *entry)
{
    for (int i = (int)threadIdx.x; i < SUBPAGE_TOKENS * d / 16; i += ENCODE_THREADS) {
        const uint2 *w = reinterpret_cast<const uint2 *>(key_codes + i % SUBPAGE_TOKENS * key_ld(d) + i / SUBPAGE_TOKENS * 16);
        const uint2 low = w[0], high = w[1];
        reinterpret_cast<uint32_t *>(entry)[i] = (low.x >> 6 & 0x03030303u) | (low.y >> 4 & 0x0C0C0C0Cu) | (high.x >> 2 & 0x30303030u) | (high.y & 0xC0C0C0C0u);
    }
    if (l.format == KV_FORMAT_BF16)
        return;
    for (int i = (int)threadIdx.x; i < SUBPAGE_TOKENS * d / 16; i += ENCODE_THREADS) {
        const uint32_t *w = reinterpret_cast<const uint32_t *>(key_codes + i % 4 * 4 * key_ld(d)) + i / 4;
        const int row = key_ld(d) / 4;
        reinterpret_cast<uint4 *>(page + l.keys)[i] = make_uint4(w[0], w[row], w[2 * row], w[3 * row]);
        if (l.format == KV_FORMAT_K8V8)
            reinterpret_cast<uint4 *>(page + l.values)[i] = reinterpret_cast<const uint4 *>(value_codes)[i];
    }
    if (l.format == KV_FORMAT_K8V4)
        interleave_nibbles(value_codes, d, page + l.values);
}

DEVICE void interleave_scales(const struct block_layout &layout, const struct subpage_layout &l, const struct block_scales &scales, int d, uint8_t *page, uint8_t *entry)
{
    const int n_values = d / VALUE_GROUP * SUBPAGE_TOKENS;
    put_scales(entry + layout.index_step, scales.key_step, SUBPAGE_TOKENS);
    put_scales(entry + layout.index_min, scales.key_min, SUBPAGE_TOKENS);
    if (l.format == KV_FORMAT_BF16)
        return;
    put_scales(page + l.key_step, scales.key_step, SUBPAGE_TOKENS);
    put_scales(page + l.key_min, scales.key_min, SUBPAGE_TOKENS);
    put_scales(page + l.value_step, scales.value_step, n_values);
    put_scales(page + l.value_min, scales.value_min, n_values);
}

/* As a BF16 page holds it: NaN is 0, an infinity the bf16 nearest to +-65504. */
DEVICE uint16_t codec_bf16(uint16_t x)
{
    return is_finite16(x) ? x : (x & 0x7F) ? (uint16_t)0 : (uint16_t)((x & 0x8000) | 0x4780);
}

/* Values that were not finite are counted here, keys with the index. */
DEVICE int encode_bf16(const struct subpage_layout &l, const bf16_t *k, const bf16_t *v, int d, uint8_t *page)
{
    int n_bad = 0;
    for (int i = (int)threadIdx.x; i < SUBPAGE_TOKENS * d; i += ENCODE_THREADS) {
        const int t = i / d, c = i % d;
        reinterpret_cast<uint16_t *>(page + l.keys)[(c / 2 * SUBPAGE_TOKENS + t) * 2 + c % 2] = codec_bf16(k[i]);
        reinterpret_cast<uint16_t *>(page + l.values)[i] = codec_bf16(v[i]);
        n_bad += !is_finite16(v[i]);
    }
    return n_bad;
}

__global__ void __launch_bounds__(ENCODE_THREADS) block_encode_kernel(const struct block_layout layout, const struct block_job *jobs, bool attended, int32_t *n_bad)
{
    __shared__ __align__(16) uint8_t key_codes[SUBPAGE_TOKENS * (KV_MAX_DIM + 8)], value_codes[SUBPAGE_TOKENS * KV_MAX_DIM];
    __shared__ __align__(16) struct block_scales scales;
    const struct block_job &job = jobs[blockIdx.z];
    const uint32_t subpage = blockIdx.x, head = blockIdx.y;
    const int d = (int)layout.head_dim;
    const struct subpage_layout l = page_layout(layout, job.first && subpage == 0);
    uint8_t *page = job.slice + block_subpage_offset(&layout, job.first, head, subpage), *entry = job.slice + block_index_offset(&layout, job.first, head, subpage);
    const int64_t row = (int64_t)subpage * SUBPAGE_TOKENS * d;
    const bf16_t *k = job.exact_k + head * job.exact_stride + row, *v = job.exact_v + head * job.exact_stride + row;
    int bad = encode_keys(l, k, d, key_codes, &scales);
    bad += l.format == KV_FORMAT_BF16 ? encode_bf16(l, k, v, d, page) : encode_values(l, v, d, value_codes, &scales);
    __syncthreads();
    interleave(l, key_codes, value_codes, d, page, entry);
    interleave_scales(layout, l, scales, d, page, entry);
    if (bad > 0)
        atomicAdd(n_bad, bad);
    if (!attended && !job.index)
        return;
    __syncthreads(); /* the page is read back from where it was written */
    if (attended)
        page_read(l, page, d, job.k + head * job.head_stride + row, job.v + head * job.head_stride + row);
    index_copy(layout, job, head, subpage);
}

extern "C" int cuda_block_encode(struct stream *s, const struct block_params *blocks, int n, bool attended, int32_t *bad)
{
    const struct block_job *jobs;
    if (n <= 0)
        return n < 0 ? -EINVAL : 0;
    const int r = block_jobs(s, blocks, n, &jobs);
    if (r < 0)
        return r;
    return LAUNCH(block_encode_kernel, dim3(BLOCK_SUBPAGES, blocks->layout->n_kv_heads, (unsigned)n), ENCODE_THREADS, 0, s, *blocks->layout, jobs, attended, bad);
}
