#include "worker/sched/token_counts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST_CAP = 64 };

void token_counts_fini(struct token_counts *c)
{
    free(c->counts);
    free(c->table);
    *c = (struct token_counts){0};
}

/* Where the token stands in the table, or the free place where it belongs. */
static int32_t *place(int32_t *table, int n_table, const struct token_count *counts, int32_t token)
{
    uint32_t i = (uint32_t)token * 2654435761u;

    for (;; i++) {
        int32_t *p = &table[i & (uint32_t)(n_table - 1)];
        if (*p < 0 || counts[*p].token == token)
            return p;
    }
}

static int grow(struct token_counts *c)
{
    int cap = c->cap ? c->cap * 2 : FIRST_CAP;
    struct token_count *counts = realloc(c->counts, (size_t)cap * sizeof *counts);
    int32_t *table;

    if (!counts)
        return -ENOMEM;
    c->counts = counts;
    table = malloc((size_t)cap * 2 * sizeof *table);
    if (!table)
        return -ENOMEM;
    memset(table, 0xFF, (size_t)cap * 2 * sizeof *table);
    for (int i = 0; i < c->n; i++)
        *place(table, cap * 2, counts, counts[i].token) = i;
    free(c->table);
    c->table = table;
    c->n_table = cap * 2;
    c->cap = cap;
    return 0;
}

static int find(struct token_counts *c, int32_t token, struct token_count **ret_count)
{
    int32_t *p;

    if (c->n == c->cap && grow(c) < 0)
        return -ENOMEM;
    p = place(c->table, c->n_table, c->counts, token);
    if (*p < 0) {
        *p = c->n;
        c->counts[c->n++] = (struct token_count){.token = token};
    }
    *ret_count = &c->counts[*p];
    return 0;
}

int token_counts_add_prompt(struct token_counts *c, int32_t token)
{
    struct token_count *count;
    int rc = find(c, token, &count);

    if (rc == 0)
        count->n_prompt++;
    return rc;
}

int token_counts_add_output(struct token_counts *c, int32_t token)
{
    struct token_count *count;
    int rc = find(c, token, &count);

    if (rc == 0)
        count->n_output++;
    return rc;
}
