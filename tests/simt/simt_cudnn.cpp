/* Stands in for cuDNN: the calls of cudnn_api.h for one operation, SDPA forward, plainly and in fp32, as an operation of the handle's stream. Descriptors are held to what cuDNN's documentation
 * and what is known of it ask for: types, shapes, strides and alignment of tensors, everything final before it is used. Of the three engines that its heuristics name, the first has no plan and the
 * second needs too much workspace; with head dim 96 execution fails. An empty prefix leaves STATS unwritten, as the library does. */
#include "tests/simt/simt_private.h"
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>
extern "C" {
#include "kernels/cuda/cudnn_api.h"
}

struct cudnnContext {
    cudaStream_t stream;
};

namespace simt {

enum { CUDNN_FAILED = 2000, PLAN_BYTES = 1 << 20 };

struct Value {
    int type;
    int64_t n;
    std::vector<uint8_t> bytes;
    template <class T> T at(int64_t i) const
    {
        T value;
        memcpy(&value, bytes.data() + (size_t)i * sizeof value, sizeof value);
        return value;
    }
};

struct Tensor {
    int type;
    int64_t dims[4], strides[4], id, alignment;
    bool by_value;
};

struct Descriptor {
    int kind = -1;
    bool final = false;
    int engine = 0; /* of a configuration, and of its plan */
    std::map<int, Value> values;
    std::map<int, Tensor> tensors; /* of an operation, by attribute; passed on to the graph and so on */
};

static size_t type_bytes(int type)
{
    switch (type) {
    case CUDNN_VALUE_BOOLEAN:
        return 1;
    case CUDNN_VALUE_DATA_TYPE:
    case CUDNN_VALUE_HEURISTICS_MODE:
        return 4;
    default:
        return 8;
    }
}

static void need(bool condition, const char *what)
{
    if (!condition)
        report("cuDNN", what);
}

static const Value &value_of(const Descriptor &d, int attribute, int type, int64_t n)
{
    auto found = d.values.find(attribute);
    need(found != d.values.end(), "a descriptor lacks an attribute");
    need(found->second.type == type && found->second.n == n, "an attribute has another type or number of values");
    return found->second;
}

static Descriptor &descriptor_at(const Descriptor &d, int attribute, int kind)
{
    Descriptor *other = (Descriptor *)value_of(d, attribute, CUDNN_VALUE_DESCRIPTOR, 1).at<void *>(0);
    need(other->kind == kind && other->final, "an attribute is a descriptor of another kind, or one that is not final");
    return *other;
}

static Tensor tensor_of(const Descriptor &d)
{
    Tensor t;
    const Value &dims = value_of(d, CUDNN_TENSOR_DIMENSIONS, CUDNN_VALUE_INT64, 4), &strides = value_of(d, CUDNN_TENSOR_STRIDES, CUDNN_VALUE_INT64, 4);
    t.type = value_of(d, CUDNN_TENSOR_DATA_TYPE, CUDNN_VALUE_DATA_TYPE, 1).at<int>(0);
    t.id = value_of(d, CUDNN_TENSOR_ID, CUDNN_VALUE_INT64, 1).at<int64_t>(0);
    t.alignment = value_of(d, CUDNN_TENSOR_ALIGNMENT, CUDNN_VALUE_INT64, 1).at<int64_t>(0);
    t.by_value = value_of(d, CUDNN_TENSOR_IS_BY_VALUE, CUDNN_VALUE_BOOLEAN, 1).at<uint8_t>(0) != 0;
    for (int i = 0; i < 4; i++) {
        t.dims[i] = dims.at<int64_t>(i);
        t.strides[i] = strides.at<int64_t>(i);
        need(t.dims[i] > 0 && t.strides[i] > 0, "a tensor without extent");
    }
    return t;
}

static bool has(const Tensor &t, int type, int64_t heads, int64_t rows, int64_t d, bool by_value)
{
    return t.type == type && t.dims[0] == 1 && t.dims[1] == heads && t.dims[2] == rows && t.dims[3] == d && t.by_value == by_value;
}

static void finalize_operation(Descriptor &d)
{
    static const int attributes[] = {CUDNN_SDPA_Q, CUDNN_SDPA_K, CUDNN_SDPA_V, CUDNN_SDPA_O, CUDNN_SDPA_STATS, CUDNN_SDPA_SCALE, CUDNN_SDPA_LENGTH_Q, CUDNN_SDPA_LENGTH_KV};
    for (int attribute : attributes)
        d.tensors[attribute] = tensor_of(descriptor_at(d, attribute, CUDNN_TENSOR));
    const Tensor &q = d.tensors[CUDNN_SDPA_Q], &k = d.tensors[CUDNN_SDPA_K];
    const int64_t heads = q.dims[1], rows = q.dims[2], dim = q.dims[3];
    need(has(q, CUDNN_BFLOAT16, heads, rows, dim, false) && has(d.tensors[CUDNN_SDPA_O], CUDNN_BFLOAT16, heads, rows, dim, false), "Q or O has another shape");
    need(has(k, CUDNN_BFLOAT16, k.dims[1], k.dims[2], dim, false) && has(d.tensors[CUDNN_SDPA_V], CUDNN_BFLOAT16, k.dims[1], k.dims[2], dim, false), "K or V has another shape");
    need(heads % k.dims[1] == 0 && dim % 8 == 0, "heads or dims that SDPA does not take");
    need(has(d.tensors[CUDNN_SDPA_STATS], CUDNN_FLOAT32, heads, rows, 1, false), "STATS has another shape");
    need(has(d.tensors[CUDNN_SDPA_SCALE], CUDNN_FLOAT32, 1, 1, 1, true), "SCALE is no number of the host");
    need(has(d.tensors[CUDNN_SDPA_LENGTH_Q], CUDNN_INT32, 1, 1, 1, false) && has(d.tensors[CUDNN_SDPA_LENGTH_KV], CUDNN_INT32, 1, 1, 1, false), "a length is no int32 of the device");
    for (int attribute : {CUDNN_SDPA_Q, CUDNN_SDPA_K, CUDNN_SDPA_V, CUDNN_SDPA_O})
        need(d.tensors[attribute].strides[3] == 1 && d.tensors[attribute].alignment == 16, "rows are not contiguous and aligned");
}

static int finalize(cudnn_descriptor descriptor)
{
    Descriptor &d = *(Descriptor *)descriptor;
    need(!d.final, "a descriptor is made final twice");
    d.final = true;
    switch (d.kind) {
    case CUDNN_TENSOR:
        tensor_of(d);
        return CUDNN_OK;
    case CUDNN_SDPA_FORWARD:
        finalize_operation(d);
        return CUDNN_OK;
    case CUDNN_OPERATION_GRAPH:
        value_of(d, CUDNN_GRAPH_HANDLE, CUDNN_VALUE_HANDLE, 1);
        d.tensors = descriptor_at(d, CUDNN_GRAPH_OPERATIONS, CUDNN_SDPA_FORWARD).tensors;
        return CUDNN_OK;
    case CUDNN_ENGINE_HEURISTICS:
        need(value_of(d, CUDNN_HEURISTICS_MODE, CUDNN_VALUE_HEURISTICS_MODE, 1).at<int>(0) == CUDNN_HEURISTICS_A, "another mode of heuristics");
        d.tensors = descriptor_at(d, CUDNN_HEURISTICS_GRAPH, CUDNN_OPERATION_GRAPH).tensors;
        return CUDNN_OK;
    case CUDNN_EXECUTION_PLAN: {
        const Descriptor &config = descriptor_at(d, CUDNN_PLAN_ENGINE_CONFIG, CUDNN_ENGINE_CONFIG);
        value_of(d, CUDNN_PLAN_HANDLE, CUDNN_VALUE_HANDLE, 1);
        d.tensors = config.tensors;
        d.engine = config.engine;
        if (d.engine == 0)
            return CUDNN_FAILED;
        library_memory(PLAN_BYTES);
        return CUDNN_OK;
    }
    case CUDNN_VARIANT_PACK:
        return CUDNN_OK;
    }
    report("cuDNN", "a descriptor of this kind is not made final by the caller");
    return CUDNN_FAILED;
}

static int create_descriptor(int kind, cudnn_descriptor *ret)
{
    Descriptor *d = new Descriptor();
    d->kind = kind;
    *ret = d;
    return CUDNN_OK;
}

static int destroy_descriptor(cudnn_descriptor descriptor)
{
    delete (Descriptor *)descriptor;
    return CUDNN_OK;
}

static int set_attribute(cudnn_descriptor descriptor, int attribute, int type, int64_t n, const void *values)
{
    Descriptor &d = *(Descriptor *)descriptor;
    need(!d.final && n > 0 && values, "an attribute is set too late, or to nothing");
    const uint8_t *bytes = (const uint8_t *)values;
    d.values[attribute] = Value{type, n, std::vector<uint8_t>(bytes, bytes + (size_t)n * type_bytes(type))};
    return CUDNN_OK;
}

static int get_attribute(cudnn_descriptor descriptor, int attribute, int type, int64_t n_room, int64_t *ret_n, void *ret_values)
{
    enum { ENGINES = 3 };
    const Descriptor &d = *(Descriptor *)descriptor;
    need(d.final, "an attribute of what is not final");
    if (d.kind == CUDNN_ENGINE_HEURISTICS && attribute == CUDNN_HEURISTICS_RESULTS && type == CUDNN_VALUE_DESCRIPTOR) {
        cudnn_descriptor *configs = (cudnn_descriptor *)ret_values;
        *ret_n = n_room < ENGINES ? n_room : (int64_t)ENGINES;
        for (int i = 0; i < *ret_n; i++) {
            Descriptor &config = *(Descriptor *)configs[i];
            need(config.kind == CUDNN_ENGINE_CONFIG, "results go to descriptors of another kind");
            config.final = true;
            config.engine = i;
            config.tensors = d.tensors;
        }
        return CUDNN_OK;
    }
    if (d.kind == CUDNN_EXECUTION_PLAN && attribute == CUDNN_PLAN_WORKSPACE_SIZE && type == CUDNN_VALUE_INT64) {
        const int64_t bytes = d.engine == 1 ? (int64_t)1 << 40 : 256;
        *ret_n = 1;
        memcpy(ret_values, &bytes, sizeof bytes);
        return CUDNN_OK;
    }
    return CUDNN_FAILED;
}

/* ---- execution ---- */

struct Sdpa {
    std::map<int, Tensor> tensors;
    std::map<int, uint8_t *> at; /* by attribute */
    uint8_t *workspace;
    float scale;
};

static float bf16_number(const uint8_t *p)
{
    uint16_t bits;
    memcpy(&bits, p, 2);
    const uint32_t u = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static uint16_t bf16_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

static uint8_t *element(const Sdpa &s, int attribute, int64_t head, int64_t row, int64_t c)
{
    const Tensor &t = s.tensors.at(attribute);
    return s.at.at(attribute) + (head * t.strides[1] + row * t.strides[2] + c * t.strides[3]) * (t.type == CUDNN_BFLOAT16 ? 2 : 4);
}

static void attend_row(const Sdpa &s, int64_t head, int64_t row, int32_t n_keys)
{
    const int64_t d = s.tensors.at(CUDNN_SDPA_Q).dims[3], kv = head / (s.tensors.at(CUDNN_SDPA_Q).dims[1] / s.tensors.at(CUDNN_SDPA_K).dims[1]);
    std::vector<float> logits((size_t)n_keys), o((size_t)d);
    float m = -INFINITY, l = 0;
    check::range_read(element(s, CUDNN_SDPA_Q, head, row, 0), (size_t)d * 2);
    for (int32_t j = 0; j < n_keys; j++) {
        float sum = 0;
        for (int64_t c = 0; c < d; c++)
            sum += bf16_number(element(s, CUDNN_SDPA_Q, head, row, c)) * bf16_number(element(s, CUDNN_SDPA_K, kv, j, c));
        logits[(size_t)j] = sum * s.scale;
        m = std::fmax(m, logits[(size_t)j]);
    }
    for (int32_t j = 0; j < n_keys; j++) {
        const float w = std::exp(logits[(size_t)j] - m);
        l += w;
        for (int64_t c = 0; c < d; c++)
            o[(size_t)c] += w * bf16_number(element(s, CUDNN_SDPA_V, kv, j, c));
    }
    for (int64_t c = 0; c < d; c++) {
        const uint16_t bits = n_keys ? bf16_bits(o[(size_t)c] / l) : (uint16_t)0;
        memcpy(element(s, CUDNN_SDPA_O, head, row, c), &bits, 2);
    }
    check::range_written(element(s, CUDNN_SDPA_O, head, row, 0), (size_t)d * 2);
    if (n_keys == 0)
        return;
    const float stats = m + std::log(l);
    check::range_written(element(s, CUDNN_SDPA_STATS, head, row, 0), 4);
    memcpy(element(s, CUDNN_SDPA_STATS, head, row, 0), &stats, 4);
}

static void run_sdpa(const Sdpa &s)
{
    int32_t n_queries, n_keys;
    check::range_read(s.at.at(CUDNN_SDPA_LENGTH_Q), 4);
    check::range_read(s.at.at(CUDNN_SDPA_LENGTH_KV), 4);
    memcpy(&n_queries, s.at.at(CUDNN_SDPA_LENGTH_Q), 4);
    memcpy(&n_keys, s.at.at(CUDNN_SDPA_LENGTH_KV), 4);
    need(n_queries >= 0 && n_queries <= s.tensors.at(CUDNN_SDPA_Q).dims[2] && n_keys >= 0 && n_keys <= s.tensors.at(CUDNN_SDPA_K).dims[2], "a length is beyond what the plan is for");
    check::range_written(s.workspace, 256);
    memset(s.workspace, 0xAB, 256);
    for (int64_t kv = 0; kv < s.tensors.at(CUDNN_SDPA_K).dims[1] && n_keys; kv++) {
        check::range_read(element(s, CUDNN_SDPA_K, kv, 0, 0), (size_t)(n_keys * s.tensors.at(CUDNN_SDPA_K).dims[3]) * 2);
        check::range_read(element(s, CUDNN_SDPA_V, kv, 0, 0), (size_t)(n_keys * s.tensors.at(CUDNN_SDPA_V).dims[3]) * 2);
    }
    for (int64_t head = 0; head < s.tensors.at(CUDNN_SDPA_Q).dims[1]; head++)
        for (int64_t row = 0; row < n_queries; row++)
            attend_row(s, head, row, n_keys);
}

static int execute(cudnn_handle handle, cudnn_descriptor plan_, cudnn_descriptor pack_)
{
    const Descriptor &plan = *(Descriptor *)plan_, &pack = *(Descriptor *)pack_;
    need(plan.kind == CUDNN_EXECUTION_PLAN && plan.final && pack.kind == CUDNN_VARIANT_PACK && pack.final && handle->stream, "something is executed that is not ready");
    const int64_t n = (int64_t)plan.tensors.size();
    const Value &ids = value_of(pack, CUDNN_PACK_IDS, CUDNN_VALUE_INT64, n), &pointers = value_of(pack, CUDNN_PACK_POINTERS, CUDNN_VALUE_POINTER, n);
    Sdpa s;
    s.tensors = plan.tensors;
    s.workspace = value_of(pack, CUDNN_PACK_WORKSPACE, CUDNN_VALUE_POINTER, 1).at<uint8_t *>(0);
    for (const auto &t : plan.tensors)
        for (int64_t i = 0; i < n; i++)
            if (ids.at<int64_t>(i) == t.second.id) {
                s.at[t.first] = pointers.at<uint8_t *>(i);
                need((uintptr_t)s.at[t.first] % (uintptr_t)t.second.alignment == 0, "a pointer is not aligned as its tensor says");
            }
    need(s.at.size() == plan.tensors.size(), "a tensor has no pointer");
    memcpy(&s.scale, s.at[CUDNN_SDPA_SCALE], sizeof s.scale);
    if (plan.tensors.at(CUDNN_SDPA_Q).dims[3] == 96)
        return CUDNN_FAILED;
    enqueue(handle->stream, "cuDNN SDPA", [=] { run_sdpa(s); });
    return CUDNN_OK;
}

static int create_handle(cudnn_handle *ret)
{
    *ret = new cudnnContext{nullptr};
    return CUDNN_OK;
}

static int destroy_handle(cudnn_handle handle)
{
    delete handle;
    return CUDNN_OK;
}

static int set_stream(cudnn_handle handle, cudaStream_t stream)
{
    handle->stream = stream;
    return CUDNN_OK;
}

static size_t get_version()
{
    return CUDNN_VERSION_LEAST;
}

} /* namespace simt */

extern "C" int cudnn_api_load(const struct cudnn_api **ret_api, struct error *err)
{
    static const struct cudnn_api api = {simt::get_version, simt::create_handle, simt::destroy_handle, simt::set_stream, simt::create_descriptor, simt::destroy_descriptor, simt::finalize,
                                         simt::set_attribute, simt::get_attribute, simt::execute};
    const char *wanted = getenv("TIDEPOOL_CUDNN");
    if (wanted && strcmp(wanted, "off") == 0)
        return error_set(err, -1, "TIDEPOOL_CUDNN is off");
    *ret_api = &api;
    return 0;
}
