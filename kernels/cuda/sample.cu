/* Draws a token from one row of logits: kernels/cpu/sample.c's order (bias, penalties, bans; greedy, or temperature, min-p, top-k, top-p; then the inverse of the distribution function at
 * the same Philox number), by one block of 1,024 threads.
 *
 * Nothing is sorted. Weights are integers, exp(z) * 2^38 rounded, so that sums are exact in any order; top-k, top-p and the draw are one search: the least key at which the sum of weights,
 * in the order of keys, reaches a target, found digit by digit from histograms of 256 bins in shared memory. For the filters a key is (-z, id), for the draw it is the id. A token differs
 * from the CPU's only where a sum of the CPU's floats falls on the other side of a border: about one in 10^6.
 * Reads the row about 6 times when greedy, 25 times with all filters, from cache. Shared memory: 2.2 KiB. */
#include "kernels/cpu/philox.h"
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/radix_select.cuh"
#include "kernels/sample_check.h"
#include <float.h>

enum { SAMPLE_THREADS = 1024, ID_DIGITS = 3, Z_DIGITS = 4 };
typedef unsigned long long sum_t;
#define WEIGHT_ONE 0x1p38

struct sample_args { /* without padding, which the emulator would take for addresses */
    const float *logits;
    float *row;              /* the adjusted copy, or NULL: logits as they are */
    const struct logit_bias *bias;
    const struct token_count *counts;
    const int32_t *banned;
    double u;                /* [0, 1) */
    float inverse_temperature, log_min_p; /* inverse 0: greedy; log_min_p -inf: off */
    float top_p;             /* 1: off */
    float presence, frequency, repetition;
    int top_k;               /* 0: off */
    int n_vocab, n_bias, n_counts, n_banned, n_top;
};
static_assert(sizeof(struct sample_args) == 5 * 8 + 8 + 12 * 4, "no padding");

struct sample_answer {
    int32_t status; /* 0 or -EINVAL: nothing can be drawn */
    struct sample_result result;
};

struct sample_shared {
    sum_t bins[RADIX_BINS];
    sum_t key, left;     /* of a search: the digits found; what is still to be reached */
    sum_t total, best;
};

/* A key that sorts by weight descending, then id ascending: z <= 0, so its magnitude grows as its weight falls. */
DEVICE sum_t candidate_key(float z, int id)
{
    return (sum_t)(__float_as_uint(z) & 0x7FFFFFFFu) << 32 | (unsigned)id;
}

/* NaN counts as -inf, +inf as the largest float. */
DEVICE float load_logit(const float *x, int i)
{
    const float v = x[i];
    return v == v ? fminf(v, FLT_MAX) : -INFINITY;
}

DEVICE sum_t fixed_weight(float z)
{
    return (sum_t)((double)exp_nonpositive(z) * WEIGHT_ONE + 0.5);
}

/* The largest x over the block. */
DEVICE sum_t block_max(struct sample_shared *s, sum_t x)
{
    __syncthreads();
    if (threadIdx.x == 0)
        s->best = 0;
    __syncthreads();
    atomicMax(&s->best, x);
    __syncthreads();
    return s->best;
}

DEVICE sum_t block_total(struct sample_shared *s, sum_t x)
{
    __syncthreads();
    if (threadIdx.x == 0)
        s->total = 0;
    __syncthreads();
    atomicAdd(&s->total, x);
    __syncthreads();
    return s->total;
}

