/* The part of libsodium that the worker uses, for hosts without it (tests/bench/gpu/build.sh). BLAKE2b as RFC 7693 has it, so that digests and block keys are the same. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define crypto_generichash_blake2b_PERSONALBYTES 16U

typedef struct {
    uint64_t h[8], n_bytes;
    uint8_t block[128];
    size_t n_block, n_out;
} crypto_generichash_state;

int sodium_init(void);
/* No keys: key is NULL and n_key 0. Return 0. */
int crypto_generichash_init(crypto_generichash_state *state, const unsigned char *key, size_t n_key, size_t n_out);
int crypto_generichash_blake2b_init_salt_personal(crypto_generichash_state *state, const unsigned char *key, unsigned char n_key, unsigned char n_out, const unsigned char *salt,
                                                  const unsigned char *personal);
int crypto_generichash_update(crypto_generichash_state *state, const unsigned char *in, unsigned long long n_in);
int crypto_generichash_final(crypto_generichash_state *state, unsigned char *out, size_t n_out);
int crypto_generichash(unsigned char *out, size_t n_out, const unsigned char *in, unsigned long long n_in, const unsigned char *key, size_t n_key);
