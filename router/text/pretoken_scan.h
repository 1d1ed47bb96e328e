/* Hand-written scanners for the pre-tokenizer patterns that most models share. Each equals its regular expression under Split with behaviour
 * Isolated; a test holds every one against Oniguruma. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* The end of the piece that begins at s[pos], pos < end: of a match, or of the run of characters up to the next match. The text s[0..end) is well-formed
 * UTF-8 and pieces are asked for in order, each beginning where the last one ended. */
typedef size_t scan_fn(const uint8_t *s, size_t pos, size_t end);

struct scan_pattern {
    const char *pattern; /* the text by which it is recognised */
    scan_fn *scan;
};
extern const struct scan_pattern scan_patterns[];
extern const size_t n_scan_patterns;

/* NULL if the pattern has no scanner. */
scan_fn *scan_find(const char *pattern, size_t len);

/* Patterns that are also reached by name. */
extern const char SCAN_GPT2[], SCAN_LLAMA3[], SCAN_QWEN2[], SCAN_TEKKEN[], SCAN_GPT4O[], SCAN_DEEPSEEK3[], SCAN_DIGIT[], SCAN_DIGITS3[], SCAN_CJK[];
