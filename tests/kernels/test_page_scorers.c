/* Every scorer of slow pages against a plain reference in double: what a summary holds, what is chosen, by sub-page and by block, and that all builds do the same. */
#include "proto/base/base_assert.h"
#include "tests/kernels/kv_sequence.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct scorer_case {
    enum kv_format format;
    int group, d, n_blocks, n_recent, fetch;
    double kept_share;
    int n_pairs; /* of key biases */
};

static const struct scorer_case cases[] = {
    {KV_FORMAT_K8V4, 3, 64, 12, 40, 24, .1, 0}, {KV_FORMAT_K8V4, 6, 96, 6, 0, 16, .9, 0}, {KV_FORMAT_K8V8, 1, 128, 20, 130, 40, .02, 0}, {KV_FORMAT_BF16, 5, 32, 9, 7, 8, .85, 0},
    {KV_FORMAT_K8V4, 3, 64, 12, 40, 24, .1, 5},
};

static float scale_of(const struct scorer_case *c)
{
    return 1 / sqrtf((float)c->d);
}

static float *queries_make(const struct scorer_case *c, uint64_t seed)
{
    struct ref_rng rng = {seed};
    return random_floats(&rng, (size_t)c->group * (size_t)c->d, 3);
}

/* Hadamard/sqrt(b) by its definition, in blocks of the largest power of two that divides d. */
static void turn(const double *x, int d, double *y)
{
    int b = d & -d;
    for (int i = 0; i < d; i++) {
        y[i] = 0;
        for (int j = i / b * b; j < i / b * b + b; j++)
            y[i] += (__builtin_popcount((unsigned)(i % b & j % b)) % 2 ? -1 : 1) * x[j] / sqrt(b);
    }
}

/* Slow tokens' keys in the model's own basis, [n, d]. */
static int own_keys(const struct kv_sequence *s, int page, double *keys)
{
    const struct kv_page *p = &s->pages[page];
    int n = 0;
    for (int t = 0; t < SUBPAGE_TOKENS; t++) {
        double key[256];
        if (!(p->tokens >> t & 1))
            continue;
        ref_page_key(p->sink ? &s->layout.sink : &s->layout.page, p->page, s->d, t, key);
        for (int c = 0; c < s->d; c++)
            key[c] = ref_bf16_value(ref_bf16_bits(key[c]));
        turn(key, s->d, keys + n++ * s->d);
    }
    return n;
}

/* First and second vector of a summary. */
static void ref_summary(const struct kv_sequence *s, enum page_scorer scorer, int page, double *first, double *second)
{
    double keys[SUBPAGE_TOKENS * 256];
    int n = own_keys(s, page, keys);
    for (int c = 0; c < s->d; c++) {
        double min = INFINITY, max = -INFINITY, sum = 0, squares = 0;
        for (int t = 0; t < n; t++) {
            double x = keys[t * s->d + c];
            min = fmin(min, x), max = fmax(max, x);
            sum += x, squares += x * x;
        }
        first[c] = scorer == PAGE_SCORER_MINMAX ? min : sum / n;
        second[c] = scorer == PAGE_SCORER_MINMAX ? max : squares / n - sum / n * (sum / n);
    }
}

static double ref_page_lse(const struct kv_sequence *s, const float *q, float scale, int page)
{
    double lse = 0;
    for (int t = 0; t < SUBPAGE_TOKENS; t++) {
        double key[256], logit = kv_sequence_term(s, q, scale, (int64_t)s->pages[page].subpage * SUBPAGE_TOKENS + t);
        if (!(s->pages[page].tokens >> t & 1))
            continue;
        ref_page_key(s->pages[page].sink ? &s->layout.sink : &s->layout.page, s->pages[page].page, s->d, t, key);
        for (int c = 0; c < s->d; c++)
            logit += q[c] * scale * key[c];
        lse += exp(logit);
    }
    return log(lse);
}

/* What the slow tokens' own terms add: their log-sum-exp, log n where there are none, or the largest. */
static double ref_terms(const struct kv_sequence *s, bool largest, const float *q, float scale, int page)
{
    double max = -INFINITY, sum = 0;
    for (int t = 0; t < SUBPAGE_TOKENS; t++) {
        const double term = kv_sequence_term(s, q, scale, (int64_t)s->pages[page].subpage * SUBPAGE_TOKENS + t);
        if (!(s->pages[page].tokens >> t & 1))
            continue;
        max = fmax(max, term);
        sum += exp(term);
    }
    return largest ? max : log(sum);
}

