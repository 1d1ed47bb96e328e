#include "router/text/added_tokens.h"
#include "router/text/char_class.h"
#include "router/text/neutralize.h"
#include "proto/base/utf8.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

void text_trie_init(struct text_trie *t)
{
    *t = (struct text_trie){0};
    memset(t->roots, 0xff, sizeof t->roots);
}

void text_trie_fini(struct text_trie *t)
{
    free(t->nodes);
    t->nodes = NULL;
    t->n = t->cap = 0;
}

static int32_t new_node(struct text_trie *t, uint8_t byte, int32_t sibling)
{
    if (t->n == t->cap) {
        size_t cap = t->cap ? t->cap * 2 : 256;
        struct trie_node *nodes = cap <= INT32_MAX ? realloc(t->nodes, cap * sizeof *nodes) : NULL;
        if (!nodes)
            return -1;
        t->nodes = nodes;
        t->cap = cap;
    }
    t->nodes[t->n] = (struct trie_node){.child = -1, .sibling = sibling, .value = -1, .byte = byte};
    return (int32_t)t->n++;
}

static int32_t find_child(const struct text_trie *t, int32_t node, uint8_t byte)
{
    int32_t c = t->nodes[node].child;
    while (c >= 0 && t->nodes[c].byte != byte)
        c = t->nodes[c].sibling;
    return c;
}

int text_trie_add(struct text_trie *t, const void *text, size_t len, int32_t value)
{
    const uint8_t *s = text;
    if (len == 0 || len > ADDED_TOKEN_BYTES_MAX)
        return -EINVAL;
    int32_t node = t->roots[s[0]];
    if (node < 0) {
        node = new_node(t, s[0], -1);
        if (node < 0)
            return -ENOMEM;
        t->roots[s[0]] = node;
    }
    for (size_t i = 1; i < len; i++) {
        int32_t c = find_child(t, node, s[i]);
        if (c < 0) {
            c = new_node(t, s[i], t->nodes[node].child);
            if (c < 0)
                return -ENOMEM;
            t->nodes[node].child = c;
        }
        node = c;
    }
    if (t->nodes[node].value < 0)
        t->nodes[node].value = value;
    if (len > t->longest)
        t->longest = len;
    return 0;
}

int32_t text_trie_longest(const struct text_trie *t, const uint8_t *s, size_t n, size_t *ret_len)
{
    int32_t value = -1, node = t->roots[s[0]];
    for (size_t i = 1; node >= 0; i++) {
        if (t->nodes[node].value >= 0) {
            value = t->nodes[node].value;
            *ret_len = i;
        }
        if (i == n)
            break;
        node = find_child(t, node, s[i]);
    }
    return value;
}

/* The node that s[0..n) leads to, or -1. */
static int32_t walk(const struct text_trie *t, const uint8_t *s, size_t n)
{
    int32_t node = n ? t->roots[s[0]] : -1;
    for (size_t i = 1; node >= 0 && i < n; i++)
        node = find_child(t, node, s[i]);
    return node;
}

int32_t text_trie_exact(const struct text_trie *t, const void *s, size_t n)
{
    int32_t node = walk(t, s, n);
    return node < 0 ? -1 : t->nodes[node].value;
}

bool text_trie_begins(const struct text_trie *t, const uint8_t *s, size_t n)
{
    int32_t node = walk(t, s, n);
    return node >= 0 && t->nodes[node].child >= 0;
}

static bool is_at(const uint8_t *text, size_t pos, unsigned class)
{
    size_t n;
    return char_class_of(utf8_get(text + pos, &n)) & class;
}

static bool word_before(const uint8_t *text, size_t pos)
{
    return pos > 0 && is_at(text, (size_t)(utf8_before(text, text + pos) - text), CHAR_WORD);
}

static size_t spaces_before(const uint8_t *text, size_t floor, size_t pos)
{
    while (pos > floor) {
        size_t before = (size_t)(utf8_before(text + floor, text + pos) - text);
        if (!is_at(text, before, CHAR_SPACE))
            break;
        pos = before;
    }
    return pos;
}

static size_t spaces_behind(const uint8_t *text, size_t pos, size_t len)
{
    while (pos < len && is_at(text, pos, CHAR_SPACE))
        pos += utf8_char_bytes(text[pos]);
    return pos;
}

static bool accepted(const struct added_scan *scan, const struct added_token *token, size_t start, size_t stop)
{
    if (scan->skip_special && token->special)
        return false;
    if (start < scan->floor)
        return false; /* inside the white space that the match before has taken */
    if (scan->refuse_marked && neutralize_mark_at(scan->text, scan->len, stop))
        return false;
    if (token->single_word && (word_before(scan->text, start) || (stop < scan->len && is_at(scan->text, stop, CHAR_WORD))))
        return false;
    return true;
}

bool added_scan_next(struct added_scan *scan, struct added_match *ret_match)
{
    const uint8_t *text = scan->text;
    const int32_t *roots = scan->trie->roots;
    for (;;) {
        while (scan->at < scan->len && roots[text[scan->at]] < 0)
            scan->at++;
        if (scan->at >= scan->len)
            return false;
        size_t n, start = scan->at;
        int32_t index = text_trie_longest(scan->trie, text + start, scan->len - start, &n);
        if (index < 0) {
            scan->at++;
            continue;
        }
        const struct added_token *token = &scan->tokens[index];
        scan->at = start + n;
        if (!accepted(scan, token, start, start + n))
            continue;
        ret_match->token = token;
        ret_match->start = token->lstrip ? spaces_before(text, scan->floor, start) : start;
        ret_match->stop = token->rstrip ? spaces_behind(text, start + n, scan->len) : start + n;
        scan->floor = ret_match->stop;
        return true;
    }
}
