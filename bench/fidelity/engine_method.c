#include "bench/fidelity/engine_method.h"
#include "bench/fidelity/sink.h"
#include "proto/base/base_assert.h"
#include "worker/cache/scorer.h"
#include "worker/cache/selector.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH_MAX = 32, PREFILL_CHUNK = 512, STORE_DEADLINE_US = 10 * 1000 * 1000 };

/* Some cases of a run that decode together. */
struct batch {
    const struct fidelity_run *run;
    struct fidelity_sink *sink;
    struct engine *engine;
    int first, n;                         /* cases of the run */
    struct sequence *sequences[BATCH_MAX];
};

static int layout_of(const struct engine_method *m, const struct fidelity_run *run, struct block_layout *ret_layout)
{
    const struct model_config *c = &run->model->config;
    return block_layout_init(ret_layout, m->format, (uint32_t)c->n_layers, (uint32_t)c->n_kv_heads, (uint32_t)c->head_dim);
}

/* Bytes of the page cache that one case has to itself, over layers and KV heads. */
static double page_cache_bytes(const struct engine_method *m, const struct fidelity_run *run)
{
    struct block_layout layout;
    if (m->page_cache == 0 || layout_of(m, run, &layout) < 0)
        return 0;
    return (double)m->page_cache / SUBPAGE_TOKENS * layout.page.bytes * run->model->config.n_layers * run->model->config.n_kv_heads;
}

static int open_engine(const struct engine_method *m, const struct fidelity_run *run, struct engine **ret_engine)
{
    int context = 0;
    for (int i = 0; i < run->n_cases; i++) {
        const int n = run->cases[i].n_prompt + run->cases[i].n_fed;
        context = n > context ? n : context;
    }
    const struct engine_config config = {
        .format = m->format,
        .selector = selector_find(m->selector),
        .budget = run->budget < context ? run->budget : context,
        .recent = m->recent,
        .answer_stays = !m->answer_leaves,
        .fetch = run->fetch,
        .fetch_unit = m->fetch_unit,
        .scorer = m->scorer ? scorer_find(m->scorer) : NULL,
        .chunk = PREFILL_CHUNK,
        .values = m->values,
        .order = m->order,
        .max_context = context,
        .max_batch = BATCH_MAX,
        .page_cache = (size_t)(page_cache_bytes(m, run) * (run->n_cases < BATCH_MAX ? run->n_cases : BATCH_MAX)),
        .store_deadline_us = STORE_DEADLINE_US,
    };
    if (!config.selector)
        return error_set(run->err, -ENOTSUP, "no selector %s", m->selector);
    if (m->scorer && !config.scorer)
        return error_set(run->err, -ENOTSUP, "no scorer %s", m->scorer);
    return engine_create(&config, run->model, run->store, ret_engine, run->err);
}

static void poll_store(const struct fidelity_run *run)
{
    if (run->loop)
        loop_poll(run->loop);
}

static int prefill(struct batch *b)
{
    int r = 0;
    for (int i = 0; r >= 0 && i < b->n; i++) {
        const struct fidelity_case *c = &b->run->cases[b->first + i];
        const struct sequence_request request = {.prompt = c->tokens, .n_prompt = c->n_prompt, .max_new = c->n_fed};
        struct sequence_stats stats;
        r = sequence_create(b->engine, &request, &b->sequences[i], b->run->err);
        if (r < 0)
            return r;
        while ((r = sequence_prefill_step(b->sequences[i])) > 0)
            poll_store(b->run);
        if (r < 0)
            return error_set(b->run->err, r, "prefill of %d tokens: %s", c->n_prompt, strerror(-r));
        sequence_stats(b->sequences[i], &stats);
    }
    return r;
}

/* Feeds token `step` to every case that has one; ret_cases: which. */
static int step(struct batch *b, int at, int ret_cases[BATCH_MAX])
{
    struct sequence *sequences[BATCH_MAX];
    int32_t tokens[BATCH_MAX];
    int n = 0;
    for (int i = 0; i < b->n; i++) {
        const struct fidelity_case *c = &b->run->cases[b->first + i];
        if (at >= c->n_fed)
            continue;
        sequences[n] = b->sequences[i];
        tokens[n] = c->tokens[c->n_prompt + at];
        ret_cases[n++] = i;
    }
    if (n == 0)
        return 0;
    int r = engine_decode(b->engine, sequences, tokens, n);
    poll_store(b->run);
    return r < 0 ? error_set(b->run->err, r, "decode: %s", strerror(-r)) : n;
}

