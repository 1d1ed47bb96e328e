/* The mathematics: every op of the model and of the cache, on raw pointers, sizes and a stream. A backend fills `struct kernel_ops`.
 *
 * Thread: each call comes from the thread that owns the device. Ops are asynchronous on the stream (CPU: done on return). Memory is the caller's.
 * Errors: 0, -EINVAL (a shape that no caller may ask for), -ENOTSUP (a shape this backend has no kernel for), -ENOMEM (ops that scratch_bytes counts); nothing is written then.
 * Shapes are row-major, n_heads = n_kv_heads * group; activations fp32, K and V bf16 bits, indices int32. What matmul reads has the backend's input type (kernel_ops.input_bytes):
 * whoever makes it (rmsnorm, silu_mul, attention) rounds it where it is written, which is cheaper than a pass over fp32 before each product, and takes half the memory.
 *
 * Determinism (docs/design.md): every output element is a fixed expression of its inputs, whatever the batch, chunk, thread count or instruction set.
 * GEMM: one chain of fma over k ascending from 0. Other sums: 16 lanes (element i goes to lane i % 16, in order), then the tree
 * ((l0+l8)+(l4+l12)) + ... given by reduce16() in kernels/cpu/lanes.h. exp, log, sincos are the project's own (kernels/cpu/vmath.h).
 *
 * Partials of attention are (m, l, o): m = max logit (natural units, scale applied), l = sum exp(logit - m), o = sum exp(logit - m) * v, not divided by l.
 * An empty partial is m = -INFINITY, l = 0, o = 0. */
#pragma once
#include "kernels/device.h"
#include "kernels/device_page_cache.h"
#include "proto/block_layout.h"
#include <stdbool.h>
#include <stdint.h>

typedef uint16_t bf16_t; /* the upper half of an fp32 */
typedef uint16_t fp16_t;

/* ---- weights ---- */
/* Rows from a multiple of this up to another multiple, or to the matrix's end, are a packed matrix of their own, at weight_bytes(first + unit) - weight_bytes(unit) bytes of the whole one's. */
enum { WEIGHT_ROWS_UNIT = 32 };

enum weight_dtype { WEIGHT_F32, WEIGHT_F16, WEIGHT_BF16, WEIGHT_Q8_0, WEIGHT_Q4_0, WEIGHT_Q4_1, WEIGHT_Q5_0, WEIGHT_Q4_K, WEIGHT_Q5_K, WEIGHT_Q6_K, WEIGHT_DTYPE_COUNT };

/* A matrix [n_rows, n_cols] in the backend's packed layout (CPU: panels of 16 rows, codes at their stored width). y = x W^T. */
struct weight {
    enum weight_dtype dtype;
    int64_t n_rows, n_cols;
    const void *packed; /* device memory, owned by the model */
};

struct matmul_out {
    const struct weight *w;
    float *y;              /* [n, n_rows] with row stride ld_y */
    int64_t ld_y;
    const float *bias;     /* [n_rows] or NULL; added after the chain */
    const float *residual; /* like y, may be y; added last; or NULL */
};

/* ---- RoPE ---- */
enum rope_style { ROPE_INTERLEAVED /* pairs (2i, 2i+1): GGUF llama */, ROPE_HALVES /* pairs (i, i + d/2): Hugging Face, GGUF qwen2 */ };

/* Where the K and V of one token go: head h at k + h * head_stride. */
struct kv_dst {
    bf16_t *k, *v;
    int64_t head_stride; /* elements */
};

struct qkv_params {
    float *q;                  /* [n, n_heads, d]: in place RoPE, then the Hadamard rotation */
    const float *k, *v;        /* [n, n_kv_heads, d], straight from the projection (bias added) */
    const float *rope;         /* [n, d/2, 2] cos, sin from rope_table */
    enum rope_style style;
    const struct kv_dst *dst;  /* [n]: K (RoPE, rotated) and V, rounded to bf16 (nearest even) */
    int n, n_heads, n_kv_heads, head_dim;
};

