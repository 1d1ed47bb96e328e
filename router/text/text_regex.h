/* Oniguruma with limits: a pattern from a file and a text from a stranger must not hang or exhaust the process. A compiled pattern may be
 * searched by any number of threads. */
#pragma once
#include "proto/base/error.h"
#include <oniguruma.h>
#include <stddef.h>
#include <stdint.h>

#define REGEX_PATTERN_MAX 65536

struct regex;

int regex_init(void); /* once a process, by any thread; 0 or -EIO */
/* -EINVAL with Oniguruma's message, -ENOMEM. */
int regex_compile(const char *pattern, size_t len, struct regex **ret_re, struct error *err);
void regex_free(struct regex *re);
/* What one thread needs to search, with any pattern. */
struct regex_matcher {
    OnigMatchParam *limits;
    OnigRegion *region;
    uint64_t budget_end_ns; /* of the thread's CPU clock; 0: not started */
    uint64_t budget_ns;
    unsigned n_searches;
};
/* `text_bytes`: how much will be searched in all; the time allowed grows with it. -ENOMEM. */
int regex_matcher_init(struct regex_matcher *m, size_t text_bytes);
void regex_matcher_fini(struct regex_matcher *m); /* a zeroed one is fine */
/* The leftmost match in text[from..len), with text[0..from) as context. 1 and the match's bounds, 0 when there is none, -EINVAL when the search runs into
 * a limit or all searches of this matcher take too long, -ENOMEM. */
int regex_search(struct regex_matcher *m, const struct regex *re, const uint8_t *text, size_t len, size_t from, size_t *ret_start, size_t *ret_end);
