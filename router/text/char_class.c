#include "router/text/char_class.h"
#include "proto/base/base_assert.h"
#include "router/text/text_regex.h"
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define N_CHARS 0x110000u

struct char_table char_table;

static const struct {
    const char *property; /* a name that Oniguruma knows */
    unsigned classes;
} properties[] = {
    {"L", CHAR_L},
    {"N", CHAR_N},
    {"Space", CHAR_SPACE},
    {"P", CHAR_P},
    {"S", CHAR_S},
    {"M", CHAR_M | CHAR_UPPER | CHAR_LOWER | CHAR_WORD},
    {"Lu", CHAR_UPPER},
    {"Lt", CHAR_UPPER},
    {"Lm", CHAR_UPPER | CHAR_LOWER},
    {"Lo", CHAR_UPPER | CHAR_LOWER},
    {"Ll", CHAR_LOWER},
    {"Alphabetic", CHAR_WORD},
    {"Nd", CHAR_WORD},
    {"Pc", CHAR_WORD},
    {"JoinControl", CHAR_WORD},
};

static void mark(uint16_t *flat, uint32_t from, uint32_t to, unsigned classes)
{
    for (uint32_t c = from; c <= to && c < N_CHARS; c++)
        flat[c] |= (uint16_t)classes;
}

static void mark_property(uint16_t *flat, const char *property, unsigned classes)
{
    OnigEncoding utf8 = ONIG_ENCODING_UTF8;
    OnigCodePoint single_bytes_end;
    const OnigCodePoint *ranges; /* [0]: their number, then from and to of each */
    const UChar *name = (const UChar *)property;
    int ctype = ONIGENC_PROPERTY_NAME_TO_CTYPE(utf8, (UChar *)property, (UChar *)name + strlen(property));
    ASSERT(ctype >= 0);
    if (ONIGENC_GET_CTYPE_CODE_RANGE(utf8, (OnigCtype)ctype, &single_bytes_end, &ranges) == 0) {
        for (OnigCodePoint i = 0; i < ranges[0]; i++)
            mark(flat, ranges[1 + 2 * i], ranges[2 + 2 * i], classes);
        return;
    }
    for (uint32_t c = 0; c < N_CHARS; c++)
        if (ONIGENC_IS_CODE_CTYPE(utf8, c, (OnigCtype)ctype))
            flat[c] |= (uint16_t)classes;
}

/* Folds equal blocks of the flat table into one row. */
static int fold_blocks(const uint16_t *flat)
{
    size_t n_rows = 0, row_bytes = sizeof char_table.rows[0];
    uint16_t(*rows)[256] = malloc(CHAR_BLOCKS * row_bytes);
    if (!rows)
        return -ENOMEM;
    for (size_t b = 0; b < CHAR_BLOCKS; b++) {
        size_t row = n_rows;
        while (row > 0 && memcmp(rows[row - 1], flat + b * 256, row_bytes) != 0)
            row--;
        if (row == 0)
            memcpy(rows[n_rows++], flat + b * 256, row_bytes);
        char_table.index[b] = (uint16_t)(row ? row - 1 : n_rows - 1);
    }
    uint16_t(*fitted)[256] = realloc(rows, n_rows * row_bytes);
    char_table.rows = fitted ? fitted : rows;
    return 0;
}

static int init_result;

static void init_once(void)
{
    uint16_t *flat = calloc(N_CHARS, sizeof *flat);
    init_result = flat ? regex_init() : -ENOMEM;
    if (init_result < 0)
        goto out;
    for (size_t i = 0; i < ARRAY_LEN(properties); i++)
        mark_property(flat, properties[i].property, properties[i].classes);
    mark(flat, '\r', '\r', CHAR_NEWLINE);
    mark(flat, '\n', '\n', CHAR_NEWLINE);
    memcpy(char_table.ascii, flat, sizeof char_table.ascii);
    init_result = fold_blocks(flat);
out:
    free(flat);
}

int char_table_init(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, init_once);
    return init_result;
}
