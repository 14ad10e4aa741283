// Owns the gated activation on CUDA.
#include "kernels/swiglu.h"

#include "kernels/cuda_vector.cuh"

enum {
    THREADS = 128,
    PACK = 8,    // elements: 16 bytes of bf16, twice as many of fp32
    TOGETHER = 2 // packs of a thread, all on their way before the first is used
};

// 1 / (1 + exp(-g)). The quotient is within 2 ulp; where exp overflows it is 0.
static __device__ __forceinline__ float sigmoid(float g)
{
    return __fdividef(1.0f, 1.0f + expf(-g));
}

// Pack `i` of a thread's packs, of all packs of y; false past the end.
template <int N> struct place {
    int64_t y, gate; // elements
    bool there;
};

template <int N>
static __device__ __forceinline__ struct place<N> place_of(const struct swiglu &op, unsigned packs,
                                                           int i) {
    struct place<N> place;
    unsigned at = blockIdx.x * (THREADS * TOGETHER) + i * THREADS + threadIdx.x;
    unsigned each = (unsigned)op.width / N, row = at / each;
    place.there = at < packs;
    place.y = (int64_t)at * N;
    place.gate = place.y + (int64_t)row * op.width; // rows of gate_up are twice as long
    return place;
}

template <typename Type, int N>
static __global__ void __launch_bounds__(THREADS) forward_kernel(struct swiglu op, unsigned packs)
{
    struct pack<Type, N> gate[TOGETHER], up[TOGETHER];
    struct place<N> place[TOGETHER];
#pragma unroll
    for (int t = 0; t < TOGETHER; t++) {
        place[t] = place_of<N>(op, packs, t);
        if (!place[t].there)
            continue;
        gate[t] = pack_load<N>((const Type *)op.gate_up + place[t].gate);
        up[t] = pack_load<N>((const Type *)op.gate_up + place[t].gate + op.width);
    }
#pragma unroll
    for (int t = 0; t < TOGETHER; t++) {
        float value[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            float g = pack_value(gate[t], i);
            value[i] = g * sigmoid(g) * pack_value(up[t], i);
        }
        if (place[t].there)
            store_values<N>((Type *)op.y + place[t].y, value);
    }
}

// dgate_up may be gate_up and y may be dy: a thread reads its elements before it writes them.
// d silu(g)/dg = s (1 + g (1 - s))
template <typename Type, int N>
static __global__ void __launch_bounds__(THREADS) backward_kernel(struct swiglu op, unsigned packs)
{
    struct pack<Type, N> gate[TOGETHER], up[TOGETHER], dy[TOGETHER];
    struct place<N> place[TOGETHER];
#pragma unroll
    for (int t = 0; t < TOGETHER; t++) {
        place[t] = place_of<N>(op, packs, t);
        if (!place[t].there)
            continue;
        gate[t] = pack_load<N>((const Type *)op.gate_up + place[t].gate);
        up[t] = pack_load<N>((const Type *)op.gate_up + place[t].gate + op.width);
        dy[t] = pack_load<N>((const Type *)op.dy + place[t].y);
    }
#pragma unroll
    for (int t = 0; t < TOGETHER; t++) {
        float dgate[N], dup[N], y[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            float g = pack_value(gate[t], i), d = pack_value(dy[t], i), s = sigmoid(g);
            dgate[i] = d * pack_value(up[t], i) * (s * (1.0f + g * (1.0f - s)));
            dup[i] = d * (g * s);
            y[i] = g * s * pack_value(up[t], i);
        }
        if (!place[t].there)
            continue;
        if (op.y != NULL)
            store_values<N>((Type *)op.y + place[t].y, y);
        store_values<N>((Type *)op.dgate_up + place[t].gate, dgate);
        store_values<N>((Type *)op.dgate_up + place[t].gate + op.width, dup);
    }
}

static bool in_packs(const struct swiglu *op)
{
    return packs_at(op->gate_up) && packs_at(op->y) && packs_at(op->dy) && packs_at(op->dgate_up) &&
           packs_in(op->width, PACK);
}

// Packs of y of n elements, and the CTAs for them.
static unsigned pack_count(const struct swiglu *op, int n, unsigned *grid)
{
    int64_t packs = op->rows * op->width / n;
    BUG_UNLESS(packs <= INT32_MAX);
    *grid = grid_size(divide_up(packs, THREADS * TOGETHER));
    return (unsigned)packs;
}

template <typename Type> static void forward_launch(struct stream *stream, const struct swiglu *op)
{
    bool vectors = in_packs(op);
    unsigned grid, packs = pack_count(op, vectors ? PACK : 1, &grid);
    if (vectors)
        forward_kernel<Type, PACK><<<grid, THREADS, 0, stream->cuda>>>(*op, packs);
    else
        forward_kernel<Type, 1><<<grid, THREADS, 0, stream->cuda>>>(*op, packs);
    launch_check();
}

template <typename Type> static void backward_launch(struct stream *stream, const struct swiglu *op)
{
    bool vectors = in_packs(op);
    unsigned grid, packs = pack_count(op, vectors ? PACK : 1, &grid);
    if (vectors)
        backward_kernel<Type, PACK><<<grid, THREADS, 0, stream->cuda>>>(*op, packs);
    else
        backward_kernel<Type, 1><<<grid, THREADS, 0, stream->cuda>>>(*op, packs);
    launch_check();
}

// A thread for TOGETHER packs of y.
void swiglu_forward_cuda(struct stream *stream, const struct swiglu *op)
{
    if (op->rows == 0)
        return;
    if (is_bf16(op->type))
        forward_launch<bf16_t>(stream, op);
    else
        forward_launch<float>(stream, op);
}

// A thread for TOGETHER packs of dy.
void swiglu_backward_cuda(struct stream *stream, const struct swiglu *op)
{
    if (op->rows == 0)
        return;
    if (is_bf16(op->type))
        backward_launch<bf16_t>(stream, op);
    else
        backward_launch<float>(stream, op);
}
