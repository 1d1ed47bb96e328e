#include "worker/model/model_shard.h"
#include "kernels/collective.h"
#include <errno.h>

/* Where part i of n parts of `total` begins; parts differ by one at most, the larger first. */
static int64_t split_at(int64_t total, int n, int i)
{
    return (total * i + n - 1) / n;
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static void split_whole_heads(const struct model_config *whole, struct model_config *c)
{
    const int group = whole->n_heads / whole->n_kv_heads, n = c->shard.n_ranks;
    const int first = (int)split_at(whole->n_kv_heads, n, c->shard.rank), last = (int)split_at(whole->n_kv_heads, n, c->shard.rank + 1);
    c->shard.first_kv_head = first;
    c->shard.first_head = first * group;
    c->n_kv_heads = last - first;
    c->n_heads = c->n_kv_heads * group;
}

/* One KV head a rank; the ranks that have it share its query heads. */
static void split_one_head(const struct model_config *whole, struct model_config *c)
{
    const int group = whole->n_heads / whole->n_kv_heads, n = c->shard.n_ranks, kv_head = c->shard.rank * whole->n_kv_heads / n;
    const int first_rank = (int)split_at(n, whole->n_kv_heads, kv_head), n_sharing = (int)split_at(n, whole->n_kv_heads, kv_head + 1) - first_rank;
    const int first = (int)split_at(group, n_sharing, c->shard.rank - first_rank), last = (int)split_at(group, n_sharing, c->shard.rank - first_rank + 1);
    c->shard.first_kv_head = kv_head;
    c->shard.first_head = kv_head * group + first;
    c->n_kv_heads = 1;
    c->n_heads = last - first;
}

static void split_ffn(const struct model_config *whole, int unit, struct model_config *c)
{
    const int n = c->shard.n_ranks;
    unit = unit < WEIGHT_ROWS_UNIT ? WEIGHT_ROWS_UNIT : unit;
    if (whole->ffn_dim / unit < n)
        unit = whole->ffn_dim / WEIGHT_ROWS_UNIT < n ? 1 : WEIGHT_ROWS_UNIT;
    const int64_t n_units = (whole->ffn_dim + unit - 1) / unit;
    const int64_t first = smaller(whole->ffn_dim, unit * split_at(n_units, n, c->shard.rank)), last = smaller(whole->ffn_dim, unit * split_at(n_units, n, c->shard.rank + 1));
    c->shard.first_ffn = (int)first;
    c->ffn_dim = (int)(last - first);
}

int model_shard_split(const struct model_config *whole, int rank, int n_ranks, int ffn_unit, struct model_config *ret_part, struct error *err)
{
    const int group = whole->n_heads / whole->n_kv_heads, most = whole->n_heads < COLLECTIVE_MAX_RANKS ? whole->n_heads : COLLECTIVE_MAX_RANKS;
    struct model_config c = *whole;
    if (n_ranks < 1 || rank < 0 || rank >= n_ranks)
        return error_set(err, -EINVAL, "there is no rank %d of %d", rank, n_ranks);
    if (n_ranks == 1) {
        *ret_part = c;
        return 0;
    }
    /* The KV head with most ranks has this many. */
    const int n_sharing = (n_ranks + whole->n_kv_heads - 1) / whole->n_kv_heads;
    if (n_ranks > most || n_sharing > group || whole->ffn_dim < n_ranks)
        return error_set(err, -ENOTSUP, "%d heads in %d KV heads, and %d columns of the MLP, cannot be split over %d ranks", whole->n_heads, whole->n_kv_heads, whole->ffn_dim, n_ranks);
    c.shard = (struct model_shard){.rank = rank, .n_ranks = n_ranks, .all_heads = whole->n_heads, .all_kv_heads = whole->n_kv_heads, .all_ffn = whole->ffn_dim};
    if (n_sharing == 1)
        split_whole_heads(whole, &c);
    else
        split_one_head(whole, &c);
    split_ffn(whole, ffn_unit, &c);
    *ret_part = c;
    return 0;
}

int64_t model_shard_vocab_first(const struct model_config *config, int rank)
{
    const int n = config->shard.n_ranks > 1 ? config->shard.n_ranks : 1;
    const int64_t n_units = (config->n_vocab + WEIGHT_ROWS_UNIT - 1) / WEIGHT_ROWS_UNIT;
    return smaller(config->n_vocab, WEIGHT_ROWS_UNIT * split_at(n_units, n, rank));
}