static double ref_score(const struct kv_sequence *s, enum page_scorer scorer, const float *q, float scale, int page)
{
    double first[256], second[256], turned[256], scaled[256], e = 0, spread = 0;
    if (scorer == PAGE_SCORER_INDEX2)
        return kv_sequence_index_lse(s, q, scale, page);
    if (scorer == PAGE_SCORER_ORACLE)
        return ref_page_lse(s, q, scale, page);
    for (int c = 0; c < s->d; c++)
        scaled[c] = (double)q[c] * scale;
    turn(scaled, s->d, turned);
    ref_summary(s, scorer, page, first, second);
    for (int c = 0; c < s->d; c++) {
        e += scorer == PAGE_SCORER_MINMAX ? fmax(turned[c] * first[c], turned[c] * second[c]) : turned[c] * first[c];
        spread += turned[c] * turned[c] * second[c] / 2;
    }
    return e + ref_terms(s, scorer == PAGE_SCORER_MINMAX, q, scale, page) + (scorer == PAGE_SCORER_MEANVAR ? fmin(spread, 4) : 0);
}

/* Masses of the pages, or with blocks each page's block's; an empty group of rows counts as nothing. */
static void ref_masses(const struct kv_sequence *s, const struct scorer_case *c, enum page_scorer scorer, const float *q, bool blocks, double *mass)
{
    double out[256], sum[64] = {0};
    memset(mass, 0, sizeof *mass * (size_t)s->n_pages);
    for (int h = 0; h < c->group; h++) {
        const float *query = q + h * c->d;
        struct ref_attention_result fast = kv_sequence_attention(s, query, scale_of(c), (int32_t[]){0}, 0, out);
        double total = fast.l > 0 ? fast.l * exp(fast.m) : 0;
        for (int i = 0; i < s->n_pages; i++)
            total += exp(ref_score(s, scorer, query, scale_of(c), i));
        for (int i = 0; i < s->n_pages; i++)
            mass[i] += exp(ref_score(s, scorer, query, scale_of(c), i)) / total / c->group;
    }
    for (int i = 0; blocks && i < s->n_pages; i++)
        sum[s->pages[i].subpage / BLOCK_SUBPAGES] += mass[i];
    for (int i = 0; blocks && i < s->n_pages; i++)
        mass[i] = sum[s->pages[i].subpage / BLOCK_SUBPAGES];
}

struct scored {
    struct kv_sequence s;
    uint8_t *summaries;
    float *q, *out;
    int32_t *chosen;
    struct attn_decode_item item;
};

static void scored_make(struct scored *x, struct fixture *f, const struct scorer_case *c, enum page_scorer scorer, int fetch, uint64_t seed)
{
    kv_sequence_make(&x->s, f, c->format, c->d, c->n_blocks, c->n_recent, c->kept_share, seed);
    if (c->n_pairs)
        kv_sequence_bias(&x->s, c->n_pairs, 6, seed + 200);
    x->q = queries_make(c, seed + 100);
    x->out = aligned_zeros(sizeof(float) * (size_t)c->group * (size_t)c->d);
    x->chosen = aligned_zeros(sizeof(int32_t) * ((size_t)x->s.n_pages + 1));
    x->item = kv_sequence_item(&x->s, x->q, x->out, fetch, x->chosen);
    x->summaries = NULL;
    if (page_summary_bytes(scorer, c->d) > 0) {
        x->summaries = aligned_zeros((size_t)x->item.slow.n_subpages * page_summary_bytes(scorer, c->d));
        struct page_summary_params p = {.scorer = scorer, .layout = &x->s.layout, .slow = x->item.slow, .summaries = x->summaries};
        cr_assert_eq(f->ops->page_summaries(f->devices[f->n - 1].stream, &p), 0);
    }
    x->item.summaries = x->summaries;
}

static void scored_free(struct scored *x)
{
    free(x->q), free(x->out), free(x->chosen), free(x->summaries);
    kv_sequence_free(&x->s);
}

static int decode(struct fixture *f, int device, const struct scorer_case *c, const struct scored *x, enum page_scorer scorer, bool blocks, struct attn_decode_item *item)
{
    struct attn_decode_params p = {.items = item, .n_items = 1, .layout = &x->s.layout, .group = c->group, .head_dim = c->d, .scale = scale_of(c), .bias = kv_sequence_key_bias(&x->s), .scorer = scorer,
                                   .fetch_blocks = blocks};
    const int r = f->ops->attn_decode(f->devices[device].stream, &p);
    if (r == 0)
        kv_sequence_to_pages(&x->s, item->ret_chosen, item->ret_n_chosen);
    return r;
}

