/* Any tokenizer.json, then any text: opening gives an error or a tokenizer; encoding stays within its limits, and what it gives decodes. The input is the
 * file, a zero byte, and the text. A small GGUF takes the place of the file when it begins with the magic. */
#include "formats/gguf.h"
#include "router/text/tokenizer.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void use(const struct tokenizer *tok, const char *text, size_t len)
{
    struct token_ids ids = {0};
    struct buf out;
    buf_init(&out, 1 << 20);
    for (int flags = 0; flags < 8; flags++) {
        ids.n = 0;
        if (tokenizer_encode(tok, text, len, flags, &ids, NULL) < 0)
            continue;
        buf_clear(&out);
        if (tokenizer_decode(tok, ids.data, ids.n, flags & 1, &out) == -ERANGE)
            abort();
    }
    /* Nothing that a user wrote becomes a special token. */
    struct buf marked;
    buf_init(&marked, 1 << 20);
    ids.n = 0;
    if (tokenizer_neutralize(tok, text, len, &marked) == 0 && tokenizer_encode(tok, (const char *)marked.data, marked.len, TOKENIZE_RENDERED, &ids, NULL) == 0) {
        struct token_ids plain = {0};
        if (tokenizer_encode(tok, text, len, 0, &plain, NULL) == 0 && (plain.n != ids.n || (ids.n && memcmp(plain.data, ids.data, ids.n * sizeof *ids.data) != 0)))
            abort();
        token_ids_fini(&plain);
    }
    buf_fini(&marked);
    buf_fini(&out);
    token_ids_fini(&ids);
}

static int open_any(const uint8_t *file, size_t n, struct tokenizer **ret_tok)
{
    struct gguf *gguf;
    if (n < 4 || memcmp(file, "GGUF", 4) != 0)
        return tokenizer_open_json((const char *)file, n, ret_tok, NULL);
    if (gguf_open_memory(file, n, &gguf, NULL) < 0)
        return -EINVAL;
    int r = tokenizer_from_gguf(gguf, ret_tok, NULL);
    gguf_close(gguf);
    return r;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    /* The last zero byte divides: GGUF files are full of them. */
    const uint8_t *zero = size ? memrchr(data, 0, size) : NULL;
    size_t n = zero ? (size_t)(zero - data) : size;
    struct tokenizer *tok;
    if (open_any(data, n, &tok) < 0)
        return 0;
    use(tok, zero ? (const char *)zero + 1 : "", zero ? size - n - 1 : 0);
    tokenizer_close(tok);
    return 0;
}
