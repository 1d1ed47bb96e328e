/* API keys. Keys are kept and compared as keyed hashes only, in time that does not depend on where they differ. One thread. */
#pragma once
#include "proto/base/error.h"
#include "router/http/http_exchange.h"
#include <stdbool.h>

struct http_auth;

/* `keys`: separated by commas, or NULL. `file`: one key a line, # starts a comment, or NULL. Without any key everything is allowed. Call sodium_init() first. */
int http_auth_create(const char *keys, const char *file, struct http_auth **ret_auth, struct error *err);
void http_auth_free(struct http_auth *auth);
/* True if the exchange carries a known key in Authorization: Bearer, api-key or x-api-key, or none is needed. `ret_tenant` gets 1 + the key's number, or 0. */
bool http_auth_check(const struct http_auth *auth, const struct http_exchange *exchange, int *ret_tenant);
/* The same on a bare key; for tests. */
int http_auth_find(const struct http_auth *auth, const char *key);
/* 32 bytes that stand for a tenant of http_auth_check and say nothing about its key; equal in every process that knows the key. */
void http_auth_tenant_id(const struct http_auth *auth, int tenant, unsigned char ret_id[32]);
