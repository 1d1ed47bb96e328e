#include "proto/base/base_assert.h"
#include "router/text/bpe.h"
#include "router/text/tokenizer.h"
#include "proto/base/utf8.h"
#include "router/text/word_cache.h"
#include "tests/unit/tokenizer_make.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>

static uint64_t random_next(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

#define SPECIAL(text) "\"content\":\"" text "\",\"special\":true,\"normalized\":false"

/* Tokens that overlap, contain and begin one another, one of a single character, and one that is no special token. */
static const char *const chat_tokens[] = {
    SPECIAL("<|im_start|>"), SPECIAL("<|im_end|>"), SPECIAL("<|im"), SPECIAL("m_e"), SPECIAL("\xc2\xa7"), SPECIAL("aXb"), SPECIAL("bXa"), SPECIAL("[INST]"), "\"content\":\"tool\",\"special\":false,\"normalized\":false",
};

static void append_encoded(const struct tokenizer *tok, const char *text, size_t len, int flags, struct token_ids *ids)
{
    struct error err = {.text = ""};
    cr_assert_eq(tokenizer_encode(tok, text, len, flags, ids, &err), 0, "%s", err.text);
}

static void append_special(const struct tokenizer *tok, const char *text, struct buf *rendered, struct token_ids *ids)
{
    int32_t id = tokenizer_special_id(tok, text, strlen(text));
    cr_assert_neq(id, TOKEN_NONE);
    buf_append_str(rendered, text);
    cr_assert_eq(token_ids_append(ids, id), 0);
}

/* What a user wrote: pieces of special tokens, whole ones, the marks themselves. */
static size_t hostile_text(uint64_t *rng, char *text)
{
    static const char *const pieces[] = {"<", "|", "<|", "im", "_", "start", "|>", "<|im_start|>", "<|im_end|>", "<|im", "m_e", "\xc2\xa7", "aXb", "bXa", "X", "a", "b", "[INST]", "[INST", "]", " ", "\n", "tool",
                                         "\xef\xb7\x90", "\xef\xb7\x91", "\xef\xb7\x92", "\xef\xb7\x93", "\xef\xb7\x94", "\xef\xb7\x95", "\xef\xb7", "\xc3\xa9", "end", "_end|>", "nd|>"};
    size_t len = 0;
    for (uint64_t n = random_next(rng) % 9; n > 0; n--) {
        const char *piece = pieces[random_next(rng) % ARRAY_LEN(pieces)];
        size_t size = strlen(piece);
        if (utf8_valid_len(piece, size) < size)
            continue;
        memcpy(text + len, piece, size);
        len += size;
    }
    return len;
}

/* Two texts of users in a template: special tokens come out where the template has them and nowhere else, and the rest as if each stretch between them
 * had been encoded as plain text. */
static void check_rendered(const struct tokenizer *tok, uint64_t *rng)
{
    char first[256], second[256];
    size_t n_first = hostile_text(rng, first), n_second = hostile_text(rng, second);
    bool joined = random_next(rng) % 2, label = random_next(rng) % 2;
    struct buf rendered, plain;
    struct token_ids want = {0}, got = {0};
    buf_init(&rendered, 1 << 16);
    buf_init(&plain, 1 << 16);
    append_special(tok, "<|im_start|>", &rendered, &want);
    if (label) {
        buf_append_str(&rendered, "user\n");
        buf_append_str(&plain, "user\n");
    }
    cr_assert_eq(tokenizer_neutralize(tok, first, n_first, &rendered), 0);
    buf_append(&plain, first, n_first);
    if (!joined) {
        append_encoded(tok, (const char *)plain.data, plain.len, 0, &want);
        buf_clear(&plain);
        append_special(tok, "<|im_end|>", &rendered, &want);
    }
    cr_assert_eq(tokenizer_neutralize(tok, second, n_second, &rendered), 0);
    buf_append(&plain, second, n_second);
    append_encoded(tok, (const char *)plain.data, plain.len, 0, &want);
    append_special(tok, "\xc2\xa7", &rendered, &want);
    append_encoded(tok, (const char *)rendered.data, rendered.len, TOKENIZE_RENDERED, &got);
    cr_assert(got.n == want.n && memcmp(got.data, want.data, got.n * sizeof *got.data) == 0, "rendered <%s>", buf_cstr(&rendered));
    token_ids_fini(&want);
    token_ids_fini(&got);
    buf_fini(&rendered);
    buf_fini(&plain);
}

Test(tokenizer, test_neutralized_text_stays_text)
{
    struct tokenizer *tok = tokenizer_make(chat_tokens, ARRAY_LEN(chat_tokens));
    uint64_t rng = 5;
    for (int i = 0; i < 30000; i++)
        check_rendered(tok, &rng);
    tokenizer_close(tok);
}

Test(tokenizer, test_text_cannot_complete_a_token_begun_by_the_template)
{
    static const char *const tokens[] = {SPECIAL("<|im_start|>"), SPECIAL("[INST]"), SPECIAL("aXb")};
    /* Template, text, template. */
    static const char *const around[][3] = {{"<|im_", "start|>", ""}, {"", "<|im_st", "art|>"}, {"<|", "im_start", "|>"}, {"[INS", "T]", ""}, {"", "[", "INST]"}, {"aX", "b", ""}, {"a", "X", "b"}};
    struct tokenizer *tok = tokenizer_make(tokens, ARRAY_LEN(tokens));
    for (size_t i = 0; i < ARRAY_LEN(around); i++) {
        struct buf rendered, text;
        struct token_ids ids = {0};
        char whole[64];
        buf_init(&rendered, 4096);
        buf_init(&text, 4096);
        snprintf(whole, sizeof whole, "%s%s%s", around[i][0], around[i][1], around[i][2]);
        buf_append_str(&rendered, around[i][0]);
        cr_assert_eq(tokenizer_neutralize(tok, around[i][1], strlen(around[i][1]), &rendered), 0);
        buf_append_str(&rendered, around[i][2]);
        append_encoded(tok, (const char *)rendered.data, rendered.len, TOKENIZE_RENDERED, &ids);
        for (size_t k = 0; k < ids.n; k++)
            cr_assert_not(tokenizer_is_special(tok, ids.data[k]), "case %zu", i);
        cr_assert_eq(tokenizer_decode(tok, ids.data, ids.n, false, &text), 0);
        cr_assert_str_eq(buf_cstr(&text), whole);
        buf_fini(&text);
        buf_fini(&rendered);
        token_ids_fini(&ids);
    }
    tokenizer_close(tok);
}

Test(tokenizer, test_harmless_text_is_not_marked)
{
    struct tokenizer *tok = tokenizer_make(chat_tokens, 3);
    static const char text[] = "What is a tide pool? 1 < 2 and 3 | 4.\n";
    struct buf out;
    buf_init(&out, 4096);
    cr_assert_eq(tokenizer_neutralize(tok, text, strlen(text), &out), 0);
    cr_assert_str_eq(buf_cstr(&out), text);
    cr_assert_eq(tokenizer_neutralize(tok, "\xff", 1, &out), -EILSEQ);
    buf_fini(&out);
    tokenizer_close(tok);
}

Test(tokenizer, test_conditions_of_added_tokens)
{
    static const char *const added[] = {"\"content\":\"<l>\",\"lstrip\":true,\"normalized\":false", "\"content\":\"<r>\",\"rstrip\":true,\"normalized\":false", "\"content\":\"abc\",\"single_word\":true",
                                        "\"content\":\"<l><l>\",\"normalized\":false"};
    struct tokenizer *tok = tokenizer_make(added, ARRAY_LEN(added));
    int32_t l = 265, r = 266, word = 267, twice = 268, abc = 257;
    static const struct {
        const char *text;
        int32_t want[6];
    } cases[] = {
        {"a \n <l>b", {'a', 265, 'b', -1}}, {"a<r> \n b", {'a', 266, 'b', -1}}, {"<r>  <l>", {266, 265, -1}}, {"abc", {267, -1}}, {"abcb", {257, 'b', -1}}, {"<l><l><l>", {268, 265, -1}},
    };
    cr_assert(l != r && word != twice && abc != word);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct token_ids ids = {0};
        size_t n = 0;
        append_encoded(tok, cases[i].text, strlen(cases[i].text), 0, &ids);
        while (cases[i].want[n] >= 0)
            n++;
        cr_assert(ids.n == n && memcmp(ids.data, cases[i].want, n * sizeof(int32_t)) == 0, "case %zu", i);
        token_ids_fini(&ids);
    }
    tokenizer_close(tok);
}

