/* The table of record of a KV block's bytes in the pool. A block is 128 tokens x all layers of one rank, one extent, layer-contiguous:
 *
 *   extent = [layer 0 slice][layer 1 slice] ...
 *   slice  = [kv head 0] [kv head 1] ...
 *   kv head part = [index: 8 entries, one a sub-page][sub-page 0] ... [sub-page 7]
 *
 * A sub-page is 16 tokens and the smallest unit worth fetching. Extents, slices, heads, index entries, sub-pages, and in them the codes and each
 * (step, min) pair start on 64 bytes. Keys are stored in the ROTATED basis: the whole system
 * applies RoPE and then Hadamard/sqrt(d) to queries and keys (head dims that are no power of two rotate in blocks of their largest power-of-two factor),
 * so dot products are unchanged and one rotation serves attention, codes and index. K and V are bf16 before they are coded.
 *
 * Formats of a sub-page, head dim d (a multiple of 32):
 *   K8V4: uint8  key_codes[d/4][16][4]      code of key dim 4g+i of token t at [g][t][i]; value = min + step * code
 *         fp16   key_step[16], key_min[16]  by token
 *         uint8  value_codes[2][d][4]       half h holds tokens 8h..8h+7: byte [h][c][i] has token 8h+i in its low nibble, 8h+4+i in its high nibble
 *         fp16   value_step[d/32][16], value_min[d/32][16]   by group of 32 channels and token
 *   K8V8: as K8V4 with uint8 value_codes[16][d] (token-major) and one 8-bit code a value, same steps and minima
 *   BF16: bf16 keys[d/2][16][2] (dims 2g, 2g+1 of token t at [g][t]), bf16 values[16][d]
 * In the first block of a sequence (block 0) sub-page 0, the attention sinks, is BF16 in every format; so block 0 is longer.
 *
 * Index entry (every format; for BF16 keys codes are made for the index alone):
 *         uint8  codes[d/16][16][4]         top two bits of the 8-bit key code: byte [g][t][i] holds dims 16g+i, 16g+4+i, 16g+8+i, 16g+12+i of token t
 *                                           in bits 0-1, 2-3, 4-5, 6-7
 *         fp16   key_step[16], key_min[16]  the same as in the sub-page; a 2-bit value c reads as min + step * (64 c + 31.5)
 *
 * Coding rule (asymmetric): min = fp16(min x) rounded to nearest, step = fp16((max x - min) / levels) with the rounded min. A row whose step is not
 * positive (zeros among them) has step 0 and codes 0 and reads back as min. code = clamp(round-half-even((x - min) / step), 0, levels).
 * Before coding, NaN becomes 0, anything beyond +-65504 is clamped to it, and -0 becomes +0. A BF16 page keeps every finite value as it is; NaN becomes 0
 * there and an infinity +-65536, the bf16 nearest to the limit. The encoder reports how many inputs a page
 * cannot hold: what is not finite, and in coded pages also what is beyond +-65504. A row whose range is below 2^-25 of its levels reads back as its minimum, within that range.
 * A decoded value is fma(step, code, min) in fp32; what prefill attends is that value rounded to bf16.
 *
 * Why these: docs/cache.md (keys rotated per token, values in groups of 32, exact sinks, the top two bits of the code as index).
 */
#pragma once
#include <stdbool.h>
#include <stdint.h>

enum { BLOCK_TOKENS = 128, SUBPAGE_TOKENS = 16, BLOCK_SUBPAGES = BLOCK_TOKENS / SUBPAGE_TOKENS, VALUE_GROUP = 32 };
enum { BLOCK_LAYOUT_VERSION = 1 };

enum kv_format { KV_FORMAT_K8V4, KV_FORMAT_K8V8, KV_FORMAT_BF16, KV_FORMAT_COUNT };
const char *kv_format_name(enum kv_format format); /* "k8v4", "k8v8", "bf16" */

/* The same table as C types for one head dim, with no padding anywhere; block_layout.c holds both together. fp16 and bf16 stand as uint16_t. */
#define SUBPAGE_K8V4(d) \
    struct { \
        uint8_t key_codes[(d) / 4][SUBPAGE_TOKENS][4]; \
        uint16_t key_step[SUBPAGE_TOKENS], key_min[SUBPAGE_TOKENS]; \
        uint8_t value_codes[2][d][4]; \
        uint16_t value_step[(d) / VALUE_GROUP][SUBPAGE_TOKENS], value_min[(d) / VALUE_GROUP][SUBPAGE_TOKENS]; \
    }
