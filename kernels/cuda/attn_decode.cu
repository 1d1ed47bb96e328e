/* Decode attention of one token: fast rows, scores of the slow sub-pages, the choice, the chosen pages, the merge (kernels.h has the formula), for all items of a call:
 *
 *   rows    partials of 256 fast rows each                       tensor cores, attn_decode_rows.cuh
 *   score   what the scorer expects of every sub-page            the 2-bit index once for all that share it, attn_index.cuh; the others attn_summary.cuh
 *   choose  masses, the fetch_pages largest                      one block an item, radix_select.cuh
 *   pages   partials of 16 chosen sub-pages each                 expanded to bf16 in shared memory, tensor cores; with a page cache in rounds (page_cache.cu):
 *           requests and fetch on the gather stream, then the parts whose pages were there, and when the others have arrived theirs
 *   merge   all partials of an item by log-sum-exp               a block a head
 *
 * The choice needs the rows' log-sum-exp. With a page cache it is therefore all that is made of them before the choice, and their values are attended while the gather stream looks up and fetches;
 * where nothing is chosen by mass all of the rows comes then. Without one the rows are one launch, first of all.
 * Items that attend every page, or the newest ones, skip score; choose lists their pages. Splits are at fixed borders and merged in order, so a result does not depend on the batch.
 * Precision: queries, weights and expanded keys and values in bf16, NMSE against the CPU up to 1.3e-4 in the tests; scores have the CPU's bits but for the order of a sum, so choices differ only between pages
 * of nearly equal mass.
 * Head dims 32, 64, 80 (rows alone), 96, 128, groups up to 16: else -ENOTSUP. `items` is the host's, and ret_chosen too; all that an item points at otherwise is device memory, but a block's
 * data may lie in a registered pool. With ret_chosen the call waits. */
#include "kernels/cuda/attn_decode_rows.cuh"
#include "kernels/cuda/attn_index.cuh"
#include "kernels/cuda/attn_summary.cuh"
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/radix_select.cuh"
#include <errno.h>

/* Coefficients of key biases: a head of an item a block, one warp. */
__global__ void __launch_bounds__(32) decode_bias_kernel(const struct decode_args a)
{
    const struct decode_item &item = a.items[blockIdx.y];
    const int h = (int)blockIdx.x;
    bias_coefficients(a.bias, item.slow.kv_head, item.q + h * a.head_dim, a.head_dim, a.scale, item.ab + h * BIAS_LD);
}

/* Every scorer but the index: a warp a sub-page. Queries are prepared once a block. */
__global__ void __launch_bounds__(SCORE_WARPS * 32) decode_score_kernel(const struct decode_args a)
{
    __shared__ struct summary_query sq;
    const struct decode_item &item = a.items[blockIdx.y];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, i = (int)blockIdx.x * SCORE_WARPS + warp, d = a.head_dim;
    const bool oracle = a.scorer == PAGE_SCORER_ORACLE;
    if (!item.scored || (int)blockIdx.x * SCORE_WARPS >= item.slow.n_subpages)
        return;
    for (int h = warp; h < a.group; h += SCORE_WARPS) {
        for (int c = lane; c < d; c += 32)
            sq.q[h][c] = item.q[h * d + c] * a.scale;
        if (!oracle)
            summary_rotate_back(sq.q[h], d);
    }
    __syncthreads();
    if (i >= item.slow.n_subpages)
        return;
    float *e = item.e + (int64_t)i * a.group;
    if (item.slow.masks[i] == 0) {
        if (lane < a.group)
            e[lane] = -INFINITY;
        return;
    }
    const struct kv_page page = kv_page_at(&a.layout, &item.slow, i);
    const int vectors = page_summary_vectors_of(a.scorer);
    const uint16_t *summary = reinterpret_cast<const uint16_t *>(item.summaries) + (int64_t)i * vectors * d;
    for (int first = 0; first < a.group; first += 2) { /* two heads at a time; the second half may repeat the last one */
        const int h = first + lane / 16 < a.group ? first + lane / 16 : a.group - 1;
        const float score = oracle ? oracle_score(a, item, page, h, sq.q[h]) : summary_score(a, item, page, h, sq.q[h], summary);
        if (lane % 16 == 0 && first + lane / 16 < a.group)
            e[h] = score;
    }
}

