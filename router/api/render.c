#include "router/api/api_private.h"
#include <errno.h>
#include <string.h>

int render_options(const struct api_request *req, struct buf *out)
{
    int rc = buf_printf(out, "{\"add_generation_prompt\":%s", req->add_generation_prompt ? "true" : "false");
    if (rc >= 0 && req->template_vars.len)
        rc = buf_append(out, ",", 1);
    if (rc >= 0)
        rc = buf_append(out, req->template_vars.data, req->template_vars.len);
    if (rc >= 0)
        rc = buf_append(out, "}", 1);
    return rc;
}

static bool is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

int render_cut_at_final_message(const struct api_request *req, const char *text, size_t len, size_t *ret_len)
{
    const char *content = (const char *)req->last_content.data;
    size_t n = req->last_content.len;
    while (n > 0 && is_space(content[n - 1]))
        n--;
    while (n > 0 && is_space(*content)) { /* many templates trim */
        content++;
        n--;
    }
    if (n == 0 || n > len)
        return -EINVAL;
    for (size_t at = len - n + 1; at-- > 0;)
        if (text[at] == *content && memcmp(text + at, content, n) == 0) {
            *ret_len = at + n;
            return 0;
        }
    return -EINVAL;
}

void render_drop_double_bos(const struct tokenizer *tok, struct token_ids *ids)
{
    int32_t bos = tokenizer_bos(tok);
    if (bos == TOKEN_NONE || ids->n < 2 || ids->data[0] != bos || ids->data[1] != bos)
        return;
    memmove(ids->data, ids->data + 1, (ids->n - 1) * sizeof(ids->data[0]));
    ids->n--;
}

int render_encode(const struct tokenizer *tok, const char *text, size_t len, bool add_special, struct token_ids *ids, struct error *err)
{
    int rc = tokenizer_encode(tok, text, len, TOKENIZE_RENDERED | (add_special ? TOKENIZE_ADD_SPECIAL : 0), ids, err);
    if (rc >= 0 && add_special)
        render_drop_double_bos(tok, ids);
    return rc;
}
