/* Decode attention: fast rows, scoring, selection, sub-pages, merge; kernels.h has the formula.
 *
 * A call is at most two runs of the pool. The first computes the partials of the rows and the scores of the pages, in units with fixed borders (ROWS_SEGMENT,
 * SCORE_SEGMENT); whoever finishes the last unit of an item selects its pages. The second computes the partials of the chosen pages (PAGES_SEGMENT); whoever
 * finishes the last one merges them all in order. Items that attend every page, or the newest ones, need no scores and are done in the first run. So the work of one sequence
 * spreads over all threads, and who does what changes nothing.
 *
 * Scratch is held for the time of the call; many items go in waves, so that it stays below WAVE_BYTES unless one item alone needs more. */
#include "kernels/cpu/attn_units.h"
#include "kernels/cpu/cpu_private.h"
#include "kernels/cpu/lse_merge.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/radix_select.h"
#include "kernels/kv_page.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <stdatomic.h>

enum {
    WAVE_BYTES = 512 << 10,
    TASKS_A_THREAD = 8, /* at least, while there are units for them: fewer units a task share work better, more share fewer cache lines */
};

struct decode_state {
    struct attn_decode_item *item;
    bool scored;           /* more pages than may be fetched, and their scores decide which */
    bool newest;           /* or their age does */
    int n_row_parts[2], n_score_segments;
    int n_choices;         /* pages or blocks to choose */
    int n_page_parts, n_chosen; /* with blocks the most there can be, until they are chosen */
    int first_page;        /* when not scored: the pages first_page .. first_page + n_chosen - 1 are attended */
    atomic_int left;       /* units of this run that have not finished */
    float *ml, *o;         /* partials, rows first: [n_parts, group, 2], [n_parts, group, d] */
    float *score_ml;       /* [n_score_segments, group, 2] */
    float *page_sum;       /* [n_score_segments, group, SCORE_SEGMENT] */
    float *mass;           /* [n_score_segments * SCORE_SEGMENT] */
    int32_t *subpages;     /* [n_pages] those with slow tokens: what "page i" means in this file */
    int32_t *chosen;       /* [n_chosen] pages */
    int32_t *blocks;       /* [n_choices] when blocks are chosen */
};

struct decode_unit {
    int32_t item, unit; /* rows first, then score segments or page segments */
};

struct decode_wave {
    const struct attn_decode_params *p;
    struct decode_state *states;
    struct decode_unit *units;
    int64_t n_units, per_task; /* units of a task, one after the other */
    int n_threads;
    bool second; /* run */
};

static int ceil_div(int a, int b)
{
    return a / b + (a % b != 0);
}

static int row_parts(const struct decode_state *st)
{
    return st->n_row_parts[0] + st->n_row_parts[1];
}

/* Shares of the pages: mass = mean over the heads of exp(logsumexp(page) - logsumexp(everything)), from sums relative to each segment's maximum. */
static void page_masses(struct decode_state *st, int group)
{
    int n_segments = st->n_score_segments, n_rows = row_parts(st);
    memset(st->mass, 0, sizeof *st->mass * (size_t)n_segments * SCORE_SEGMENT);
    for (int h = 0; h < group; h++) {
        float m = -INFINITY, l = 0;
        for (int i = 0; i < n_rows + n_segments; i++) {
            const float *ml = (i < n_rows ? st->ml + 2 * (i * group + h) : st->score_ml + 2 * ((i - n_rows) * group + h));
            m = ml[0] > m ? ml[0] : m;
        }
        for (int i = 0; i < n_rows + n_segments; i++) {
            float *ml = (i < n_rows ? st->ml + 2 * (i * group + h) : st->score_ml + 2 * ((i - n_rows) * group + h));
            float w = ml[0] > -INFINITY ? vmath_expf(ml[0] - m) : 0;
            l = fmaf(w, ml[1], l);
            if (i >= n_rows)
                ml[0] = w; /* the maximum has served */
        }
        float share = l > 0 ? 1.0f / (l * (float)group) : 0;
        for (int i = 0; i < n_segments; i++) {
            const float *sums = st->page_sum + (i * group + h) * SCORE_SEGMENT;
            v16 w = v16_set1(st->score_ml[2 * (i * group + h)] * share);
            for (int j = 0; j < SCORE_SEGMENT; j += LANES) {
                float *mass = st->mass + i * SCORE_SEGMENT + j;
                v16_store(mass, v16_fma(v16_load(sums + j), w, v16_load(mass)));
            }
        }
    }
}

