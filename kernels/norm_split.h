// The gradient of a matrix M behind a norm, and of the norm's weight w, from one product. For rows n of unit mean
// square, y = n w and z = y M^T, sums = dz^T n gives both: dM = sums with column c times w[c], and dw[c] is the sum
// over column c of M times sums. So a norm whose input wants no gradient needs no gradient of y.
#ifndef KERNELS_NORM_SPLIT_H
#define KERNELS_NORM_SPLIT_H

#include <stdbool.h>

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

struct norm_split {
    int64_t rows, width; // of M: outputs, and the norm's width
    const float *sums;   // [rows, width], packed
    const float *weight; // [width] w
    const void *matrix;  // [rows, width], rows matrix_stride elements apart
    int64_t matrix_stride;
    enum dtype type; // of matrix
    float *dmatrix;  // [rows, width] = or (add) +=, rows dmatrix_stride elements apart
    int64_t dmatrix_stride;
    bool add;
    float *dweight; // [width], added to
    float *scratch; // [RMS_NORM_PARTS, width] fp32, for deterministic column sums
};

typedef void norm_split_fn(struct stream *stream, const struct norm_split *op);
norm_split_fn norm_split_cpu, norm_split_cuda;

#ifdef __cplusplus
}
#endif
#endif
