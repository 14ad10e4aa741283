// Owns attention to the keys of a row's own steps on CUDA. LANES lanes have a row of one head, forward, or
// the row of all heads of a key head, backward, each lane a pack of 16 bytes; what several heads read of
// the same keys comes from the first-level cache. All sums have one order.
#include "kernels/attention_diagonal.h"

#include <math.h>

#include "kernels/cuda_vector.cuh"

enum { THREADS = 128, MOST_HEAD_DIM = 512, MOST_SHARED = 99 << 10 };

// A lane's elements of a head: CHUNKS packs of N, LANES packs apart; zeros beyond D.
template <int N, int LANES, int CHUNKS, typename Type>
static __device__ __forceinline__ void head_load(float (&x)[CHUNKS][N], const Type *from, int d)
{
    int lane = (int)threadIdx.x % LANES;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        int at = (c * LANES + lane) * N;
        struct pack<Type, N> p = pack_zero<Type, N>();
        if (at < d)
            p = pack_load<N>(from + at);
#pragma unroll
        for (int i = 0; i < N; i++)
            x[c][i] = pack_value(p, i);
    }
}

template <int N, int LANES, int CHUNKS, typename Type>
static __device__ __forceinline__ void head_store(Type *to, const float (&x)[CHUNKS][N], int d)
{
    int lane = (int)threadIdx.x % LANES;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        int at = (c * LANES + lane) * N;
        if (at < d)
            store_values<N>(to + at, x[c]);
    }
}

template <int N, int CHUNKS>
static __device__ __forceinline__ float part_dot(const float (&x)[CHUNKS][N],
                                                 const float (&y)[CHUNKS][N])
{
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int i = 0; i < N; i++)
            sum += x[c][i] * y[c][i];
    return sum;
}

// x = x factor + y weight
template <int N, int CHUNKS>
static __device__ __forceinline__ void mix(float (&x)[CHUNKS][N], float factor,
                                           const float (&y)[CHUNKS][N], float weight)
{
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int i = 0; i < N; i++)
            x[c][i] = x[c][i] * factor + y[c][i] * weight;
}

template <int LANES> static __device__ __forceinline__ float lanes_sum(float x)
{
#pragma unroll
    for (int half = LANES / 2; half > 0; half /= 2)
        x += __shfl_xor_sync(~0u, x, half);
    return x;
}

// Key j of a row and key head.
template <typename Type>
static __device__ __forceinline__ const Type *key_at(const struct diagonal &op, const void *base,
                                                     int64_t step, int64_t stride, int64_t row,
                                                     int kv_head, int j)
{
    return (const Type *)base + j * step + row * stride + kv_head * op.head_dim;
}

// Running softmax from what attention over the context gave.
template <typename Type, int N, int LANES, int CHUNKS>
static __global__ void __launch_bounds__(THREADS) forward_kernel(struct diagonal op)
{
    int count = (int)(op.rows * op.heads), d = (int)op.head_dim, heads = (int)op.heads;
    int item = (int)((blockIdx.x * (int64_t)THREADS + threadIdx.x) / LANES);
    int at = min(item, count - 1), row = at / heads;
    int kv_head = (at - row * heads) / (heads / (int)op.kv_heads);
    float q[CHUNKS][N], out[CHUNKS][N], max = op.lse[at], sum = 1.0f;
    head_load<N, LANES>(q, (const Type *)op.q + (int64_t)at * d, d);
    head_load<N, LANES>(out, (const Type *)op.out + (int64_t)at * d, d);
#pragma unroll 2
    for (int j = 0; j < (int)op.steps; j++) {
        float k[CHUNKS][N], v[CHUNKS][N];
        head_load<N, LANES>(k, key_at<Type>(op, op.k, op.k_step, op.k_stride, row, kv_head, j), d);
        head_load<N, LANES>(v, key_at<Type>(op, op.v, op.v_step, op.v_stride, row, kv_head, j), d);
        float score = lanes_sum<LANES>(part_dot(q, k)) * op.scale, top = fmaxf(max, score);
        float correction = expf(max - top), p = expf(score - top);
        mix(out, correction, v, p);
        sum = sum * correction + p;
        max = top;
    }
    if (item >= count)
        return;
    mix(out, 1.0f / sum, out, 0.0f);
    head_store<N, LANES>((Type *)op.out + (int64_t)at * d, out, d);
    if (threadIdx.x % LANES == 0)
        op.lse[at] = max + logf(sum);
}

