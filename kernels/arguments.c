// Owns the checks and defaults of arguments that the backends share.
#include "kernels/arguments.h"

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
