// What every backend asks of an op's arguments and derives from them before it computes.
#ifndef KERNELS_ARGUMENTS_H
#define KERNELS_ARGUMENTS_H

#include "kernels/gemm.h"
#include "kernels/optimizer.h"
#include "kernels/softmax_loss.h"

#ifdef __cplusplus
extern "C" {
#endif

// The same product with packed strides filled in where they are 0, and 1 for no parts.
struct gemm gemm_with_strides(const struct gemm *gemm);
// Without a teacher only ce_data has weight; a gradient over the logits keeps their rows.
void softmax_loss_check(const struct softmax_loss *op);

// What an update multiplies by, rounded once for both backends: param = keep param - step mean /
// (sqrt(square / correction2) + eps).
struct adamw_factors {
    float grad, beta1, beta2, one_beta1, one_beta2, keep, step, correction2, eps;
};
struct adamw_factors adamw_factors_make(const struct adamw *op);

#ifdef __cplusplus
}
#endif
#endif