#define SUBPAGE_K8V8(d) \
    struct { \
        uint8_t key_codes[(d) / 4][SUBPAGE_TOKENS][4]; \
        uint16_t key_step[SUBPAGE_TOKENS], key_min[SUBPAGE_TOKENS]; \
        uint8_t value_codes[SUBPAGE_TOKENS][d]; \
        uint16_t value_step[(d) / VALUE_GROUP][SUBPAGE_TOKENS], value_min[(d) / VALUE_GROUP][SUBPAGE_TOKENS]; \
    }
#define SUBPAGE_BF16(d) \
    struct { \
        uint16_t keys[(d) / 2][SUBPAGE_TOKENS][2], values[SUBPAGE_TOKENS][d]; \
    }
#define INDEX_ENTRY(d) \
    struct { \
        uint8_t codes[(d) / 16][SUBPAGE_TOKENS][4]; \
        uint16_t key_step[SUBPAGE_TOKENS], key_min[SUBPAGE_TOKENS]; \
    }

/* Byte offsets inside one sub-page of one format, and inside an index entry. */
struct subpage_layout {
    enum kv_format format;
    uint32_t keys;       /* codes or bf16 */
    uint32_t key_step;   /* fp16 [16]; 0 for BF16 */
    uint32_t key_min;    /* fp16 [16]; 0 for BF16 */
    uint32_t values;     /* codes or bf16 */
    uint32_t value_step; /* fp16 [d/32][16]; 0 for BF16 */
    uint32_t value_min;
    uint32_t bytes;      /* whole sub-page, multiple of 64 */
};

struct block_layout {
    enum kv_format format;
    uint32_t n_layers, n_kv_heads, head_dim;
    struct subpage_layout page, sink; /* `sink` is BF16: sub-page 0 of block 0 */
    uint32_t index_step, index_min;   /* inside an index entry; codes are at 0 */
    uint32_t index_entry_bytes;       /* multiple of 64 */
    uint32_t head_bytes[2];           /* one kv head of one layer; [1]: in the first block of a sequence */
    uint32_t slice_bytes[2];          /* one layer */
    uint32_t unused;                  /* 0, where padding would be: the table is passed by value, and nothing undefined with it */
    uint64_t block_bytes[2];          /* one extent */
};

/* Fills the table. -EINVAL unless 1 <= n_layers <= 512, 1 <= n_kv_heads <= 256, head_dim a multiple of 32 in 32..256. */
int block_layout_init(struct block_layout *ret_layout, enum kv_format format, uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim);

/* Kernels on a GPU use these too. */
#ifdef __CUDACC__
#define BLOCK_LAYOUT_INLINE static inline __host__ __device__
#else
#define BLOCK_LAYOUT_INLINE static inline
#endif

/* Not values[first]: a kernel, which has the table as a parameter, would copy it to memory of each thread for that. */
BLOCK_LAYOUT_INLINE uint32_t block_of_two(const uint32_t values[2], bool first)
{
    return first ? values[1] : values[0];
}

BLOCK_LAYOUT_INLINE uint64_t block_slice_offset(const struct block_layout *l, bool first, uint32_t layer)
{
    return (uint64_t)layer * block_of_two(l->slice_bytes, first);
}
/* Offsets inside one layer's slice. */
BLOCK_LAYOUT_INLINE uint32_t block_index_offset(const struct block_layout *l, bool first, uint32_t kv_head, uint32_t subpage)
{
    return kv_head * block_of_two(l->head_bytes, first) + subpage * l->index_entry_bytes;
}
BLOCK_LAYOUT_INLINE uint32_t block_subpage_offset(const struct block_layout *l, bool first, uint32_t kv_head, uint32_t subpage)
{
    uint32_t pages = kv_head * block_of_two(l->head_bytes, first) + BLOCK_SUBPAGES * l->index_entry_bytes;
    if (subpage == 0)
        return pages;
    return pages + (first ? l->sink.bytes : l->page.bytes) + (subpage - 1) * l->page.bytes;
}
/* A copy of a block's index alone: [n_layers][n_kv_heads][BLOCK_SUBPAGES] entries, without what lies between them in a slice. */
BLOCK_LAYOUT_INLINE uint64_t block_index_copy_offset(const struct block_layout *l, uint32_t layer, uint32_t kv_head, uint32_t subpage)
{
    return (((uint64_t)layer * l->n_kv_heads + kv_head) * BLOCK_SUBPAGES + subpage) * l->index_entry_bytes;
}
BLOCK_LAYOUT_INLINE uint64_t block_index_bytes(const struct block_layout *l)
{
    return block_index_copy_offset(l, l->n_layers, 0, 0);
}
/* The layout of a given sub-page: `sink` for sub-page 0 of a first block, else `page`. */
BLOCK_LAYOUT_INLINE const struct subpage_layout *block_subpage_layout(const struct block_layout *l, bool first, uint32_t subpage)
{
    return first && subpage == 0 ? &l->sink : &l->page;
}
