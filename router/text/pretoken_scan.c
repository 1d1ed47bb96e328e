#include "router/text/pretoken_scan.h"
#include "router/text/char_class.h"
#include "proto/base/utf8.h"
#include <stdbool.h>
#include <string.h>

const char SCAN_GPT2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
const char SCAN_LLAMA3[] = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
const char SCAN_QWEN2[] = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
const char SCAN_TEKKEN[] =
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
    "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
const char SCAN_GPT4O[] = "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
                          "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
                          "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
const char SCAN_DEEPSEEK3[] = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+";
const char SCAN_DIGIT[] = "\\p{N}";
const char SCAN_DIGITS3[] = "\\p{N}{1,3}";
const char SCAN_CJK[] = "[\xe4\xb8\x80-\xe9\xbe\xa5\xe3\x81\x80-\xe3\x82\x9f\xe3\x82\xa0-\xe3\x83\xbf]+"; /* [U+4E00-U+9FA5 U+3040-U+309F U+30A0-U+30FF]+ */

/* The classes of the character at s[pos], and its end. */
static inline unsigned class_at(const uint8_t *s, size_t pos, size_t *ret_next)
{
    if (s[pos] < 128) {
        *ret_next = pos + 1;
        return char_table.ascii[s[pos]];
    }
    size_t n;
    uint32_t c = utf8_get(s + pos, &n);
    *ret_next = pos + n;
    return char_class_of(c);
}

/* The end of the run of characters that have one of `yes` (or, with `yes` 0, none of `no`). */
static inline size_t run_of(const uint8_t *s, size_t pos, size_t end, unsigned yes)
{
    size_t next;
    while (pos < end && class_at(s, pos, &next) & yes)
        pos = next;
    return pos;
}

static inline size_t run_without(const uint8_t *s, size_t pos, size_t end, unsigned no)
{
    size_t next;
    while (pos < end && !(class_at(s, pos, &next) & no))
        pos = next;
    return pos;
}

/* [\r\n]*, and with `slash` [\r\n/]* */
static inline size_t run_of_newlines(const uint8_t *s, size_t pos, size_t end, bool slash)
{
    while (pos < end && (s[pos] == '\r' || s[pos] == '\n' || (slash && s[pos] == '/')))
        pos++;
    return pos;
}

/* \p{N}{1,max} */
static inline size_t digits(const uint8_t *s, size_t pos, size_t end, int max)
{
    size_t next;
    for (int i = 0; i < max && pos < end && class_at(s, pos, &next) & CHAR_N; i++)
        pos = next;
    return pos;
}

/* \s+(?!\S)|\s+ : all the white space at the end of the text, otherwise all but the last character before a word. */
static size_t spaces(const uint8_t *s, size_t pos, size_t end)
{
    size_t stop = run_of(s, pos, end, CHAR_SPACE);
    if (stop == end)
        return stop;
    size_t last = (size_t)(utf8_before(s + pos, s + stop) - s);
    return last > pos ? last : stop;
}

/* \s*[\r\n]+|\s+(?!\S)|\s+ : the first alternative reaches to the last newline of the run. */
static size_t spaces_or_newlines(const uint8_t *s, size_t pos, size_t end)
{
    size_t stop = pos, next, newline = 0;
    unsigned c;
    while (stop < end && (c = class_at(s, stop, &next)) & CHAR_SPACE) {
        stop = next;
        if (c & CHAR_NEWLINE)
            newline = stop;
    }
    if (newline)
        return newline;
    if (stop == end)
        return stop;
    size_t last = (size_t)(utf8_before(s + pos, s + stop) - s);
    return last > pos ? last : stop;
}

/* 's|'t|'re|'ve|'m|'ll|'d behind the apostrophe at s[pos]; 0 if none. */
static size_t contraction(const uint8_t *s, size_t pos, size_t end)
{
    if (end - pos < 2)
        return 0;
    uint8_t a = s[pos + 1], b = end - pos > 2 ? s[pos + 2] : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd')
        return pos + 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l'))
        return pos + 3;
    return 0;
}

/* The same under (?i: ). U+017F, the long s, folds to s. */
static size_t contraction_any_case(const uint8_t *s, size_t pos, size_t end)
{
    if (end - pos < 2)
        return 0;
    uint8_t a = s[pos + 1] | 0x20, b = end - pos > 2 ? s[pos + 2] | 0x20 : 0;
    if (s[pos + 1] >= 0x80)
        return s[pos + 1] == 0xc5 && s[pos + 2] == 0xbf ? pos + 3 : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd')
        return pos + 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l'))
        return pos + 3;
    return 0;
}

