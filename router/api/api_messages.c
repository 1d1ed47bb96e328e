/* The messages of a chat request, rewritten for the template: roles checked, a list of text parts joined, and every string that a caller
 * wrote neutralized, so that the text of a special token stays text. */
#include "proto/base/json_write.h"
#include "router/api/api_request_private.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { COPY_DEPTH_MAX = 24, NAME_BYTES = 64, KEY_BYTES_MAX = 1024 }; /* the writer nests 32 deep */

static int out_of_memory(struct parse *p, int rc)
{
    if (rc == -ENOBUFS)
        return api_error_set(p->err, 413, "messages", NULL, "the messages are too long");
    return api_error_set(p->err, 503, NULL, NULL, "out of memory");
}

static int write_neutral(struct parse *p, struct json_writer *w, const struct json_str *text)
{
    struct buf neutral;
    buf_init(&neutral, p->r->messages.max);
    int rc = tokenizer_neutralize(p->tok, text->data, text->len, &neutral);
    if (rc >= 0)
        json_write_str_n(w, (const char *)neutral.data, neutral.len);
    buf_fini(&neutral);
    return rc < 0 ? out_of_memory(p, rc) : 0;
}

/* Keys come from callers too, and templates print them. */
static int write_neutral_key(struct parse *p, struct json_writer *w, const struct json_str *key)
{
    struct buf neutral;
    buf_init(&neutral, KEY_BYTES_MAX);
    int rc = memchr(key->data, 0, key->len) ? -EINVAL : tokenizer_neutralize(p->tok, key->data, key->len, &neutral);
    if (rc >= 0)
        json_write_key(w, buf_cstr(&neutral));
    buf_fini(&neutral);
    if (rc == -ENOMEM)
        return api_error_set(p->err, 503, NULL, NULL, "out of memory");
    return rc < 0 ? api_error_set(p->err, 400, NULL, "invalid_value", "the name of a field must have fewer than %d bytes and no NUL", KEY_BYTES_MAX) : 0;
}

/* Any value, with its strings and keys neutralized. */
static int copy_value(struct parse *p, struct json_writer *w, const char *name, int depth)
{
    struct json_str text;
    enum json_type type = json_peek(&p->j);
    if (depth > COPY_DEPTH_MAX)
        return api_error_set(p->err, 400, name, "invalid_value", "%s is nested more than %d deep", name, COPY_DEPTH_MAX);
    if (type == JSON_ERROR)
        return parse_broken(p);
    if (type == JSON_STRING)
        return json_string(&p->j, &text) < 0 ? parse_broken(p) : write_neutral(p, w, &text);
    if (type != JSON_OBJECT && type != JSON_ARRAY) {
        if (json_raw(&p->j, &text) < 0)
            return parse_broken(p);
        json_write_raw(w, text.data, text.len);
        return 0;
    }
    bool object = type == JSON_OBJECT;
    object ? json_object(&p->j) : json_array(&p->j);
    object ? json_write_object(w) : json_write_array(w);
    while (object ? json_next_key(&p->j, &text) : json_next_item(&p->j)) {
        if (object && write_neutral_key(p, w, &text) < 0)
            return -EINVAL;
        if (copy_value(p, w, name, depth + 1) < 0)
            return -EINVAL;
    }
    object ? json_write_object_end(w) : json_write_array_end(w);
    return p->j.error ? parse_broken(p) : 0;
}

/* -- content -- */

/* One {"type": "text", "text": "..."}; appends the text, joined by line breaks as vLLM does. */
static int parse_part(struct parse *p, const char *name, struct buf *content)
{
    struct json_str key, type = {.data = "", .len = 0}, text = {.data = NULL, .len = 0};
    if (json_peek(&p->j) == JSON_STRING) { /* some clients send bare strings */
        json_string(&p->j, &text);
    } else if (json_peek(&p->j) != JSON_OBJECT) {
        return parse_wrong_type(p, name, "a list of {\"type\": \"text\", \"text\": ...}");
    } else {
        json_object(&p->j);
        while (json_next_key(&p->j, &key)) {
            bool known = json_str_eq(&key, "type") || json_str_eq(&key, "text");
            if (known && json_peek(&p->j) == JSON_STRING)
                json_string(&p->j, json_str_eq(&key, "type") ? &type : &text);
            else
                json_skip(&p->j);
        }
        if (!p->j.error && !json_str_eq(&type, "text"))
            return api_error_set(p->err, 400, name, "unsupported_parameter", "%s: parts of type \"%.*s\" are not supported, only \"text\"", name,
                                 type.len > 40 ? 40 : (int)type.len, type.data);
    }
    if (p->j.error)
        return parse_broken(p);
    if (!text.data)
        return api_error_set(p->err, 400, name, "missing", "%s: a part of type \"text\" needs \"text\"", name);
    int rc = content->len ? buf_append(content, "\n", 1) : 0;
    if (rc >= 0)
        rc = buf_append(content, text.data, text.len);
    return rc < 0 ? out_of_memory(p, rc) : 0;
}

