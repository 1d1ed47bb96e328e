/* What workers share through a real kvstore: prefixes of random prompts in every format, whoever wrote the blocks; one copy of what two compute at once; answers that another
 * worker goes on with; and nothing across salts. */
#include "proto/base/clock.h"
#include "tests/system/store_fixture.h"
#include "tests/unit/engine_fixture.h"
#include "worker/cache/scorer.h"
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_TOKENS = 1400 };

static struct fixture f;
static struct store_fixture store;
static struct kv_client *client, *other;
static struct store_wire watch;

static void setup(void)
{
    cr_assert(fixture_open(&f, (struct fixture_params){0}));
    store_fixture_init(&store, "64M", 30);
    client = store_fixture_client(&store, "w0");
    other = store_fixture_client(&store, "w1");
    store_wire_open(&watch, store.socket);
}
static void teardown(void)
{
    fixture_expect_no_memory(&f);
    fixture_close(&f);
    store_wire_close(&watch);
    kv_client_free(other);
    kv_client_free(client);
    store_fixture_fini(&store);
}
TestSuite(engine_sharing, .init = setup, .fini = teardown, .timeout = 200);

static uint64_t random_state = 42;

static int below(int n)
{
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (int)((random_state >> 33) % (uint64_t)n);
}

/* The store answers in order, so once it has answered this, all that was asked before is answered too. */
static void settle(struct kv_client *c)
{
    const struct block_key nobody = {{1}};
    struct kv_lease lease;
    (void)kv_client_lookup(c, &nobody, 1, STORE_WAIT_US, &lease);
    loop_poll(store.loop);
}

static float *answer_of(const struct engine_config *config, struct kv_client *with, const struct fixture_run *run, struct sequence_stats *ret_stats)
{
    struct engine *engine = fixture_engine(&f, config, with);
    float *logits = fixture_logits(engine, run, ret_stats);
    engine_free(engine);
    if (with)
        settle(with);
    return logits;
}

/* ---- prefixes ---- */

/* One of "a, b, c". */
static const char *random_name(const char *names)
{
    static char text[256];
    char *save, *all[16];
    int n = 0;
    snprintf(text, sizeof(text), "%s", names);
    for (char *name = strtok_r(text, ", ", &save); name && n < 16; name = strtok_r(NULL, ", ", &save))
        all[n++] = name;
    return all[below(n)];
}

/* What a block's bytes do not depend on. */
static struct engine_config random_config(enum kv_format format)
{
    static const int budgets[] = {0, 36, 64, 200}, recents[] = {0, 32, 130}, fetches[] = {0, 64, INT32_MAX}, chunks[] = {70, 128, 512};
    struct engine_config config = fixture_config();
    config.format = format;
    config.selector = selector_find(random_name(selector_names()));
    config.scorer = scorer_find(random_name(scorer_names()));
    config.fetch_unit = below(2) ? SUBPAGE_TOKENS : BLOCK_TOKENS;
    config.budget = budgets[below(4)];
    config.recent = recents[below(3)];
    config.fetch = fetches[below(3)];
    config.chunk = chunks[below(3)];
    config.order = below(2) ? PREFILL_LAYER_MAJOR : PREFILL_CHUNK_MAJOR;
    return config;
}

/* Around the borders of blocks, and anywhere. */
static int random_length(int max)
{
    if (below(3) == 0)
        return 1 + below(max);
    const int n = BLOCK_TOKENS * (1 + below(max / BLOCK_TOKENS + 1)) + below(5) - 2;
    return n < max ? n : max;
}

/* Tokens of a prompt that may come from the pool when its selector has something to choose. */
static int reusable(const struct selector_ops *selector, int n_prompt)
{
    const int observed = selector->all_queries ? n_prompt : selector->n_window > 1 ? selector->n_window : 1;
    return n_prompt > observed ? (n_prompt - observed) / BLOCK_TOKENS * BLOCK_TOKENS : 0;
}

