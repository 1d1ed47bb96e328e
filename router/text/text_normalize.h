/* Normalizers of tokenizer.json: what is done to a text before it is split. Built by one thread, then immutable.
 * Follows huggingface/tokenizers and Unicode Standard Annex 15; the character data is utf8proc's. */
#pragma once
#include "proto/base/buf.h"
#include "proto/base/error.h"
#include "router/text/text_regex.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NORMALIZE_OPS_MAX 32
#define NORMALIZE_BYTES_MAX ((size_t)1 << 30) /* no step may grow a text beyond */

enum normalize_kind {
    NORMALIZE_NFC,
    NORMALIZE_NFD,
    NORMALIZE_NFKC,
    NORMALIZE_NFKD,
    NORMALIZE_LOWERCASE,
    NORMALIZE_STRIP_ACCENTS, /* takes out marks (general category M) */
    NORMALIZE_PREPEND,       /* `content` before a text that is not empty */
    NORMALIZE_REPLACE,       /* `content` for every occurrence of `string`, or match of `regex` */
    NORMALIZE_STRIP,         /* white space at the ends */
};

struct normalize_op {
    enum normalize_kind kind;
    char *string;         /* owned; REPLACE, or NULL when `regex` is set */
    size_t string_len;
    struct regex *regex;  /* owned */
    char *content;        /* owned; PREPEND, REPLACE */
    size_t content_len;
    bool left, right;     /* STRIP */
};

struct normalizer {
    struct normalize_op ops[NORMALIZE_OPS_MAX]; /* sequences are flattened */
    size_t n;
};

/* Working memory of one thread; the result of one call lives in it until the next. */
struct normalize_work {
    struct buf bufs[2];
    int32_t *chars; /* [cap] */
    size_t cap;
};

void normalizer_fini(struct normalizer *norm);
/* Prepares the tables that the ops need; after the ops are set. */
int normalizer_finish(const struct normalizer *norm);

void normalize_work_init(struct normalize_work *work);
void normalize_work_fini(struct normalize_work *work);
/* *ret_text is `text` itself when nothing changes. `text` is well-formed UTF-8. -ENOMEM, -ENOBUFS, -EINVAL when a pattern runs into its limits. */
int normalize(const struct normalizer *norm, struct normalize_work *work, struct regex_matcher *matcher, const uint8_t *text, size_t len, const uint8_t **ret_text, size_t *ret_len);
