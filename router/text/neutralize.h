/* Marks inside a rendered chat template that keep what a user wrote from being read as special tokens, whatever it is joined with. Unicode's
 * noncharacters U+FDD0 to U+FDD3 serve, which no text for interchange contains:
 *
 *     U+FDD0            breaks: behind the first character of each special token's text, and behind an end that could begin one
 *     U+FDD1 U+FDD2     stands for U+FDD0
 *     U+FDD1 U+FDD3     stands for U+FDD1
 *     U+FDD1 U+FDD4     stands for nothing: before a beginning that could end a special token
 *
 * A special token of one character cannot be broken; directly before U+FDD0 it is text. */
#pragma once
#include "proto/base/buf.h"
#include "router/text/added_tokens.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* True if U+FDD0 stands at text[pos]. */
static inline bool neutralize_mark_at(const uint8_t *text, size_t len, size_t pos)
{
    return len - pos >= 3 && text[pos] == 0xef && text[pos + 1] == 0xb7 && text[pos + 2] == 0x90;
}

/* How special tokens go on behind their first character, in windows of 8 bytes: tells at once whether a text could continue what a template began. */
struct neutralize_tails {
    uint64_t *windows; /* [n_windows] ascending: 8 bytes of some token from each later character on, its last ones padded with zeros */
    uint64_t *ends;    /* [n_ends] ascending: ends of under 8 bytes, padded likewise */
    size_t n_windows, n_ends;
};

struct neutralize_special {
    const char *text; /* borrowed, during the call */
    size_t len;
};
int neutralize_tails_build(struct neutralize_tails *tails, const struct neutralize_special tokens[], size_t n); /* -ENOMEM */
void neutralize_tails_fini(struct neutralize_tails *tails); /* a zeroed one is fine */

/* Appends the marked text to `out`. `specials` holds the texts of all special tokens, `tails` was built of them. The mark at the beginning may be set where it
 * is not needed, when eight bytes speak for it. */
int neutralize_text(const struct text_trie *specials, const struct neutralize_tails *tails, const uint8_t *text, size_t len, struct buf *out);
/* Appends the text without marks, escapes resolved. */
int neutralize_strip(const uint8_t *text, size_t len, struct buf *out);