static int n_blocks_of(const struct kv_sequence *s, const int32_t *chosen, int n)
{
    int n_blocks = 0, last = -1;
    for (int i = 0; i < n; i++) {
        int block = s->pages[chosen ? chosen[i] : i].subpage / BLOCK_SUBPAGES;
        n_blocks += block != last;
        last = block;
    }
    return n_blocks;
}

static bool is_chosen(const struct attn_decode_item *item, int page)
{
    for (int i = 0; i < item->ret_n_chosen; i++)
        if (item->ret_chosen[i] == page)
            return true;
    return false;
}

/* Nothing that was left has clearly more mass than something that was taken; ties within the rounding of queries and summaries may fall either way. */
static void check_choice(const struct scorer_case *c, const struct scored *x, enum page_scorer scorer, bool blocks)
{
    const struct kv_sequence *s = &x->s;
    double *mass = aligned_zeros(sizeof(double) * (size_t)s->n_pages), least = INFINITY, most = -INFINITY;
    if (scorer == PAGE_SCORER_RECENT)
        for (int i = 0; i < s->n_pages; i++)
            mass[i] = blocks ? s->pages[i].subpage / BLOCK_SUBPAGES : i;
    else
        ref_masses(s, c, scorer, x->q, blocks, mass);
    for (int i = 0; i < s->n_pages; i++) {
        if (is_chosen(&x->item, i))
            least = fmin(least, mass[i]);
        else
            most = fmax(most, mass[i]);
    }
    double slack = scorer == PAGE_SCORER_RECENT ? 1 : scorer == PAGE_SCORER_INDEX2 ? 0.85 : 0.98;
    cr_assert_gt(least, most * slack, "scorer %d blocks %d: %g left, %g taken", scorer, blocks, most, least);
    free(mass);
}

static void check_attended(const struct scorer_case *c, const struct scored *x)
{
    double expected[256];
    for (int h = 0; h < c->group; h++) {
        kv_sequence_attention(&x->s, x->q + h * c->d, scale_of(c), x->chosen, x->item.ret_n_chosen, expected);
        cr_assert_lt(max_difference(x->out + h * c->d, expected, (size_t)c->d), 2e-3);
    }
}

static void check_case(struct fixture *f, const struct scorer_case *c, enum page_scorer scorer, bool blocks, uint64_t seed)
{
    struct scored x;
    scored_make(&x, f, c, scorer, c->fetch, seed);
    cr_assert_eq(decode(f, f->n - 1, c, &x, scorer, blocks, &x.item), 0);
    if (blocks)
        cr_assert_eq(n_blocks_of(&x.s, x.chosen, x.item.ret_n_chosen), c->fetch / BLOCK_SUBPAGES);
    else
        cr_assert_eq(x.item.ret_n_chosen, c->fetch);
    for (int i = 0; i < x.item.ret_n_chosen; i++)
        cr_assert(i == 0 || x.chosen[i] > x.chosen[i - 1]);
    for (int i = 0; blocks && i < x.s.n_pages; i++)
        for (int j = 0; j < x.s.n_pages; j++)
            if (x.s.pages[i].subpage / BLOCK_SUBPAGES == x.s.pages[j].subpage / BLOCK_SUBPAGES)
                cr_assert_eq(is_chosen(&x.item, i), is_chosen(&x.item, j), "pages %d and %d of one block", i, j);
    check_choice(c, &x, scorer, blocks);
    check_attended(c, &x);
    scored_free(&x);
}

Test(page_scorers, choose_the_heaviest_pages_and_blocks)
{
    struct fixture f;
    fixture_open(&f);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        for (int scorer = 0; scorer < PAGE_SCORER_COUNT; scorer++)
            for (int blocks = 0; blocks < 2; blocks++)
                check_case(&f, &cases[i], (enum page_scorer)scorer, blocks, 10 * i + (uint64_t)scorer + 1);
    fixture_close(&f);
}

