#include "kernels/cpu/attn_pieces.h"
#include <stddef.h>

const struct attn_pieces *cpu_attn_pieces(enum cpu_isa isa)
{
    switch (isa) {
    case CPU_ISA_PLAIN:
        return &attn_pieces_plain;
    case CPU_ISA_AVX2:
        return &attn_pieces_avx2;
    case CPU_ISA_AVX512:
        return &attn_pieces_avx512;
    default:
        return NULL;
    }
}
