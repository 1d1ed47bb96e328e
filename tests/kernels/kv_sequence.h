/* One KV head of a sequence split as the cache splits it: whole blocks coded in a pool, some of their tokens kept as bf16 rows, and recent rows behind the blocks. */
#pragma once
#include "kernels/kv_page.h"
#include "tests/kernels/bias_fixture.h"

struct kv_sequence {
    struct block_layout layout; /* one KV head */
    int d, n_blocks, n_recent, n_kept, n_pages;
    uint8_t *pool;              /* slices one after the other */
    uint16_t *kept_k, *kept_v;  /* [n_kept, d] as attended */
    int32_t *kept_positions;
    uint16_t *recent_k, *recent_v;
    struct kv_block *blocks;    /* [n_blocks] */
    uint16_t *masks;            /* [n_blocks * BLOCK_SUBPAGES] */
    struct kv_page *pages;      /* [n_pages] those with slow tokens */
    struct bias_fixture bias;   /* without any until kv_sequence_bias */
};

/* `kept_share` of the blocks' tokens go to the fast tier. */
void kv_sequence_make(struct kv_sequence *s, struct fixture *f, enum kv_format format, int d, int n_blocks, int n_recent, double kept_share, uint64_t seed);
/* n_pairs marked pairs for the one KV head; `size`: of their biases. */
void kv_sequence_bias(struct kv_sequence *s, int n_pairs, double size, uint64_t seed);
/* What attn_decode takes, and what it adds to the logit of position pos (0 without bias). */
const struct key_bias *kv_sequence_key_bias(const struct kv_sequence *s);
double kv_sequence_term(const struct kv_sequence *s, const float *q, float scale, int64_t pos);
void kv_sequence_free(struct kv_sequence *s);
struct slow_pages kv_sequence_slow(const struct kv_sequence *s);
/* Sub-pages, as attn_decode returns them, become indices of `pages`. */
void kv_sequence_to_pages(const struct kv_sequence *s, int32_t *chosen, int n);
struct attn_decode_item kv_sequence_item(const struct kv_sequence *s, const float *q, float *out, int fetch_pages, int32_t *ret_chosen);

/* Attention in double over the rows and the slow tokens of chosen pages (all if chosen is NULL). out [d]. */
struct ref_attention_result kv_sequence_attention(const struct kv_sequence *s, const float *q, float scale, const int32_t *chosen, int n_chosen, double *out);
/* log-sum-exp of a page's slow tokens as the index gives them. */
double kv_sequence_index_lse(const struct kv_sequence *s, const float *q, float scale, int page);