DEVICE float row_max(struct sample_shared *s, const float *x, int n)
{
    uint32_t best = radix_key(-INFINITY);
    for (int i = (int)threadIdx.x; i < n; i += SAMPLE_THREADS) {
        const uint32_t key = radix_key(load_logit(x, i));
        best = key > best ? key : best;
    }
    const uint32_t key = (uint32_t)block_max(s, best);
    return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

/* A row of weights behind a threshold: candidate i has key (z, i) and passes if it is at most `last`. */
struct sample_row {
    const float *x;
    int n;
    float max, inverse_temperature;
    sum_t last;
};

DEVICE float row_exponent(const struct sample_row &r, int i)
{
    return (load_logit(r.x, i) - r.max) * r.inverse_temperature;
}

/* Candidate: passes, and has a weight that the CPU too would count. */
DEVICE bool row_candidate(const struct sample_row &r, int i, float z)
{
    return exp_nonpositive(z) > 0 && candidate_key(z, i) <= r.last;
}

/* `by_id`: the key of candidate i is i, else (z, i). `counting`: each weighs 1. The least key up to which, in the order of keys, the sum is at least `target` (and at least one candidate is
 * met); the last candidate's key if the target is never reached. */
DEVICE sum_t row_search(struct sample_shared *s, const struct sample_row &r, bool by_id, bool counting, sum_t target)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        s->key = 0;
        s->left = target > 0 ? target : 1;
    }
    for (int digit = by_id ? ID_DIGITS - 1 : ID_DIGITS + Z_DIGITS - 1; digit >= 0; digit--) {
        const int shift = digit < ID_DIGITS ? 8 * digit : 32 + 8 * (digit - ID_DIGITS);
        const int above = digit == ID_DIGITS - 1 ? 32 : shift + 8; /* the byte above an id's digits is always 0 */
        for (int b = (int)threadIdx.x; b < RADIX_BINS; b += SAMPLE_THREADS)
            s->bins[b] = 0;
        __syncthreads();
        const sum_t prefix = s->key >> (above - 1) >> 1;
        for (int i = (int)threadIdx.x; i < r.n; i += SAMPLE_THREADS) {
            const float z = row_exponent(r, i);
            const sum_t key = by_id ? (sum_t)i : candidate_key(z, i);
            if (key >> (above - 1) >> 1 == prefix && row_candidate(r, i, z))
                atomicAdd(&s->bins[key >> shift & 255], counting ? (sum_t)1 : fixed_weight(z));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int bin = 0, last = 0;
            sum_t left = s->left;
            for (; bin < RADIX_BINS; bin++) {
                if (s->bins[bin] == 0)
                    continue;
                last = bin;
                if (s->bins[bin] >= left)
                    break;
                left -= s->bins[bin];
            }
            if (bin == RADIX_BINS) { /* not reached: the last one with any weight, of which all is taken */
                bin = last;
                left = s->bins[last] > 0 ? s->bins[last] : 1;
            }
            s->key |= (sum_t)bin << shift;
            s->left = left;
        }
        __syncthreads();
    }
    return s->key;
}

DEVICE sum_t row_total(struct sample_shared *s, const struct sample_row &r, bool counting)
{
    sum_t sum = 0;
    for (int i = (int)threadIdx.x; i < r.n; i += SAMPLE_THREADS) {
        const float z = row_exponent(r, i);
        if (row_candidate(r, i, z))
            sum += counting ? (sum_t)1 : fixed_weight(z);
    }
    return block_total(s, sum);
}

/* Bias in the order of its list, then penalties and bans. */
DEVICE void adjust(const struct sample_args &a)
{
    for (int i = (int)threadIdx.x; i < a.n_vocab; i += SAMPLE_THREADS)
        a.row[i] = a.logits[i];
    __syncthreads();
    for (int i = 0; threadIdx.x == 0 && i < a.n_bias; i++)
        a.row[a.bias[i].token] += a.bias[i].bias;
    __syncthreads();
    for (int i = (int)threadIdx.x; i < a.n_counts; i += SAMPLE_THREADS) {
        const struct token_count c = a.counts[i];
        float y = a.row[c.token];
        if (c.n_prompt > 0 || c.n_output > 0)
            y = y > 0 ? y / a.repetition : y * a.repetition;
        y -= a.frequency * (float)c.n_output;
        y -= c.n_output > 0 ? a.presence : 0;
        a.row[c.token] = y;
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < a.n_banned; i += SAMPLE_THREADS)
        a.row[a.banned[i]] = -INFINITY;
    __syncthreads();
}

/* The token, or -1 where everything is banned. */
DEVICE int choose(struct sample_shared *s, const struct sample_args &a, const float *x)
{
    struct sample_row r = {x, a.n_vocab, row_max(s, x, a.n_vocab), a.inverse_temperature, ~(sum_t)0};
    if (r.max == -INFINITY)
        return -1;
    if (a.inverse_temperature == 0) {
        int first = a.n_vocab;
        for (int i = (int)threadIdx.x; i < a.n_vocab; i += SAMPLE_THREADS)
            if (load_logit(x, i) == r.max && i < first)
                first = i;
        return a.n_vocab - (int)block_max(s, (sum_t)(a.n_vocab - first));
    }
    if (a.log_min_p > -INFINITY)
        r.last = candidate_key(a.log_min_p, SAMPLE_VOCAB_MAX);
    if (a.top_k > 0 && row_total(s, r, true) > (sum_t)a.top_k)
        r.last = row_search(s, r, false, true, (sum_t)a.top_k);
    if (a.top_p < 1)
        r.last = row_search(s, r, false, false, (sum_t)ceil((double)a.top_p * (double)row_total(s, r, false)));
    return (int)row_search(s, r, true, false, (sum_t)(a.u * (double)row_total(s, r, false)) + 1);
}