/* Blocks of the slow tier, with pages or without. */
DEVICE int slow_blocks(const struct decode_item &item)
{
    return (item.slow.n_subpages + BLOCK_SUBPAGES - 1) / BLOCK_SUBPAGES;
}

/* The power of two that the heads of a group are filled up to: so many neighbouring threads read one page's e. */
DEVICE int head_lanes(int group)
{
    int n = 1;
    while (n < group)
        n *= 2;
    return n;
}

/* Combines x over the block's threads with the same head, in a fixed order; threads 0 .. n - 1 have head 0 .. n - 1, and so has thread i head i % n. `part`: [warps, n]. Every thread gets it. */
template <class Combine> DEVICE float head_reduce(float x, int n, float *part, Combine combine)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    for (int h = n; h < 32; h *= 2)
        x = combine(x, __shfl_xor_sync(0xFFFFFFFFu, x, h));
    if (lane < n)
        part[warp * n + lane] = x;
    __syncthreads();
    x = part[lane % n];
    for (int w = 1; w < CHOOSE_THREADS / 32; w++)
        x = combine(x, part[w * n + lane % n]);
    __syncthreads(); /* part may be written again */
    return x;
}

/* Of each head, the log-sum-exp over everything that it may attend; by the whole block. */
DEVICE void head_totals(const struct decode_args &a, const struct decode_item &item, float *part, float *total)
{
    const int n_rows = item.n_row_parts[0] + item.n_row_parts[1], n = head_lanes(a.group), h = (int)threadIdx.x % n, first = (int)threadIdx.x / n, step = CHOOSE_THREADS / n;
    const int end_rows = h < a.group ? n_rows : 0, end_pages = h < a.group ? item.slow.n_subpages : 0;
    float m = -INFINITY, l = 0;
    for (int i = first; i < end_rows; i += step)
        m = fmaxf(m, item.ml[2 * (i * a.group + h)]);
    for (int i = first; i < end_pages; i += step)
        m = fmaxf(m, item.e[(int64_t)i * a.group + h]);
    m = head_reduce(m, n, part, [](float x, float y) { return fmaxf(x, y); });
    for (int i = first; i < end_rows; i += step)
        l = fmaf(exp_nonpositive(item.ml[2 * (i * a.group + h)] - m), item.ml[2 * (i * a.group + h) + 1], l);
    for (int i = first; i < end_pages; i += step)
        l += exp_nonpositive(item.e[(int64_t)i * a.group + h] - m);
    l = head_reduce(l, n, part, [](float x, float y) { return x + y; });
    if ((int)threadIdx.x < a.group)
        total[threadIdx.x] = m + log_float(l);
}

/* A block's mass is the sum of its pages'; -inf where it has none. All threads; `e` has served and takes the result. Returns how many blocks have pages. */
DEVICE int block_masses(const struct decode_item &item, int *n_blocks)
{
    if (threadIdx.x == 0)
        *n_blocks = 0;
    __syncthreads();
    for (int b = (int)threadIdx.x; b < slow_blocks(item); b += CHOOSE_THREADS) {
        const int first = b * BLOCK_SUBPAGES, end = min(first + BLOCK_SUBPAGES, item.slow.n_subpages);
        float mass = -INFINITY;
        for (int i = first; i < end; i++)
            if (item.slow.masks[i])
                mass = mass > -INFINITY ? mass + item.mass[i] : item.mass[i];
        item.e[b] = mass;
        if (mass > -INFINITY)
            atomicAdd(n_blocks, 1);
    }
    __syncthreads();
    return *n_blocks;
}

/* The pages of the chosen blocks, by the first warp, a block a lane. */
DEVICE void blocks_to_pages(const struct decode_item &item)
{
    const int lane = (int)threadIdx.x;
    int n = 0;
    for (int first = 0; first < item.n_choices; first += 32) {
        const int from = first + lane < item.n_choices ? item.blocks[first + lane] * BLOCK_SUBPAGES : item.slow.n_subpages;
        const int end = min(from + BLOCK_SUBPAGES, item.slow.n_subpages);
        int count = 0, before;
        for (int i = from; i < end; i++)
            count += item.slow.masks[i] != 0;
        before = count;
        for (int x = 1; x < 32; x *= 2) {
            const int below = __shfl_up_sync(0xFFFFFFFFu, before, (unsigned)x);
            before += lane >= x ? below : 0;
        }
        int at = n + before - count;
        for (int i = from; i < end; i++)
            if (item.slow.masks[i])
                item.chosen[at++] = i;
        n += __shfl_sync(0xFFFFFFFFu, before, 31);
    }
    if (lane == 0)
        *item.n_now = n;
}