Test(page_scorers, all_ways_give_the_same_bits)
{
    struct fixture f;
    fixture_open(&f);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        for (int scorer = 0; scorer < PAGE_SCORER_COUNT; scorer++)
            for (int blocks = 0; blocks < 2; blocks++) {
                const struct scorer_case *c = &cases[i];
                struct scored x;
                scored_make(&x, &f, c, (enum page_scorer)scorer, c->fetch, 70 + i);
                cr_assert_eq(decode(&f, 0, c, &x, (enum page_scorer)scorer, blocks, &x.item), 0);
                for (int dev = 1; dev < f.n; dev++) {
                    int32_t *chosen = aligned_zeros(sizeof *chosen * ((size_t)x.s.n_pages + 1));
                    float *out = aligned_zeros(sizeof *out * (size_t)c->group * (size_t)c->d);
                    struct attn_decode_item item = x.item;
                    item.out = out;
                    item.ret_chosen = chosen;
                    cr_assert_eq(decode(&f, dev, c, &x, (enum page_scorer)scorer, blocks, &item), 0);
                    cr_assert_eq(item.ret_n_chosen, x.item.ret_n_chosen);
                    cr_assert_eq(memcmp(chosen, x.chosen, sizeof *chosen * (size_t)item.ret_n_chosen), 0, "scorer %d isa %d", scorer, f.devices[dev].isa);
                    cr_assert_eq(memcmp(out, x.out, sizeof *out * (size_t)c->group * (size_t)c->d), 0);
                    free(chosen), free(out);
                }
                scored_free(&x);
            }
    fixture_close(&f);
}

static bool all_zeros(const uint16_t *x, int n)
{
    for (int i = 0; i < n; i++)
        if (x[i])
            return false;
    return true;
}

/* fp16 of the reference's values, but for the rounding of sums in fp32; the same bits everywhere. */
Test(page_scorers, summaries_hold_what_they_promise)
{
    static const enum page_scorer scorers[] = {PAGE_SCORER_MINMAX, PAGE_SCORER_MEAN, PAGE_SCORER_MEANVAR};
    struct fixture f;
    fixture_open(&f);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        for (size_t j = 0; j < ARRAY_LEN(scorers); j++) {
            const struct scorer_case *c = &cases[i];
            struct scored x;
            scored_make(&x, &f, c, scorers[j], c->fetch, 30 + i);
            size_t bytes = page_summary_bytes(scorers[j], c->d);
            for (int subpage = 0; subpage < x.item.slow.n_subpages; subpage++)
                cr_assert(x.s.masks[subpage] || all_zeros((const uint16_t *)(x.summaries + (size_t)subpage * bytes), (int)bytes / 2), "sub-page %d has no slow tokens", subpage);
            for (int page = 0; page < x.s.n_pages; page++) {
                const uint16_t *summary = (const uint16_t *)(x.summaries + (size_t)x.s.pages[page].subpage * bytes);
                double want[2][256];
                ref_summary(&x.s, scorers[j], page, want[0], want[1]);
                for (int v = 0; v < page_summary_vectors(scorers[j]); v++)
                    for (int ch = 0; ch < c->d; ch++)
                        cr_assert_float_eq(ref_fp16_value(summary[v * c->d + ch]), want[v][ch], 1e-5 + fabs(want[v][ch]) * 0x1p-10);
            }
            for (int dev = 0; dev < f.n; dev++) {
                const size_t all = (size_t)x.item.slow.n_subpages * bytes;
                uint8_t *again = aligned_zeros(all);
                struct page_summary_params p = {.scorer = scorers[j], .layout = &x.s.layout, .slow = x.item.slow, .first = 5, .summaries = again};
                cr_assert_eq(f.ops->page_summaries(f.devices[dev].stream, &p), 0);
                cr_assert(all_zeros((const uint16_t *)again, 5 * (int)bytes / 2));
                cr_assert_eq(memcmp(again + 5 * bytes, x.summaries + 5 * bytes, all - 5 * bytes), 0, "isa %d", f.devices[dev].isa);
                free(again);
            }
            scored_free(&x);
        }
    fixture_close(&f);
}

/* Keys at fp16's end and beyond are held at its largest number, and what comes of them is a number. */
Test(page_scorers, huge_keys_give_finite_summaries)
{
    enum { D = 64 };
    struct fixture f;
    fixture_open(&f);
    struct block_layout layout;
    cr_assert_eq(block_layout_init(&layout, KV_FORMAT_BF16, 1, 1, D), 0);
    uint8_t *slice = aligned_zeros(layout.slice_bytes[1]);
    uint16_t *page = (uint16_t *)(slice + block_subpage_offset(&layout, true, 0, 0));
    for (int i = 0; i < SUBPAGE_TOKENS * D; i++)
        page[i] = ref_bf16_bits(i % 2 ? 1e20 : -1e20);
    const struct kv_block block = {.data = (const uint8_t *)slice};
    const uint16_t masks[2] = {0xFFFF, 0};
    uint16_t summaries[2][2 * D];
    for (int scorer = 0; scorer < PAGE_SCORER_COUNT; scorer++) {
        struct page_summary_params p = {.scorer = (enum page_scorer)scorer, .layout = &layout, .slow = {.blocks = &block, .masks = masks, .n_subpages = 2, .n_pages = 1}, .summaries = (uint8_t *)summaries};
        if (page_summary_vectors(p.scorer) == 0) {
            cr_assert_eq(f.ops->page_summaries(f.devices[0].stream, &p), -EINVAL);
            continue;
        }
        memset(summaries, 0xFF, sizeof summaries);
        cr_assert_eq(f.ops->page_summaries(f.devices[0].stream, &p), 0);
        for (int i = 0; i < page_summary_vectors(p.scorer) * D; i++) {
            cr_assert(isfinite(ref_fp16_value(((uint16_t *)summaries)[i])));
            cr_assert_eq(((uint16_t *)summaries)[page_summary_vectors(p.scorer) * D + i], 0, "no slow tokens");
        }
    }
    free(slice);
    fixture_close(&f);
}

