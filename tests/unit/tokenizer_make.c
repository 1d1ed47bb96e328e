#include "tests/unit/tokenizer_make.h"
#include "proto/base/base_assert.h"
#include "router/text/byte_alphabet.h"
#include "proto/base/utf8.h"
#include <stdio.h>

static const char *const merges[][2] = {{"a", "b"}, {"ab", "c"}, {"a", "a"}, {"\xc4\xa0", "\xc4\xa0"}, {"\xc4\xa0", "a"}, {"abc", "abc"}, {"b", "c"}, {"bc", "a"}, {"\xc3\x83", "\xc2\xa9"}};

static void put_vocab(struct buf *b)
{
    for (int i = 0; i < 256; i++) {
        uint8_t c[4];
        size_t n = utf8_put(byte_alphabet_char((uint8_t)i), c);
        bool escaped = c[0] == '"' || c[0] == '\\';
        buf_printf(b, "\"%s%.*s\":%d,", escaped ? "\\" : "", (int)n, (const char *)c, i);
    }
    for (size_t i = 0; i < ARRAY_LEN(merges); i++)
        buf_printf(b, "%s\"%s%s\":%zu", i ? "," : "", merges[i][0], merges[i][1], 256 + i);
}

struct tokenizer *tokenizer_make(const char *const added[], size_t n_added)
{
    struct buf b;
    struct error err;
    struct tokenizer *tok;
    buf_init(&b, 1 << 20);
    buf_append_str(&b, "{\"added_tokens\":[");
    for (size_t i = 0; i < n_added; i++)
        buf_printf(&b, "%s{\"id\":%zu,%s}", i ? "," : "", 256 + ARRAY_LEN(merges) + i, added[i]);
    buf_append_str(&b, "],\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\",\"vocab\":{");
    put_vocab(&b);
    buf_append_str(&b, "},\"merges\":[");
    for (size_t i = 0; i < ARRAY_LEN(merges); i++)
        buf_printf(&b, "%s\"%s %s\"", i ? "," : "", merges[i][0], merges[i][1]);
    buf_append_str(&b, "]}}");
    int r = tokenizer_open_json((const char *)b.data, b.len, &tok, &err);
    if (r < 0)
        fprintf(stderr, "tokenizer_make: %s\n", err.text);
    ASSERT(r == 0);
    buf_fini(&b);
    return tok;
}
