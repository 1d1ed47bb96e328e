/* Draws a token from each row of logits: kernels/cpu/sample.c's order (bias, penalties, bans; greedy, or temperature, min-p, top-k, top-p; then the inverse of the distribution function at
 * the same Philox number), by a block of 1,024 threads a row. All rows of a call are one launch, with one copy of arguments before and one of answers behind it, unless their lists are longer than
 * a piece of the stream's ring.
 *
 * Nothing is sorted. Weights are integers, exp(z) * 2^38 rounded, so that sums are exact in any order; top-k, top-p and the draw are one search: the least key at which the sum of weights,
 * in the order of keys, reaches a target, found digit by digit from histograms of 256 bins in shared memory. For the filters a key is (-z, id), for the draw it is the id. A token differs
 * from the CPU's only where a sum of the CPU's floats falls on the other side of a border: about one in 10^6.
 * Reads the row about 5 times when greedy, 20 times with all filters, from cache. Shared memory: 2.2 KiB. */
#include "kernels/cpu/philox.h"
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/radix_select.cuh"
#include "kernels/sample_check.h"
#include <float.h>
#include <string.h>

enum { SAMPLE_THREADS = 1024, ID_DIGITS = 3, Z_DIGITS = 4 };
typedef unsigned long long sum_t;
#define WEIGHT_ONE 0x1p38

struct sample_args { /* of a row; in device memory */
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
    int given;               /* the token, or -1: one is drawn */
};

struct sample_answer {
    int32_t status; /* 0 or -EINVAL: nothing can be drawn */
    struct sample_result result;
};

struct sample_shared {
    sum_t bins[RADIX_BINS];
    sum_t key, left;     /* of a search: the digits found; what is still to be reached */
    bool whole;          /* all that has these digits is taken */
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

/* Over a warp. Atomics of a block's threads on one word take turns, so each warp brings one. */
DEVICE sum_t warp_total(sum_t x)
{
    for (int h = 16; h > 0; h /= 2)
        x += __shfl_xor_sync(0xFFFFFFFFu, x, h);
    return x;
}

DEVICE sum_t warp_largest(sum_t x)
{
    for (int h = 16; h > 0; h /= 2) {
        const sum_t other = __shfl_xor_sync(0xFFFFFFFFu, x, h);
        x = other > x ? other : x;
    }
    return x;
}

/* The largest x over the block. */
DEVICE sum_t block_max(struct sample_shared *s, sum_t x)
{
    x = warp_largest(x);
    __syncthreads();
    if (threadIdx.x == 0)
        s->best = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        atomicMax(&s->best, x);
    __syncthreads();
    return s->best;
}

DEVICE sum_t block_total(struct sample_shared *s, sum_t x)
{
    x = warp_total(x);
    __syncthreads();
    if (threadIdx.x == 0)
        s->total = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0)
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
struct weight_row {
    const float *x;
    int n;
    float max, inverse_temperature;
    sum_t last;
};

DEVICE float row_exponent(const struct weight_row &r, int i)
{
    return (load_logit(r.x, i) - r.max) * r.inverse_temperature;
}

/* Candidate: passes, and has a weight that the CPU too would count. */
DEVICE bool row_candidate(const struct weight_row &r, int i, float z)
{
    return exp_nonpositive(z) > 0 && candidate_key(z, i) <= r.last;
}

/* Adds this lane's weight to its bin; by whole warps. Neighbours mostly share their upper digits, so what falls into the bin of the first lane is added once. */
DEVICE void bins_add(sum_t *bins, bool counts, unsigned bin, sum_t weight)
{
    const unsigned lanes = __ballot_sync(0xFFFFFFFFu, counts);
    if (lanes == 0)
        return;
    const int leader = __ffs((int)lanes) - 1;
    const unsigned leaders = __shfl_sync(0xFFFFFFFFu, bin, leader);
    const bool with_leader = counts && bin == leaders;
    const sum_t sum = warp_total(with_leader ? weight : 0);
    if ((int)threadIdx.x % 32 == leader)
        atomicAdd(&bins[bin], sum);
    else if (counts && !with_leader)
        atomicAdd(&bins[bin], weight);
}

/* The bin in which what is left is reached, by warp 0; the last one with any weight, and all of it, if it never is. */
DEVICE void choose_bin(struct sample_shared *s, int shift)
{
    enum { BINS = RADIX_BINS / 32 };
    const int lane = (int)threadIdx.x, first = lane * BINS;
    sum_t own = 0, left = s->left;
    for (int i = 0; i < BINS; i++)
        own += s->bins[first + i];
    sum_t before = own;
    for (int x = 1; x < 32; x *= 2) {
        const sum_t below = __shfl_up_sync(0xFFFFFFFFu, before, (unsigned)x);
        before += lane >= x ? below : 0;
    }
    const unsigned reached = __ballot_sync(0xFFFFFFFFu, before >= left), weighs = __ballot_sync(0xFFFFFFFFu, own > 0);
    __syncwarp(); /* all have read what is left */
    const int owner = reached ? __ffs((int)reached) - 1 : weighs ? 31 - __clz((int)weighs) : 0;
    if (lane != owner)
        return;
    int bin = first;
    left -= before - own;
    if (reached) {
        for (; s->bins[bin] < left; bin++)
            left -= s->bins[bin];
    } else {
        for (int i = 0; i < BINS; i++)
            bin = s->bins[first + i] > 0 ? first + i : bin;
        left = s->bins[bin] > 0 ? s->bins[bin] : 1;
    }
    s->key |= (sum_t)bin << shift;
    s->left = left;
    s->whole = s->bins[bin] == left;
}

/* `by_id`: the key of candidate i is i, else (z, i). `counting`: each weighs 1. The least key up to which, in the order of keys, the sum is at least `target` (and at least one candidate is
 * met); the last candidate's key if the target is never reached. Not by id: a key between that one and the next candidate's, as soon as all that shares the digits found is taken. */
DEVICE sum_t row_search(struct sample_shared *s, const struct weight_row &r, bool by_id, bool counting, sum_t target)
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
        for (int first = 0; first < r.n; first += SAMPLE_THREADS) {
            const int i = first + (int)threadIdx.x;
            const float z = i < r.n ? row_exponent(r, i) : -INFINITY;
            const sum_t key = by_id ? (sum_t)i : candidate_key(z, i);
            const bool counts = i < r.n && key >> (above - 1) >> 1 == prefix && row_candidate(r, i, z);
            bins_add(s->bins, counts, (unsigned)(key >> shift & 255), !counts ? 0 : counting ? (sum_t)1 : fixed_weight(z));
        }
        __syncthreads();
        if (threadIdx.x < 32)
            choose_bin(s, shift);
        __syncthreads();
        if (!by_id && s->whole)
            return s->key | (((sum_t)1 << shift) - 1);
    }
    return s->key;
}

