#include "bench/fidelity/text_source.h"
#include "formats/json.h"
#include "proto/base/base_assert.h"
#include <ctype.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TEXT_BYTES_MAX = 32 << 20,
    LINE_BYTES_MAX = 16 << 20,
    SENTENCE_MIN = 40,
    SENTENCE_END = 200,
    SENTENCES_MAX = 100000,
    WORD_MIN = 4,
    WORD_MAX = 8,
    WORDS_MAX = 200000,
};

/* ---- lines ---- */

static int add_sample(struct text_source *s, const struct json_str *input, const struct json_str *answer)
{
    if (s->n_samples == TEXT_SAMPLES_MAX)
        return 0;
    struct text_sample *samples = realloc(s->samples, ((size_t)s->n_samples + 1) * sizeof(*samples));
    if (!samples)
        return -ENOMEM;
    s->samples = samples;
    struct text_sample *sample = &samples[s->n_samples];
    sample->input = strndup(input->data, input->len);
    sample->answer = strndup(answer->data, answer->len);
    s->n_samples++;
    return sample->input && sample->answer ? 0 : -ENOMEM;
}

static void first_string(struct json *j, struct json_str *ret)
{
    json_array(j);
    for (bool first = true; json_next_item(j); first = false) {
        if (first && json_peek(j) == JSON_STRING)
            json_string(j, ret);
        else
            json_skip(j);
    }
}

static int add_text(struct text_source *s, const struct json_str *text)
{
    int r = s->text.len ? buf_append_str(&s->text, "\n\n") : 0;
    return r < 0 ? r : buf_append(&s->text, text->data, text->len);
}

static int read_line(struct text_source *s, const char *line, size_t len, const char **ret_problem)
{
    struct json j;
    struct json_str key, context = {NULL, 0}, input = {NULL, 0}, answer = {NULL, 0};
    json_init(&j, line, len);
    json_object(&j);
    while (json_next_key(&j, &key)) {
        if (json_str_eq(&key, "context"))
            json_string(&j, &context);
        else if (json_str_eq(&key, "input"))
            json_string(&j, &input);
        else if (json_str_eq(&key, "outputs"))
            first_string(&j, &answer);
        else
            json_skip(&j);
    }
    int r = json_end(&j);
    if (r < 0)
        *ret_problem = j.error_text;
    else if (context.len)
        r = add_text(s, &context);
    else if (input.len && answer.len)
        r = (r = add_text(s, &input)) < 0 ? r : add_sample(s, &input, &answer);
    json_fini(&j);
    return r;
}

static int read_lines(struct text_source *s, FILE *file, const char *path, struct error *err)
{
    char *line = NULL;
    size_t cap = 0, number = 0;
    ssize_t len;
    int r = 0;
    while (r >= 0 && (len = getline(&line, &cap, file)) >= 0) {
        const char *problem = "the file is larger than can be used";
        number++;
        if (len > LINE_BYTES_MAX)
            r = -E2BIG;
        else if (strspn(line, " \t\r\n") < (size_t)len)
            r = read_line(s, line, (size_t)len, &problem);
        if (r < 0)
            error_set(err, r, "%s, line %zu: %s", path, number, r == -ENOMEM ? "no memory" : problem);
    }
    if (r >= 0 && ferror(file))
        r = error_set(err, -EIO, "%s: reading failed", path);
    free(line);
    return r;
}

/* ---- sentences ---- */

static bool has_number(const char *text, size_t len)
{
    size_t digits = 0;
    for (size_t i = 0; i < len && digits < 3; i++)
        digits = isdigit((unsigned char)text[i]) ? digits + 1 : 0;
    return digits == 3;
}

static int add_sentence(struct text_source *s, const char *text, size_t len)
{
    while (len && isspace((unsigned char)*text))
        text++, len--;
    while (len && isspace((unsigned char)text[len - 1]))
        len--;
    if (len <= SENTENCE_MIN || len >= SENTENCE_END || s->n_sentences == SENTENCES_MAX || has_number(text, len))
        return 0;
    if ((s->n_sentences & (s->n_sentences - 1)) == 0) { /* room for the next power of two */
        const size_t cap = s->n_sentences ? 2 * (size_t)s->n_sentences : 1;
        char **sentences = realloc(s->sentences, cap * sizeof(*sentences));
        if (!sentences)
            return -ENOMEM;
        s->sentences = sentences;
    }
    char *copy = strndup(text, len);
    if (!copy)
        return -ENOMEM;
    for (size_t i = 0; i < len; i++)
        if (copy[i] == '\n')
            copy[i] = ' ';
    s->sentences[s->n_sentences++] = copy;
    return 0;
}

