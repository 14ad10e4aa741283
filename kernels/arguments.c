// Owns the checks and defaults of arguments that the backends share, and what both derive from them.
#include "kernels/arguments.h"

#include <math.h>

#include "base/log.h"

struct gemm gemm_with_strides(const struct gemm *gemm)
{
    struct gemm g = *gemm;
    BUG_UNLESS(g.a_type == g.b_type && g.k > 0);
    if (g.lda == 0)
        g.lda = g.transpose_a ? g.m : g.k;
    if (g.ldb == 0)
        g.ldb = g.transpose_b ? g.k : g.n;
    if (g.ldc == 0)
        g.ldc = g.n;
    if (g.parts == 0)
        g.parts = 1;
    if (g.part_stride == 0)
        g.part_stride = g.parts * g.n;
    if (g.parts > 1)
        BUG_UNLESS(g.k % g.parts == 0 && g.part_stride >= g.parts * g.n && g.part_sums != NULL &&
                   g.c_type == DTYPE_F32 && !g.transpose_a && g.beta == 0.0f);
    return g;
}

void softmax_loss_check(const struct softmax_loss *op)
{
    if (op->teacher == NULL)
        for (int i = 0; i < LOSS_TERM_COUNT; i++)
            BUG_UNLESS(i == LOSS_CE_DATA || op->weight[i] == 0.0f);
    if (op->gradient == op->student)
        BUG_UNLESS((size_t)op->gradient_stride * dtype_size(op->gradient_type) ==
                       (size_t)op->vocab * dtype_size(op->logits_type) &&
                   dtype_size(op->gradient_type) <= dtype_size(op->logits_type));
}

struct adamw_factors adamw_factors_make(const struct adamw *op)
{
    double correction1 = 1.0 - pow(op->beta1, (double)op->step);
    double correction2 = 1.0 - pow(op->beta2, (double)op->step);
    return (struct adamw_factors){
        .grad = (float)op->grad_scale,
        .beta1 = (float)op->beta1,
        .beta2 = (float)op->beta2,
        .one_beta1 = (float)(1.0 - op->beta1),
        .one_beta2 = (float)(1.0 - op->beta2),
        .keep = (float)(1.0 - op->lr * op->weight_decay),
        .step = (float)(op->lr / correction1),
        .correction2 = (float)correction2,
        .eps = (float)op->eps,
    };
}