/* Page i is the first of its block. */
static bool starts_block(const struct decode_state *st, int i)
{
    return i == 0 || st->subpages[i] / BLOCK_SUBPAGES != st->subpages[i - 1] / BLOCK_SUBPAGES;
}

/* Those with a page. */
static int count_blocks(const struct slow_pages *slow)
{
    int n = 0;
    for (int i = 0, last = -1; i < slow->n_subpages; i++) {
        const int block = i / BLOCK_SUBPAGES;
        n += slow->masks[i] && block != last;
        last = slow->masks[i] ? block : last;
    }
    return n;
}

/* Nearly all masks are full, so four at a time are looked at. */
static void list_subpages(const struct slow_pages *slow, int32_t *ret_subpages)
{
    int n = 0, i = 0;
    for (; i + 4 <= slow->n_subpages && n + 4 <= slow->n_pages; i += 4) {
        uint64_t four;
        memcpy(&four, slow->masks + i, sizeof four);
        ret_subpages[n] = i;
        n += (uint16_t)four != 0;
        ret_subpages[n] = i + 1;
        n += (uint16_t)(four >> 16) != 0;
        ret_subpages[n] = i + 2;
        n += (uint16_t)(four >> 32) != 0;
        ret_subpages[n] = i + 3;
        n += four >> 48 != 0;
    }
    for (; i < slow->n_subpages; i++) {
        if (!slow->masks[i])
            continue;
        ASSERT(n < slow->n_pages);
        ret_subpages[n++] = i;
    }
    ASSERT(n == slow->n_pages);
}

/* A block's mass is the sum of its pages'. */
static void choose_blocks(struct decode_state *st)
{
    const int n_pages = st->item->slow.n_pages;
    int n_blocks = 0, n = 0, next = 0;
    for (int i = 0; i < n_pages; i++) {
        float mass = st->mass[i];
        if (starts_block(st, i))
            st->mass[n_blocks++] = mass;
        else
            st->mass[n_blocks - 1] += mass;
    }
    radix_select(st->mass, n_blocks, st->n_choices, st->blocks);
    for (int i = 0, block = -1; i < n_pages; i++) {
        block += starts_block(st, i);
        next += next < st->n_choices && st->blocks[next] < block;
        if (next < st->n_choices && st->blocks[next] == block)
            st->chosen[n++] = i;
    }
    st->n_chosen = n;
    st->n_page_parts = ceil_div(n, PAGES_SEGMENT);
}

static void choose_pages(const struct attn_decode_params *p, struct decode_state *st)
{
    page_masses(st, p->group);
    if (p->fetch_blocks)
        choose_blocks(st);
    else
        radix_select(st->mass, st->item->slow.n_pages, st->n_chosen, st->chosen);
}

static void state_merge(struct decode_state *st, int group, int d)
{
    float *out = st->item->out, m, l;
    for (int h = 0; h < group; h++)
        lse_merge(st->ml + 2 * h, 2 * group, st->o + h * d, (int64_t)group * d, row_parts(st) + st->n_page_parts, d, out + h * d, &m, &l);
}

static struct unit_query query_of(const struct decode_wave *w, const struct decode_state *st)
{
    const struct attn_decode_params *p = w->p;
    return (struct unit_query){.q = st->item->q, .group = p->group, .d = p->head_dim, .scale = p->scale, .bias = bias_pairs_of(p->bias, st->item->slow.kv_head)};
}