DEVICE sum_t row_total(struct sample_shared *s, const struct weight_row &r, bool counting)
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

/* The token, or -1 where everything is banned. `max` is that of the raw logits. */
DEVICE int choose(struct sample_shared *s, const struct sample_args &a, float max)
{
    const float *x = a.row ? a.row : a.logits;
    struct weight_row r = {x, a.n_vocab, a.row ? row_max(s, x, a.n_vocab) : max, a.inverse_temperature, ~(sum_t)0};
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

/* A row a block. */
__global__ void __launch_bounds__(SAMPLE_THREADS) sample_kernel(const struct sample_args *rows, struct sample_answer *answers)
{
    __shared__ struct sample_shared s;
    const struct sample_args a = rows[blockIdx.x];
    struct sample_answer *answer = answers + blockIdx.x;
    if (a.row)
        adjust(a);
    const struct weight_row raw = {a.logits, a.n_vocab, row_max(&s, a.logits, a.n_vocab), 1, ~(sum_t)0};
    const int token = raw.max == -INFINITY ? -1 : a.given >= 0 ? a.given : choose(&s, a, raw.max);
    if (token < 0) { /* the same for every thread */
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

/* ---- host ---- */

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
    a.n_bias = p->given ? 0 : p->n_bias;
    a.n_counts = !p->given && sample_has_penalties(p) ? p->n_counts : 0;
    a.n_banned = p->given ? 0 : p->n_banned;
    a.n_top = p->n_top;
    a.given = p->given ? *p->given : -1;
    return a;
}

/* Bytes of a row's lists in the piece of arguments; with `host` they are written there, and a's pointers are into `device`, which is the same piece. */
static size_t row_lists(struct sample_args *a, const struct sample_params *p, uint8_t *host, uint8_t *device)
{
    const struct { const void *src; size_t bytes; } lists[] = {
        {p->bias, sizeof *p->bias * (size_t)a->n_bias}, {p->counts, sizeof *p->counts * (size_t)a->n_counts}, {p->banned, sizeof *p->banned * (size_t)a->n_banned}};
    size_t at[4] = {0};
    for (int i = 0; i < 3; i++) {
        at[i + 1] = at[i] + stream_args_rounded(lists[i].bytes);
        if (host && lists[i].bytes)
            memcpy(host + at[i], lists[i].src, lists[i].bytes);
    }
    if (host) {
        a->bias = (const struct logit_bias *)(device + at[0]);
        a->counts = (const struct token_count *)(device + at[1]);
        a->banned = (const int32_t *)(device + at[2]);
    }
    return at[3];
}

static size_t padded_floats(int n_vocab)
{
    return ((size_t)n_vocab + 63) / 64 * 64;
}

extern "C" size_t cuda_sample_scratch(const struct op_bounds *b)
{
    return sizeof(float) * padded_floats(b->n_vocab) * (size_t)b->n_samples;
}

/* The rows of one launch: as many of those at the front as the ring takes in one piece. */
struct sample_launch {
    int n_seen, n;           /* rows at the front; those of them that are drawn from */
    size_t n_adjusted;
    size_t args, lists, bytes; /* the piece: answers, at `args` the arguments, at `lists` their lists */
};

/* Sets the status of rows that are not drawn from. */
static struct sample_launch gather_rows(struct sample_row *rows, int n, int n_vocab)
{
    const size_t row_bytes = sizeof(struct sample_answer) + sizeof(struct sample_args), most = CUDA_ARGS_MAX_BYTES - 32;
    struct sample_launch l = {};
    size_t bytes = 0, lists = 0;
    for (; l.n_seen < n; l.n_seen++) {
        struct sample_row *row = &rows[l.n_seen];
        row->status = sample_check(&row->params, n_vocab);
        if (row->status < 0)
            continue;
        struct sample_args a = make_args(row->logits, n_vocab, &row->params);
        const size_t more = row_lists(&a, &row->params, nullptr, nullptr);
        if (row_bytes + more > most) {
            row->status = -ENOTSUP;
            continue;
        }
        if (bytes + row_bytes + more > most)
            break;
        bytes += row_bytes + more;
        lists += more;
        l.n_adjusted += sample_adjusts(&row->params);
        l.n++;
    }
    l.args = stream_args_rounded(sizeof(struct sample_answer) * (size_t)l.n);
    l.lists = stream_args_rounded(l.args + sizeof(struct sample_args) * (size_t)l.n);
    l.bytes = l.lists + lists;
    return l;
}

/* The arguments of the launch's rows, into the piece at `host`, which is the one at `device`. */
static void write_args(const struct sample_launch &l, const struct sample_row *rows, int n_vocab, uint8_t *host, uint8_t *device, float *adjusted)
{
    struct sample_args *args = (struct sample_args *)(host + l.args);
    size_t list = l.lists, n_adjusted = 0;
    for (int i = 0, k = 0; i < l.n_seen; i++) {
        if (rows[i].status < 0)
            continue;
        struct sample_args a = make_args(rows[i].logits, n_vocab, &rows[i].params);
        list += row_lists(&a, &rows[i].params, host + list, device + list);
        if (sample_adjusts(&rows[i].params))
            a.row = adjusted + padded_floats(n_vocab) * n_adjusted++;
        args[k++] = a;
    }
}

static int launch_rows(struct stream *s, const struct sample_launch &l, struct sample_row *rows, int n_vocab)
{
    void *host, *device, *adjusted = nullptr;
    int r = stream_args_room(s, l.bytes, &host, &device);
    if (r == 0 && l.n_adjusted > 0)
        r = stream_temp(s, sizeof(float) * padded_floats(n_vocab) * l.n_adjusted, &adjusted);
    if (r < 0)
        return r;
    write_args(l, rows, n_vocab, (uint8_t *)host, (uint8_t *)device, (float *)adjusted);
    r = stream_args_send(s, (uint8_t *)device + l.args, (uint8_t *)host + l.args, l.bytes - l.args);
    if (r == 0)
        r = LAUNCH(sample_kernel, (unsigned)l.n, SAMPLE_THREADS, 0, s, (const struct sample_args *)((uint8_t *)device + l.args), (struct sample_answer *)device);
    if (r == 0)
        r = submit_copy(s, host, device, sizeof(struct sample_answer) * (size_t)l.n);
    if (r == 0)
        r = stream_wait_idle(s);
    r = stream_temp_end(s, r);
    const struct sample_answer *answer = (const struct sample_answer *)host;
    for (int i = 0; r == 0 && i < l.n_seen; i++) {
        if (rows[i].status < 0)
            continue;
        rows[i].status = answer->status;
        if (answer->status == 0)
            rows[i].result = answer->result;
        answer++;
    }
    return r;
}

/* What the rows' parameters name is host memory; logits are device memory. Waits, because the caller gets the tokens. */
extern "C" int cuda_sample(struct stream *s, struct sample_row *rows, int n, int n_vocab)
{
    int r = sample_check_call(n, n_vocab);
    while (r == 0 && n > 0) {
        const struct sample_launch l = gather_rows(rows, n, n_vocab);
        if (l.n > 0)
            r = launch_rows(s, l, rows, n_vocab);
        rows += l.n_seen;
        n -= l.n_seen;
    }
    return r;
}
