/* Coding of blocks: the bytes of the pool are the CPU's, whichever side wrote them. */
#include "tests/simt/ops_test.h"
#include <stdlib.h>
#include <string.h>

/* Rows without range, zeros of both signs, extremes, infinities and NaN. Returns how many a page of these codes, or of bf16, cannot hold. */
static int odd_values(uint16_t *x, int d, bool coded)
{
    for (int c = 0; c < d; c++) {
        x[20 * d + c] = 0x3DCD;
        x[21 * d + c] = c % 2 ? 0x8000 : 0;
        x[22 * d + c] = c % 2 ? 0x7F7F : 0xFF7F;
    }
    x[d - 1] = 0xFF80, x[40 * d] = 0x7F80, x[41 * d + 1] = 0x7FC1;
    return 3 + (coded ? d : 0);
}

static void block(struct ops_test *t, enum kv_format format, int n_heads, int d, bool first, bool attended, bool odd)
{
    struct block_layout layout;
    ops_test_true(t, "layout", block_layout_init(&layout, format, 1, (uint32_t)n_heads, (uint32_t)d) == 0);
    const size_t stride = (size_t)BLOCK_TOKENS * (size_t)d + 16, bytes = stride * (size_t)n_heads * 2, slice_bytes = layout.slice_bytes[first];
    uint16_t *k = ops_test_bf16(t, bytes / 2, 3), *v = ops_test_bf16(t, bytes / 2, .3);
    uint8_t *slice = ops_test_alloc(slice_bytes), *dslice = ops_test_room(t, slice_bytes);
    const int n_bad = odd ? odd_values(k, d, format != KV_FORMAT_BF16) + odd_values(v, d, format != KV_FORMAT_BF16) : 0;
    uint16_t *dk = ops_test_upload(t, k, bytes), *dv = ops_test_upload(t, v, bytes);
    struct block_params cpu = {.layout = &layout, .first = first, .slice = slice, .k = k, .v = v, .head_stride = (int64_t)stride}, gpu = cpu;
    gpu.slice = dslice, gpu.k = dk, gpu.v = dv;
    const char *shape = ops_test_shape("block %s heads %d d %d first %d attended %d odd %d", kv_format_name(format), n_heads, d, first, attended, odd);
    ops_test_true(t, shape, t->cpu_ops->block_encode(t->cpu, &cpu, attended) == n_bad && t->gpu_ops->block_encode(t->gpu, &gpu, attended) == n_bad);
    uint8_t *coded = ops_test_download(t, dslice, slice_bytes);
    uint16_t *gk = ops_test_download(t, dk, bytes), *gv = ops_test_download(t, dv, bytes);
    ops_test_same(t, shape, slice, coded, slice_bytes);
    ops_test_same(t, shape, k, gk, bytes);
    ops_test_same(t, shape, v, gv, bytes);
    free(gk), free(gv);
    t->cpu_ops->block_decode(t->cpu, &cpu);
    ops_test_true(t, shape, t->gpu_ops->block_decode(t->gpu, &gpu) == 0);
    gk = ops_test_download(t, dk, bytes), gv = ops_test_download(t, dv, bytes);
    ops_test_same(t, shape, k, gk, bytes);
    ops_test_same(t, shape, v, gv, bytes);
    free(k), free(v), free(slice), free(coded), free(gk), free(gv);
}

void test_ops_blocks(struct ops_test *t)
{
    block(t, KV_FORMAT_K8V4, 2, 64, true, true, false);
    block(t, KV_FORMAT_K8V4, 1, 128, false, false, true);
    block(t, KV_FORMAT_K8V4, 1, 160, false, true, false);
    block(t, KV_FORMAT_K8V8, 2, 96, true, true, true);
    block(t, KV_FORMAT_BF16, 1, 64, true, true, true);
    block(t, KV_FORMAT_BF16, 3, 32, false, false, false);
}
