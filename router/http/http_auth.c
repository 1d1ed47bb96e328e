#include "router/http/http_auth.h"
#include <errno.h>
#include <sodium.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { KEYS_MAX = 1024, KEY_BYTES_MIN = 8, KEY_BYTES_MAX = 512, HASH_BYTES = 32 };

struct key_hash {
    uint8_t compare[HASH_BYTES]; /* with this process's random secret */
    uint8_t tenant[HASH_BYTES];  /* the same in every process */
};

struct http_auth {
    uint8_t secret[crypto_generichash_KEYBYTES];
    struct key_hash *keys; /* [n] */
    int n;
};

static void hash_key(const struct http_auth *auth, const char *key, size_t len, uint8_t ret_hash[HASH_BYTES])
{
    crypto_generichash(ret_hash, HASH_BYTES, (const unsigned char *)key, len, auth->secret, sizeof(auth->secret));
}

static int add_key(struct http_auth *auth, const char *key, size_t len, struct error *err)
{
    static const char context[] = "tidepool tenant"; /* keeps the tenant's id from being a plain hash of the key */
    if (len < KEY_BYTES_MIN || len > KEY_BYTES_MAX)
        return error_set(err, -EINVAL, "an API key has %zu bytes; allowed are %d to %d", len, KEY_BYTES_MIN, KEY_BYTES_MAX);
    if (auth->n == KEYS_MAX)
        return error_set(err, -EINVAL, "more than %d API keys", KEYS_MAX);
    struct key_hash *keys = realloc(auth->keys, (size_t)(auth->n + 1) * sizeof(*keys));
    if (!keys)
        return error_set(err, -ENOMEM, "out of memory");
    auth->keys = keys;
    hash_key(auth, key, len, keys[auth->n].compare);
    crypto_generichash(keys[auth->n].tenant, HASH_BYTES, (const unsigned char *)key, len, (const unsigned char *)context, sizeof(context) - 1);
    auth->n++;
    return 0;
}

static int add_list(struct http_auth *auth, const char *list, struct error *err)
{
    int rc = 0;
    while (list && *list && rc >= 0) {
        size_t len = strcspn(list, ",");
        rc = len ? add_key(auth, list, len, err) : 0;
        list += len + (list[len] == ',');
    }
    return rc;
}

static int add_file(struct http_auth *auth, const char *path, struct error *err)
{
    char line[KEY_BYTES_MAX + 8];
    FILE *file = fopen(path, "re");
    if (!file)
        return error_set(err, -errno, "--api-key-file %s: %s", path, strerror(errno));
    int rc = 0;
    while (rc >= 0 && fgets(line, sizeof(line), file)) {
        size_t len = strcspn(line, " \t\r\n#");
        if (len)
            rc = add_key(auth, line, len, err);
    }
    fclose(file);
    sodium_memzero(line, sizeof(line));
    return rc;
}

int http_auth_create(const char *keys, const char *file, struct http_auth **ret_auth, struct error *err)
{
    struct http_auth *auth = calloc(1, sizeof(*auth));
    if (!auth)
        return error_set(err, -ENOMEM, "out of memory");
    randombytes_buf(auth->secret, sizeof(auth->secret));
    int rc = add_list(auth, keys, err);
    if (rc >= 0 && file)
        rc = add_file(auth, file, err);
    /* A file that holds no key must not open the server to everybody. */
    if (rc >= 0 && (keys || file) && auth->n == 0)
        rc = error_set(err, -EINVAL, "API keys were asked for, but none is given");
    if (rc < 0) {
        http_auth_free(auth);
        return rc;
    }
    *ret_auth = auth;
    return 0;
}

void http_auth_free(struct http_auth *auth)
{
    if (!auth)
        return;
    free(auth->keys);
    sodium_memzero(auth, sizeof(*auth));
    free(auth);
}

int http_auth_find(const struct http_auth *auth, const char *key)
{
    size_t len = key ? strlen(key) : 0;
    if (len == 0 || len > KEY_BYTES_MAX)
        return 0;
    uint8_t hash[HASH_BYTES];
    int found = 0;
    hash_key(auth, key, len, hash);
    for (int i = 0; i < auth->n; i++) /* always all of them */
        if (sodium_memcmp(hash, auth->keys[i].compare, HASH_BYTES) == 0)
            found = i + 1;
    return found;
}

static const char *bearer(const char *authorization)
{
    if (!authorization || strncasecmp(authorization, "Bearer", 6) != 0)
        return NULL;
    size_t spaces = strspn(authorization + 6, " ");
    return spaces ? authorization + 6 + spaces : NULL;
}

bool http_auth_check(const struct http_auth *auth, const struct http_exchange *exchange, int *ret_tenant)
{
    *ret_tenant = 0;
    if (auth->n == 0)
        return true;
    int tenant = http_auth_find(auth, bearer(http_exchange_header(exchange, "Authorization")));
    if (!tenant)
        tenant = http_auth_find(auth, http_exchange_header(exchange, "api-key"));
    if (!tenant)
        tenant = http_auth_find(auth, http_exchange_header(exchange, "x-api-key"));
    *ret_tenant = tenant;
    return tenant != 0;
}

void http_auth_tenant_id(const struct http_auth *auth, int tenant, unsigned char ret_id[32])
{
    memset(ret_id, 0, HASH_BYTES);
    if (tenant >= 1 && tenant <= auth->n)
        memcpy(ret_id, auth->keys[tenant - 1].tenant, HASH_BYTES);
}