/* ---- key biases ---- */
/* Some models (Qwen2, Qwen2.5) add to their keys a bias that is many times the key's own size in a few RoPE pairs; no code with one scale a token survives that. Of those pairs
 * the bias is not stored: a key lies in the cache, in every tier and block, as k' = R_p (W x + rest), and attention adds what is missing to its logit,
 *     q . R_p b = sum over marked pairs j of A_j cos(p f_j) + B_j sin(p f_j),   A_j = q . u[j][0], B_j = q . u[j][1],
 * where q is the rotated query, and u[j] the pair's bias (b0, b1), and (-b1, b0) for B, in the key's pair, rotated like a key. That is exact, for slow and fast pairs alike
 * (the reason and what was rejected: docs/design.md). NULL wherever an op takes it: no bias, at no cost. */
enum { KEY_BIAS_PAIRS_MAX = 24 /* of a KV head */ };

struct key_bias { /* of one layer */
    const int32_t *first; /* [n_kv_heads + 1] pairs first[h] .. first[h + 1] - 1 are those of KV head h */
    const int32_t *pair;  /* [n_pairs] frequency f of each, < n_freqs */
    const float *u;       /* [n_pairs, 2, head_dim] */
    const float *coarse;  /* [n_sixteens, n_freqs, 2] cos and sin of 16 i f, times the factor of rope_table; whole blocks of 128 positions, ops may read the last one to its end */
    const float *fine;    /* [n_freqs, 2, 16] cos, then sin, of t f for t = 0..15 */
    int n_freqs;
};

/* ---- attention ---- */
/* Queries over positions 0 .. own position. Consistent prefill: the blocks of 128 before a query's own are attended as k and v hold them, its own block as own_k and own_v do. Blocks are
 * visited in ascending order, keys in a block likewise, with an online softmax per block of 128; so on the CPU the result of a query does not depend on n_q. */
struct attn_prefill_params {
    const float *q;     /* [n_q, n_heads, d] rotated */
    int64_t pos0;       /* of query 0 */
    int n_q;            /* >= 1 */
    const bf16_t *k, *v; /* head h, position p at k + h * head_stride + p * d */
    int64_t head_stride;
    const bf16_t *own_k, *own_v; /* the queries' own blocks: head h, position p at own_k + h * own_stride + (p - pos0 / BLOCK_TOKENS * BLOCK_TOKENS) * d; NULL: they are in k and v */
    int64_t own_stride;
    int n_heads, n_kv_heads, head_dim;
    float scale;
    const struct key_bias *bias; /* or NULL */
    void *out;          /* [n_q, n_heads, d] of the input type, divided by l */
    float *ret_ml;      /* [n_q, n_heads, 2] (m, l) or NULL */
};

/* One run of bf16 rows: rows [n, d] of one KV head. Where they are in the sequence matters to key biases alone. */
struct kv_rows {
    const bf16_t *k, *v;
    int n;
    const int32_t *positions; /* [n] of each row; NULL: they follow one another from pos0 on */
    int pos0;
};

/* A block of a sequence, as attention reads it. */
struct kv_block {
    const uint8_t *data;  /* its extent: the slice of a layer at block_slice_offset(); memory of the device, or a registered pool */
    const uint8_t *index; /* a copy of its key index in memory of the device, block_index_bytes(); NULL: the index is read where it lies in `data` */
    uint64_t id;          /* for a page cache of the device: the same id always means the same bytes. Below 2^44; 0: `data` is memory of the device and never cached */
};

/* The slow tier of one sequence in one layer and KV head. Sub-page i holds the positions from i * SUBPAGE_TOKENS on and lies in block i / BLOCK_SUBPAGES; block 0 has the sinks.
 * Bit t of a mask set: token t is slow (not kept, not recent). A sub-page without slow tokens is never read, nor is anything else of a block that has none. */
