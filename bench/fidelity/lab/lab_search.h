/* Finding units of the prompt by a vector for each: what Quest, ShadowKV and TTKV do. All scores of a layer are GEMMs. */
#pragma once
#include "bench/fidelity/lab/lab.h"

enum lab_group { LAB_GROUP_MEAN, LAB_GROUP_MAX }; /* of a unit's share over the query heads of a KV head */

/* share[h, u] = softmax over u of queries[h] . summary[u] * scale + bias[u]; the n_choose units whose aggregate over the group is largest (ties: lower unit). */
struct lab_search {
    int n_units, width;
    const float *summary;  /* [n_kv_heads, n_units, width] */
    const float *queries;  /* [n_new, n_heads, width] */
    const float *bias;     /* [n_kv_heads, n_units], -INFINITY: not to be chosen while there are others; NULL: none */
    float scale;
    enum lab_group group;
    int n_choose;          /* 0 .. n_units */
};
/* ret_chosen [n_kv_heads, n_new, n_choose], ascending. */
int lab_search(const struct lab_layer *layer, const struct lab_search *search, int32_t *ret_chosen);

/* ret [n_kv_heads, n_units, d]: mean of the keys' rows (rotated basis) of each unit of `unit` rows; where `skip` [n_kv_heads, n_rows] is 1 a row does not count. ret_count
 * [n_kv_heads, n_units]: rows that count; where there are none the mean is 0. skip and ret_count may be NULL. */
void lab_unit_means(const struct lab_layer *layer, int unit, const uint8_t *skip, float *ret, int *ret_count);
