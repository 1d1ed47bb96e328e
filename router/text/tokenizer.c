#include "router/text/tokenizer.h"
#include "formats/gguf.h"
#include "router/text/char_class.h"
#include "router/text/tokenizer_private.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define TOKENIZER_JSON_MAX ((size_t)512 << 20)

struct tokenizer *tokenizer_alloc(void)
{
    struct tokenizer *tok = char_table_init() == 0 ? calloc(1, sizeof *tok) : NULL;
    if (!tok)
        return NULL;
    vocab_init(&tok->vocab, true);
    bpe_init(&tok->bpe, &tok->vocab, false);
    text_trie_init(&tok->raw);
    text_trie_init(&tok->normalized);
    text_trie_init(&tok->specials);
    tok->bos = tok->eos = tok->eot = TOKEN_NONE;
    return tok;
}

void tokenizer_close(struct tokenizer *tok)
{
    if (!tok)
        return;
    word_cache_free(tok->cache);
    free(tok->chat_template);
    neutralize_tails_fini(&tok->tails);
    text_trie_fini(&tok->specials);
    text_trie_fini(&tok->normalized);
    text_trie_fini(&tok->raw);
    free(tok->added);
    pretokenizer_fini(&tok->pretokenizer);
    normalizer_fini(&tok->normalizer);
    bpe_fini(&tok->bpe);
    vocab_fini(&tok->vocab);
    free(tok);
}

int tokenizer_add_token(struct tokenizer *tok, const struct added_token *token)
{
    if (tok->n_added == ADDED_TOKENS_MAX)
        return -EINVAL;
    if (tok->n_added == tok->added_cap) {
        size_t cap = tok->added_cap ? tok->added_cap * 2 : 64;
        struct added_token *added = realloc(tok->added, cap * sizeof *added);
        if (!added)
            return -ENOMEM;
        tok->added = added;
        tok->added_cap = cap;
    }
    tok->added[tok->n_added++] = *token;
    return 0;
}

/* Puts one added token into the tries that look for it. */
static int file_added(struct tokenizer *tok, size_t i, struct normalize_work *work, struct regex_matcher *matcher)
{
    const struct added_token *token = &tok->added[i];
    const struct vocab_token *v = &tok->vocab.tokens[token->id];
    const uint8_t *text = tok->vocab.text.data + v->text;
    size_t len = v->text_len;
    if (len == 0)
        return 0;
    if (token->special) {
        int r = text_trie_add(&tok->specials, text, len, (int32_t)i);
        if (r < 0)
            return r;
    }
    if (!token->normalized) {
        tok->raw_has_plain |= !token->special;
        return text_trie_add(&tok->raw, text, len, (int32_t)i);
    }
    int r = normalize(&tok->normalizer, work, matcher, text, len, &text, &len);
    if (r < 0 || len == 0)
        return r;
    tok->normalized_has_plain |= !token->special;
    return text_trie_add(&tok->normalized, text, len, (int32_t)i);
}

static int file_all_added(struct tokenizer *tok)
{
    struct normalize_work work;
    struct regex_matcher matcher;
    int r = regex_matcher_init(&matcher, 0);
    if (r < 0)
        return r;
    normalize_work_init(&work);
    for (size_t i = 0; i < tok->n_added && r == 0; i++)
        r = file_added(tok, i, &work, &matcher);
    normalize_work_fini(&work);
    regex_matcher_fini(&matcher);
    return r;
}

static int build_tails(struct tokenizer *tok)
{
    struct neutralize_special *list = calloc(tok->n_added + 1, sizeof *list);
    size_t n = 0;
    if (!list)
        return -ENOMEM;
    for (size_t i = 0; i < tok->n_added; i++) {
        const struct vocab_token *v = &tok->vocab.tokens[tok->added[i].id];
        if (tok->added[i].special)
            list[n++] = (struct neutralize_special){.text = (const char *)tok->vocab.text.data + v->text, .len = v->text_len};
    }
    int r = neutralize_tails_build(&tok->tails, list, n);
    free(list);
    return r;
}

static bool begins_word(const uint8_t *text, size_t len)
{
    return len >= 3 && memcmp(text, "\xe2\x96\x81", 3) == 0;
}

static bool ends_in_space(const uint8_t *text, size_t len)
{
    return len >= 3 && memcmp(text + len - 3, "\xe2\x96\x81", 3) == 0;
}