// dq of one head, and what its keys and values need: probability and gradient of each score, [steps] in
// shared memory.
template <typename Type, int N, int LANES, int CHUNKS>
static __device__ __forceinline__ void backward_head(const struct diagonal &op, int64_t row,
                                                     int kv_head, int head, bool there,
                                                     float *probability, float *gradient)
{
    int64_t at = row * op.heads + head;
    int d = (int)op.head_dim;
    float q[CHUNKS][N], dout[CHUNKS][N], dq[CHUNKS][N], lse = op.lse[at];
    head_load<N, LANES>(dout, (const Type *)op.dout + at * d, d);
    head_load<N, LANES>(dq, (const Type *)op.out + at * d, d);
    float delta = lanes_sum<LANES>(part_dot(dq, dout));
    head_load<N, LANES>(q, (const Type *)op.q + at * d, d);
    head_load<N, LANES>(dq, (const Type *)op.dq + at * d, d);
#pragma unroll 2
    for (int j = 0; j < (int)op.steps; j++) {
        float k[CHUNKS][N], v[CHUNKS][N];
        head_load<N, LANES>(k, key_at<Type>(op, op.k, op.k_step, op.k_stride, row, kv_head, j), d);
        head_load<N, LANES>(v, key_at<Type>(op, op.v, op.v_step, op.v_stride, row, kv_head, j), d);
        float p = expf(lanes_sum<LANES>(part_dot(q, k)) * op.scale - lse);
        float ds = p * (lanes_sum<LANES>(part_dot(dout, v)) - delta) * op.scale;
        mix(dq, 1.0f, k, ds);
        if (threadIdx.x % LANES == 0) {
            probability[j] = p;
            gradient[j] = ds;
        }
    }
    if (there)
        head_store<N, LANES>((Type *)op.dq + at * d, dq, d);
}

// dk and dv of one key, which the heads' sums of [group, steps] are made for.
template <typename Type, int N, int LANES, int CHUNKS>
static __device__ __forceinline__ void backward_key(const struct diagonal &op, int64_t row,
                                                    int kv_head, int j, const float *probability,
                                                    const float *gradient)
{
    int group = (int)(op.heads / op.kv_heads), d = (int)op.head_dim, steps = (int)op.steps;
    int64_t at = ((j * op.rows + row) * op.kv_heads + kv_head) * d;
    float dk[CHUNKS][N], dv[CHUNKS][N];
    head_load<N, LANES>(dk, op.dk + at, d);
    head_load<N, LANES>(dv, op.dv + at, d);
    for (int i = 0; i < group; i++) {
        int64_t from = (row * op.heads + kv_head * group + i) * d;
        float q[CHUNKS][N], dout[CHUNKS][N];
        head_load<N, LANES>(q, (const Type *)op.q + from, d);
        head_load<N, LANES>(dout, (const Type *)op.dout + from, d);
        mix(dk, 1.0f, q, gradient[i * steps + j]);
        mix(dv, 1.0f, dout, probability[i * steps + j]);
    }
    head_store<N, LANES>(op.dk + at, dk, d);
    head_store<N, LANES>(op.dv + at, dv, d);
}

