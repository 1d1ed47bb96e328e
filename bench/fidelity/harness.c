#include "bench/fidelity/harness.h"
#include "bench/fidelity/lab/lab_cache.h"
#include "bench/fidelity/make_cases.h"
#include "bench/fidelity/private_store.h"
#include "bench/fidelity/progress_bar.h"
#include "bench/fidelity/results.h"
#include "proto/base/clock.h"
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct harness {
    const struct fidelity_options *o;
    const struct device_ops *dev;
    struct device *device;
    struct stream *stream;
    struct model *model;
    struct tokenizer *tok;
    struct text_source source;
    struct case_set sets[TASK_COUNT];
    struct private_store store;
    struct row_list list;
    struct run_results results;
    struct progress_bar bar;
    double done_cost, row_cost; /* of the bar: behind it, and of the row's present task */
    int64_t rows_done, rows_of_task;
    uint64_t started_us;
};

/* A task's share of a row's cost, as measured at the default sizes. */
static const double task_cost[TASK_COUNT] = {[TASK_KL] = 1, [TASK_RECALL] = 0.8, [TASK_NEEDLE] = 0.4};

static volatile sig_atomic_t interrupted;

/* The row that runs is finished and written; a second signal ends the program at once. */
static void on_interrupt(int signal_number)
{
    static const char text[] = "\nending after this row; once more to end at once\n";
    interrupted = 1;
    signal(signal_number, SIG_DFL);
    if (write(STDERR_FILENO, text, sizeof(text) - 1) < 0)
        return; /* nobody reads it */
}

/* ---- opening ---- */

static int open_model(struct harness *h, struct error *err)
{
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    const struct device_config config = {.n_threads = h->o->threads ? (int)h->o->threads : processors < 1 ? 1 : processors > 256 ? 256 : (int)processors,
                                         .isa = (enum cpu_isa)h->o->isa};
    h->dev = cpu_device_ops();
    int r = h->dev->open(&config, &h->device);
    if (r >= 0)
        r = h->dev->stream_create(h->device, &h->stream);
    if (r < 0)
        return error_set(err, r, "the device does not open: %s", strerror(-r));
    const struct model_open_params p = {.path = h->o->model, .dev = h->dev, .ops = cpu_kernel_ops(), .device = h->device, .stream = h->stream};
    r = model_open(&p, &h->model, err);
    if (r >= 0)
        r = tokenizer_open(h->o->model, &h->tok, err);
    return r >= 0 ? text_source_load(&h->source, h->o->texts, h->tok, err) : r;
}

/* A file of questions is no prose to draw lists of words from: there recall is measured only when it is asked for. */
static unsigned task_set(const struct harness *h)
{
    return h->o->tasks || h->source.n_samples == 0 ? h->o->task_set : h->o->task_set & ~(unsigned)ON_RECALL;
}

static int make_cases(struct harness *h, struct error *err)
{
    const struct fidelity_options *o = h->o;
    const unsigned tasks = task_set(h);
    const struct case_params p = {.source = &h->source, .tok = h->tok, .seed = (uint64_t)o->seed};
    int r = 0;
    for (int task = 0; task < TASK_COUNT; task++)
        case_set_init(&h->sets[task], (enum fidelity_task)task);
    if (tasks & ON_KL)
        r = make_kl_cases(&h->sets[TASK_KL], &p, (int)o->contexts, (int)o->context_tokens, (int)o->positions, err);
    if (r >= 0 && tasks & ON_RECALL)
        r = make_recall_cases(&h->sets[TASK_RECALL], &p, o->length_list, o->n_lengths, (int)o->recall_samples, err);
    if (r >= 0 && tasks & ON_NEEDLE)
        r = make_needle_cases(&h->sets[TASK_NEEDLE], &p, (int)o->needle_samples, (int)o->needle_tokens, err);
    if (r >= 0 && case_set_alloc_reference(&h->sets[TASK_KL], h->model->config.n_vocab) < 0)
        r = error_set(err, -ENOMEM, "no memory for the reference's logits: fewer --contexts or --positions need less");
    for (int task = 0; r >= 0 && task < TASK_COUNT; task++)
        if (case_set_context(&h->sets[task]) > h->model->config.max_context)
            r = error_set(err, -EINVAL, "a case has %d tokens; the model's context is %d", case_set_context(&h->sets[task]), h->model->config.max_context);
    return r;
}

