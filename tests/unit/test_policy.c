#include "router/route/policy.h"
#include <criterion/criterion.h>

Test(policy, test_policy_find_knows_every_name)
{
    cr_assert_eq(policy_find("prefix"), &policy_prefix);
    cr_assert_eq(policy_find("least-loaded"), &policy_least_loaded);
    cr_assert_eq(policy_find("round-robin"), &policy_round_robin);
    cr_assert_null(policy_find("nope"));
}

Test(policy, test_policy_prefix_takes_the_longer_prefix)
{
    const struct policy_candidate c[] = {{.hit_tokens = 0, .last_sent = 1}, {.hit_tokens = 4096, .last_sent = 2}};
    cr_assert_eq(policy_prefix.choose(c, 2, 5000), 1);
}

Test(policy, test_policy_prefix_leaves_the_longer_prefix_when_its_worker_owes_more)
{
    const struct policy_candidate c[] = {{.hit_tokens = 0, .load_tokens = 0}, {.hit_tokens = 4096, .load_tokens = 20000}};
    cr_assert_eq(policy_prefix.choose(c, 2, 5000), 0);
}

/* The second question of the quick start: both workers are idle and share the pool's hits. */
Test(policy, test_policy_prefix_takes_turns_among_equals)
{
    struct policy_candidate c[] = {{.hit_tokens = 4096, .last_sent = 0}, {.hit_tokens = 4096, .last_sent = 0}};
    size_t first = policy_prefix.choose(c, 2, 5000);
    c[first].last_sent = 1;
    size_t second = policy_prefix.choose(c, 2, 5000);
    cr_assert_neq(first, second);
    c[second].last_sent = 2;
    cr_assert_eq(policy_prefix.choose(c, 2, 5000), first);
}

Test(policy, test_policy_prefix_prefers_the_idle_one_among_equal_hits)
{
    const struct policy_candidate c[] = {{.hit_tokens = 4096, .load_tokens = 2000, .last_sent = 1}, {.hit_tokens = 4096, .load_tokens = 0, .last_sent = 9}};
    cr_assert_eq(policy_prefix.choose(c, 2, 5000), 1);
}

Test(policy, test_policy_prefix_does_not_credit_a_hit_beyond_the_prompt)
{
    const struct policy_candidate c[] = {{.hit_tokens = 100000, .load_tokens = 200}, {.hit_tokens = 0, .load_tokens = 0}};
    cr_assert_eq(policy_prefix.choose(c, 2, 64), 1);
}

Test(policy, test_policy_least_loaded_ignores_the_prefix)
{
    const struct policy_candidate c[] = {{.hit_tokens = 9000, .load_tokens = 3}, {.load_tokens = 2}, {.load_tokens = 2, .last_sent = 5}};
    cr_assert_eq(policy_least_loaded.choose(c, 3, 10000), 1);
}

Test(policy, test_policy_round_robin_takes_turns_whatever_the_load)
{
    struct policy_candidate c[3] = {{.load_tokens = 900}, {.load_tokens = 5}, {.load_tokens = 1}};
    for (uint64_t turn = 1; turn <= 6; turn++) {
        size_t chosen = policy_round_robin.choose(c, 3, 10);
        cr_assert_eq(chosen, (turn - 1) % 3);
        c[chosen].last_sent = turn;
    }
}
