/* Text and seed to cases: what is asked, where it stands, and that the same seed asks the same. The tokenizer knows some words whole. */
#include "bench/fidelity/make_cases.h"
#include "tests/unit/tiny_tokenizer.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const words[] = {"tide", "pool", "stone", "water", "light", "green", "north", "shore", "storm", "bird"};
enum { N_WORDS = 10 };

static const char space[] = "\xc4\xa0"; /* as the vocabulary spells it */

/* Printable characters, space and line feed, then every beginning of a word, then the words with a space in front. */
static void write_vocab(struct json_writer *w)
{
    int id = 0;
    char name[32];
    json_write_object(w);
    for (int c = 33; c < 127; c++) {
        snprintf(name, sizeof(name), "%c", c);
        json_write_kint(w, name, id++);
    }
    json_write_kint(w, space, id++);
    json_write_kint(w, "\xc4\x8a", id++);
    for (int i = 0; i < N_WORDS; i++) {
        for (int n = 2; n <= (int)strlen(words[i]); n++) {
            snprintf(name, sizeof(name), "%.*s", n, words[i]);
            bool before = false;
            for (int k = 0; k < i; k++)
                before = before || strncmp(words[k], name, (size_t)n) == 0;
            if (!before)
                json_write_kint(w, name, id++);
        }
        snprintf(name, sizeof(name), "%s%s", space, words[i]);
        json_write_kint(w, name, id++);
    }
    json_write_object_end(w);
}

static void write_merges(struct json_writer *w)
{
    char merge[40];
    json_write_array(w);
    for (int i = 0; i < N_WORDS; i++)
        for (int n = 1; n < (int)strlen(words[i]); n++) {
            bool before = false;
            for (int k = 0; k < i; k++)
                before = before || strncmp(words[k], words[i], (size_t)n + 1) == 0;
            snprintf(merge, sizeof(merge), "%.*s %c", n, words[i], words[i][n]);
            if (!before)
                json_write_str(w, merge);
        }
    for (int i = 0; i < N_WORDS; i++) {
        snprintf(merge, sizeof(merge), "%s %s", space, words[i]);
        json_write_str(w, merge);
    }
    json_write_array_end(w);
}

static void write_added(struct json_writer *w)
{
    json_write_array(w);
    json_write_array_end(w);
}

static char path[64];
static struct tokenizer *tok;
static struct text_source source;
static struct case_params params;

static void write_texts(const char *text)
{
    FILE *file;
    strcpy(path, "/tmp/tidepool-texts-XXXXXX");
    const int fd = mkstemp(path);
    cr_assert(fd >= 0 && (file = fdopen(fd, "w")));
    fputs(text, file);
    fclose(file);
}

static void setup_news(void)
{
    char line[4096] = "{\"input\": \"\", \"context\": \"";
    for (int i = 0; i < 40; i++)
        strcat(strcat(strcat(line, "The "), words[i % N_WORDS]), " and the water of the tide pool rose. ");
    strcat(line, "Some 1234 numbers make this sentence useless as filler text.\"}\n");
    write_texts(line);
    tok = bpe_tokenizer_open(write_added, write_vocab, write_merges);
    struct error err;
    cr_assert_eq(text_source_load(&source, path, tok, &err), 0, "%s", err.text);
    params = (struct case_params){.source = &source, .tok = tok, .seed = 7};
}

static void teardown(void)
{
    text_source_fini(&source);
    tokenizer_close(tok);
    unlink(path);
}
TestSuite(fidelity_cases, .init = setup_news, .fini = teardown);

static char *decode(const int32_t *ids, int n)
{
    struct buf text;
    buf_init(&text, 1 << 20);
    cr_assert_eq(tokenizer_decode(tok, ids, (size_t)n, false, &text), 0);
    char *copy = strdup(buf_cstr(&text));
    buf_fini(&text);
    return copy;
}

Test(fidelity_cases, test_text_gives_sentences_and_words)
{
    cr_assert_eq(source.n_sentences, 40, "%d", source.n_sentences);
    for (int i = 0; i < source.n_sentences; i++)
        cr_assert_null(strstr(source.sentences[i], "1234"));
    cr_assert_eq(source.n_words, N_WORDS, "%d words are one token", source.n_words);
}

Test(fidelity_cases, test_news_contexts_are_spread_and_followed_by_their_text)
{
    struct case_set set;
    struct error err;
    case_set_init(&set, TASK_KL);
    cr_assert_eq(make_kl_cases(&set, &params, 3, 100, 20, &err), 0, "%s", err.text);
    cr_assert(set.n == 3 && set.cases[0].n_prompt == 100 && set.cases[0].n_fed == 20);
    cr_assert(memcmp(set.cases[0].tokens, set.cases[1].tokens, 100 * sizeof(int32_t)) != 0);
    char *text = decode(set.cases[2].tokens, 121);
    cr_assert(strstr(buf_cstr(&source.text), text), "a context is a piece of the text, continuation and last target included: %s", text);
    free(text);
    case_set_fini(&set);
    cr_assert_eq(make_kl_cases(&set, &params, 1, 100000, 20, &err), -ENODATA);
    case_set_fini(&set);
}