static void run_rows(const struct decode_wave *w, struct decode_state *st, int part)
{
    int group = w->p->group, d = w->p->head_dim, run = part >= st->n_row_parts[0];
    const struct kv_rows *rows = &st->item->rows[run];
    int first = (part - (run ? st->n_row_parts[0] : 0)) * ROWS_SEGMENT, n = rows->n - first < ROWS_SEGMENT ? rows->n - first : ROWS_SEGMENT;
    const struct unit_query u = query_of(w, st);
    unit_rows(&u, rows, first, n, st->ml + 2 * part * group, st->o + (int64_t)part * group * d);
}

/* Sub-pages in ascending order: most lie in the block of the one before. */
static void find_pages(const struct block_layout *layout, const struct slow_pages *slow, const int32_t *subpages, int n, struct kv_page *ret_pages)
{
    struct kv_block_pages pages = {0};
    for (int i = 0, last = -1; i < n; i++) {
        const int block = subpages[i] / BLOCK_SUBPAGES;
        if (block != last)
            pages = kv_block_pages_at(layout, slow, block);
        last = block;
        ret_pages[i] = kv_block_page(&pages, slow, subpages[i]);
    }
}

static void run_scores(const struct decode_wave *w, struct decode_state *st, int segment)
{
    const struct attn_decode_params *p = w->p;
    const struct slow_pages *slow = &st->item->slow;
    struct kv_page pages[SCORE_SEGMENT];
    int group = p->group, first = segment * SCORE_SEGMENT;
    int n = slow->n_pages - first < SCORE_SEGMENT ? slow->n_pages - first : SCORE_SEGMENT;
    find_pages(p->layout, slow, st->subpages + first, n, pages);
    const struct unit_query u = query_of(w, st);
    unit_scores(&u, p->scorer, p->layout, pages, st->item->summaries, n, st->score_ml + 2 * segment * group, st->page_sum + segment * group * SCORE_SEGMENT);
}

/* The sub-page of the i-th page that is attended. */
static int attended_subpage(const struct decode_state *st, int i)
{
    return st->subpages[st->scored ? st->chosen[i] : st->first_page + i];
}

/* The pages of a segment, at most PAGES_SEGMENT; returns their number. */
static int segment_pages(const struct decode_state *st, int segment, const struct block_layout *layout, struct kv_page *ret_pages)
{
    const int first = segment * PAGES_SEGMENT, n = st->n_chosen - first < PAGES_SEGMENT ? st->n_chosen - first : PAGES_SEGMENT;
    int32_t subpages[PAGES_SEGMENT];
    for (int i = 0; i < n; i++)
        subpages[i] = attended_subpage(st, first + i);
    find_pages(layout, &st->item->slow, subpages, n, ret_pages);
    return n;
}

/* What a thread runs before and after a unit. Tasks go to whoever is free, so with n threads the n-th task from here is most likely this thread's next. */
static int64_t unit_before(const struct decode_wave *w, int64_t unit)
{
    return unit - 1 - (unit % w->per_task ? 0 : (w->n_threads - 1) * w->per_task);
}

static int64_t unit_after(const struct decode_wave *w, int64_t unit)
{
    return unit + 1 + ((unit + 1) % w->per_task ? 0 : (w->n_threads - 1) * w->per_task);
}

/* The segment of pages that a unit attends, or -1 if it does something else. */
static int page_segment_of(const struct decode_wave *w, int64_t unit)
{
    if (unit < 0 || unit >= w->n_units)
        return -1;
    const struct decode_unit u = w->units[unit];
    const struct decode_state *st = &w->states[u.item];
    return w->second ? u.unit : st->scored || u.unit < row_parts(st) ? -1 : u.unit - row_parts(st);
}

static void look_ahead(const struct decode_wave *w, int64_t unit, struct page_ahead *ret_ahead)
{
    const int64_t after = unit_after(w, unit);
    const int segment = page_segment_of(w, after);
    ret_ahead->n = 0;
    ret_ahead->cold = page_segment_of(w, unit_before(w, unit)) < 0;
    if (segment < 0)
        return;
    struct kv_page pages[PAGES_SEGMENT];
    ret_ahead->n = segment_pages(&w->states[w->units[after].item], segment, w->p->layout, pages);
    for (int i = 0; i < ret_ahead->n; i++)
        ret_ahead->pages[i] = pages[i].page;
}

