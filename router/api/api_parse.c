/* Values of request fields: type and range checks with messages that name the field, what is allowed and what came. */
#include "router/api/api_request_private.h"
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

static const char *type_name(enum json_type type)
{
    static const char *const names[] = {"an error", "null", "a boolean", "a number", "a string", "an array", "an object"};
    return names[type];
}

int parse_broken(struct parse *p)
{
    if (p->j.error == -ENOMEM)
        return api_error_set(p->err, 503, NULL, NULL, "out of memory");
    return api_error_set(p->err, 400, NULL, "invalid_json", "the body is not valid JSON: %s at byte %zu", p->j.error_text, p->j.error_pos);
}

int parse_wrong_type(struct parse *p, const char *name, const char *must_be)
{
    enum json_type type = json_peek(&p->j);
    if (type == JSON_ERROR)
        return parse_broken(p);
    return api_error_set(p->err, 400, name, "invalid_type", "%s must be %s, not %s", name, must_be, type_name(type));
}

bool parse_is_null(struct parse *p)
{
    return json_peek(&p->j) == JSON_NULL && json_null(&p->j) == 0;
}

int parse_int(struct parse *p, const char *name, int64_t min, int64_t max, int64_t *ret)
{
    struct json_str raw;
    int64_t value;
    char must_be[96];
    snprintf(must_be, sizeof(must_be), "an integer from %" PRId64 " to %" PRId64, min, max);
    if (json_peek(&p->j) != JSON_NUMBER)
        return parse_wrong_type(p, name, must_be);
    if (json_raw(&p->j, &raw) < 0)
        return parse_broken(p);
    struct json number;
    json_init(&number, raw.data, raw.len);
    int rc = json_int(&number, &value);
    json_fini(&number);
    if (rc < 0 || value < min || value > max)
        return api_error_set(p->err, 400, name, "invalid_value", "%s must be %s, not %.*s", name, must_be, raw.len > 40 ? 40 : (int)raw.len, raw.data);
    *ret = value;
    return 0;
}

int parse_double(struct parse *p, const char *name, double min, double max, double *ret)
{
    double value;
    char must_be[96];
    snprintf(must_be, sizeof(must_be), "a number from %g to %g", min, max);
    if (json_peek(&p->j) != JSON_NUMBER)
        return parse_wrong_type(p, name, must_be);
    if (json_double(&p->j, &value) < 0)
        return parse_broken(p);
    if (!(value >= min && value <= max))
        return api_error_set(p->err, 400, name, "invalid_value", "%s must be %s, not %g", name, must_be, value);
    *ret = value;
    return 0;
}

int parse_bool(struct parse *p, const char *name, bool *ret)
{
    if (json_peek(&p->j) != JSON_BOOL)
        return parse_wrong_type(p, name, "true or false");
    return json_bool(&p->j, ret) < 0 ? parse_broken(p) : 0;
}

int parse_text(struct parse *p, const char *name, struct json_str *ret)
{
    if (json_peek(&p->j) != JSON_STRING)
        return parse_wrong_type(p, name, "a string");
    return json_string(&p->j, ret) < 0 ? parse_broken(p) : 0;
}
