// The implementations of attention on CUDA, between which kernels/attention_cuda.cu chooses.
#ifndef KERNELS_ATTENTION_INTERNAL_CUH
#define KERNELS_ATTENTION_INTERNAL_CUH

#include "kernels/attention.h"
#include "kernels/cuda_internal.cuh"

enum { ATTENTION_MOST_HEAD_DIM = 512 };

// Any shape, in fp32 arithmetic.
attention_forward_fn attention_forward_plain;
attention_backward_fn attention_backward_plain;

// Tensor cores. The backward pass: delta, then dq and dk, dv in either order.
attention_forward_fn attention_forward_mma;
attention_backward_fn attention_delta, attention_dq, attention_dkv;

// The same on Hopper, by instructions of its own: where attention_fits_hopper(), which holds for shapes
// that the above take.
bool attention_fits_hopper(struct stream *stream, const struct attention *op);
attention_forward_fn attention_forward_hopper;
attention_backward_fn attention_dq_hopper, attention_dkv_hopper;

#endif
