/* With reuse_generated the blocks of an answer get keys of a prompt when it is over, so that the next turn of a conversation finds them. While it was made they had keys of their
 * own: a replay must find this answer's very blocks, and under a prompt's key may lie those of another run of the same tokens. The pool's bytes are copied, one block at
 * a time, from the last to the first: what stands in the way of one block does not break the chain before it, and the source of each has no children when it is discarded. */
#include "worker/cache/engine_private.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct block_publish {
    struct kv_client *store;
    struct kv_reserve_block *wanted; /* [n] */
    struct kv_lease *sources;        /* [n] */
    int n;                           /* blocks still to do: 0..n-1 */
};

static void publish_free(struct block_publish *p)
{
    if (!p)
        return;
    free(p->sources);
    free(p->wanted);
    free(p);
}

static void next_block(struct block_publish *p);

static void on_reserved(int result, const enum kv_reserve_status *status, const struct kv_lease *leases, int n, void *arg)
{
    struct block_publish *p = arg;
    if (result == -ECANCELED) {
        /* The client goes, and with it all leases. */
        publish_free(p);
        return;
    }
    p->n--;
    if (result >= 0 && n == 1 && (status[0] == KV_RESERVE_GRANTED || status[0] == KV_RESERVE_EXISTS)) {
        struct kv_lease lease = leases[0], *const list[] = {&lease};
        if (status[0] == KV_RESERVE_GRANTED && lease.length == p->sources[p->n].length) {
            memcpy(lease.data, p->sources[p->n].data, lease.length);
            (void)kv_client_seal(p->store, list, 1);
        }
        kv_client_release(p->store, &lease, 1);
    }
    kv_client_discard(p->store, &p->sources[p->n], 1);
    next_block(p);
}

static void next_block(struct block_publish *p)
{
    for (; p->n > 0; p->n--) {
        if (kv_client_reserve_async(p->store, &p->wanted[p->n - 1], 1, on_reserved, p) >= 0)
            return;
        kv_client_discard(p->store, &p->sources[p->n - 1], 1);
    }
    publish_free(p);
}

static struct block_publish *publish_create(struct sequence *seq, int first, int n)
{
    struct block_publish *p = calloc(1, sizeof(*p));
    if (!p)
        return NULL;
    p->store = seq->engine->store;
    p->wanted = calloc((size_t)n, sizeof(*p->wanted));
    p->sources = calloc((size_t)n, sizeof(*p->sources));
    if (!p->wanted || !p->sources) {
        publish_free(p);
        return NULL;
    }
    struct block_key parent = first ? seq->keys[first - 1] : seq->root;
    for (int b = first; b < first + n; b++) {
        struct kv_reserve_block *wanted = &p->wanted[b - first];
        *wanted = (struct kv_reserve_block){.parent = parent, .first = b == 0, .position = (uint32_t)b, .length = seq->leases[b].length};
        block_key_next(&parent, seq->tokens + (size_t)b * BLOCK_TOKENS, &wanted->key);
        parent = wanted->key;
    }
    memcpy(p->sources, seq->leases + first, (size_t)n * sizeof(*p->sources));
    memset(seq->leases + first, 0, (size_t)n * sizeof(*seq->leases));
    p->n = n;
    return p;
}

void block_publish_start(struct sequence *seq, int first, int n)
{
    struct block_publish *p = n > 0 ? publish_create(seq, first, n) : NULL;
    if (p)
        next_block(p);
}
