/* A byte-level BPE tokenizer of a few tokens, as the text of a tokenizer.json: one token a printable ASCII character, two merges, three special tokens. */
#pragma once
#include "router/text/tokenizer.h"

enum { TINY_IM_START = 0, TINY_IM_END = 1, TINY_BOS = 2 };

/* Aborts if it cannot be opened. */
struct tokenizer *tiny_tokenizer_open(void);