static uint64_t block_bytes(const struct harness *h, enum kv_format format)
{
    const struct model_config *c = &h->model->config;
    struct block_layout layout;
    return block_layout_init(&layout, format, (uint32_t)c->n_layers, (uint32_t)c->n_kv_heads, (uint32_t)c->head_dim) < 0 ? 0 : layout.block_bytes[1];
}

/* Room for the prompts that rows come back to: the news in all formats, the rest in the exact one and the default. Needles are two cases a sample, over one text, and few of them outlive
 * the first row; what it leaves of the others is the oldest and goes first. */
static uint64_t pool_bytes(const struct harness *h)
{
    if (h->o->pool_size)
        return (uint64_t)h->o->pool_size;
    const uint64_t two = block_bytes(h, KV_FORMAT_BF16) + block_bytes(h, KV_FORMAT_K8V4), three = two + block_bytes(h, KV_FORMAT_K8V8);
    uint64_t blocks[TASK_COUNT] = {0};
    for (int task = 0; task < TASK_COUNT; task++)
        for (int i = 0; i < h->sets[task].n; i++)
            blocks[task] += (uint64_t)h->sets[task].cases[i].n_prompt / BLOCK_TOKENS + 1;
    const uint64_t bytes = blocks[TASK_KL] * three + blocks[TASK_RECALL] * two + blocks[TASK_NEEDLE] * two / 4;
    return bytes + bytes / 8 + (64u << 20);
}

static void fill_results(struct harness *h)
{
    const struct fidelity_options *o = h->o;
    const char *slash = strrchr(o->texts, '/');
    h->results = (struct run_results){
        .settings = {.model = h->model->config.name, .texts = slash ? slash + 1 : o->texts, .contexts = (int)o->contexts, .context_tokens = (int)o->context_tokens,
                     .positions = (int)o->positions, .recall_samples = (int)o->recall_samples, .needle_samples = h->sets[TASK_NEEDLE].n / 2,
                     .needle_tokens = h->source.n_samples ? case_set_context(&h->sets[TASK_NEEDLE]) : (int)o->needle_tokens, .lengths = o->length_list,
                     .n_lengths = o->n_lengths, .seed = o->seed},
        .list = &h->list,
        .n_recall_labels = h->sets[TASK_RECALL].n_labels,
    };
    for (int i = 0; i < h->sets[TASK_RECALL].n_labels; i++)
        h->results.recall_labels[i] = h->sets[TASK_RECALL].labels[i];
}

static int make_rows(const struct fidelity_options *o, unsigned tasks, struct row_list *ret_list, struct error *err)
{
    const struct row_filter filter = {
        .patterns = o->rows,
        .importance_max = o->all ? 2 : o->quick ? 0 : 1,
        .budgets = o->budget_list,
        .n_budgets = o->n_budgets,
        .task_budget = (int)o->task_budget,
        .tasks = tasks,
    };
    return row_list_make(ret_list, &filter, err);
}

static int open_all(struct harness *h, struct error *err)
{
    int r = open_model(h, err);
    if (r >= 0)
        r = make_rows(h->o, task_set(h), &h->list, err);
    if (r >= 0)
        r = make_cases(h, err);
    if (r < 0)
        return r;
    fill_results(h);
    if (h->o->resume)
        r = results_resume(&h->results, &h->list, h->o->out, err);
    /* Before the first row, so that an hour's work is not lost to a folder that cannot be written. */
    if (r >= 0)
        r = results_write(&h->results, h->o->out, err);
    return r < 0 ? r : private_store_start(&h->store, pool_bytes(h), err);
}

