/* Draws a token from each row of logits. The order is vLLM's: logit bias, penalties (repetition, frequency, presence), bans; greedy, or temperature, min-p, top-k, top-p,
 * each on what the one before left; then the inverse of the distribution function at a Philox number keyed by (seed, position).
 *
 * Nothing is sorted. Every filter comes down to a threshold (z, id) on the candidates' order "weight descending, id ascending". For top-k and top-p a pass counts tokens
 * and weights above a few bounds, again between the two that enclose the cut while many lie there; those are gathered and searched (sample_cut.h). The draw finds the chunk of tokens by
 * its sum, then the token inside. A row of 131,072 logits takes five to ten passes of vector code, on one thread; rows run beside one another. */
#include "kernels/cpu/cpu_private.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/philox.h"
#include "kernels/cpu/sample_scan.h"
#include "kernels/sample_check.h"
#include <errno.h>
#include <pthread.h>

enum {
    CUT_GATHER = 4096, /* candidates that are gathered without further narrowing */
    CUT_ROUNDS = 6,    /* of narrowing: many equal logits cannot be told apart by it */
};

/* What the rows of a call share. */
struct sample_call {
    struct stream *stream;
    struct sample_row *rows;
    int n, n_vocab;
    float *adjusted;                    /* [min(n, threads), n_vocab padded], or NULL: no row needs one */
    struct cut_candidate *all;          /* [n_vocab] for cuts with more candidates than a thread's scratch holds, or NULL: no row has filters */
    pthread_mutex_t all_lock;
};

/* A row at work on a thread. */
struct sample_work {
    struct sample_call *call;
    void *scratch; /* [CPU_SCRATCH_BYTES] */
};

static void adjust(float *x, const struct sample_params *p)
{
    for (int i = 0; i < p->n_bias; i++)
        x[p->bias[i].token] += p->bias[i].bias;
    for (int i = 0; sample_has_penalties(p) && i < p->n_counts; i++) {
        const struct token_count *c = &p->counts[i];
        float *y = &x[c->token];
        if (c->n_prompt > 0 || c->n_output > 0)
            *y = *y > 0 ? *y / p->repetition_penalty : *y * p->repetition_penalty;
        *y -= p->frequency_penalty * (float)c->n_output;
        *y -= c->n_output > 0 ? p->presence_penalty : 0;
    }
    for (int i = 0; i < p->n_banned; i++)
        x[p->banned[i]] = -INFINITY;
}

/* Where a cut lies: candidates with low <= z < high, `above` of what is summed lies higher. */
struct cut_window {
    float low, high;
    double above, n_between;
};

static void window_bounds(const struct cut_window *w, float bounds[SCAN_BOUNDS])
{
    static const float tail[SCAN_BOUNDS - 1] = {1, 2.5f, 6, 15}; /* below an open end weights fall fast */
    for (int b = 0; b < SCAN_BOUNDS - 1; b++)
        bounds[b] = w->low == -INFINITY ? w->high - tail[b] : w->high - (w->high - w->low) * (float)(b + 1) / SCAN_BOUNDS;
    bounds[SCAN_BOUNDS - 1] = w->low;
}

/* Narrows the window to the one of its parts in which the sum (`reached` at each bound) gets to the target. */
static void window_narrow(struct cut_window *w, const float *bounds, const struct scan_histogram *h, const double *reached, double target)
{
    int b = 0;
    while (b < SCAN_BOUNDS - 1 && reached[b] < target)
        b++;
    double count_above = b > 0 ? h->count[b - 1] : h->count[SCAN_BOUNDS - 1] - w->n_between;
    w->n_between = h->count[b] - count_above;
    w->above = b > 0 ? reached[b - 1] : w->above;
    w->high = b > 0 ? bounds[b - 1] : w->high;
    w->low = bounds[b];
}

/* Gathers the window's candidates, n of them, and puts the row's threshold where their sum gets to `target`. */
static void gather_cut(struct scan_row *r, const struct cut_window *w, double target, bool counting, struct cut_candidate *candidates, int64_t n)
{
    n = scan_gather(r, w->low, w->high, counting, candidates, n);
    if (n == 0)
        return;
    uint64_t last = cut_last(candidates, n, target - w->above);
    r->z = scan_key_z(last);
    r->id = (int32_t)(last & 0xFFFFFFFFu);
}

