/* Unicode normalization forms (UAX 15) in linear time. Stretches that are normalized already are found by a table and copied. */
#pragma once
#include "proto/base/buf.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum unicode_form { UNICODE_NFC, UNICODE_NFD, UNICODE_NFKC, UNICODE_NFKD };

int unicode_form_init(void); /* builds the tables on the first call; 0 or -ENOMEM */
/* Where the text first might change, or `len`: everything before stays as it is whatever follows. */
size_t unicode_form_stable(enum unicode_form form, const uint8_t *text, size_t len);
/* Appends the normalized text to `out`. *chars [*cap] is working memory of the caller, grown as needed and freed by it. -ENOMEM, -ENOBUFS. */
int unicode_form_append(enum unicode_form form, const uint8_t *text, size_t len, int32_t **chars, size_t *cap, struct buf *out);
