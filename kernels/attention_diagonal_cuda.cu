// Owns attention to the keys of a row's own steps on CUDA. Where GROUP heads share a key head, LANES lanes have
// these of a row in registers, each lane a pack of 16 bytes, and read every key once. Otherwise they have a row
// of one head, forward, or of one after the other, backward, and what several heads read of the same keys comes
// from the first-level cache. All sums have one order.
#include "kernels/attention_diagonal.h"

#include <math.h>

#include "kernels/cuda_vector.cuh"

enum { THREADS = 128, GROUP = 4, HALF = GROUP / 2, MOST_HEAD_DIM = 512, MOST_SHARED = 99 << 10 };

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
    int before = op.fresh ? 0 : d; // elements that are added to
    float dk[CHUNKS][N], dv[CHUNKS][N];
    head_load<N, LANES>(dk, op.dk + at, before);
    head_load<N, LANES>(dv, op.dv + at, before);
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

// ---- all heads of a key head at a time -----------------------------------------------------------

// Where a thread's pack of a row's heads and keys is. Forward LANES lanes have all heads of a key head, backward
// half of them.
struct group_place {
    int row, kv_head, head, column; // head: the first of the thread's
    bool there, inside;             // a row of the op; a column of the head
};

template <int N, int LANES, int HEADS>
static __device__ __forceinline__ struct group_place group_place_make(const struct diagonal &op)
{
    enum { PARTS = GROUP / HEADS };
    int count = (int)(op.rows * op.kv_heads);
    int item = (int)((blockIdx.x * (int64_t)THREADS + threadIdx.x) / (LANES * PARTS));
    int at = min(item, count - 1), row = at / (int)op.kv_heads;
    int kv_head = at - row * (int)op.kv_heads, part = (int)threadIdx.x / LANES % PARTS;
    int column = (int)threadIdx.x % LANES * N;
    return {row,    kv_head,      kv_head * GROUP + part * HEADS,
            column, item < count, column < (int)op.head_dim};
}

// Element of the thread's head i in [rows, heads, head_dim].
static __device__ __forceinline__ int64_t head_at(const struct diagonal &op,
                                                  const struct group_place &p, int i)
{
    return ((int64_t)p.row * op.heads + p.head + i) * op.head_dim + p.column;
}

template <int N, typename Type>
static __device__ __forceinline__ struct pack<Type, N> group_load(const Type *from, bool inside) {
    return inside ? pack_load<N>(from) : pack_zero<Type, N>();
}

// Key j's pack, or zeros where there is none.
template <int N, typename Type>
static __device__ __forceinline__ struct pack<Type, N>
group_key(const struct diagonal &op, const struct group_place &p, const void *base, int64_t step,
          int64_t stride, int j) {
    const Type *key = key_at<Type>(op, base, step, stride, p.row, p.kv_head, j);
    bool inside = p.inside && j < (int)op.steps;
    return group_load<N>(key + p.column, inside);
}

template <int N, typename Type>
static __device__ __forceinline__ float pack_dot(const struct pack<Type, N> &x, const float (&y)[N])
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++)
        sum += pack_value(x, i) * y[i];
    return sum;
}

template <int N, typename Type>
static __device__ __forceinline__ void unpack(float (&x)[N], const struct pack<Type, N> &p)
{
#pragma unroll
    for (int i = 0; i < N; i++)
        x[i] = pack_value(p, i);
}

// Sums over the lanes of a row, COUNT of them side by side.
template <int LANES, int COUNT> static __device__ __forceinline__ void lanes_sums(float (&x)[COUNT])
{
#pragma unroll
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma unroll
        for (int c = 0; c < COUNT; c++)
            x[c] += __shfl_xor_sync(~0u, x[c], half);
}

// The next step's key and value are on their way while one is worked on.
template <typename Type, int N, int LANES>
static __global__ void __launch_bounds__(THREADS) forward_group_kernel(struct diagonal op)
{
    struct group_place p = group_place_make<N, LANES, GROUP>(op);
    struct pack<Type, N> q[GROUP];
    float out[GROUP][N], max[GROUP], sum[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        q[i] = group_load<N>((const Type *)op.q + head_at(op, p, i), p.inside);
        unpack(out[i], group_load<N>((const Type *)op.out + head_at(op, p, i), p.inside));
        max[i] = op.lse[(int64_t)p.row * op.heads + p.head + i];
        sum[i] = 1.0f;
    }
    struct pack<Type, N> key = group_key<N, Type>(op, p, op.k, op.k_step, op.k_stride, 0);
    struct pack<Type, N> value = group_key<N, Type>(op, p, op.v, op.v_step, op.v_stride, 0);
#pragma unroll 1
    for (int j = 0; j < (int)op.steps; j++) {
        float x[N], score[GROUP];
        unpack(x, key);
        key = group_key<N, Type>(op, p, op.k, op.k_step, op.k_stride, j + 1);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            pack_hold(q[i]); // packed from step to step
            score[i] = pack_dot(q[i], x);
        }
        lanes_sums<LANES>(score);
        unpack(x, value);
        value = group_key<N, Type>(op, p, op.v, op.v_step, op.v_stride, j + 1);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            float scaled = score[i] * op.scale, top = fmaxf(max[i], scaled);
            float correction = expf(max[i] - top), weight = expf(scaled - top);
#pragma unroll
            for (int c = 0; c < N; c++)
                out[i][c] = out[i][c] * correction + x[c] * weight;
            sum[i] = sum[i] * correction + weight;
            max[i] = top;
        }
    }
    if (!p.there)
        return;
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        float inverse = 1.0f / sum[i];
#pragma unroll
        for (int c = 0; c < N; c++)
            out[i][c] *= inverse;
        if (p.inside)
            store_values<N>((Type *)op.out + head_at(op, p, i), out[i]);
        if (p.column == 0)
            op.lse[(int64_t)p.row * op.heads + p.head + i] = max[i] + logf(sum[i]);
    }
}

