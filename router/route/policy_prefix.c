/* Prefix and load in one unit: the tokens that would have to be prefilled before this request's first token, those of the prompt that the pool does
 * not hold plus those that the worker still owes to others. Of workers within a block of the best, the one that has waited longest
 * gets the request, so that workers of one store, which share its hits, take turns. */
#include "router/route/policy.h"

enum { TIE_TOKENS = 128 };

static uint64_t cost(const struct policy_candidate *candidate, uint32_t prompt_tokens)
{
    uint32_t hit = candidate->hit_tokens < prompt_tokens ? candidate->hit_tokens : prompt_tokens;
    return prompt_tokens - hit + candidate->load_tokens;
}

static size_t choose(const struct policy_candidate *candidates, size_t n, uint32_t prompt_tokens)
{
    uint64_t least = UINT64_MAX;
    size_t chosen = n;
    for (size_t i = 0; i < n; i++)
        if (cost(&candidates[i], prompt_tokens) < least)
            least = cost(&candidates[i], prompt_tokens);
    for (size_t i = 0; i < n; i++)
        if (cost(&candidates[i], prompt_tokens) < least + TIE_TOKENS &&
            (chosen == n || candidates[i].last_sent < candidates[chosen].last_sent))
            chosen = i;
    return chosen;
}

const struct policy_ops policy_prefix = {
    .name = "prefix",
    .help = "fewest tokens to prefill: those the pool does not hold, plus the worker's load",
    .choose = choose,
};
