/* Decode attention: fast rows, index scoring, selection, sub-pages, merge; kernels.h has the formula.
 *
 * A call is at most two runs of the pool. The first computes the partials of the rows and the scores of the index, in units with fixed borders (ROWS_SEGMENT,
 * INDEX_SEGMENT); whoever finishes the last unit of an item selects its pages. The second computes the partials of the chosen pages (PAGES_SEGMENT); whoever
 * finishes the last one merges them all in order. Items that attend every page need no scores and are done in the first run. So the work of one sequence
 * spreads over all threads, and who does what changes nothing.
 *
 * Scratch is held for the time of the call; many items go in waves, so that it stays below WAVE_BYTES unless one item alone needs more. */
#include "kernels/cpu/attn_units.h"
#include "kernels/cpu/cpu_private.h"
#include "kernels/cpu/lse_merge.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/radix_select.h"
#include <errno.h>
#include <stdatomic.h>

enum { WAVE_BYTES = 512 << 10 };

struct decode_state {
    struct attn_decode_item *item;
    bool scored;           /* more pages than may be fetched */
    int n_row_parts[2], n_index_segments, n_page_parts, n_chosen;
    atomic_int left;       /* units of this run that have not finished */
    float *ml, *o;         /* partials, rows first: [n_parts, group, 2], [n_parts, group, d] */
    float *index_ml;       /* [n_index_segments, group, 2] */
    float *page_sum;       /* [n_index_segments, group, INDEX_SEGMENT] */
    float *mass;           /* [n_index_segments * INDEX_SEGMENT] */
    int32_t *chosen;       /* [n_chosen] */
};

struct decode_unit {
    int32_t item, unit; /* rows first, then index segments or page segments */
};

struct decode_wave {
    const struct attn_decode_params *p;
    struct decode_state *states;
    struct decode_unit *units;
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
    int n_segments = st->n_index_segments, n_rows = row_parts(st);
    memset(st->mass, 0, sizeof *st->mass * (size_t)n_segments * INDEX_SEGMENT);
    for (int h = 0; h < group; h++) {
        float m = -INFINITY, l = 0;
        for (int i = 0; i < n_rows + n_segments; i++) {
            const float *ml = (i < n_rows ? st->ml + 2 * (i * group + h) : st->index_ml + 2 * ((i - n_rows) * group + h));
            m = ml[0] > m ? ml[0] : m;
        }
        for (int i = 0; i < n_rows + n_segments; i++) {
            float *ml = (i < n_rows ? st->ml + 2 * (i * group + h) : st->index_ml + 2 * ((i - n_rows) * group + h));
            float w = ml[0] > -INFINITY ? vmath_expf(ml[0] - m) : 0;
            l = fmaf(w, ml[1], l);
            if (i >= n_rows)
                ml[0] = w; /* the maximum has served */
        }
        float share = l > 0 ? 1.0f / (l * (float)group) : 0;
        for (int i = 0; i < n_segments; i++) {
            const float *sums = st->page_sum + (i * group + h) * INDEX_SEGMENT;
            v16 w = v16_set1(st->index_ml[2 * (i * group + h)] * share);
            for (int j = 0; j < INDEX_SEGMENT; j += LANES) {
                float *mass = st->mass + i * INDEX_SEGMENT + j;
                v16_store(mass, v16_fma(v16_load(sums + j), w, v16_load(mass)));
            }
        }
    }
}

static void state_merge(struct decode_state *st, int group, int d)
{
    float m, l;
    for (int h = 0; h < group; h++)
        lse_merge(st->ml + 2 * h, 2 * group, st->o + h * d, (int64_t)group * d, row_parts(st) + st->n_page_parts, d, st->item->out + h * d, &m, &l);
}

