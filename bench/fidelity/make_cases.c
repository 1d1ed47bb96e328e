/* Texts are encoded piece by piece (document, question, answer) and their ids joined, so that an answer's tokens do not depend on what stands before it. */
#include "bench/fidelity/make_cases.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TEXT_CHARACTERS = 400000,
    LIST_WORDS = 48,
    LIST_FREE = 4,       /* words of the second list that nothing announces yet */
    LIST_OVERHEAD = 60,  /* tokens of a length that the lists take beside the news */
    NEEDLE_OVERHEAD = 120,
    FACTS = 6,
};

int draw_below(struct draw *d, int n)
{
    uint64_t x = d->state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (int)((x ^ (x >> 31)) % (uint64_t)n);
}

static int encode(const struct case_params *p, const char *text, size_t len, struct token_ids *ids, struct error *err)
{
    return tokenizer_encode(p->tok, text, len, 0, ids, err);
}

static int encode_str(const struct case_params *p, const char *text, struct token_ids *ids, struct error *err)
{
    return encode(p, text, strlen(text), ids, err);
}

/* Bytes of the first n characters. */
static size_t prefix_bytes(const struct buf *text, size_t n)
{
    size_t i = 0;
    for (size_t seen = 0; i < text->len; i++) {
        if ((text->data[i] & 0xc0) != 0x80 && seen++ == n)
            break;
    }
    return i;
}

/* ---- news ---- */

int make_kl_cases(struct case_set *set, const struct case_params *p, int n, int n_prompt, int n_rows, struct error *err)
{
    const int64_t want = (int64_t)n * (n_prompt + n_rows + 1);
    struct token_ids ids = {.n = 0};
    size_t characters = TEXT_CHARACTERS, bytes;
    int r;
    do {
        bytes = prefix_bytes(&p->source->text, characters);
        ids.n = 0;
        r = encode(p, (const char *)p->source->text.data, bytes, &ids, err);
        characters *= 2;
    } while (r >= 0 && (int64_t)ids.n < want && bytes < p->source->text.len);
    if (r >= 0 && (int64_t)ids.n < n_prompt + n_rows + 1 + n - 1)
        r = error_set(err, -ENODATA, "the text has %zu tokens: too few for %d contexts of %d and %d behind them", ids.n, n, n_prompt, n_rows);
    const int64_t step = r >= 0 ? ((int64_t)ids.n - n_prompt - n_rows - 1) / n : 0;
    for (int i = 0; r >= 0 && i < n; i++)
        r = case_set_add(set, ids.data + i * step, n_prompt, n_rows, &(struct case_info){.sample = i});
    token_ids_fini(&ids);
    return r == -ENOMEM ? error_set(err, r, "no memory for the contexts") : r;
}

/* ---- pieces of the other tasks ---- */

/* Sentences from a random place on, about n_tokens of them, in `sentences` [n <= max]; returns n. */
static int draw_filler(const struct case_params *p, struct draw *d, int n_tokens, const char **sentences, int max, struct error *err)
{
    struct token_ids ids = {.n = 0};
    const int start = draw_below(d, p->source->n_sentences);
    int n = 0, r = 0;
    while (r >= 0 && n < max && (int64_t)ids.n < n_tokens) {
        char spaced[256];
        sentences[n] = p->source->sentences[(start + n) % p->source->n_sentences];
        snprintf(spaced, sizeof(spaced), " %s", sentences[n++]);
        r = encode_str(p, spaced, &ids, err);
    }
    token_ids_fini(&ids);
    return r < 0 ? r : n;
}

static int append_sentence(struct buf *doc, const char *sentence)
{
    const int r = doc->len ? buf_append_str(doc, " ") : 0;
    return r < 0 ? r : buf_append_str(doc, sentence);
}

/* One case: document and question as prompt and answer scored from its scored_from-th token on. Question behind the prompt when not seen; its last token is fed in any case, since a
 * row needs a token. */
static int add_question(struct case_set *set, const struct token_ids *doc, const struct token_ids *question, const struct token_ids *answer, int scored_from,
                        bool seen, int label, int sample)
{
    struct token_ids all = {.n = 0};
    const struct token_ids *parts[] = {doc, question, answer};
    int r = doc->n && question->n && answer->n > (size_t)scored_from ? 0 : -EINVAL;
    for (int i = 0; i < 3; i++)
        for (size_t k = 0; r >= 0 && k < parts[i]->n; k++)
            r = token_ids_append(&all, parts[i]->data[k]);
    const int before = seen ? (int)question->n - 1 : 0; /* question tokens inside the prompt */
    const int first = (int)question->n - 1 - before;    /* the row that predicts the answer's first token */
    const struct case_info info = {
        .label = label, .scored_first = first + scored_from, .n_scored = (int)answer->n - scored_from, .sample = sample};
    if (r >= 0)
        r = case_set_add(set, all.data, (int)doc->n + before, first + (int)answer->n, &info);
    token_ids_fini(&all);
    return r;
}