/* The last `n` sub-pages with slow tokens, ascending, by all threads; `counts` is shared memory. */
DEVICE void collect_last(const struct decode_item &item, int n, int *counts)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, n_before = item.slow.n_pages - n;
    int seen = 0;
    for (int first = 0; first < item.slow.n_subpages; first += CHOOSE_THREADS) {
        const int i = first + (int)threadIdx.x;
        const bool page = i < item.slow.n_subpages && item.slow.masks[i] != 0;
        const unsigned lanes = __ballot_sync(0xFFFFFFFFu, page);
        if (lane == 0)
            counts[warp] = __popc(lanes);
        __syncthreads();
        int rank = seen + __popc(lanes & ((1u << lane) - 1));
        for (int w = 0; w < CHOOSE_THREADS / 32; w++) {
            rank += w < warp ? counts[w] : 0;
            seen += counts[w];
        }
        if (page && rank >= n_before)
            item.chosen[rank - n_before] = i;
        __syncthreads();
    }
}

/* Masses of the sub-pages, by all threads; the newest weigh most where nothing is scored. */
DEVICE void page_masses(const struct decode_args &a, const struct decode_item &item, float *part, float *total)
{
    const bool recent = a.scorer == PAGE_SCORER_RECENT;
    if (!recent)
        head_totals(a, item, part, total);
    __syncthreads();
    for (int i = (int)threadIdx.x; i < item.slow.n_subpages; i += CHOOSE_THREADS) {
        float mass = 0;
        for (int h = 0; !recent && h < a.group; h++)
            mass += exp_nonpositive(item.e[(int64_t)i * a.group + h] - total[h]);
        item.mass[i] = item.slow.masks[i] == 0 ? -INFINITY : recent ? (float)i : mass / (float)a.group;
    }
    __syncthreads();
}

/* By all threads, after a barrier. */
DEVICE void choose_pages(const struct decode_args &a, const struct decode_item &item, struct radix_shared *radix, float *part, float *total, int *counts)
{
    if (!item.scored) {
        collect_last(item, item.n_chosen, counts);
        return;
    }
    page_masses(a, item, part, total);
    if (!item.blocks) {
        radix_find(radix, item.mass, item.slow.n_subpages, item.n_choices);
        radix_collect(radix, item.mass, item.slow.n_subpages, item.chosen);
        return;
    }
    if (block_masses(item, counts) > item.n_choices) {
        radix_find(radix, item.e, slow_blocks(item), item.n_choices);
        radix_collect(radix, item.e, slow_blocks(item), item.blocks);
        if (threadIdx.x < 32)
            blocks_to_pages(item); /* after the barrier that ends radix_collect */
        return;
    }
    __syncthreads(); /* all have read how many blocks there are */
    collect_last(item, item.slow.n_pages, counts);
    if (threadIdx.x == 0)
        *item.n_now = item.slow.n_pages;
}

/* What is attended, into the caller's counts. Without a page cache what has an id is missed; else decode_count_fetched adds what was. */
DEVICE void count_pages(const struct decode_args &a, const struct decode_item &item)
{
    uint32_t pages = 0, tokens = 0, misses = 0;
    unsigned long long bytes = 0, bytes_missed = 0;
    for (int i = (int)threadIdx.x; i < decode_n_chosen(item); i += CHOOSE_THREADS) {
        const int subpage = item.chosen[i];
        const uint32_t size = block_subpage_layout(&a.layout, subpage < BLOCK_SUBPAGES, (uint32_t)(subpage % BLOCK_SUBPAGES))->bytes;
        const bool missed = a.pass == DECODE_ALL && item.slow.blocks[subpage / BLOCK_SUBPAGES].id != 0;
        pages++;
        tokens += (uint32_t)__popc(item.slow.masks[subpage]);
        misses += missed;
        bytes += size;
        bytes_missed += missed ? size : 0;
    }
    if (pages == 0)
        return;
    atomicAdd(&item.counts->pages, pages);
    atomicAdd(&item.counts->tokens, tokens);
    atomicAdd(&item.counts->misses, misses);
    atomicAdd((unsigned long long *)&item.counts->bytes, bytes);
    atomicAdd((unsigned long long *)&item.counts->bytes_missed, bytes_missed);
}