struct slow_pages {
    const struct kv_block *blocks; /* [n_subpages / BLOCK_SUBPAGES, rounded up]: one table a sequence */
    const uint16_t *masks;         /* [n_subpages] */
    int n_subpages;
    int n_pages;                   /* masks that are not 0 */
    int layer, kv_head;            /* of the blocks' layout */
};

/* How slow sub-pages are scored: what e, the log-sum-exp of a query head's logits over the page's slow tokens, is expected to be. n counts the slow tokens; q has the
 * scale applied. Summaries (page_summaries) are of the slow tokens alone and in the model's own basis, not the rotated one: channels have their meaning there.
 * With key biases every key of these formulas is one without the marked biases, and each slow token has its own term t besides: index2 and oracle add it to the token's logit, mean and
 * meanvar put the log-sum-exp of the terms in the place of log n, minmax adds the largest. */
enum page_scorer {
    PAGE_SCORER_INDEX2,  /* log-sum-exp of the logits that the 2-bit index gives */
    PAGE_SCORER_MINMAX,  /* sum over d of max(q min, q max) */
    PAGE_SCORER_MEAN,    /* q . mean + log n */
    PAGE_SCORER_MEANVAR, /* q . mean + min(q^2 . variance / 2, PAGE_SCORE_SPREAD_MAX) + log n */
    PAGE_SCORER_RECENT,  /* nothing is scored: the newest pages are taken */
    PAGE_SCORER_ORACLE,  /* log-sum-exp of the logits that attending the page gives: reads every key, so it is for measuring only */
    PAGE_SCORER_COUNT,
};
#define PAGE_SCORE_SPREAD_MAX 4.0f

/* fp16 vectors [d] of a page's summary: minima and maxima, mean, mean and variance. */
static inline int page_summary_vectors(enum page_scorer scorer)
{
    return scorer == PAGE_SCORER_MINMAX || scorer == PAGE_SCORER_MEANVAR ? 2 : scorer == PAGE_SCORER_MEAN;
}
static inline size_t page_summary_bytes(enum page_scorer scorer, int head_dim)
{
    return (size_t)page_summary_vectors(scorer) * (size_t)head_dim * sizeof(fp16_t);
}

/* What a call has attended of the slow tier is added to it, on the stream, in memory of the device; items may share one. */
struct page_counts {
    uint32_t pages, tokens;       /* sub-pages, and slow tokens in them */
    uint32_t hits, misses;        /* of the pages with an id: found in the page cache of the device, or not */
    uint64_t bytes, bytes_missed; /* of all pages, and of the misses */
};

/* Decode attention of one token of one sequence in one KV head: fast rows, then the best slow pages, merged.
 *  1. partial over rows[0..n_rows) (kept, then recent).
 *  2. the slow sub-pages are those whose mask is not 0. If n_pages > fetch_pages: for each page and query head the scorer's e; total = lse(fast, all e); mass(page) = mean
 *     over the group of exp(e - total); the fetch_pages of largest mass (ties: lower page index) are attended; else all. With fetch_blocks the pages of a block are chosen
 *     together by the sum of their masses, fetch_pages / BLOCK_SUBPAGES blocks of them. RECENT takes the last pages or blocks.
 *  3. partial over the chosen pages in ascending page order: key logits by integer dot products of the codes with the query in two signed digits
 *     (q ~ step * (64 * hi + lo), |hi| <= 63, |lo| <= 32), values of K8V4 pages on the CPU by those of the codes with weight * vstep in two digits (15 bits of the largest
 *     in a partial's group of channels), other values dequantized in registers, BF16 pages in fp32. Weights below e^-60 of a partial's largest are 0.
 *  4. merge, divide by l; zeros if there was nothing to attend.
 * Head dims are multiples of 16 up to 256 (with pages of 32), K and V finite. */
