/* Content addresses of blocks (docs/design.md, block identity). key_0 = H(fingerprint, salt), key_j = H(key_{j-1}, token ids of block j, little-endian uint32), H = BLAKE2b-256
 * (libsodium). The router computes the same keys to choose a worker. Any thread; call sodium_init() once at start. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { BLOCK_KEY_BYTES = 32, FINGERPRINT_BYTES = 32 };

struct block_key {
    uint8_t bytes[BLOCK_KEY_BYTES];
};

/* The root of a chain. `salt` isolates tenants (n_salt <= 1024 bytes; 0 bytes: the shared namespace). */
void block_key_root(const uint8_t fingerprint[FINGERPRINT_BYTES], const void *salt, size_t n_salt, struct block_key *ret_root);
/* The key of the next full block: tokens[128]. `ret_key` may be `parent`. */
void block_key_next(const struct block_key *parent, const int32_t tokens[], struct block_key *ret_key);
/* As block_key_next for blocks made while decoding: `tag` (n_tag bytes) covers selector, budgets and fetch settings:
 * H(parent, tokens, tag) with BLAKE2b's personalization set to "tidepool.decoded", so that no tag gives the key of a prompt's block. */
void block_key_next_generated(const struct block_key *parent, const int32_t tokens[], const void *tag, size_t n_tag, struct block_key *ret_key);