/* An item a block. */
__global__ void __launch_bounds__(CHOOSE_THREADS) decode_choose_kernel(const struct decode_args a)
{
    __shared__ struct radix_shared radix;
    __shared__ float part[CHOOSE_THREADS / 32 * DECODE_GROUP_MAX], total[DECODE_GROUP_MAX];
    __shared__ int counts[CHOOSE_THREADS / 32];
    const struct decode_item &item = a.items[blockIdx.x];
    if (item.n_chosen == 0)
        return;
    choose_pages(a, item, &radix, part, total, counts);
    __syncthreads();
    if (item.counts)
        count_pages(a, item);
}

/* A thread a page of the round: the page cache is asked for it. Runs on the gather stream. */
__global__ void __launch_bounds__(BLOCK_THREADS) decode_requests_kernel(const struct decode_args a, const struct page_cache_args cache, unsigned n)
{
    const unsigned i = blockIdx.x * BLOCK_THREADS + threadIdx.x;
    const int flat = a.first_part + (int)(i / DECODE_PAGES), at = flat % a.page_parts * DECODE_PAGES + (int)(i % DECODE_PAGES);
    const struct decode_item *item = i < n ? &a.items[flat / a.page_parts] : nullptr;
    const bool page = item && at < decode_n_chosen(*item);
    const int subpage = page ? item->chosen[at] : 0;
    const uint64_t id = page ? item->slow.blocks[subpage / BLOCK_SUBPAGES].id : 0;
    page_requests_count(cache, id != 0);
    if (!item)
        return;
    const uint64_t tag = page_tag(id, (uint32_t)item->slow.layer, (uint32_t)item->slow.kv_head, (uint32_t)(subpage % BLOCK_SUBPAGES));
    page_request(cache, i, id, tag, page ? kv_page_at(&a.layout, &item->slow, subpage).page : nullptr, subpage == 0);
}

/* A head of an item a block, a thread a dim. */
__global__ void decode_merge_kernel(const struct decode_args a)
{
    const struct decode_item &item = a.items[blockIdx.y];
    const int h = (int)blockIdx.x, c = (int)threadIdx.x, d = a.head_dim;
    const int n_parts = item.n_row_parts[0] + item.n_row_parts[1] + (decode_n_chosen(item) + DECODE_PAGES - 1) / DECODE_PAGES;
    float m = -INFINITY, l = 0, sum = 0;
    if (c >= d)
        return;
    for (int i = 0; i < n_parts; i++)
        m = fmaxf(m, item.ml[2 * (i * a.group + h)]);
    for (int i = 0; i < n_parts; i++) {
        const float weight = exp_nonpositive(item.ml[2 * (i * a.group + h)] - m);
        l = fmaf(weight, item.ml[2 * (i * a.group + h) + 1], l);
        sum = fmaf(weight, decode_part_o(a, item, i)[h * d + c], sum);
    }
    item.out[h * d + c] = bf16_from_float(l > 0 ? sum / l : 0.0f);
}

/* ---- host ---- */

/* Takes the next 256-byte aligned piece. With a NULL base only the size is counted. */
static void *take(uint8_t *base, size_t *used, size_t bytes)
{
    void *piece = base ? base + *used : nullptr;
    *used += (bytes + 255) & ~(size_t)255;
    return piece;
}

/* How many pages or blocks are chosen. The masks are device memory, so blocks with pages are counted there: with fetch_blocks every item that may have more than it may attend goes through
 * the choice by mass, with RECENT too. */
static void item_choice(struct decode_item *to, const struct attn_decode_item *from, enum page_scorer scorer, bool blocks)
{
    const int n_pages = from->slow.n_pages;
    to->n_choices = blocks ? from->fetch_pages / BLOCK_SUBPAGES : from->fetch_pages;
    to->n_chosen = n_pages < from->fetch_pages ? n_pages : from->fetch_pages;
    if (to->n_choices == 0)
        to->n_chosen = 0;
    to->scored = n_pages > to->n_choices && to->n_choices > 0 && (blocks || scorer != PAGE_SCORER_RECENT);
}

