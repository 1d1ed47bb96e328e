/* Text to token ids and back, for the vocabularies of GGUF files and Hugging Face tokenizer.json files: byte-level BPE, and SentencePiece BPE with
 * byte fallback. A tokenizer is immutable after tokenizer_open: any number of threads may use it at once (the word cache inside is lock-free).
 * A detokenizer belongs to one stream and one thread.
 *
 * Follows: huggingface/tokenizers (the order of normalizer, added tokens, pre-tokenizer, model, post-processor), llama.cpp's names in GGUF
 * metadata (tokenizer.ggml.*), openai/tiktoken (BPE by rank), google/sentencepiece (BPE by score). */
#pragma once
#include "proto/base/buf.h"
#include "proto/base/error.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TOKEN_NONE (-1)
#define TOKENIZER_TEXT_MAX ((size_t)64 << 20) /* bytes of one text to encode */

struct tokenizer;
struct gguf;

/* A growable array of ids; a zeroed struct is empty. The owner calls token_ids_fini. */
struct token_ids {
    int32_t *data; /* [n] */
    size_t n, cap;
};
int token_ids_append(struct token_ids *ids, int32_t id); /* -ENOMEM */
void token_ids_fini(struct token_ids *ids);

/* `path` is a GGUF file, a tokenizer.json, or a folder that holds a tokenizer.json. Beside a tokenizer.json, tokenizer_config.json,
 * generation_config.json and chat_template.jinja are read where they exist. -EINVAL with a text that names what is malformed, -ENOTSUP naming the
 * part that is not supported, or the errno of opening. */
int tokenizer_open(const char *path, struct tokenizer **ret_tok, struct error *err);
/* The same from an open GGUF file, which may be closed afterwards. */
int tokenizer_from_gguf(const struct gguf *file, struct tokenizer **ret_tok, struct error *err);
/* The same from the text of a tokenizer.json alone; for fuzzing and tests. */
int tokenizer_open_json(const char *text, size_t len, struct tokenizer **ret_tok, struct error *err);
void tokenizer_close(struct tokenizer *tok);

enum tokenizer_encode_flags {
    TOKENIZE_ADD_SPECIAL = 1,   /* what the model's post-processor adds: BOS, EOS */
    TOKENIZE_PARSE_SPECIAL = 2, /* the text of a special token becomes that token; without it, it stays text */
    TOKENIZE_RENDERED = 4,      /* a rendered chat template: special tokens are recognised, marks of tokenizer_neutralize are taken out again */
};

/* Appends the ids of `text` to `ids`; on failure `ids` is as before. -EILSEQ if the text is not well-formed UTF-8, -E2BIG above TOKENIZER_TEXT_MAX,
 * -ENOMEM, -EINVAL if a pattern of the tokenizer runs into its limits on this text. */
int tokenizer_encode(const struct tokenizer *tok, const char *text, size_t len, int flags, struct token_ids *ids, struct error *err);

/* Marks every special token's text in `text` such that, after any concatenation with other text, tokenizer_encode with TOKENIZE_RENDERED reads it as
 * plain text and gives back exactly `text`. U+FDD0 goes behind the first character of each occurrence and behind an end that could begin a
 * special token; U+FDD0 and U+FDD1 in the text itself are escaped. Use it on whatever a user wrote, before rendering. Appends to `out`. */
int tokenizer_neutralize(const struct tokenizer *tok, const char *text, size_t len, struct buf *out);

/* Appends the bytes of the tokens to `out`, as the model's decoder joins them: they may be ill-formed UTF-8. Ids outside the vocabulary: -ERANGE. */
int tokenizer_decode(const struct tokenizer *tok, const int32_t ids[], size_t n, bool skip_special, struct buf *out);

size_t tokenizer_n_vocab(const struct tokenizer *tok); /* ids are below this */
/* The bytes that the token stands for inside a text; NULL if there is no such token. Borrowed. */
const uint8_t *tokenizer_token_bytes(const struct tokenizer *tok, int32_t id, size_t *ret_len);
/* The token as the vocabulary spells it (with its stand-ins for bytes and spaces), UTF-8, not NUL-terminated. Borrowed. */
const char *tokenizer_token_text(const struct tokenizer *tok, int32_t id, size_t *ret_len);
bool tokenizer_is_special(const struct tokenizer *tok, int32_t id);
/* The id of an added (special) token by its text, or TOKEN_NONE. */
int32_t tokenizer_special_id(const struct tokenizer *tok, const char *text, size_t len);
/* TOKEN_NONE where the model has none or the file does not say. */
int32_t tokenizer_bos(const struct tokenizer *tok);
int32_t tokenizer_eos(const struct tokenizer *tok);
int32_t tokenizer_eot(const struct tokenizer *tok); /* end of turn */
/* Every id that ends a generation (EOS, end of turn, end of message); borrowed, ascending. */
const int32_t *tokenizer_eog(const struct tokenizer *tok, size_t *ret_n);
bool tokenizer_adds_bos(const struct tokenizer *tok); /* TOKENIZE_ADD_SPECIAL begins with BOS */
/* The model's chat template (Jinja), or NULL. Borrowed, NUL-terminated. */
const char *tokenizer_chat_template(const struct tokenizer *tok);
/* e.g. "gguf gpt2/smollm" or "tokenizer.json BPE"; for logs. */
const char *tokenizer_describe(const struct tokenizer *tok);

/* The incremental detokenizer. Text comes out as soon as its characters are complete: incomplete UTF-8 is held back, ill-formed bytes become
 * U+FFFD, never before it is certain that they are ill-formed. */
struct detok {
    const struct tokenizer *tok;
    bool skip_special;
    bool at_start;     /* the text begins here, so the decoder's strip of leading spaces still applies */
    uint8_t held[4];   /* an incomplete character */
    uint8_t n_held;
    uint64_t n_bytes;  /* bytes of text so far, held ones counted */
};

struct detok_piece {
    uint64_t text_offset;  /* where this token's bytes begin in the whole text, in bytes */
    const uint8_t *bytes;  /* [n_bytes] this token's own bytes; n_bytes is 0 for special tokens that are skipped. Borrowed */
    size_t n_bytes;
};

/* `at_start`: true when the first token begins a text of its own, false when it goes on after a prompt. */
void detok_init(struct detok *d, const struct tokenizer *tok, bool skip_special, bool at_start);
/* Appends the text that became complete to `out` (well-formed UTF-8). `ret_piece` may be NULL. -ERANGE for an id outside the vocabulary. */
int detok_push(struct detok *d, int32_t id, struct buf *out, struct detok_piece *ret_piece);
/* The end: what is still held back comes out as U+FFFD. */
int detok_flush(struct detok *d, struct buf *out);
