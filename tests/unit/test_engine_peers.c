/* What ranks agree on, with a peer whose every value the test decides: what another rank lacks costs work and changes no result, and what fails there fails here. */
#include "tests/unit/engine_fixture.h"
#include "tests/unit/fake_kv_client.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { N_PROMPT = 500, N_TOTAL = 900, LEAST_MAX = 4 };

/* What the other rank says at the next agreements, in order; behind them it has whatever this one has. */
struct peer {
    struct {
        int n;
        int32_t values[LEAST_MAX];
        bool broken;
    } says[8];
    int n_says, n_asked;
};

static int least(void *arg, int32_t *values, int n)
{
    struct peer *peer = arg;
    const int i = peer->n_asked++;
    cr_assert(n >= 1 && n <= 64);
    if (i >= peer->n_says)
        return 0;
    for (int j = 0; j < peer->says[i].n; j++)
        if (peer->says[i].values[j] < values[j])
            values[j] = peer->says[i].values[j];
    return peer->says[i].broken ? -ECONNRESET : 0;
}

static int32_t tokens[N_TOTAL];
static struct fixture f;
static struct kv_client *store;
static struct peer peer;
static const struct engine_peers peers = {.least = least, .arg = &peer};

static void setup(void)
{
    fixture_tokens(77, tokens, N_TOTAL);
    cr_assert(fixture_open(&f, (struct fixture_params){0}));
    store = fake_store_create();
    peer = (struct peer){0};
}
static void teardown(void)
{
    fixture_expect_no_memory(&f);
    cr_expect(fake_store_n_leases(store) == 0 && fake_store_n_granted(store) == 0);
    fake_store_free(store);
    fixture_close(&f);
}
TestSuite(engine_peers, .init = setup, .fini = teardown);

static struct engine *engine_with(const struct engine_peers *with)
{
    struct engine_config config = fixture_config();
    config.peers = with;
    return fixture_engine(&f, &config, store);
}

static int create(struct engine *engine, int n_answer, struct sequence **ret_sequence, struct error *err)
{
    const struct sequence_request request = {
        .prompt = tokens, .n_prompt = N_PROMPT, .max_new = N_TOTAL - N_PROMPT, .answer = tokens + N_PROMPT, .n_answer = n_answer, .tag = 17};
    return sequence_create(engine, &request, ret_sequence, err);
}

/* The whole run; its logits behind token i of the answer must be want's row i + 1. Returns its statistics. */
static struct sequence_stats run(const struct engine_peers *with, int n_answer, const float *want, float *ret_logits)
{
    struct engine *engine = engine_with(with);
    struct sequence_stats stats;
    struct sequence *seq;
    struct error err = {""};
    int r = create(engine, n_answer, &seq, &err);
    cr_assert(r >= 0, "%s", err.text);
    cr_expect(sequence_tag(seq) == 17);
    while ((r = sequence_prefill_step(seq)) > 0)
        ;
    cr_assert_eq(r, 0);
    sequence_stats(seq, &stats);
    for (int i = stats.n_restored; i <= N_TOTAL - N_PROMPT; i++) {
        if (want && (i > 0 || stats.n_restored == 0) && i > stats.n_restored)
            fixture_expect_same(want + (size_t)i * TINY_VOCAB, sequence_logits(seq), 1, "with a peer");
        if (ret_logits)
            memcpy(ret_logits + (size_t)i * TINY_VOCAB, sequence_logits(seq), TINY_VOCAB * sizeof(float));
        if (i == N_TOTAL - N_PROMPT)
            break;
        fixture_decode(engine, seq, tokens[N_PROMPT + i]);
        fake_store_pump(store);
        cr_assert(coverage_check(seq, &err) >= 0, "%s", err.text);
    }
    sequence_stats(seq, &stats);
    sequence_free(seq);
    engine_free(engine);
    return stats;
}

static float *run_alone(void)
{
    float *logits = malloc((size_t)(N_TOTAL - N_PROMPT + 1) * TINY_VOCAB * sizeof(float));
    cr_assert(logits);
    const struct sequence_stats stats = run(NULL, 0, NULL, logits);
    cr_assert_eq(stats.n_cached, 0);
    return logits;
}

Test(engine_peers, test_prefix_is_what_every_rank_has)
{
    static const int32_t theirs[] = {0, 128, 256, 384, 100000};
    float *want = run_alone();
    for (size_t i = 0; i < sizeof(theirs) / sizeof(theirs[0]); i++) {
        peer = (struct peer){.n_says = 1, .says[0] = {.n = 2, .values = {0, theirs[i]}}};
        const struct sequence_stats stats = run(&peers, 0, want, NULL);
        cr_expect(stats.n_cached == (theirs[i] < 384 ? theirs[i] : 384), "%d of %d cached", stats.n_cached, theirs[i]);
        cr_expect(stats.bytes_to_pool == 0);
    }
    free(want);
}

Test(engine_peers, test_answer_is_restored_as_far_as_every_rank_has_it)
{
    static const int32_t theirs[] = {0, 512, 640, 768, 100000};
    float *want = run_alone();
    for (size_t i = 0; i < sizeof(theirs) / sizeof(theirs[0]); i++) {
        peer = (struct peer){.n_says = 1, .says[0] = {.n = 3, .values = {0, 100000, theirs[i]}}};
        const struct sequence_stats stats = run(&peers, 300, want, NULL);
        const int most = theirs[i] < 768 ? theirs[i] : 768;
        cr_expect(stats.n_restored == (most ? most - N_PROMPT : 0), "%d of %d restored", stats.n_restored, theirs[i]);
    }
    free(want);
}

