/* Collectives over shared memory: ranks are processes, or threads of one. */
#include "kernels/kernels.h"
#include "kernels/collective.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_RANKS = 5, LONG = 200001 /* more than three slots */ };
static const uint64_t deadline_us = 30000000;

/* One rank's end. */
struct rank {
    struct device *device;
    struct stream *stream;
    struct collective *collective;
    int rank, n_ranks, result;
    uint8_t id[COLLECTIVE_ID_BYTES];
    uint64_t deadline_us;
};

static const struct collective_ops *ops(void)
{
    return shm_collective_ops();
}

static int rank_open(struct rank *r)
{
    const struct device_config device = {.n_threads = 1};
    struct collective_config config = {.rank = r->rank, .n_ranks = r->n_ranks, .gather_columns = LONG, .deadline_us = r->deadline_us ? r->deadline_us : deadline_us};
    memcpy(config.id, r->id, sizeof(config.id));
    if (cpu_device_ops()->open(&device, &r->device) < 0 || cpu_device_ops()->stream_create(r->device, &r->stream) < 0)
        return -ENOMEM;
    config.device = r->device;
    return ops()->open(&config, &r->collective, NULL);
}

static void rank_close(struct rank *r)
{
    ops()->close(r->collective);
    cpu_device_ops()->stream_free(r->stream);
    cpu_device_ops()->close(r->device);
}

static int reduce(struct rank *r, float *data, int64_t n)
{
    return ops()->all_reduce(r->collective, r->stream, data, n);
}

/* Runs `body` as a process for each rank but 0, and as rank 0 here; all must return 0. */
static void run_ranks(int n_ranks, int (*body)(struct rank *))
{
    struct rank r = {.n_ranks = n_ranks};
    pid_t children[MOST_RANKS];
    cr_assert_eq(ops()->make_id(n_ranks, r.id, NULL), 0);
    for (r.rank = n_ranks - 1; r.rank > 0; r.rank--) {
        children[r.rank] = fork();
        cr_assert_geq(children[r.rank], 0);
        if (children[r.rank] == 0) {
            int result = rank_open(&r);
            if (result == 0)
                result = body(&r);
            if (result == 0)
                rank_close(&r);
            _exit(result == 0 ? 0 : 1);
        }
    }
    cr_assert_eq(rank_open(&r), 0);
    const int result = body(&r);
    cr_expect_eq(result, 0, "rank 0 gives %d", result);
    rank_close(&r);
    for (int i = 1; i < n_ranks; i++) {
        int status;
        cr_assert_eq(waitpid(children[i], &status, 0), children[i]);
        cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "rank %d", i);
    }
}

/* What rank r has at i: sums depend on their order. */
static float value(int rank, int64_t i)
{
    return (float)((rank * 7919 + i * 104729) % 1000003) * (rank % 2 ? -1.7e-3f : 2.9e2f);
}

static int check_sums(struct rank *r)
{
    static const int64_t lengths[] = {1, 7, 65536, 65537, LONG};
    static float data[LONG];
    for (size_t l = 0; l < sizeof(lengths) / sizeof(lengths[0]); l++) {
        for (int64_t i = 0; i < lengths[l]; i++)
            data[i] = value(r->rank, i);
        if (reduce(r, data, lengths[l]) != 0)
            return -1;
        for (int64_t i = 0; i < lengths[l]; i++) {
            float want = value(0, i);
            for (int other = 1; other < r->n_ranks; other++)
                want += value(other, i);
            if (memcmp(&want, &data[i], sizeof(want)) != 0)
                return -2;
        }
    }
    return ops()->status(r->collective);
}

Test(shm_collective, test_sum_is_in_the_order_of_ranks)
{
    for (int n = 2; n <= MOST_RANKS; n++)
        run_ranks(n, check_sums);
}

/* Parts of every sort: one wider than a slot, none at all, one column. */
static int check_gather(struct rank *r)
{
    static const struct { int64_t n_rows, ld; int64_t first[4]; } cases[] = {
        {1, 100, {0, 40, 70, 100}}, {5, 133, {0, 40, 70, 100}}, {3, 100, {0, 0, 64, 64}}, {1, LONG, {0, 1, 150001, LONG}}, {2, 80001, {0, 80000, 80000, 80001}}, {2000, 96, {0, 32, 64, 96}}, {4, 8, {0, 0, 0, 0}},
    };
    static float rows[2 * LONG];
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        const int64_t *first = cases[c].first, ld = cases[c].ld;
        for (int64_t i = 0; i < cases[c].n_rows * ld; i++)
            rows[i] = i % ld >= first[r->rank] && i % ld < first[r->rank + 1] ? (float)(i % 16777216) : -1;
        if (ops()->all_gather(r->collective, r->stream, rows, cases[c].n_rows, ld, first) != 0)
            return -1;
        for (int64_t i = 0; i < cases[c].n_rows * ld; i++)
            if (rows[i] != (i % ld < first[3] ? (float)(i % 16777216) : -1))
                return -2;
    }
    return 0;
}

Test(shm_collective, test_gather_gives_every_rank_all_columns)
{
    run_ranks(3, check_gather);
}

static int check_arguments(struct rank *r)
{
    float x[4] = {0};
    const int64_t descending[] = {0, 3, 2}, too_wide[] = {0, 2, 5}, late[] = {1, 2, 4};
    const struct collective_ops *o = ops();
    if (o->all_reduce(r->collective, r->stream, x, 0) != -EINVAL || o->all_gather(r->collective, r->stream, x, 1, 4, descending) != -EINVAL ||
        o->all_gather(r->collective, r->stream, x, 1, 4, too_wide) != -EINVAL || o->all_gather(r->collective, r->stream, x, 1, 4, late) != -EINVAL)
        return -1;
    return o->status(r->collective);
}

