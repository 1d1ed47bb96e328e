/* The work of `tidepool tokenize` on descriptors, apart from the command line: reads text, or one JSON string or list of ids a line, and writes ids or text. */
#pragma once
#include "proto/base/error.h"
#include "router/text/tokenizer.h"
#include <stdbool.h>
#include <stdio.h>

struct tokenize_options {
    const char *tokenizer; /* path */
    bool json_lines;       /* one JSON string a line */
    bool special;          /* texts of special tokens become those tokens */
    bool add_special;      /* BOS and what else the model's post-processor adds */
    bool decode;           /* ids in, text out */
};

/* Ids of a text are separated by spaces and end in a newline. Returns 0 or a negative errno with the reason, which names the line. */
int tokenize_stream(const struct tokenizer *tok, const struct tokenize_options *options, FILE *in, FILE *out, struct error *err);
