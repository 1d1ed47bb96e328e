/* stop, stop_token_ids and logit_bias. */
#include "router/api/api_request_private.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int add_stop(struct parse *p)
{
    struct api_request *r = p->r;
    struct json_str text;
    if (parse_text(p, "stop", &text) < 0)
        return -EINVAL;
    if (text.len < 1 || text.len > STOP_STRING_BYTES_MAX)
        return api_error_set(p->err, 400, "stop", "invalid_value", "a stop string must have 1 to %d bytes, not %zu", STOP_STRING_BYTES_MAX, text.len);
    if (r->n_stops == API_STOPS_MAX)
        return api_error_set(p->err, 400, "stop", "invalid_value", "stop may hold at most %d strings", API_STOPS_MAX);
    char *copy = malloc(text.len + 1);
    if (!copy)
        return api_error_set(p->err, 503, NULL, NULL, "out of memory");
    memcpy(copy, text.data, text.len);
    copy[text.len] = 0;
    r->stops[r->n_stops++] = (struct stop_string){.text = copy, .len = text.len};
    return 0;
}

int parse_stop(struct parse *p)
{
    enum json_type type = json_peek(&p->j);
    if (type == JSON_STRING)
        return add_stop(p);
    if (type != JSON_ARRAY)
        return parse_wrong_type(p, "stop", "a string or a list of strings");
    json_array(&p->j);
    while (json_next_item(&p->j))
        if (add_stop(p) < 0)
            return -EINVAL;
    return p->j.error ? parse_broken(p) : 0;
}

int parse_stop_token_ids(struct parse *p)
{
    struct api_request *r = p->r;
    int64_t id = 0;
    if (json_peek(&p->j) != JSON_ARRAY)
        return parse_wrong_type(p, "stop_token_ids", "a list of token ids");
    json_array(&p->j);
    while (json_next_item(&p->j)) {
        if (parse_int(p, "stop_token_ids", 0, (int64_t)tokenizer_n_vocab(p->tok) - 1, &id) < 0)
            return -EINVAL;
        if (r->n_stop_ids == API_STOP_IDS_MAX)
            return api_error_set(p->err, 400, "stop_token_ids", "invalid_value", "stop_token_ids may hold at most %d ids", API_STOP_IDS_MAX);
        r->stop_ids[r->n_stop_ids++] = (uint32_t)id;
    }
    return p->j.error ? parse_broken(p) : 0;
}

/* The keys are token ids as strings. */
static int parse_bias_id(struct parse *p, const struct json_str *key, uint32_t *ret_id)
{
    uint64_t id = 0;
    bool sound = key->len >= 1 && key->len <= 10;
    for (size_t i = 0; i < key->len && sound; i++) {
        sound = key->data[i] >= '0' && key->data[i] <= '9';
        id = id * 10 + (uint64_t)(key->data[i] - '0');
    }
    if (!sound || id >= tokenizer_n_vocab(p->tok))
        return api_error_set(p->err, 400, "logit_bias", "invalid_value", "the keys of logit_bias must be token ids from 0 to %zu, not \"%.*s\"",
                             tokenizer_n_vocab(p->tok) - 1, key->len > 20 ? 20 : (int)key->len, key->data);
    *ret_id = (uint32_t)id;
    return 0;
}

int parse_logit_bias(struct parse *p)
{
    struct route_sampling *s = &p->r->sampling;
    struct json_str key;
    double bias = 0;
    uint32_t id = 0;
    if (json_peek(&p->j) != JSON_OBJECT)
        return parse_wrong_type(p, "logit_bias", "an object that maps token ids to numbers");
    s->logit_bias = malloc(API_LOGIT_BIAS_MAX * sizeof(*s->logit_bias));
    if (!s->logit_bias)
        return api_error_set(p->err, 503, NULL, NULL, "out of memory");
    json_object(&p->j);
    while (json_next_key(&p->j, &key)) {
        if (parse_bias_id(p, &key, &id) < 0 || parse_double(p, "logit_bias", -100, 100, &bias) < 0)
            return -EINVAL;
        if (s->n_logit_bias == API_LOGIT_BIAS_MAX)
            return api_error_set(p->err, 400, "logit_bias", "invalid_value", "logit_bias may hold at most %d tokens", API_LOGIT_BIAS_MAX);
        s->logit_bias[s->n_logit_bias++] = (struct route_logit_bias){.id = id, .bias = (float)bias};
    }
    return p->j.error ? parse_broken(p) : 0;
}
