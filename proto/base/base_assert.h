/* ASSERT checks our own invariants and is on in every build. Anything from outside gets an error instead. */
#pragma once
#include <stdio.h>
#include <stdlib.h>

#define ASSERT(cond)                                                                               \
    do {                                                                                           \
        if (__builtin_expect(!(cond), 0)) {                                                        \
            fprintf(stderr, "event=assert file=%s line=%d cond=\"%s\"\n", __FILE__, __LINE__,     \
                    #cond);                                                                        \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

#define ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
