/* StreamingLLM's rule (arXiv 2309.17453): sinks and the most recent tokens. The sinks and the newest tokens are mandatory for every selector, so what is left to
 * choose are the newest candidates. Deviation: positions stay the true ones (the original renumbers them inside its cache, because it has dropped the rest). */
#include "worker/cache/selector_private.h"

static size_t streaming_scratch_bytes(const struct selector_shape *shape)
{
    (void)shape;
    return 0;
}

static int streaming_select(const struct selector_input *in, int32_t *ret_n, int32_t *ret_indices)
{
    for (int h = 0; h < in->n_kv_heads; h++) {
        ret_n[h] = (int32_t)in->n_free;
        for (int64_t i = 0; i < in->n_free; i++)
            ret_indices[h * in->n_free + i] = (int32_t)(in->last - in->n_free + i);
    }
    return 0;
}

const struct selector_ops selector_streaming = {
    .name = "streaming",
    .n_window = 0,
    .layer_free = selector_even_layer_free,
    .head_free_max = selector_even_head_free_max,
    .rows_max = selector_even_rows_max,
    .scratch_bytes = streaming_scratch_bytes,
    .select = streaming_select,
};