struct attn_decode_item {
    const float *q;   /* [group, d] rotated */
    void *out;        /* [group, d] of the input type */
    struct kv_rows rows[2];
    struct slow_pages slow;      /* slow.kv_head: whose key biases are meant, too */
    const uint8_t *summaries;    /* [slow.n_subpages] of page_summary_bytes(); NULL when the scorer has none */
    int fetch_pages;             /* INT32_MAX: all; with fetch_blocks else a multiple of BLOCK_SUBPAGES */
    struct page_counts *ret_counts; /* or NULL */
    int32_t *ret_chosen;         /* host memory: [min(fetch_pages, slow.n_pages)] sub-pages attended, ascending, or NULL. A GPU is waited for then */
    int ret_n_chosen;            /* out, with ret_chosen: how many there are */
};

struct attn_decode_params {
    struct attn_decode_item *items;
    int n_items;
    const struct block_layout *layout;
    int group, head_dim;
    float scale;
    const struct key_bias *bias; /* or NULL */
    enum page_scorer scorer;
    bool fetch_blocks;           /* whole blocks are chosen, not sub-pages */
    struct device_page_cache *page_cache; /* pages with an id are fetched through it; opened for this stream. NULL: they are read where they lie */
};

/* Summaries of slow sub-pages for the scorers that need them (minmax, mean, meanvar), from the pages' bytes; zeros for those without slow tokens. -EINVAL for the other scorers. */
struct page_summary_params {
    enum page_scorer scorer;
    const struct block_layout *layout;
    struct slow_pages slow;
    int first;                   /* sub-pages first .. slow.n_subpages - 1 are summed up */
    uint8_t *summaries;          /* [slow.n_subpages] of page_summary_bytes() each, 32-byte aligned */
    const uint8_t *slices;       /* the layer's slices of the blocks from that of `first` on lie here, slice_stride bytes apart, and not where the table says; NULL: there */
    size_t slice_stride;
};

/* Scores of the observation window (SnapKV): a[h, w, i] = softmax over i <= pos(w) of q.k * scale; s[h, i] = mean over w (fp32) for the keys before the window; pooled along
 * i (max, width `pool`, centred, edges clipped to those keys) per query head or after the group mean as `pool_after_group` says; mean over the group, or over all heads; mean over
 * aligned chunks of positions. Two passes, blockwise; never W x S.
 * -ENOTSUP beyond a pool of 127, a group of 64, n_window * group of 8192, or a chunk that does not divide 1024. */
struct window_score_params {
    const float *q;      /* [n_window, n_heads, d] rotated; query w is at position n_keys - n_window + w */
    int n_window;
    const bf16_t *k;     /* head h, position p at k + h * head_stride + p * d */
    int64_t head_stride;
    int64_t n_keys;
    int n_heads, n_kv_heads, head_dim;
    float scale;
    const struct key_bias *bias; /* or NULL */
    int64_t first, last; /* keys that are scored, 0 <= first < last <= n_keys - n_window */
    int pool;            /* odd, 1: none */
    bool pool_after_group;
    bool all_heads;      /* one row of scores for all heads instead of one a KV head */
    int chunk;           /* every key of first .. last-1 gets the mean over those with the same position / chunk; 1: its own score */
    float *scores;       /* [n_kv_heads or 1, last - first] */
};

/* KeyDiff: anchor = mean over all keys of k / |k|, one a KV head; score = -cos(k, anchor). A key of length 0 scores 0. */
struct keydiff_params {
    const bf16_t *k;     /* head h, position p at k + h * head_stride + p * d */
    int64_t head_stride;
    int64_t n_keys;
    int n_kv_heads, head_dim;
    int64_t first, last; /* keys that are scored, 0 <= first < last <= n_keys */
    float *scores;       /* [n_kv_heads, last - first] */
};

