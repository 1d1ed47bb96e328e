#include "kernels/cuda/cudnn_attention.h"
#include "kernels/cuda/cudnn_api.h"
#include "kernels/cuda/library_memory.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum tensor_id { ID_Q = 1, ID_K, ID_V, ID_O, ID_STATS, ID_SCALE, ID_LENGTH_Q, ID_LENGTH_KV, ID_END };
enum { N_TENSORS = ID_END - ID_Q, HEURISTICS_MAX = 16 };

/* What a plan is built from. It stays while the plan does: whether a plan has copies of its own is not documented. */
struct parts {
    cudnn_descriptor tensors[N_TENSORS], operation, graph, heuristics, configs[HEURISTICS_MAX];
};

struct plan {
    struct cudnn_attention_shape shape;
    struct parts parts;
    cudnn_descriptor plan; /* NULL: there is none for the shape */
    bool failed;           /* it was executed once, and cuDNN refused */
};

struct cudnn_attention {
    struct device *device;
    const struct cudnn_api *api;
    cudnn_handle handle;
    struct plan plans[CUDNN_ATTENTION_PLANS];
    int n_plans;
};

bool cudnn_attention_required(void)
{
    const char *wanted = getenv("TIDEPOOL_CUDNN");
    return wanted && strcmp(wanted, "require") == 0;
}

struct cudnn_attention *cudnn_attention_open(struct device *device, size_t *ret_version)
{
    const struct cudnn_api *api;
    struct error err;
    *ret_version = 0;
    if (cudnn_api_load(&api, &err) < 0)
        return NULL;
    struct cudnn_attention *a = calloc(1, sizeof *a);
    if (!a)
        return NULL;
    a->device = device;
    a->api = api;
    if (api->create(&a->handle) != CUDNN_OK) {
        free(a);
        return NULL;
    }
    *ret_version = api->get_version();
    return a;
}

static void destroy(const struct cudnn_attention *a, cudnn_descriptor descriptor)
{
    if (descriptor)
        a->api->descriptor_destroy(descriptor);
}

static void destroy_parts(const struct cudnn_attention *a, struct parts *p)
{
    for (int i = 0; i < HEURISTICS_MAX; i++)
        destroy(a, p->configs[i]);
    destroy(a, p->heuristics);
    destroy(a, p->graph);
    destroy(a, p->operation);
    for (int i = 0; i < N_TENSORS; i++)
        destroy(a, p->tensors[i]);
    *p = (struct parts){0};
}

void cudnn_attention_close(struct cudnn_attention *a)
{
    if (!a)
        return;
    for (int i = 0; i < a->n_plans; i++) {
        destroy(a, a->plans[i].plan);
        destroy_parts(a, &a->plans[i].parts);
    }
    a->api->destroy(a->handle);
    free(a);
}

/* ---- building a plan ---- */

static bool set(const struct cudnn_attention *a, cudnn_descriptor d, int attribute, int type, int64_t n, const void *values)
{
    return a->api->attribute_set(d, attribute, type, n, values) == CUDNN_OK;
}

static bool create(const struct cudnn_attention *a, int kind, cudnn_descriptor *ret)
{
    *ret = NULL;
    return a->api->descriptor_create(kind, ret) == CUDNN_OK;
}

static bool finalize(const struct cudnn_attention *a, cudnn_descriptor d)
{
    return a->api->descriptor_finalize(d) == CUDNN_OK;
}

struct tensor {
    enum cudnn_data_type type;
    int64_t dims[4], strides[4];
};

static struct tensor tensor_of(const struct cudnn_attention_shape *s, enum tensor_id id)
{
    const int64_t d = s->head_dim, hq = s->n_heads, hk = s->n_kv_heads, n_q = s->max_queries, n_k = s->max_keys;
    switch (id) {
    case ID_Q:
    case ID_O:
        return (struct tensor){CUDNN_BFLOAT16, {1, hq, n_q, d}, {n_q * hq * d, d, hq * d, 1}};
    case ID_K:
    case ID_V:
        return (struct tensor){CUDNN_BFLOAT16, {1, hk, n_k, d}, {hk * n_k * d, n_k * d, d, 1}};
    case ID_STATS:
        return (struct tensor){CUDNN_FLOAT32, {1, hq, n_q, 1}, {hq * n_q, n_q, 1, 1}};
    case ID_SCALE:
        return (struct tensor){CUDNN_FLOAT32, {1, 1, 1, 1}, {1, 1, 1, 1}};
    default:
        return (struct tensor){CUDNN_INT32, {1, 1, 1, 1}, {1, 1, 1, 1}};
    }
}

