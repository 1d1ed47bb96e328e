#include "tests/simt/pool_side.h"
#include <criterion/criterion.h>
#include <errno.h>
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

void side_open(struct side *side, const struct kernel_backend *backend, int n_layers, int refusals)
{
    *side = (struct side){.refusals = refusals};
    fixture_use_backend(backend);
    cr_assert(fixture_open(&side->f, (struct fixture_params){.n_layers = n_layers}));
    client_open(side);
}

void side_close(struct side *side)
{
    kv_client_free(side->client);
    cr_expect(side->n_mapped == 1 && side->n_unmapped == 1, "mapped %d times, unmapped %d times", side->n_mapped, side->n_unmapped);
    fixture_expect_no_memory(&side->f);
    fixture_close(&side->f);
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
        loop_poll(side_store.loop);
        cr_assert(coverage_check(seq, &err) >= 0, "%s", err.text);
    }
    sequence_stats(seq, ret_stats);
    sequence_free(seq);
    engine_free(engine);
    return logits;
}