static void run_pages(const struct decode_wave *w, struct decode_state *st, int segment, int64_t unit)
{
    struct kv_page pages[PAGES_SEGMENT];
    const struct kv_page *list[PAGES_SEGMENT];
    struct page_ahead ahead;
    const int group = w->p->group, d = w->p->head_dim, part = row_parts(st) + segment, n = segment_pages(st, segment, w->p->layout, pages);
    const struct unit_query u = query_of(w, st);
    for (int i = 0; i < n; i++)
        list[i] = &pages[i];
    look_ahead(w, unit, &ahead);
    unit_pages(&u, w->p->layout, list, n, &ahead, st->ml + 2 * part * group, st->o + (int64_t)part * group * d);
}

static void run_unit(const struct decode_wave *w, int64_t unit)
{
    const struct decode_unit u = w->units[unit];
    struct decode_state *st = &w->states[u.item];
    const int n_rows = row_parts(st);
    if (w->second)
        run_pages(w, st, u.unit, unit);
    else if (u.unit < n_rows)
        run_rows(w, st, u.unit);
    else if (st->scored)
        run_scores(w, st, u.unit - n_rows);
    else
        run_pages(w, st, u.unit - n_rows, unit);
}

/* n of an item's units are done. */
static void finish_units(const struct decode_wave *w, struct decode_state *st, int n)
{
    /* acq_rel: the last one sees what all others wrote. */
    if (atomic_fetch_sub_explicit(&st->left, n, memory_order_acq_rel) != n)
        return;
    if (st->scored && !w->second)
        choose_pages(w->p, st);
    else
        state_merge(st, w->p->group, w->p->head_dim);
}

static void decode_task(void *arg, int64_t task, int thread)
{
    const struct decode_wave *w = arg;
    const int64_t first = task * w->per_task, end = first + w->per_task < w->n_units ? first + w->per_task : w->n_units;
    (void)thread;
    for (int64_t i = first; i < end;) {
        const int32_t item = w->units[i].item;
        int n = 0;
        for (; i < end && w->units[i].item == item; i++, n++)
            run_unit(w, i);
        finish_units(w, &w->states[item], n);
    }
}

/* Takes the next 64-byte aligned piece. With a NULL base only the size is counted. */
static void *take(uint8_t *base, size_t *used, size_t bytes)
{
    void *piece = base ? base + *used : NULL;
    *used += (bytes + 63) & ~(size_t)63;
    return piece;
}

/* The newest pages, of whole blocks where blocks are chosen. */
static void take_newest(struct decode_state *st, bool blocks)
{
    int first = st->item->slow.n_pages;
    for (int left = st->n_choices; left > 0; left -= !blocks || starts_block(st, first))
        first--;
    st->first_page = first;
    st->n_chosen = st->item->slow.n_pages - first;
}

/* How many pages or blocks are chosen, and who chooses. Without the masks (NULL) each page may be a block of its own: the most scratch there can be. */
static void state_choice(struct decode_state *st, enum page_scorer scorer, bool blocks)
{
    const struct attn_decode_item *item = st->item;
    const int n_pages = item->slow.n_pages, per_choice = blocks ? BLOCK_SUBPAGES : 1, allowed = item->fetch_pages / per_choice;
    const int n = blocks && item->slow.masks ? count_blocks(&item->slow) : n_pages;
    const bool all = allowed >= n;
    st->n_choices = all ? n : allowed;
    st->n_chosen = all || n_pages < st->n_choices * per_choice ? n_pages : st->n_choices * per_choice;
    st->scored = !all && allowed > 0 && scorer != PAGE_SCORER_RECENT;
    st->newest = !all && scorer == PAGE_SCORER_RECENT;
    st->n_page_parts = ceil_div(st->n_chosen, PAGES_SEGMENT);
    st->n_score_segments = st->scored ? ceil_div(n_pages, SCORE_SEGMENT) : 0;
}

