// Owns the gated activation on CUDA.
#include "kernels/swiglu.h"

#include "kernels/cuda_internal.cuh"

enum { THREADS = 256 };

template <typename Type> static __global__ void forward_kernel(struct swiglu op)
{
    int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (at >= op.rows * op.width)
        return;
    int64_t row = at / op.width, i = at % op.width;
    const Type *gate_up = (const Type *)op.gate_up + row * 2 * op.width;
    float gate = load(gate_up, i), up = load(gate_up, op.width + i);
    float sigmoid = 1.0f / (1.0f + expf(-gate));
    store((Type *)op.y, at, gate * sigmoid * up);
}

// dgate_up may be gate_up: a thread reads its two elements before it writes them.
// d silu(g)/dg = s (1 + g (1 - s))
template <typename Type> static __global__ void backward_kernel(struct swiglu op)
{
    int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (at >= op.rows * op.width)
        return;
    int64_t row = at / op.width, i = at % op.width;
    const Type *gate_up = (const Type *)op.gate_up + row * 2 * op.width;
    Type *dgate_up = (Type *)op.dgate_up + row * 2 * op.width;
    float g = load(gate_up, i), up = load(gate_up, op.width + i),
          dy = load((const Type *)op.dy, at);
    float s = 1.0f / (1.0f + expf(-g));
    store(dgate_up, i, dy * up * (s * (1.0f + g * (1.0f - s))));
    store(dgate_up, op.width + i, dy * (g * s));
}

// One thread an element of y.
void swiglu_forward_cuda(struct stream *stream, const struct swiglu *op)
{
    if (op->rows == 0)
        return;
    unsigned grid = grid_size(divide_up(op->rows * op->width, THREADS));
    if (is_bf16(op->type))
        forward_kernel<bf16_t><<<grid, THREADS, 0, stream->cuda>>>(*op);
    else
        forward_kernel<float><<<grid, THREADS, 0, stream->cuda>>>(*op);
    launch_check();
}

// One thread an element of dy.
void swiglu_backward_cuda(struct stream *stream, const struct swiglu *op)
{
    if (op->rows == 0)
        return;
    unsigned grid = grid_size(divide_up(op->rows * op->width, THREADS));
    if (is_bf16(op->type))
        backward_kernel<bf16_t><<<grid, THREADS, 0, stream->cuda>>>(*op);
    else
        backward_kernel<float><<<grid, THREADS, 0, stream->cuda>>>(*op);
    launch_check();
}