/* Rows of scores from rows of parts of the heads that they are of: ranks of a tensor-parallel group score their own heads. Row r is of the parts row_first[r] .. row_first[r + 1] - 1,
 *     s[r, i] = sum over its parts, in order, of share[part] * parts[part, i],   scores[r, i] = max of s[r, i - pool / 2 .. i + pool / 2]   (edges clipped to the columns).
 * -ENOTSUP beyond a pool of 127 or SCORE_PARTS_MAX parts. */
enum { SCORE_PARTS_MAX = 256 };
struct score_merge_params {
    const float *parts;       /* [parts, n_columns] */
    const float *share;       /* host: [parts] */
    const int32_t *row_first; /* host: [n_rows + 1], ascending from 0; no row is without parts */
    int n_rows;
    int64_t n_columns;
    int64_t first, last;      /* columns that are scored, 0 <= first < last <= n_columns */
    int pool;                 /* odd, 1: none */
    float *scores;            /* [n_rows, last - first] */
};

/* Column sums of attention (H2O): to the sum of each key the weights exp(logit - m) / l of the call's queries are added that see it, in the order of queries and, for one query, of
 * the group's heads. Sums of the keys pos0 .. pos0 + n_q - 1 begin at 0: a prompt's calls come in order from position 0. The queries of a call lie in one block. */
struct column_sum_params {
    const struct attn_prefill_params *attn; /* as attn_prefill was called, or the part of it that is one block's; k and own_k unchanged, ret_ml filled; out is not used */
    float *sums;         /* KV head h at sums + h * sum_stride, [pos0 + n_q] */
    int64_t sum_stride;  /* elements */
};

/* ---- blocks ---- */
/* One block in one layer. Blocks of one call have the same layout and do not overlap. */
struct block_params {
    const struct block_layout *layout;
    bool first;          /* block 0 of a sequence */
    uint8_t *slice;      /* one layer's slice, layout->slice_bytes[first] */
    bf16_t *k, *v;       /* head h, token t at k + h * head_stride + t * d, 128 tokens */
    int64_t head_stride;
    const bf16_t *exact_k, *exact_v; /* block_encode: what is coded, head h at + h * exact_stride; NULL: k and v */
    int64_t exact_stride;
    uint8_t *index;      /* a copy of the slice's index goes here, too: [n_kv_heads][BLOCK_SUBPAGES] entries (block_index_copy_offset of the layer); NULL: nowhere */
};

/* ---- sampling ---- */
struct logit_bias { int32_t token; float bias; };
struct token_count { int32_t token; int32_t n_prompt, n_output; }; /* for the penalties, distinct tokens, any order */
/* In this order: bias; repetition (tokens of prompt and output: divided if positive, else multiplied), frequency (output) and presence (output) penalties; bans; greedy, or
 * temperature, min-p, top-k, top-p, each on what the one before left, ties to lower ids. A logit of NaN counts as -inf, +inf as the largest float.
 * -EINVAL for ids outside the vocabulary, parameters outside their ranges, and where nothing can be drawn. */
struct sample_params {
    float temperature;       /* 0: greedy, ties to the lower id */
    int32_t top_k;           /* <= 0: off */
    float top_p, min_p;      /* 1, 0: off */
    float presence_penalty, frequency_penalty, repetition_penalty; /* 0, 0, 1: off */
    uint64_t seed;           /* Philox4x32-10 key */
    uint64_t position;       /* Philox counter: position of the token that is drawn */
    const struct logit_bias *bias; int n_bias;
    const struct token_count *counts; int n_counts;
    const int32_t *banned; int n_banned; /* never drawn (min_tokens, ignore_eos keeps eos allowed) */
    const int32_t *given;    /* this token is taken whatever the rest says, for its log-probability; NULL: one is drawn */
    int n_top;               /* how many top log-probabilities to return, 0..32 */
};
struct top_logprob { int32_t token; float logprob; };
struct sample_result {
    int32_t token;
    float logprob;           /* of the drawn token, log-softmax of the raw logits (before temperature and penalties) */
    struct top_logprob top[32];
    int n_top;
};
/* One row of a call. */
struct sample_row {
    const float *logits;     /* [n_vocab], not changed; rows may share them */
    struct sample_params params; /* what they point at is host memory */
    struct sample_result result; /* out, where status is 0 */
    int status;              /* out: 0, or what keeps this row alone from being drawn: -EINVAL as above, -ENOTSUP for lists of more than 2 MiB together on a GPU */
};