/* A prompt shares `n_shared` tokens with one that another worker has computed: it gets the bits that it gets alone. */
static void check_prefix(enum kv_format format, uint64_t seed, int *n_hits)
{
    static int32_t base[MAX_TOKENS], tokens[MAX_TOKENS];
    const struct engine_config writer = random_config(format), reader = random_config(format);
    const int n_written = random_length(900), n_shared = random_length(n_written), n_own = below(2) ? 1 + below(140) : 1 + below(20), n_decode = below(4) ? 3 : 140;
    const struct fixture_run run = {.tokens = tokens, .n_prompt = n_shared + n_own, .n_decode = n_decode};
    struct sequence_stats stats;

    fixture_tokens(seed, base, MAX_TOKENS);
    fixture_tokens(seed + 1000, tokens, MAX_TOKENS);
    memcpy(tokens, base, (size_t)n_shared * sizeof(*tokens));
    tokens[n_shared] = (base[n_shared] + 1) % TINY_VOCAB;
    free(answer_of(&writer, client, &(struct fixture_run){.tokens = base, .n_prompt = n_written, .n_decode = 1}, NULL));
    float *want = answer_of(&reader, NULL, &run, NULL), *got = answer_of(&reader, other, &run, &stats);
    char what[160];
    snprintf(what, sizeof(what), "%s seed %d: %d of %d tokens shared of %d, %s budget %d", kv_format_name(format), (int)seed, n_shared, run.n_prompt, n_written,
             reader.selector->name, reader.budget);
    fixture_expect_same(want, got, n_decode + 1, what);
    const int shared = n_shared / BLOCK_TOKENS * BLOCK_TOKENS, low = reusable(reader.selector, run.n_prompt), high = (run.n_prompt - 1) / BLOCK_TOKENS * BLOCK_TOKENS;
    cr_assert(stats.n_cached >= (shared < low ? shared : low), "%s: %d cached", what, stats.n_cached);
    cr_assert(stats.n_cached <= (shared < high ? shared : high), "%s: %d cached", what, stats.n_cached);
    *n_hits += stats.n_cached > 0;
    free(want);
    free(got);
}

Test(engine_sharing, test_random_prefixes_in_every_format)
{
    enum { ROUNDS = 30 };
    for (int format = 0; format < KV_FORMAT_COUNT; format++) {
        int n_hits = 0;
        for (int i = 0; i < ROUNDS; i++)
            check_prefix(format, (uint64_t)(format * ROUNDS + i), &n_hits);
        cr_expect(n_hits >= ROUNDS / 3, "%d rounds found something", n_hits);
    }
}

Test(engine_sharing, test_nothing_is_found_across_salts)
{
    static const char *const salts[] = {"", "a", "b", "ab", "a", "b", ""};
    static int32_t tokens[MAX_TOKENS];
    struct engine_config config = fixture_config();
    struct engine *engine = fixture_engine(&f, &config, client), *second = fixture_engine(&f, &config, other);
    fixture_tokens(77, tokens, MAX_TOKENS);
    for (int i = 0; i < 7; i++) {
        const struct sequence_request request = {.prompt = tokens, .n_prompt = 700, .max_new = 1, .salt = salts[i], .n_salt = strlen(salts[i])};
        struct sequence *seq;
        struct sequence_stats stats;
        cr_assert(sequence_create(i % 2 ? engine : second, &request, &seq, NULL) >= 0);
        while (sequence_prefill_step(seq) > 0)
            ;
        sequence_stats(seq, &stats);
        cr_expect(stats.n_cached == (i < 4 ? 0 : 640), "salt \"%s\": %d cached", salts[i], stats.n_cached);
        sequence_free(seq);
    }
    engine_free(engine);
    engine_free(second);
}

/* ---- the same prefix at once ---- */

enum { N_PROMPT = 900, N_DECODE = 300 };

static int32_t tokens[N_PROMPT + N_DECODE];
static const struct fixture_run run = {.tokens = tokens, .n_prompt = N_PROMPT, .n_decode = N_DECODE};

static struct sequence *begin(struct engine *engine)
{
    const struct sequence_request request = {.prompt = tokens, .n_prompt = N_PROMPT, .max_new = N_DECODE};
    struct sequence *seq;
    struct error err;
    cr_assert(sequence_create(engine, &request, &seq, &err) >= 0, "%s", err.text);
    return seq;
}

static int n_private(const struct sequence *seq)
{
    struct sequence_stats stats;
    sequence_stats(seq, &stats);
    return stats.private_blocks;
}

