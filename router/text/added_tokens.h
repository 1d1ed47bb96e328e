/* Added tokens: texts that become one token before the model sees anything, the special tokens among them. Built by one thread, then immutable.
 * Matching follows huggingface/tokenizers: leftmost and longest, then the token's own conditions. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ADDED_TOKENS_MAX 65536
#define ADDED_TOKEN_BYTES_MAX 4096

struct added_token {
    int32_t id;
    bool special;
    bool normalized;  /* looked for in the normalized text, not in the text as given */
    bool lstrip, rstrip; /* takes the white space on that side with it */
    bool single_word; /* not beside a word character */
};

/* A set of texts in a trie; the value is an index into the caller's tokens. */
struct trie_node {
    int32_t child, sibling; /* first child, next sibling; -1: none */
    int32_t value;          /* -1: no text ends here */
    uint8_t byte;
};

struct text_trie {
    struct trie_node *nodes; /* [n] */
    size_t n, cap;
    int32_t roots[256];      /* the node of each first byte, or -1 */
    size_t longest;          /* bytes of the longest text */
};

void text_trie_init(struct text_trie *t);
void text_trie_fini(struct text_trie *t);
/* -EINVAL for an empty text or one above ADDED_TOKEN_BYTES_MAX, -ENOMEM. Of one text added twice the first value stays. */
int text_trie_add(struct text_trie *t, const void *text, size_t len, int32_t value);
/* The value of the longest text that s[0..n) begins with, or -1. */
int32_t text_trie_longest(const struct text_trie *t, const uint8_t *s, size_t n, size_t *ret_len);
/* The value of exactly s[0..n), or -1. */
int32_t text_trie_exact(const struct text_trie *t, const void *s, size_t n);
/* True if s[0..n), n >= 1, is a proper beginning of some text. */
bool text_trie_begins(const struct text_trie *t, const uint8_t *s, size_t n);

struct added_match {
    const struct added_token *token;
    size_t start, stop; /* the text the token takes, stripped white space included */
};

struct added_scan {
    const struct text_trie *trie;
    const struct added_token *tokens;
    const uint8_t *text; /* [len] well-formed UTF-8 */
    size_t len;
    bool skip_special;   /* special tokens stay text; what overlaps them is not looked at again */
    bool refuse_marked;  /* a match that the break mark follows is text (see neutralize.h) */
    size_t at;           /* where to look next */
    size_t floor;        /* the end of the last match */
};

/* The next match from scan->at on; false when there is none. */
bool added_scan_next(struct added_scan *scan, struct added_match *ret_match);