static size_t scan_gpt2(const uint8_t *s, size_t pos, size_t end)
{
    size_t next, after = end, stop;
    if (s[pos] == '\'' && (stop = contraction(s, pos, end)))
        return stop;
    unsigned c = class_at(s, pos, &next);
    if (s[pos] == ' ' && next < end) {
        /* The optional space of the three word alternatives. */
        unsigned d = class_at(s, next, &after);
        if (!(d & CHAR_SPACE)) {
            c = d;
            next = after;
        }
    }
    if (c & CHAR_L)
        return run_of(s, next, end, CHAR_L);
    if (c & CHAR_N)
        return run_of(s, next, end, CHAR_N);
    if (c & CHAR_SPACE)
        return spaces(s, pos, end);
    return run_without(s, next, end, CHAR_SPACE | CHAR_L | CHAR_N);
}

/* Llama 3 and its kin: the pattern is the same but for how many digits make a piece. */
static inline size_t scan_words(const uint8_t *s, size_t pos, size_t end, int digits_max)
{
    size_t next, after = end, stop;
    if (s[pos] == '\'' && (stop = contraction_any_case(s, pos, end)))
        return stop;
    unsigned c = class_at(s, pos, &next);
    if (c & CHAR_L)
        return run_of(s, next, end, CHAR_L);
    if (c & CHAR_N)
        return digits(s, pos, end, digits_max);
    unsigned d = next < end ? class_at(s, next, &after) : CHAR_SPACE;
    if (d & CHAR_L && !(c & CHAR_NEWLINE))
        return run_of(s, after, end, CHAR_L);
    if (c & CHAR_SPACE) {
        if (s[pos] != ' ' || d & (CHAR_SPACE | CHAR_N))
            return spaces_or_newlines(s, pos, end);
        next = after;
    }
    stop = run_without(s, next, end, CHAR_SPACE | CHAR_L | CHAR_N);
    return run_of_newlines(s, stop, end, false);
}

static size_t scan_llama3(const uint8_t *s, size_t pos, size_t end)
{
    return scan_words(s, pos, end, 3);
}

static size_t scan_qwen2(const uint8_t *s, size_t pos, size_t end)
{
    return scan_words(s, pos, end, 1);
}

/* U*L+ from s[pos], U and L overlapping; 0 if it does not match. When no L follows the longest run of U, the run gives back characters up to its
 * last one that is an L too. */
static size_t upper_lower(const uint8_t *s, size_t pos, size_t end)
{
    size_t at = pos, next, both_end = 0;
    unsigned c;
    while (at < end && (c = class_at(s, at, &next)) & CHAR_UPPER) {
        at = next;
        if (c & CHAR_LOWER)
            both_end = at;
    }
    size_t stop = run_of(s, at, end, CHAR_LOWER);
    return stop > at ? stop : both_end;
}

/* [^\r\n\p{L}\p{N}]?U*L+|[^\r\n\p{L}\p{N}]?U+L* ; 0 if neither matches. The second is reached when no L is there, so its L* is empty. A mark is both a
 * possible prefix and a U. */
static size_t cased_word(const uint8_t *s, size_t pos, size_t end)
{
    size_t next, stop;
    unsigned c = class_at(s, pos, &next);
    bool prefix = !(c & (CHAR_NEWLINE | CHAR_L | CHAR_N));
    if (prefix && (stop = upper_lower(s, next, end)))
        return stop;
    if ((stop = upper_lower(s, pos, end)))
        return stop;
    if (prefix && (stop = run_of(s, next, end, CHAR_UPPER)) > next)
        return stop;
    stop = run_of(s, pos, end, CHAR_UPPER);
    return stop > pos ? stop : 0;
}

/* What follows the words in Tekken's and GPT-4o's patterns: digits, punctuation with newlines and slashes, white space. */
static inline size_t cased_rest(const uint8_t *s, size_t pos, size_t end, int digits_max)
{
    size_t next, after = end, stop;
    unsigned c = class_at(s, pos, &next);
    if (c & CHAR_N)
        return digits(s, pos, end, digits_max);
    if (c & CHAR_SPACE) {
        if (s[pos] != ' ' || next == end || class_at(s, next, &after) & (CHAR_SPACE | CHAR_L | CHAR_N))
            return spaces_or_newlines(s, pos, end);
        next = after;
    }
    stop = run_without(s, next, end, CHAR_SPACE | CHAR_L | CHAR_N);
    return run_of_newlines(s, stop, end, true);
}

static size_t scan_tekken(const uint8_t *s, size_t pos, size_t end)
{
    size_t stop = cased_word(s, pos, end);
    return stop ? stop : cased_rest(s, pos, end, 1);
}

