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

/* Both copies of the index are what the slice has of it. */
static void same_index(struct ops_test *t, const char *shape, const struct block_layout *l, bool first, const uint8_t *cpu, const uint8_t *gpu, const uint8_t *slice)
{
    const size_t row = (size_t)BLOCK_SUBPAGES * l->index_entry_bytes;
    uint8_t *copy = ops_test_download(t, gpu, row * l->n_kv_heads);
    for (uint32_t h = 0; h < l->n_kv_heads; h++) {
        ops_test_same(t, shape, slice + block_index_offset(l, first, h, 0), cpu + h * row, row);
        ops_test_same(t, shape, slice + block_index_offset(l, first, h, 0), copy + h * row, row);
    }
    free(copy);
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
    const size_t index_bytes = block_index_bytes(&layout);
    uint8_t *index = odd ? NULL : ops_test_alloc(index_bytes), *dindex = odd ? NULL : ops_test_room(t, index_bytes);
    cpu.index = index;
    gpu.slice = dslice, gpu.k = dk, gpu.v = dv, gpu.index = dindex;
    const char *shape = ops_test_shape("block %s heads %d d %d first %d attended %d odd %d", kv_format_name(format), n_heads, d, first, attended, odd);
    int32_t cpu_bad = 7, *gpu_bad = ops_test_upload(t, &cpu_bad, sizeof cpu_bad);
    ops_test_true(t, shape, t->cpu_ops->block_encode(t->cpu, &cpu, 1, attended, &cpu_bad) == 0 && t->gpu_ops->block_encode(t->gpu, &gpu, 1, attended, gpu_bad) == 0);
    gpu_bad = ops_test_download(t, gpu_bad, sizeof *gpu_bad);
    ops_test_true(t, shape, cpu_bad == 7 + n_bad && *gpu_bad == 7 + n_bad);
    uint8_t *coded = ops_test_download(t, dslice, slice_bytes);
    uint16_t *gk = ops_test_download(t, dk, bytes), *gv = ops_test_download(t, dv, bytes);
    ops_test_same(t, shape, slice, coded, slice_bytes);
    ops_test_same(t, shape, k, gk, bytes);
    ops_test_same(t, shape, v, gv, bytes);
    if (index)
        same_index(t, shape, &layout, first, index, dindex, coded);
    free(gk), free(gv);
    gpu.index = index ? ops_test_room(t, index_bytes) : NULL;
    if (index)
        memset(index, 0, index_bytes);
    t->cpu_ops->block_decode(t->cpu, &cpu, 1);
    ops_test_true(t, shape, t->gpu_ops->block_decode(t->gpu, &gpu, 1) == 0);
    if (index)
        same_index(t, shape, &layout, first, index, gpu.index, coded);
    gk = ops_test_download(t, dk, bytes), gv = ops_test_download(t, dv, bytes);
    ops_test_same(t, shape, k, gk, bytes);
    ops_test_same(t, shape, v, gv, bytes);
    free(k), free(v), free(slice), free(coded), free(gk), free(gv), free(gpu_bad), free(index);
}

/* Several blocks of one call, from exact rows that are apart from where the attended values go, as a chunk of a prompt codes them. */
static void blocks(struct ops_test *t, enum kv_format format, int n, int n_heads, int d, bool first)
{
    struct block_layout layout;
    block_layout_init(&layout, format, 1, (uint32_t)n_heads, (uint32_t)d);
    const size_t rows = (size_t)(n * BLOCK_TOKENS * d), bytes = rows * (size_t)n_heads * 2, own_rows = rows + (size_t)(16 * d), own_bytes = own_rows * (size_t)n_heads * 2;
    const size_t slice = (size_t)layout.slice_bytes[1];
    uint16_t *own_k = ops_test_bf16(t, own_bytes / 2, 3), *own_v = ops_test_bf16(t, own_bytes / 2, .3), *k = ops_test_alloc(bytes), *v = ops_test_alloc(bytes);
    uint8_t *slices = ops_test_alloc(slice * (size_t)n), *gpu_slices = ops_test_room(t, slice * (size_t)n);
    uint16_t *gpu_own_k = ops_test_upload(t, own_k, own_bytes), *gpu_own_v = ops_test_upload(t, own_v, own_bytes), *gpu_k = ops_test_room(t, bytes), *gpu_v = ops_test_room(t, bytes);
    struct block_params cpu[8], gpu[8];
    int32_t cpu_bad = 0, *gpu_bad = ops_test_upload(t, &cpu_bad, sizeof cpu_bad);
    for (int i = 0; i < n; i++) {
        const size_t at = (size_t)(i * BLOCK_TOKENS * d);
        cpu[i] = (struct block_params){.layout = &layout, .first = first && i == 0, .slice = slices + slice * (size_t)i, .k = k + at, .v = v + at, .head_stride = (int64_t)rows, .exact_k = own_k + at,
                                       .exact_v = own_v + at, .exact_stride = (int64_t)own_rows};
        gpu[i] = (struct block_params){.layout = &layout, .first = first && i == 0, .slice = gpu_slices + slice * (size_t)i, .k = gpu_k + at, .v = gpu_v + at, .head_stride = (int64_t)rows,
                                       .exact_k = gpu_own_k + at, .exact_v = gpu_own_v + at, .exact_stride = (int64_t)own_rows};
    }
    const char *shape = ops_test_shape("%d blocks %s heads %d d %d first %d", n, kv_format_name(format), n_heads, d, first);
    ops_test_true(t, shape, t->cpu_ops->block_encode(t->cpu, cpu, n, true, &cpu_bad) == 0 && t->gpu_ops->block_encode(t->gpu, gpu, n, true, gpu_bad) == 0);
    uint8_t *coded = ops_test_download(t, gpu_slices, slice * (size_t)n);
    uint16_t *gk = ops_test_download(t, gpu_k, bytes), *gv = ops_test_download(t, gpu_v, bytes);
    ops_test_same(t, shape, slices, coded, slice * (size_t)n);
    ops_test_same(t, shape, k, gk, bytes);
    ops_test_same(t, shape, v, gv, bytes);
    free(coded), free(gk), free(gv);
    ops_test_true(t, shape, t->gpu_ops->block_decode(t->gpu, gpu, n) == 0);
    gk = ops_test_download(t, gpu_k, bytes), gv = ops_test_download(t, gpu_v, bytes);
    ops_test_same(t, shape, k, gk, bytes);
    ops_test_same(t, shape, v, gv, bytes);
    free(own_k), free(own_v), free(k), free(v), free(slices), free(gk), free(gv);
}

void test_ops_blocks(struct ops_test *t)
{
    blocks(t, KV_FORMAT_K8V4, 3, 2, 64, true);
    blocks(t, KV_FORMAT_K8V8, 5, 1, 96, false);
    blocks(t, KV_FORMAT_BF16, 2, 2, 64, true);
    ops_test_true(t, "no blocks", t->gpu_ops->block_encode(t->gpu, NULL, 0, true, NULL) == 0 && t->gpu_ops->block_decode(t->gpu, NULL, 0) == 0);
    block(t, KV_FORMAT_K8V4, 2, 64, true, true, false);
    block(t, KV_FORMAT_K8V4, 1, 128, false, false, true);
    block(t, KV_FORMAT_K8V4, 1, 160, false, true, false);
    block(t, KV_FORMAT_K8V8, 2, 96, true, true, true);
    block(t, KV_FORMAT_BF16, 1, 64, true, true, true);
    block(t, KV_FORMAT_BF16, 3, 32, false, false, false);
}
