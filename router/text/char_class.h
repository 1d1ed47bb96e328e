/* Which of the classes that pre-tokenizer patterns speak of a character belongs to. The tables are built once from Oniguruma's own property
 * data, so that a scanner and the regular expression it stands for can never disagree about a character. */
#pragma once
#include <stdint.h>

enum char_class {
    CHAR_L = 1,       /* \p{L} */
    CHAR_N = 2,       /* \p{N} */
    CHAR_SPACE = 4,   /* \s */
    CHAR_P = 8,       /* \p{P} */
    CHAR_S = 16,      /* \p{S} */
    CHAR_M = 32,      /* \p{M} */
    CHAR_UPPER = 64,  /* [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}] */
    CHAR_LOWER = 128, /* [\p{Ll}\p{Lm}\p{Lo}\p{M}] */
    CHAR_WORD = 256,  /* \w as Rust's regex defines it */
    CHAR_NEWLINE = 512, /* [\r\n] */
};

#define CHAR_BLOCKS 0x1100

struct char_table {
    uint16_t ascii[128];
    uint16_t index[CHAR_BLOCKS]; /* block of 256 characters -> row of `rows` */
    uint16_t (*rows)[256];
};
extern struct char_table char_table;

/* Builds the tables on the first call. 0, or -ENOMEM. */
int char_table_init(void);

static inline unsigned char_class_of(uint32_t c)
{
    return c < 128 ? char_table.ascii[c] : char_table.rows[char_table.index[c >> 8]][c & 255];
}
