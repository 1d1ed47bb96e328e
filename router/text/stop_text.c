#include "router/text/stop_text.h"
#include "proto/base/utf8.h"
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define HELD_MAX ((size_t)1 << 30)
#define ROOT 0

/* A state of the automaton: the longest end of the bytes so far that begins a stop string. */
struct stop_node {
    int32_t child, sibling; /* first child, next sibling; -1: none */
    int32_t fail;           /* the state of the next shorter end */
    int32_t match;          /* the longest stop string that ends here, or -1 */
    uint32_t depth;
    uint8_t byte;
};

struct stop_text {
    struct stop_node *nodes; /* [n] */
    size_t n;
    size_t *lengths;         /* of the stop strings */
    bool include_stop;
    int matched;
    int32_t state;
    struct buf held;         /* bytes that are not out yet */
};

static int32_t child_of(const struct stop_text *s, int32_t node, uint8_t byte)
{
    int32_t c = s->nodes[node].child;
    while (c >= 0 && s->nodes[c].byte != byte)
        c = s->nodes[c].sibling;
    return c;
}

static int32_t next_state(const struct stop_text *s, int32_t node, uint8_t byte)
{
    int32_t c;
    while ((c = child_of(s, node, byte)) < 0 && node != ROOT)
        node = s->nodes[node].fail;
    return c < 0 ? ROOT : c;
}

/* `nodes` has room for all bytes of all strings. */
static void add_string(struct stop_text *s, const struct stop_string *stop, int index)
{
    int32_t node = ROOT;
    for (size_t i = 0; i < stop->len; i++) {
        uint8_t byte = (uint8_t)stop->text[i];
        int32_t c = child_of(s, node, byte);
        if (c < 0) {
            c = (int32_t)s->n++;
            s->nodes[c] = (struct stop_node){.child = -1, .sibling = s->nodes[node].child, .match = -1, .depth = s->nodes[node].depth + 1, .byte = byte};
            s->nodes[node].child = c;
        }
        node = c;
    }
    if (s->nodes[node].match < 0)
        s->nodes[node].match = index;
}

/* Breadth first, so that a node's shorter ends are done before it. `queue` has room for all nodes. */
static void link_failures(struct stop_text *s, int32_t *queue)
{
    size_t head = 0, tail = 0;
    queue[tail++] = ROOT;
    while (head < tail) {
        int32_t node = queue[head++];
        for (int32_t c = s->nodes[node].child; c >= 0; c = s->nodes[c].sibling) {
            int32_t fail = node == ROOT ? ROOT : next_state(s, s->nodes[node].fail, s->nodes[c].byte);
            s->nodes[c].fail = fail;
            if (s->nodes[c].match < 0)
                s->nodes[c].match = s->nodes[fail].match;
            queue[tail++] = c;
        }
    }
}

static int check_strings(const struct stop_string stops[], size_t n, size_t *ret_bytes)
{
    size_t bytes = 0;
    if (n > STOP_STRINGS_MAX)
        return -E2BIG;
    for (size_t i = 0; i < n; i++) {
        if (stops[i].len > STOP_STRING_BYTES_MAX)
            return -E2BIG;
        if (stops[i].len == 0 || utf8_valid_len(stops[i].text, stops[i].len) < stops[i].len)
            return -EINVAL;
        bytes += stops[i].len;
    }
    *ret_bytes = bytes;
    return 0;
}

int stop_text_create(const struct stop_string stops[], size_t n, bool include_stop, struct stop_text **ret_stop)
{
    size_t bytes;
    int r = check_strings(stops, n, &bytes);
    if (r < 0)
        return r;
    struct stop_text *s = calloc(1, sizeof *s);
    int32_t *queue = malloc((bytes + 1) * sizeof *queue);
    if (!s || !queue)
        goto fail;
    buf_init(&s->held, HELD_MAX);
    s->include_stop = include_stop;
    s->matched = -1;
    s->nodes = malloc((bytes + 1) * sizeof *s->nodes);
    s->lengths = malloc((n + 1) * sizeof *s->lengths);
    if (!s->nodes || !s->lengths)
        goto fail;
    s->nodes[s->n++] = (struct stop_node){.child = -1, .sibling = -1, .match = -1};
    for (size_t i = 0; i < n; i++) {
        s->lengths[i] = stops[i].len;
        add_string(s, &stops[i], (int)i);
    }
    link_failures(s, queue);
    free(queue);
    *ret_stop = s;
    return 0;
fail:
    free(queue);
    stop_text_free(s);
    return -ENOMEM;
}

void stop_text_free(struct stop_text *s)
{
    if (!s)
        return;
    buf_fini(&s->held);
    free(s->nodes);
    free(s->lengths);
    free(s);
}

/* The stop string is complete behind held[0..end). */
static int finish(struct stop_text *s, size_t end, int matched, struct buf *out)
{
    size_t start = end - s->lengths[matched];
    int r = utf8_append_text(out, s->held.data, start, true);
    if (r == 0 && s->include_stop)
        r = buf_append(out, s->held.data + start, end - start);
    if (r < 0)
        return r;
    s->matched = matched;
    buf_fini(&s->held);
    return 1;
}

/* Gives out what is certain: all but the bytes that may begin a stop string, and an incomplete character. A stop string begins with a whole
 * character, so a character that is incomplete before one stays so. */
static int give_out(struct stop_text *s, struct buf *out)
{
    size_t depth = s->nodes[s->state].depth, n = s->held.len - depth;
    int r = utf8_append_text(out, s->held.data, n, depth > 0);
    if (r < 0)
        return r;
    buf_consume(&s->held, n - (size_t)r);
    return 0;
}

int stop_text_push(struct stop_text *s, const void *bytes, size_t n, bool may_stop, struct buf *out)
{
    const uint8_t *p = bytes;
    if (s->matched >= 0)
        return 1;
    size_t before = s->held.len;
    int r = buf_append(&s->held, bytes, n);
    if (r < 0)
        return r;
    if (!may_stop)
        s->state = ROOT;
    for (size_t i = 0; may_stop && i < n; i++) {
        s->state = next_state(s, s->state, p[i]);
        int matched = s->nodes[s->state].match;
        if (matched >= 0)
            return finish(s, before + i + 1, matched, out);
    }
    return give_out(s, out);
}

int stop_text_flush(struct stop_text *s, struct buf *out)
{
    int r = s->matched >= 0 ? 0 : utf8_append_text(out, s->held.data, s->held.len, true);
    if (r == 0) {
        buf_clear(&s->held);
        s->state = ROOT;
    }
    return r;
}

int stop_text_matched(const struct stop_text *s)
{
    return s->matched;
}