static size_t scan_gpt4o(const uint8_t *s, size_t pos, size_t end)
{
    size_t stop = cased_word(s, pos, end), tail;
    if (!stop)
        return cased_rest(s, pos, end, 3);
    if (stop < end && s[stop] == '\'' && (tail = contraction_any_case(s, stop, end)))
        return tail;
    return stop;
}

static bool is_ascii_letter(uint8_t c)
{
    return (uint8_t)((c | 0x20) - 'a') < 26;
}

static bool is_ascii_punctuation(uint8_t c)
{
    return (c > 0x20 && c < '0') || (c > '9' && c < 'A') || (c > 'Z' && c < 'a') || (c > 'z' && c < 0x7f);
}

/* The match of DeepSeek's pattern at s[pos], or 0: numbers, controls and unassigned characters match nothing. */
static size_t match_deepseek3(const uint8_t *s, size_t pos, size_t end)
{
    size_t next, after = end, stop;
    if (is_ascii_punctuation(s[pos]) && pos + 1 < end && is_ascii_letter(s[pos + 1])) {
        stop = pos + 2;
        while (stop < end && is_ascii_letter(s[stop]))
            stop++;
        return stop;
    }
    unsigned c = class_at(s, pos, &next);
    if (c & (CHAR_L | CHAR_M))
        return run_of(s, next, end, CHAR_L | CHAR_M);
    unsigned d = next < end ? class_at(s, next, &after) : 0;
    if (d & (CHAR_L | CHAR_M) && !(c & (CHAR_NEWLINE | CHAR_P | CHAR_S)))
        return run_of(s, after, end, CHAR_L | CHAR_M);
    if (c & (CHAR_P | CHAR_S) || (s[pos] == ' ' && d & (CHAR_P | CHAR_S)))
        return run_of_newlines(s, run_of(s, next, end, CHAR_P | CHAR_S), end, false);
    return c & CHAR_SPACE ? spaces_or_newlines(s, pos, end) : 0;
}

static size_t scan_deepseek3(const uint8_t *s, size_t pos, size_t end)
{
    size_t stop = match_deepseek3(s, pos, end);
    while (!stop) {
        pos += utf8_char_bytes(s[pos]);
        if (pos == end || match_deepseek3(s, pos, end))
            return pos;
    }
    return stop;
}

static size_t scan_digit(const uint8_t *s, size_t pos, size_t end)
{
    size_t stop = digits(s, pos, end, 1);
    return stop > pos ? stop : run_without(s, pos, end, CHAR_N);
}

static size_t scan_digits3(const uint8_t *s, size_t pos, size_t end)
{
    size_t stop = digits(s, pos, end, 3);
    return stop > pos ? stop : run_without(s, pos, end, CHAR_N);
}

/* Han of the first Unicode block, Hiragana, Katakana: three bytes each, beginning with E3 to E9. */
static bool is_cjk(const uint8_t *s, size_t pos)
{
    if (s[pos] < 0xe3 || s[pos] > 0xe9)
        return false;
    size_t n;
    uint32_t c = utf8_get(s + pos, &n);
    return (c >= 0x4e00 && c <= 0x9fa5) || (c >= 0x3040 && c <= 0x30ff);
}

static size_t scan_cjk(const uint8_t *s, size_t pos, size_t end)
{
    bool inside = is_cjk(s, pos);
    while (pos < end && is_cjk(s, pos) == inside)
        pos += utf8_char_bytes(s[pos]);
    return pos;
}

const struct scan_pattern scan_patterns[] = {
    {.pattern = SCAN_GPT2, .scan = scan_gpt2},
    {.pattern = SCAN_LLAMA3, .scan = scan_llama3},
    {.pattern = SCAN_QWEN2, .scan = scan_qwen2},
    {.pattern = SCAN_TEKKEN, .scan = scan_tekken},
    {.pattern = SCAN_GPT4O, .scan = scan_gpt4o},
    {.pattern = SCAN_DEEPSEEK3, .scan = scan_deepseek3},
    {.pattern = SCAN_DIGIT, .scan = scan_digit},
    {.pattern = SCAN_DIGITS3, .scan = scan_digits3},
    {.pattern = SCAN_CJK, .scan = scan_cjk},
};
const size_t n_scan_patterns = sizeof scan_patterns / sizeof scan_patterns[0];

scan_fn *scan_find(const char *pattern, size_t len)
{
    for (size_t i = 0; i < n_scan_patterns; i++)
        if (strlen(scan_patterns[i].pattern) == len && memcmp(scan_patterns[i].pattern, pattern, len) == 0)
            return scan_patterns[i].scan;
    return NULL;
}
