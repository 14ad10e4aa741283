// Attention on CUDA against an implementation that shares nothing with ours: cuDNN's fused attention,
// asked for as a graph of products, reductions and pointwise operations. A block whose rows see the
// whole context is plain attention over [context; block], which the graph can express, and so are rows
// without blocks that see all of the context; ranges per row
// and gradients that blocks share are beyond it. Reported as skipped without cuDNN in the build, without
// a GPU, or where cuDNN has no engine for the graph.
#include <stdio.h>
#include <stdlib.h>

#ifdef DTRAIN_CUDNN
#include <cudnn_version.h>
#endif

enum { SKIPPED = 77 };

#if !defined(DTRAIN_CUDNN) || CUDNN_MAJOR < 9

int main(void)
{
    fprintf(stderr, "cudnn oracle: skipped: built without cuDNN 9\n");
    return SKIPPED;
}

#else

#include <cuda_runtime_api.h>
#include <cudnn.h>
#include <math.h>
#include <string.h>

#include "base/bf16.h"
#include "base/log.h"
#include "base/rng.h"
#include "kernels/kernels.h"

enum { OPERATIONS = 24, DESCRIPTORS = 256, BINDINGS = 16, CONFIGS = 16, DIMENSIONS = 4 };

// A graph, its plan, and where its tensors lie. After a failed call nothing more is done.
struct graph {
    cudnnHandle_t handle;
    cudnnBackendDescriptor_t operations[OPERATIONS];
    int operation_count;
    cudnnBackendDescriptor_t all[DESCRIPTORS]; // of this graph, to be destroyed
    int count;
    int64_t uids[BINDINGS]; // of tensors in memory
    void *pointers[BINDINGS];
    int bindings;
    int64_t next_uid;
    cudnnBackendDescriptor_t plan;
    bool failed;
    char why[512];
};

static void fail(struct graph *g, const char *what, cudnnStatus_t status)
{
    char text[384] = "";
    if (g->failed)
        return;
    g->failed = true;
    cudnnGetLastErrorString(text, sizeof(text));
    snprintf(g->why, sizeof(g->why), "%s: %s: %.380s", what, cudnnGetErrorString(status), text);
}

static cudnnBackendDescriptor_t descriptor(struct graph *g, cudnnBackendDescriptorType_t type)
{
    BUG_UNLESS(g->count < DESCRIPTORS);
    cudnnStatus_t status = cudnnBackendCreateDescriptor(type, &g->all[g->count]);
    if (status != CUDNN_STATUS_SUCCESS) {
        fail(g, "a descriptor", status);
        return NULL;
    }
    return g->all[g->count++];
}

static void set(struct graph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, int64_t count, const void *values)
{
    if (g->failed)
        return;
    cudnnStatus_t status = cudnnBackendSetAttribute(d, name, type, count, values);
    if (status != CUDNN_STATUS_SUCCESS)
        fail(g, "an attribute", status);
}

