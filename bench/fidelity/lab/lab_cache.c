#include "bench/fidelity/lab/lab_cache.h"
#include <string.h>

enum { MAX_ENTRIES = 64 };
static const size_t MAX_BYTES = (size_t)3 << 30;

struct entry {
    const int32_t *tokens;
    int n;
    const struct model *model;
    struct lab_context *context;
};

/* Methods are const and have no state of their own, so what rows share is the program's. entries[0] is the most recently used. */
static struct entry entries[MAX_ENTRIES];
static int n_entries;

static void drop_last(void)
{
    lab_context_free(entries[--n_entries].context);
}

static size_t bytes_held(void)
{
    size_t bytes = 0;
    for (int i = 0; i < n_entries; i++)
        bytes += entries[i].context->bytes;
    return bytes;
}

static void put_first(int from, struct entry e)
{
    memmove(entries + 1, entries, (size_t)from * sizeof *entries);
    entries[0] = e;
}

int lab_cache_context(struct model *model, const struct fidelity_case *c, const struct lab_context **ret_context)
{
    for (int i = 0; i < n_entries; i++) {
        const struct entry e = entries[i];
        if (e.tokens == c->tokens && e.n == c->n_prompt && e.model == model) {
            put_first(i, e);
            *ret_context = e.context;
            return 0;
        }
    }
    const struct lab_prefill_params p = {.model = model, .tokens = c->tokens, .n = c->n_prompt, .chunk = c->n_prompt, .values = LAB_VALUES_EXACT};
    struct entry e = {.tokens = c->tokens, .n = c->n_prompt, .model = model};
    int r = lab_prefill(&p, &e.context);
    if (r < 0)
        return r;
    while (n_entries > 0 && (n_entries == MAX_ENTRIES || bytes_held() + e.context->bytes > MAX_BYTES))
        drop_last();
    put_first(n_entries++, e);
    *ret_context = e.context;
    return 0;
}

void lab_cache_clear(void)
{
    while (n_entries > 0)
        drop_last();
}
