// Owns the optimizer's ops on CUDA: AdamW, sum of squares, conversion.
#include "kernels/optimizer.h"

#include <math.h>

#include "kernels/arguments.h"
#include "kernels/cuda_vector.cuh"

enum {
    THREADS = 256,
    PACK = 4,           // elements: 16 bytes of fp32, 8 of a bf16 copy
    TOGETHER = 4,       // packs of a thread that are on their way, in sums and conversions
    ADAMW_TOGETHER = 2, // and in updates, of each of four arrays
};

// Elements of all arrays that a thread takes at a time.
template <int N> struct adamw_packs {
    struct pack<float, N> grad, m, v, param;
};

template <int N>
static __device__ __forceinline__ void adamw_load(struct adamw_packs<N> &p, const struct adamw &op,
                                                  int64_t first)
{
    p.grad = pack_load<N>(op.grad + first);
    p.m = pack_load<N>(op.m + first);
    p.v = pack_load<N>(op.v + first);
    p.param = pack_load<N>(op.param + first);
}

template <int N, typename Copy>
static __device__ __forceinline__ void
adamw_store(const struct adamw_packs<N> &p, const struct adamw &op, const struct adamw_factors &f,
            Copy *copy, int64_t first)
{
    float mean[N], square[N], param[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        float g = f.grad * pack_value(p.grad, i);
        mean[i] = f.beta1 * pack_value(p.m, i) + f.one_beta1 * g;
        square[i] = f.beta2 * pack_value(p.v, i) + f.one_beta2 * g * g;
        param[i] = pack_value(p.param, i) * f.keep -
                   f.step * mean[i] / (sqrtf(square[i] / f.correction2) + f.eps);
    }
    store_values<N>(op.m + first, mean);
    store_values<N>(op.v + first, square);
    store_values<N>(op.param + first, param);
    if (copy != NULL)
        store_values<N>(copy + first, param);
}

// A CTA takes ADAMW_TOGETHER packs of N elements for each thread; the first threads of the first one also
// take the elements after the last whole pack.
template <int N, typename Copy>
static __global__ void __launch_bounds__(THREADS)
    adamw_kernel(struct adamw op, struct adamw_factors f, Copy *copy)
{
    int64_t first = ((int64_t)blockIdx.x * (ADAMW_TOGETHER * THREADS) + threadIdx.x) * N;
    int64_t left = op.count - op.count % N + threadIdx.x;
    struct adamw_packs<N> p[ADAMW_TOGETHER];
#pragma unroll
    for (int t = 0; t < ADAMW_TOGETHER; t++)
        if (first + t * (THREADS * N) + N <= op.count)
            adamw_load(p[t], op, first + t * (THREADS * N));
#pragma unroll
    for (int t = 0; t < ADAMW_TOGETHER; t++)
        if (first + t * (THREADS * N) + N <= op.count)
            adamw_store(p[t], op, f, copy, first + t * (THREADS * N));
    if (blockIdx.x == 0 && left < op.count) {
        struct adamw_packs<1> one;
        adamw_load(one, op, left);
        adamw_store(one, op, f, copy, left);
    }
}

template <typename Copy> static void adamw_launch(struct stream *stream, const struct adamw *op)
{
    struct adamw_factors factors = adamw_factors_make(op);
    Copy *copy = (Copy *)op->copy;
    bool packs = packs_at(op->param) && packs_at(op->m) && packs_at(op->v) && packs_at(op->grad) &&
                 packs_at(copy);
    int64_t elements = (int64_t)THREADS * ADAMW_TOGETHER * (packs ? PACK : 1); // of a CTA
    unsigned grid = grid_size(divide_up(op->count, elements));
    if (packs)
        adamw_kernel<PACK><<<grid, THREADS, 0, stream->cuda>>>(*op, factors, copy);
    else
        adamw_kernel<1><<<grid, THREADS, 0, stream->cuda>>>(*op, factors, copy);
    launch_check();
}

// A thread for ADAMW_TOGETHER packs.
void adamw_cuda(struct stream *stream, const struct adamw *op)
{
    BUG_UNLESS(op->step > 0);
    if (op->count == 0)
        return;
    if (op->copy != NULL && is_bf16(op->copy_type))
        adamw_launch<bf16_t>(stream, op);
    else
        adamw_launch<float>(stream, op);
}