static void set_descriptor(struct graph *g, cudnnBackendDescriptor_t d,
                           cudnnBackendAttributeName_t name, cudnnBackendDescriptor_t value)
{
    set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

static void finalize(struct graph *g, cudnnBackendDescriptor_t d, const char *what)
{
    if (g->failed)
        return;
    cudnnStatus_t status = cudnnBackendFinalize(d);
    if (status != CUDNN_STATUS_SUCCESS)
        fail(g, what, status);
}

struct shape {
    int64_t size[DIMENSIONS], stride[DIMENSIONS]; // batch, head, row, column
};

// Rows of heads as our ops have them: [rows, heads, width], packed.
static struct shape rows_of(int64_t rows, int64_t heads, int64_t width)
{
    return (struct shape){{1, heads, rows, width}, {rows * heads * width, width, heads * width, 1}};
}

static struct shape transposed(struct shape s)
{
    return (struct shape){{s.size[0], s.size[1], s.size[3], s.size[2]},
                          {s.stride[0], s.stride[1], s.stride[3], s.stride[2]}};
}

// Head by head, packed.
static struct shape heads_of(int64_t heads, int64_t rows, int64_t width)
{
    return (struct shape){{1, heads, rows, width}, {heads * rows * width, rows * width, width, 1}};
}

// A tensor in memory, a number in host memory (by_value), or one between operations (memory NULL).
static cudnnBackendDescriptor_t tensor(struct graph *g, cudnnDataType_t type, struct shape shape,
                                       void *memory, bool by_value)
{
    cudnnBackendDescriptor_t d = descriptor(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    int64_t alignment = by_value ? (int64_t)sizeof(float) : 16, uid = ++g->next_uid;
    bool between = memory == NULL;
    set(g, d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    set(g, d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, DIMENSIONS, shape.size);
    set(g, d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, DIMENSIONS, shape.stride);
    set(g, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
    set(g, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    set(g, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &between);
    set(g, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
    finalize(g, d, "a tensor");
    if (between)
        return d;
    BUG_UNLESS(g->bindings < BINDINGS);
    g->uids[g->bindings] = uid;
    g->pointers[g->bindings++] = memory;
    return d;
}

static cudnnBackendDescriptor_t between(struct graph *g, struct shape shape)
{
    return tensor(g, CUDNN_DATA_FLOAT, shape, NULL, false);
}

static cudnnBackendDescriptor_t number(struct graph *g, float *value)
{
    return tensor(g, CUDNN_DATA_FLOAT, (struct shape){{1, 1, 1, 1}, {1, 1, 1, 1}}, value, true);
}

static void add(struct graph *g, cudnnBackendDescriptor_t operation, const char *what)
{
    BUG_UNLESS(g->operation_count < OPERATIONS);
    finalize(g, operation, what);
    g->operations[g->operation_count++] = operation;
}

static const cudnnDataType_t fp32 = CUDNN_DATA_FLOAT;

// y = mode(x, b); b NULL where the mode has one operand
static cudnnBackendDescriptor_t pointwise(struct graph *g, cudnnPointwiseMode_t mode,
                                          cudnnBackendDescriptor_t x, cudnnBackendDescriptor_t b,
                                          cudnnBackendDescriptor_t y)
{
    cudnnBackendDescriptor_t d = descriptor(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    set(g, d, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set(g, d, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &fp32);
    finalize(g, d, "a pointwise mode");
    cudnnBackendDescriptor_t op = descriptor(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, d);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    if (b != NULL)
        set_descriptor(g, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    add(g, op, "a pointwise operation");
    return y;
}

static cudnnBackendDescriptor_t product(struct graph *g, cudnnBackendDescriptor_t a,
                                        cudnnBackendDescriptor_t b, cudnnBackendDescriptor_t c)
{
    cudnnBackendDescriptor_t d = descriptor(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    set(g, d, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &fp32);
    finalize(g, d, "a product's type");
    cudnnBackendDescriptor_t op = descriptor(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, d);
    add(g, op, "a product");
    return c;
}

// Over the dimensions in which y is 1 and x is not, or over groups of heads.
static cudnnBackendDescriptor_t reduction(struct graph *g, cudnnReduceTensorOp_t operator_,
                                          cudnnBackendDescriptor_t x, cudnnBackendDescriptor_t y)
{
    cudnnBackendDescriptor_t d = descriptor(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    set(g, d, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &operator_);
    set(g, d, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &fp32);
    finalize(g, d, "a reduction's operator");
    cudnnBackendDescriptor_t op = descriptor(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, d);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    add(g, op, "a reduction");
    return y;
}

// The same elements in another shape.
static cudnnBackendDescriptor_t reshape(struct graph *g, cudnnBackendDescriptor_t x,
                                        cudnnDataType_t type, struct shape shape)
{
    cudnnBackendDescriptor_t y = tensor(g, type, shape, NULL, false);
    cudnnBackendDescriptor_t op = descriptor(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    set_descriptor(g, op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    add(g, op, "a reshape");
    return y;
}

// One engine configuration as a plan; false when it can not run the graph.
static bool try_config(struct graph *g, cudnnBackendDescriptor_t config)
{
    cudnnBackendDescriptor_t plan = descriptor(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    set(g, plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &g->handle);
    set_descriptor(g, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
    finalize(g, plan, "a plan");
    if (!g->failed)
        g->plan = plan;
    return !g->failed;
}

static bool try_mode(struct graph *g, cudnnBackendDescriptor_t graph, cudnnBackendHeurMode_t mode)
{
    cudnnBackendDescriptor_t configs[CONFIGS];
    int64_t found = 0;
    cudnnBackendDescriptor_t heuristic = descriptor(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    set_descriptor(g, heuristic, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    set(g, heuristic, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    finalize(g, heuristic, "the search for engines");
    for (int i = 0; i < CONFIGS; i++)
        configs[i] = descriptor(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    if (g->failed)
        return false;
    cudnnStatus_t status =
        cudnnBackendGetAttribute(heuristic, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                 CUDNN_TYPE_BACKEND_DESCRIPTOR, CONFIGS, &found, configs);
    if (status != CUDNN_STATUS_SUCCESS || found == 0) {
        fail(g, "no engine", status);
        return false;
    }
    for (int64_t i = 0; i < found; i++) {
        if (try_config(g, configs[i]))
            return true;
        g->failed = i == found - 1;
    }
    return false;
}

// Finds a plan for the operations, or says in `why` what is in the way.
static bool graph_plan(struct graph *g)
{
    static const cudnnBackendHeurMode_t modes[] = {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK};
    cudnnBackendDescriptor_t graph = descriptor(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    set(g, graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &g->handle);
    set(g, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->operation_count,
        g->operations);
    finalize(g, graph, "the graph");
    if (g->failed)
        return false;
    for (size_t i = 0; i < sizeof(modes) / sizeof(modes[0]); i++) {
        g->failed = false;
        if (try_mode(g, graph, modes[i]))
            return true;
    }
    return false;
}

static void graph_run(struct graph *g, const struct backend *backend)
{
    int64_t bytes = 0, found = 0;
    cudnnStatus_t status = cudnnBackendGetAttribute(
        g->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &found, &bytes);
    if (status != CUDNN_STATUS_SUCCESS)
        fail(g, "the size of the workspace", status);
    void *workspace = backend->alloc((size_t)bytes);
    cudnnBackendDescriptor_t pack = descriptor(g, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    set(g, pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, g->bindings, g->uids);
    set(g, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, g->bindings,
        g->pointers);
    set(g, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    finalize(g, pack, "the pointers");
    status = g->failed ? CUDNN_STATUS_SUCCESS : cudnnBackendExecute(g->handle, g->plan, pack);
    if (status != CUDNN_STATUS_SUCCESS)
        fail(g, "the plan's run", status);
    cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess)
        die("cuDNN's attention: %s", cudaGetErrorString(error));
    backend->free(workspace);
}

static void graph_release(struct graph *g)
{
    while (g->count > 0)
        cudnnBackendDestroyDescriptor(g->all[--g->count]);
}

// A block over a context that all its rows see.
struct problem {
    int64_t block, context, heads, kv_heads, head_dim;
    bool loose; // the block's keys belong to the context, too: attention without blocks
};

static int64_t keys_of(const struct problem *p)
{
    return p->context + p->block;
}

// Device memory. Keys and values of context and block lie behind one another, so that both see them.
struct memory {
    void *q, *k, *v, *dout; // bf16 [B, heads, d], [T + B, kv_heads, d] twice, [B, heads, d]
    void *out, *lse;        // ours: bf16 [B, heads, d], fp32 [B, heads]
    void *dq, *dk_block, *dv_block, *dk_context, *dv_context, *delta, *begin, *end;
    void *their_out, *their_lse; // bf16 [B, heads, d], fp32 [heads, B]
    void *stats;                 // ours in their order, fp32 [heads, B]
    void *their_dq, *their_dk, *their_dv, *sum, *dq_sum;
};

// softmax(scale Q K^T) V and the log-sum-exp of the scores.
static void build_forward(struct graph *g, const struct problem *p, const struct memory *m,
                          float *scale)
{
    const cudnnDataType_t bf16_type = CUDNN_DATA_BFLOAT16;
    struct shape keys = rows_of(keys_of(p), p->kv_heads, p->head_dim);
    struct shape rows = rows_of(p->block, p->heads, p->head_dim);
    struct shape scores = heads_of(p->heads, p->block, keys_of(p));
    struct shape one = heads_of(p->heads, p->block, 1);
    cudnnBackendDescriptor_t q = tensor(g, bf16_type, rows, m->q, false);
    cudnnBackendDescriptor_t k = tensor(g, bf16_type, transposed(keys), m->k, false);
    cudnnBackendDescriptor_t v = tensor(g, bf16_type, keys, m->v, false);
    cudnnBackendDescriptor_t out = tensor(g, bf16_type, rows, m->their_out, false);
    cudnnBackendDescriptor_t lse = tensor(g, fp32, one, m->their_lse, false);

    cudnnBackendDescriptor_t s = product(g, q, k, between(g, scores));
    s = pointwise(g, CUDNN_POINTWISE_MUL, s, number(g, scale), between(g, scores));
    cudnnBackendDescriptor_t most = reduction(g, CUDNN_REDUCE_TENSOR_MAX, s, between(g, one));
    s = pointwise(g, CUDNN_POINTWISE_SUB, s, most, between(g, scores));
    s = pointwise(g, CUDNN_POINTWISE_EXP, s, NULL, between(g, scores));
    cudnnBackendDescriptor_t sum = reduction(g, CUDNN_REDUCE_TENSOR_ADD, s, between(g, one));
    cudnnBackendDescriptor_t log_sum =
        pointwise(g, CUDNN_POINTWISE_LOG, sum, NULL, between(g, one));
    pointwise(g, CUDNN_POINTWISE_ADD, most, log_sum, lse);
    s = pointwise(g, CUDNN_POINTWISE_DIV, s, sum, tensor(g, bf16_type, scores, NULL, false));
    product(g, s, v, out);
}

// dK or dV [keys, kv_heads, d]: x^T y with the gradients of a group's query heads added.
static void build_key_gradient(struct graph *g, const struct problem *p, cudnnBackendDescriptor_t x,
                               cudnnBackendDescriptor_t y, void *memory)
{
    const cudnnDataType_t bf16_type = CUDNN_DATA_BFLOAT16;
    struct shape scores = heads_of(p->heads, p->block, keys_of(p));
    struct shape keys = rows_of(keys_of(p), p->kv_heads, p->head_dim);
    cudnnBackendDescriptor_t result = tensor(g, bf16_type, keys, memory, false);
    x = reshape(g, x, bf16_type, transposed(scores));
    if (p->heads == p->kv_heads) {
        product(g, x, y, result);
        return;
    }
    struct shape full = heads_of(p->heads, keys_of(p), p->head_dim);
    cudnnBackendDescriptor_t each = product(g, x, y, tensor(g, bf16_type, full, NULL, false));
    reduction(g, CUDNN_REDUCE_TENSOR_ADD, each, result);
}

// P = exp(scale Q K^T - lse); dV = P^T dO; dS = scale P (dO V^T - sum(dO O)); dK = dS^T Q; dQ = dS K.
static void build_backward(struct graph *g, const struct problem *p, const struct memory *m,
                           float *scale, float *unit)
{
    const cudnnDataType_t bf16_type = CUDNN_DATA_BFLOAT16;
    struct shape keys = rows_of(keys_of(p), p->kv_heads, p->head_dim);
    struct shape rows = rows_of(p->block, p->heads, p->head_dim);
    struct shape packed = heads_of(p->heads, p->block, p->head_dim);
    struct shape scores = heads_of(p->heads, p->block, keys_of(p));
    struct shape one = heads_of(p->heads, p->block, 1);
    cudnnBackendDescriptor_t q = tensor(g, bf16_type, rows, m->q, false);
    cudnnBackendDescriptor_t k = tensor(g, bf16_type, transposed(keys), m->k, false);
    cudnnBackendDescriptor_t v = tensor(g, bf16_type, transposed(keys), m->v, false);
    cudnnBackendDescriptor_t out = tensor(g, bf16_type, rows, m->out, false);
    cudnnBackendDescriptor_t dout = tensor(g, bf16_type, rows, m->dout, false);
    cudnnBackendDescriptor_t lse = tensor(g, fp32, one, m->stats, false);
    cudnnBackendDescriptor_t factor = number(g, scale);

    cudnnBackendDescriptor_t sum = pointwise(g, CUDNN_POINTWISE_MUL, dout, out, between(g, packed));
    sum = reduction(g, CUDNN_REDUCE_TENSOR_ADD, sum, between(g, one));
    sum = pointwise(g, CUDNN_POINTWISE_MUL, sum, number(g, unit),
                    tensor(g, fp32, one, m->sum, false));

    cudnnBackendDescriptor_t s = product(g, q, k, between(g, scores));
    s = pointwise(g, CUDNN_POINTWISE_MUL, s, factor, between(g, scores));
    s = pointwise(g, CUDNN_POINTWISE_SUB, s, lse, between(g, scores));
    s = pointwise(g, CUDNN_POINTWISE_EXP, s, NULL, between(g, scores));
    build_key_gradient(g, p, s, dout, m->their_dv);

    cudnnBackendDescriptor_t ds = product(g, dout, v, between(g, scores));
    ds = pointwise(g, CUDNN_POINTWISE_SUB, ds, sum, between(g, scores));
    ds = pointwise(g, CUDNN_POINTWISE_MUL, ds, s, between(g, scores));
    ds = pointwise(g, CUDNN_POINTWISE_MUL, ds, factor, between(g, scores));
    build_key_gradient(g, p, ds, q, m->their_dk);

    k = reshape(g, k, bf16_type, keys);
    cudnnBackendDescriptor_t dq = product(g, ds, k, tensor(g, fp32, packed, m->dq_sum, false));
    pointwise(g, CUDNN_POINTWISE_IDENTITY, dq, NULL,
              tensor(g, bf16_type, rows, m->their_dq, false));
}

struct oracle {
    const struct backend *backend;
    struct stream *stream;
    cudnnHandle_t handle;
    void *taken[32];
    int count;
    int compared, wrong; // tensors
};

static void *take(struct oracle *o, size_t bytes)
{
    BUG_UNLESS(o->count < (int)(sizeof(o->taken) / sizeof(o->taken[0])));
    o->taken[o->count] = o->backend->alloc(bytes);
    o->backend->zero(o->stream, o->taken[o->count], bytes);
    return o->taken[o->count++];
}

static void *take_normal(struct oracle *o, int64_t count, uint64_t seed)
{
    struct rng_key key = rng_key_make(seed, 0, 0, RNG_TEST);
    size_t bytes = (size_t)count * sizeof(bf16);
    bf16 *values = memory_alloc((size_t)count, sizeof(*values));
    for (int64_t i = 0; i < count; i++)
        values[i] = bf16_from_float(rng_normal(key, (uint64_t)i));
    void *device = take(o, bytes);
    o->backend->copy_in(o->stream, device, values, bytes);
    o->backend->sync(o->stream);
    free(values);
    return device;
}

static void *take_integers(struct oracle *o, int64_t count, int32_t value)
{
    int32_t *values = memory_alloc((size_t)count, sizeof(*values));
    for (int64_t i = 0; i < count; i++)
        values[i] = value;
    void *device = take(o, (size_t)count * sizeof(*values));
    o->backend->copy_in(o->stream, device, values, (size_t)count * sizeof(*values));
    o->backend->sync(o->stream);
    free(values);
    return device;
}

static void memory_take(struct oracle *o, const struct problem *p, struct memory *m)
{
    int64_t rows = p->block * p->heads, keys = keys_of(p) * p->kv_heads;
    int64_t block = p->block * p->kv_heads, d = p->head_dim;
    int64_t context = (p->loose ? keys_of(p) : p->context) * p->kv_heads;
    const size_t two = sizeof(bf16), four = sizeof(float);
    m->q = take_normal(o, rows * d, 1);
    m->k = take_normal(o, keys * d, 2);
    m->v = take_normal(o, keys * d, 3);
    m->dout = take_normal(o, rows * d, 4);
    m->out = take(o, (size_t)(rows * d) * two);
    m->lse = take(o, (size_t)rows * four);
    m->dq = take(o, (size_t)(rows * d) * two);
    m->dk_block = take(o, (size_t)(block * d) * two);
    m->dv_block = take(o, (size_t)(block * d) * two);
    m->dk_context = take(o, (size_t)(context * d) * four);
    m->dv_context = take(o, (size_t)(context * d) * four);
    m->delta = take(o, (size_t)rows * four);
    m->begin = take_integers(o, p->block, 0);
    m->end = take_integers(o, p->block, (int32_t)(p->loose ? keys_of(p) : p->context));
    m->their_out = take(o, (size_t)(rows * d) * two);
    m->their_lse = take(o, (size_t)rows * four);
    m->stats = take(o, (size_t)rows * four);
    m->their_dq = take(o, (size_t)(rows * d) * two);
    m->their_dk = take(o, (size_t)(keys * d) * two);
    m->their_dv = take(o, (size_t)(keys * d) * two);
    m->sum = take(o, (size_t)rows * four);
    m->dq_sum = take(o, (size_t)(rows * d) * four);
}

static struct attention attention_of(const struct problem *p, const struct memory *m, float scale)
{
    int64_t width = p->kv_heads * p->head_dim, behind = p->context * width;
    struct attention op = {.rows = p->block,
                           .block_size = p->block,
                           .context = p->context,
                           .heads = p->heads,
                           .kv_heads = p->kv_heads,
                           .head_dim = p->head_dim,
                           .scale = scale,
                           .type = DTYPE_BF16,
                           .q = m->q,
                           .k_block = (const bf16 *)m->k + behind,
                           .v_block = (const bf16 *)m->v + behind,
                           .k_context = m->k,
                           .v_context = m->v,
                           .v_block_stride = width,
                           .v_context_stride = width,
                           .begin = m->begin,
                           .end = m->end,
                           .out = m->out,
                           .lse = m->lse,
                           .dout = m->dout,
                           .delta = m->delta,
                           .dq = m->dq,
                           .dk_block = m->dk_block,
                           .dv_block = m->dv_block,
                           .dk_context = m->dk_context,
                           .dv_context = m->dv_context};
    if (p->loose) {
        op.block_size = 0;
        op.context = keys_of(p);
        op.k_block = op.v_block = NULL;
        op.dk_block = op.dv_block = NULL;
    }
    return op;
}

// Device memory as fp32; free() it.
static float *fetch(const struct oracle *o, const void *device, enum dtype type, int64_t count)
{
    size_t bytes = (size_t)count * dtype_size(type);
    float *values = memory_alloc((size_t)count, sizeof(*values));
    bf16 *raw = memory_alloc((size_t)count, sizeof(float));
    o->backend->copy_out(o->stream, raw, device, bytes);
    o->backend->sync(o->stream);
    if (type == DTYPE_F32)
        memcpy(values, raw, bytes);
    for (int64_t i = 0; i < count && type == DTYPE_BF16; i++)
        values[i] = bf16_to_float(raw[i]);
    free(raw);
    return values;
}

// Our log-sum-exp [rows, heads] in their order [heads, rows], and back.
static void turn(const float *from, float *to, int64_t rows, int64_t columns)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++)
            to[c * rows + r] = from[r * columns + c];
}

// Norm of the difference over norm of theirs, at most `most`.
static void compare(struct oracle *o, const char *what, const float *ours, const float *theirs,
                    int64_t count, double most)
{
    double difference = 0.0, norm = 0.0;
    for (int64_t i = 0; i < count; i++) {
        double d = (double)ours[i] - (double)theirs[i];
        difference += d * d;
        norm += (double)theirs[i] * (double)theirs[i];
    }
    double error = sqrt(difference / norm);
    bool close = error <= most; // false for NaN, too
    printf("  %-12s %.2e %s\n", what, error, close ? "" : "WRONG");
    o->compared++;
    o->wrong += !close;
}

static void compare_memory(struct oracle *o, const char *what, const void *ours, enum dtype type,
                           const bf16 *theirs, int64_t count, double most)
{
    float *a = fetch(o, ours, type, count), *b = fetch(o, theirs, DTYPE_BF16, count);
    compare(o, what, a, b, count, most);
    free(a);
    free(b);
}

// Theirs rounds the probabilities before the product with V and both gradients' factors to bf16, as ours
// does: a few errors of 2^-9 that are independent of one another.
static const double bf16_products = 8e-3, fp32_sums = 1e-5;

static void check_forward(struct oracle *o, const struct problem *p, const struct memory *m,
                          float scale)
{
    struct graph g = {.handle = o->handle};
    int64_t rows = p->block * p->heads;
    build_forward(&g, p, m, &scale);
    if (graph_plan(&g))
        graph_run(&g, o->backend);
    if (g.failed) {
        printf("  forward: skipped: %s\n", g.why);
    } else {
        float *ours = fetch(o, m->lse, DTYPE_F32, rows);
        float *theirs = fetch(o, m->their_lse, DTYPE_F32, rows);
        float *turned = memory_alloc((size_t)rows, sizeof(*turned));
        turn(theirs, turned, p->heads, p->block);
        compare_memory(o, "out", m->out, DTYPE_BF16, m->their_out, rows * p->head_dim,
                       bf16_products);
        compare(o, "lse", ours, turned, rows, fp32_sums);
        free(ours);
        free(theirs);
        free(turned);
    }
    graph_release(&g);
}

static void compare_gradients(struct oracle *o, const struct problem *p, const struct memory *m)
{
    int64_t width = p->kv_heads * p->head_dim;
    int64_t context = (p->loose ? keys_of(p) : p->context) * width;
    const bf16 *dk = m->their_dk, *dv = m->their_dv;
    compare_memory(o, "dq", m->dq, DTYPE_BF16, m->their_dq, p->block * p->heads * p->head_dim,
                   bf16_products);
    compare_memory(o, "dk_context", m->dk_context, DTYPE_F32, dk, context, bf16_products);
    compare_memory(o, "dv_context", m->dv_context, DTYPE_F32, dv, context, bf16_products);
    if (p->loose)
        return;
    compare_memory(o, "dk_block", m->dk_block, DTYPE_BF16, dk + context, p->block * width,
                   bf16_products);
    compare_memory(o, "dv_block", m->dv_block, DTYPE_BF16, dv + context, p->block * width,
                   bf16_products);
}

// Both start from our output and log-sum-exp.
static void check_backward(struct oracle *o, const struct problem *p, const struct memory *m,
                           float scale)
{
    struct graph g = {.handle = o->handle};
    float unit = 1.0f;
    int64_t rows = p->block * p->heads;
    float *lse = fetch(o, m->lse, DTYPE_F32, rows);
    float *turned = memory_alloc((size_t)rows, sizeof(*turned));
    turn(lse, turned, p->block, p->heads);
    o->backend->copy_in(o->stream, m->stats, turned, (size_t)rows * sizeof(*turned));
    o->backend->sync(o->stream);
    build_backward(&g, p, m, &scale, &unit);
    if (graph_plan(&g))
        graph_run(&g, o->backend);
    if (g.failed)
        printf("  backward: skipped: %s\n", g.why);
    else
        compare_gradients(o, p, m);
    graph_release(&g);
    free(lse);
    free(turned);
}

static void check(struct oracle *o, const struct problem *p)
{
    struct memory m;
    float scale = 1.0f / sqrtf((float)p->head_dim);
    printf("block %lld%s, context %lld, heads %lld of %lld, head_dim %lld\n", (long long)p->block,
           p->loose ? " in the context" : "", (long long)p->context, (long long)p->heads,
           (long long)p->kv_heads, (long long)p->head_dim);
    memory_take(o, p, &m);
    struct attention op = attention_of(p, &m, scale);
    o->backend->kernels->attention_forward(o->stream, &op);
    o->backend->kernels->attention_backward(o->stream, &op);
    o->backend->sync(o->stream);
    check_forward(o, p, &m, scale);
    check_backward(o, p, &m, scale);
    while (o->count > 0)
        o->backend->free(o->taken[--o->count]);
}

static int run(struct oracle *o)
{
    static const struct problem problems[] = {
        {16, 496, 8, 2, 64, false}, {32, 480, 8, 2, 128, false}, {16, 2032, 4, 4, 128, false},
        {8, 1003, 6, 3, 64, false}, {256, 256, 8, 2, 64, true},  {320, 704, 8, 2, 128, true},
        {200, 1003, 6, 3, 64, true}};
    cudnnStatus_t status = cudnnCreate(&o->handle);
    if (status != CUDNN_STATUS_SUCCESS) {
        fprintf(stderr, "cudnn oracle: skipped: cudnnCreate: %s\n", cudnnGetErrorString(status));
        return SKIPPED;
    }
    printf("cuDNN %zu\n", cudnnGetVersion());
    for (size_t i = 0; i < sizeof(problems) / sizeof(problems[0]); i++)
        check(o, &problems[i]);
    cudnnDestroy(o->handle);
    if (o->compared == 0)
        fprintf(stderr, "cudnn oracle: skipped: no engine for any of the graphs\n");
    return o->wrong > 0 ? EXIT_FAILURE : o->compared > 0 ? EXIT_SUCCESS : SKIPPED;
}

int main(void)
{
    struct error why = {{0}};
    struct oracle oracle = {.backend = backend_cuda(&why)};
    const char *required = getenv("REQUIRE_CUDA");
    if (oracle.backend == NULL) {
        bool fails = required != NULL && strcmp(required, "1") == 0;
        fprintf(stderr, "cudnn oracle: %s: %s\n", fails ? "not possible" : "skipped", why.text);
        return fails ? EXIT_FAILURE : SKIPPED;
    }
    struct stream_options options = {.threads = 1,
                                     .workspace_bytes = oracle.backend->stream_workspace_bytes(1)};
    oracle.stream = oracle.backend->stream_open(&options);
    int status = run(&oracle);
    oracle.backend->stream_close(oracle.stream);
    return status;
}

#endif