// First all heads, then all keys. Shared memory: 2 * group * steps numbers for LANES threads.
template <typename Type, int N, int LANES, int CHUNKS>
static __global__ void __launch_bounds__(THREADS) backward_kernel(struct diagonal op)
{
    extern __shared__ float shared[];
    int count = (int)(op.rows * op.kv_heads), group = (int)(op.heads / op.kv_heads);
    int item = (int)((blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / LANES);
    int at = min(item, count - 1), row = at / (int)op.kv_heads;
    int kv_head = at - row * (int)op.kv_heads, numbers = group * (int)op.steps;
    float *probability = shared + threadIdx.x / LANES * 2 * numbers;
    float *gradient = probability + numbers;
    for (int i = 0; i < group; i++)
        backward_head<Type, N, LANES, CHUNKS>(op, row, kv_head, kv_head * group + i, item < count,
                                              probability + i * op.steps, gradient + i * op.steps);
    __syncwarp();
    if (item >= count)
        return;
    for (int j = 0; j < (int)op.steps; j++)
        backward_key<Type, N, LANES, CHUNKS>(op, row, kv_head, j, probability, gradient);
}

template <typename Type, int N, int LANES, int CHUNKS>
static void launch(struct stream *stream, const struct diagonal *op)
{
    if (op->dq == NULL) {
        unsigned grid = grid_size(divide_up(op->rows * op->heads * LANES, THREADS));
        forward_kernel<Type, N, LANES, CHUNKS><<<grid, THREADS, 0, stream->cuda>>>(*op);
        launch_check();
        return;
    }
    size_t each = (size_t)(2 * op->heads / op->kv_heads * op->steps) * sizeof(float);
    unsigned threads = THREADS;
    while (threads > WARP && threads / LANES * each > MOST_SHARED)
        threads /= 2;
    size_t bytes = threads / LANES * each;
    BUG_UNLESS(bytes <= MOST_SHARED);
    unsigned grid = grid_size(divide_up(op->rows * op->kv_heads * LANES, threads));
    allow_shared(backward_kernel<Type, N, LANES, CHUNKS>, bytes);
    backward_kernel<Type, N, LANES, CHUNKS><<<grid, threads, bytes, stream->cuda>>>(*op);
    launch_check();
}

// Any head_dim, an element at a time.
template <typename Type> static void launch_any(struct stream *stream, const struct diagonal *op)
{
    if (op->head_dim <= 128)
        launch<Type, 1, 32, 4>(stream, op);
    else
        launch<Type, 1, 32, MOST_HEAD_DIM / 32>(stream, op);
}

static bool fits_packs(const struct diagonal *op, int n)
{
    bool at = packs_at(op->q) && packs_at(op->k) && packs_at(op->v) && packs_at(op->out) &&
              packs_at(op->dout) && packs_at(op->dq) && packs_at(op->dk) && packs_at(op->dv);
    bool keys = packs_in(op->k_step, n) && packs_in(op->k_stride, n);
    bool values = packs_in(op->v_step, n) && packs_in(op->v_stride, n);
    return at && keys && values && packs_in(op->head_dim, n);
}

static void choose(struct stream *stream, const struct diagonal *op)
{
    BUG_UNLESS(op->steps > 0 && op->steps <= DIAGONAL_MOST_STEPS);
    BUG_UNLESS(op->heads % op->kv_heads == 0 && op->head_dim <= MOST_HEAD_DIM);
    BUG_UNLESS(op->rows * op->heads <= INT32_MAX / WARP);
    if (op->rows == 0)
        return;
    bool packs = fits_packs(op, is_bf16(op->type) ? 8 : 4);
    if (is_bf16(op->type) && packs && op->head_dim <= 64)
        launch<bf16_t, 8, 8, 1>(stream, op);
    else if (is_bf16(op->type) && packs && op->head_dim <= 128)
        launch<bf16_t, 8, 16, 1>(stream, op);
    else if (is_bf16(op->type) && packs && op->head_dim <= 256)
        launch<bf16_t, 8, 32, 1>(stream, op);
    else if (is_bf16(op->type))
        launch_any<bf16_t>(stream, op);
    else if (packs && op->head_dim <= 128)
        launch<float, 4, 32, 1>(stream, op);
    else
        launch_any<float>(stream, op);
}

void diagonal_forward_cuda(struct stream *stream, const struct diagonal *op)
{
    struct diagonal forward = *op;
    forward.dq = NULL;
    choose(stream, &forward);
}

void diagonal_backward_cuda(struct stream *stream, const struct diagonal *op)
{
    choose(stream, op);
}
