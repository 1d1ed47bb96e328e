/* Codes blocks of 128 tokens into one layer's slices, by the rule of proto/block_layout.h: the bytes of kernels/cpu/block_encode.c.
 *
 * A block of 128 threads for each (KV head, sub-page), grid [8, n_kv_heads, n]; a warp codes a row (a token's key, or 32 of its values) at a time, a lane every 32nd element: minimum and
 * maximum by shuffles, then codes to shared memory, one a byte. Then all threads interleave codes into the page and the index entry.
 * Shared memory: two arrays [16, d] of codes, 8 KiB. */
#include "kernels/cuda/block_page.cuh"
#include <errno.h>

enum { ENCODE_THREADS = 128, ENCODE_WARPS = ENCODE_THREADS / 32, KV_MAX_DIM = 256 };
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

/* One row by one warp. Returns how many of this lane's magnitudes are `beyond` or above. */
DEVICE int codec_row(const bf16_t *x, int n, float levels, int beyond, uint8_t *codes, uint16_t *ret_step, uint16_t *ret_min)
{
    const int lane = (int)threadIdx.x % 32;
    float low = INFINITY, high = -INFINITY;
    int n_bad = 0;
    for (int c = lane; c < n; c += 32) {
        const float v = codec_load(x[c]);
        low = v < low ? v : low;
        high = v > high ? v : high;
        n_bad += (x[c] & 0x7FFF) >= beyond;
    }
    low = -warp_max(-low);
    high = warp_max(high);
    const uint16_t min = fp16_from_float(low);
    const float min_value = fp16_to_float(min), exact = (high - min_value) / levels;
    const uint16_t step = exact > 0 ? fp16_from_float(exact) : 0;
    const float step_value = fp16_to_float(step);
    for (int c = lane; c < n; c += 32) {
        float code = step == 0 ? 0.0f : (codec_load(x[c]) - min_value) / step_value;
        code = code > levels ? levels : code;
        code = code > 0 ? code : 0;
        codes[c] = (uint8_t)rintf(code); /* ties to even */
    }
    *ret_step = step;
    *ret_min = min;
    return n_bad;
}

DEVICE void put16(uint8_t *to, uint32_t offset, int i, uint16_t x)
{
    reinterpret_cast<uint16_t *>(to + offset)[i] = x;
}

/* Keys: codes of all tokens, steps and minima to the entry and, of a coded page, to the page. */
DEVICE int encode_keys(const struct block_layout &layout, const struct subpage_layout &l, const bf16_t *k, int d, uint8_t *codes, uint8_t *page, uint8_t *entry)
{
    int n_bad = 0;
    for (int t = (int)threadIdx.x / 32; t < SUBPAGE_TOKENS; t += ENCODE_WARPS) {
        uint16_t step, min;
        n_bad += codec_row(k + t * d, d, 255, l.format == KV_FORMAT_BF16 ? BEYOND_BF16 : BEYOND_FP16, codes + t * d, &step, &min);
        if (threadIdx.x % 32 == 0) {
            put16(entry, layout.index_step, t, step);
            put16(entry, layout.index_min, t, min);
            if (l.format != KV_FORMAT_BF16) {
                put16(page, l.key_step, t, step);
                put16(page, l.key_min, t, min);
            }
        }
    }
    return n_bad;
}

DEVICE int encode_values(const struct subpage_layout &l, const bf16_t *v, int d, uint8_t *codes, uint8_t *page)
{
    const int groups = d / VALUE_GROUP;
    int n_bad = 0;
    for (int row = (int)threadIdx.x / 32; row < SUBPAGE_TOKENS * groups; row += ENCODE_WARPS) {
        const int t = row / groups, g = row % groups, at = t * d + g * VALUE_GROUP;
        uint16_t step, min;
        n_bad += codec_row(v + at, VALUE_GROUP, l.format == KV_FORMAT_K8V8 ? 255.0f : 15.0f, BEYOND_FP16, codes + at, &step, &min);
        if (threadIdx.x % 32 == 0) {
            put16(page, l.value_step, g * SUBPAGE_TOKENS + t, step);
            put16(page, l.value_min, g * SUBPAGE_TOKENS + t, min);
        }
    }
    return n_bad;
}

