/* One request and its reply. Loop thread only.
 *
 * Ownership: the handler gets the exchange and must end it exactly once, with http_reply or http_stream_end; that call frees it. If the
 * client goes away first, the gone callback is called and the exchange is freed when it returns: the callback must drop every
 * pointer to it, and nothing may be called on it afterwards. The gone callback never comes from inside a call on the same exchange. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct http_exchange;

enum http_method { HTTP_GET, HTTP_HEAD, HTTP_POST, HTTP_OPTIONS };

typedef void http_gone_cb(struct http_exchange *exchange, void *arg);

enum http_method http_exchange_method(const struct http_exchange *exchange);
/* Path without query, as sent (not decoded). */
const char *http_exchange_path(const struct http_exchange *exchange);
/* First header of that name, or NULL. */
const char *http_exchange_header(const struct http_exchange *exchange, const char *name);
/* The caller's X-Request-Id if it is fit to print (1..128 of [A-Za-z0-9._:-]), else one of our own; echoed in the reply. */
const char *http_exchange_id(const struct http_exchange *exchange);
/* When the request was complete, clock_now_us. */
uint64_t http_exchange_start_us(const struct http_exchange *exchange);
/* Moves the body out: a malloc'ed buffer of *ret_len bytes (and a NUL behind it) that the caller frees. -ENOMEM. */
int http_exchange_take_body(struct http_exchange *exchange, char **ret_body, size_t *ret_len);
void http_exchange_set_gone(struct http_exchange *exchange, http_gone_cb *cb, void *arg);
/* Adds a header to the reply, before it starts. `value` has no line breaks. */
void http_exchange_add_header(struct http_exchange *exchange, const char *name, const char *value);

/* Answers and frees. `content_type` NULL: application/json. The body is copied. */
void http_reply(struct http_exchange *exchange, int status, const char *content_type, const void *body, size_t len);
/* Answers with OpenAI's error object and frees. `param` and `code` may be NULL (written as null); `type` follows from the status. */
void http_reply_error(struct http_exchange *exchange, int status, const char *param, const char *code, const char *message);
/* The `type` of OpenAI's error object for a status. */
const char *http_error_type(int status);

/* Server-sent events. The events of one loop turn leave as one chunk. None of these fails towards the caller: a reader that is too slow is cut,
 * and that arrives as "gone". */
void http_stream_begin(struct http_exchange *exchange);
bool http_stream_begun(const struct http_exchange *exchange);
/* Appends "data: <data>\n\n". `data` has no line breaks. */
void http_stream_event(struct http_exchange *exchange, const void *data, size_t len);
/* Sends what is pending and frees. */
void http_stream_end(struct http_exchange *exchange);
