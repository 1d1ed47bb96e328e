/* tokenizer.json: normalizers, pre-tokenizers and post-processors. */
#include "router/text/tokenizer_json_private.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* A pattern, {"String": ...} or {"Regex": ...}: exactly one of the two results is set. */
struct pattern {
    char *string; /* owned by the caller */
    size_t len;
    bool is_regex;
};

static int read_pattern(struct json_part *p, const struct json_str *field, struct pattern *ret_pattern)
{
    static const char *const names[] = {"String", "Regex"};
    struct json_str f[2];
    if (!field->data)
        return part_fail(p, "\"pattern\" is missing");
    int r = part_fields(p, field, names, f, 2);
    if (r < 0)
        return r;
    ret_pattern->is_regex = f[1].data;
    r = part_string(p, f[1].data ? &f[1] : &f[0], "\"pattern\" must have \"String\" or \"Regex\"", &ret_pattern->string, &ret_pattern->len);
    if (r == 0 && ret_pattern->len == 0) {
        free(ret_pattern->string);
        return part_fail(p, "\"pattern\" is empty");
    }
    return r;
}

/* Normalizers. */

static int read_normalizer_item(struct json_part *p, const struct json_str *item, void *arg)
{
    return json_read_normalizer(p, item, arg);
}

static int read_replace(struct json_part *p, const struct json_str *pattern_field, const struct json_str *content, struct normalize_op *op)
{
    struct pattern pattern;
    op->kind = NORMALIZE_REPLACE;
    int r = read_pattern(p, pattern_field, &pattern);
    if (r < 0)
        return r;
    if (pattern.is_regex) {
        r = regex_compile(pattern.string, pattern.len, &op->regex, p->err);
        free(pattern.string);
    } else {
        op->string = pattern.string;
        op->string_len = pattern.len;
    }
    return r < 0 ? r : part_string(p, content, "\"content\" must be a string", &op->content, &op->content_len);
}

int json_read_normalizer(struct json_part *p, const struct json_str *text, struct normalizer *norm)
{
    static const char *const names[] = {"type", "normalizers", "prepend", "pattern", "content", "strip_left", "strip_right"};
    static const struct {
        const char *type;
        enum normalize_kind kind;
    } plain[] = {{"NFC", NORMALIZE_NFC},   {"NFD", NORMALIZE_NFD},           {"NFKC", NORMALIZE_NFKC},
                 {"NFKD", NORMALIZE_NFKD}, {"Lowercase", NORMALIZE_LOWERCASE}, {"StripAccents", NORMALIZE_STRIP_ACCENTS}};
    struct json_str f[7];
    char type[PART_TYPE_MAX];
    int r = part_fields(p, text, names, f, 7);
    if (r == 0)
        r = part_type(p, &f[0], type);
    if (r < 0)
        return r;
    if (strcmp(type, "Sequence") == 0)
        return part_items(p, &f[1], "\"normalizers\" must be an array", read_normalizer_item, norm);
    if (norm->n == NORMALIZE_OPS_MAX)
        return part_fail(p, "too many steps");
    struct normalize_op *op = &norm->ops[norm->n];
    *op = (struct normalize_op){0};
    norm->n++; /* from here on the normalizer owns what the op holds */
    for (size_t i = 0; i < sizeof plain / sizeof *plain; i++) {
        if (strcmp(type, plain[i].type) == 0) {
            op->kind = plain[i].kind;
            return 0;
        }
    }
    if (strcmp(type, "Prepend") == 0) {
        op->kind = NORMALIZE_PREPEND;
        return part_string(p, &f[2], "\"prepend\" must be a string", &op->content, &op->content_len);
    }
    if (strcmp(type, "Replace") == 0)
        return read_replace(p, &f[3], &f[4], op);
    if (strcmp(type, "Strip") == 0) {
        op->kind = NORMALIZE_STRIP;
        r = part_bool(p, &f[5], true, "\"strip_left\" must be true or false", &op->left);
        return r < 0 ? r : part_bool(p, &f[6], true, "\"strip_right\" must be true or false", &op->right);
    }
    return part_unsupported(p, type);
}

/* Pre-tokenizers. */

struct pretok_reader {
    struct pretokenizer *pt;
    bool byte_level; /* one ByteLevel was met */
};