/* Before the store is asked, and when memory is taken. */
Test(engine_peers, test_what_another_rank_cannot_take_is_not_taken)
{
    static const int errors[] = {-EAGAIN, -ENOMEM, -E2BIG};
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
        for (int when = 0; when < 2; when++) {
            struct engine *engine = engine_with(&peers);
            struct sequence *seq = NULL;
            struct error err = {""};
            peer = (struct peer){.n_says = 2, .says[0] = {.n = 1}};
            peer.says[when].n = 1;
            peer.says[when].values[0] = errors[i];
            cr_expect(create(engine, 0, &seq, &err) == errors[i] && !seq);
            cr_expect(peer.n_asked == when + 1 && strstr(err.text, "another rank"), "%s", err.text);
            engine_free(engine);
        }
    }
}

/* This rank has found that it cannot: the others must hear of it, or they would wait. */
Test(engine_peers, test_own_refusal_is_told)
{
    struct engine *engine = engine_with(&peers);
    const struct sequence_request request = {.prompt = tokens, .n_prompt = N_PROMPT, .max_new = 1 << 20};
    struct sequence *seq = NULL;
    struct error err = {""};
    cr_expect(sequence_create(engine, &request, &seq, &err) == -E2BIG && peer.n_asked == 1);
    cr_expect(strstr(err.text, "context"), "%s", err.text);
    engine_free(engine);
}

static struct sequence *prefilled(struct engine *engine)
{
    struct sequence *seq;
    struct error err = {""};
    cr_assert(create(engine, 0, &seq, &err) >= 0, "%s", err.text);
    while (sequence_prefill_step(seq) > 0)
        ;
    cr_assert(sequence_logits(seq));
    return seq;
}

/* Numbers that no block of another rank holds end the sequence here, alone. */
Test(engine_peers, test_range_of_another_rank_ends_the_sequence)
{
    struct engine *engine = engine_with(&peers);
    struct sequence *seq, *other = prefilled(engine);
    struct error err = {""};
    int r;

    peer = (struct peer){.n_says = 4, .says[3] = {.n = 1, .values = {-ERANGE}}};
    cr_assert(create(engine, 0, &seq, &err) >= 0);
    while ((r = sequence_prefill_step(seq)) > 0)
        ;
    cr_expect(r == -ERANGE && peer.n_asked == 4, "%d after %d", r, peer.n_asked);
    sequence_free(seq);

    /* 500 tokens and 12 more complete a block: one agreement on its memory, one on its numbers. */
    seq = prefilled(engine);
    peer = (struct peer){.n_says = 2, .says[1] = {.n = 2, .values = {0, -ERANGE}}};
    for (int i = 0; i < 12; i++) {
        struct sequence *both[] = {other, seq};
        const int32_t next[] = {tokens[N_PROMPT + i], tokens[N_PROMPT + i]};
        cr_assert(sequence_logits(seq));
        cr_assert_eq(engine_decode(engine, both, next, 2), 0);
    }
    cr_expect(peer.n_asked == 2 && !sequence_logits(seq) && sequence_logits(other));
    sequence_free(seq);
    sequence_free(other);
    engine_free(engine);
    fake_store_pump(store);
}

/* NaN in this rank's keys: it goes on to the end of the layer, so that nobody waits for it, and no such block is sealed. */
Test(engine_peers, test_own_range_is_told_at_the_end_of_the_layer)
{
    struct engine *engine = engine_with(&peers);
    struct sequence *seq;
    struct error err = {""};
    int r, units = 0;
    fixture_poison_token(&f, tokens[30]);
    cr_assert(create(engine, 0, &seq, &err) >= 0);
    peer.n_asked = 0;
    while ((r = sequence_prefill_step(seq)) > 0)
        units++;
    struct sequence_stats stats;
    sequence_stats(seq, &stats);
    cr_expect(r == -ERANGE && peer.n_asked == 1, "%d after %d", r, peer.n_asked);
    cr_expect(units == stats.units_total / 3 - 1, "%d of %d units", units, stats.units_total);
    sequence_free(seq);
    engine_free(engine);
    cr_expect_eq(fake_store_n_blocks(store), 0);
}

Test(engine_peers, test_no_memory_on_another_rank_leaves_the_step_undone)
{
    struct engine *engine = engine_with(&peers);
    struct sequence *seq = prefilled(engine);
    for (int i = 0; i < 11; i++)
        fixture_decode(engine, seq, tokens[N_PROMPT + i]);
    peer = (struct peer){.n_says = 1, .says[0] = {.n = 1, .values = {-ENOMEM}}};
    int n;
    cr_expect_eq(engine_decode(engine, &seq, &tokens[N_PROMPT + 11], 1), -ENOMEM);
    sequence_tokens(seq, &n);
    cr_expect_eq(n, N_PROMPT + 11);
    fixture_decode(engine, seq, tokens[N_PROMPT + 11]);
    sequence_free(seq);
    engine_free(engine);
    fake_store_pump(store);
}

Test(engine_peers, test_broken_group_is_the_device_s_end)
{
    struct engine *engine = engine_with(&peers);
    struct sequence *seq = NULL;
    struct error err = {""};
    peer = (struct peer){.n_says = 1, .says[0] = {.broken = true}};
    cr_expect(create(engine, 0, &seq, &err) == -EIO && !seq);
    seq = prefilled(engine);
    peer = (struct peer){.n_says = 1, .says[0] = {.broken = true}};
    int r = 0;
    for (int i = 0; r >= 0 && i < 12; i++)
        r = engine_decode(engine, &seq, &tokens[N_PROMPT + i], 1);
    cr_expect(r == -EIO && !sequence_logits(seq));
    sequence_free(seq);
    engine_free(engine);
    fake_store_pump(store);
}
