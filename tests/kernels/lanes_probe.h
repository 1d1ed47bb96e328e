/* Every function of lanes.h and vmath.h applied to an array; lanes_probe.c is compiled once for each instruction set. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { PROBE_LANES = 16 };

/* A function of up to three float vectors, result as float or int32 bits. */
struct lanes_probe {
    const char *name;
    void (*fn)(const float *a, const float *b, const float *c, void *ret); /* [16] each; 64 bytes out */
};

extern const struct lanes_probe lanes_probes_plain[], lanes_probes_avx2[], lanes_probes_avx512[];
extern const size_t lanes_n_probes_plain;