static int add_op(struct json_part *p, struct pretok_reader *reader, struct pretok_op *op)
{
    bool splits = op->kind != PRETOK_PREFIX && op->kind != PRETOK_METASPACE;
    const char *complaint = reader->pt->n == PRETOK_OPS_MAX ? "too many steps" : !splits && reader->byte_level ? "a step that changes text may not stand behind ByteLevel" : NULL;
    if (complaint) {
        regex_free(op->regex);
        free(op->string);
        return part_fail(p, complaint);
    }
    op->mapped = reader->byte_level;
    reader->pt->ops[reader->pt->n++] = *op;
    return 0;
}

static int read_behavior(struct json_part *p, const struct json_str *field, enum pretok_behavior fallback, enum pretok_behavior *ret_behavior)
{
    static const char *const names[] = {
        [PRETOK_REMOVED] = "Removed", [PRETOK_ISOLATED] = "Isolated", [PRETOK_MERGED_WITH_PREVIOUS] = "MergedWithPrevious",
        [PRETOK_MERGED_WITH_NEXT] = "MergedWithNext", [PRETOK_CONTIGUOUS] = "Contiguous",
    };
    char *text;
    size_t len;
    *ret_behavior = fallback;
    if (!field->data)
        return 0;
    int r = part_string(p, field, "\"behavior\" must be a string", &text, &len);
    if (r < 0)
        return r;
    r = part_fail(p, "\"behavior\" must be Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(text, names[i]) == 0) {
            *ret_behavior = (enum pretok_behavior)i;
            r = 0;
        }
    }
    free(text);
    return r;
}

static int add_regex(struct json_part *p, struct pretok_reader *reader, const char *pattern, size_t len, enum pretok_behavior behavior, bool invert)
{
    struct pretok_op op = {.kind = PRETOK_REGEX, .behavior = behavior, .invert = invert};
    if (behavior == PRETOK_ISOLATED && (op.scan = scan_find(pattern, len))) {
        op.kind = PRETOK_SCAN;
        return add_op(p, reader, &op);
    }
    int r = regex_compile(pattern, len, &op.regex, p->err);
    return r < 0 ? r : add_op(p, reader, &op);
}

static int read_split(struct json_part *p, struct pretok_reader *reader, const struct json_str *pattern_field, const struct json_str *behavior_field, const struct json_str *invert_field)
{
    struct pattern pattern;
    enum pretok_behavior behavior;
    bool invert;
    int r = read_behavior(p, behavior_field, PRETOK_ISOLATED, &behavior);
    if (r == 0)
        r = part_bool(p, invert_field, false, "\"invert\" must be true or false", &invert);
    if (r == 0)
        r = read_pattern(p, pattern_field, &pattern);
    if (r < 0)
        return r;
    if (pattern.is_regex) {
        r = add_regex(p, reader, pattern.string, pattern.len, behavior, invert);
        free(pattern.string);
        return r;
    }
    struct pretok_op op = {.kind = PRETOK_STRING, .behavior = behavior, .invert = invert, .string = pattern.string, .string_len = pattern.len};
    return add_op(p, reader, &op);
}

static int read_byte_level(struct json_part *p, struct pretok_reader *reader, const struct json_str *add_prefix, const struct json_str *use_regex)
{
    bool prefix, regex;
    int r = part_bool(p, add_prefix, true, "\"add_prefix_space\" must be true or false", &prefix);
    if (r == 0)
        r = part_bool(p, use_regex, true, "\"use_regex\" must be true or false", &regex);
    if (r < 0)
        return r;
    if (reader->byte_level)
        return part_fail(p, "ByteLevel may stand only once");
    struct pretok_op op = {.kind = PRETOK_PREFIX};
    if (prefix)
        r = add_op(p, reader, &op);
    if (r == 0 && regex)
        r = add_regex(p, reader, SCAN_GPT2, strlen(SCAN_GPT2), PRETOK_ISOLATED, false);
    reader->byte_level = true;
    return r;
}

static int read_prepend_scheme(struct json_part *p, const struct json_str *scheme, const struct json_str *add_prefix, enum pretok_prepend *ret_prepend)
{
    static const char *const names[] = {[PRETOK_PREPEND_NEVER] = "never", [PRETOK_PREPEND_FIRST] = "first", [PRETOK_PREPEND_ALWAYS] = "always"};
    bool legacy;
    char *text;
    size_t len;
    int r = part_bool(p, add_prefix, true, "\"add_prefix_space\" must be true or false", &legacy);
    *ret_prepend = legacy ? PRETOK_PREPEND_ALWAYS : PRETOK_PREPEND_NEVER;
    if (r < 0 || !scheme->data)
        return r;
    r = part_string(p, scheme, "\"prepend_scheme\" must be a string", &text, &len);
    if (r < 0)
        return r;
    r = part_fail(p, "\"prepend_scheme\" must be always, first or never");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(text, names[i]) == 0) {
            *ret_prepend = (enum pretok_prepend)i;
            r = 0;
        }
    }
    free(text);
    return r;
}

