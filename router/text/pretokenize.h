/* Pre-tokenizers of tokenizer.json: how a normalized text is cut into the pieces that the model encodes one by one. Built by one thread, then
 * immutable. Follows huggingface/tokenizers. */
#pragma once
#include "proto/base/buf.h"
#include "router/text/pretoken_scan.h"
#include "router/text/text_regex.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PRETOK_OPS_MAX 24
#define PRETOK_BATCH 64

enum pretok_kind {
    PRETOK_SCAN,       /* a hand-written scanner; every piece is kept */
    PRETOK_REGEX,      /* the delimiters are the matches of `regex` */
    PRETOK_STRING,     /* the delimiters are the occurrences of `string` */
    PRETOK_CHARS,      /* the delimiters are single characters that `is_delimiter` accepts */
    PRETOK_PREFIX,     /* a space before a piece that does not begin with one */
    PRETOK_METASPACE,  /* each space becomes `string`, and a piece may get one in front */
};

enum pretok_behavior { PRETOK_REMOVED, PRETOK_ISOLATED, PRETOK_MERGED_WITH_PREVIOUS, PRETOK_MERGED_WITH_NEXT, PRETOK_CONTIGUOUS };
enum pretok_prepend { PRETOK_PREPEND_NEVER, PRETOK_PREPEND_FIRST, PRETOK_PREPEND_ALWAYS };

struct pretok_op {
    enum pretok_kind kind;
    enum pretok_behavior behavior;   /* REGEX, STRING, CHARS */
    bool invert;                     /* delimiters and the rest change roles */
    scan_fn *scan;                   /* SCAN */
    struct regex *regex;             /* REGEX, owned */
    char *string;                    /* STRING, METASPACE; owned */
    size_t string_len;
    bool (*is_delimiter)(uint32_t c); /* CHARS */
    bool mapped;                     /* comes behind ByteLevel, so it sees the stand-ins for bytes; not for PREFIX and METASPACE */
    enum pretok_prepend prepend;     /* METASPACE */
};

struct pretokenizer {
    struct pretok_op ops[PRETOK_OPS_MAX]; /* sequences are flattened; ByteLevel's prefix and pattern and Metaspace's split are ops of their own */
    size_t n;
};

struct text_piece {
    const uint8_t *data;
    size_t len; /* at least 1 */
};

/* Takes the next pieces, n <= PRETOK_BATCH; bytes up to `readable_end` may be read. 0 or a negative errno, which ends the walk. */
typedef int pieces_fn(void *arg, const struct text_piece pieces[], size_t n, const uint8_t *readable_end);

/* Working memory of one thread. */
struct pretok_work {
    struct regex_matcher *matcher; /* borrowed */
    pieces_fn *take;
    void *arg;
    struct buf scratch[PRETOK_OPS_MAX]; /* what an op that changes text has written */
    const uint8_t *readable_end;
    struct text_piece batch[PRETOK_BATCH];
    size_t n_batch;
};

void pretokenizer_fini(struct pretokenizer *pt);
void pretok_work_init(struct pretok_work *work, struct regex_matcher *matcher, pieces_fn *take, void *arg);
void pretok_work_fini(struct pretok_work *work);
/* Cuts one text. `at_start`: it begins where the user's text begins. -ENOMEM, -EINVAL when a pattern runs into its limits, or what `take` returned. */
int pretokenize(const struct pretokenizer *pt, struct pretok_work *work, const uint8_t *text, size_t len, bool at_start);

bool pretok_is_number(uint32_t c);
bool pretok_is_space(uint32_t c);
bool pretok_is_punctuation(uint32_t c);
/* A scanner for models whose words begin with U+2581 and whose merges never cross into one: the end of the word. */
size_t pretok_scan_metaspace_words(const uint8_t *s, size_t pos, size_t end);