/* Many candidates are rare (thousands of equal logits), so rows take turns then. */
static void window_cut(const struct sample_work *work, struct scan_row *r, const struct cut_window *w, double target, bool counting)
{
    const int64_t n = (int64_t)w->n_between;
    if (n < 1)
        return; /* rounding: the target is all there is */
    if ((size_t)n <= CPU_SCRATCH_BYTES / sizeof(struct cut_candidate)) {
        gather_cut(r, w, target, counting, work->scratch, n);
        return;
    }
    pthread_mutex_lock(&work->call->all_lock);
    gather_cut(r, w, target, counting, work->call->all, n);
    pthread_mutex_unlock(&work->call->all_lock);
}

/* Keeps the shortest prefix of the candidates that has `amount` of them (counting) or that share of their weight. */
static void cut(const struct sample_work *work, struct scan_row *r, double amount, bool counting)
{
    struct cut_window w = {.low = -INFINITY, .high = 0x1p-20f /* every z is <= 0 */};
    double target = amount;
    for (int i = 0; i < CUT_ROUNDS && (i == 0 || w.n_between > CUT_GATHER); i++) {
        float bounds[SCAN_BOUNDS];
        window_bounds(&w, bounds);
        struct scan_histogram h = scan_histogram(r, bounds);
        if (i == 0) {
            w.n_between = h.count[SCAN_BOUNDS - 1];
            target = counting ? amount : amount * h.weight[SCAN_BOUNDS - 1];
        }
        if (counting && i == 0 && w.n_between <= amount)
            return;
        window_narrow(&w, bounds, &h, counting ? h.count : h.weight, target);
    }
    window_cut(work, r, &w, target, counting);
}

static bool cuts_by_count(const struct sample_params *p, int n_vocab)
{
    return p->top_k > 0 && p->top_k < n_vocab;
}

/* min-p, top-k, top-p. */
static void filter(const struct sample_work *work, struct scan_row *r, const struct sample_params *p)
{
    if (p->min_p > 0)
        r->z = vmath_logf(p->min_p); /* ids are not limited yet */
    if (cuts_by_count(p, r->n))
        cut(work, r, p->top_k, true);
    if (p->top_p < 1)
        cut(work, r, p->top_p, false);
}

/* The token at `u` in [0, 1) of the distribution function, tokens in order of id. */
static int32_t draw(const struct scan_row *r, double u, float *chunk_sum)
{
    float w[SCAN_CHUNK];
    double target = u * scan_total(r, chunk_sum), sum = 0;
    int n_chunks = (r->n + SCAN_CHUNK - 1) / SCAN_CHUNK, chunk = -1, token = -1;
    for (int c = 0; c < n_chunks; c++) {
        if (chunk_sum[c] <= 0)
            continue;
        chunk = c; /* the last one with any weight, should rounding carry the target past the end */
        if (sum + chunk_sum[c] > target)
            break;
        sum += chunk_sum[c];
    }
    scan_chunk(r, chunk * SCAN_CHUNK, w);
    for (int i = 0; i < SCAN_CHUNK && chunk * SCAN_CHUNK + i < r->n; i++) {
        if (w[i] <= 0)
            continue;
        token = chunk * SCAN_CHUNK + i;
        sum += w[i];
        if (sum > target)
            break;
    }
    return token;
}

static int choose(const struct sample_work *work, const float *x, int n_vocab, const struct sample_params *p, int32_t *ret_token)
{
    float max = scan_max(x, n_vocab);
    if (max == -INFINITY)
        return -EINVAL; /* everything is banned */
    if (p->temperature == 0) {
        *ret_token = scan_first_equal(x, n_vocab, max);
        return 0;
    }
    float inverse = 1 / p->temperature;
    struct scan_row r = {.x = x, .n = n_vocab, .max = max, .inverse_temperature = inverse < FLT_MAX ? inverse : FLT_MAX, .z = -INFINITY, .id = SAMPLE_VOCAB_MAX};
    filter(work, &r, p);
    *ret_token = draw(&r, philox_uniform(p->seed, p->position), work->scratch);
    return 0;
}

