// The table of ops. Each op is named once, in KERNEL_LIST; from it come the struct, the two tables,
// the check that no entry is missing, the check that every op has a test case, and the benchmark list.
#ifndef KERNELS_KERNELS_H
#define KERNELS_KERNELS_H

#include "kernels/attention.h"
#include "kernels/attention_diagonal.h"
#include "kernels/average.h"
#include "kernels/backend.h"
#include "kernels/gemm.h"
#include "kernels/muon.h"
#include "kernels/norm_chain.h"
#include "kernels/norm_rope.h"
#include "kernels/norm_split.h"
#include "kernels/optimizer.h"
#include "kernels/rms_norm.h"
#include "kernels/rows.h"
#include "kernels/softmax_loss.h"
#include "kernels/swiglu.h"
#include "kernels/vocab.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KERNEL_LIST(X)                                                                             \
    X(gemm)                                                                                        \
    X(rms_norm_forward)                                                                            \
    X(rms_norm_backward)                                                                           \
    X(norm_rope_forward)                                                                           \
    X(norm_rope_backward)                                                                          \
    X(norm_chain)                                                                                  \
    X(norm_chain_backward)                                                                         \
    X(norm_split)                                                                                  \
    X(swiglu_forward)                                                                              \
    X(swiglu_backward)                                                                             \
    X(gather_rows)                                                                                 \
    X(scatter_rows)                                                                                \
    X(add_rows)                                                                                    \
    X(sum_rows)                                                                                    \
    X(gather_sum)                                                                                  \
    X(clear_rows)                                                                                  \
    X(context_load)                                                                                \
    X(attention_forward)                                                                           \
    X(attention_backward)                                                                          \
    X(diagonal_forward)                                                                            \
    X(diagonal_backward)                                                                           \
    X(softmax_loss)                                                                                \
    X(vocab_scan)                                                                                  \
    X(draft_overlap)                                                                               \
    X(mask_rows)                                                                                   \
    X(adamw)                                                                                       \
    X(sum_squares)                                                                                 \
    X(muon_momentum)                                                                               \
    X(muon_normalise)                                                                              \
    X(muon_update)                                                                                 \
    X(average)                                                                                     \
    X(exchange)                                                                                    \
    X(convert)

struct kernels {
#define KERNEL_MEMBER(op) op##_fn *op;
    KERNEL_LIST(KERNEL_MEMBER)
#undef KERNEL_MEMBER
};

extern const struct kernels kernels_cpu;
extern const struct kernels kernels_cuda; // only where CUDA is built in

#ifdef __cplusplus
}
#endif
#endif