/* Counts and scratch of one item; returns the scratch's size. */
static size_t item_init(struct decode_item *to, const struct attn_decode_item *from, enum page_scorer scorer, bool blocks, bool bias, int group, uint8_t *base)
{
    size_t used = 0;
    *to = {};
    to->q = from->q;
    to->out = (bf16_t *)from->out;
    to->slow = from->slow;
    to->summaries = from->summaries;
    to->counts = from->ret_counts;
    item_choice(to, from, scorer, blocks);
    for (int r = 0; r < 2; r++) {
        to->rows[r] = from->rows[r];
        to->n_row_parts[r] = (int)ceil_div64(from->rows[r].n, DECODE_ROWS);
    }
    to->n_page_parts = (int)ceil_div64(to->n_chosen, DECODE_PAGES);
    const size_t parts = (size_t)(to->n_row_parts[0] + to->n_row_parts[1] + to->n_page_parts) * (size_t)group, pages = to->scored ? (size_t)from->slow.n_subpages : 0;
    to->ml = (float *)take(base, &used, parts * 2 * sizeof(float));
    to->o = (float *)take(base, &used, parts * DECODE_PART_ROW * sizeof(float));
    to->e = (float *)take(base, &used, pages * (size_t)group * sizeof(float));
    to->mass = (float *)take(base, &used, pages * sizeof(float));
    to->chosen = (int32_t *)take(base, &used, (size_t)to->n_chosen * sizeof(int32_t));
    if (bias)
        to->ab = (float *)take(base, &used, bias_rows_bytes(group));
    if (to->scored && blocks) {
        to->blocks = (int32_t *)take(base, &used, (size_t)to->n_choices * sizeof(int32_t));
        to->n_now = (int32_t *)take(base, &used, sizeof(int32_t));
    }
    return used;
}

extern "C" size_t cuda_attn_decode_scratch(const struct op_bounds *b)
{
    struct attn_decode_item item = {};
    struct decode_item counted;
    if (b->n_items == 0)
        return 0;
    item.rows[0].n = b->n_rows[0];
    item.rows[1].n = b->n_rows[1];
    item.slow.n_subpages = item.slow.n_pages = b->n_pages;
    item.fetch_pages = b->fetch_pages;
    return (size_t)b->n_items * item_init(&counted, &item, b->scorer, b->fetch_blocks, b->n_bias_pairs > 0, b->n_heads / b->n_kv_heads, nullptr);
}

extern "C" size_t cuda_attn_decode_args(int n_items)
{
    return sizeof(struct decode_item) * (size_t)n_items + index_tiles_bytes(n_items);
}

/* The most parts and sub-pages that any item has, rounded up: the grids. */
struct decode_extent {
    int row_parts, page_parts, scored_subpages;
};

/* Parts of pages are no more than fetch_pages makes: a page cache is sized by that. */
static struct decode_extent extent_of(const struct decode_item *items, const struct attn_decode_params *p)
{
    struct decode_extent x = {};
    int most = 0;
    for (int i = 0; i < p->n_items; i++) {
        x.row_parts = max(x.row_parts, items[i].n_row_parts[0] + items[i].n_row_parts[1]);
        x.page_parts = max(x.page_parts, items[i].n_page_parts);
        x.scored_subpages = max(x.scored_subpages, items[i].scored ? items[i].slow.n_subpages : 0);
        most = max(most, p->items[i].fetch_pages);
    }
    x.row_parts = (int)launch_round(x.row_parts);
    x.page_parts = (int)min((int64_t)launch_round(x.page_parts), ceil_div64(most, DECODE_PAGES));
    x.scored_subpages = (int)launch_round(x.scored_subpages);
    return x;
}

template <int D, enum decode_rows_pass PASS> static int launch_rows(struct stream *s, const struct decode_args &a, dim3 grid)
{
    const size_t shared = decode_shared<D>::ELEMENTS * sizeof(uint16_t);
    const int r = submit_shared_bytes(s, decode_rows_kernel<D, PASS>, shared);
    return r < 0 ? r : LAUNCH((decode_rows_kernel<D, PASS>), grid, DECODE_THREADS, shared, s, a);
}