/* Log-softmax of the raw logits for the drawn token and the largest ones. */
static int report(const float *logits, int n_vocab, const struct sample_params *p, int32_t token, struct sample_result *ret)
{
    int32_t ids[SAMPLE_TOP_MAX];
    float values[SAMPLE_TOP_MAX], max = scan_max(logits, n_vocab);
    struct scan_row raw = {.x = logits, .n = n_vocab, .max = max, .inverse_temperature = 1, .z = -INFINITY, .id = SAMPLE_VOCAB_MAX};
    if (max == -INFINITY)
        return -EINVAL;
    float log_total = max + vmath_logf((float)scan_total(&raw, NULL)), drawn[LANES];
    v16_store(drawn, scan_load(logits + token, 0, 1));
    ret->token = token;
    ret->logprob = drawn[0] - log_total;
    ret->n_top = scan_top(logits, n_vocab, p->n_top, ids, values);
    for (int i = 0; i < ret->n_top; i++)
        ret->top[i] = (struct top_logprob){.token = ids[i], .logprob = values[i] - log_total};
    return 0;
}

static size_t padded_floats(int n_vocab)
{
    return cpu_op_round((size_t)n_vocab * sizeof(float)) / sizeof(float);
}

/* Rows that are at work at a time, at most. */
static int rows_at_once(const struct stream *s, int n)
{
    return n < cpu_threads(s) ? n : cpu_threads(s);
}

/* Adjusted rows and, while one is cut, at most every token as a candidate. */
size_t ISA(sample_scratch)(const struct stream *s, const struct op_bounds *b)
{
    if (b->n_samples == 0)
        return 0;
    return (size_t)rows_at_once(s, b->n_samples) * padded_floats(b->n_vocab) * sizeof(float) + cpu_op_round((size_t)b->n_vocab * sizeof(struct cut_candidate));
}

static int sample_row(const struct sample_work *work, float *adjusted, struct sample_row *row)
{
    const int n_vocab = work->call->n_vocab;
    const struct sample_params *p = &row->params;
    const float *x = row->logits;
    int r = sample_check(p, n_vocab);
    int32_t token;
    if (r < 0)
        return r;
    if (sample_adjusts(p)) {
        memcpy(adjusted, x, sizeof *x * (size_t)n_vocab);
        adjust(adjusted, p);
        x = adjusted;
    }
    if (p->given)
        token = *p->given;
    else
        r = choose(work, x, n_vocab, p, &token);
    return r < 0 ? r : report(row->logits, n_vocab, p, token, &row->result);
}

static void sample_task(void *arg, int64_t i, int thread)
{
    struct sample_call *call = arg;
    const struct sample_work work = {call, cpu_scratch(call->stream, thread)};
    const size_t piece = call->n < cpu_threads(call->stream) ? (size_t)i : (size_t)thread;
    call->rows[i].status = sample_row(&work, call->adjusted ? call->adjusted + piece * padded_floats(call->n_vocab) : NULL, &call->rows[i]);
}

/* What the call's rows need of scratch. */
static int call_alloc(struct sample_call *call)
{
    bool adjusts = false, cuts = false;
    void *adjusted = NULL, *all = NULL;
    int r = 0;
    for (int i = 0; i < call->n; i++) {
        const struct sample_params *p = &call->rows[i].params;
        adjusts |= sample_adjusts(p);
        cuts |= !p->given && p->temperature > 0 && (p->top_p < 1 || cuts_by_count(p, call->n_vocab));
    }
    if (adjusts)
        r = cpu_op_alloc(call->stream, (size_t)rows_at_once(call->stream, call->n) * padded_floats(call->n_vocab) * sizeof(float), &adjusted);
    if (r == 0 && cuts && (size_t)call->n_vocab > CPU_SCRATCH_BYTES / sizeof(struct cut_candidate))
        r = cpu_op_alloc(call->stream, (size_t)call->n_vocab * sizeof(struct cut_candidate), &all);
    if (r < 0) {
        cpu_op_free(call->stream, adjusted);
        return r;
    }
    call->adjusted = adjusted;
    call->all = all;
    return 0;
}

int ISA(sample)(struct stream *s, struct sample_row *rows, int n, int n_vocab)
{
    struct sample_call call = {.stream = s, .rows = rows, .n = n, .n_vocab = n_vocab, .all_lock = PTHREAD_MUTEX_INITIALIZER};
    int r = sample_check_call(n, n_vocab);
    if (r == 0)
        r = call_alloc(&call);
    if (r < 0)
        return r;
    cpu_run(s, n, sample_task, &call);
    cpu_op_free(s, call.all);
    cpu_op_free(s, call.adjusted);
    return 0;
}
