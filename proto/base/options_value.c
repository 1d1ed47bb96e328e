/* One option's value: from text, to text, and what is allowed. */
#include "proto/base/base_assert.h"
#include "proto/base/json_write.h"
#include "proto/base/options_private.h"
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

static void *field(const struct option_spec *spec, void *values)
{
    return (char *)values + spec->offset;
}

static void bytes_text(int64_t v, char *text, size_t size)
{
    static const char units[] = {'T', 'G', 'M', 'K'};
    for (size_t i = 0; i < sizeof(units); i++) {
        int64_t unit = (int64_t)1 << (40 - 10 * i);
        if (v != 0 && v % unit == 0) {
            snprintf(text, size, "%" PRId64 "%c", v / unit, units[i]);
            return;
        }
    }
    snprintf(text, size, "%" PRId64, v);
}

static void range_text(const struct option_spec *spec, char *text, size_t size)
{
    char min[32], max[32];
    const bool or_word = (spec->kind == OPTION_INT || spec->kind == OPTION_BYTES) && spec->max_word;
    if (spec->kind == OPTION_BYTES) {
        bytes_text(spec->min, min, sizeof(min));
        bytes_text(spec->max, max, sizeof(max));
    } else {
        snprintf(min, sizeof(min), "%" PRId64, spec->min);
        snprintf(max, sizeof(max), "%" PRId64, spec->max);
    }
    if (spec->max == INT64_MAX)
        snprintf(text, size, "%s or more%s%s", min, or_word ? ", or " : "", or_word ? spec->max_word : "");
    else
        snprintf(text, size, "%s..%s%s%s", min, max, or_word ? " or " : "", or_word ? spec->max_word : "");
}

void option_value_allowed(const struct option_spec *spec, char *text, size_t size)
{
    size_t n = 0;
    switch (spec->kind) {
    case OPTION_STR:
        snprintf(text, size, "any text but the empty one");
        return;
    case OPTION_BOOL:
        snprintf(text, size, "on|off");
        return;
    case OPTION_ENUM:
        text[0] = '\0';
        for (size_t i = 0; spec->choices[i] && n < size; i++)
            n += (size_t)snprintf(text + n, size - n, "%s%s", i ? "|" : "", spec->choices[i]);
        return;
    case OPTION_INT:
    case OPTION_BYTES:
    case OPTION_DOUBLE:
        range_text(spec, text, size);
        return;
    }
}

static bool parse_int(const struct option_spec *spec, const char *text, int64_t *ret)
{
    if (spec->max_word && strcmp(text, spec->max_word) == 0) {
        *ret = spec->max;
        return true;
    }
    size_t sign = text[0] == '-';
    if (text[sign] < '0' || text[sign] > '9')
        return false;
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (errno || *end || v < spec->min || v > spec->max)
        return false;
    *ret = v;
    return true;
}

/* Decimal digits with at most one point, so that no hexadecimal, exponent, infinity or blank gets through. */
static bool is_decimal(const char *text, const char *end)
{
    size_t digits = strspn(text, "0123456789");
    size_t fraction = text[digits] == '.' ? 1 + strspn(text + digits + 1, "0123456789") : 0;
    return digits > 0 && fraction != 1 && text + digits + fraction == end;
}

static bool parse_bytes(const struct option_spec *spec, const char *text, int64_t *ret)
{
    if (spec->max_word && strcmp(text, spec->max_word) == 0) {
        *ret = spec->max;
        return true;
    }
    size_t n = strspn(text, "0123456789.");
    if (!is_decimal(text, text + n))
        return false;
    static const char *const units[] = {"", "K", "M", "G", "T"};
    int shift = -1;
    for (size_t i = 0; i < ARRAY_LEN(units); i++)
        if (strcasecmp(text + n, units[i]) == 0)
            shift = (int)(10 * i);
    if (shift < 0)
        return false;
    /* long double has 64 bits of mantissa: whole numbers of bytes stay exact. */
    long double v = roundl(strtold(text, NULL) * (long double)((int64_t)1 << shift));
    if (v < (long double)spec->min || v > (long double)spec->max)
        return false;
    *ret = (int64_t)v;
    return true;
}

static bool parse_double(const struct option_spec *spec, const char *text, double *ret)
{
    if (strspn(text, "0123456789.eE+-") != strlen(text) || !*text)
        return false;
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end || !(v >= (double)spec->min && v <= (double)spec->max))
        return false;
    *ret = v;
    return true;
}

static bool parse_bool(const char *text, bool *ret)
{
    static const char *const on[] = {"on", "true", "yes", "1"};
    static const char *const off[] = {"off", "false", "no", "0"};
    for (size_t i = 0; i < ARRAY_LEN(on); i++) {
        if (strcmp(text, on[i]) && strcmp(text, off[i]))
            continue;
        *ret = strcmp(text, on[i]) == 0;
        return true;
    }
    return false;
}

static bool parse_enum(const struct option_spec *spec, const char *text, int *ret)
{
    for (int i = 0; spec->choices[i]; i++) {
        if (strcmp(text, spec->choices[i]) == 0) {
            *ret = i;
            return true;
        }
    }
    return false;
}

static bool parse_any(const struct option_spec *spec, const char *text, void *ret)
{
    switch (spec->kind) {
    case OPTION_STR:
        *(const char **)ret = text;
        return text[0] != '\0';
    case OPTION_INT:
        return parse_int(spec, text, ret);
    case OPTION_BYTES:
        return parse_bytes(spec, text, ret);
    case OPTION_DOUBLE:
        return parse_double(spec, text, ret);
    case OPTION_BOOL:
        return parse_bool(text, ret);
    case OPTION_ENUM:
        return parse_enum(spec, text, ret);
    }
    return false;
}

int option_value_parse(const struct option_spec *spec, const char *where, const char *text, void *values, struct error *err)
{
    if (parse_any(spec, text, field(spec, values)))
        return 0;
    char allowed[160];
    option_value_allowed(spec, allowed, sizeof(allowed));
    return error_set(err, -EINVAL, "--%s (%s): the value \"%.64s\" is not allowed; allowed: %s", spec->name, where, text, allowed);
}

int options_format(const struct option *option, char *text, size_t size)
{
    const struct option_spec *spec = option->spec;
    const void *v = (const char *)option->values + spec->offset;
    char number[JSON_DOUBLE_TEXT] = "";
    const char *s = number;
    switch (spec->kind) {
    case OPTION_STR:
        s = *(const char *const *)v;
        if (!s)
            return -ENOENT;
        break;
    case OPTION_INT:
        if (spec->max_word && *(const int64_t *)v == spec->max)
            s = spec->max_word;
        else
            snprintf(number, sizeof(number), "%" PRId64, *(const int64_t *)v);
        break;
    case OPTION_BYTES:
        if (spec->max_word && *(const int64_t *)v == spec->max)
            s = spec->max_word;
        else
            bytes_text(*(const int64_t *)v, number, sizeof(number));
        break;
    case OPTION_DOUBLE:
        json_double_text(*(const double *)v, number);
        break;
    case OPTION_BOOL:
        s = *(const bool *)v ? "on" : "off";
        break;
    case OPTION_ENUM:
        s = spec->choices[*(const int *)v];
        break;
    }
    if (strlen(s) >= size)
        return -ENOBUFS;
    memcpy(text, s, strlen(s) + 1);
    return 0;
}