static int read_metaspace(struct json_part *p, struct pretok_reader *reader, const struct json_str *replacement, const struct json_str *scheme, const struct json_str *add_prefix,
                          const struct json_str *split_field)
{
    struct pretok_op op = {.kind = PRETOK_METASPACE}, split = {.kind = PRETOK_STRING, .behavior = PRETOK_MERGED_WITH_NEXT};
    bool splits;
    int r = read_prepend_scheme(p, scheme, add_prefix, &op.prepend);
    if (r == 0)
        r = part_bool(p, split_field, true, "\"split\" must be true or false", &splits);
    if (r == 0)
        r = part_string(p, replacement, "\"replacement\" must be a string", &op.string, &op.string_len);
    if (r < 0)
        return r;
    if (op.string_len == 0) {
        free(op.string);
        return part_fail(p, "\"replacement\" is empty");
    }
    split.string = splits ? strdup(op.string) : NULL;
    split.string_len = op.string_len;
    r = add_op(p, reader, &op);
    if (r < 0 || !splits) {
        free(split.string);
        return r;
    }
    return split.string ? add_op(p, reader, &split) : error_set(p->err, -ENOMEM, "out of memory");
}

static int add_chars(struct json_part *p, struct pretok_reader *reader, bool (*is_delimiter)(uint32_t), enum pretok_behavior behavior)
{
    struct pretok_op op = {.kind = PRETOK_CHARS, .behavior = behavior, .is_delimiter = is_delimiter};
    return add_op(p, reader, &op);
}

static int read_pretokenizer(struct json_part *p, const struct json_str *text, struct pretok_reader *reader);

static int read_pretokenizer_item(struct json_part *p, const struct json_str *item, void *arg)
{
    return read_pretokenizer(p, item, arg);
}

/* \w as Rust's regex defines it, which this pre-tokenizer was written with. */
#define RUST_WORD "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{200c}\\x{200d}"
static const char whitespace_pattern[] = "[" RUST_WORD "]+|[^" RUST_WORD "\\s]+";

static int read_pretokenizer(struct json_part *p, const struct json_str *text, struct pretok_reader *reader)
{
    static const char *const names[] = {"type", "pretokenizers", "pattern", "behavior", "invert", "add_prefix_space", "use_regex", "individual_digits", "replacement", "prepend_scheme", "split"};
    struct json_str f[11];
    char type[PART_TYPE_MAX];
    enum pretok_behavior behavior;
    bool individual;
    int r = part_fields(p, text, names, f, 11);
    if (r == 0)
        r = part_type(p, &f[0], type);
    if (r < 0)
        return r;
    if (strcmp(type, "Sequence") == 0)
        return part_items(p, &f[1], "\"pretokenizers\" must be an array", read_pretokenizer_item, reader);
    if (strcmp(type, "Split") == 0)
        return read_split(p, reader, &f[2], &f[3], &f[4]);
    if (strcmp(type, "ByteLevel") == 0)
        return read_byte_level(p, reader, &f[5], &f[6]);
    if (strcmp(type, "Metaspace") == 0)
        return read_metaspace(p, reader, &f[8], &f[9], &f[5], &f[10]);
    if (strcmp(type, "Whitespace") == 0)
        return add_regex(p, reader, whitespace_pattern, strlen(whitespace_pattern), PRETOK_REMOVED, true);
    if (strcmp(type, "WhitespaceSplit") == 0)
        return add_chars(p, reader, pretok_is_space, PRETOK_REMOVED);
    if (strcmp(type, "Punctuation") == 0) {
        r = read_behavior(p, &f[3], PRETOK_ISOLATED, &behavior);
        return r < 0 ? r : add_chars(p, reader, pretok_is_punctuation, behavior);
    }
    if (strcmp(type, "Digits") == 0) {
        r = part_bool(p, &f[7], false, "\"individual_digits\" must be true or false", &individual);
        if (r == 0 && individual)
            return add_regex(p, reader, SCAN_DIGIT, strlen(SCAN_DIGIT), PRETOK_ISOLATED, false);
        return r < 0 ? r : add_chars(p, reader, pretok_is_number, PRETOK_CONTIGUOUS);
    }
    return part_unsupported(p, type);
}