/* What a caller will ask of the ops at most; 0: never. */
struct op_bounds {
    int n_heads, n_kv_heads, head_dim, n_vocab;
    int n_samples;           /* sample: rows a call */
    int n_items;             /* attn_decode: items a call, */
    int n_rows[2];           /*   fast rows of an item, */
    int n_pages, fetch_pages; /*  sub-pages of an item, and fetched ones */
    enum page_scorer scorer;
    bool fetch_blocks;
    int64_t n_keys;          /* window_scores, keydiff_scores, attn_prefill */
    int n_queries;           /* attn_prefill */
    int n_window;            /* window_scores */
    int n_bias_pairs;        /* most marked pairs of a KV head */
};

struct kernel_ops {
    /* The type of what matmul reads: 4 fp32, 2 bf16 (rounded to nearest even). */
    size_t input_bytes;
    /* More rows, or more outputs in all, make a product no faster; more of either take memory. */
    size_t matmul_rows, matmul_outputs;
    /* Bytes of the packed form, and packing from the file's bytes (rows of n_cols, GGUF block order). n_cols must be a multiple of the dtype's block (1, 32 or 256). */
    size_t (*weight_bytes)(enum weight_dtype dtype, int64_t n_rows, int64_t n_cols);
    int (*weight_pack)(struct stream *s, enum weight_dtype dtype, int64_t n_rows, int64_t n_cols, const void *src, void *packed);
    /* y_i = x W_i^T (+ bias) (+ residual) for n_outs <= 4 weights over the same x [n, n_cols] of the input type, with row stride ld_x. */
    int (*matmul)(struct stream *s, const void *x, int64_t n, int64_t ld_x, const struct matmul_out *outs, int n_outs);
    /* y[i] = row ids[i] of w, [n, n_cols]. */
    int (*embed)(struct stream *s, const struct weight *w, const int32_t *ids, int n, float *y);
    /* y = x / sqrt(mean(x^2) + eps) * gamma; [n, dim], y of the input type; y may be x where that is fp32. */
    int (*rmsnorm)(struct stream *s, const float *x, const float *gamma, float eps, int64_t n, int64_t dim, void *y);
    /* out = silu(gate) * up; [n, dim], out of the input type with row stride ld_out; out may be gate where that is fp32 and ld_out is dim. */
    int (*silu_mul)(struct stream *s, const float *gate, const float *up, int64_t n, int64_t dim, void *out, int64_t ld_out);
    /* cos and sin of positions[i] * inv_freq[j], times `factor`: [n, n_freq, 2]. Angles in double. */
    int (*rope_table)(struct stream *s, const double *inv_freq, int n_freq, double factor, const int32_t *positions, int n, float *table);
    int (*qkv_finish)(struct stream *s, const struct qkv_params *p);

