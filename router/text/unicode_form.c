#include "router/text/unicode_form.h"
#include "proto/base/utf8.h"
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#define N_CHARS 0x110000

/* Bit f of stable[c]: in form f, c is a starter that normalizes to itself and never joins what stands before it. So a text may be cut before c. */
static uint8_t *stable;
static int init_result;

static const int options[] = {
    [UNICODE_NFC] = UTF8PROC_STABLE | UTF8PROC_COMPOSE,
    [UNICODE_NFD] = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE,
    [UNICODE_NFKC] = UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT,
    [UNICODE_NFKD] = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT,
};

static bool is_surrogate(int32_t c)
{
    return c >= 0xd800 && c <= 0xdfff;
}

static int class_of(int32_t c)
{
    return (int)utf8proc_get_property(c)->combining_class;
}

/* Decomposes one character in full, and composes it again if the form does. Returns the number of characters. */
static size_t normalize_char(int32_t c, enum unicode_form form, int32_t out[32])
{
    int boundary = 0;
    utf8proc_ssize_t n = utf8proc_decompose_char(c, out, 32, (utf8proc_option_t)options[form], &boundary);
    if (n < 1 || n > 32)
        return 0;
    if (form == UNICODE_NFC || form == UNICODE_NFKC)
        n = utf8proc_normalize_utf32(out, n, (utf8proc_option_t)options[form]);
    return (size_t)n;
}

/* Marks what may join the character before it: the last character of what a composed one falls apart into. */
static void mark_joining(void)
{
    int32_t whole[32], parts[32];
    for (int32_t c = 0; c < N_CHARS; c++) {
        if (is_surrogate(c))
            continue;
        size_t n = normalize_char(c, UNICODE_NFD, parts);
        if (n > 1 && normalize_char(c, UNICODE_NFC, whole) == 1 && whole[0] == c)
            stable[parts[n - 1]] &= (uint8_t)~(1u << UNICODE_NFC | 1u << UNICODE_NFKC);
    }
}

static void init_once(void)
{
    stable = calloc(N_CHARS, 1);
    if (!stable) {
        init_result = -ENOMEM;
        return;
    }
    int32_t out[32];
    for (int32_t c = 0; c < N_CHARS; c++) {
        if (is_surrogate(c) || class_of(c) != 0)
            continue;
        for (enum unicode_form form = UNICODE_NFC; form <= UNICODE_NFKD; form++)
            if (normalize_char(c, form, out) == 1 && out[0] == c)
                stable[c] |= (uint8_t)(1u << form);
    }
    mark_joining();
}

int unicode_form_init(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, init_once);
    return init_result;
}

/* The end of the longest beginning of s[from..len) in which every character is stable. */
static size_t stable_run(enum unicode_form form, const uint8_t *s, size_t len, size_t from)
{
    size_t i = from, n;
    while (i < len) {
        if (s[i] < 0x80) {
            i += utf8_ascii_len(s + i, len - i);
            continue;
        }
        if (!(stable[utf8_get(s + i, &n)] >> form & 1))
            return i;
        i += n;
    }
    return len;
}

size_t unicode_form_stable(enum unicode_form form, const uint8_t *text, size_t len)
{
    size_t end = stable_run(form, text, len, 0);
    /* The last stable character may still be joined by the first one that is not. */
    return end < len && end > 0 ? (size_t)(utf8_before(text, text + end) - text) : end;
}

/* Sorts a run of combining characters by class, keeping the order within a class. Runs are short in honest text; a long one is counted out, since
 * sorting by exchange would let a megabyte of marks take hours. */
static int sort_marks(int32_t *run, size_t n)
{
    if (n <= 32) {
        for (size_t i = 1; i < n; i++) {
            int32_t c = run[i];
            size_t k = i;
            for (; k > 0 && class_of(run[k - 1]) > class_of(c); k--)
                run[k] = run[k - 1];
            run[k] = c;
        }
        return 0;
    }
    size_t starts[257] = {0};
    int32_t *sorted = malloc(n * sizeof *sorted);
    if (!sorted)
        return -ENOMEM;
    for (size_t i = 0; i < n; i++)
        starts[class_of(run[i]) + 1]++;
    for (int k = 0; k < 256; k++)
        starts[k + 1] += starts[k];
    for (size_t i = 0; i < n; i++)
        sorted[starts[class_of(run[i])]++] = run[i];
    memcpy(run, sorted, n * sizeof *run);
    free(sorted);
    return 0;
}

static int order_marks(int32_t *chars, size_t n)
{
    for (size_t i = 0; i < n;) {
        size_t end = i;
        while (end < n && class_of(chars[end]) != 0)
            end++;
        int r = end > i + 1 ? sort_marks(chars + i, end - i) : 0;
        if (r < 0)
            return r;
        i = end > i ? end : i + 1;
    }
    return 0;
}

static int make_room(int32_t **chars, size_t *cap, size_t n)
{
    if (n <= *cap)
        return 0;
    size_t want = n < 256 ? 256 : n + n / 2;
    int32_t *p = realloc(*chars, want * sizeof *p);
    if (!p)
        return -ENOMEM;
    *chars = p;
    *cap = want;
    return 0;
}

/* Normalizes a stretch that begins and ends where the text may be cut. */
static int append_stretch(enum unicode_form form, const uint8_t *text, size_t len, int32_t **chars, size_t *cap, struct buf *out)
{
    size_t n = 0, step;
    for (size_t i = 0; i < len; i += step) {
        int32_t c = (int32_t)utf8_get(text + i, &step);
        int boundary = 0, r = make_room(chars, cap, n + 32);
        if (r < 0)
            return r;
        utf8proc_ssize_t parts = utf8proc_decompose_char(c, *chars + n, 32, (utf8proc_option_t)options[form], &boundary);
        if (parts < 0 || parts > 32)
            return -EINVAL;
        n += (size_t)parts;
    }
    int r = order_marks(*chars, n);
    if (r < 0)
        return r;
    if (form == UNICODE_NFC || form == UNICODE_NFKC)
        n = (size_t)utf8proc_normalize_utf32(*chars, (utf8proc_ssize_t)n, (utf8proc_option_t)options[form]);
    for (size_t i = 0; i < n; i++) {
        uint8_t bytes[4];
        r = buf_append(out, bytes, utf8_put((uint32_t)(*chars)[i], bytes));
        if (r < 0)
            return r;
    }
    return 0;
}

int unicode_form_append(enum unicode_form form, const uint8_t *text, size_t len, int32_t **chars, size_t *cap, struct buf *out)
{
    size_t i = 0, n;
    while (i < len) {
        size_t copy = i + unicode_form_stable(form, text + i, len - i);
        int r = buf_append(out, text + i, copy - i);
        if (r < 0 || copy == len)
            return r;
        /* The stretch goes on until a stable character stands behind at least one that is not. */
        size_t end = copy;
        bool unstable = false;
        for (; end < len; end += n) {
            bool is_stable = stable[utf8_get(text + end, &n)] >> form & 1;
            if (is_stable && unstable)
                break;
            unstable |= !is_stable;
        }
        r = append_stretch(form, text + copy, end - copy, chars, cap, out);
        if (r < 0)
            return r;
        i = end;
    }
    return 0;
}
