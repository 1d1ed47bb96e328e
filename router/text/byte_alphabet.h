/* GPT-2's printable stand-in for each byte: vocabularies of byte-level BPE are spelled in it. Any thread. Source: openai/gpt-2 encoder.py,
 * bytes_to_unicode. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The character that stands for a byte, U+0021 to U+0143. */
uint32_t byte_alphabet_char(uint8_t byte);
/* The byte that a character stands for, or -1. */
int byte_alphabet_byte(uint32_t c);
/* Spelling to bytes: `out` has room for len bytes. Returns the number written, or -1 when a character stands for no byte. `text` is well-formed UTF-8. */
int64_t byte_alphabet_decode(const char *text, size_t len, uint8_t *out);