static void decode_settled(struct engine *engine, struct kv_client *c, struct sequence *seq, const float *want, int from, int to)
{
    for (int i = from; i < to; i++) {
        fixture_decode(engine, seq, tokens[N_PROMPT + i]);
        fixture_expect_same(want + (size_t)(i + 1) * TINY_VOCAB, sequence_logits(seq), 1, "decode");
        settle(c);
    }
}

static bool nothing_is_leased(const Tidepool__Store__StatsResult *s)
{
    return s->n_read_leases == 0 && s->n_unsealed == 0;
}

/* Two workers, the second `lead` units of prefill behind the first. */
static void at_once(const struct engine_config *config, const float *want, int lead, uint64_t *ret_blocks, uint64_t *ret_bytes)
{
    struct engine *engines[2] = {fixture_engine(&f, config, client), fixture_engine(&f, config, other)};
    struct kv_client *clients[2] = {client, other};
    struct sequence *seqs[2] = {begin(engines[0])};
    bool going[2] = {true, true};
    for (int i = 0; i < lead && going[0]; i++)
        going[0] = sequence_prefill_step(seqs[0]) > 0;
    seqs[1] = begin(engines[1]);
    cr_expect(n_private(seqs[0]) == 0 && n_private(seqs[1]) > 0, "the second worker's blocks are being written by the first");
    while (going[0] || going[1])
        for (int i = 0; i < 2; i++)
            going[i] = going[i] && sequence_prefill_step(seqs[i]) > 0;
    for (int i = 0; i < 2; i++)
        fixture_expect_same(want, sequence_logits(seqs[i]), 1, "prompt");
    for (int i = 0; i < N_DECODE; i++)
        for (int w = 0; w < 2; w++)
            decode_settled(engines[w], clients[w], seqs[w], want, i, i + 1);
    for (int w = 0; w < 2; w++)
        cr_expect(n_private(seqs[w]) == 0, "worker %d has %d private blocks", w, n_private(seqs[w]));
    const Tidepool__Store__StatsResult *s = store_wire_stats(&watch);
    *ret_blocks = s->n_blocks;
    *ret_bytes = s->used_bytes;
    for (int w = 0; w < 2; w++) {
        sequence_free(seqs[w]);
        engine_free(engines[w]);
    }
    settle(client);
    settle(other);
    store_await(&watch, nothing_is_leased, "all leases are given back");
}

Test(engine_sharing, test_two_workers_store_a_prefix_once)
{
    for (int format = 0; format < KV_FORMAT_COUNT; format++) {
        struct engine_config config = fixture_config();
        uint64_t blocks, bytes, blocks_before, bytes_before;
        config.format = format;
        fixture_tokens(500 + (uint64_t)format, tokens, N_PROMPT + N_DECODE);
        float *want = answer_of(&config, NULL, &run, NULL);
        blocks_before = store_wire_stats(&watch)->n_blocks;
        bytes_before = store_wire_stats(&watch)->used_bytes;
        at_once(&config, want, format * 7, &blocks, &bytes);
        free(want);

        /* As much as one worker alone stores of another prompt of the same length. */
        struct engine *engine = fixture_engine(&f, &config, client);
        fixture_tokens(600 + (uint64_t)format, tokens, N_PROMPT + N_DECODE);
        float *alone = answer_of(&config, NULL, &run, NULL);
        struct sequence *seq = begin(engine);
        while (sequence_prefill_step(seq) > 0)
            ;
        decode_settled(engine, client, seq, alone, 0, N_DECODE);
        sequence_free(seq);
        engine_free(engine);
        free(alone);
        settle(client);
        cr_expect(blocks - blocks_before == (N_PROMPT + N_DECODE) / BLOCK_TOKENS, "%d blocks", (int)(blocks - blocks_before));
        cr_expect(store_wire_stats(&watch)->n_blocks - blocks == blocks - blocks_before);
        cr_expect(store_wire_stats(&watch)->used_bytes - bytes == bytes - bytes_before, "one run %d bytes, two %d", (int)(store_wire_stats(&watch)->used_bytes - bytes),
                  (int)(bytes - bytes_before));
    }
}