Test(shm_collective, test_wrong_arguments_break_nothing)
{
    run_ranks(2, check_arguments);
}

Test(shm_collective, test_open_wants_an_id_of_this_group)
{
    struct rank r = {.n_ranks = 2, .rank = 1, .deadline_us = 20000};
    cr_expect_eq(rank_open(&r), -EINVAL);
    rank_close(&r);
    r.collective = NULL;
    cr_expect_eq(ops()->make_id(1, r.id, NULL), -EINVAL);
    cr_assert_eq(ops()->make_id(2, r.id, NULL), 0);
    r.id[12] ^= 1; /* the descriptor: another file, or none */
    cr_expect_eq(rank_open(&r), -EINVAL);
    rank_close(&r);
    r.collective = NULL;
    r.id[12] ^= 1;
    r.id[20] ^= 1; /* the nonce */
    cr_expect_eq(rank_open(&r), -EINVAL);
    rank_close(&r);
    r.collective = NULL;
    r.id[20] ^= 1;
    cr_expect_eq(rank_open(&r), -ETIMEDOUT); /* nobody else comes */
    rank_close(&r);
}

/* ---- ranks that do not come ---- */

static int die_second(struct rank *r)
{
    float x[3] = {1, 2, 3};
    int result = reduce(r, x, 3);
    if (result == 0 && r->rank == 1)
        kill(getpid(), SIGKILL);
    result = result == 0 ? reduce(r, x, 3) : result;
    if (result != -ECONNRESET || reduce(r, x, 3) != -ECONNRESET || ops()->status(r->collective) != -ECONNRESET)
        return result ? result : -1;
    return 0;
}

/* Rank 1 is killed: the two others hear of it long before the deadline. */
Test(shm_collective, test_dead_rank_ends_the_others_calls, .timeout = 20)
{
    struct rank r = {.n_ranks = 3};
    pid_t children[3];
    cr_assert_eq(ops()->make_id(3, r.id, NULL), 0);
    for (r.rank = 2; r.rank > 0; r.rank--)
        if ((children[r.rank] = fork()) == 0)
            _exit(rank_open(&r) == 0 && die_second(&r) == 0 ? 0 : 1);
    cr_assert_eq(rank_open(&r), 0);
    cr_expect_eq(die_second(&r), 0);
    rank_close(&r);
    for (int i = 1; i < 3; i++) {
        int status;
        cr_assert_eq(waitpid(children[i], &status, 0), children[i]);
        cr_expect(i == 1 ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0, "rank %d", i);
    }
}

static void *open_thread(void *arg)
{
    struct rank *r = arg;
    r->result = rank_open(r);
    return NULL;
}

/* Both ranks in this process, so that nobody's death can be seen. */
static void open_pair(struct rank pair[2], uint64_t pair_deadline_us)
{
    pthread_t thread;
    pair[0] = (struct rank){.n_ranks = 2, .deadline_us = pair_deadline_us};
    cr_assert_eq(ops()->make_id(2, pair[0].id, NULL), 0);
    pair[1] = pair[0];
    pair[1].rank = 1;
    cr_assert_eq(pthread_create(&thread, NULL, open_thread, &pair[1]), 0);
    cr_assert_eq(rank_open(&pair[0]), 0);
    pthread_join(thread, NULL);
    cr_assert_eq(pair[1].result, 0);
}

Test(shm_collective, test_silent_rank_ends_a_call_at_the_deadline, .timeout = 20)
{
    struct rank pair[2];
    float x = 1;
    open_pair(pair, 50000);
    cr_expect_eq(reduce(&pair[0], &x, 1), -ETIMEDOUT);
    cr_expect_eq(reduce(&pair[1], &x, 1), -ETIMEDOUT); /* what broke the group is told to everybody */
    rank_close(&pair[0]);
    rank_close(&pair[1]);
}

Test(shm_collective, test_closed_rank_ends_a_call, .timeout = 20)
{
    struct rank pair[2];
    float x = 1;
    open_pair(pair, 0);
    rank_close(&pair[1]);
    cr_expect_eq(reduce(&pair[0], &x, 1), -ECONNRESET);
    rank_close(&pair[0]);
}

static void *reduce_thread(void *arg)
{
    struct rank *r = arg;
    float x = 1;
    r->result = reduce(r, &x, 1);
    return NULL;
}

Test(shm_collective, test_abort_wakes_who_waits, .timeout = 20)
{
    struct rank pair[2];
    pthread_t thread;
    open_pair(pair, 0);
    cr_assert_eq(pthread_create(&thread, NULL, reduce_thread, &pair[0]), 0);
    ops()->abort(pair[1].collective);
    pthread_join(thread, NULL);
    cr_expect_eq(pair[0].result, -ECONNRESET);
    cr_expect_eq(ops()->status(pair[1].collective), -ECONNRESET);
    rank_close(&pair[0]);
    rank_close(&pair[1]);
}

Test(shm_collective, test_ranks_that_make_other_calls_are_found_out, .timeout = 20)
{
    struct rank pair[2];
    pthread_t thread;
    float x[2] = {1, 2};
    open_pair(pair, 0);
    cr_assert_eq(pthread_create(&thread, NULL, reduce_thread, &pair[0]), 0);
    cr_expect_eq(reduce(&pair[1], x, 2), -EPROTO);
    pthread_join(thread, NULL);
    cr_expect_eq(pair[0].result, -EPROTO);
    rank_close(&pair[0]);
    rank_close(&pair[1]);
}
