/* A prompt's token ids and the content addresses of its full blocks. Shared by the n answers of one request. Made and hashed on any one
 * thread at a time (hashing a long prompt belongs off the loop); references are counted without atomics, on the loop's thread. */
#pragma once
#include "proto/block_key.h"
#include <stddef.h>
#include <stdint.h>

enum { PROMPT_BLOCK_TOKENS = 128, PROMPT_SALT_MAX = 32, PROMPT_FINGERPRINTS_MAX = 4 };

struct prompt_keys {
    uint8_t fingerprint[FINGERPRINT_BYTES];
    struct block_key *keys; /* [n_blocks] */
};

struct prompt {
    int refs;
    uint32_t *tokens; /* [n] */
    uint32_t n;
    uint32_t n_blocks; /* full blocks */
    uint8_t salt[PROMPT_SALT_MAX];
    size_t n_salt;
    struct prompt_keys keys[PROMPT_FINGERPRINTS_MAX]; /* one a model variant that serves */
    int n_keys;
};

/* Takes over `tokens` (malloc'ed, [n], n >= 1) on success. n_salt <= PROMPT_SALT_MAX. One reference. */
int prompt_create(uint32_t *tokens, uint32_t n, const void *salt, size_t n_salt, struct prompt **ret_prompt);
struct prompt *prompt_ref(struct prompt *prompt);
void prompt_unref(struct prompt *prompt); /* NULL is fine */
/* Keys [n_blocks] under a fingerprint; computed once. NULL when memory is out or too many fingerprints were asked for. */
const struct block_key *prompt_block_keys(struct prompt *prompt, const uint8_t fingerprint[FINGERPRINT_BYTES]);