static void close_all(struct harness *h)
{
    private_store_stop(&h->store);
    row_list_free(&h->list);
    for (int task = 0; task < TASK_COUNT; task++)
        case_set_fini(&h->sets[task]);
    text_source_fini(&h->source);
    tokenizer_close(h->tok);
    lab_cache_clear();
    model_close(h->model);
    if (h->stream)
        h->dev->stream_free(h->stream);
    if (h->device)
        h->dev->close(h->device);
}

/* ---- rows ---- */

static double cost_of(const struct harness *h, const struct fidelity_row *row, int task)
{
    const bool runs = row->tasks & 1u << task && h->sets[task].n > 0;
    return runs ? task_cost[task] * (row->method->cost > 0 ? row->method->cost : 1) : 0;
}

static void on_row(void *arg)
{
    struct harness *h = arg;
    h->rows_done++;
    progress_bar_move(&h->bar, h->done_cost + h->row_cost * (double)h->rows_done / (double)h->rows_of_task);
}

static int run_task(struct harness *h, struct fidelity_row *row, int task, bool is_reference, struct error *err)
{
    struct case_set *set = &h->sets[task];
    const struct fidelity_run run = {
        .model = h->model, .store = h->store.client, .loop = h->store.loop, .cases = set->cases, .n_cases = set->n, .task = (enum fidelity_task)task,
        .budget = row->budget, .fetch = row->fetch, .seed = (uint64_t)h->o->seed, .err = err,
    };
    struct task_scores scores;
    struct fidelity_sink sink;
    bool *right = calloc((size_t)set->n + 1, sizeof(*right));
    int r = right ? fidelity_sink_init(&sink, set, h->model->config.n_vocab, is_reference, &scores) : -ENOMEM;
    if (r < 0) {
        free(right);
        return error_set(err, r, "no memory");
    }
    sink.on_row = on_row;
    sink.arg = h;
    h->rows_done = 0;
    h->rows_of_task = case_set_steps(set);
    err->text[0] = '\0';
    r = row->method->run(row->method, &run, &sink);
    if (r >= 0 && (r = fidelity_sink_finish(&sink, right)) < 0)
        error_set(err, r, "the method left rows out");
    if (r >= 0) {
        row_result_add(&row->result, set, &scores, h->model->config.n_layers, h->model->config.n_kv_heads);
        if (is_reference && task == TASK_NEEDLE)
            case_set_keep(set, right);
    }
    fidelity_sink_fini(&sink);
    task_scores_fini(&scores);
    free(right);
    return r;
}

static void describe(struct harness *h, const struct fidelity_row *row)
{
    const struct row_result *r = &row->result;
    char figures[160] = "";
    int n = 0;
    if (!isnan(r->kl))
        n += snprintf(figures + n, sizeof(figures) - (size_t)n, "  KL %.5f  top-1 %.3f", r->kl, r->top1);
    if (!isnan(r->recall_all))
        n += snprintf(figures + n, sizeof(figures) - (size_t)n, "  recall %.3f", r->recall_all);
    if (!isnan(r->needle[0]))
        n += snprintf(figures + n, sizeof(figures) - (size_t)n, "  needle %.2f/%.2f", r->needle[0], r->needle[1]);
    if (!isnan(r->attended))
        snprintf(figures + n, sizeof(figures) - (size_t)n, "  attended %.0f", r->attended);
    if (r->error[0])
        progress_bar_line(&h->bar, "%s failed: %s", row->name, r->error);
    else
        progress_bar_line(&h->bar, "%-36s%s  %.1f s (%.1f of cpu)", row->name, figures, r->seconds, r->cpu_seconds);
}