/* BPE as it is defined: merge the leftmost pair of the lowest rank until there is none. */
static size_t merge_slowly(const struct bpe *b, int32_t *symbols, size_t n)
{
    for (;;) {
        uint32_t best = UINT32_MAX;
        size_t at = 0;
        int32_t id = 0;
        for (size_t i = 0; i + 1 < n; i++)
            for (size_t k = 0; k <= b->mask; k++)
                if (b->pairs[k].key == ((uint64_t)(uint32_t)symbols[i] << 32 | (uint32_t)symbols[i + 1]) && b->pairs[k].rank < best) {
                    best = b->pairs[k].rank;
                    at = i;
                    id = b->pairs[k].id;
                }
        if (best == UINT32_MAX)
            return n;
        symbols[at] = id;
        n--;
        for (size_t i = at + 1; i < n; i++)
            symbols[i] = symbols[i + 1];
    }
}

/* A random model over four bytes whose tokens are joined at random, ranks shared now and then. */
static void random_model(struct vocab *v, struct bpe *b, uint64_t *rng, bool shared_ranks)
{
    vocab_init(v, true);
    bpe_init(b, v, false);
    cr_assert_eq(bpe_reserve(b, 40), 0);
    for (int i = 0; i < 4; i++)
        cr_assert_eq(vocab_set(v, i, &"abcd"[i], 1, NULL, 0, VOCAB_KEY), 0);
    for (int id = 4; id < 24; id++) {
        char text[512];
        int32_t left = (int32_t)(random_next(rng) % (uint64_t)id), right = (int32_t)(random_next(rng) % (uint64_t)id);
        size_t n_left, n_right;
        const uint8_t *l = vocab_key(v, left, &n_left);
        memcpy(text, l, n_left);
        const uint8_t *r = vocab_key(v, right, &n_right);
        if (n_left + n_right > 64)
            continue;
        memcpy(text + n_left, r, n_right);
        cr_assert_eq(vocab_set(v, id, text, n_left + n_right, NULL, 0, VOCAB_KEY), 0);
        cr_assert_eq(bpe_add(b, left, right, shared_ranks ? (uint32_t)id / 3 : (uint32_t)id, id), 0);
    }
    cr_assert_eq(vocab_index(v), 0);
    bpe_finish(b);
}