    int (*attn_prefill)(struct stream *s, const struct attn_prefill_params *p);
    int (*attn_decode)(struct stream *s, struct attn_decode_params *p);
    int (*page_summaries)(struct stream *s, const struct page_summary_params *p);
    int (*window_scores)(struct stream *s, const struct window_score_params *p);
    int (*keydiff_scores)(struct stream *s, const struct keydiff_params *p);
    int (*merge_scores)(struct stream *s, const struct score_merge_params *p);
    int (*attn_column_sums)(struct stream *s, const struct column_sum_params *p);
    /* Indices of the k largest of scores[n] per row, ascending by index; ties: lower index first; k <= n. [n_rows, k]. NaN counts as -inf. */
    int (*topk)(struct stream *s, const float *scores, int n_rows, int64_t n, int64_t k, int32_t *indices);
    /* Gathers rows: dst row j = src row indices[j], K and V of one head, [n, d] bf16. */
    int (*gather_rows)(struct stream *s, const bf16_t *k, const bf16_t *v, const int32_t *indices, int64_t n, int head_dim, bf16_t *dst_k, bf16_t *dst_v);

    /* Codes n blocks, 128 tokens of all KV heads of a layer each, into their slices, index included. With `attended` the values that the slices give back go to k and v (bf16). Adds to
     * *bad (device memory) the number of inputs that a slice cannot hold as they are: what is not finite, and in coded pages what is beyond +-65504. */
    int (*block_encode)(struct stream *s, const struct block_params *blocks, int n, bool attended, int32_t *bad);
    /* The other way: slices to k and v; the very values that block_encode(attended) left. */
    int (*block_decode)(struct stream *s, const struct block_params *blocks, int n);

    /* The page cache (device_page_cache.h). Bytes of its fixed memory, on 256 bytes; 0 for a configuration that open refuses. Pure. */
    size_t (*page_cache_bytes)(const struct device_page_cache_config *config);
    /* For calls on stream s; memory [page_cache_bytes()] is device memory, the caller's, until page_cache_close, which waits for lookups under way. -EINVAL, -ENOMEM. */
    int (*page_cache_open)(struct stream *s, const struct device_page_cache_config *config, void *memory, struct device_page_cache **ret_cache);
    void (*page_cache_close)(struct device_page_cache *cache); /* NULL is fine */
    /* From now on it has these extents [extent_bytes] of device memory, on 256 bytes. Those at places where they were keep their pages. Waits for what the stream has submitted, so
     * an extent that is gone may be freed. -EINVAL. */
    int (*page_cache_resize)(struct device_page_cache *cache, void *const *extents, int n_extents);
    int (*page_cache_stats)(struct device_page_cache *cache, struct device_page_cache_stats *ret); /* waits for lookups under way */
    /* ret_pages[i], [n] in device memory: where pages[i], [n] in device memory, is to be read by what the stream runs from now on, until the next call; plus 1 where it is counted as
     * a miss, plus 2 where this call fetches it. attn_decode does this for itself. -EINVAL. */
    int (*page_cache_fetch)(struct device_page_cache *cache, const struct fetch_page *pages, int n, const uint8_t **ret_pages);

    /* Most bytes of MEM_WORKSPACE that an op holds during one call within the bounds (ops run one at a time), beside the device's fixed_bytes: from the stream's scratch
     * (device_ops.stream_scratch), else from the arena. With bounds of 0 what remains is what products take. Pure. */
    size_t (*scratch_bytes)(struct stream *s, const struct op_bounds *bounds);

    /* Bytes of device memory that the small arguments of one decode step take at most: embed, rope_table, and qkv_finish and attn_decode in each of n_layers (device_ops.steps_open). 0: the
     * device keeps no steps. Pure. */
    size_t (*step_bytes)(const struct op_bounds *bounds, int n_layers);

    /* Draws from n rows, each as it would be drawn from alone; results are there on return (a GPU is waited for once). Negative, also -EINVAL for n < 0 or n_vocab outside 1 .. 2^24: no row's result
     * counts. */
    int (*sample)(struct stream *s, struct sample_row *rows, int n, int n_vocab);
};

/* Element i of an array of the input type. */
static inline void *matmul_input_at(const struct kernel_ops *ops, void *inputs, int64_t i)
{
    return (char *)inputs + i * (int64_t)ops->input_bytes;
}

const struct kernel_ops *cpu_kernel_ops(void);