/* Another process computes the prompt with reservations for all its blocks, and stops in the middle. */
static pid_t half_way_writer(const struct engine_config *config, int n_units)
{
    int ready[2];
    char byte = 0;
    cr_assert_eq(pipe(ready), 0);
    const pid_t pid = fork();
    cr_assert(pid >= 0);
    if (pid == 0) {
        const struct kv_client_config mine = {.socket_path = store.socket, .name = "doomed", .connect_timeout_us = STORE_WAIT_US};
        struct kv_client *c;
        struct loop *loop;
        if (loop_create(&loop) < 0 || kv_client_create(loop, &mine, &c, NULL) < 0)
            _exit(1);
        struct sequence *seq = begin(fixture_engine(&f, config, c));
        for (int i = 0; i < n_units && sequence_prefill_step(seq) > 0; i++)
            ;
        if (write(ready[1], "x", 1) != 1)
            _exit(1);
        for (;;)
            pause();
    }
    cr_assert(read(ready[0], &byte, 1) == 1 && byte == 'x');
    close(ready[0]);
    close(ready[1]);
    return pid;
}

Test(engine_sharing, test_killed_writer_leaves_nothing_stuck)
{
    static const int n_units[] = {0, 12, 1000};
    struct engine_config config = fixture_config();
    struct engine *engine = fixture_engine(&f, &config, client);
    for (int i = 0; i < 3; i++) {
        fixture_tokens(700 + (uint64_t)i, tokens, N_PROMPT + N_DECODE);
        float *want = answer_of(&config, NULL, &run, NULL);
        const pid_t pid = half_way_writer(&config, n_units[i]);
        int status;
        struct sequence *seq = begin(engine);
        struct sequence_stats stats;
        cr_expect((n_private(seq) > 0) == (i < 2), "what is being written is private here: %d blocks", n_private(seq));
        cr_assert_eq(kill(pid, SIGKILL), 0);
        cr_assert_eq(waitpid(pid, &status, 0), pid);
        while (sequence_prefill_step(seq) > 0)
            ;
        fixture_expect_same(want, sequence_logits(seq), 1, "prompt");
        decode_settled(engine, client, seq, want, 0, N_DECODE);
        cr_expect(n_private(seq) == 0, "%d blocks are private", n_private(seq));
        sequence_free(seq);
        settle(client);
        store_await(&watch, nothing_is_leased, "nothing is left of the dead");
        float *got = answer_of(&config, other, &run, &stats);
        fixture_expect_same(want, got, N_DECODE + 1, "warm");
        cr_expect(stats.n_cached == 768, "%d cached", stats.n_cached);
        free(got);
        free(want);
    }
    engine_free(engine);
}

/* ---- answers ---- */

/* The first worker dies with `n_made` tokens of the answer made; the second one takes the blocks that are sealed. */
Test(engine_sharing, test_answer_goes_on_from_its_blocks)
{
    for (int format = 0; format < KV_FORMAT_COUNT; format++) {
        struct engine_config config = fixture_config();
        config.format = format;
        config.selector = selector_find(random_name(selector_names()));
        config.scorer = scorer_find(random_name(scorer_names()));
        fixture_tokens(800 + (uint64_t)format, tokens, N_PROMPT + N_DECODE);
        float *want = answer_of(&config, NULL, &run, NULL);
        struct engine *first = fixture_engine(&f, &config, client), *second = fixture_engine(&f, &config, other);
        struct sequence *seq = begin(first);
        struct sequence_stats stats;
        const int n_made = 260 + format;
        while (sequence_prefill_step(seq) > 0)
            ;
        decode_settled(first, client, seq, want, 0, n_made);
        sequence_free(seq);
        const struct sequence_request request = {
            .prompt = tokens, .n_prompt = N_PROMPT, .max_new = N_DECODE, .answer = tokens + N_PROMPT, .n_answer = n_made};
        cr_assert(sequence_create(second, &request, &seq, NULL) >= 0);
        while (sequence_prefill_step(seq) > 0)
            ;
        sequence_stats(seq, &stats);
        cr_expect(stats.n_cached == reusable(config.selector, N_PROMPT) && stats.n_restored == 1152 - N_PROMPT, "%d of the prompt, %d of the answer", stats.n_cached,
                  stats.n_restored);
        decode_settled(second, other, seq, want, stats.n_restored, N_DECODE);
        sequence_free(seq);
        engine_free(first);
        engine_free(second);
        free(want);
    }
}