/* True if cutting before every word changes nothing: U+2581 is a token, and no merge joins something else with what begins by it. */
static bool words_are_separate(const struct tokenizer *tok)
{
    const struct bpe *b = &tok->bpe;
    if (!b->by_char || b->ignore_merges || vocab_find(&tok->vocab, "\xe2\x96\x81", 3) < 0)
        return false;
    for (size_t i = 0; i <= b->mask; i++) {
        size_t left_len, right_len;
        if (b->pairs[i].key == UINT64_MAX)
            continue;
        const uint8_t *left = vocab_key(&tok->vocab, (int32_t)(b->pairs[i].key >> 32), &left_len);
        const uint8_t *right = vocab_key(&tok->vocab, (int32_t)(uint32_t)b->pairs[i].key, &right_len);
        if (begins_word(right, right_len) && !ends_in_space(left, left_len))
            return false;
    }
    return true;
}

int tokenizer_complete(struct tokenizer *tok, struct error *err)
{
    int r = normalizer_finish(&tok->normalizer);
    if (r == 0)
        r = file_all_added(tok);
    if (r == 0)
        r = build_tails(tok);
    if (r == 0)
        r = word_cache_create(WORD_CACHE_LOG2, &tok->cache);
    if (r < 0)
        return error_set(err, r, r == -EINVAL ? "an added token is longer than %d bytes, or a pattern runs away on it" : "out of memory", ADDED_TOKEN_BYTES_MAX);
    bpe_finish(&tok->bpe);
    struct pretokenizer *pt = &tok->pretokenizer;
    if (words_are_separate(tok) && pt->n < PRETOK_OPS_MAX)
        pt->ops[pt->n++] = (struct pretok_op){.kind = PRETOK_SCAN, .scan = pretok_scan_metaspace_words};
    if (tok->eos != TOKEN_NONE)
        tokenizer_add_eog(tok, tok->eos);
    if (tok->eot != TOKEN_NONE)
        tokenizer_add_eog(tok, tok->eot);
    return 0;
}

void tokenizer_add_eog(struct tokenizer *tok, int32_t id)
{
    size_t at = 0;
    while (at < tok->n_eog && tok->eog[at] < id)
        at++;
    if (id < 0 || (size_t)id >= tok->vocab.n || tok->n_eog == TOKENIZER_EOG_MAX || (at < tok->n_eog && tok->eog[at] == id))
        return;
    memmove(tok->eog + at + 1, tok->eog + at, (tok->n_eog - at) * sizeof tok->eog[0]);
    tok->eog[at] = id;
    tok->n_eog++;
}

void tokenizer_find_eog(struct tokenizer *tok)
{
    /* Ends of turns first: the first one found is the model's, unless the file names another. */
    static const char *const turns[] = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<EOT>", "[EOT]"};
    static const char *const others[] = {"<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<\357\275\234end\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>", "</s>"};
    for (size_t i = 0; i < sizeof turns / sizeof *turns; i++) {
        int32_t id = tokenizer_special_id(tok, turns[i], strlen(turns[i]));
        if (tok->eot == TOKEN_NONE)
            tok->eot = id;
        tokenizer_add_eog(tok, id);
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        tokenizer_add_eog(tok, tokenizer_special_id(tok, others[i], strlen(others[i])));
}

int tokenizer_read_file(const char *path, size_t max, char **ret_text, size_t *ret_len, struct error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC), r;
    struct stat st;
    char *text = NULL;
    if (fd < 0 || fstat(fd, &st) < 0) {
        r = error_set(err, -errno, "%s: %s", path, strerror(errno));
        goto fail;
    }
    if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size > max) {
        r = error_set(err, -EINVAL, "%s: not a file of at most %zu bytes", path, max);
        goto fail;
    }
    size_t len = (size_t)st.st_size, done = 0;
    text = malloc(len + 1);
    if (!text) {
        r = error_set(err, -ENOMEM, "%s: out of memory", path);
        goto fail;
    }
    while (done < len) {
        ssize_t n = read(fd, text + done, len - done);
        if (n <= 0 && errno == EINTR && n < 0)
            continue;
        if (n <= 0) {
            r = error_set(err, n < 0 ? -errno : -EIO, "%s: %s", path, n < 0 ? strerror(errno) : "shorter than its size");
            goto fail;
        }
        done += (size_t)n;
    }
    close(fd);
    text[len] = '\0';
    *ret_text = text;
    *ret_len = len;
    return 0;
fail:
    free(text);
    if (fd >= 0)
        close(fd);
    return r;
}