static int parse_content(struct parse *p, const char *name, struct buf *content)
{
    struct json_str text;
    enum json_type type = json_peek(&p->j);
    if (type == JSON_STRING) {
        if (json_string(&p->j, &text) < 0)
            return parse_broken(p);
        int rc = buf_append(content, text.data, text.len);
        return rc < 0 ? out_of_memory(p, rc) : 0;
    }
    if (type != JSON_ARRAY)
        return parse_wrong_type(p, name, "a string or a list of text parts");
    json_array(&p->j);
    while (json_next_item(&p->j))
        if (parse_part(p, name, content) < 0)
            return -EINVAL;
    return p->j.error ? parse_broken(p) : 0;
}

/* -- messages -- */

struct message {
    char role[16];
    bool has_role, has_content, null_content, has_tool_calls;
    struct buf content;
};

static int parse_role(struct parse *p, const char *name, struct message *m)
{
    static const char *const roles[] = {"system", "user", "assistant", "tool", "developer"};
    struct json_str role;
    if (parse_text(p, name, &role) < 0)
        return -EINVAL;
    for (size_t i = 0; i < sizeof(roles) / sizeof(roles[0]); i++)
        if (json_str_eq(&role, roles[i])) {
            m->has_role = true;
            snprintf(m->role, sizeof(m->role), "%s", strcmp(roles[i], "developer") == 0 ? "system" : roles[i]);
            return 0;
        }
    return api_error_set(p->err, 400, name, "invalid_value", "%s must be system, developer, user, assistant or tool, not \"%.*s\"", name,
                         role.len > 40 ? 40 : (int)role.len, role.data);
}

static int parse_message_member(struct parse *p, struct json_writer *w, const struct json_str *key, size_t i, struct message *m)
{
    char name[NAME_BYTES];
    snprintf(name, sizeof(name), "messages[%zu].%.*s", i, key->len > 24 ? 24 : (int)key->len, key->data);
    if (json_str_eq(key, "role"))
        return parse_role(p, name, m);
    if (json_str_eq(key, "content")) {
        m->null_content = parse_is_null(p);
        m->has_content = !m->null_content;
        return m->null_content ? 0 : parse_content(p, name, &m->content);
    }
    if (parse_is_null(p))
        return 0;
    m->has_tool_calls |= json_str_eq(key, "tool_calls");
    return write_neutral_key(p, w, key) < 0 ? -EINVAL : copy_value(p, w, name, 0);
}

/* Role and content stand last, when both are known. */
static int finish_message(struct parse *p, struct json_writer *w, size_t i, struct message *m)
{
    char name[NAME_BYTES];
    bool assistant = strcmp(m->role, "assistant") == 0;
    if (!m->has_role) {
        snprintf(name, sizeof(name), "messages[%zu].role", i);
        return api_error_set(p->err, 400, name, "missing", "%s is required", name);
    }
    if (!m->has_content && !assistant) {
        snprintf(name, sizeof(name), "messages[%zu].content", i);
        return api_error_set(p->err, 400, name, "missing", "%s is required and must be a string or a list of text parts", name);
    }
    json_write_kstr(w, "role", m->role);
    json_write_key(w, "content");
    if (!m->has_content && m->has_tool_calls) {
        json_write_null(w);
        return 0;
    }
    buf_clear(&p->r->last_content);
    int rc = tokenizer_neutralize(p->tok, buf_cstr(&m->content), m->content.len, &p->r->last_content);
    if (rc < 0)
        return out_of_memory(p, rc);
    json_write_str_n(w, buf_cstr(&p->r->last_content), p->r->last_content.len);
    return 0;
}