static void run_rows(const struct decode_wave *w, struct decode_state *st, int part)
{
    int group = w->p->group, d = w->p->head_dim, run = part >= st->n_row_parts[0];
    const struct kv_rows *rows = &st->item->rows[run];
    int first = (part - (run ? st->n_row_parts[0] : 0)) * ROWS_SEGMENT, n = rows->n - first < ROWS_SEGMENT ? rows->n - first : ROWS_SEGMENT;
    unit_rows(st->item->q, group, d, w->p->scale, rows->k + (int64_t)first * d, rows->v + (int64_t)first * d, n, st->ml + 2 * part * group,
              st->o + (int64_t)part * group * d);
}

static void run_index(const struct decode_wave *w, struct decode_state *st, int segment)
{
    int group = w->p->group, first = segment * INDEX_SEGMENT;
    int n = st->item->n_pages - first < INDEX_SEGMENT ? st->item->n_pages - first : INDEX_SEGMENT;
    unit_index(st->item->q, group, w->p->scale, w->p->layout, st->item->pages + first, n, st->index_ml + 2 * segment * group,
               st->page_sum + segment * group * INDEX_SEGMENT);
}

static void run_pages(const struct decode_wave *w, struct decode_state *st, int segment)
{
    const struct kv_page *pages[PAGES_SEGMENT];
    int group = w->p->group, d = w->p->head_dim, first = segment * PAGES_SEGMENT, part = row_parts(st) + segment;
    int n = st->n_chosen - first < PAGES_SEGMENT ? st->n_chosen - first : PAGES_SEGMENT;
    for (int i = 0; i < n; i++)
        pages[i] = st->item->pages + (st->scored ? st->chosen[first + i] : first + i);
    unit_pages(st->item->q, group, w->p->scale, w->p->layout, pages, n, st->ml + 2 * part * group, st->o + (int64_t)part * group * d);
}

static void decode_task(void *arg, int64_t task, int thread)
{
    const struct decode_wave *w = arg;
    struct decode_unit u = w->units[task];
    struct decode_state *st = &w->states[u.item];
    int n_rows = row_parts(st);
    (void)thread;
    if (w->second)
        run_pages(w, st, u.unit);
    else if (u.unit < n_rows)
        run_rows(w, st, u.unit);
    else if (st->scored)
        run_index(w, st, u.unit - n_rows);
    else
        run_pages(w, st, u.unit - n_rows);
    /* acq_rel: the last one sees what all others wrote. */
    if (atomic_fetch_sub_explicit(&st->left, 1, memory_order_acq_rel) != 1)
        return;
    if (st->scored && !w->second) {
        page_masses(st, w->p->group);
        radix_select(st->mass, st->item->n_pages, st->n_chosen, st->chosen);
    } else {
        state_merge(st, w->p->group, w->p->head_dim);
    }
}

/* Takes the next 64-byte aligned piece. With a NULL base only the size is counted. */
static void *take(uint8_t *base, size_t *used, size_t bytes)
{
    void *piece = base ? base + *used : NULL;
    *used += (bytes + 63) & ~(size_t)63;
    return piece;
}

/* Counts and scratch of one item; returns the scratch's size. */
static size_t state_init(struct decode_state *st, struct attn_decode_item *item, int group, int d, uint8_t *base)
{
    size_t used = 0;
    *st = (struct decode_state){.item = item};
    for (int r = 0; r < 2; r++)
        st->n_row_parts[r] = ceil_div(item->rows[r].n, ROWS_SEGMENT);
    st->n_chosen = item->n_pages < item->fetch_pages ? item->n_pages : item->fetch_pages;
    st->scored = st->n_chosen < item->n_pages && st->n_chosen > 0;
    st->n_page_parts = ceil_div(st->n_chosen, PAGES_SEGMENT);
    st->n_index_segments = st->scored ? ceil_div(item->n_pages, INDEX_SEGMENT) : 0;
    size_t parts = (size_t)(row_parts(st) + st->n_page_parts) * (size_t)group, scores = (size_t)st->n_index_segments * (size_t)group;
    st->ml = take(base, &used, parts * 2 * sizeof(float));
    st->o = take(base, &used, parts * (size_t)d * sizeof(float));
    st->index_ml = take(base, &used, scores * 2 * sizeof(float));
    st->page_sum = take(base, &used, scores * INDEX_SEGMENT * sizeof(float));
    st->mass = take(base, &used, (size_t)st->n_index_segments * INDEX_SEGMENT * sizeof(float));
    st->chosen = take(base, &used, st->scored ? (size_t)st->n_chosen * sizeof(int32_t) : 0);
    return used;
}