/* The folder part of a path, with its slash; "" if it has none. */
static void folder_of(const char *path, char *folder, size_t size)
{
    const char *slash = strrchr(path, '/');
    snprintf(folder, size, "%.*s", slash ? (int)(slash - path + 1) : 0, path);
}

static int open_json_file(const char *path, struct tokenizer **ret_tok, struct error *err)
{
    char *text, folder[4096];
    size_t len;
    int r = tokenizer_read_file(path, TOKENIZER_JSON_MAX, &text, &len, err);
    if (r < 0)
        return r;
    folder_of(path, folder, sizeof folder);
    struct error reason;
    r = tokenizer_parse_json(text, len, folder, ret_tok, &reason);
    free(text);
    return r < 0 ? error_set(err, r, "%s: %s", path, reason.text) : 0;
}

static int open_gguf_file(const char *path, struct tokenizer **ret_tok, struct error *err)
{
    struct gguf *file;
    struct error reason;
    int r = gguf_open(path, &file, err);
    if (r < 0)
        return r;
    r = tokenizer_from_gguf(file, ret_tok, &reason);
    gguf_close(file);
    return r < 0 ? error_set(err, r, "%s: %s", path, reason.text) : 0;
}

int tokenizer_open(const char *path, struct tokenizer **ret_tok, struct error *err)
{
    struct stat st;
    char inside[4096];
    if (stat(path, &st) < 0)
        return error_set(err, -errno, "%s: %s", path, strerror(errno));
    if (S_ISDIR(st.st_mode)) {
        if ((size_t)snprintf(inside, sizeof inside, "%s/tokenizer.json", path) >= sizeof inside)
            return error_set(err, -ENAMETOOLONG, "%s: the path is too long", path);
        return open_json_file(inside, ret_tok, err);
    }
    return gguf_is_file(path) ? open_gguf_file(path, ret_tok, err) : open_json_file(path, ret_tok, err);
}

int tokenizer_open_json(const char *text, size_t len, struct tokenizer **ret_tok, struct error *err)
{
    return tokenizer_parse_json(text, len, NULL, ret_tok, err);
}

size_t tokenizer_n_vocab(const struct tokenizer *tok)
{
    return tok->vocab.n;
}

static const struct vocab_token *token_at(const struct tokenizer *tok, int32_t id)
{
    if (id < 0 || (size_t)id >= tok->vocab.n || !(tok->vocab.tokens[id].flags & VOCAB_PRESENT))
        return NULL;
    return &tok->vocab.tokens[id];
}

const uint8_t *tokenizer_token_bytes(const struct tokenizer *tok, int32_t id, size_t *ret_len)
{
    const struct vocab_token *t = token_at(tok, id);
    if (!t)
        return NULL;
    *ret_len = t->bytes_len;
    return t->bytes_len ? tok->vocab.bytes.data + t->bytes : (const uint8_t *)"";
}

const char *tokenizer_token_text(const struct tokenizer *tok, int32_t id, size_t *ret_len)
{
    const struct vocab_token *t = token_at(tok, id);
    if (!t)
        return NULL;
    *ret_len = t->text_len;
    return t->text_len ? (const char *)tok->vocab.text.data + t->text : "";
}

bool tokenizer_is_special(const struct tokenizer *tok, int32_t id)
{
    const struct vocab_token *t = token_at(tok, id);
    return t && t->flags & VOCAB_SPECIAL;
}

int32_t tokenizer_special_id(const struct tokenizer *tok, const char *text, size_t len)
{
    int32_t index = text_trie_exact(&tok->specials, text, len);
    if (index < 0)
        index = text_trie_exact(&tok->raw, text, len);
    return index < 0 ? TOKEN_NONE : tok->added[index].id;
}

int32_t tokenizer_bos(const struct tokenizer *tok)
{
    return tok->bos;
}

int32_t tokenizer_eos(const struct tokenizer *tok)
{
    return tok->eos;
}

int32_t tokenizer_eot(const struct tokenizer *tok)
{
    return tok->eot;
}

const int32_t *tokenizer_eog(const struct tokenizer *tok, size_t *ret_n)
{
    *ret_n = tok->n_eog;
    return tok->eog;
}

bool tokenizer_adds_bos(const struct tokenizer *tok)
{
    return tok->bos != TOKEN_NONE && tok->n_prefix > 0 && tok->prefix[0] == tok->bos;
}

const char *tokenizer_chat_template(const struct tokenizer *tok)
{
    return tok->chat_template;
}

const char *tokenizer_describe(const struct tokenizer *tok)
{
    return tok->description;
}
