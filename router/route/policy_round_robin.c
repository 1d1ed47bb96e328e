/* Workers in turn: the one whose last request lies furthest back. */
#include "router/route/policy.h"

static size_t choose(const struct policy_candidate *candidates, size_t n, uint32_t prompt_tokens)
{
    (void)prompt_tokens;
    size_t chosen = 0;
    for (size_t i = 1; i < n; i++)
        if (candidates[i].last_sent < candidates[chosen].last_sent)
            chosen = i;
    return chosen;
}

const struct policy_ops policy_round_robin = {
    .name = "round-robin",
    .help = "workers in turn",
    .choose = choose,
};
