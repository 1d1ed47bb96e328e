/* One KV head of a sequence split as the cache splits it: whole blocks coded in a pool, some of their tokens kept as bf16 rows, and recent rows behind the blocks. */
#pragma once
#include "tests/kernels/kv_fixture.h"

struct kv_sequence {
    struct block_layout layout; /* one KV head */
    int d, n_blocks, n_recent, n_kept, n_pages;
    uint8_t *pool;              /* slices one after the other */
    uint16_t *kept_k, *kept_v;  /* [n_kept, d] as attended */
    uint16_t *recent_k, *recent_v;
    struct kv_page *pages;      /* those with slow tokens */
};

/* `kept_share` of the blocks' tokens go to the fast tier. */
void kv_sequence_make(struct kv_sequence *s, struct fixture *f, enum kv_format format, int d, int n_blocks, int n_recent, double kept_share, uint64_t seed);
void kv_sequence_free(struct kv_sequence *s);
struct attn_decode_item kv_sequence_item(const struct kv_sequence *s, const float *q, float *out, int fetch_pages, int32_t *ret_chosen);

/* Attention in double over the rows and the slow tokens of chosen pages (all if chosen is NULL). out [d]. */
struct ref_attention_result kv_sequence_attention(const struct kv_sequence *s, const float *q, float scale, const int32_t *chosen, int n_chosen, double *out);
/* log-sum-exp of a page's slow tokens as the index gives them. */
double kv_sequence_index_lse(const struct kv_sequence *s, const float *q, float scale, int page);