static double cpu_seconds(void)
{
    struct timespec t = {0};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* A row that has run under another name gives its figures, its time included. */
static bool take_twin(struct harness *h, struct fidelity_row *row)
{
    const struct fidelity_row *twin = row_list_twin(&h->list, row);
    if (!twin)
        return false;
    row->result = twin->result;
    return true;
}

/* Needles that full attention does not find are not asked of the others: what is left of the set makes the reference 1. */
static void run_row(struct harness *h, struct fidelity_row *row, bool is_reference)
{
    const uint64_t started_us = clock_now_us();
    const double started_cpu_s = cpu_seconds();
    struct error err = {""};
    int r = 0;
    row_result_init(&row->result);
    for (int task = 0; r >= 0 && task < TASK_COUNT; task++) {
        h->row_cost = cost_of(h, row, task);
        progress_bar_label(&h->bar, h->done_cost, row->name);
        if (h->row_cost > 0)
            r = run_task(h, row, task, is_reference, &err);
        h->done_cost += h->row_cost;
    }
    if (r < 0)
        snprintf(row->result.error, sizeof(row->result.error), "%.150s", err.text[0] ? err.text : strerror(-r));
    row->result.seconds = (double)(clock_now_us() - started_us) / 1e6;
    row->result.cpu_seconds = cpu_seconds() - started_cpu_s;
    row->result.done = true;
}

static bool time_is_up(const struct harness *h)
{
    return interrupted || (h->o->time_limit && clock_now_us() - h->started_us > (uint64_t)h->o->time_limit * 60 * 1000000);
}

/* Rows of less importance come later, so that a run that ends early has what matters. */
static int run_rows(struct harness *h, struct error *err)
{
    double total = 0;
    int r = 0;
    for (int i = 0; i < h->list.n; i++)
        for (int task = 0; task < TASK_COUNT; task++)
            total += i == 0 || !h->list.rows[i].result.done ? cost_of(h, &h->list.rows[i], task) : 0;
    progress_bar_init(&h->bar, total);
    for (int importance = 0; importance <= 2; importance++) {
        for (int i = 0; r >= 0 && i < h->list.n && !time_is_up(h); i++) {
            struct fidelity_row *row = &h->list.rows[i];
            if (row->method->importance != importance || (i > 0 && row->result.done))
                continue;
            if (i == 0 || !take_twin(h, row))
                run_row(h, row, i == 0);
            else
                for (int task = 0; task < TASK_COUNT; task++)
                    h->done_cost += cost_of(h, row, task);
            progress_bar_move(&h->bar, h->done_cost);
            describe(h, row);
            if (i == 0 && row->result.error[0])
                return error_set(err, -EIO, "full attention failed, and nothing can be compared with it: %s", row->result.error);
            h->results.settings.n_needles = h->sets[TASK_NEEDLE].n / 2;
            h->results.seconds = (double)(clock_now_us() - h->started_us) / 1e6;
            r = results_write(&h->results, h->o->out, err);
        }
    }
    return r;
}

static int count_rows(const struct harness *h, bool failed)
{
    int n = 0;
    for (int i = 0; i < h->list.n; i++)
        n += failed ? h->list.rows[i].result.error[0] != '\0' : h->list.rows[i].result.done;
    return n;
}

int harness_run(const struct fidelity_options *o, struct error *err)
{
    struct harness h = {.o = o, .started_us = clock_now_us()};
    char took[32];
    signal(SIGINT, on_interrupt);
    signal(SIGTERM, on_interrupt);
    int r = open_all(&h, err);
    if (r >= 0) {
        r = run_rows(&h, err);
        progress_bar_end(&h.bar);
    }
    if (r >= 0) {
        progress_time_text((double)(clock_now_us() - h.started_us) / 1e6, took);
        const int failed = count_rows(&h, true), done = count_rows(&h, false);
        fprintf(stderr, "%d of %d rows in %s, %d failed: %s/fidelity.md\n", done, h.list.n, took, failed, o->out);
        r = failed > 0;
    }
    close_all(&h);
    return r;
}

int harness_list(const struct fidelity_options *o, struct error *err)
{
    struct row_list list;
    const int r = make_rows(o, o->task_set, &list, err);
    if (r < 0)
        return r;
    for (int i = 0; i < list.n; i++)
        printf("%-40s %s\n", list.rows[i].name, list.rows[i].method->text ? list.rows[i].method->text : "");
    row_list_free(&list);
    return 0;
}