/* All pages, no page, and budgets that are none. */
Test(page_scorers, ends_of_the_budget)
{
    struct fixture f;
    fixture_open(&f);
    const struct scorer_case *c = &cases[0];
    struct scored x;
    scored_make(&x, &f, c, PAGE_SCORER_INDEX2, INT_MAX, 5);
    for (int blocks = 0; blocks < 2; blocks++)
        for (int scorer = 0; scorer < PAGE_SCORER_COUNT; scorer++) {
            x.item.fetch_pages = INT_MAX;
            cr_assert_eq(decode(&f, f.n - 1, c, &x, (enum page_scorer)scorer, blocks, &x.item), 0);
            cr_assert_eq(x.item.ret_n_chosen, x.s.n_pages);
            check_attended(c, &x);
            x.item.fetch_pages = 0;
            x.item.summaries = (const uint8_t *)x.q; /* not read */
            cr_assert_eq(decode(&f, f.n - 1, c, &x, (enum page_scorer)scorer, blocks, &x.item), 0);
            cr_assert_eq(x.item.ret_n_chosen, 0);
            x.item.summaries = NULL;
        }
    x.item.fetch_pages = 9;
    cr_assert_eq(decode(&f, 0, c, &x, PAGE_SCORER_INDEX2, true, &x.item), -EINVAL, "not whole blocks");
    cr_assert_eq(decode(&f, 0, c, &x, PAGE_SCORER_MEAN, false, &x.item), -EINVAL, "no summaries");
    cr_assert_eq(decode(&f, 0, c, &x, PAGE_SCORER_COUNT, false, &x.item), -EINVAL);
    scored_free(&x);
    fixture_close(&f);
}

/* The first sub-page of each block keeps its slow tokens. */
static void one_page_a_block(struct scored *x)
{
    const struct slow_pages *slow = &x->item.slow;
    x->s.n_pages = 0;
    for (int i = 0; i < slow->n_subpages; i++) {
        x->s.masks[i] = i % BLOCK_SUBPAGES ? 0 : 0xFFFF;
        if (x->s.masks[i])
            x->s.pages[x->s.n_pages++] = kv_page_at(&x->s.layout, slow, i);
    }
    x->item.slow = kv_sequence_slow(&x->s);
}

/* What a call holds is within what scratch_bytes promises, also when every page is a block of its own. */
Test(page_scorers, scratch_is_within_its_bound)
{
    struct fixture f;
    fixture_open(&f);
    const struct fixture_device *device = &f.devices[f.n - 1];
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        for (int scorer = 0; scorer < PAGE_SCORER_COUNT; scorer++)
            for (int blocks = 0; blocks < 2; blocks++) {
                const struct scorer_case *c = &cases[i];
                struct scored x;
                scored_make(&x, &f, c, (enum page_scorer)scorer, c->fetch, 40 + i);
                if (i % 2)
                    one_page_a_block(&x);
                const struct op_bounds bounds = {.n_heads = c->group, .n_kv_heads = 1, .head_dim = c->d, .n_items = 1, .n_rows = {x.s.n_kept, x.s.n_recent},
                                                 .n_pages = x.s.n_pages, .fetch_pages = c->fetch, .scorer = (enum page_scorer)scorer, .fetch_blocks = blocks};
                struct device_memory_stats before, after;
                cpu_device_ops()->reset_peaks(device->device);
                cpu_device_ops()->memory_stats(device->device, &before);
                cr_assert_eq(decode(&f, f.n - 1, c, &x, (enum page_scorer)scorer, blocks, &x.item), 0);
                cpu_device_ops()->memory_stats(device->device, &after);
                cr_assert_leq(after.peak[MEM_WORKSPACE] - before.now[MEM_WORKSPACE], f.ops->scratch_bytes(device->stream, &bounds));
                scored_free(&x);
            }
    fixture_close(&f);
}