static int state_units(const struct decode_state *st, bool second)
{
    if (second)
        return st->scored ? st->n_page_parts : 0;
    return row_parts(st) + (st->scored ? st->n_index_segments : st->n_page_parts);
}

/* How many items from `first` on go together, and their scratch: states, units, then the items' own. */
static int wave_size(const struct attn_decode_params *p, int first, size_t *ret_bytes, size_t *ret_units)
{
    size_t bytes = 0, units = 0;
    int n = 0;
    for (; first + n < p->n_items; n++) {
        struct decode_state st;
        size_t own = state_init(&st, &p->items[first + n], p->group, p->head_dim, NULL);
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
    struct attn_decode_item item = {.rows = {{.n = b->n_rows[0]}, {.n = b->n_rows[1]}}, .n_pages = b->n_pages, .fetch_pages = b->fetch_pages};
    struct decode_state st;
    if (b->n_items == 0)
        return 0;
    const size_t own = state_init(&st, &item, b->n_heads / b->n_kv_heads, b->head_dim, NULL);
    const int first = state_units(&st, false), second = state_units(&st, true);
    const size_t one = own + sizeof(struct decode_state) + (size_t)(first > second ? first : second) * sizeof(struct decode_unit);
    const size_t all = one * (size_t)b->n_items, wave = one > WAVE_BYTES ? one : WAVE_BYTES;
    return (all < wave ? all : wave) + 128;
}

static void wave_run(struct stream *s, struct decode_wave *w, int n_items, bool second)
{
    int64_t n_units = 0;
    w->second = second;
    for (int i = 0; i < n_items; i++) {
        struct decode_state *st = &w->states[i];
        int n = state_units(st, second);
        atomic_init(&st->left, n);
        for (int u = 0; u < n; u++)
            w->units[n_units++] = (struct decode_unit){.item = i, .unit = u};
        if (n == 0 && !second) /* nothing to attend */
            state_merge(st, w->p->group, w->p->head_dim);
    }
    if (n_units > 0)
        cpu_run(s, n_units, decode_task, w);
}

static int run_wave(struct stream *s, const struct attn_decode_params *p, int first, int *ret_n)
{
    size_t bytes, n_units, used = 0;
    void *memory;
    int n = wave_size(p, first, &bytes, &n_units), r = cpu_op_alloc(s, bytes, &memory);
    if (r < 0)
        return r;
    struct decode_wave w = {.p = p};
    w.states = take(memory, &used, (size_t)n * sizeof *w.states);
    w.units = take(memory, &used, n_units * sizeof *w.units);
    for (int i = 0; i < n; i++)
        used += state_init(&w.states[i], &p->items[first + i], p->group, p->head_dim, (uint8_t *)memory + used);
    wave_run(s, &w, n, false);
    wave_run(s, &w, n, true);
    for (int i = 0; i < n; i++) {
        struct attn_decode_item *item = &p->items[first + i];
        item->ret_n_chosen = w.states[i].n_chosen;
        for (int j = 0; item->ret_chosen && j < item->ret_n_chosen; j++)
            item->ret_chosen[j] = w.states[i].scored ? w.states[i].chosen[j] : j;
    }
    cpu_op_free(s, memory);
    *ret_n = n;
    return 0;
}

static int check(const struct attn_decode_params *p)
{
    if (p->n_items < 0 || p->group < 1)
        return -EINVAL;
    for (int i = 0; i < p->n_items; i++) {
        const struct attn_decode_item *item = &p->items[i];
        if (item->rows[0].n < 0 || item->rows[1].n < 0 || item->n_pages < 0 || item->fetch_pages < 0)
            return -EINVAL;
        if (item->n_pages > 0 && (!p->layout || (int)p->layout->head_dim != p->head_dim))
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
