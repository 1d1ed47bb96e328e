#include "worker/sched/token_counts.h"
#include <criterion/criterion.h>

Test(token_counts, test_counts_like_a_table_of_all_tokens)
{
    enum { VOCAB = 5000, N = 60000 };
    static int prompt[VOCAB], output[VOCAB];
    struct token_counts c = {0};
    uint64_t state = 3;
    int distinct = 0;

    for (int i = 0; i < N; i++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        int32_t token = (int32_t)((state >> 33) % VOCAB * ((state >> 60) ? 1 : 0)); /* token 0 often */
        if (i % 3) {
            prompt[token]++;
            cr_assert_eq(token_counts_add_prompt(&c, token), 0);
        } else {
            output[token]++;
            cr_assert_eq(token_counts_add_output(&c, token), 0);
        }
    }
    for (int t = 0; t < VOCAB; t++)
        distinct += prompt[t] + output[t] > 0;
    cr_assert_eq(c.n, distinct);
    for (int i = 0; i < c.n; i++) {
        cr_assert_eq(c.counts[i].n_prompt, prompt[c.counts[i].token]);
        cr_assert_eq(c.counts[i].n_output, output[c.counts[i].token]);
    }
    token_counts_fini(&c);
    cr_assert_eq(c.n, 0);
}