/* A sentence ends with . ! or ? before white space. */
static int split_sentences(struct text_source *s)
{
    const char *text = buf_cstr(&s->text);
    const size_t n = s->text.len;
    size_t start = 0;
    int r = 0;
    for (size_t i = 0; r >= 0 && i < n; i++) {
        const bool end = i + 1 == n || (strchr(".!?", text[i]) && text[i] && isspace((unsigned char)text[i + 1]));
        if (!end)
            continue;
        r = add_sentence(s, text + start, i + 1 - start);
        start = i + 1;
    }
    return r;
}

/* ---- words ---- */

struct word {
    char text[WORD_MAX + 2]; /* with a space in front */
};

static int by_text(const void *a, const void *b)
{
    return strcmp(((const struct word *)a)->text, ((const struct word *)b)->text);
}

static bool is_word_byte(unsigned char c)
{
    return isalnum(c) || c == '_' || c >= 0x80;
}

/* Collects words of the text, many times each; returns how many. */
static int collect_words(const struct text_source *s, struct word *words)
{
    const uint8_t *text = s->text.data;
    const size_t n = s->text.len;
    int found = 0;
    for (size_t i = 0, end; i < n && found < WORDS_MAX; i = end + 1) {
        for (end = i; end < n && is_word_byte(text[end]); end++)
            ;
        const size_t len = end - i;
        bool letters = len >= WORD_MIN && len <= WORD_MAX;
        for (size_t k = i; letters && k < end; k++)
            letters = isalpha(text[k]) && text[k] < 0x80;
        if (!letters)
            continue;
        struct word *w = &words[found++];
        *w = (struct word){.text = " "};
        for (size_t k = 0; k < len && k < WORD_MAX; k++)
            w->text[k + 1] = (char)tolower(text[i + k]);
    }
    return found;
}

static int keep_single_tokens(struct text_source *s, struct word *words, int n, const struct tokenizer *tok, struct error *err)
{
    struct token_ids ids = {.n = 0};
    int r = 0;
    qsort(words, (size_t)n, sizeof(*words), by_text);
    s->words = malloc(((size_t)n + 1) * sizeof(*s->words));
    if (!s->words)
        return -ENOMEM;
    for (int i = 0; r >= 0 && i < n; i++) {
        if (i && strcmp(words[i].text, words[i - 1].text) == 0)
            continue;
        ids.n = 0;
        r = tokenizer_encode(tok, words[i].text, strlen(words[i].text), 0, &ids, err);
        if (r >= 0 && ids.n == 1)
            s->words[s->n_words++] = ids.data[0];
    }
    token_ids_fini(&ids);
    return r;
}

static int find_words(struct text_source *s, const struct tokenizer *tok, struct error *err)
{
    struct word *words = malloc(WORDS_MAX * sizeof(*words));
    if (!words)
        return -ENOMEM;
    int r = keep_single_tokens(s, words, collect_words(s, words), tok, err);
    free(words);
    return r;
}

int text_source_load(struct text_source *s, const char *path, const struct tokenizer *tok, struct error *err)
{
    *s = (struct text_source){.n_samples = 0};
    buf_init(&s->text, TEXT_BYTES_MAX);
    FILE *file = fopen(path, "re");
    if (!file)
        return error_set(err, -errno, "--texts %s: %s", path, strerror(errno));
    int r = read_lines(s, file, path, err);
    fclose(file);
    if (r < 0)
        return r;
    if (s->text.len == 0)
        return error_set(err, -ENOTSUP, "%s: no line has \"context\" (LongBench) or \"input\" and \"outputs\" (RULER)", path);
    r = split_sentences(s);
    if (r >= 0)
        r = find_words(s, tok, err);
    return r == -ENOMEM ? error_set(err, r, "no memory for the text of %s", path) : r;
}

void text_source_fini(struct text_source *s)
{
    for (int i = 0; i < s->n_samples; i++) {
        free(s->samples[i].input);
        free(s->samples[i].answer);
    }
    for (int i = 0; i < s->n_sentences; i++)
        free(s->sentences[i]);
    free(s->samples);
    free(s->sentences);
    free(s->words);
    buf_fini(&s->text);
    *s = (struct text_source){.n_samples = 0};
}
