/* Scores by which entries are kept, and summaries by which pages are chosen. */
#include "tests/simt/ops_test.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void window(struct ops_test *t, struct window_score_params p, const char *name, bool biased)
{
    struct key_bias cpu_bias, gpu_bias;
    const size_t stride = (size_t)p.n_keys * (size_t)p.head_dim + 16, k_bytes = stride * (size_t)p.n_kv_heads * 2, q_count = (size_t)(p.n_window * p.n_heads * p.head_dim);
    const size_t n = (size_t)(p.last - p.first) * (size_t)(p.all_heads ? 1 : p.n_kv_heads);
    float *q = ops_test_floats(t, q_count, 2), *expected = ops_test_alloc(n * sizeof(float));
    uint16_t *k = ops_test_bf16(t, k_bytes / 2, 1);
    ops_test_bias_make(t, p.n_kv_heads, p.head_dim, (int)p.n_keys, &cpu_bias, &gpu_bias);
    p.bias = biased ? &cpu_bias : NULL;
    p.q = q, p.k = k, p.head_stride = (int64_t)stride, p.scale = 1 / sqrtf((float)p.head_dim), p.scores = expected;
    ops_test_true(t, "window_scores on the CPU", t->cpu_ops->window_scores(t->cpu, &p) == 0);
    p.bias = biased ? &gpu_bias : NULL;
    p.q = ops_test_upload(t, q, q_count * sizeof(float)), p.k = ops_test_upload(t, k, k_bytes), p.scores = ops_test_room(t, n * sizeof(float));
    ops_test_true(t, "window_scores", t->gpu_ops->window_scores(t->gpu, &p) == 0);
    float *actual = ops_test_download(t, p.scores, n * sizeof(float));
    ops_test_nmse(t, ops_test_shape("window_scores %s", name), expected, actual, n, 1e-4);
    free(q), free(expected), free(k), free(actual);
    ops_test_bias_free(&cpu_bias);
    ops_test_free_buffers(t);
}

static void windows(struct ops_test *t)
{
    const struct window_score_params plain = {.n_window = 16, .n_keys = 300, .n_heads = 4, .n_kv_heads = 2, .head_dim = 64, .first = 0, .last = 284, .pool = 1, .chunk = 1};
    struct window_score_params p = plain;
    window(t, p, "plain", false);
    p.pool = 7;
    window(t, p, "pooled by head", true);
    p.pool_after_group = true, p.first = 3, p.last = 200;
    window(t, p, "pooled after the group", false);
    p = plain, p.n_window = 37, p.n_heads = 6, p.n_keys = 1200, p.first = 1000, p.last = 1163, p.head_dim = 96, p.pool = 5;
    window(t, p, "a late part of two segments", true);
    p = plain, p.n_window = 1, p.n_heads = 7, p.n_kv_heads = 1, p.n_keys = 66, p.last = 65, p.head_dim = 128, p.chunk = 16, p.first = 5;
    window(t, p, "one query, chunks", false);
    p = plain, p.all_heads = true, p.head_dim = 80, p.pool = 3;
    window(t, p, "all heads", false);
    p = plain, p.pool = 129;
    ops_test_true(t, "a pool without a kernel", t->gpu_ops->window_scores(t->gpu, &p) == -ENOTSUP);
    p = plain, p.last = 285;
    ops_test_true(t, "keys of the window itself", t->gpu_ops->window_scores(t->gpu, &p) == -EINVAL);
}

static void keydiff(struct ops_test *t, int64_t n_keys, int n_kv_heads, int d, int64_t first, int64_t last)
{
    const size_t stride = (size_t)n_keys * (size_t)d, bytes = stride * (size_t)n_kv_heads * 2, n = (size_t)(last - first) * (size_t)n_kv_heads;
    uint16_t *k = ops_test_bf16(t, bytes / 2, 1);
    float *expected = ops_test_alloc(n * sizeof(float));
    for (size_t i = 0; i < bytes / 2; i += 3) /* a direction that most keys share */
        k[i] = 0x3F80;
    memset(k, 0, (size_t)d * 2); /* a key of length 0 */
    struct keydiff_params p = {.k = k, .head_stride = (int64_t)stride, .n_keys = n_keys, .n_kv_heads = n_kv_heads, .head_dim = d, .first = first, .last = last, .scores = expected};
    t->cpu_ops->keydiff_scores(t->cpu, &p);
    p.k = ops_test_upload(t, k, bytes), p.scores = ops_test_room(t, n * sizeof(float));
    ops_test_true(t, "keydiff_scores", t->gpu_ops->keydiff_scores(t->gpu, &p) == 0);
    float *actual = ops_test_download(t, p.scores, n * sizeof(float));
    ops_test_nmse(t, ops_test_shape("keydiff_scores keys %d heads %d d %d", (int)n_keys, n_kv_heads, d), expected, actual, n, 1e-10);
    free(k), free(expected), free(actual);
}

