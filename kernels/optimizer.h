// One AdamW update (Loshchilov and Hutter 2019; the order of operations is PyTorch's):
//   g = grad_scale * grad; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p *= 1 - lr decay;
//   p -= lr / correction1 * m / (sqrt(v / correction2) + eps), correction_i = 1 - b_i^step.
// The arrays of an op here lie apart from one another.
#ifndef KERNELS_OPTIMIZER_H
#define KERNELS_OPTIMIZER_H

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

struct adamw {
    int64_t count;
    float *param, *m, *v; // [count] fp32, updated in place
    const float *grad;    // [count]
    void *copy;           // [count] the parameters in copy_type after the update; NULL: none
    enum dtype copy_type;
    double lr, beta1, beta2, eps, weight_decay, grad_scale;
    int64_t step; // from 1
};

// result[0] = sum of x^2 in fp64, same order of additions for the same count and threads.
struct sum_squares {
    int64_t count;
    const float *x;
    double *result;  // [1], backend memory
    double *scratch; // [SUM_SQUARES_PARTS]
};
enum { SUM_SQUARES_PARTS = 1024 };

// to[i] = from[i] in another dtype. With a width, `to` has rows of width elements, to_stride apart.
struct convert {
    int64_t count;
    int64_t width, to_stride; // width 0: packed; else it divides count
    const void *from;
    void *to;
    enum dtype from_type, to_type;
};

typedef void adamw_fn(struct stream *stream, const struct adamw *op);
typedef void sum_squares_fn(struct stream *stream, const struct sum_squares *op);
typedef void convert_fn(struct stream *stream, const struct convert *op);
adamw_fn adamw_cpu, adamw_cuda;
sum_squares_fn sum_squares_cpu, sum_squares_cuda;
convert_fn convert_cpu, convert_cuda;

#ifdef __cplusplus
}
#endif
#endif