/* The largest logits one after the other: value descending, then id ascending. */
DEVICE int top_logits(struct sample_shared *s, const struct sample_args &a, float log_total, struct top_logprob *top)
{
    sum_t below = ~(sum_t)0;
    for (int found = 0; found < a.n_top; found++) {
        sum_t best = 0;
        for (int i = (int)threadIdx.x; i < a.n_vocab; i += SAMPLE_THREADS) {
            const float v = load_logit(a.logits, i);
            const sum_t key = (sum_t)radix_key(v) << 32 | (unsigned)(SAMPLE_VOCAB_MAX - i);
            if (v > -INFINITY && key < below && key > best)
                best = key;
        }
        below = block_max(s, best);
        if (below == 0)
            return found;
        if (threadIdx.x == 0) {
            const int id = SAMPLE_VOCAB_MAX - (int)(below & 0xFFFFFFFFu);
            top[found].token = id;
            top[found].logprob = load_logit(a.logits, id) - log_total;
        }
    }
    return a.n_top;
}

__global__ void __launch_bounds__(SAMPLE_THREADS) sample_kernel(const struct sample_args a, struct sample_answer *answer)
{
    __shared__ struct sample_shared s;
    if (a.row)
        adjust(a);
    const int token = choose(&s, a, a.row ? a.row : a.logits);
    const struct sample_row raw = {a.logits, a.n_vocab, row_max(&s, a.logits, a.n_vocab), 1, ~(sum_t)0};
    if (token < 0 || raw.max == -INFINITY) { /* the same for every thread */
        if (threadIdx.x == 0)
            answer->status = -EINVAL;
        return;
    }
    const float log_total = raw.max + log_float((float)((double)row_total(&s, raw, false) / WEIGHT_ONE));
    const int n_top = top_logits(&s, a, log_total, answer->result.top);
    if (threadIdx.x == 0) {
        answer->status = 0;
        answer->result.token = token;
        answer->result.logprob = load_logit(a.logits, token) - log_total;
        answer->result.n_top = n_top;
    }
}

static struct sample_args make_args(const float *logits, int n_vocab, const struct sample_params *p)
{
    const float inverse = p->temperature == 0 ? 0 : 1 / p->temperature;
    struct sample_args a = {};
    a.logits = logits;
    a.n_vocab = n_vocab;
    a.inverse_temperature = inverse < FLT_MAX ? inverse : FLT_MAX;
    a.log_min_p = p->min_p > 0 ? logf(p->min_p) : -INFINITY;
    a.top_k = p->top_k > 0 && p->top_k < n_vocab ? p->top_k : 0;
    a.top_p = p->top_p;
    a.u = philox_uniform(p->seed, p->position);
    a.presence = p->presence_penalty;
    a.frequency = p->frequency_penalty;
    a.repetition = p->repetition_penalty;
    a.n_bias = p->n_bias;
    a.n_counts = sample_has_penalties(p) ? p->n_counts : 0;
    a.n_banned = p->n_banned;
    a.n_top = p->n_top;
    return a;
}

/* p and what it names are host memory; logits are device memory. Waits, because the caller gets the token. */
extern "C" int cuda_sample(struct stream *s, const float *logits, int n_vocab, const struct sample_params *p, struct sample_result *ret)
{
    void *row = nullptr, *host, *answer;
    const void *bias = nullptr, *counts = nullptr, *banned = nullptr;
    int r = sample_check(p, n_vocab);
    if (r < 0)
        return r;
    struct sample_args a = make_args(logits, n_vocab, p);
    if (a.n_bias > 0)
        r = stream_args(s, p->bias, sizeof *p->bias * (size_t)a.n_bias, &bias);
    if (r == 0 && a.n_counts > 0)
        r = stream_args(s, p->counts, sizeof *p->counts * (size_t)a.n_counts, &counts);
    if (r == 0 && a.n_banned > 0)
        r = stream_args(s, p->banned, sizeof *p->banned * (size_t)a.n_banned, &banned);
    if (r == 0)
        r = stream_args_room(s, sizeof(struct sample_answer), &host, &answer);
    if (r == 0 && (a.n_bias > 0 || a.n_counts > 0 || a.n_banned > 0))
        r = stream_temp(s, sizeof(float) * (size_t)n_vocab, &row);
    if (r < 0)
        return r;
    a.row = (float *)row;
    a.bias = (const struct logit_bias *)bias;
    a.counts = (const struct token_count *)counts;
    a.banned = (const int32_t *)banned;
    r = LAUNCH(sample_kernel, 1, SAMPLE_THREADS, 0, s, a, (struct sample_answer *)answer);
    if (r == 0)
        r = submit_copy(s, host, answer, sizeof(struct sample_answer));
    if (r == 0)
        r = stream_wait_idle(s);
    r = stream_temp_end(s, r);
    if (r == 0)
        r = ((const struct sample_answer *)host)->status;
    if (r == 0)
        *ret = ((const struct sample_answer *)host)->result;
    return r;
}