Test(tokenizer, test_bpe_equals_its_definition)
{
    uint64_t rng = 9;
    struct bpe_work work = {0};
    for (int round = 0; round < 60; round++) {
        struct vocab v;
        struct bpe b;
        random_model(&v, &b, &rng, round % 2);
        for (int k = 0; k < 12; k++) {
            uint8_t piece[200];
            int32_t symbols[200];
            size_t n = random_next(&rng) % sizeof piece;
            for (size_t i = 0; i < n; i++) {
                piece[i] = (uint8_t)"abcd"[random_next(&rng) % 4];
                symbols[i] = piece[i] - 'a';
            }
            int64_t got = bpe_encode(&b, &work, piece, n);
            size_t want = merge_slowly(&b, symbols, n);
            cr_assert(got == (int64_t)want && memcmp(work.symbols, symbols, want * sizeof *symbols) == 0, "round %d", round);
        }
        bpe_fini(&b);
        vocab_fini(&v);
    }
    bpe_work_fini(&work);
}

Test(tokenizer, test_detokenizer_equals_decode)
{
    struct tokenizer *tok = tokenizer_make(chat_tokens, 3);
    uint64_t rng = 21;
    for (int round = 0; round < 3000; round++) {
        struct detok d;
        struct buf streamed, whole, bytes, repaired;
        struct token_ids ids = {0};
        buf_init(&streamed, 1 << 16);
        buf_init(&whole, 1 << 16);
        buf_init(&bytes, 1 << 16);
        buf_init(&repaired, 1 << 16);
        /* Bytes at random, mostly those of multi-byte characters. */
        for (uint64_t n = random_next(&rng) % 30; n > 0; n--)
            cr_assert_eq(token_ids_append(&ids, (int32_t)(random_next(&rng) % 3 ? 0x80 + random_next(&rng) % 0x80 : random_next(&rng) % 267)), 0);
        detok_init(&d, tok, round % 2, false);
        for (size_t i = 0; i < ids.n; i++) {
            struct detok_piece piece;
            cr_assert_eq(detok_push(&d, ids.data[i], &streamed, &piece), 0);
            cr_assert_eq(piece.text_offset, bytes.len);
            buf_append(&bytes, piece.bytes, piece.n_bytes);
            cr_assert_eq(utf8_valid_len(streamed.data ? streamed.data : (const uint8_t *)"", streamed.len), streamed.len);
        }
        cr_assert_eq(detok_flush(&d, &streamed), 0);
        cr_assert_eq(tokenizer_decode(tok, ids.data, ids.n, round % 2, &whole), 0);
        cr_assert(bytes.len == whole.len && memcmp(buf_cstr(&bytes), buf_cstr(&whole), whole.len) == 0);
        utf8_append_text(&repaired, whole.data, whole.len, true);
        cr_assert(streamed.len == repaired.len && memcmp(buf_cstr(&streamed), buf_cstr(&repaired), repaired.len) == 0);
        token_ids_fini(&ids);
        buf_fini(&streamed);
        buf_fini(&whole);
        buf_fini(&bytes);
        buf_fini(&repaired);
    }
    tokenizer_close(tok);
}

