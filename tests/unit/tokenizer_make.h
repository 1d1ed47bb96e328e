/* Small tokenizers for tests, made as tokenizer.json text in memory. */
#pragma once
#include "proto/base/buf.h"
#include "router/text/tokenizer.h"

/* Byte-level BPE over all bytes with some merges of "abc" and spaces, and the added tokens given as JSON objects, comma-separated, without ids ("content" and
 * flags only; ids count up from the end of the vocabulary). Out of memory or an error ends the test program. */
struct tokenizer *tokenizer_make(const char *const added[], size_t n_added);