static bool make_tensor(const struct cudnn_attention *a, const struct cudnn_attention_shape *shape, enum tensor_id id, cudnn_descriptor *ret)
{
    const struct tensor t = tensor_of(shape, id);
    const int64_t unique = id, alignment = id == ID_Q || id == ID_K || id == ID_V || id == ID_O ? 16 : 4;
    const bool by_value = id == ID_SCALE;
    const int type = t.type;
    return create(a, CUDNN_TENSOR, ret) && set(a, *ret, CUDNN_TENSOR_DATA_TYPE, CUDNN_VALUE_DATA_TYPE, 1, &type) && set(a, *ret, CUDNN_TENSOR_DIMENSIONS, CUDNN_VALUE_INT64, 4, t.dims) &&
           set(a, *ret, CUDNN_TENSOR_STRIDES, CUDNN_VALUE_INT64, 4, t.strides) && set(a, *ret, CUDNN_TENSOR_ID, CUDNN_VALUE_INT64, 1, &unique) &&
           set(a, *ret, CUDNN_TENSOR_ALIGNMENT, CUDNN_VALUE_INT64, 1, &alignment) && set(a, *ret, CUDNN_TENSOR_IS_BY_VALUE, CUDNN_VALUE_BOOLEAN, 1, &by_value) && finalize(a, *ret);
}

static bool make_operation(const struct cudnn_attention *a, const struct cudnn_attention_shape *shape, struct parts *p)
{
    static const int attributes[N_TENSORS] = {CUDNN_SDPA_Q, CUDNN_SDPA_K, CUDNN_SDPA_V, CUDNN_SDPA_O, CUDNN_SDPA_STATS, CUDNN_SDPA_SCALE, CUDNN_SDPA_LENGTH_Q, CUDNN_SDPA_LENGTH_KV};
    if (!create(a, CUDNN_SDPA_FORWARD, &p->operation))
        return false;
    for (int i = 0; i < N_TENSORS; i++)
        if (!make_tensor(a, shape, (enum tensor_id)(ID_Q + i), &p->tensors[i]) || !set(a, p->operation, attributes[i], CUDNN_VALUE_DESCRIPTOR, 1, &p->tensors[i]))
            return false;
    return finalize(a, p->operation);
}

/* Engines that may do it, the best first. Returns how many. */
static int64_t ask_heuristics(const struct cudnn_attention *a, struct parts *p)
{
    const int mode = CUDNN_HEURISTICS_A;
    int64_t n = 0;
    if (!create(a, CUDNN_OPERATION_GRAPH, &p->graph) || !set(a, p->graph, CUDNN_GRAPH_HANDLE, CUDNN_VALUE_HANDLE, 1, &a->handle) ||
        !set(a, p->graph, CUDNN_GRAPH_OPERATIONS, CUDNN_VALUE_DESCRIPTOR, 1, &p->operation) || !finalize(a, p->graph))
        return 0;
    if (!create(a, CUDNN_ENGINE_HEURISTICS, &p->heuristics) || !set(a, p->heuristics, CUDNN_HEURISTICS_GRAPH, CUDNN_VALUE_DESCRIPTOR, 1, &p->graph) ||
        !set(a, p->heuristics, CUDNN_HEURISTICS_MODE, CUDNN_VALUE_HEURISTICS_MODE, 1, &mode) || !finalize(a, p->heuristics))
        return 0;
    for (int i = 0; i < HEURISTICS_MAX; i++)
        if (!create(a, CUDNN_ENGINE_CONFIG, &p->configs[i]))
            return 0;
    if (a->api->attribute_get(p->heuristics, CUDNN_HEURISTICS_RESULTS, CUDNN_VALUE_DESCRIPTOR, HEURISTICS_MAX, &n, p->configs) != CUDNN_OK)
        return 0;
    return n < HEURISTICS_MAX ? n : HEURISTICS_MAX;
}

/* A plan of this configuration that finalizes and fits the workspace, or NULL. */
static cudnn_descriptor try_plan(const struct cudnn_attention *a, cudnn_descriptor config)
{
    cudnn_descriptor plan;
    int64_t bytes = 0, n = 0;
    if (create(a, CUDNN_EXECUTION_PLAN, &plan) && set(a, plan, CUDNN_PLAN_HANDLE, CUDNN_VALUE_HANDLE, 1, &a->handle) &&
        set(a, plan, CUDNN_PLAN_ENGINE_CONFIG, CUDNN_VALUE_DESCRIPTOR, 1, &config) && finalize(a, plan) &&
        a->api->attribute_get(plan, CUDNN_PLAN_WORKSPACE_SIZE, CUDNN_VALUE_INT64, 1, &n, &bytes) == CUDNN_OK && bytes <= CUDNN_ATTENTION_WORKSPACE)
        return plan;
    destroy(a, plan);
    return NULL;
}

