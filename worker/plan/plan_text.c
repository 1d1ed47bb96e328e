/* The report as a table for people. Sizes are in powers of 1024. */
#include "proto/base/base_assert.h"
#include "worker/plan/plan_report.h"
#include "proto/option_choices.h"
#include <stdio.h>

enum { CELL = 32, LABEL_WIDTH = 30, CELL_WIDTH = 13 };

static const char *size_text(size_t bytes, char text[CELL])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double v = (double)bytes;
    size_t u = 0;
    while (v >= 1024 && u + 1 < ARRAY_LEN(units)) {
        v /= 1024;
        u++;
    }
    snprintf(text, CELL, u ? "%.2f %s" : "%.0f %s", v, units[u]);
    return text;
}

/* With commas. */
static const char *count_text(size_t n, char text[CELL])
{
    char digits[CELL];
    size_t len = (size_t)snprintf(digits, sizeof(digits), "%zu", n), at = 0;
    for (size_t i = 0; i < len; i++) {
        if (i && (len - i) % 3 == 0)
            text[at++] = ',';
        text[at++] = digits[i];
    }
    text[at] = '\0';
    return text;
}

static int row(struct buf *out, const char *label, const char cells[PLAN_ORDER_COUNT][CELL])
{
    int r = buf_printf(out, "  %-*s", LABEL_WIDTH, label);
    for (int i = 0; r >= 0 && i < PLAN_ORDER_COUNT; i++)
        r = buf_printf(out, " %*s", CELL_WIDTH, cells[i]);
    return r < 0 ? r : buf_append_str(out, "\n");
}

static int size_row(struct buf *out, const char *label, const size_t bytes[PLAN_ORDER_COUNT])
{
    char cells[PLAN_ORDER_COUNT][CELL];
    for (int i = 0; i < PLAN_ORDER_COUNT; i++)
        size_text(bytes[i], cells[i]);
    return row(out, label, (const char(*)[CELL])cells);
}

static int count_row(struct buf *out, const char *label, const size_t counts[PLAN_ORDER_COUNT])
{
    char cells[PLAN_ORDER_COUNT][CELL];
    for (int i = 0; i < PLAN_ORDER_COUNT; i++)
        count_text(counts[i], cells[i]);
    return row(out, label, (const char(*)[CELL])cells);
}

static int header_row(struct buf *out, const char *title)
{
    char cells[PLAN_ORDER_COUNT][CELL];
    for (int i = 0; i < PLAN_ORDER_COUNT; i++)
        snprintf(cells[i], CELL, "%s", plan_order_names[i]);
    int r = buf_printf(out, "\n%s\n", title);
    return r < 0 ? r : row(out, "", (const char(*)[CELL])cells);
}

static int head(const struct plan_report *p, struct buf *out)
{
    const struct plan_options *o = p->options;
    const struct model_config *m = &p->whole;
    char prompt[CELL], context[CELL], fetch[CELL];
    if (o->engine.fetch == INT32_MAX)
        snprintf(fetch, sizeof(fetch), "all");
    else
        snprintf(fetch, sizeof(fetch), "%lld", (long long)o->engine.fetch);
    int r = buf_printf(out, "model          %s: %d layers, %d heads, %d KV heads of %d, width %d, vocabulary %d\n", m->name, m->n_layers, m->n_heads, m->n_kv_heads,
                       m->head_dim, m->dim, m->n_vocab);
    if (r >= 0 && o->engine.tp > 1)
        r = buf_printf(out, "rank           the first of %lld, which is the largest: %d heads, %d KV heads, MLP width %d of %d; sizes of a worker are those of one rank\n", (long long)o->engine.tp,
                       p->model.n_heads, p->model.n_kv_heads, p->model.ffn_dim, m->ffn_dim);
    if (r >= 0 && m->note[0])
        r = buf_printf(out, "note           %s\n", m->note);
    if (r >= 0)
        r = buf_printf(out, "request        %s prompt tokens and %lld new ones: a context of %s\n", count_text((size_t)p->n_prompt, prompt), (long long)o->max_new,
                       count_text((size_t)p->context, context));
    if (r >= 0)
        r = buf_printf(out, "configuration  %s, budget %lld, recent %lld, fetch %s by %s, chunk %lld, %s, pool %s, %lld running, %s\n", selector_choices[o->engine.selector], (long long)o->engine.budget,
                       (long long)o->engine.recent, fetch, scorer_choices[o->engine.scorer], (long long)o->engine.chunk, kv_format_name((enum kv_format)o->engine.kv_format), o->pool ? "on" : "off",
                       (long long)o->engine.max_running, p->device);
    return r;
}

