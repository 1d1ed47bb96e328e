/* What stands beside a tokenizer.json: tokenizer_config.json (BOS, EOS, whether they are added, the chat template), generation_config.json (the ids that end
 * a generation) and chat_template.jinja. */
#include "router/text/tokenizer_json_private.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONFIG_BYTES_MAX ((size_t)32 << 20)

/* 1 and the text if the file exists, 0 if not. */
static int read_beside(const char *folder, const char *name, char **ret_text, size_t *ret_len, struct error *err)
{
    char path[4096];
    if ((size_t)snprintf(path, sizeof path, "%s%s", folder, name) >= sizeof path)
        return error_set(err, -ENAMETOOLONG, "%s: the path is too long", folder);
    int r = tokenizer_read_file(path, CONFIG_BYTES_MAX, ret_text, ret_len, err);
    return r == -ENOENT ? 0 : r < 0 ? r : 1;
}

/* A token given as its text or as an added token's object; TOKEN_NONE for null. */
static int token_of(struct json_part *p, struct tokenizer *tok, const struct json_str *field, int32_t *ret_id)
{
    static const char *const names[] = {"content"};
    struct json_str content = *field;
    char *text;
    size_t len;
    if (!field->data || field->data[0] == 'n')
        return 0;
    int r = field->data[0] == '{' ? part_fields(p, field, names, &content, 1) : 0;
    if (r == 0)
        r = part_string(p, &content, "bos_token and eos_token must be strings", &text, &len);
    if (r < 0)
        return r;
    int32_t id = tokenizer_special_id(tok, text, len);
    if (id != TOKEN_NONE)
        *ret_id = id;
    free(text);
    return 0;
}

/* add_bos_token and add_eos_token rule over the post-processor, as in transformers. */
static int set_around(struct json_part *p, const struct json_str *field, const char *what, int32_t id, int32_t *ids, size_t *n)
{
    bool add;
    if (!field->data || field->data[0] == 'n')
        return 0;
    int r = part_bool(p, field, false, what, &add);
    if (r < 0 || id == TOKEN_NONE)
        return r;
    bool has = *n == 1 && ids[0] == id;
    if (add && *n == 0)
        ids[(*n)++] = id;
    else if (!add && has)
        *n = 0;
    return 0;
}

/* A list of {"name", "template"}: the one named "default" counts. */
static int take_template(struct json_part *p, const struct json_str *item, void *arg)
{
    static const char *const names[] = {"name", "template"};
    struct json_str f[2];
    struct tokenizer *tok = arg;
    size_t len;
    int r = part_fields(p, item, names, f, 2);
    if (r < 0 || tok->chat_template || !f[0].data || f[0].len != 9 || memcmp(f[0].data, "\"default\"", 9) != 0)
        return r;
    return part_string(p, &f[1], "chat_template must be a string or a list of name and template", &tok->chat_template, &len);
}

static int read_template(struct json_part *p, struct tokenizer *tok, const struct json_str *field)
{
    size_t len;
    if (!field->data || field->data[0] == 'n')
        return 0;
    if (field->data[0] == '[')
        return part_items(p, field, "chat_template must be a string or a list", take_template, tok);
    return part_string(p, field, "chat_template must be a string or a list", &tok->chat_template, &len);
}

static int read_tokenizer_config(struct json_part *p, struct tokenizer *tok, const struct json_str *text)
{
    static const char *const names[] = {"bos_token", "eos_token", "add_bos_token", "add_eos_token", "chat_template"};
    struct json_str f[5];
    int r = part_fields(p, text, names, f, 5);
    if (r == 0)
        r = token_of(p, tok, &f[0], &tok->bos);
    if (r == 0)
        r = token_of(p, tok, &f[1], &tok->eos);
    if (r == 0)
        r = set_around(p, &f[2], "add_bos_token must be true or false", tok->bos, tok->prefix, &tok->n_prefix);
    if (r == 0)
        r = set_around(p, &f[3], "add_eos_token must be true or false", tok->eos, tok->suffix, &tok->n_suffix);
    return r < 0 ? r : read_template(p, tok, &f[4]);
}

static int take_eog(struct json_part *p, const struct json_str *item, void *arg)
{
    int64_t id;
    int r = part_int(p, item, TOKEN_NONE, "eos_token_id must be an integer or a list of integers", &id);
    if (r == 0 && id >= 0 && id <= INT32_MAX)
        tokenizer_add_eog(arg, (int32_t)id);
    return r;
}

static int read_generation_config(struct json_part *p, struct tokenizer *tok, const struct json_str *text)
{
    static const char *const names[] = {"eos_token_id"};
    struct json_str f;
    int r = part_fields(p, text, names, &f, 1);
    if (r < 0 || !f.data)
        return r;
    return f.data[0] == '[' ? part_items(p, &f, "eos_token_id must be a list of integers", take_eog, tok) : take_eog(p, &f, tok);
}

static int read_file(struct tokenizer *tok, const char *folder, const char *name, int (*read)(struct json_part *, struct tokenizer *, const struct json_str *), struct error *err)
{
    char *text;
    size_t len;
    int r = read_beside(folder, name, &text, &len, err);
    if (r <= 0)
        return r;
    struct json_part p = {.name = name, .base = text, .err = err};
    struct json_str all = {.data = text, .len = len};
    r = read(&p, tok, &all);
    free(text);
    return r;
}

int tokenizer_read_config(struct tokenizer *tok, const char *folder, struct error *err)
{
    char *template;
    size_t len;
    int r = read_file(tok, folder, "tokenizer_config.json", read_tokenizer_config, err);
    if (r == 0)
        r = read_file(tok, folder, "generation_config.json", read_generation_config, err);
    if (r < 0)
        return r;
    tokenizer_add_eog(tok, tok->eos);
    r = read_beside(folder, "chat_template.jinja", &template, &len, err);
    if (r > 0) {
        free(tok->chat_template);
        tok->chat_template = template;
    }
    return r < 0 ? r : 0;
}
