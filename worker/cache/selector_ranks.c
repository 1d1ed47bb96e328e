/* Heads of a layer that other ranks have: their scores are gathered, so that every rank makes the whole layer's choice and keeps its own heads' part of it. */
#include "worker/cache/selector_private.h"
#include "worker/model/model.h"
#include <errno.h>

/* What rank `rank` has of the model that `part` is a part of. */
static int shard_of(const struct model_config *part, int rank, struct model_config *ret)
{
    struct model_config whole = *part;
    struct error err;
    whole.n_heads = part->shard.all_heads;
    whole.n_kv_heads = part->shard.all_kv_heads;
    whole.ffn_dim = part->shard.all_ffn;
    whole.shard = (struct model_shard){0};
    return model_shard_split(&whole, rank, part->shard.n_ranks, 1, ret, &err);
}

static int gather_parts(const struct selector_ranks *ranks, struct stream *stream, float *parts, int64_t n_columns)
{
    int64_t first[COLLECTIVE_MAX_RANKS + 1];
    for (int i = 0; i <= ranks->n_ranks; i++)
        first[i] = ranks->part_first[i] * n_columns;
    return ranks->model->collective_ops->all_gather(ranks->model->collective, stream, parts, 1, first[ranks->n_ranks], first);
}

int selector_ranks_init(const struct model *model, struct selector_ranks *ret)
{
    const struct model_config *c = &model->config;
    const int group = c->shard.all_heads / c->shard.all_kv_heads;
    struct selector_ranks r = {
        .n_ranks = c->shard.n_ranks, .rank = c->shard.rank, .n_kv_heads = c->shard.all_kv_heads, .first_kv_head = c->shard.first_kv_head, .gather = gather_parts, .model = model};
    int n_parts = 0;
    for (int rank = 0; rank < r.n_ranks; rank++) {
        struct model_config other;
        int result = shard_of(c, rank, &other);
        if (result < 0 || n_parts + other.n_kv_heads > SCORE_PARTS_MAX)
            return result < 0 ? result : -ENOTSUP;
        r.part_first[rank] = n_parts;
        for (int h = 0; h < other.n_kv_heads; h++, n_parts++) {
            r.share[n_parts] = (float)(other.n_heads / other.n_kv_heads) / (float)group;
            r.head_first[other.shard.first_kv_head + h + 1] = n_parts + 1; /* parts of a KV head follow one another */
        }
    }
    r.part_first[r.n_ranks] = n_parts;
    *ret = r;
    return 0;
}

int selector_n_kv_heads(const struct selector_shape *shape)
{
    return shape->ranks ? shape->ranks->n_kv_heads : shape->n_kv_heads;
}

/* Columns on one side of the candidates that the pooling of heads in parts reaches into. */
enum { PARTS_HALO = SNAPKV_POOL / 2 };

size_t selector_parts_bytes(const struct selector_shape *shape)
{
    return shape->ranks ? (size_t)shape->ranks->part_first[shape->ranks->n_ranks] * (size_t)(shape->n_candidates + 2 * PARTS_HALO) * sizeof(float) : 0;
}

size_t selector_shared_bytes(const struct selector_shape *shape)
{
    return shape->ranks && selector_ranks_share(shape->ranks) ? selector_parts_bytes(shape) : 0;
}

/* Behind the n_rows rows that are ranked and what is chosen from them. Columns are the keys first .. last - 1. */
struct parts {
    float *rows;
    int64_t first, last;
};

static struct parts parts_behind(const struct selector_input *in, int n_rows, int64_t first, int64_t last)
{
    return (struct parts){.rows = selector_rank_scores(in) + n_rows * (in->last - in->first + in->n_free), .first = first, .last = last};
}

static float *own_part(const struct selector_input *in, const struct parts *parts)
{
    return parts->rows + in->ranks->part_first[in->ranks->rank] * (parts->last - parts->first);
}

static int merge(const struct selector_input *in, const struct parts *parts, struct score_merge_params *p)
{
    int r = in->ranks->gather(in->ranks, in->stream, parts->rows, parts->last - parts->first);
    p->parts = parts->rows;
    p->n_columns = parts->last - parts->first;
    p->first = in->first - parts->first;
    p->last = in->last - parts->first;
    p->scores = selector_rank_scores(in);
    return r < 0 ? r : in->ops->merge_scores(in->stream, p);
}