static int weights_and_pool(const struct plan_report *p, struct buf *out)
{
    const struct memory_plan *plan = &p->orders[PLAN_LAYER];
    char a[CELL], b[CELL], c[CELL];
    int r = buf_printf(out, "weights        %s a %s (%s); %s in bf16", size_text(p->weights, a), p->options->engine.tp > 1 ? "rank" : "worker", p->weights_name, size_text(p->bf16.device_bytes, b));
    if (r >= 0 && p->stored.file_bytes)
        r = buf_printf(out, "; %s in the files", size_text((size_t)p->stored.file_bytes, a));
    if (r >= 0)
        r = buf_printf(out, "\npool           %s bytes a token, %s a block of %d tokens: %s for this request, once for all workers of the host%s\n",
                       count_text(plan->block_bytes[0] / BLOCK_TOKENS, a), size_text(plan->block_bytes[0], b), BLOCK_TOKENS, size_text(plan->pool_bytes, c),
                       p->options->engine.tp > 1 ? ", and as much or less for each other rank" : "");
    return r;
}

static int tags(const struct plan_report *p, struct buf *out)
{
    size_t total[PLAN_ORDER_COUNT], decoding[PLAN_ORDER_COUNT], with[PLAN_ORDER_COUNT];
    int r = header_row(out, "Device memory of a worker that runs this request alone, beyond the weights: peak by tag");
    for (int tag = 0; r >= 0 && tag < MEM_TAG_COUNT; tag++) {
        size_t bytes[PLAN_ORDER_COUNT], most = 0;
        for (int i = 0; i < PLAN_ORDER_COUNT; i++) {
            bytes[i] = p->orders[i].peak[tag];
            most = bytes[i] > most ? bytes[i] : most;
        }
        if (most)
            r = size_row(out, mem_tag_name((enum mem_tag)tag), bytes);
    }
    for (int i = 0; i < PLAN_ORDER_COUNT; i++) {
        total[i] = p->orders[i].peak_total;
        decoding[i] = p->orders[i].fixed + p->orders[i].running;
        with[i] = total[i] + p->weights;
    }
    if (r >= 0)
        r = size_row(out, "most at one time", total);
    if (r >= 0)
        r = size_row(out, "while it decodes", decoding);
    return r < 0 ? r : size_row(out, "most, with the weights", with);
}

static int sharing(const struct plan_report *p, struct buf *out)
{
    size_t fixed[PLAN_ORDER_COUNT], sequence[PLAN_ORDER_COUNT], running[PLAN_ORDER_COUNT], host[PLAN_ORDER_COUNT], bridge[PLAN_ORDER_COUNT], most_bridge = 0;
    for (int i = 0; i < PLAN_ORDER_COUNT; i++) {
        fixed[i] = p->orders[i].fixed;
        sequence[i] = p->orders[i].sequence;
        running[i] = p->orders[i].running;
        host[i] = p->orders[i].host_sequence;
        bridge[i] = p->orders[i].host_bridge;
        most_bridge = bridge[i] > most_bridge ? bridge[i] : most_bridge;
    }
    int r = header_row(out, "What admission counts");
    if (r >= 0)
        r = size_row(out, "a worker by itself", fixed);
    if (r >= 0)
        r = size_row(out, "a request from its start on", sequence);
    if (r >= 0)
        r = size_row(out, "a request behind its prompt", running);
    if (r >= 0 && most_bridge)
        r = size_row(out, "pinned host memory, bridge", bridge);
    return r < 0 ? r : size_row(out, "host bookkeeping of a request", host);
}