/* Counts and scratch of one item; returns the scratch's size. With a NULL base nothing is filled. */
static size_t state_init(struct decode_state *st, struct attn_decode_item *item, const struct attn_decode_params *p, uint8_t *base)
{
    size_t used = 0;
    *st = (struct decode_state){.item = item};
    for (int r = 0; r < 2; r++)
        st->n_row_parts[r] = ceil_div(item->rows[r].n, ROWS_SEGMENT);
    state_choice(st, p->scorer, p->fetch_blocks);
    size_t group = (size_t)p->group, parts = (size_t)(row_parts(st) + st->n_page_parts) * group, scores = (size_t)st->n_score_segments * group;
    st->ml = take(base, &used, parts * 2 * sizeof(float));
    st->o = take(base, &used, parts * (size_t)p->head_dim * sizeof(float));
    st->score_ml = take(base, &used, scores * 2 * sizeof(float));
    st->page_sum = take(base, &used, scores * SCORE_SEGMENT * sizeof(float));
    st->mass = take(base, &used, (size_t)st->n_score_segments * SCORE_SEGMENT * sizeof(float));
    st->subpages = take(base, &used, (size_t)item->slow.n_pages * sizeof(int32_t));
    st->chosen = take(base, &used, st->scored ? (size_t)st->n_chosen * sizeof(int32_t) : 0);
    st->blocks = take(base, &used, st->scored && p->fetch_blocks ? (size_t)st->n_choices * sizeof(int32_t) : 0);
    if (base && item->slow.n_pages > 0)
        list_subpages(&item->slow, st->subpages);
    if (base && st->newest) {
        take_newest(st, p->fetch_blocks);
        st->n_page_parts = ceil_div(st->n_chosen, PAGES_SEGMENT);
    }
    return used;
}

static int state_units(const struct decode_state *st, bool second)
{
    if (second)
        return st->scored ? st->n_page_parts : 0;
    return row_parts(st) + (st->scored ? st->n_score_segments : st->n_page_parts);
}

/* How many items from `first` on go together, and their scratch: states, units, then the items' own. */
static int wave_size(const struct attn_decode_params *p, int first, size_t *ret_bytes, size_t *ret_units)
{
    size_t bytes = 0, units = 0;
    int n = 0;
    for (; first + n < p->n_items; n++) {
        struct decode_state st;
        size_t own = state_init(&st, &p->items[first + n], p, NULL);
        size_t item_units = (size_t)state_units(&st, false), second = (size_t)state_units(&st, true);
        item_units = item_units > second ? item_units : second;
        size_t more = own + sizeof(struct decode_state) + item_units * sizeof(struct decode_unit);
        if (n > 0 && bytes + more > WAVE_BYTES)
            break;
        bytes += more;
        units += item_units;
    }
    *ret_bytes = bytes + 128; /* both arrays end aligned */
    *ret_units = units;
    return n;
}

/* As wave_size counts, for items that are all as large as they may be. */
size_t ISA(attn_decode_scratch)(const struct op_bounds *b)
{
    struct attn_decode_item item = {.rows = {{.n = b->n_rows[0]}, {.n = b->n_rows[1]}}, .slow = {.n_pages = b->n_pages}, .fetch_pages = b->fetch_pages};
    struct decode_state st;
    if (b->n_items == 0)
        return 0;
    const struct attn_decode_params p = {.group = b->n_heads / b->n_kv_heads, .head_dim = b->head_dim, .scorer = b->scorer, .fetch_blocks = b->fetch_blocks};
    const size_t own = state_init(&st, &item, &p, NULL);
    const int first = state_units(&st, false), second = state_units(&st, true);
    const size_t one = own + sizeof(struct decode_state) + (size_t)(first > second ? first : second) * sizeof(struct decode_unit);
    const size_t all = one * (size_t)b->n_items, wave = one > WAVE_BYTES ? one : WAVE_BYTES;
    return (all < wave ? all : wave) + 128;
}

