/* What is compared with full attention: a method attends a prompt in its own way and predicts a given continuation, token after token (teacher forcing). Each method is one const
 * struct; the files that hold them export one array each, and method_table.c lists the arrays. A row of the result is a method at a budget.
 *
 * A case is a prompt and the tokens that follow it. Row i of a case are the logits behind continuation token i, so they predict token i + 1; the logits at the prompt's
 * end are not compared, since prefill, not the cache, made them.
 *
 * Fast budget B and fetch F are tokens per layer and KV head. B counts the attention sinks (4) and the newest prompt tokens (32) that every selector is given. The tokens of
 * the continuation are attended exactly by every method and count in neither: what is compared is what a method does with the prompt. */
#pragma once
#include "kvstore/client/kv_client.h"
#include "proto/base/error.h"
#include "proto/base/loop.h"
#include "worker/model/model.h"
#include <stddef.h>
#include <stdint.h>

enum { FIDELITY_ALL = INT32_MAX }; /* of a budget: everything there is */

enum fidelity_task {
    TASK_KL,     /* news text: KL, JSD, top-1, perplexity */
    TASK_RECALL, /* a list of words, far behind it the same list again */
    TASK_NEEDLE, /* one fact in a text, asked for at the end */
    TASK_COUNT,
};
enum { ON_KL = 1 << TASK_KL, ON_RECALL = 1 << TASK_RECALL, ON_NEEDLE = 1 << TASK_NEEDLE, ON_ALL = ON_KL | ON_RECALL | ON_NEEDLE };

enum fidelity_group {
    GROUP_REFERENCE, /* full attention, and what formats and prefill modes cost with everything attended */
    GROUP_DEFAULT,   /* the path that `tidepool serve` takes */
    GROUP_DROP,      /* what a selector does not keep is gone */
    GROUP_DEMOTE,    /* the same selectors; the rest is fetched when a query wants it */
    GROUP_SCORER,    /* one selector, other ways to find pages */
    GROUP_SPLIT,     /* equal attended tokens, kept and fetched in other shares */
    GROUP_BASELINE,  /* methods of others */
    GROUP_CONTROL,   /* immediate eviction */
    GROUP_DRIFT,     /* how far hidden states move from one-shot prefill */
    GROUP_COUNT,
};

struct fidelity_case {
    const int32_t *tokens; /* [n_prompt + n_fed + 1] */
    int n_prompt;          /* >= 1; behind them: */
    int n_fed;             /* continuation tokens to feed, one row of logits each; the token behind the last is only a target */
};

struct fidelity_run {
    struct model *model;
    struct kv_client *store;           /* a kvstore of this run alone; NULL: none */
    struct loop *loop;                 /* of the store's client: poll it between steps */
    const struct fidelity_case *cases; /* [n_cases] of one task. The same memory for every row, and to the end of the program: a method may keep what it derives from a case
                                        * under the case's address */
    int n_cases;
    enum fidelity_task task;
    int budget, fetch;                 /* B and F of the row, each 0 .. FIDELITY_ALL */
    uint64_t seed;
    struct error *err;                 /* why `run` failed */
};

/* Sums over decode steps, layers and KV heads of what the method read for the continuation. */
struct fidelity_counts {
    uint64_t steps;            /* tokens fed, all cases together */
    double attended;           /* prompt and continuation tokens attended, summed over steps, layers and KV heads */
    double bytes_attended;     /* bytes of the slow tier that attention read, summed over steps */
    double bytes_fetched;      /* of them those that had to cross to the device: misses of the page cache; without one the same number */
};

struct fidelity_sink;
/* Hands over row `row` of case `i_case`: logits [n_vocab], host memory, read before the call returns. Each row once, in any order. -EINVAL for a row that there is not, -ERANGE for
 * logits that are no numbers. */
int fidelity_sink_logits(struct fidelity_sink *sink, int i_case, int row, const float *logits);
/* Adds to the row's counts. */
void fidelity_sink_counts(struct fidelity_sink *sink, const struct fidelity_counts *counts);
/* A figure of the method's own, such as a drift: a key of the row in the JSON, averaged when it is given several times. `name` is static; at most FIDELITY_VALUES_MAX names. */
enum { FIDELITY_VALUES_MAX = 16 };
/* The one value that has a column of its own: bytes that the prompt's entries and what finds them take in fast memory, layers and KV heads together, a prompt token (TASK_KL). */
#define FIDELITY_FAST_BYTES "fast_bytes_per_prompt_token"
void fidelity_sink_value(struct fidelity_sink *sink, const char *name, double value);

/* A row's budgets: a pair, or with `sweep` one row for each of --budgets, B being the budget and F = budget * fetch_per_budget. */
struct fidelity_split {
    int budget, fetch;
};

struct fidelity_method {
    const char *name;       /* "snapkv", unique in its group: a row is called group/name@B+F */
    const char *text;       /* one line for the table's legend */
    enum fidelity_group group;
    /* Blocks until every row of every case went to the sink. Owner thread of the device. A negative errno fails this row alone. */
    int (*run)(const struct fidelity_method *method, const struct fidelity_run *run, struct fidelity_sink *sink);
    const void *arg;        /* the method's own constants */
    size_t arg_bytes;       /* of plain data in which equal bytes mean the same thing: then rows that are equal but for their name run once. 0: never */
    unsigned tasks;         /* ON_ bits it can do */
    bool sweep;
    int fetch_per_budget;   /* with sweep: 0, or 1 for F = B */
    const struct fidelity_split *splits; /* [n_splits] without sweep */
    int n_splits;
    int n_task_splits;      /* how many of them, from the first, do recall and needles too; 0: all */
    double cost;            /* of a row, against one of the engine that finds its prefix in the pool: for the progress bar. 0 means 1 */
    int importance;         /* 0: in every run; 1: in the default set; 2: only when --rows names it or with --all */
};

struct fidelity_methods {
    const struct fidelity_method *methods; /* [n] */
    int n;
};
/* The arrays, in the order of the table; ends with methods == NULL. */
extern const struct fidelity_methods *const fidelity_method_lists[];
