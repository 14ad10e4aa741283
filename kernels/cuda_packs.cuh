// Launches of elementwise ops: an Op says what a thread loads and stores of N elements at a place.
#ifndef KERNELS_CUDA_PACKS_CUH
#define KERNELS_CUDA_PACKS_CUH

#include "kernels/cuda_vector.cuh"

enum {
    THREADS = 256,
    PACK = 4,     // elements: 16 bytes of fp32, 8 of bf16
    TOGETHER = 2, // packs of a thread that are on their way, of each array
};

// Where a thread's packs begin.
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

#endif