static void wave_run(struct stream *s, struct decode_wave *w, int n_items, bool second)
{
    w->n_units = 0;
    w->second = second;
    for (int i = 0; i < n_items; i++) {
        struct decode_state *st = &w->states[i];
        int n = state_units(st, second);
        atomic_init(&st->left, n);
        for (int u = 0; u < n; u++)
            w->units[w->n_units++] = (struct decode_unit){.item = i, .unit = u};
        if (n == 0 && !second) /* nothing to attend */
            state_merge(st, w->p->group, w->p->head_dim);
    }
    const int64_t per_task = w->n_units / (w->n_threads * TASKS_A_THREAD);
    w->per_task = per_task > 1 ? per_task : 1;
    if (w->n_units > 0)
        cpu_run(s, (w->n_units + w->per_task - 1) / w->per_task, decode_task, w);
}

/* There is no page cache here: what has an id is missed. */
static void add_count(const struct block_layout *layout, const struct slow_pages *slow, int subpage, struct page_counts *counts)
{
    const bool missed = slow->blocks[subpage / BLOCK_SUBPAGES].id != 0;
    const uint32_t bytes = block_subpage_layout(layout, subpage < BLOCK_SUBPAGES, (uint32_t)(subpage % BLOCK_SUBPAGES))->bytes;
    counts->pages++;
    counts->tokens += (uint32_t)__builtin_popcount(slow->masks[subpage]);
    counts->misses += missed;
    counts->bytes += bytes;
    counts->bytes_missed += missed ? bytes : 0;
}

static void return_chosen(const struct attn_decode_params *p, const struct decode_state *st)
{
    struct attn_decode_item *item = st->item;
    item->ret_n_chosen = st->n_chosen;
    for (int i = 0; item->ret_chosen && i < st->n_chosen; i++)
        item->ret_chosen[i] = attended_subpage(st, i);
    for (int i = 0; item->ret_counts && i < st->n_chosen; i++)
        add_count(p->layout, &item->slow, attended_subpage(st, i), item->ret_counts);
}

static int run_wave(struct stream *s, const struct attn_decode_params *p, int first, int *ret_n)
{
    size_t bytes, n_units, used = 0;
    void *memory;
    int n = wave_size(p, first, &bytes, &n_units), r = cpu_op_alloc(s, bytes, &memory);
    if (r < 0)
        return r;
    struct decode_wave w = {.p = p, .n_threads = cpu_threads(s)};
    w.states = take(memory, &used, (size_t)n * sizeof *w.states);
    w.units = take(memory, &used, n_units * sizeof *w.units);
    for (int i = 0; i < n; i++)
        used += state_init(&w.states[i], &p->items[first + i], p, (uint8_t *)memory + used);
    wave_run(s, &w, n, false);
    wave_run(s, &w, n, true);
    for (int i = 0; i < n; i++)
        return_chosen(p, &w.states[i]);
    cpu_op_free(s, memory);
    *ret_n = n;
    return 0;
}

static int check(const struct attn_decode_params *p)
{
    if (p->n_items < 0 || p->group < 1 || (unsigned)p->scorer >= PAGE_SCORER_COUNT)
        return -EINVAL;
    const bool summaries = page_summary_vectors(p->scorer) > 0;
    for (int i = 0; i < p->n_items; i++) {
        const struct attn_decode_item *item = &p->items[i];
        if (item->rows[0].n < 0 || item->rows[1].n < 0 || item->slow.n_pages < 0 || item->slow.n_subpages < item->slow.n_pages || item->fetch_pages < 0)
            return -EINVAL;
        if (item->slow.n_pages > 0 && (!p->layout || (int)p->layout->head_dim != p->head_dim))
            return -EINVAL;
        if (p->fetch_blocks && item->fetch_pages != INT32_MAX && item->fetch_pages % BLOCK_SUBPAGES)
            return -EINVAL;
        if (summaries && !item->summaries && item->fetch_pages < item->slow.n_pages)
            return -EINVAL;
    }
    return p->head_dim < LANES || p->head_dim > KV_MAX_DIM || p->head_dim % LANES != 0 ? -ENOTSUP : 0;
}

int ISA(attn_decode)(struct stream *s, struct attn_decode_params *p)
{
    int r = check(p);
    for (int i = 0, n = 0; r == 0 && i < p->n_items; i += n)
        r = run_wave(s, p, i, &n);
    return r;
}
