/* The stand-in beside the real library: under other names. */
#define sodium_init standin_sodium_init
#define crypto_generichash_state standin_state
#define crypto_generichash standin_generichash
#define crypto_generichash_init standin_init
#define crypto_generichash_update standin_update
#define crypto_generichash_final standin_final
#define crypto_generichash_blake2b_init_salt_personal standin_init_salt_personal
#include "tests/bench/gpu/standin/blake2b.c"

int standin_pieces(unsigned char *out, size_t n_out, const unsigned char *in, size_t n_in, size_t piece, const unsigned char *personal);
int standin_pieces(unsigned char *out, size_t n_out, const unsigned char *in, size_t n_in, size_t piece, const unsigned char *personal)
{
    standin_state state;
    standin_init_salt_personal(&state, NULL, 0, (unsigned char)n_out, NULL, personal);
    for (size_t at = 0; at < n_in; at += piece)
        standin_update(&state, in + at, n_in - at < piece ? n_in - at : piece);
    return standin_final(&state, out, n_out);
}