template <int D> static int launch_pages_of(struct stream *s, const struct decode_args &a, unsigned n_parts)
{
    const size_t shared = decode_shared<D>::ELEMENTS * sizeof(uint16_t);
    const int r = submit_shared_bytes(s, decode_pages_kernel<D>, shared);
    return r < 0 ? r : LAUNCH((decode_pages_kernel<D>), n_parts, DECODE_THREADS, shared, s, a);
}

template <int D> static int launch_rows_pass(struct stream *s, const struct decode_args &a, dim3 grid, enum decode_rows_pass pass)
{
    switch (pass) {
    case DECODE_ROWS_WHOLE: return launch_rows<D, DECODE_ROWS_WHOLE>(s, a, grid);
    case DECODE_ROWS_LOGITS: return launch_rows<D, DECODE_ROWS_LOGITS>(s, a, grid);
    case DECODE_ROWS_VALUES: return launch_rows<D, DECODE_ROWS_VALUES>(s, a, grid);
    default: return 0;
    }
}

/* A grid of [parts, items]. */
static int launch_rows_any(struct stream *s, const struct decode_args &a, dim3 grid, enum decode_rows_pass pass)
{
    if (grid.x == 0)
        return 0;
    switch (a.head_dim) {
    case 32: return launch_rows_pass<32>(s, a, grid, pass);
    case 64: return launch_rows_pass<64>(s, a, grid, pass);
    case 80: return launch_rows_pass<80>(s, a, grid, pass);
    case 96: return launch_rows_pass<96>(s, a, grid, pass);
    default: return launch_rows_pass<128>(s, a, grid, pass);
    }
}

/* Parts of all items in a row. */
static int launch_pages_any(struct stream *s, const struct decode_args &a, unsigned n_parts)
{
    switch (a.head_dim) {
    case 32: return launch_pages_of<32>(s, a, n_parts);
    case 64: return launch_pages_of<64>(s, a, n_parts);
    case 96: return launch_pages_of<96>(s, a, n_parts);
    case 128: return launch_pages_of<128>(s, a, n_parts);
    default: return -ENOTSUP; /* there are no pages of 80 */
    }
}

/* `tiles`: device memory that index_tiles_make has filled on the host's side, n_tiles of them. */
static int launch_scores(struct stream *s, const struct decode_args &a, int n_items, const struct decode_extent &x, const void *tiles, int n_tiles)
{
    if (x.scored_subpages == 0 || a.scorer == PAGE_SCORER_RECENT)
        return 0;
    if (a.scorer == PAGE_SCORER_INDEX2)
        return index_score_launch(s, a, index_tiles_at(tiles, n_items), n_tiles, x.scored_subpages);
    return LAUNCH(decode_score_kernel, dim3((unsigned)ceil_div64(x.scored_subpages, SCORE_WARPS), (unsigned)n_items), SCORE_WARPS * 32, 0, s, a);
}

/* A round of the page cache: parts first .. first + n - 1. Asks for their pages. */
static int lookup_round(struct device_page_cache *c, struct decode_args a, int round, int first, int n)
{
    struct page_cache_args args;
    const int n_pages = n * DECODE_PAGES;
    a.first_part = first;
    int r = page_cache_begin_round(c, round, n_pages, &args);
    if (r == 0)
        r = LAUNCH(decode_requests_kernel, blocks_for(n_pages), BLOCK_THREADS, 0, c->gather, a, args, (unsigned)n_pages);
    return r == 0 ? page_cache_fetch_round(c, &args, round, n_pages) : r;
}

/* Attends them: parts whose pages were there while the others' are on their way, then these. */
static int attend_round(struct stream *s, struct device_page_cache *c, struct decode_args a, int round, int first, int n)
{
    a.first_part = first;
    a.places = c->pages[round % PAGE_ROUNDS];
    a.pass = DECODE_PRESENT;
    int r = page_cache_wait_answers(c, round);
    if (r == 0)
        r = launch_pages_any(s, a, (unsigned)n);
    a.pass = DECODE_ARRIVED;
    if (r == 0)
        r = page_cache_wait(c, round);
    if (r == 0)
        r = launch_pages_any(s, a, (unsigned)n);
    return r == 0 ? page_cache_end_round(c, round) : r;
}