Test(tokenizer, test_detokenizer_holds_back_halves)
{
    struct tokenizer *tok = tokenizer_make(NULL, 0);
    struct detok d;
    struct buf out;
    buf_init(&out, 100);
    detok_init(&d, tok, true, false);
    static const int32_t ids[] = {0xf0, 0x9f, 0x98, 0x80, 0xe2, 'a', 0xc3};
    static const char *const want[] = {"", "", "", "\xf0\x9f\x98\x80", "\xf0\x9f\x98\x80", "\xf0\x9f\x98\x80\xef\xbf\xbd" "a", "\xf0\x9f\x98\x80\xef\xbf\xbd" "a"};
    for (size_t i = 0; i < ARRAY_LEN(ids); i++) {
        cr_assert_eq(detok_push(&d, ids[i], &out, NULL), 0);
        cr_assert_str_eq(buf_cstr(&out), want[i]);
    }
    cr_assert_eq(detok_flush(&d, &out), 0);
    cr_assert_str_eq(buf_cstr(&out), "\xf0\x9f\x98\x80\xef\xbf\xbd" "a\xef\xbf\xbd");
    cr_assert_eq(detok_push(&d, 5000, &out, NULL), -ERANGE);
    buf_fini(&out);
    tokenizer_close(tok);
}

Test(tokenizer, test_text_that_is_not_utf8_is_refused)
{
    struct tokenizer *tok = tokenizer_make(NULL, 0);
    struct token_ids ids = {0};
    struct error err;
    append_encoded(tok, "abc", 3, 0, &ids);
    cr_assert_eq(tokenizer_encode(tok, "abc\xc3", 4, 0, &ids, &err), -EILSEQ);
    cr_assert(strstr(err.text, "byte 3"));
    cr_assert_eq(ids.n, 1);
    token_ids_fini(&ids);
    tokenizer_close(tok);
}

/* Threads. */

struct shared {
    const struct tokenizer *tok;
    const char *text;
    const struct token_ids *want;
    bool same;
};

static void *encode_often(void *arg)
{
    struct shared *s = arg;
    struct token_ids ids = {0};
    s->same = true;
    for (int i = 0; i < 200; i++) {
        ids.n = 0;
        s->same &= tokenizer_encode(s->tok, s->text, strlen(s->text), 0, &ids, NULL) == 0 && ids.n == s->want->n && memcmp(ids.data, s->want->data, ids.n * sizeof *ids.data) == 0;
    }
    token_ids_fini(&ids);
    return NULL;
}

Test(tokenizer, test_threads_share_a_tokenizer)
{
    struct tokenizer *tok = tokenizer_make(NULL, 0);
    static char text[20000];
    uint64_t rng = 2;
    for (size_t i = 0; i + 1 < sizeof text; i++)
        text[i] = "abc  "[random_next(&rng) % 5];
    struct token_ids want = {0};
    append_encoded(tok, text, strlen(text), 0, &want);
    pthread_t threads[4];
    struct shared shared[4];
    for (int i = 0; i < 4; i++) {
        shared[i] = (struct shared){.tok = tok, .text = text, .want = &want};
        cr_assert_eq(pthread_create(&threads[i], NULL, encode_often, &shared[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        cr_assert(shared[i].same);
    }
    token_ids_fini(&want);
    tokenizer_close(tok);
}

static void *use_one_entry(void *arg)
{
    struct word_cache *cache = arg;
    for (uint32_t i = 0; i < 10000000; i++) {
        uint32_t n = i % 2 + 1;
        struct short_key key = {.w = {n, n * 3, n * 5, n * 7}};
        int32_t ids[WORD_CACHE_IDS_MAX], same[WORD_CACHE_IDS_MAX] = {(int32_t)n, (int32_t)n, (int32_t)n, (int32_t)n, (int32_t)n, (int32_t)n};
        size_t found = word_cache_get(cache, &key, 32, 0, ids);
        if (found && (found != n % 6 + 1 || memcmp(ids, same, found * sizeof *ids) != 0))
            return (void *)1;
        word_cache_put(cache, &key, 32, 0, same, n % 6 + 1);
    }
    return NULL;
}

Test(tokenizer, test_word_cache_never_gives_a_torn_entry)
{
    struct word_cache *cache;
    pthread_t threads[4];
    void *torn;
    cr_assert_eq(word_cache_create(4, &cache), 0);
    for (int i = 0; i < 4; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, use_one_entry, cache), 0);
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], &torn);
        cr_assert_null(torn);
    }
    word_cache_free(cache);
}
