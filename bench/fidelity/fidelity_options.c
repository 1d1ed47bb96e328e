#include "bench/fidelity/fidelity_options.h"
#include "proto/base/base_assert.h"
#include "proto/option_choices.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NEWS_TEXTS "../shared/data/longbench/multi_news.jsonl"

#define FIELD(f) .offset = offsetof(struct fidelity_options, f)
static const struct option_spec specs[] = {
    {.name = "model", .kind = OPTION_STR, FIELD(model), .fallback = "models/SmolLM2-135M-Instruct.Q4_1.gguf", .metavar = "PATH",
     .help = "GGUF file (it brings the tokenizer), or a Hugging Face folder"},
    {.name = "texts", .kind = OPTION_STR, FIELD(texts), .optional = true, .metavar = "FILE",
     .help = "JSON lines with \"context\" (LongBench), or \"input\" and \"outputs\" (RULER); default: " NEWS_TEXTS " where it exists"},
    {.name = "out", .kind = OPTION_STR, FIELD(out), .fallback = "fidelity-results", .metavar = "DIR", .help = "folder of fidelity.json, fidelity.md and the plots; made if missing"},
    {.name = "contexts", .kind = OPTION_INT, FIELD(contexts), .fallback = "0", .min = 0, .max = 1000, .metavar = "N", .help = "news contexts; 0: 2, or 1 with --quick"},
    {.name = "context-tokens", .kind = OPTION_INT, FIELD(context_tokens), .fallback = "0", .min = 0, .max = 1 << 24, .metavar = "N",
     .help = "tokens of a news context; 0: 7680, or 768 with --quick"},
    {.name = "positions", .kind = OPTION_INT, FIELD(positions), .fallback = "0", .min = 0, .max = 100000, .metavar = "N",
     .help = "tokens of continuation compared per context; 0: 256, or 48 with --quick"},
    {.name = "budgets", .kind = OPTION_STR, FIELD(budgets), .optional = true, .metavar = "LIST",
     .help = "fast budgets in tokens per layer and KV head; default 128,256,512,1024, or 64,128 with --quick"},
    {.name = "task-budget", .kind = OPTION_INT, FIELD(task_budget), .fallback = "0", .min = 0, .max = 1 << 24, .metavar = "N",
     .help = "the one of --budgets at which rows do recall and needles too; 0: 256, or 64 with --quick"},
    {.name = "rows", .kind = OPTION_STR, FIELD(rows), .optional = true, .metavar = "LIST", .help = "only rows whose name contains one of these, or matches one as a shell pattern"},
    {.name = "tasks", .kind = OPTION_STR, FIELD(tasks), .optional = true, .metavar = "LIST",
     .help = "what to measure; default kl,recall,needle, or kl,needle with texts that bring questions (RULER)"},
    {.name = "recall-tokens", .kind = OPTION_STR, FIELD(recall_tokens), .optional = true, .metavar = "LIST",
     .help = "tokens of the recall contexts; default 2048,4096,7000, or 512 with --quick"},
    {.name = "recall-samples", .kind = OPTION_INT, FIELD(recall_samples), .fallback = "0", .min = 0, .max = 1000, .metavar = "N", .help = "recall contexts of each length; 0: 2, or 1 with --quick"},
    {.name = "needle-samples", .kind = OPTION_INT, FIELD(needle_samples), .fallback = "0", .min = 0, .max = 1000, .metavar = "N",
     .help = "needle questions, of which those that full attention answers count; 0: 8, or 2 with --quick"},
    {.name = "needle-tokens", .kind = OPTION_INT, FIELD(needle_tokens), .fallback = "0", .min = 0, .max = 1 << 24, .metavar = "N",
     .help = "tokens of a needle context; 0: 2048, or 512 with --quick"},
    {.name = "seed", .kind = OPTION_INT, FIELD(seed), .fallback = "7", .min = 0, .max = INT64_MAX, .metavar = "N", .help = "of the generated tasks"},
    {.name = "threads", .kind = OPTION_INT, FIELD(threads), .fallback = "0", .min = 0, .max = 256, .metavar = "N", .help = "compute threads; 0: one a processor"},
    {.name = "isa", .kind = OPTION_ENUM, FIELD(isa), .fallback = "auto", .choices = isa_choices, .help = "instruction set of the CPU kernels; all give the same figures"},
    {.name = "pool-size", .kind = OPTION_BYTES, FIELD(pool_size), .fallback = "0", .min = 0, .max = INT64_C(1) << 46, .metavar = "BYTES",
     .help = "pool of the private kvstore, which is started and ended with the run; 0: what the cases need"},
    {.name = "time-limit", .kind = OPTION_INT, FIELD(time_limit), .fallback = "0", .min = 0, .max = 1 << 24, .metavar = "MINUTES",
     .help = "begin no row after that; --resume goes on later; 0: none"},
    {.name = "quick", .kind = OPTION_BOOL, FIELD(quick), .fallback = "off", .help = "short contexts and few rows: a minute instead of half an hour"},
    {.name = "all", .kind = OPTION_BOOL, FIELD(all), .fallback = "off", .help = "also the rows that are slow or of little interest"},
    {.name = "list", .kind = OPTION_BOOL, FIELD(list), .fallback = "off", .help = "name the rows that would run, and stop"},
    {.name = "resume", .kind = OPTION_BOOL, FIELD(resume), .fallback = "off", .help = "keep the rows that fidelity.json of an equal run has already"},
};
#undef FIELD

