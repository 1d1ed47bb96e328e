/* A byte-level BPE tokenizer of a few tokens, as the text of a tokenizer.json: one token a printable ASCII character, two merges, three special tokens. */
#pragma once
#include "proto/base/json_write.h"
#include "router/text/tokenizer.h"

enum { TINY_IM_START = 0, TINY_IM_END = 1, TINY_BOS = 2 };

/* Aborts if it cannot be opened. */
struct tokenizer *tiny_tokenizer_open(void);

/* Another one: each part writes one value, the arrays of added tokens and merges and the object of the vocabulary. */
typedef void json_part_fn(struct json_writer *w);
struct tokenizer *bpe_tokenizer_open(json_part_fn *added, json_part_fn *vocab, json_part_fn *merges);