/* Words of four codes: of keys (dims 4g .. 4g + 3 of a token), of the index (top bits of 16 dims), of values (a channel's tokens by nibbles, or a token's channels). */
DEVICE void interleave(const struct subpage_layout &l, const uint8_t *key_codes, const uint8_t *value_codes, int d, uint8_t *page, uint8_t *entry)
{
    const uint32_t *keys = reinterpret_cast<const uint32_t *>(key_codes), *values = reinterpret_cast<const uint32_t *>(value_codes);
    for (int i = (int)threadIdx.x; i < SUBPAGE_TOKENS * d / 16; i += ENCODE_THREADS) {
        const int g = i / SUBPAGE_TOKENS, t = i % SUBPAGE_TOKENS;
        const uint32_t *w = keys + (t * d + 16 * g) / 4;
        const uint32_t top = (w[0] >> 6 & 0x03030303u) | (w[1] >> 4 & 0x0C0C0C0Cu) | (w[2] >> 2 & 0x30303030u) | (w[3] & 0xC0C0C0C0u);
        reinterpret_cast<uint32_t *>(entry)[i] = top;
    }
    if (l.format == KV_FORMAT_BF16)
        return;
    for (int i = (int)threadIdx.x; i < SUBPAGE_TOKENS * d / 4; i += ENCODE_THREADS) {
        const int g = i / SUBPAGE_TOKENS, t = i % SUBPAGE_TOKENS;
        reinterpret_cast<uint32_t *>(page + l.keys)[i] = keys[(t * d) / 4 + g];
        if (l.format == KV_FORMAT_K8V8)
            reinterpret_cast<uint32_t *>(page + l.values)[i] = values[i];
    }
    for (int i = (int)threadIdx.x; l.format == KV_FORMAT_K8V4 && i < 2 * d; i += ENCODE_THREADS) {
        const uint8_t *low = value_codes + 8 * (i / d) * d + i % d;
        uint32_t word = 0;
        for (int j = 0; j < 4; j++)
            word |= (uint32_t)(low[j * d] | low[(j + 4) * d] << 4) << 8 * j;
        reinterpret_cast<uint32_t *>(page + l.values)[i] = word;
    }
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
        put16(page, l.keys, (c / 2 * SUBPAGE_TOKENS + t) * 2 + c % 2, codec_bf16(k[i]));
        put16(page, l.values, i, codec_bf16(v[i]));
        n_bad += !is_finite16(v[i]);
    }
    return n_bad;
}

__global__ void __launch_bounds__(ENCODE_THREADS) block_encode_kernel(const struct block_layout layout, const struct block_job *jobs, bool attended, int32_t *n_bad)
{
    __shared__ __align__(16) uint8_t key_codes[SUBPAGE_TOKENS * KV_MAX_DIM], value_codes[SUBPAGE_TOKENS * KV_MAX_DIM];
    const struct block_job &job = jobs[blockIdx.z];
    const uint32_t subpage = blockIdx.x, head = blockIdx.y;
    const int d = (int)layout.head_dim;
    const struct subpage_layout &l = job.first && subpage == 0 ? layout.sink : layout.page;
    uint8_t *page = job.slice + block_subpage_offset(&layout, job.first, head, subpage), *entry = job.slice + block_index_offset(&layout, job.first, head, subpage);
    const int64_t row = (int64_t)subpage * SUBPAGE_TOKENS * d;
    const bf16_t *k = job.exact_k + head * job.exact_stride + row, *v = job.exact_v + head * job.exact_stride + row;
    int bad = encode_keys(layout, l, k, d, key_codes, page, entry);
    bad += l.format == KV_FORMAT_BF16 ? encode_bf16(l, k, v, d, page) : encode_values(l, v, d, value_codes, page);
    __syncthreads();
    interleave(l, key_codes, value_codes, d, page, entry);
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
