/* Text that the cases are made of: a file with one JSON object a line. LongBench's lines have "context"; RULER's have "input" and "outputs", a question with its answers, and serve as text too. */
#pragma once
#include "proto/base/buf.h"
#include "proto/base/error.h"
#include "router/text/tokenizer.h"

enum { TEXT_SAMPLES_MAX = 1000 };

struct text_sample {
    char *input, *answer; /* owned */
};

struct text_source {
    struct buf text;             /* all contexts (or inputs), two line feeds between them */
    struct text_sample *samples; /* [n_samples] of a file with questions */
    int n_samples;
    char **sentences;            /* [n_sentences] of 40 to 199 bytes without a number of three digits: filler that no needle looks like; owned */
    int n_sentences;
    int32_t *words;              /* [n_words] tokens that are " " and a word of 4 to 8 lower-case letters in the text; sorted by the word */
    int n_words;
};

/* -EINVAL naming the line, -ENOTSUP when there is neither kind of line, the errno of opening. text_source_fini also after a failure. */
int text_source_load(struct text_source *source, const char *path, const struct tokenizer *tok, struct error *err);
void text_source_fini(struct text_source *source); /* a zeroed one is fine */
