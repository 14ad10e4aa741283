// Owns the elementwise ops of Muon on CUDA.
#include "kernels/muon.h"

#include <math.h>

#include "kernels/cuda_vector.cuh"

enum {
    THREADS = 256,
    PACK = 4,     // elements: 16 bytes of fp32, 8 of bf16
    TOGETHER = 2, // packs of a thread that are on their way, of each array
};

// Where a thread's packs begin, and whether the pack at `at` is whole.
template <int N> static __device__ __forceinline__ int64_t first_pack(void)
{
    return ((int64_t)blockIdx.x * (TOGETHER * THREADS) + threadIdx.x) * N;
}

// Of a whole launch: a CTA takes TOGETHER packs of N elements for each thread, and the first threads of the
// first one also take the elements after the last whole pack.
template <typename Op>
static __global__ void __launch_bounds__(THREADS) packs_kernel(Op op, int64_t count)
{
    enum { N = Op::N };
    int64_t first = first_pack<N>(), left = count - count % N + threadIdx.x;
    typename Op::template in<N> x[TOGETHER];
#pragma unroll
    for (int t = 0; t < TOGETHER; t++)
        if (first + t * (THREADS * N) + N <= count)
            x[t] = op.template load<N>(first + t * (THREADS * N));
#pragma unroll
    for (int t = 0; t < TOGETHER; t++)
        if (first + t * (THREADS * N) + N <= count)
            op.template store<N>(first + t * (THREADS * N), x[t]);
    if (blockIdx.x == 0 && left < count)
        op.template store<1>(left, op.template load<1>(left));
}

template <typename Op> static void packs_launch(struct stream *stream, const Op &op, int64_t count)
{
    unsigned grid = grid_size(divide_up(count, (int64_t)THREADS * TOGETHER * Op::N));
    packs_kernel<Op><<<grid, THREADS, 0, stream->cuda>>>(op, count);
    launch_check();
}

template <int Pack> struct momentum_op {
    enum { N = Pack };
    float *grad, *m;
    float scale, momentum, one_momentum;

    template <int n> struct in {
        struct pack<float, n> grad, m;
    };

    template <int n> __device__ __forceinline__ in<n> load(int64_t at) const
    {
        return {pack_load<n>(grad + at), pack_load<n>(m + at)};
    }

    template <int n> __device__ __forceinline__ void store(int64_t at, const in<n> &x) const
    {
        float mean[n], ahead[n];
#pragma unroll
        for (int i = 0; i < n; i++) {
            float g = one_momentum * (scale * pack_value(x.grad, i));
            mean[i] = momentum * pack_value(x.m, i) + g;
            ahead[i] = momentum * mean[i] + g;
        }
        store_values<n>(m + at, mean);
        store_values<n>(grad + at, ahead);
    }
};

void muon_momentum_cuda(struct stream *stream, const struct muon_momentum *op)
{
    float scale = (float)op->grad_scale, momentum = (float)op->momentum;
    float one_momentum = (float)(1.0 - op->momentum);
    if (op->count == 0)
        return;
    if (packs_at(op->grad) && packs_at(op->m))
        packs_launch(stream, momentum_op<PACK>{op->grad, op->m, scale, momentum, one_momentum},
                     op->count);
    else
        packs_launch(stream, momentum_op<1>{op->grad, op->m, scale, momentum, one_momentum},
                     op->count);
}

template <int Pack, typename To> struct normalise_op {
    enum { N = Pack };
    const float *from;
    const double *squares;
    To *to;

    template <int n> struct in {
        struct pack<float, n> x;
    };

    template <int n> __device__ __forceinline__ in<n> load(int64_t at) const
    {
        return {pack_load<n>(from + at)};
    }

    template <int n> __device__ __forceinline__ void store(int64_t at, const in<n> &x) const
    {
        float factor = (float)(1.0 / fmax(sqrt(*squares), MUON_LEAST_NORM)), value[n];
#pragma unroll
        for (int i = 0; i < n; i++)
            value[i] = pack_value(x.x, i) * factor;
        store_values<n>(to + at, value);
    }
};

template <typename To>
static void normalise_launch(struct stream *stream, const struct muon_normalise *op)
{
    To *to = (To *)op->to;
    if (packs_at(op->from) && packs_at(to))
        packs_launch(stream, normalise_op<PACK, To>{op->from, op->squares, to}, op->count);
    else
        packs_launch(stream, normalise_op<1, To>{op->from, op->squares, to}, op->count);
}

void muon_normalise_cuda(struct stream *stream, const struct muon_normalise *op)
{
    if (op->count == 0)
        return;
    if (is_bf16(op->to_type))
        normalise_launch<bf16_t>(stream, op);
    else
        normalise_launch<float>(stream, op);
}

template <int Pack, typename From, typename Copy> struct update_op {
    enum { N = Pack };
    float *param;
    const From *x;
    Copy *copy; // NULL: none
    float keep, step;

    template <int n> struct in {
        struct pack<float, n> param;
        struct pack<From, n> x;
    };

    template <int n> __device__ __forceinline__ in<n> load(int64_t at) const
    {
        return {pack_load<n>(param + at), pack_load<n>(x + at)};
    }

    template <int n> __device__ __forceinline__ void store(int64_t at, const in<n> &in) const
    {
        float value[n];
#pragma unroll
        for (int i = 0; i < n; i++)
            value[i] = pack_value(in.param, i) * keep - step * pack_value(in.x, i);
        store_values<n>(param + at, value);
        if (copy != NULL)
            store_values<n>(copy + at, value);
    }
};

template <typename From, typename Copy>
static void update_launch(struct stream *stream, const struct muon_update *op)
{
    const From *x = (const From *)op->x;
    Copy *copy = (Copy *)op->copy;
    float keep = (float)op->keep, step = (float)op->step;
    if (packs_at(op->param) && packs_at(x) && packs_at(copy))
        packs_launch(stream, update_op<PACK, From, Copy>{op->param, x, copy, keep, step},
                     op->count);
    else
        packs_launch(stream, update_op<1, From, Copy>{op->param, x, copy, keep, step}, op->count);
}

void muon_update_cuda(struct stream *stream, const struct muon_update *op)
{
    bool from = is_bf16(op->x_type), copy = op->copy != NULL && is_bf16(op->copy_type);
    if (op->count == 0)
        return;
    if (from && copy)
        update_launch<bf16_t, bf16_t>(stream, op);
    else if (from)
        update_launch<bf16_t, float>(stream, op);
    else if (copy)
        update_launch<float, bf16_t>(stream, op);
    else
        update_launch<float, float>(stream, op);
}
