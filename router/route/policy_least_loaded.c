/* The worker with the least work outstanding; among equals the one that has waited longest. */
#include "router/route/policy.h"

static size_t choose(const struct policy_candidate *candidates, size_t n, uint32_t prompt_tokens)
{
    (void)prompt_tokens;
    size_t chosen = 0;
    for (size_t i = 1; i < n; i++) {
        const struct policy_candidate *a = &candidates[i], *b = &candidates[chosen];
        if (a->load_tokens < b->load_tokens || (a->load_tokens == b->load_tokens && a->last_sent < b->last_sent))
            chosen = i;
    }
    return chosen;
}

const struct policy_ops policy_least_loaded = {
    .name = "least-loaded",
    .help = "least work outstanding, wherever the prefix is",
    .choose = choose,
};
