/* Encodes texts again and again with one tokenizer and prints how fast: the first pass with an empty word cache, and the best of the others. Reads one JSON
 * string a line. One line of JSON comes out; tests/bench/tokenizer runs it beside other libraries. */
#include "formats/json.h"
#include "router/text/tokenizer.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct text {
    char *data;
    size_t len;
};

struct texts {
    struct text *items;
    size_t n, bytes;
};

static int add_text(struct texts *t, const char *line, size_t len)
{
    struct json j;
    struct json_str s;
    json_init(&j, line, len);
    json_string(&j, &s);
    int r = json_end(&j);
    if (r == 0) {
        t->items = realloc(t->items, (t->n + 1) * sizeof *t->items);
        char *copy = malloc(s.len + 1);
        if (!t->items || !copy)
            return -ENOMEM;
        memcpy(copy, s.data, s.len);
        t->items[t->n++] = (struct text){.data = copy, .len = s.len};
        t->bytes += s.len;
    }
    json_fini(&j);
    return r;
}

static int read_texts(const char *path, struct texts *t)
{
    FILE *f = fopen(path, "r");
    char *line = NULL;
    size_t cap = 0;
    ssize_t len;
    int r = f ? 0 : -errno;
    while (r == 0 && (len = getline(&line, &cap, f)) > 0)
        r = add_text(t, line, (size_t)len);
    free(line);
    if (f)
        fclose(f);
    return r;
}

static void free_texts(struct texts *t)
{
    for (size_t i = 0; i < t->n; i++)
        free(t->items[i].data);
    free(t->items);
}

/* CPU time of this thread: what else the machine does counts as little as possible. */
static uint64_t cpu_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* Nanoseconds of one pass over all texts. */
static int pass(const struct tokenizer *tok, const struct texts *t, struct token_ids *ids, size_t *ret_tokens, uint64_t *ret_ns, struct error *err)
{
    uint64_t start = cpu_now_ns();
    size_t n_tokens = 0;
    for (size_t i = 0; i < t->n; i++) {
        ids->n = 0;
        int r = tokenizer_encode(tok, t->items[i].data, t->items[i].len, 0, ids, err);
        if (r < 0)
            return r;
        n_tokens += ids->n;
    }
    *ret_ns = cpu_now_ns() - start;
    *ret_tokens = n_tokens;
    return 0;
}

int main(int argc, char **argv)
{
    struct error err = {.text = ""};
    struct tokenizer *tok = NULL;
    struct texts texts = {0};
    struct token_ids ids = {0};
    uint64_t ns = 0, first = 0, best = UINT64_MAX;
    size_t n_tokens = 0;
    if (argc != 4) {
        fprintf(stderr, "Usage: bench_tokenizer TOKENIZER TEXTS.jsonl PASSES\n");
        return 2;
    }
    int r = read_texts(argv[2], &texts);
    if (r < 0)
        error_set(&err, r, "%s: %s", argv[2], strerror(-r));
    uint64_t start = cpu_now_ns();
    if (r == 0)
        r = tokenizer_open(argv[1], &tok, &err);
    uint64_t open_ns = cpu_now_ns() - start;
    for (int i = 0; i < atoi(argv[3]) && r == 0; i++) {
        r = pass(tok, &texts, &ids, &n_tokens, &ns, &err);
        if (i == 0)
            first = ns;
        else if (ns < best)
            best = ns;
    }
    if (r == 0)
        printf("{\"open_ms\": %.1f, \"first_mb_s\": %.2f, \"mb_s\": %.2f, \"tokens\": %zu, \"bytes\": %zu}\n", (double)open_ns / 1e6, (double)texts.bytes * 1e3 / (double)first,
               (double)texts.bytes * 1e3 / (double)(best == UINT64_MAX ? first : best), n_tokens, texts.bytes);
    else
        fprintf(stderr, "bench_tokenizer: %s\n", err.text);
    token_ids_fini(&ids);
    tokenizer_close(tok);
    free_texts(&texts);
    return r < 0 ? 1 : 0;
}
