#include "router/text/neutralize.h"
#include "router/text/utf8.h"
#include <string.h>

/* U+FDD0 to U+FDD4 are EF B7 90 to EF B7 94. */
#define BREAK "\xef\xb7\x90"
#define ESCAPE "\xef\xb7\x91"
#define FOR_BREAK "\xef\xb7\x92"
#define FOR_ESCAPE "\xef\xb7\x93"
#define FOR_NOTHING "\xef\xb7\x94"
#define MARK_BYTES 3

/* 0x90 to 0x94 if one of the five stands at text[pos], else 0. */
static uint8_t mark_at(const uint8_t *text, size_t len, size_t pos)
{
    if (len - pos < MARK_BYTES || text[pos] != 0xef || text[pos + 1] != 0xb7)
        return 0;
    return text[pos + 2] >= 0x90 && text[pos + 2] <= 0x94 ? text[pos + 2] : 0;
}

/* True if the text could go on where a special token was begun: it begins with a proper end of one, or is as a whole a middle of one. */
static bool could_go_on(const struct neutralize_special tokens[], size_t n_tokens, const uint8_t *text, size_t len)
{
    for (size_t i = 0; i < n_tokens; i++) {
        const uint8_t *token = (const uint8_t *)tokens[i].text;
        for (size_t from = 1; from < tokens[i].len; from++) {
            size_t left = tokens[i].len - from;
            if (token[from] == text[0] && memcmp(token + from, text, left < len ? left : len) == 0)
                return true;
        }
    }
    return false;
}

/* True if some end of the text begins a special token that it does not finish. */
static bool could_begin(const struct text_trie *specials, const uint8_t *text, size_t len)
{
    size_t from = len > specials->longest ? len - specials->longest : 0;
    for (; from < len; from++)
        if (text_trie_begins(specials, text + from, len - from))
            return true;
    return false;
}

static int append(struct buf *out, const char *mark)
{
    return buf_append(out, mark, strlen(mark));
}

/* The character at text[pos], escaped if it is one of ours, and the break behind it if a special token begins there. */
static int append_char(const struct text_trie *specials, const uint8_t *text, size_t len, size_t pos, size_t n, struct buf *out)
{
    uint8_t mark = mark_at(text, len, pos);
    int r;
    if (mark == 0x90)
        r = append(out, ESCAPE FOR_BREAK);
    else if (mark == 0x91)
        r = append(out, ESCAPE FOR_ESCAPE);
    else
        r = buf_append(out, text + pos, n);
    size_t match;
    if (r == 0 && text_trie_longest(specials, text + pos, len - pos, &match) >= 0)
        r = append(out, BREAK);
    return r;
}

int neutralize_text(const struct text_trie *specials, const struct neutralize_special tokens[], size_t n_tokens, const uint8_t *text, size_t len, struct buf *out)
{
    if (len == 0)
        return 0;
    int r = could_go_on(tokens, n_tokens, text, len) ? append(out, ESCAPE FOR_NOTHING) : 0;
    size_t plain = 0, pos = 0;
    while (r == 0 && pos < len) {
        size_t n = utf8_char_bytes(text[pos]);
        if (specials->roots[text[pos]] < 0 && !mark_at(text, len, pos)) {
            pos += n;
            continue;
        }
        r = buf_append(out, text + plain, pos - plain);
        if (r == 0)
            r = append_char(specials, text, len, pos, n, out);
        pos += n;
        plain = pos;
    }
    if (r == 0)
        r = buf_append(out, text + plain, len - plain);
    if (r == 0 && could_begin(specials, text, len))
        r = append(out, BREAK);
    return r < 0 ? r : 0;
}

int neutralize_strip(const uint8_t *text, size_t len, struct buf *out)
{
    size_t plain = 0;
    for (size_t pos = 0; pos < len;) {
        const uint8_t *next = memchr(text + pos, 0xef, len - pos);
        if (!next)
            break;
        pos = (size_t)(next - text);
        uint8_t mark = mark_at(text, len, pos);
        size_t taken = 0;
        const char *stands_for = "";
        if (mark == 0x90) {
            taken = MARK_BYTES;
        } else if (mark == 0x91 && len - pos >= 2 * MARK_BYTES) {
            uint8_t code = mark_at(text, len, pos + MARK_BYTES);
            taken = code >= 0x92 ? 2 * MARK_BYTES : 0;
            stands_for = code == 0x92 ? BREAK : code == 0x93 ? ESCAPE : "";
        }
        if (!taken) {
            pos += utf8_char_bytes(text[pos]);
            continue;
        }
        int r = buf_append(out, text + plain, pos - plain);
        if (r == 0)
            r = append(out, stands_for);
        if (r < 0)
            return r;
        pos += taken;
        plain = pos;
    }
    return buf_append(out, text + plain, len - plain);
}
