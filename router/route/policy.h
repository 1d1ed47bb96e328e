/* Choice of worker: one policy a file, each a pure function over what is known of the workers that could take the request. One thread. */
#pragma once
#include <stddef.h>
#include <stdint.h>

struct policy_candidate {      /* a ready worker with room */
    uint32_t hit_tokens;       /* of the prompt, that its store's pool is believed to hold */
    uint64_t load_tokens;      /* work it was given and has not finished, in tokens of prefill; counted when sent */
    uint64_t last_sent;        /* number of the dispatch that it got last; 0: none yet */
};

struct policy_ops {
    const char *name;          /* of the option's value */
    const char *help;
    /* Index of the chosen candidate. n >= 1. Does not block, cannot fail. */
    size_t (*choose)(const struct policy_candidate *candidates, size_t n, uint32_t prompt_tokens);
};

extern const struct policy_ops policy_prefix, policy_least_loaded, policy_round_robin;

/* NULL for an unknown name. */
const struct policy_ops *policy_find(const char *name);
