/* What evhttp of libevent 2.1.12 lets through and a front end must not: two Content-Length headers, a Transfer-Encoding other than chunked, a
 * header name that ends in a space. Each can make a proxy in front of us and evhttp disagree about where a request ends (request
 * smuggling), so each is answered with 400 and the connection is closed. */
#include "router/http/http_private.h"
#include <ctype.h>
#include <event2/http_struct.h>
#include <string.h>
#include <strings.h>

struct header_counts {
    int content_length, transfer_encoding, host;
};

static bool name_is_token(const char *name)
{
    if (!*name)
        return false;
    for (; *name; name++)
        if (!isalnum((unsigned char)*name) && !strchr("!#$%&'*+-.^_`|~", *name))
            return false;
    return true;
}

static bool value_is_clean(const char *value)
{
    for (; *value; value++) {
        unsigned char c = (unsigned char)*value;
        if ((c < 0x20 && c != '\t') || c == 0x7f)
            return false;
    }
    return true;
}

static const char *check_header(const struct evkeyval *header, struct header_counts *counts)
{
    if (!name_is_token(header->key))
        return "a header name has a character that is not allowed";
    if (!value_is_clean(header->value))
        return "a header value has a control character";
    if (strcasecmp(header->key, "Content-Length") == 0) {
        counts->content_length++;
        size_t n = strlen(header->value);
        if (n == 0 || n > 18 || strspn(header->value, "0123456789") != n)
            return "Content-Length must be one decimal number";
    }
    if (strcasecmp(header->key, "Transfer-Encoding") == 0) {
        counts->transfer_encoding++;
        if (strcasecmp(header->value, "chunked") != 0)
            return "Transfer-Encoding must be chunked";
    }
    if (strcasecmp(header->key, "Host") == 0)
        counts->host++;
    return NULL;
}

const char *http_guard_check(struct evhttp_request *req)
{
    struct header_counts counts = {0};
    const struct evkeyval *header;
    for (header = evhttp_request_get_input_headers(req)->tqh_first; header; header = header->next.tqe_next) {
        const char *why = check_header(header, &counts);
        if (why)
            return why;
    }
    if (counts.content_length > 1)
        return "more than one Content-Length header";
    if (counts.transfer_encoding > 1)
        return "more than one Transfer-Encoding header";
    if (counts.content_length && counts.transfer_encoding)
        return "Content-Length together with Transfer-Encoding";
    if (counts.host > 1)
        return "more than one Host header";
    if (counts.host == 0 && (req->major > 1 || req->minor >= 1))
        return "HTTP/1.1 needs a Host header";
    return NULL;
}