/* Three rows of 2, 1 and n_parts - 3 parts. */
static void merge(struct ops_test *t, int n_parts, int64_t n_columns, int64_t first, int64_t last, int pool)
{
    const size_t n = 3 * (size_t)(last - first), bytes = (size_t)n_parts * (size_t)n_columns * sizeof(float);
    const int32_t row_first[] = {0, 2, 3, n_parts};
    float *parts = ops_test_floats(t, bytes / sizeof(float), 3), *share = ops_test_floats(t, (size_t)n_parts, 1), *expected = ops_test_alloc(n * sizeof(float));
    struct score_merge_params p = {.parts = parts, .share = share, .row_first = row_first, .n_rows = 3, .n_columns = n_columns, .first = first, .last = last, .pool = pool, .scores = expected};
    ops_test_true(t, "merge_scores on the CPU", t->cpu_ops->merge_scores(t->cpu, &p) == 0);
    p.parts = ops_test_upload(t, parts, bytes), p.scores = ops_test_room(t, n * sizeof(float));
    ops_test_true(t, "merge_scores", t->gpu_ops->merge_scores(t->gpu, &p) == 0);
    float *actual = ops_test_download(t, p.scores, n * sizeof(float));
    ops_test_same(t, ops_test_shape("merge_scores parts %d columns %d pool %d", n_parts, (int)n_columns, pool), expected, actual, n * sizeof(float));
    free(parts), free(share), free(expected), free(actual);
    ops_test_free_buffers(t);
}

static void merges(struct ops_test *t)
{
    merge(t, 4, 1, 0, 1, 7);
    merge(t, 9, 300, 0, 300, 1);
    merge(t, 6, 2100, 5, 2098, 7);
    merge(t, SCORE_PARTS_MAX, 40, 3, 37, 127);
    struct score_merge_params p = {.share = (const float[]){1}, .row_first = (const int32_t[]){0, 1}, .n_rows = 1, .n_columns = 9, .last = 9, .pool = 129};
    ops_test_true(t, "a pool without a kernel", t->gpu_ops->merge_scores(t->gpu, &p) == -ENOTSUP);
    p.pool = 1, p.last = 10;
    ops_test_true(t, "columns that are none", t->gpu_ops->merge_scores(t->gpu, &p) == -EINVAL);
}

/* Two calls, as a prompt's prefill makes them: the second continues the sums of the first. */
static void column_sums(struct ops_test *t, int n_first, int n_second, int n_heads, int n_kv_heads, int d, bool biased)
{
    struct key_bias cpu_bias, gpu_bias;
    const int n_keys = n_first + n_second;
    const size_t stride = (size_t)(n_keys * d) + 8, k_bytes = stride * (size_t)n_kv_heads * 2, row = (size_t)(n_heads * d), sums_bytes = (size_t)(n_keys * n_kv_heads) * sizeof(float);
    float *q = ops_test_floats(t, (size_t)n_keys * row, 2), *out = ops_test_alloc((size_t)n_keys * row * sizeof(float)), *ml = ops_test_alloc((size_t)(n_keys * n_heads) * 2 * sizeof(float));
    float *sums = ops_test_alloc(sums_bytes), *gpu_q = ops_test_upload(t, q, (size_t)n_keys * row * sizeof(float)), *gpu_sums = ops_test_room(t, sums_bytes);
    uint16_t *k = ops_test_bf16(t, k_bytes / 2, 1), *gpu_k = ops_test_upload(t, k, k_bytes);
    ops_test_bias_make(t, n_kv_heads, d, n_keys, &cpu_bias, &gpu_bias);
    for (int call = 0; call < 2; call++) {
        const int pos0 = call ? n_first : 0, n_q = call ? n_second : n_first;
        struct attn_prefill_params attn = {.q = q + (size_t)pos0 * row, .pos0 = pos0, .n_q = n_q, .k = k, .v = k, .head_stride = (int64_t)stride, .n_heads = n_heads, .n_kv_heads = n_kv_heads,
                                           .head_dim = d, .scale = 1 / sqrtf((float)d), .out = out, .ret_ml = ml, .bias = biased ? &cpu_bias : NULL};
        struct column_sum_params p = {.attn = &attn, .sums = sums, .sum_stride = n_keys};
        t->cpu_ops->attn_prefill(t->cpu, &attn);
        t->cpu_ops->attn_column_sums(t->cpu, &p);
        attn.bias = biased ? &gpu_bias : NULL;
        attn.q = gpu_q + (size_t)pos0 * row, attn.k = attn.v = gpu_k, attn.out = ops_test_room_inputs(t, (size_t)n_q * row);
        attn.ret_ml = ops_test_room(t, (size_t)(n_q * n_heads) * 2 * sizeof(float));
        p.sums = gpu_sums;
        ops_test_true(t, "attn_column_sums", t->gpu_ops->attn_prefill(t->gpu, &attn) == 0 && t->gpu_ops->attn_column_sums(t->gpu, &p) == 0);
    }
    float *actual = ops_test_download(t, gpu_sums, sums_bytes);
    ops_test_nmse(t, ops_test_shape("attn_column_sums %d + %d queries heads %d/%d d %d", n_first, n_second, n_heads, n_kv_heads, d), sums, actual, (size_t)(n_keys * n_kv_heads), 1e-4);
    free(q), free(out), free(ml), free(sums), free(k), free(actual);
    ops_test_bias_free(&cpu_bias);
}