static int parse_message(struct parse *p, struct json_writer *w, size_t i)
{
    struct json_str key;
    struct message m = {.has_role = false};
    char name[NAME_BYTES];
    int rc = 0;
    snprintf(name, sizeof(name), "messages[%zu]", i);
    if (json_peek(&p->j) != JSON_OBJECT)
        return parse_wrong_type(p, name, "an object with role and content");
    buf_init(&m.content, p->r->messages.max);
    json_object(&p->j);
    json_write_object(w);
    while (rc >= 0 && json_next_key(&p->j, &key))
        rc = parse_message_member(p, w, &key, i, &m);
    if (rc >= 0)
        rc = p->j.error ? parse_broken(p) : finish_message(p, w, i, &m);
    json_write_object_end(w);
    buf_fini(&m.content);
    return rc;
}

int parse_messages(struct parse *p)
{
    struct json_writer w;
    size_t n = 0;
    p->has_messages = true;
    if (json_peek(&p->j) != JSON_ARRAY)
        return parse_wrong_type(p, "messages", "a list of messages");
    json_write_begin(&w, &p->r->messages);
    json_write_array(&w);
    json_array(&p->j);
    while (json_next_item(&p->j)) {
        if (n == API_MESSAGES_MAX)
            return api_error_set(p->err, 400, "messages", "invalid_value", "messages may hold at most %d messages", API_MESSAGES_MAX);
        if (parse_message(p, &w, n++) < 0)
            return -EINVAL;
    }
    json_write_array_end(&w);
    if (p->j.error)
        return parse_broken(p);
    if (n == 0)
        return api_error_set(p->err, 400, "messages", "invalid_value", "messages must not be empty");
    int rc = json_write_end(&w);
    return rc < 0 ? out_of_memory(p, rc) : 0;
}

/* -- variables of the template -- */

/* Appends the members of the object in `object` to the variables. */
static int add_vars(struct parse *p, const struct buf *object)
{
    struct buf *vars = &p->r->template_vars;
    if (object->len <= 2)
        return 0;
    int rc = vars->len ? buf_append(vars, ",", 1) : 0;
    if (rc >= 0)
        rc = buf_append(vars, object->data + 1, object->len - 2);
    return rc < 0 ? out_of_memory(p, rc) : 0;
}

static bool is_reserved(const struct json_str *key)
{
    static const char *const reserved[] = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"};
    for (size_t i = 0; i < sizeof(reserved) / sizeof(reserved[0]); i++)
        if (json_str_eq(key, reserved[i]))
            return true;
    return false;
}

static int copy_kwargs(struct parse *p, struct json_writer *w)
{
    struct json_str key;
    json_object(&p->j);
    json_write_object(w);
    while (json_next_key(&p->j, &key)) {
        if (is_reserved(&key))
            return api_error_set(p->err, 400, "chat_template_kwargs", "invalid_value", "chat_template_kwargs may not set %.*s", (int)key.len, key.data);
        if (write_neutral_key(p, w, &key) < 0 || copy_value(p, w, "chat_template_kwargs", 0) < 0)
            return -EINVAL;
    }
    json_write_object_end(w);
    return p->j.error ? parse_broken(p) : 0;
}

static int copy_documents(struct parse *p, struct json_writer *w)
{
    json_write_object(w);
    json_write_key(w, "documents");
    if (copy_value(p, w, "documents", 0) < 0)
        return -EINVAL;
    json_write_object_end(w);
    return 0;
}

static int parse_vars(struct parse *p, int (*copy)(struct parse *p, struct json_writer *w))
{
    struct json_writer w;
    struct buf object;
    buf_init(&object, p->r->messages.max);
    json_write_begin(&w, &object);
    int rc = copy(p, &w);
    if (rc >= 0 && (rc = json_write_end(&w)) < 0)
        rc = out_of_memory(p, rc);
    if (rc >= 0)
        rc = add_vars(p, &object);
    buf_fini(&object);
    return rc;
}

int parse_documents(struct parse *p)
{
    if (json_peek(&p->j) != JSON_ARRAY)
        return parse_wrong_type(p, "documents", "a list of objects");
    return parse_vars(p, copy_documents);
}

int parse_template_kwargs(struct parse *p)
{
    if (json_peek(&p->j) != JSON_OBJECT)
        return parse_wrong_type(p, "chat_template_kwargs", "an object");
    return parse_vars(p, copy_kwargs);
}

int parse_tools(struct parse *p)
{
    if (json_peek(&p->j) != JSON_ARRAY)
        return parse_wrong_type(p, "tools", "a list of tools");
    json_array(&p->j);
    while (json_next_item(&p->j)) {
        p->has_tools = true;
        json_skip(&p->j);
    }
    return p->j.error ? parse_broken(p) : 0;
}
