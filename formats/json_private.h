/* The lexical half of the JSON parser: finds and checks one string or number in memory. Nothing here knows of nesting or allocates. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Where and why a scan failed; `code` is a negative errno. */
struct json_fault {
    int code;
    const char *text; /* static */
    size_t pos;
};

/* Checks the string whose opening quote is at text[pos]. Returns the position behind the closing quote, or 0 with *ret_fault set. */
size_t json_scan_string(const char *text, size_t len, size_t pos, bool *ret_escapes, struct json_fault *ret_fault);
/* Decodes the inside of a string that json_scan_string accepted. `out` has room for n bytes; returns the bytes written. */
size_t json_unescape(const char *in, size_t n, char *out);

/* A number's parts: value = digits * 10^exponent. */
struct json_number {
    size_t start, end;  /* in the text */
    bool negative;
    bool plain;         /* digits only: no fraction, no exponent */
    size_t digits;      /* position of the first digit that is not zero, or `end` when all are */
    int64_t magnitude;  /* the value is below 10^magnitude; clamped to +-10^15 */
};

/* Checks the grammar of the number at text[pos]. Returns false with *ret_fault set. */
bool json_scan_number(const char *text, size_t len, size_t pos, struct json_number *ret_num, struct json_fault *ret_fault);
/* -EINVAL when it has a fraction, -ERANGE beyond int64. */
int json_number_int(const char *text, const struct json_number *num, int64_t *ret_value);
/* -ERANGE beyond double's range, -ENOMEM for numbers of thousands of digits. `c_locale` is the C locale. */
int json_number_double(const char *text, const struct json_number *num, void *c_locale, double *ret_value);
