/* Summaries of sub-pages for the scorers minmax, mean and meanvar: of the page's slow tokens alone, as the page's bytes give their keys back (the values that prefill attends),
 * in the model's own basis. [vectors, d] fp16, one after the other: minima, maxima | mean | mean, variance. Sums run over the tokens ascending, lanes across channels; what
 * fp16 cannot hold is held at its largest number. A sub-page without slow tokens has zeros. */
#include "kernels/cpu/block_page_read.h"
#include "kernels/cpu/hadamard.h"
#include "kernels/cpu/ops.h"
#include "kernels/kv_page.h"
#include <errno.h>

enum { TASK_PAGES = 16 };

/* The slow tokens' keys in the model's own basis: [n, d]. Returns n. */
static int slow_keys(const struct page_summary_params *p, int subpage, float *ret_keys)
{
    const struct block_layout *layout = p->layout;
    const uint8_t *page = kv_summary_page(layout, &p->slow, p->slices, p->slice_stride, p->first / BLOCK_SUBPAGES, subpage);
    const uint32_t tokens = p->slow.masks[subpage];
    int d = (int)layout->head_dim, block = d & -d, n = 0;
    bf16_t rows[SUBPAGE_TOKENS * KV_MAX_DIM];
    page_read_keys(subpage == 0 ? &layout->sink : &layout->page, page, d, rows);
    for (int t = 0; t < SUBPAGE_TOKENS; t++) {
        if (!(tokens >> t & 1))
            continue;
        float *key = ret_keys + n++ * d;
        for (int c = 0; c < d; c += LANES)
            v16_store(key + c, v16_load_bf16(rows + t * d + c));
        for (int c = 0; c < d; c += block)
            hadamard(key + c, block);
    }
    return n;
}

ALWAYS_INLINE void store_held(uint16_t *to, v16 x)
{
    const v16 most = v16_set1(65504.0f);
    v16_store_fp16(to, v16_max(v16_min(x, most), v16_neg(most)));
}

static void write_minmax(const float *keys, int n, int d, uint16_t *summary)
{
    for (int c = 0; c < d; c += LANES) {
        v16 min = v16_load(keys + c), max = min;
        for (int t = 1; t < n; t++) {
            v16 x = v16_load(keys + t * d + c);
            min = v16_min(x, min);
            max = v16_max(x, max);
        }
        store_held(summary + c, min);
        store_held(summary + d + c, max);
    }
}

static void write_moments(const float *keys, int n, int d, bool variance, uint16_t *summary)
{
    const v16 count = v16_set1((float)n);
    for (int c = 0; c < d; c += LANES) {
        v16 sum = v16_zero(), squares = v16_zero();
        for (int t = 0; t < n; t++)
            sum = v16_add(sum, v16_load(keys + t * d + c));
        v16 mean = v16_div(sum, count);
        store_held(summary + c, mean);
        for (int t = 0; variance && t < n; t++) {
            v16 x = v16_sub(v16_load(keys + t * d + c), mean);
            squares = v16_fma(x, x, squares);
        }
        if (variance)
            store_held(summary + d + c, v16_div(squares, count));
    }
}

static void summaries_task(void *arg, int64_t task, int thread)
{
    const struct page_summary_params *p = arg;
    int d = (int)p->layout->head_dim, first = p->first + (int)task * TASK_PAGES, end = first + TASK_PAGES < p->slow.n_subpages ? first + TASK_PAGES : p->slow.n_subpages;
    size_t bytes = page_summary_bytes(p->scorer, d);
    float keys[SUBPAGE_TOKENS * KV_MAX_DIM] __attribute__((aligned(64)));
    (void)thread;
    for (int i = first; i < end; i++) {
        uint16_t *summary = (uint16_t *)(p->summaries + (size_t)i * bytes);
        if (p->slow.masks[i] == 0) {
            memset(summary, 0, bytes);
            continue;
        }
        const int n = slow_keys(p, i, keys);
        if (p->scorer == PAGE_SCORER_MINMAX)
            write_minmax(keys, n, d, summary);
        else
            write_moments(keys, n, d, p->scorer == PAGE_SCORER_MEANVAR, summary);
    }
}

int ISA(page_summaries)(struct stream *s, const struct page_summary_params *p)
{
    const int n = p->slow.n_subpages - p->first;
    if (p->first < 0 || n < 0 || !p->layout || (unsigned)p->scorer >= PAGE_SCORER_COUNT || page_summary_vectors(p->scorer) == 0)
        return -EINVAL;
    if (p->layout->head_dim > KV_MAX_DIM)
        return -ENOTSUP;
    cpu_run(s, n / TASK_PAGES + (n % TASK_PAGES != 0), summaries_task, (void *)p);
    return 0;
}