static void summaries(struct ops_test *t, enum page_scorer scorer, enum kv_format format, int d)
{
    struct block_layout layout;
    block_layout_init(&layout, format, 1, 1, (uint32_t)d);
    uint16_t *k = ops_test_bf16(t, (size_t)(BLOCK_TOKENS * d), 2);
    uint8_t *slice = ops_test_alloc(layout.slice_bytes[1]);
    struct block_params params = {.layout = &layout, .first = true, .slice = slice, .k = k, .v = k, .head_stride = BLOCK_TOKENS * d};
    int32_t n_bad = 0;
    t->cpu_ops->block_encode(t->cpu, &params, 1, false, &n_bad);
    uint8_t *gpu_slice = ops_test_upload(t, slice, layout.slice_bytes[1]);
    const struct kv_block block = {.data = slice}, gpu_block = {.data = gpu_slice};
    uint16_t masks[BLOCK_SUBPAGES];
    for (int i = 0; i < BLOCK_SUBPAGES; i++)
        masks[i] = (uint16_t)(i == 3 ? 0 : 0xFFFF >> i ^ 0x0110);
    const size_t bytes = page_summary_bytes(scorer, d) * BLOCK_SUBPAGES;
    uint8_t *expected = ops_test_alloc(bytes), *room = ops_test_room(t, bytes);
    struct page_summary_params p = {.scorer = scorer, .layout = &layout, .slow = {.blocks = &block, .masks = masks, .n_subpages = BLOCK_SUBPAGES, .n_pages = BLOCK_SUBPAGES - 1}, .summaries = expected};
    t->cpu_ops->page_summaries(t->cpu, &p);
    p.slow.blocks = ops_test_upload(t, &gpu_block, sizeof gpu_block);
    p.slow.masks = ops_test_upload(t, masks, sizeof masks);
    p.summaries = room;
    ops_test_true(t, "page_summaries", t->gpu_ops->page_summaries(t->gpu, &p) == 0);
    uint8_t *actual = ops_test_download(t, room, bytes);
    ops_test_same(t, ops_test_shape("page_summaries scorer %d %s d %d", (int)scorer, kv_format_name(format), d), expected, actual, bytes);
    free(actual);
    /* The same of a slice that lies apart. */
    const struct kv_block nowhere = {.data = NULL};
    p.slow.blocks = ops_test_upload(t, &nowhere, sizeof nowhere);
    p.slices = gpu_slice;
    p.summaries = room = ops_test_room(t, bytes);
    ops_test_true(t, "page_summaries apart", t->gpu_ops->page_summaries(t->gpu, &p) == 0);
    actual = ops_test_download(t, room, bytes);
    ops_test_same(t, ops_test_shape("page_summaries apart, scorer %d %s d %d", (int)scorer, kv_format_name(format), d), expected, actual, bytes);
    free(k), free(slice), free(expected), free(actual);
}

void test_ops_scores(struct ops_test *t)
{
    windows(t);
    keydiff(t, 100, 2, 64, 10, 90);
    keydiff(t, 2100, 1, 48, 0, 2100);
    keydiff(t, 3, 3, 256, 1, 3);
    merges(t);
    column_sums(t, 128, 40, 3, 1, 64, false);
    column_sums(t, 128, 1, 4, 2, 128, true);
    summaries(t, PAGE_SCORER_MINMAX, KV_FORMAT_K8V4, 64);
    summaries(t, PAGE_SCORER_MEAN, KV_FORMAT_BF16, 96);
    summaries(t, PAGE_SCORER_MEANVAR, KV_FORMAT_K8V8, 128);
    struct page_summary_params p = {.scorer = PAGE_SCORER_INDEX2};
    ops_test_true(t, "a scorer without summaries", t->gpu_ops->page_summaries(t->gpu, &p) == -EINVAL);
}
