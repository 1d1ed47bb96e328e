/* Two ways to store the keys of K8 sub-pages beside their 2-bit index, for bench_planes: the whole codes, whose top two bits the index repeats, or planes, where the page
 * holds the lower six bits and attention puts them together with the index. Each gives sum of code * q of `heads` queries for 16 tokens a page.
 *
 * Codes: [d/4][16 tokens][4]. Index: [d/16][16][4], bits 2 j of a byte belong to dim group j of 4. Planes: [d/16][3][16][4]: the low six bits of groups 0, 1 and 2, and in
 * the two bits above them those of group 3, highest first. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { PLANES_HEADS = 3, PLANES_MAX_DIM = 256 };

struct planes_pages {
    const uint8_t *keys, *index; /* page i at i * its stride */
    size_t key_stride, index_stride, page_bytes; /* page_bytes: all of a page, asked for ahead as attention does */
    int n, d;
};

/* q [PLANES_HEADS, d] within +-4064; ret [n, PLANES_HEADS, 16]. */
#define PLANES_VERSION(isa)                                                                  \
    void bench_codes_##isa(const struct planes_pages *p, const int32_t *q, int32_t *ret);    \
    void bench_planes_##isa(const struct planes_pages *p, const int32_t *q, int32_t *ret);
PLANES_VERSION(plain)
PLANES_VERSION(avx2)
PLANES_VERSION(avx512)
