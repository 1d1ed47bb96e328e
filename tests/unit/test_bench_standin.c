/* tests/bench/gpu/standin is for hosts without libsodium: block keys and digests made with it are those of the library. */
#include <criterion/criterion.h>
#include <sodium.h>
#include <string.h>

int standin_generichash(unsigned char *out, size_t n_out, const unsigned char *in, unsigned long long n_in, const unsigned char *key, size_t n_key);
int standin_pieces(unsigned char *out, size_t n_out, const unsigned char *in, size_t n_in, size_t piece, const unsigned char *personal);

Test(bench_standin, digests_are_those_of_the_library)
{
    unsigned char in[700], mine[32], theirs[32];
    for (size_t i = 0; i < sizeof(in); i++)
        in[i] = (unsigned char)(i * 37 + i / 256);
    for (size_t n = 0; n <= sizeof(in); n += n < 130 ? 1 : 19) {
        standin_generichash(mine, sizeof(mine), in, n, NULL, 0);
        crypto_generichash(theirs, sizeof(theirs), in, n, NULL, 0);
        cr_assert_arr_eq(mine, theirs, sizeof(mine), "%zu bytes", n);
    }
}

Test(bench_standin, pieces_and_a_personal_string_too)
{
    static const unsigned char personal[] = "sixteen letters!";
    unsigned char in[700], mine[32], theirs[32];
    memset(in, 0x5a, sizeof(in));
    for (size_t piece = 1; piece < 300; piece += 41) {
        crypto_generichash_state state;
        standin_pieces(mine, sizeof(mine), in, sizeof(in), piece, personal);
        crypto_generichash_blake2b_init_salt_personal(&state, NULL, 0, sizeof(theirs), NULL, personal);
        crypto_generichash_update(&state, in, sizeof(in));
        crypto_generichash_final(&state, theirs, sizeof(theirs));
        cr_assert_arr_eq(mine, theirs, sizeof(mine), "pieces of %zu", piece);
    }
}