int json_read_pretokenizer(struct json_part *p, const struct json_str *text, struct pretokenizer *pt, bool *ret_byte_level)
{
    struct pretok_reader reader = {.pt = pt};
    int r = read_pretokenizer(p, text, &reader);
    if (r == 0)
        *ret_byte_level = reader.byte_level;
    return r;
}

/* Post-processors: of TemplateProcessing what stands around the sequence A in "single". */

struct template_reader {
    struct tokenizer *tok;
    struct json_str special_tokens; /* raw object */
    bool behind;                    /* the sequence was met */
};

/* Appends the ids that "special_tokens" gives for `name`. */
static int add_template_token(struct json_part *p, struct template_reader *t, const char *name)
{
    static const char *const inner[] = {"ids"};
    const char *const outer[] = {name};
    struct json_str entry, ids;
    int r = t->special_tokens.data ? part_fields(p, &t->special_tokens, outer, &entry, 1) : part_fail(p, "\"special_tokens\" is missing");
    if (r == 0 && !entry.data)
        r = part_fail(p, "a token of the template is not in \"special_tokens\"");
    if (r == 0)
        r = part_fields(p, &entry, inner, &ids, 1);
    if (r < 0)
        return r;
    struct json j;
    json_init(&j, ids.data ? ids.data : "", ids.len);
    json_array(&j);
    while (r == 0 && json_next_item(&j)) {
        int64_t id;
        size_t *n = t->behind ? &t->tok->n_suffix : &t->tok->n_prefix;
        if (json_int(&j, &id) < 0)
            break;
        if (id < 0 || (size_t)id >= t->tok->vocab.n || !(t->tok->vocab.tokens[id].flags & VOCAB_PRESENT) || *n == TOKENIZER_SPECIALS_AROUND_MAX)
            r = part_fail(p, "an id of \"special_tokens\" is not in the vocabulary, or there are too many");
        else
            (t->behind ? t->tok->suffix : t->tok->prefix)[(*n)++] = (int32_t)id;
    }
    if (r == 0 && j.error)
        r = part_fail(p, "\"ids\" must be an array of integers");
    json_fini(&j);
    return r;
}

static int read_template_item(struct json_part *p, const struct json_str *item, void *arg)
{
    static const char *const names[] = {"SpecialToken", "Sequence"};
    static const char *const inner[] = {"id"};
    struct json_str f[2], id;
    struct template_reader *t = arg;
    char *name;
    size_t len;
    int r = part_fields(p, item, names, f, 2);
    if (r < 0)
        return r;
    if (f[1].data) {
        t->behind = true;
        return 0;
    }
    if (!f[0].data)
        return part_fail(p, "\"single\" must hold SpecialToken and Sequence");
    r = part_fields(p, &f[0], inner, &id, 1);
    if (r == 0)
        r = part_string(p, &id, "SpecialToken has no \"id\"", &name, &len);
    if (r < 0)
        return r;
    r = add_template_token(p, t, name);
    free(name);
    return r;
}

static int read_post_processor_item(struct json_part *p, const struct json_str *item, void *arg)
{
    return json_read_post_processor(p, item, arg);
}

int json_read_post_processor(struct json_part *p, const struct json_str *text, struct tokenizer *tok)
{
    static const char *const names[] = {"type", "processors", "single", "special_tokens"};
    struct json_str f[4];
    char type[PART_TYPE_MAX];
    int r = part_fields(p, text, names, f, 4);
    if (r == 0)
        r = part_type(p, &f[0], type);
    if (r < 0)
        return r;
    if (strcmp(type, "Sequence") == 0)
        return part_items(p, &f[1], "\"processors\" must be an array", read_post_processor_item, tok);
    if (strcmp(type, "ByteLevel") == 0)
        return 0; /* it moves offsets only */
    if (strcmp(type, "TemplateProcessing") == 0) {
        struct template_reader t = {.tok = tok, .special_tokens = f[3]};
        return part_items(p, &f[2], "\"single\" must be an array", read_template_item, &t);
    }
    return part_unsupported(p, type);
}
