#include "router/text/text_regex.h"
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Oniguruma matches by backtracking on a stack of its own, in the heap. One entry is some 50 bytes; a pattern like \s+ pushes one a character. */
#define MATCH_STACK_MAX (16u << 20)
#define RETRIES_IN_MATCH_MAX 20000000ul
#define RETRIES_IN_SEARCH_MAX 50000000ul
#define PARSE_DEPTH_MAX 200
#define CALL_DEPTH_MAX 16

struct regex {
    OnigRegex onig;
};

static int init_result;

static void init_once(void)
{
    OnigEncoding encodings[] = {ONIG_ENCODING_UTF8};
    init_result = onig_initialize(encodings, 1) == ONIG_NORMAL ? 0 : -EIO;
    onig_set_parse_depth_limit(PARSE_DEPTH_MAX);
    onig_set_subexp_call_max_nest_level(CALL_DEPTH_MAX);
}

int regex_init(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, init_once);
    return init_result;
}

int regex_compile(const char *pattern, size_t len, struct regex **ret_re, struct error *err)
{
    if (len > REGEX_PATTERN_MAX)
        return error_set(err, -EINVAL, "regular expression of %zu bytes; at most %d are allowed", len, REGEX_PATTERN_MAX);
    struct regex *re = calloc(1, sizeof *re);
    if (!re)
        return error_set(err, -ENOMEM, "out of memory");
    OnigErrorInfo info;
    const UChar *p = (const UChar *)pattern;
    int r = onig_new(&re->onig, p, p + len, ONIG_OPTION_NONE, ONIG_ENCODING_UTF8, ONIG_SYNTAX_DEFAULT, &info);
    if (r != ONIG_NORMAL) {
        UChar message[ONIG_MAX_ERROR_MESSAGE_LEN];
        onig_error_code_to_str(message, r, &info);
        free(re);
        return error_set(err, r == ONIGERR_MEMORY ? -ENOMEM : -EINVAL, "regular expression \"%.*s\": %s", (int)(len < 200 ? len : 200), pattern, message);
    }
    *ret_re = re;
    return 0;
}

void regex_free(struct regex *re)
{
    if (!re)
        return;
    onig_free(re->onig);
    free(re);
}

/* A search that stays below every limit can still be made again and again. Patterns of honest tokenizers take under a microsecond a byte. */
#define BUDGET_NS 2000000000ull
#define BUDGET_NS_PER_BYTE 4000ull
#define SEARCHES_PER_LOOK 32

int regex_matcher_init(struct regex_matcher *m, size_t text_bytes)
{
    *m = (struct regex_matcher){.limits = onig_new_match_param(), .region = onig_region_new(), .budget_ns = BUDGET_NS + text_bytes * BUDGET_NS_PER_BYTE};
    if (!m->limits || !m->region) {
        regex_matcher_fini(m);
        return -ENOMEM;
    }
    onig_set_match_stack_limit_size_of_match_param(m->limits, MATCH_STACK_MAX);
    onig_set_retry_limit_in_match_of_match_param(m->limits, RETRIES_IN_MATCH_MAX);
    onig_set_retry_limit_in_search_of_match_param(m->limits, RETRIES_IN_SEARCH_MAX);
    return 0;
}

void regex_matcher_fini(struct regex_matcher *m)
{
    if (m->region)
        onig_region_free(m->region, 1);
    if (m->limits)
        onig_free_match_param(m->limits);
    *m = (struct regex_matcher){0};
}

static uint64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static bool budget_is_spent(struct regex_matcher *m)
{
    if (m->n_searches++ % SEARCHES_PER_LOOK != 0)
        return false;
    uint64_t now = cpu_ns();
    if (m->budget_end_ns == 0)
        m->budget_end_ns = now + m->budget_ns;
    return now > m->budget_end_ns;
}

int regex_search(struct regex_matcher *m, const struct regex *re, const uint8_t *text, size_t len, size_t from, size_t *ret_start, size_t *ret_end)
{
    const UChar *end = text + len;
    if (budget_is_spent(m))
        return -EINVAL;
    onig_region_clear(m->region);
    int at = onig_search_with_param(re->onig, text, end, text + from, end, m->region, ONIG_OPTION_NONE, m->limits);
    if (at < 0)
        return at == ONIG_MISMATCH ? 0 : at == ONIGERR_MEMORY ? -ENOMEM : -EINVAL;
    *ret_start = (size_t)m->region->beg[0];
    *ret_end = (size_t)m->region->end[0];
    return 1;
}