// scratch[part] = sum over elements [part * size, (part + 1) * size), in fp64 from the first product
// on: squares of finite gradients overflow fp32. Parts begin at whole packs.
template <int N>
static __global__ void __launch_bounds__(THREADS, 4)
    squares_kernel(struct sum_squares op, int64_t size)
{
    int64_t first = blockIdx.x * size;
    int64_t end = first + size < op.count ? first + size : op.count;
    double sums[TOGETHER] = {};
    for (int64_t base = first + threadIdx.x * N; base < end; base += TOGETHER * THREADS * N) {
        struct pack<float, N> x[TOGETHER];
#pragma unroll
        for (int t = 0; t < TOGETHER; t++) {
            int64_t at = base + t * (THREADS * N);
            x[t] = at + N <= end ? pack_load<N>(op.x + at) : pack_zero<float, N>();
        }
#pragma unroll
        for (int t = 0; t < TOGETHER; t++)
#pragma unroll
            for (int i = 0; i < N; i++)
                sums[t] += (double)pack_value(x[t], i) * (double)pack_value(x[t], i);
    }
    int64_t left = first < end ? end - (end - first) % N + threadIdx.x : end; // after whole packs
    if (left < end)
        sums[0] += (double)op.x[left] * (double)op.x[left];
    double sum = block_sum<THREADS>((sums[0] + sums[1]) + (sums[2] + sums[3]));
    if (threadIdx.x == 0)
        op.scratch[blockIdx.x] = sum;
}

static __global__ void squares_total_kernel(struct sum_squares op)
{
    double sum = 0.0;
    for (int part = threadIdx.x; part < SUM_SQUARES_PARTS; part += THREADS)
        sum += op.scratch[part];
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0)
        op.result[0] = sum;
}

// A CTA for each of SUM_SQUARES_PARTS parts, which the count alone fixes; then one CTA.
void sum_squares_cuda(struct stream *stream, const struct sum_squares *op)
{
    enum { N = PACK_BYTES / sizeof(float) };
    int64_t size = round_up(divide_up(op->count, SUM_SQUARES_PARTS), N);
    if (packs_at(op->x))
        squares_kernel<N><<<SUM_SQUARES_PARTS, THREADS, 0, stream->cuda>>>(*op, size);
    else
        squares_kernel<1><<<SUM_SQUARES_PARTS, THREADS, 0, stream->cuda>>>(*op, size);
    launch_check();
    squares_total_kernel<<<1, THREADS, 0, stream->cuda>>>(*op);
    launch_check();
}

// Rows of `to`, see struct convert; width 0: packed.
struct convert_rows {
    unsigned width, stride;
};

static __device__ __forceinline__ int64_t convert_place(struct convert_rows rows, int64_t i)
{
    if (rows.width == 0)
        return i;
    return (int64_t)((unsigned)i / rows.width) * rows.stride + (unsigned)i % rows.width;
}

// A CTA takes TOGETHER packs of N elements for each thread; the first threads of the first one also take
// the elements after the last whole pack.
template <int N, typename To, typename From>
static __global__ void __launch_bounds__(THREADS)
    convert_kernel(To *to, const From *from, int64_t count, struct convert_rows rows)
{
    int64_t first = ((int64_t)blockIdx.x * (TOGETHER * THREADS) + threadIdx.x) * N;
    int64_t left = count - count % N + threadIdx.x;
    struct pack<From, N> x[TOGETHER];
#pragma unroll
    for (int t = 0; t < TOGETHER; t++)
        if (first + t * (THREADS * N) + N <= count)
            x[t] = pack_load<N>(from + first + t * (THREADS * N));
#pragma unroll
    for (int t = 0; t < TOGETHER; t++) {
        float value[N];
#pragma unroll
        for (int i = 0; i < N; i++)
            value[i] = pack_value(x[t], i);
        if (first + t * (THREADS * N) + N <= count)
            store_values<N>(to + convert_place(rows, first + t * (THREADS * N)), value);
    }
    if (blockIdx.x == 0 && left < count)
        store(to, convert_place(rows, left), load(from, left));
}

template <typename To, typename From>
static void convert_launch(struct stream *stream, const struct convert *op)
{
    To *to = (To *)op->to;
    const From *from = (const From *)op->from;
    struct convert_rows rows = {(unsigned)op->width, (unsigned)op->to_stride};
    BUG_UNLESS(op->width == 0 || (op->count % op->width == 0 && op->count <= INT32_MAX &&
                                  op->to_stride <= INT32_MAX));
    enum { N = pack_of<To, From>::N };
    bool packs =
        packs_at(to) && packs_at(from) && packs_in(op->width, N) && packs_in(op->to_stride, N);
    int64_t elements = (int64_t)THREADS * TOGETHER * (packs ? (int)N : 1); // of a CTA
    unsigned grid = grid_size(divide_up(op->count, elements));
    if (packs)
        convert_kernel<N><<<grid, THREADS, 0, stream->cuda>>>(to, from, op->count, rows);
    else
        convert_kernel<1><<<grid, THREADS, 0, stream->cuda>>>(to, from, op->count, rows);
    launch_check();
}

// A thread for TOGETHER packs.
void convert_cuda(struct stream *stream, const struct convert *op)
{
    bool from = is_bf16(op->from_type), to = is_bf16(op->to_type);
    if (op->count == 0)
        return;
    if (from && to)
        convert_launch<bf16_t, bf16_t>(stream, op);
    else if (from)
        convert_launch<float, bf16_t>(stream, op);
    else if (to)
        convert_launch<bf16_t, float>(stream, op);
    else
        convert_launch<float, float>(stream, op);
}
