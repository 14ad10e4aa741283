// RMS norm (rms_norm.h) of rows that lie apart, in fp32 and rounded, and a second norm of the first one's fp32 output:
// what a step of EAGLE-3 hands to the next one. Outputs lie apart from x and from each other. And back.
#ifndef KERNELS_NORM_CHAIN_H
#define KERNELS_NORM_CHAIN_H

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

struct norm_chain {
    int64_t rows, width;
    float eps;
    enum dtype x_type, type; // of x: fp32 or that of narrow and second, fp32 or bf16
    const void *x;           // [rows or x_rows, width], rows x_stride elements apart
    int64_t x_stride;
    const int32_t *index; // [rows] which row of x, each in [0, x_rows); NULL: 0, 1, 2, ...
    int64_t x_rows;       // unread without an index
    float *copy;          // [rows, width] the rows of x; NULL: not wanted
    const float *weight;  // [width]
    float *wide;          // [rows, width] y = norm(x); NULL: not wanted
    void *narrow; // [rows, width] y in type, rows narrow_stride elements apart; NULL: not wanted
    int64_t narrow_stride;
    float *rstd;                // [rows]; NULL: not kept
    const float *second_weight; // [width]; NULL: no second norm
    void *second;               // [rows, width] norm(y)
    float *second_rstd;         // [rows]
};

// Of both norms, x in fp32: y is made again from x, and its gradient is dy, more, and what dsecond gives.
struct norm_chain_gradient {
    int64_t rows, width;
    enum dtype type;                          // of all gradients
    const float *x;                           // [rows, width]
    const float *weight, *rstd;               // [width], [rows] of the first norm
    const float *second_weight, *second_rstd; // of the second
    const void *dsecond;                      // [rows, width]
    const void *dy, *more;                    // [rows, width]
    void *dx;                                 // [rows, width]; may be dy or more
    float *dweight, *second_dweight;          // [width], added to
    float *scratch; // [RMS_NORM_PARTS, width], for deterministic column sums
};

typedef void norm_chain_fn(struct stream *stream, const struct norm_chain *op);
typedef void norm_chain_backward_fn(struct stream *stream, const struct norm_chain_gradient *op);
norm_chain_fn norm_chain_cpu, norm_chain_cuda;
norm_chain_backward_fn norm_chain_backward_cpu, norm_chain_backward_cuda;

#ifdef __cplusplus
}
#endif
#endif
