// Owns the elementwise ops of Muon on CUDA.
#include "kernels/muon.h"

#include <math.h>

#include "kernels/cuda_packs.cuh"

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
