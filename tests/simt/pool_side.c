#include "tests/simt/pool_side.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

struct store_fixture side_store;

static int on_map(void *base, uint64_t bytes, void *arg)
{
    struct side *side = arg;
    if (side->refusals > 0) {
        side->refusals--;
        return -ENOMEM;
    }
    side->pool = base;
    side->pool_bytes = bytes;
    side->n_mapped++;
    return side->f.dev->host_register(side->f.device, base, bytes, NULL, NULL);
}

static void on_unmap(void *base, void *arg)
{
    struct side *side = arg;
    cr_assert_eq((void *)side->pool, base);
    side->n_unmapped++;
    side->f.dev->host_unregister(side->f.device, base);
}

static void client_open(struct side *side)
{
    const struct kv_client_config config = {
        .socket_path = side_store.socket, .name = "w", .connect_timeout_us = STORE_WAIT_US, .on_map = on_map, .on_unmap = on_unmap, .arg = side};
    struct error err;
    cr_assert_eq(kv_client_create(side_store.loop, &config, &side->client, &err), 0, "%s", err.text);
}

/* ---- a wait left out: missing_waits.py ---- */

enum { SITES_MAX = 64 };
static const void *sites[SITES_MAX]; /* where the engine calls stream_wait, in the order of the first calls */
static int n_sites, left_out = -1;
static const struct device_ops *real_ops;

static int watched_wait(struct stream *stream, struct device_event *event)
{
    const void *site = __builtin_return_address(0);
    int i = 0;
    while (i < n_sites && sites[i] != site)
        i++;
    if (i == n_sites && n_sites < SITES_MAX)
        sites[n_sites++] = site;
    return i == left_out ? 0 : real_ops->stream_wait(stream, event);
}

/* With SIDE_LEAVE_OUT=N in the environment the N-th place from which the engine has one stream wait for another does nothing; -1 only counts them. */
static const struct kernel_backend *watched(const struct kernel_backend *backend)
{
    static struct kernel_backend with_watch;
    static struct device_ops ops;
    const char *number = getenv("SIDE_LEAVE_OUT");
    if (!number)
        return backend;
    left_out = atoi(number);
    real_ops = backend->device;
    ops = *backend->device;
    ops.stream_wait = watched_wait;
    with_watch = *backend;
    with_watch.device = &ops;
    return &with_watch;
}

void side_open(struct side *side, const struct kernel_backend *backend, int n_layers, int refusals)
{
    *side = (struct side){.refusals = refusals};
    fixture_use_backend(watched(backend));
    cr_assert(fixture_open(&side->f, (struct fixture_params){.n_layers = n_layers}));
    client_open(side);
}

void side_close(struct side *side)
{
    kv_client_free(side->client);
    cr_expect(side->n_mapped == 1 && side->n_unmapped == 1, "mapped %d times, unmapped %d times", side->n_mapped, side->n_unmapped);
    fixture_expect_no_memory(&side->f);
    fixture_close(&side->f);
    if (real_ops)
        fprintf(stderr, "waits at %d places\n", n_sites);
}

float *side_logits(struct side *side, const struct engine_config *config, const struct fixture_run *r, bool pooled, struct sequence_stats *ret_stats)
{
    struct engine *engine = fixture_engine(&side->f, config, pooled ? side->client : NULL);
    float *logits = malloc(sizeof(float) * TINY_VOCAB * (size_t)(r->n_decode + 1));
    struct sequence *seq = fixture_prefilled(engine, r);
    struct error err;
    cr_assert(logits);
    fixture_read_logits(seq, logits);
    for (int i = 0; i < r->n_decode; i++) {
        fixture_decode(engine, seq, r->tokens[r->n_prompt + i]);
        fixture_read_logits(seq, logits + (size_t)(i + 1) * TINY_VOCAB);
        loop_poll(side_store.loop); /* the next step checks coverage, */
    }
    cr_assert(coverage_check(seq, &err) >= 0, "%s", err.text); /* and here the last answer */
    sequence_stats(seq, ret_stats);
    sequence_free(seq);
    engine_free(engine);
    return logits;
}