static int decode(struct batch *b)
{
    int which[BATCH_MAX], r;
    for (int at = 0; (r = step(b, at, which)) > 0; at++) {
        for (int k = 0, n = r; r >= 0 && k < n; k++)
            r = sequence_logits(b->sequences[which[k]]) ? fidelity_sink_logits(b->sink, b->first + which[k], at, sequence_logits(b->sequences[which[k]])) : -ERANGE;
        if (r < 0)
            return error_set(b->run->err, r, "logits behind token %d: %s", at, strerror(-r));
    }
    return r;
}

/* What a device would hold of a case: kept and recent rows in bf16, of the slow tokens what the scorer looks at, where it has to choose, and fetched pages. On the CPU all of it is read in
 * place. */
static double fast_bytes(const struct engine_method *m, const struct fidelity_run *run, const struct fidelity_case *c)
{
    const struct model_config *config = &run->model->config;
    const enum page_scorer scorer = m->scorer ? scorer_find(m->scorer)->kernel : PAGE_SCORER_INDEX2;
    const int64_t fast = (int64_t)run->budget + m->recent < c->n_prompt ? run->budget + m->recent : c->n_prompt, slow = c->n_prompt - fast;
    const double heads = (double)config->n_layers * config->n_kv_heads, row = 2.0 * config->head_dim * sizeof(bf16_t);
    struct block_layout layout;
    double page = 0;
    if (run->fetch > 0 && run->fetch < slow && scorer == PAGE_SCORER_INDEX2 &&
        layout_of(m, run, &layout) == 0)
        page = layout.index_entry_bytes;
    else if (run->fetch > 0 && run->fetch < slow)
        page = (double)page_summary_bytes(scorer, config->head_dim);
    return heads * ((double)fast * row + (double)slow / SUBPAGE_TOKENS * page) + page_cache_bytes(m, run);
}

static void count(const struct batch *b, const struct engine_method *m)
{
    const bool measured = !m->scorer || !scorer_find(m->scorer)->measuring_only;
    for (int i = 0; i < b->n; i++) {
        struct sequence_stats stats;
        sequence_stats(b->sequences[i], &stats);
        const struct fidelity_case *c = &b->run->cases[b->first + i];
        if (measured && b->run->task == TASK_KL)
            fidelity_sink_value(b->sink, FIDELITY_FAST_BYTES, fast_bytes(m, b->run, c) / c->n_prompt);
        fidelity_sink_counts(b->sink, &(struct fidelity_counts){
                                          .steps = (uint64_t)b->run->cases[b->first + i].n_fed,
                                          .attended = (double)stats.tokens_attended,
                                          .bytes_attended = (double)stats.bytes_attended,
                                          /* Without a store all blocks are private; they stand for what the pool would hold. */
                                          .bytes_fetched = (double)(b->run->store ? stats.bytes_missed : stats.bytes_attended),
                                      });
    }
}

static int run_batch(struct batch *b, const struct engine_method *m)
{
    int r = prefill(b);
    if (r >= 0)
        r = decode(b);
    if (r >= 0)
        count(b, m);
    for (int i = 0; i < b->n; i++)
        sequence_free(b->sequences[i]);
    return r;
}

int engine_method_run(const struct fidelity_method *method, const struct fidelity_run *run, struct fidelity_sink *sink)
{
    struct engine *engine = NULL;
    int r = open_engine(method->arg, run, &engine);
    for (int first = 0; r >= 0 && first < run->n_cases; first += BATCH_MAX) {
        const int left = run->n_cases - first;
        struct batch b = {.run = run, .sink = sink, .engine = engine, .first = first, .n = left < BATCH_MAX ? left : BATCH_MAX};
        r = run_batch(&b, method->arg);
    }
    engine_free(engine);
    poll_store(run);
    return r < 0 ? r : 0;
}
