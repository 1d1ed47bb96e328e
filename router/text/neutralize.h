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

/* The text of one special token. */
struct neutralize_special {
    const char *text; /* borrowed */
    size_t len;
};

/* Appends the marked text to `out`. `specials` holds the texts of all special tokens, `tokens` [n] the same as a list. */
int neutralize_text(const struct text_trie *specials, const struct neutralize_special tokens[], size_t n_tokens, const uint8_t *text, size_t len, struct buf *out);
/* Appends the text without marks, escapes resolved. */
int neutralize_strip(const uint8_t *text, size_t len, struct buf *out);
