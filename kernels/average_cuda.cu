// Owns the moving average of parameters on CUDA.
#include "kernels/average.h"

#include "kernels/cuda_packs.cuh"

template <int Pack> struct average_op {
    enum { N = Pack };
    float *average;
    const float *x;
    float share;

    template <int n> struct in {
        struct pack<float, n> average, x;
    };

    template <int n> __device__ __forceinline__ in<n> load(int64_t at) const
    {
        return {pack_load<n>(average + at), pack_load<n>(x + at)};
    }

    template <int n> __device__ __forceinline__ void store(int64_t at, const in<n> &in) const
    {
        float value[n];
#pragma unroll
        for (int i = 0; i < n; i++) {
            float old = pack_value(in.average, i);
            value[i] = old + share * (pack_value(in.x, i) - old);
        }
        store_values<n>(average + at, value);
    }
};

void average_cuda(struct stream *stream, const struct average *op)
{
    float share = (float)op->share;
    if (op->count == 0)
        return;
    if (packs_at(op->average) && packs_at(op->x))
        packs_launch(stream, average_op<PACK>{op->average, op->x, share}, op->count);
    else
        packs_launch(stream, average_op<1>{op->average, op->x, share}, op->count);
}

template <int Pack> struct exchange_op {
    enum { N = Pack };
    float *a, *b;

    template <int n> struct in {
        struct pack<float, n> a, b;
    };

    template <int n> __device__ __forceinline__ in<n> load(int64_t at) const
    {
        return {pack_load<n>(a + at), pack_load<n>(b + at)};
    }

    template <int n> __device__ __forceinline__ void store(int64_t at, const in<n> &in) const
    {
        pack_store(a + at, in.b);
        pack_store(b + at, in.a);
    }
};

void exchange_cuda(struct stream *stream, const struct exchange *op)
{
    if (op->count == 0)
        return;
    if (packs_at(op->a) && packs_at(op->b))
        packs_launch(stream, exchange_op<PACK>{op->a, op->b}, op->count);
    else
        packs_launch(stream, exchange_op<1>{op->a, op->b}, op->count);
}