// A thread's part of the backward pass of its heads.
template <typename Type, int N> struct group_heads {
    struct pack<Type, N> q[HALF], dout[HALF];
    float dq[HALF][N], lse[HALF], delta[HALF];
};

template <typename Type, int N, int LANES>
static __device__ __forceinline__ void
heads_load(struct group_heads<Type, N> &x, const struct diagonal &op, const struct group_place &p)
{
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        int64_t at = head_at(op, p, i);
        float out[N];
        unpack(out, group_load<N>((const Type *)op.out + at, p.inside));
        x.dout[i] = group_load<N>((const Type *)op.dout + at, p.inside);
        x.q[i] = group_load<N>((const Type *)op.q + at, p.inside);
        unpack(x.dq[i], group_load<N>((const Type *)op.dq + at, p.inside));
        x.lse[i] = op.lse[(int64_t)p.row * op.heads + p.head + i];
        x.delta[i] = pack_dot(x.dout[i], out);
    }
    lanes_sums<LANES>(x.delta);
}

// Adds what a key and its value give to dq; dk and dv of the thread's heads.
template <typename Type, int N, int LANES>
static __device__ __forceinline__ void heads_take(struct group_heads<Type, N> &x, float (&dk)[N],
                                                  float (&dv)[N], const struct pack<Type, N> &key,
                                                  const struct pack<Type, N> &value, float scale)
{
    float k[N], v[N], sums[2 * HALF];
    unpack(k, key);
    unpack(v, value);
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        pack_hold(x.q[i]); // packed from step to step
        pack_hold(x.dout[i]);
        sums[i] = pack_dot(x.q[i], k);
        sums[HALF + i] = pack_dot(x.dout[i], v);
    }
    lanes_sums<LANES>(sums);
#pragma unroll
    for (int c = 0; c < N; c++)
        dk[c] = dv[c] = 0.0f;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        float p = expf(sums[i] * scale - x.lse[i]);
        float ds = p * (sums[HALF + i] - x.delta[i]) * scale;
#pragma unroll
        for (int c = 0; c < N; c++) {
            x.dq[i][c] += ds * k[c];
            dk[c] += ds * pack_value(x.q[i], c);
            dv[c] += p * pack_value(x.dout[i], c);
        }
    }
}

// Of the two halves of a group the first one has dk of all heads in the end, the second one dv.
template <typename Type, int N, int LANES>
static __global__ void __launch_bounds__(THREADS, 4) backward_group_kernel(struct diagonal op)
{
    struct group_place p = group_place_make<N, LANES, HALF>(op);
    struct group_heads<Type, N> x;
    bool first = p.head % GROUP == 0;
    float *sums = first ? op.dk : op.dv;
    struct pack<Type, N> key = group_key<N, Type>(op, p, op.k, op.k_step, op.k_stride, 0);
    struct pack<Type, N> value = group_key<N, Type>(op, p, op.v, op.v_step, op.v_stride, 0);
    heads_load<Type, N, LANES>(x, op, p);
#pragma unroll 1
    for (int j = 0; j < (int)op.steps; j++) {
        int64_t at =
            ((int64_t)(j * op.rows + p.row) * op.kv_heads + p.kv_head) * op.head_dim + p.column;
        struct pack<float, N> before = group_load<N>(sums + at, p.inside && !op.fresh);
        struct pack<Type, N> next_key =
            group_key<N, Type>(op, p, op.k, op.k_step, op.k_stride, j + 1);
        struct pack<Type, N> next_value =
            group_key<N, Type>(op, p, op.v, op.v_step, op.v_stride, j + 1);
        float dk[N], dv[N], sum[N];
        heads_take<Type, N, LANES>(x, dk, dv, key, value, op.scale);
#pragma unroll
        for (int c = 0; c < N; c++) {
            float other = __shfl_xor_sync(~0u, first ? dv[c] : dk[c], LANES);
            sum[c] = pack_value(before, c) + ((first ? dk[c] : dv[c]) + other);
        }
        if (p.there && p.inside)
            store_values<N>(sums + at, sum);
        key = next_key;
        value = next_value;
    }
    if (!p.there || !p.inside)
        return;
#pragma unroll
    for (int i = 0; i < HALF; i++)
        store_values<N>((Type *)op.dq + head_at(op, p, i), x.dq[i]);
}

template <typename Type, int N, int LANES>
static void group_launch(struct stream *stream, const struct diagonal *op)
{
    int64_t threads = op->rows * op->kv_heads * LANES;
    if (op->dq == NULL)
        forward_group_kernel<Type, N, LANES>
            <<<grid_size(divide_up(threads, THREADS)), THREADS, 0, stream->cuda>>>(*op);
    else
        backward_group_kernel<Type, N, LANES>
            <<<grid_size(divide_up(2 * threads, THREADS)), THREADS, 0, stream->cuda>>>(*op);
    launch_check();
}

// ---- which -----------------------------------------------------------------------------------------

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
    bool group = is_bf16(op->type) && packs && op->heads == GROUP * op->kv_heads;
    if (group && op->head_dim <= 64)
        group_launch<bf16_t, 8, 8>(stream, op);
    else if (group && op->head_dim <= 128)
        group_launch<bf16_t, 8, 16>(stream, op);
    else if (is_bf16(op->type) && packs && op->head_dim <= 64)
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