static int score_part(const struct selector_input *in, const struct selector_window *window, const struct parts *parts)
{
    struct selector_input part = *in;
    part.first = parts->first;
    part.last = parts->last;
    return selector_window_scores(&part, window, own_part(in, parts));
}

int selector_layer_row(const struct selector_input *in, const struct selector_window *window)
{
    const struct selector_ranks *ranks = in->ranks;
    const struct selector_window of_head = {.pool = window->pool, .chunk = window->chunk};
    if (!ranks)
        return selector_window_scores(in, window, selector_rank_scores(in));
    const int32_t row_first[2] = {0, ranks->part_first[ranks->n_ranks]};
    const struct parts parts = parts_behind(in, 1, in->first, in->last);
    float share[SCORE_PARTS_MAX];
    for (int i = 0; i < row_first[1]; i++)
        share[i] = ranks->share[i] / (float)ranks->n_kv_heads;
    struct score_merge_params p = {.share = share, .row_first = row_first, .n_rows = 1, .pool = 1};
    int r = score_part(in, &of_head, &parts);
    return r < 0 ? r : merge(in, &parts, &p);
}

int selector_layer_rows(const struct selector_input *in, int pool)
{
    const struct selector_ranks *ranks = in->ranks;
    const bool share = ranks && selector_ranks_share(ranks);
    const struct selector_window window = {.pool = share ? 1 : pool, .pool_after_group = true, .chunk = 1};
    const int64_t halo = share ? pool / 2 : 0, end = in->n_keys - in->n_window;
    if (!ranks)
        return selector_window_scores(in, &window, selector_rank_scores(in));
    const struct parts parts = parts_behind(in, ranks->n_kv_heads, in->first > halo ? in->first - halo : 0, in->last + halo < end ? in->last + halo : end);
    struct score_merge_params p = {.share = ranks->share, .row_first = ranks->head_first, .n_rows = ranks->n_kv_heads, .pool = share ? pool : 1};
    int r = score_part(in, &window, &parts);
    return r < 0 ? r : merge(in, &parts, &p);
}

/* What several ranks have of one KV head, at parts of their own, becomes its row here. The row is a KV head's, so there is one. */
static int merge_own_head(const struct selector_input *in, const struct parts *parts, const float *share)
{
    const struct selector_ranks *ranks = in->ranks;
    const int32_t *head = ranks->head_first + ranks->first_kv_head, row_first[2] = {0, head[1] - head[0]};
    const int64_t n = parts->last - parts->first;
    int r = ranks->gather(ranks, in->stream, parts->rows, n);
    const struct score_merge_params p = {
        .parts = parts->rows + head[0] * n, .share = share, .row_first = row_first, .n_rows = 1, .n_columns = n, .last = n, .pool = 1, .scores = selector_rank_scores(in)};
    return r < 0 ? r : in->ops->merge_scores(in->stream, &p);
}

int selector_own_rows(const struct selector_input *in, const struct selector_window *window)
{
    const struct selector_ranks *ranks = in->ranks;
    if (!ranks || !selector_ranks_share(ranks))
        return selector_window_scores(in, window, selector_rank_scores(in));
    const struct parts parts = parts_behind(in, in->n_kv_heads, in->first, in->last);
    int r = score_part(in, window, &parts);
    return r < 0 ? r : merge_own_head(in, &parts, ranks->share + ranks->head_first[ranks->first_kv_head]);
}

int selector_own_sums(const struct selector_input *in)
{
    const struct selector_ranks *ranks = in->ranks;
    const bool share = ranks && selector_ranks_share(ranks);
    const int64_t n_candidates = in->last - in->first;
    const struct parts parts = parts_behind(in, in->n_kv_heads, in->first, in->last);
    float whole[COLLECTIVE_MAX_RANKS];
    float *rows = share ? own_part(in, &parts) : selector_rank_scores(in);
    int r = 0;
    for (int h = 0; r >= 0 && h < in->n_kv_heads; h++)
        r = in->dev->copy(in->stream, rows + h * n_candidates, in->column_sums + h * in->n_keys + in->first, (size_t)n_candidates * sizeof(*rows));
    for (int i = 0; i < COLLECTIVE_MAX_RANKS; i++)
        whole[i] = 1;
    return r < 0 || !share ? r : merge_own_head(in, &parts, whole);
}