/* ---- verbatim recall ---- */

static int add_recall(struct case_set *set, const struct case_params *p, struct draw *d, int length, int label, const char **sentences, int max, struct error *err)
{
    struct token_ids doc = {.n = 0}, question = {.n = 0}, answer = {.n = 0};
    struct buf text;
    buf_init(&text, TOKENIZER_TEXT_MAX);
    int r = encode_str(p, "List:", &doc, err);
    for (int i = 0; r >= 0 && i < LIST_WORDS; i++) {
        const int32_t word = p->source->words[draw_below(d, p->source->n_words)];
        r = token_ids_append(&doc, word);
        if (r >= 0)
            r = token_ids_append(&answer, word);
    }
    const int n = r < 0 ? r : draw_filler(p, d, length - 2 * LIST_WORDS - LIST_OVERHEAD, sentences, max, err);
    r = n < 0 ? n : buf_append_str(&text, "\n\n");
    for (int i = 0; r >= 0 && i < n; i++)
        r = i ? append_sentence(&text, sentences[i]) : buf_append_str(&text, sentences[i]);
    if (r >= 0)
        r = encode(p, (const char *)text.data, text.len, &doc, err);
    if (r >= 0)
        r = encode_str(p, "\n\nList:", &question, err);
    if (r >= 0)
        r = add_question(set, &doc, &question, &answer, LIST_FREE, false, label, set->n);
    token_ids_fini(&doc);
    token_ids_fini(&question);
    token_ids_fini(&answer);
    buf_fini(&text);
    return r;
}

static int check_source(const struct case_params *p, int words, struct error *err)
{
    if (p->source->n_sentences > 0 && p->source->n_words >= words)
        return 0;
    return error_set(err, -ENODATA, "the text has %d sentences and %d words that are one token: too few for the recall and needle tasks", p->source->n_sentences,
                     p->source->n_words);
}

int make_recall_cases(struct case_set *set, const struct case_params *p, const int *lengths, int n_lengths, int samples, struct error *err)
{
    struct draw d = {.state = p->seed ^ 0x7265u};
    int r = check_source(p, LIST_WORDS, err);
    for (int i = 0; r >= 0 && i < n_lengths; i++) {
        const int max = lengths[i] / 4 + 1;
        const char **sentences = calloc((size_t)max, sizeof(*sentences));
        char text[24];
        snprintf(text, sizeof(text), "%d", lengths[i]);
        int label = r = sentences ? case_set_add_label(set, text) : -ENOMEM;
        for (int k = 0; r >= 0 && k < samples; k++)
            r = add_recall(set, p, &d, lengths[i], label, sentences, max, err);
        free(sentences);
    }
    return r == -ENOMEM || r == -ENOSPC ? error_set(err, r, "too many recall cases") : r;
}

/* ---- needles ---- */

struct needle {
    struct buf doc;
    char question[256], answer[32];
};

/* FACTS different words; a word drawn before gives way to the next one. */
static int draw_names(const struct case_params *p, struct draw *d, const char *names[FACTS], int name_bytes[FACTS])
{
    int drawn[FACTS];
    for (int i = 0; i < FACTS; i++) {
        size_t len;
        drawn[i] = draw_below(d, p->source->n_words);
        for (int k = 0; k < i; k++) {
            if (drawn[k] == drawn[i]) {
                drawn[i] = (drawn[i] + 1) % p->source->n_words;
                k = -1;
            }
        }
        const uint8_t *bytes = tokenizer_token_bytes(p->tok, p->source->words[drawn[i]], &len);
        if (!bytes || len < 2)
            return -EINVAL;
        names[i] = (const char *)bytes + 1; /* without the space */
        name_bytes[i] = (int)len - 1;
    }
    return 0;
}

static int write_passkey(struct needle *n, struct draw *d, const char **sentences, int n_sentences)
{
    const int key = 10000 + draw_below(d, 90000), at = draw_below(d, n_sentences);
    int r = buf_append_str(&n->doc, "There is important information hidden inside the text below.\n\n");
    for (int i = 0; r >= 0 && i < n_sentences; i++) {
        r = i ? append_sentence(&n->doc, sentences[i]) : buf_append_str(&n->doc, sentences[i]);
        if (r >= 0 && i == at)
            r = buf_printf(&n->doc, " The pass key is %d. Remember it.", key);
    }
    snprintf(n->question, sizeof(n->question), "\n\nWhat is the pass key? The pass key is");
    snprintf(n->answer, sizeof(n->answer), " %d", key);
    return r;
}