const struct option_set fidelity_option_set = {
    .program = "tidepool bench fidelity",
    .summary = "Compares methods of KV compression with full attention on a model and a text: divergence, recall, needles, bytes fetched per token.",
    .examples = "  tidepool bench fidelity --quick\n"
                "  tidepool bench fidelity --texts multi_news.jsonl --out results\n"
                "  tidepool bench fidelity --rows drop/snapkv,demote/snapkv --budgets 256,512 --tasks kl,recall\n"
                "  tidepool bench fidelity --list --all\n",
    .specs = specs,
    .n_specs = ARRAY_LEN(specs),
};

static int parse_list(const char *name, const char *text, int min, int *values, int max, int *ret_n, struct error *err)
{
    int n = 0;
    for (const char *at = text; *at;) {
        char *end;
        const long value = strtol(at, &end, 10);
        if (end == at || (*end && *end != ',') || value < min || value > 1 << 24)
            return error_set(err, -EINVAL, "--%s %s: numbers from %d to %d with commas between are wanted", name, text, min, 1 << 24);
        if (n == max)
            return error_set(err, -EINVAL, "--%s %s: at most %d numbers", name, text, max);
        values[n++] = (int)value;
        at = *end ? end + 1 : end;
    }
    *ret_n = n;
    return n ? 0 : error_set(err, -EINVAL, "--%s: empty", name);
}

static int parse_tasks(const char *text, unsigned *ret_tasks, struct error *err)
{
    static const char *const names[TASK_COUNT] = {[TASK_KL] = "kl", [TASK_RECALL] = "recall", [TASK_NEEDLE] = "needle"};
    unsigned tasks = 0;
    for (const char *at = text; *at;) {
        const size_t len = strcspn(at, ",");
        int task = 0;
        while (task < TASK_COUNT && (strlen(names[task]) != len || memcmp(names[task], at, len) != 0))
            task++;
        if (task == TASK_COUNT)
            return error_set(err, -EINVAL, "--tasks %s: kl, recall and needle are known", text);
        tasks |= 1u << task;
        at += len + (at[len] == ',');
    }
    *ret_tasks = tasks;
    return tasks ? 0 : error_set(err, -EINVAL, "--tasks: empty");
}

static void default_to(int64_t *value, bool quick, int64_t whole_value, int64_t quick_value)
{
    if (*value == 0)
        *value = quick ? quick_value : whole_value;
}

int fidelity_options_derive(struct fidelity_options *o, struct error *err)
{
    const bool q = o->quick;
    default_to(&o->contexts, q, 2, 1);
    default_to(&o->context_tokens, q, 7680, 768);
    default_to(&o->positions, q, 256, 48);
    default_to(&o->task_budget, q, 256, 64);
    default_to(&o->recall_samples, q, 2, 1);
    default_to(&o->needle_samples, q, 8, 2);
    default_to(&o->needle_tokens, q, 2048, 512);
    if (!o->texts && access(NEWS_TEXTS, R_OK) == 0)
        o->texts = NEWS_TEXTS;
    if (!o->texts && !o->list)
        return error_set(err, -EINVAL, "--texts is needed: there is no " NEWS_TEXTS);
    int r = parse_list("budgets", o->budgets ? o->budgets : q ? "64,128" : "128,256,512,1024", 0, o->budget_list, BUDGETS_MAX, &o->n_budgets, err);
    if (r >= 0)
        r = parse_list("recall-tokens", o->recall_tokens ? o->recall_tokens : q ? "512" : "2048,4096,7000", 256, o->length_list, LENGTHS_MAX, &o->n_lengths, err);
    if (r >= 0)
        r = parse_tasks(o->tasks ? o->tasks : "kl,recall,needle", &o->task_set, err);
    return r;
}