Test(fidelity_cases, test_recall_asks_the_list_again)
{
    static const int lengths[] = {256, 400};
    struct case_set set, again;
    struct error err;
    /* The pool of words is small: 48 are drawn from ten, which only this test does. */
    struct text_source repeated = source;
    int32_t many[60];
    for (int i = 0; i < 60; i++)
        many[i] = source.words[i % N_WORDS];
    repeated.words = many;
    repeated.n_words = 60;
    params.source = &repeated;
    case_set_init(&set, TASK_RECALL);
    cr_assert_eq(make_recall_cases(&set, &params, lengths, 2, 2, &err), 0, "%s", err.text);
    cr_assert(set.n == 4 && set.n_labels == 2 && set.info[3].label == 1);
    for (int i = 0; i < set.n; i++) {
        const struct fidelity_case *c = &set.cases[i];
        const struct case_info *info = &set.info[i];
        const int target = c->n_prompt + info->scored_first + 1; /* token that the first scored row predicts */
        cr_assert_eq(info->n_scored, 44);
        cr_assert_eq(target + 44, c->n_prompt + c->n_fed + 1, "the last word is the last target");
        char *list = decode(c->tokens + target - 4, 48), *whole = decode(c->tokens, c->n_prompt), *question = decode(c->tokens + c->n_prompt, target - 4 - c->n_prompt);
        cr_assert(strncmp(whole, "List:", 5) == 0 && strncmp(whole + 5, list, strlen(list)) == 0, "%s / %s", whole, list);
        cr_assert_str_eq(question, "\n\nList:", "the question stands behind the prompt");
        cr_assert(abs(c->n_prompt + c->n_fed - lengths[info->label]) < 80, "%d tokens for %d", c->n_prompt + c->n_fed, lengths[info->label]);
        free(list);
        free(whole);
        free(question);
    }
    case_set_init(&again, TASK_RECALL);
    cr_assert_eq(make_recall_cases(&again, &params, lengths, 2, 2, &err), 0);
    for (int i = 0; i < set.n; i++)
        cr_assert(memcmp(set.cases[i].tokens, again.cases[i].tokens, (size_t)set.cases[i].n_prompt * sizeof(int32_t)) == 0, "the same seed");
    case_set_fini(&set);
    case_set_fini(&again);
}

Test(fidelity_cases, test_needles_are_in_the_text_and_asked_twice)
{
    struct case_set set;
    struct error err;
    case_set_init(&set, TASK_NEEDLE);
    cr_assert_eq(make_needle_cases(&set, &params, 6, 400, &err), 0, "%s", err.text);
    cr_assert_eq(set.n, 12);
    for (int i = 0; i < set.n; i += 2) {
        const struct fidelity_case *seen = &set.cases[i], *unseen = &set.cases[i + 1];
        const struct case_info *a = &set.info[i], *b = &set.info[i + 1];
        const int total = seen->n_prompt + seen->n_fed + 1;
        cr_assert_eq(total, unseen->n_prompt + unseen->n_fed + 1);
        cr_assert(memcmp(seen->tokens, unseen->tokens, (size_t)total * sizeof(int32_t)) == 0, "the same tokens, split elsewhere");
        cr_assert(a->sample == b->sample && a->label == 0 && b->label == 1);
        cr_assert(seen->n_prompt > unseen->n_prompt && a->n_scored == b->n_scored && a->scored_first == 0);
        cr_assert_eq(seen->n_prompt + a->scored_first, unseen->n_prompt + b->scored_first);
        char *doc = decode(unseen->tokens, unseen->n_prompt), *answer = decode(unseen->tokens + total - b->n_scored, b->n_scored);
        cr_assert(answer[0] == ' ' && strlen(answer) == 6 && strstr(doc, answer), "%s in %s", answer, doc);
        int facts = 0;
        for (const char *at = doc; (at = strstr(at, i / 2 % 2 ? "The access code for " : "The pass key is ")); at++)
            facts++;
        cr_assert_eq(facts, i / 2 % 2 ? 6 : 1);
        free(doc);
        free(answer);
    }
    case_set_fini(&set);
}

Test(fidelity_ruler, test_questions_of_the_file_are_used)
{
    struct case_set set;
    struct error err;
    write_texts("{\"index\": 0, \"input\": \"The tide pool hides 77.\\nWhat number hides the pool? The number is\", \"outputs\": [\"77\", \"78\"]}\n");
    tok = bpe_tokenizer_open(write_added, write_vocab, write_merges);
    cr_assert_eq(text_source_load(&source, path, tok, &err), 0, "%s", err.text);
    params = (struct case_params){.source = &source, .tok = tok};
    case_set_init(&set, TASK_NEEDLE);
    cr_assert_eq(make_needle_cases(&set, &params, 5, 100, &err), 0, "%s", err.text);
    cr_assert_eq(set.n, 2);
    char *text = decode(set.cases[1].tokens, set.cases[1].n_prompt);
    cr_assert_str_eq(text, "The tide pool hides 77.");
    free(text);
    case_set_fini(&set);
    teardown();
}

Test(fidelity_ruler, test_bad_files_are_refused_with_the_line)
{
    static const struct {
        const char *text, *named;
        int error;
    } files[] = {
        {"{\"context\": \"fine\"}\n{\"context\": 5}\n", "line 2", -EINVAL},
        {"not json\n", "line 1", -EINVAL},
        {"{\"other\": 1}\n\n", "no line has", -ENOTSUP},
    };
    tok = bpe_tokenizer_open(write_added, write_vocab, write_merges);
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        struct error err = {""};
        write_texts(files[i].text);
        cr_assert_eq(text_source_load(&source, path, tok, &err), files[i].error, "%zu: %s", i, err.text);
        cr_assert(strstr(err.text, files[i].named), "%s", err.text);
        text_source_fini(&source);
        unlink(path);
    }
    tokenizer_close(tok);
}