static int write_facts(struct needle *n, const struct case_params *p, struct draw *d, const char **sentences, int n_sentences)
{
    const char *names[FACTS];
    int name_bytes[FACTS], values[FACTS];
    const int asked = draw_below(d, FACTS);
    int r = draw_names(p, d, names, name_bytes);
    for (int i = 0; i < FACTS; i++)
        values[i] = 10000 + draw_below(d, 90000);
    /* One fact somewhere in each sixth of the text. */
    for (int i = 0, next = 0, part = 0; r >= 0 && i < n_sentences; i++) {
        if (i == part * n_sentences / FACTS && part < FACTS) {
            const int width = (part + 1) * n_sentences / FACTS - i;
            next = i + draw_below(d, width > 0 ? width : 1);
            part++;
        }
        r = append_sentence(&n->doc, sentences[i]);
        if (r >= 0 && i == next && part > 0)
            r = buf_printf(&n->doc, " The access code for %.*s is %d.", name_bytes[part - 1], names[part - 1], values[part - 1]);
    }
    if (r < 0)
        return r;
    snprintf(n->question, sizeof(n->question), "\n\nQuestion: What is the access code for %.*s?\nAnswer: The access code for %.*s is", name_bytes[asked],
             names[asked], name_bytes[asked], names[asked]);
    snprintf(n->answer, sizeof(n->answer), " %d", values[asked]);
    return 0;
}

static int add_needle(struct case_set *set, const struct case_params *p, const char *document, size_t len, const char *question_text, const char *answer_text,
                      struct error *err)
{
    struct token_ids doc = {.n = 0}, question = {.n = 0}, answer = {.n = 0};
    const int sample = set->n;
    int r = encode(p, document, len, &doc, err);
    if (r >= 0)
        r = encode_str(p, question_text, &question, err);
    if (r >= 0)
        r = encode_str(p, answer_text, &answer, err);
    for (int seen = 1; r >= 0 && seen >= 0; seen--)
        r = add_question(set, &doc, &question, &answer, 0, seen, seen ? 0 : 1, sample);
    token_ids_fini(&doc);
    token_ids_fini(&question);
    token_ids_fini(&answer);
    return r;
}

static int draw_needle(struct case_set *set, const struct case_params *p, struct draw *d, int i, const char **sentences, int max, int n_tokens, struct error *err)
{
    struct needle needle = {.question = ""};
    buf_init(&needle.doc, TOKENIZER_TEXT_MAX);
    const int n = draw_filler(p, d, n_tokens - NEEDLE_OVERHEAD, sentences, max, err);
    int r = n < 0 ? n : n < FACTS ? error_set(err, -EINVAL, "needle tasks need longer texts than %d tokens", n_tokens) : 0;
    if (r >= 0)
        r = i % 2 ? write_facts(&needle, p, d, sentences, n) : write_passkey(&needle, d, sentences, n);
    if (r >= 0)
        r = add_needle(set, p, (const char *)needle.doc.data, needle.doc.len, needle.question, needle.answer, err);
    buf_fini(&needle.doc);
    return r;
}

/* RULER: the question is the last paragraph of the input. */
static int add_ruler(struct case_set *set, const struct case_params *p, const struct text_sample *sample, struct error *err)
{
    char answer[512];
    const char *question = strrchr(sample->input, '\n');
    if (!question || question == sample->input)
        return error_set(err, -EINVAL, "a sample with outputs has no question behind a line feed");
    snprintf(answer, sizeof(answer), " %s", sample->answer);
    return add_needle(set, p, sample->input, (size_t)(question - sample->input), question, answer, err);
}

int make_needle_cases(struct case_set *set, const struct case_params *p, int samples, int n_tokens, struct error *err)
{
    struct draw d = {.state = p->seed ^ 0x6e65u};
    const int max = n_tokens / 4 + 1;
    const char **sentences = calloc((size_t)max, sizeof(*sentences));
    int r = sentences ? case_set_add_label(set, "seen") : -ENOMEM;
    if (r >= 0)
        r = case_set_add_label(set, "unseen");
    if (r >= 0 && p->source->n_samples == 0)
        r = check_source(p, FACTS, err);
    for (int i = 0; r >= 0 && i < samples; i++) {
        if (p->source->n_samples == 0)
            r = draw_needle(set, p, &d, i, sentences, max, n_tokens, err);
        else if (i < p->source->n_samples)
            r = add_ruler(set, p, &p->source->samples[i], err);
    }
    free(sentences);
    return r == -ENOMEM ? error_set(err, r, "no memory for the needle cases") : r;
}