/* When an answer is complete, nobody will ask for its blocks under its own keys; what another worker still reads, and what belongs to the prompt, stays. */
Test(engine_sharing, test_blocks_of_a_complete_answer_leave_the_pool)
{
    const struct sequence_request again = {.prompt = tokens, .n_prompt = N_PROMPT, .max_new = N_DECODE, .answer = tokens + N_PROMPT, .n_answer = N_DECODE};
    for (int reuse = 0; reuse < 2; reuse++) {
        struct engine_config config = fixture_config();
        config.reuse_generated = reuse;
        fixture_tokens(850 + (uint64_t)reuse, tokens, N_PROMPT + N_DECODE);
        float *want = answer_of(&config, NULL, &run, NULL);
        struct engine *first = fixture_engine(&f, &config, client), *second = fixture_engine(&f, &config, other);
        const uint64_t before = store_wire_stats(&watch)->n_blocks;
        struct sequence *seq = begin(first), *heir;
        while (sequence_prefill_step(seq) > 0)
            ;
        decode_settled(first, client, seq, want, 0, N_DECODE);
        cr_assert_eq(store_wire_stats(&watch)->n_blocks - before, (N_PROMPT + N_DECODE) / BLOCK_TOKENS);
        cr_assert(sequence_create(second, &again, &heir, NULL) >= 0);
        while (sequence_prefill_step(heir) > 0)
            ;
        sequence_retire_answer(seq);
        sequence_free(seq);
        for (int i = 0; i < 4; i++)
            settle(client);
        const int total = (N_PROMPT + N_DECODE) / BLOCK_TOKENS, of_prompt = N_PROMPT / BLOCK_TOKENS;
        cr_expect_eq(store_wire_stats(&watch)->n_blocks - before, total + (reuse ? total - of_prompt : 0), "the heir has them");
        struct sequence_stats stats;
        sequence_stats(heir, &stats);
        decode_settled(second, other, heir, want, stats.n_restored, N_DECODE);
        sequence_retire_answer(heir);
        sequence_free(heir);
        for (int i = 0; i < 4; i++)
            settle(other);
        cr_expect_eq(store_wire_stats(&watch)->n_blocks - before, reuse ? total : of_prompt, "reuse %d", reuse);
        engine_free(first);
        engine_free(second);
        free(want);
    }
}

/* ---- a store that comes late ---- */

Test(engine_sharing, test_private_blocks_move_to_a_store_that_starts_late)
{
    struct engine_config config = fixture_config();
    struct kv_store_info info;
    struct sequence_stats stats;
    store_wire_close(&watch);
    store_fixture_kill(&store);
    for (int i = 0; i < 2; i++)
        for (kv_client_info(i ? other : client, &info); info.connected; kv_client_info(i ? other : client, &info))
            loop_poll(store.loop);
    fixture_tokens(900, tokens, N_PROMPT + N_DECODE);
    float *want = answer_of(&config, NULL, &run, NULL);
    struct engine *engine = fixture_engine(&f, &config, client);
    struct sequence *seq = begin(engine);
    while (sequence_prefill_step(seq) > 0)
        ;
    decode_settled(engine, client, seq, want, 0, 30);
    cr_expect(n_private(seq) == N_PROMPT / BLOCK_TOKENS);
    store_fixture_restart(&store);
    store_wire_open(&watch, store.socket);
    const uint64_t end_us = clock_now_us() + STORE_WAIT_US;
    for (int i = 0; i < 2; i++)
        for (kv_client_info(i ? other : client, &info); !info.connected; kv_client_info(i ? other : client, &info)) {
            cr_assert(clock_now_us() < end_us, "%s", info.error.text);
            loop_poll(store.loop);
        }
    decode_settled(engine, client, seq, want, 30, N_DECODE);
    cr_expect(n_private(seq) == 0, "%d blocks are private", n_private(seq));
    sequence_free(seq);
    engine_free(engine);
    float *got = answer_of(&config, other, &run, &stats);
    fixture_expect_same(want, got, N_DECODE + 1, "warm");
    cr_expect(stats.n_cached == 768, "%d cached", stats.n_cached);
    free(got);
    free(want);
}
