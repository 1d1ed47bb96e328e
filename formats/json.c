#include "formats/json.h"
#include "formats/json_private.h"
#include "proto/base/base_assert.h"
#include <errno.h>
#include <locale.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <xxhash.h>

#define DEPTH_MAX 64
#define KEYS_MIN 16    /* slots of a new key set */
#define KEYS_KEEP 256  /* larger sets are given back when their object ends */
#define CHUNK_BYTES 4096

/* The keys seen in one open object, in an open-addressing table. Hashes are seeded per process, so that nobody can aim collisions at it. */
struct key_slot {
    const char *data; /* NULL: free */
    size_t len;
    uint64_t hash;
};

struct json_level {
    bool object;
    bool first;
    struct key_slot *slots; /* [cap], cap a power of two, or NULL */
    size_t n_keys, cap;
};

/* Decoded strings live in chunks that never move. */
struct json_chunk {
    struct json_chunk *next;
    size_t used, size;
    char data[];
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static locale_t c_locale;
static uint64_t hash_seed;

static void init_once(void)
{
    c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    ASSERT(c_locale);
    if (getrandom(&hash_seed, sizeof hash_seed, GRND_NONBLOCK) < 0)
        hash_seed = (uintptr_t)&hash_seed;
}

void json_init(struct json *j, const char *text, size_t len)
{
    pthread_once(&once, init_once);
    *j = (struct json){.text = text, .len = len};
}

void json_fini(struct json *j)
{
    for (int i = 0; j->levels && i < DEPTH_MAX; i++)
        free(j->levels[i].slots);
    free(j->levels);
    j->levels = NULL;
    while (j->strings) {
        struct json_chunk *next = j->strings->next;
        free(j->strings);
        j->strings = next;
    }
}

static int fail_at(struct json *j, int code, const char *text, size_t pos)
{
    if (!j->error) {
        j->error = code;
        j->error_text = text;
        j->error_pos = pos;
    }
    return j->error;
}

static int fail_fault(struct json *j, const struct json_fault *fault)
{
    return fail_at(j, fault->code, fault->text, fault->pos);
}

int json_fail(struct json *j, const char *static_text)
{
    fail_at(j, -EINVAL, static_text, j->pos);
    return -EINVAL;
}

static void skip_space(struct json *j)
{
    while (j->pos < j->len) {
        char c = j->text[j->pos];
        if (c != ' ' && c != '\n' && c != '\r' && c != '\t')
            break;
        j->pos++;
    }
}

/* The next byte that is not white space, or -1 at the end of the text. */
static int next_byte(struct json *j)
{
    skip_space(j);
    return j->pos < j->len ? (unsigned char)j->text[j->pos] : -1;
}

static enum json_type type_of(int c)
{
    switch (c) {
    case '{': return JSON_OBJECT;
    case '[': return JSON_ARRAY;
    case '"': return JSON_STRING;
    case 't':
    case 'f': return JSON_BOOL;
    case 'n': return JSON_NULL;
    default: return c == '-' || (c >= '0' && c <= '9') ? JSON_NUMBER : JSON_ERROR;
    }
}

enum json_type json_peek(struct json *j)
{
    if (j->error)
        return JSON_ERROR;
    enum json_type type = type_of(next_byte(j));
    if (type == JSON_ERROR)
        fail_at(j, -EINVAL, "expected a value", j->pos);
    return type;
}

/* Moves to the next value if it is of `type`. */
static int expect(struct json *j, enum json_type type, const char *text)
{
    enum json_type found = json_peek(j);
    if (found == JSON_ERROR)
        return j->error;
    return found == type ? 0 : fail_at(j, -EINVAL, text, j->pos);
}

/* Containers. */

static int open_level(struct json *j, bool object)
{
    if (j->depth == DEPTH_MAX)
        return fail_at(j, -EINVAL, "nested too deeply", j->pos);
    if (!j->levels) {
        j->levels = calloc(DEPTH_MAX, sizeof *j->levels);
        if (!j->levels)
            return fail_at(j, -ENOMEM, "out of memory", j->pos);
    }
    struct json_level *level = &j->levels[j->depth++];
    level->object = object;
    level->first = true;
    if (level->n_keys)
        memset(level->slots, 0, level->cap * sizeof *level->slots);
    level->n_keys = 0;
    j->pos++;
    return 0;
}

static void close_level(struct json *j)
{
    struct json_level *level = &j->levels[--j->depth];
    if (level->cap > KEYS_KEEP) {
        free(level->slots);
        level->slots = NULL;
        level->n_keys = level->cap = 0;
    }
    j->pos++;
}

int json_object(struct json *j)
{
    int r = expect(j, JSON_OBJECT, "expected an object");
    return r < 0 ? r : open_level(j, true);
}

int json_array(struct json *j)
{
    int r = expect(j, JSON_ARRAY, "expected an array");
    return r < 0 ? r : open_level(j, false);
}

/* Steps to the next element of the innermost container; false at its end, which is consumed, and after an error. */
static bool next_element(struct json *j, bool object)
{
    if (j->error)
        return false;
    ASSERT(j->depth > 0 && j->levels[j->depth - 1].object == object);
    struct json_level *level = &j->levels[j->depth - 1];
    int c = next_byte(j);
    if (c == (object ? '}' : ']')) {
        close_level(j);
        return false;
    }
    if (level->first) {
        level->first = false;
        return true;
    }
    if (c != ',') {
        fail_at(j, -EINVAL, object ? "expected ',' or '}'" : "expected ',' or ']'", j->pos);
        return false;
    }
    j->pos++;
    return true;
}

bool json_next_item(struct json *j)
{
    return next_element(j, false) && json_peek(j) != JSON_ERROR;
}

static int grow_keys(struct json_level *level)
{
    size_t cap = level->cap ? level->cap * 2 : KEYS_MIN;
    struct key_slot *slots = calloc(cap, sizeof *slots);
    if (!slots)
        return -ENOMEM;
    for (size_t i = 0; i < level->cap; i++) {
        if (!level->slots[i].data)
            continue;
        size_t at = level->slots[i].hash & (cap - 1);
        while (slots[at].data)
            at = (at + 1) & (cap - 1);
        slots[at] = level->slots[i];
    }
    free(level->slots);
    level->slots = slots;
    level->cap = cap;
    return 0;
}

/* Adds a key to the set of the innermost object: -EEXIST if it is there. */
static int add_key(struct json_level *level, const struct json_str *key)
{
    if (level->n_keys * 2 >= level->cap && grow_keys(level) < 0)
        return -ENOMEM;
    uint64_t hash = XXH3_64bits_withSeed(key->data, key->len, hash_seed);
    size_t at = hash & (level->cap - 1);
    for (; level->slots[at].data; at = (at + 1) & (level->cap - 1)) {
        const struct key_slot *slot = &level->slots[at];
        if (slot->hash == hash && slot->len == key->len && memcmp(slot->data, key->data, key->len) == 0)
            return -EEXIST;
    }
    level->slots[at] = (struct key_slot){.data = key->data, .len = key->len, .hash = hash};
    level->n_keys++;
    return 0;
}

static int expect_colon(struct json *j)
{
    if (next_byte(j) != ':')
        return fail_at(j, -EINVAL, "expected ':'", j->pos);
    j->pos++;
    return 0;
}

bool json_next_key(struct json *j, struct json_str *ret_key)
{
    if (!next_element(j, true))
        return false;
    struct json_str key;
    if (next_byte(j) != '"') {
        fail_at(j, -EINVAL, "expected a key", j->pos);
        return false;
    }
    size_t start = j->pos;
    if (json_string(j, &key) < 0 || expect_colon(j) < 0)
        return false;
    int r = add_key(&j->levels[j->depth - 1], &key);
    if (r < 0) {
        fail_at(j, r == -EEXIST ? -EINVAL : r, r == -EEXIST ? "duplicate key" : "out of memory", start);
        return false;
    }
    *ret_key = key;
    return true;
}

/* Scalars. */

/* n bytes that live until json_fini, or NULL. */
static char *string_memory(struct json *j, size_t n)
{
    struct json_chunk *chunk = j->strings;
    if (!chunk || chunk->size - chunk->used < n) {
        size_t size = chunk && chunk->size < 256 * CHUNK_BYTES ? chunk->size * 2 : CHUNK_BYTES;
        if (size < n)
            size = n;
        chunk = malloc(sizeof *chunk + size);
        if (!chunk)
            return NULL;
        *chunk = (struct json_chunk){.next = j->strings, .size = size};
        j->strings = chunk;
    }
    return chunk->data + chunk->used;
}

int json_string(struct json *j, struct json_str *ret_str)
{
    int r = expect(j, JSON_STRING, "expected a string");
    if (r < 0)
        return r;
    bool escapes;
    struct json_fault fault;
    size_t end = json_scan_string(j->text, j->len, j->pos, &escapes, &fault);
    if (!end)
        return fail_fault(j, &fault);
    const char *inside = j->text + j->pos + 1;
    size_t n = end - j->pos - 2;
    if (escapes) {
        char *copy = string_memory(j, n);
        if (!copy)
            return fail_at(j, -ENOMEM, "out of memory", j->pos);
        n = json_unescape(inside, n, copy);
        j->strings->used += n;
        inside = copy;
    }
    *ret_str = (struct json_str){.data = inside, .len = n};
    j->pos = end;
    return 0;
}

static int scan_number(struct json *j, struct json_number *ret_num)
{
    int r = expect(j, JSON_NUMBER, "expected a number");
    if (r < 0)
        return r;
    struct json_fault fault;
    if (!json_scan_number(j->text, j->len, j->pos, ret_num, &fault))
        return fail_fault(j, &fault);
    return 0;
}

/* The commonest integers, up to 18 digits and nothing else: prompts may be arrays of 100,000 of them. The position stays where it is when the number is
 * of another kind. */
static bool short_int(struct json *j, int64_t *ret_value)
{
    bool negative = j->text[j->pos] == '-';
    size_t first = j->pos + negative, pos = first, end = j->len - first > 18 ? first + 18 : j->len;
    int64_t value = 0;
    for (; pos < end && (unsigned char)(j->text[pos] - '0') < 10; pos++)
        value = value * 10 + (j->text[pos] - '0');
    if (pos == first || pos == end || (j->text[first] == '0' && pos - first > 1))
        return false;
    char next = j->text[pos];
    if (next == '.' || next == 'e' || next == 'E')
        return false;
    *ret_value = negative ? -value : value;
    j->pos = pos;
    return true;
}

int json_int(struct json *j, int64_t *ret_value)
{
    struct json_number num;
    if (!j->error && json_peek(j) == JSON_NUMBER && short_int(j, ret_value))
        return 0;
    int r = scan_number(j, &num);
    if (r < 0)
        return r;
    int64_t value;
    r = json_number_int(j->text, &num, &value);
    if (r < 0)
        return fail_at(j, r, r == -ERANGE ? "integer out of range" : "expected an integer", num.start);
    *ret_value = value;
    j->pos = num.end;
    return 0;
}

int json_double(struct json *j, double *ret_value)
{
    struct json_number num;
    int r = scan_number(j, &num);
    if (r < 0)
        return r;
    double value;
    r = json_number_double(j->text, &num, c_locale, &value);
    if (r < 0)
        return fail_at(j, r, r == -ERANGE ? "number out of range" : "out of memory", num.start);
    *ret_value = value;
    j->pos = num.end;
    return 0;
}

static int literal(struct json *j, const char *word)
{
    size_t n = strlen(word);
    if (j->len - j->pos < n || memcmp(j->text + j->pos, word, n) != 0)
        return fail_at(j, -EINVAL, "expected a value", j->pos);
    j->pos += n;
    return 0;
}

int json_bool(struct json *j, bool *ret_value)
{
    int r = expect(j, JSON_BOOL, "expected true or false");
    if (r < 0)
        return r;
    bool value = j->text[j->pos] == 't';
    r = literal(j, value ? "true" : "false");
    if (r == 0)
        *ret_value = value;
    return r;
}

int json_null(struct json *j)
{
    int r = expect(j, JSON_NULL, "expected null");
    return r < 0 ? r : literal(j, "null");
}

/* Skipping. Open containers are kept as bits, one a level, so that nothing recurses and no key set is built. */

static int skip_string(struct json *j)
{
    bool escapes;
    struct json_fault fault;
    size_t end = json_scan_string(j->text, j->len, j->pos, &escapes, &fault);
    if (!end)
        return fail_fault(j, &fault);
    j->pos = end;
    return 0;
}

static int skip_number(struct json *j)
{
    struct json_number num;
    int r = scan_number(j, &num);
    if (r < 0)
        return r;
    if (num.magnitude < 300) {
        j->pos = num.end;
        return 0;
    }
    double unused;
    return json_double(j, &unused);
}

static int skip_scalar(struct json *j, enum json_type type)
{
    bool unused;
    switch (type) {
    case JSON_STRING: return skip_string(j);
    case JSON_NUMBER: return skip_number(j);
    case JSON_BOOL: return json_bool(j, &unused);
    case JSON_NULL: return json_null(j);
    default: return j->error;
    }
}

/* Reads `"key" :` behind '{' or ','. */
static int skip_key(struct json *j)
{
    if (next_byte(j) != '"')
        return fail_at(j, -EINVAL, "expected a key", j->pos);
    int r = skip_string(j);
    return r < 0 ? r : expect_colon(j);
}

/* Behind a value: closes containers and steps over a comma. Returns the number of levels still open. */
static int skip_closers(struct json *j, uint64_t *objects, int depth)
{
    while (depth > 0) {
        bool object = *objects & 1;
        int c = next_byte(j);
        if (c == (object ? '}' : ']')) {
            j->pos++;
            *objects >>= 1;
            depth--;
            continue;
        }
        if (c != ',')
            return fail_at(j, -EINVAL, object ? "expected ',' or '}'" : "expected ',' or ']'", j->pos);
        j->pos++;
        if (object && skip_key(j) < 0)
            return j->error;
        break;
    }
    return depth;
}

int json_skip(struct json *j)
{
    uint64_t objects = 0; /* bit 0: the innermost open container is an object */
    int depth = 0;
    do {
        enum json_type type = json_peek(j);
        if (type != JSON_OBJECT && type != JSON_ARRAY) {
            if (skip_scalar(j, type) < 0)
                return j->error;
        } else {
            if (j->depth + depth == DEPTH_MAX)
                return fail_at(j, -EINVAL, "nested too deeply", j->pos);
            j->pos++;
            objects = objects << 1 | (type == JSON_OBJECT);
            depth++;
            bool empty = next_byte(j) == (type == JSON_OBJECT ? '}' : ']');
            if (!empty) {
                if (type == JSON_OBJECT && skip_key(j) < 0)
                    return j->error;
                continue;
            }
        }
        depth = skip_closers(j, &objects, depth);
    } while (depth > 0);
    return j->error;
}

int json_raw(struct json *j, struct json_str *ret_text)
{
    if (json_peek(j) == JSON_ERROR)
        return j->error;
    size_t start = j->pos;
    int r = json_skip(j);
    if (r == 0)
        *ret_text = (struct json_str){.data = j->text + start, .len = j->pos - start};
    return r;
}

int json_end(struct json *j)
{
    if (j->error)
        return j->error;
    if (j->depth > 0)
        return fail_at(j, -EINVAL, "value not read to its end", j->pos);
    if (next_byte(j) != -1)
        return fail_at(j, -EINVAL, "unexpected text behind the value", j->pos);
    return 0;
}

bool json_str_eq(const struct json_str *s, const char *text)
{
    size_t n = strlen(text);
    return s->len == n && memcmp(s->data, text, n) == 0;
}
