#include "tests/bench/planes_dot.h"
#include "kernels/cpu/qdot.h"

enum { AHEAD = 2 };

#if CPU_ISA_BUILD == 2
ALWAYS_INLINE qdot_codes codes_of(v16i x) { return x; }
#elif CPU_ISA_BUILD == 1
ALWAYS_INLINE qdot_codes codes_of(v16i x)
{
    const __m256i low = _mm256_set1_epi16(255);
    return (qdot_codes){{_mm256_and_si256(x.lo, low), _mm256_and_si256(x.hi, low)}, {_mm256_srli_epi16(x.lo, 8), _mm256_srli_epi16(x.hi, 8)}};
}
#else
ALWAYS_INLINE qdot_codes codes_of(v16i x)
{
    uint8_t bytes[64];
    v16i_store(bytes, x);
    return qdot_load(bytes);
}
#endif

static void pack_queries(const int32_t *q, int d, struct qdot_query digits[PLANES_HEADS][PLANES_MAX_DIM / 4])
{
    for (int h = 0; h < PLANES_HEADS; h++)
        for (int c = 0; c < d; c += LANES)
            qdot_pack(q + h * d + c, &digits[h][c / 4]);
}

ALWAYS_INLINE void ask_ahead(const struct planes_pages *p, int page)
{
    for (size_t byte = 0; page < p->n && byte < p->page_bytes; byte += 64)
        __builtin_prefetch(p->keys + (size_t)page * p->key_stride + byte, 0, 2);
}

ALWAYS_INLINE void step(qdot_sum sum[PLANES_HEADS], qdot_codes codes, struct qdot_query digits[PLANES_HEADS][PLANES_MAX_DIM / 4], int g)
{
    UNROLL for (int h = 0; h < PLANES_HEADS; h++)
        sum[h] = qdot_step(sum[h], codes, &digits[h][g]);
}

ALWAYS_INLINE void store(const qdot_sum sum[PLANES_HEADS], int32_t *ret)
{
    UNROLL for (int h = 0; h < PLANES_HEADS; h++)
        v16i_store(ret + h * LANES, qdot_total(sum[h]));
}

void ISA(bench_codes)(const struct planes_pages *p, const int32_t *q, int32_t *ret)
{
    struct qdot_query digits[PLANES_HEADS][PLANES_MAX_DIM / 4];
    pack_queries(q, p->d, digits);
    for (int i = 0; i < p->n; i++) {
        const uint8_t *keys = p->keys + (size_t)i * p->key_stride;
        qdot_sum sum[PLANES_HEADS] = {qdot_zero(), qdot_zero(), qdot_zero()};
        ask_ahead(p, i + AHEAD);
        for (int g = 0; g < p->d / 4; g++)
            step(sum, qdot_load(keys + 64 * g), digits, g);
        store(sum, ret + i * PLANES_HEADS * LANES);
    }
}

void ISA(bench_planes)(const struct planes_pages *p, const int32_t *q, int32_t *ret)
{
    struct qdot_query digits[PLANES_HEADS][PLANES_MAX_DIM / 4];
    const v16i low = v16i_set1(0x3F3F3F3F), top = v16i_set1((int32_t)0xC0C0C0C0u);
    pack_queries(q, p->d, digits);
    for (int i = 0; i < p->n; i++) {
        const uint8_t *keys = p->keys + (size_t)i * p->key_stride, *index = p->index + (size_t)i * p->index_stride;
        qdot_sum sum[PLANES_HEADS] = {qdot_zero(), qdot_zero(), qdot_zero()};
        ask_ahead(p, i + AHEAD);
        for (int g = 0; g < p->d / 16; g++) {
            const v16i fields = v16i_load(index + 64 * g);
            v16i last = v16i_and(fields, top);
            UNROLL for (int j = 0; j < 3; j++) {
                const v16i x = v16i_load(keys + 64 * (3 * g + j));
                step(sum, codes_of(v16i_or(v16i_and(x, low), v16i_and(v16i_shl(fields, 6 - 2 * j), top))), digits, 4 * g + j);
                last = v16i_or(last, v16i_shr(v16i_and(x, top), 2 + 2 * j));
            }
            step(sum, codes_of(last), digits, 4 * g + 3);
        }
        store(sum, ret + i * PLANES_HEADS * LANES);
    }
}