static void build(const struct cudnn_attention *a, struct plan *p)
{
    const int64_t n = make_operation(a, &p->shape, &p->parts) ? ask_heuristics(a, &p->parts) : 0;
    for (int64_t i = 0; i < n && !p->plan; i++)
        p->plan = try_plan(a, p->parts.configs[i]);
    if (!p->plan)
        destroy_parts(a, &p->parts);
}

static bool same_shape(const struct cudnn_attention_shape *a, const struct cudnn_attention_shape *b)
{
    return a->n_heads == b->n_heads && a->n_kv_heads == b->n_kv_heads && a->head_dim == b->head_dim && a->max_queries == b->max_queries && a->max_keys == b->max_keys;
}

/* The scale is no part of a plan. */
static struct plan *known_plan(struct cudnn_attention *a, const struct cudnn_attention_shape *shape)
{
    for (int i = 0; i < a->n_plans; i++)
        if (same_shape(&a->plans[i].shape, shape))
            return &a->plans[i];
    return NULL;
}

/* NULL when there is no place for one more: none is taken away from work that may be on its way. */
static struct plan *new_plan(struct cudnn_attention *a, const struct cudnn_attention_shape *shape)
{
    if (a->n_plans == CUDNN_ATTENTION_PLANS)
        return NULL;
    struct plan *p = &a->plans[a->n_plans++];
    *p = (struct plan){.shape = *shape};
    build(a, p);
    return p;
}

/* ---- running it ---- */

static bool fill_pack(const struct cudnn_attention *a, const struct cudnn_attention_shape *shape, const struct cudnn_attention_run *run, cudnn_descriptor *ret_pack)
{
    const int64_t ids[N_TENSORS] = {ID_Q, ID_K, ID_V, ID_O, ID_STATS, ID_SCALE, ID_LENGTH_Q, ID_LENGTH_KV};
    const void *pointers[N_TENSORS] = {run->q, run->k, run->v, run->o, run->stats, &shape->scale, run->lengths, run->lengths + 1};
    return create(a, CUDNN_VARIANT_PACK, ret_pack) && set(a, *ret_pack, CUDNN_PACK_IDS, CUDNN_VALUE_INT64, N_TENSORS, ids) &&
           set(a, *ret_pack, CUDNN_PACK_POINTERS, CUDNN_VALUE_POINTER, N_TENSORS, pointers) && set(a, *ret_pack, CUDNN_PACK_WORKSPACE, CUDNN_VALUE_POINTER, 1, &run->workspace) &&
           finalize(a, *ret_pack);
}

static int refuse(const struct cudnn_attention_shape *s, const char *what)
{
    if (!cudnn_attention_required())
        return -ENOTSUP;
    fprintf(stderr, "cuDNN: %s for %d heads, %d KV heads, head dim %d, %lld queries, %lld keys\n", what, s->n_heads, s->n_kv_heads, s->head_dim, (long long)s->max_queries, (long long)s->max_keys);
    return -EIO;
}

static int execute(const struct cudnn_attention *a, struct plan *p, const struct cudnn_attention_shape *shape, const struct cudnn_attention_run *run)
{
    cudnn_descriptor pack = NULL;
    p->failed = !(a->api->set_stream(a->handle, run->stream) == CUDNN_OK && fill_pack(a, shape, run, &pack) && a->api->execute(a->handle, p->plan, pack) == CUDNN_OK);
    destroy(a, pack);
    return p->failed ? refuse(shape, "execution failed") : 0;
}

/* Of a plan that is new, what it takes is measured behind its first execution, which may load code. */
int cudnn_attention_forward(struct cudnn_attention *a, const struct cudnn_attention_shape *shape, const struct cudnn_attention_run *run)
{
    struct library_mark mark;
    struct plan *p = known_plan(a, shape);
    const bool first = !p;
    if (first) {
        library_memory_begin(a->device, &mark);
        p = new_plan(a, shape);
    }
    int r = p && p->plan && !p->failed ? execute(a, p, shape, run) : refuse(shape, "no plan");
    if (first)
        library_memory_end(a->device, &mark);
    return r;
}