/* What is launched of the fast rows before the choice, and what after it. */
struct rows_order {
    enum decode_rows_pass before, after;
};

static struct rows_order rows_order_of(const struct device_page_cache *c, const struct decode_args &a, const struct decode_extent &x)
{
    if (!c || x.page_parts == 0)
        return {DECODE_ROWS_WHOLE, DECODE_ROWS_NONE};
    if (x.scored_subpages == 0 || a.scorer == PAGE_SCORER_RECENT)
        return {DECODE_ROWS_NONE, DECODE_ROWS_WHOLE};
    return {DECODE_ROWS_LOGITS, DECODE_ROWS_VALUES};
}

/* While the pages of one round are attended, those of the next are looked up and fetched; while the first are, what is left of the rows. */
static int launch_rounds(struct stream *s, struct device_page_cache *c, const struct decode_args &a, int n_items, dim3 row_grid, enum decode_rows_pass rows)
{
    const int n_parts = n_items * a.page_parts;
    const int step = page_cache_round_pages(c, (int64_t)n_parts * DECODE_PAGES) / DECODE_PAGES, n_rounds = (int)ceil_div64(n_parts, step);
    int r = 0;
    for (int round = 0; r == 0 && round <= n_rounds; round++) {
        const int first = round * step;
        if (round < n_rounds)
            r = lookup_round(c, a, round, first, min(step, n_parts - first));
        if (r == 0 && round == 0)
            r = launch_rows_any(s, a, row_grid, rows);
        if (r == 0 && round > 0)
            r = attend_round(s, c, a, round - 1, first - step, min(step, n_parts - first + step));
    }
    return r;
}

static int launch_all(struct stream *s, struct device_page_cache *cache, const struct decode_args &a, int n_items, const struct decode_extent &x, const void *tiles, int n_tiles)
{
    const dim3 row_grid((unsigned)x.row_parts, (unsigned)n_items);
    const struct rows_order rows = rows_order_of(cache, a, x);
    int r = a.bias.first ? LAUNCH(decode_bias_kernel, dim3((unsigned)a.group, (unsigned)n_items), 32, 0, s, a) : 0;
    if (r == 0)
        r = launch_rows_any(s, a, row_grid, rows.before);
    if (r == 0)
        r = launch_scores(s, a, n_items, x, tiles, n_tiles);
    if (r == 0 && x.page_parts > 0)
        r = LAUNCH(decode_choose_kernel, (unsigned)n_items, CHOOSE_THREADS, 0, s, a);
    if (r == 0 && x.page_parts > 0)
        r = cache ? launch_rounds(s, cache, a, n_items, row_grid, rows.after) : launch_pages_any(s, a, (unsigned)(n_items * x.page_parts));
    if (r == 0)
        r = LAUNCH(decode_merge_kernel, dim3((unsigned)a.group, (unsigned)n_items), (unsigned)(a.head_dim + 31) / 32 * 32, 0, s, a);
    return r;
}

/* How many pages each item attends that asks for them, where the device knows. */
static int return_counts(struct stream *s, struct attn_decode_params *p, const struct decode_item *items)
{
    void *host, *device;
    bool wanted = false, any = false;
    for (int i = 0; i < p->n_items; i++)
        wanted |= p->items[i].ret_chosen != nullptr;
    int r = wanted ? stream_args_room(s, sizeof(int32_t) * (size_t)p->n_items, &host, &device) : 0;
    if (r < 0 || !wanted)
        return r;
    int32_t *counts = (int32_t *)host;
    for (int i = 0; r == 0 && i < p->n_items; i++)
        if (p->items[i].ret_chosen && items[i].n_now) {
            any = true;
            r = submit_copy(s, counts + i, items[i].n_now, sizeof *counts);
        }
    if (r == 0 && any)
        r = stream_wait_idle(s);
    for (int i = 0; r == 0 && i < p->n_items; i++)
        if (p->items[i].ret_chosen)
            p->items[i].ret_n_chosen = items[i].n_now ? counts[i] : items[i].n_chosen;
    return r;
}