static int fits(const struct plan_report *p, struct buf *out)
{
    const size_t memory = (size_t)p->options->device_memory;
    size_t running[PLAN_ORDER_COUNT], prefilling[PLAN_ORDER_COUNT], longest[PLAN_ORDER_COUNT], page_cache[PLAN_ORDER_COUNT];
    char title[160], a[CELL], b[CELL];
    if (!memory)
        return 0;
    if (memory <= p->weights)
        return buf_printf(out, "\nThe weights alone exceed a device of %s: choose a smaller --weights dtype or a larger device.\n", size_text(memory, a));
    snprintf(title, sizeof(title), "What fits into a device of %s, which leaves --memory-limit %zu (%s)", size_text(memory, a), memory - p->weights,
             size_text(memory - p->weights, b));
    for (int i = 0; i < PLAN_ORDER_COUNT; i++) {
        running[i] = p->fits[i].running;
        prefilling[i] = p->fits[i].prefilling;
        longest[i] = (size_t)p->longest[i];
        page_cache[i] = p->fits[i].page_cache;
    }
    int r = header_row(out, title);
    if (r >= 0)
        r = count_row(out, "such requests behind prompts", running);
    if (r >= 0)
        r = count_row(out, "with one at its prompt, in all", prefilling);
    if (r >= 0)
        r = count_row(out, "longest context of one", longest);
    if (r >= 0)
        r = size_row(out, "page cache beside one", page_cache);
    return r;
}

/* What to start the workers with, so that as many such requests run as fit and each finds its own document in the pool. */
static int advice(const struct plan_report *p, struct buf *out)
{
    const struct plan_options *o = p->options;
    const size_t memory = (size_t)o->device_memory, allowed = p->fits[PLAN_LAYER].prefilling, unit = 256 << 20;
    const size_t n = allowed < (size_t)o->engine.max_running ? allowed : (size_t)o->engine.max_running;
    if (!memory || memory <= p->weights)
        return 0;
    if (n == 0)
        return buf_append_str(out, "\nNot one such request fits: lower --context, --budget or --chunk, or choose smaller --weights or a larger device.\n");
    const size_t pool = (p->orders[PLAN_LAYER].pool_bytes * n * (size_t)(o->workers * o->engine.tp) + unit - 1) / unit * unit;
    int r = buf_printf(out, "\nServe with --memory-limit %zu --max-running %zu", memory - p->weights, n);
    if (r >= 0 && o->engine.tp > 1)
        r = buf_printf(out, " --tp %lld", (long long)o->engine.tp);
    if (r >= 0 && o->pool)
        r = buf_printf(out, " --pool-size %zuM, if all that run have documents of their own", pool >> 20);
    if (r >= 0 && allowed > n)
        r = buf_printf(out, "; there is memory for more of them, up to --max-running %zu less what each adds to the workspace", allowed);
    return r < 0 ? r : buf_append_str(out, ".\n");
}

static int workers(const struct plan_report *p, struct buf *out)
{
    const size_t n = (size_t)p->options->workers, n_ranks = n * (size_t)p->options->engine.tp;
    const struct memory_plan *plan = &p->orders[PLAN_LAYER];
    char a[CELL], b[CELL], c[CELL];
    if (n < 2)
        return 0;
    return buf_printf(out, "\n%zu workers, each with such a request, layer-major: %s of devices (on a CPU host: of its memory), %s of bookkeeping, and a pool of %s if the requests share "
                           "nothing\n", n, size_text(n_ranks * (p->weights + plan->peak_total), a), size_text(n_ranks * (plan->host_engine + plan->host_sequence), b),
                      size_text(n_ranks * plan->pool_bytes, c));
}

int plan_report_text(const struct plan_report *report, struct buf *out)
{
    int (*const parts[])(const struct plan_report *, struct buf *) = {head, weights_and_pool, tags, sharing, fits, workers, advice};
    int r = 0;
    for (size_t i = 0; r >= 0 && i < ARRAY_LEN(parts); i++)
        r = parts[i](report, out);
    return r;
}
