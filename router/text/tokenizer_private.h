/* The parts of a tokenizer, and what the files of router/text that build and run it share. */
#pragma once
#include "router/text/added_tokens.h"
#include "router/text/bpe.h"
#include "router/text/neutralize.h"
#include "router/text/pretokenize.h"
#include "router/text/text_normalize.h"
#include "router/text/tokenizer.h"
#include "router/text/vocab.h"
#include "router/text/word_cache.h"

#define TOKENIZER_SPECIALS_AROUND_MAX 16
#define TOKENIZER_EOG_MAX 32
#define WORD_CACHE_LOG2 15 /* entries of one cache line: 2 MiB a tokenizer */

struct tokenizer {
    struct vocab vocab;
    struct bpe bpe;
    struct word_cache *cache;
    struct normalizer normalizer;
    struct pretokenizer pretokenizer;

    struct added_token *added;           /* [n_added] */
    size_t n_added, added_cap;
    struct text_trie raw;                /* texts looked for before normalization; values index `added` */
    struct text_trie normalized;         /* texts looked for behind it */
    struct text_trie specials;           /* all special tokens, as they are spelled */
    struct neutralize_tails tails;       /* of the same */
    bool raw_has_plain, normalized_has_plain; /* some token there is not special */

    int32_t prefix[TOKENIZER_SPECIALS_AROUND_MAX], suffix[TOKENIZER_SPECIALS_AROUND_MAX]; /* what TOKENIZE_ADD_SPECIAL adds */
    size_t n_prefix, n_suffix;

    size_t strip_start;                  /* spaces that decoding takes from the beginning of a text; SIZE_MAX: all of the first token */
    int32_t bos, eos, eot;
    int32_t eog[TOKENIZER_EOG_MAX];
    size_t n_eog;
    char *chat_template;                 /* owned, or NULL */
    char description[64];
};

/* An empty tokenizer, to be filled and then completed; or NULL. */
struct tokenizer *tokenizer_alloc(void);
/* Registers the token `id` (whose spelling the vocabulary has) as an added one. -ENOMEM, -EINVAL beyond the limits. */
int tokenizer_add_token(struct tokenizer *tok, const struct added_token *token);
/* Builds tries, indices and tables over what was filled in; the vocabulary must be indexed and the pairs added. */
int tokenizer_complete(struct tokenizer *tok, struct error *err);
/* Adds a token that ends a generation; TOKEN_NONE, known ones and what exceeds the list are left out. */
void tokenizer_add_eog(struct tokenizer *tok, int32_t id);
/* Well-known texts of special tokens that end a turn or a message. */
void tokenizer_find_eog(struct tokenizer *tok);

/* `folder`: where the files beside the tokenizer.json are looked for, or NULL. */
int tokenizer_parse_json(const char *text, size_t len, const char *folder, struct tokenizer **ret_tok, struct error *err);
/* Reads tokenizer_config.json, generation_config.json and chat_template.jinja of the folder, those that exist. */
int tokenizer_read_config(struct tokenizer *tok, const char *folder, struct error *err);
/* The whole file, at most `max` bytes, NUL-terminated behind *ret_len. The caller frees it. */
int tokenizer_read_file(const char *path, size_t max, char **ret_text, size_t *ret_len, struct error *err);

/* Named pre-tokenizers of GGUF metadata (tokenizer.ggml.pre). -ENOTSUP naming it. */
int tokenizer_named_pretokenizer(struct tokenizer *tok, const char *name, size_t len, bool *ret_ignore_merges, bool *ret_add_bos, struct error *err);
/* Appends an op that splits by a pattern and keeps all pieces: by its scanner if it has one. */
int tokenizer_add_isolated(struct pretokenizer *pt, const char *pattern, size_t len, struct error *err);