/* What was chosen, to the host's lists. */
static int return_chosen(struct stream *s, struct attn_decode_params *p, const struct decode_item *items)
{
    bool wait = false;
    int r = return_counts(s, p, items);
    for (int i = 0; r == 0 && i < p->n_items; i++) {
        const struct attn_decode_item *item = &p->items[i];
        if (!item->ret_chosen || item->ret_n_chosen == 0)
            continue;
        wait = true;
        r = submit_copy(s, item->ret_chosen, items[i].chosen, sizeof(int32_t) * (size_t)item->ret_n_chosen);
    }
    return r == 0 && wait ? stream_wait_idle(s) : r;
}

static bool on_16_bytes(const struct kv_rows *rows)
{
    return rows->n == 0 || ((uintptr_t)rows->k % 16 == 0 && (uintptr_t)rows->v % 16 == 0);
}

static int check(const struct attn_decode_params *p)
{
    const int d = p->head_dim;
    const bool summaries = page_summary_vectors(p->scorer) > 0;
    if (p->n_items < 0 || p->group < 1 || (unsigned)p->scorer >= PAGE_SCORER_COUNT)
        return -EINVAL;
    for (int i = 0; i < p->n_items; i++) {
        const struct attn_decode_item *item = &p->items[i];
        if (item->rows[0].n < 0 || item->rows[1].n < 0 || item->slow.n_pages < 0 || item->slow.n_subpages < item->slow.n_pages || item->fetch_pages < 0)
            return -EINVAL;
        if (item->slow.n_pages > 0 && (!p->layout || (int)p->layout->head_dim != d))
            return -EINVAL;
        if ((p->fetch_blocks && item->fetch_pages != INT32_MAX && item->fetch_pages % BLOCK_SUBPAGES) || (summaries && !item->summaries && item->fetch_pages < item->slow.n_pages))
            return -EINVAL;
        if (!on_16_bytes(&item->rows[0]) || !on_16_bytes(&item->rows[1]))
            return -ENOTSUP;
    }
    if (p->page_cache && (p->page_cache->n_pages < DECODE_PAGES || p->page_cache->args.n_staging[PAGE_CLASS_PAGE] < DECODE_PAGES))
        return -EINVAL;
    if (p->group > DECODE_GROUP_MAX || p->n_items > 65535)
        return -ENOTSUP;
    return d == 32 || d == 64 || d == 80 || d == 96 || d == 128 ? 0 : -ENOTSUP;
}

extern "C" int cuda_attn_decode(struct stream *s, struct attn_decode_params *p)
{
    void *host, *device, *scratch;
    size_t bytes = 0;
    int r = check(p);
    if (r == 0 && p->page_cache && p->page_cache->stream != s)
        r = -EINVAL;
    if (r < 0 || p->n_items == 0)
        return r;
    const size_t item_bytes = sizeof(struct decode_item) * (size_t)p->n_items, list_bytes = cuda_attn_decode_args(p->n_items);
    r = stream_args_room(s, list_bytes, &host, &device);
    if (r < 0)
        return r;
    struct decode_item *items = (struct decode_item *)host;
    for (int i = 0; i < p->n_items; i++)
        bytes += item_init(&items[i], &p->items[i], p->scorer, p->fetch_blocks, p->bias != nullptr, p->group, nullptr);
    r = stream_temp(s, bytes, &scratch);
    if (r < 0)
        return r;
    bytes = 0;
    for (int i = 0; i < p->n_items; i++)
        bytes += item_init(&items[i], &p->items[i], p->scorer, p->fetch_blocks, p->bias != nullptr, p->group, (uint8_t *)scratch + bytes);
    struct decode_args a = {};
    a.items = (const struct decode_item *)device;
    if (p->layout)
        a.layout = *p->layout;
    a.group = p->group;
    a.head_dim = p->head_dim;
    a.scale = p->scale;
    a.scorer = p->scorer;
    const struct decode_extent extent = extent_of(items, p);
    a.page_parts = extent.page_parts;
    a.pass = p->page_cache ? DECODE_PRESENT : DECODE_ALL;
    if (p->bias)
        a.bias = *p->bias;
    const int n_tiles = index_tiles_make(items, p->n_items, p->group, (uint8_t *)host + item_bytes);
    r = stream_args_send(s, device, host, list_bytes);
    if (r == 0)
        r = launch_all(s, p->page_cache, a, p->n_items, extent, (const uint8_t *)device + item_bytes, n_tiles);
    if (r == 0)
        r = return_chosen(s, p, items);
    return stream_temp_end(s, r);
}
