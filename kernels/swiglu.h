// y = silu(gate) * up, silu(g) = g / (1 + exp(-g)); gate and up come side by side from one GEMM.
// y lies apart from gate_up. Backward may overwrite gate_up with its gradient, and dy with y: every
// element is read before its place is written. dy lies apart from dgate_up.
#ifndef KERNELS_SWIGLU_H
#define KERNELS_SWIGLU_H

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

struct swiglu {
    int64_t rows, width;
    enum dtype type;
    const void *gate_up; // [rows, 2 * width]: gate, then up
    void *y;        // [rows, width]; backward: computed again, may be dy itself; NULL: not wanted
    const void *dy; // [rows, width] backward
    void *dgate_up; // [rows, 2 * width] backward; may be gate_up itself, not a part of it
};

typedef void swiglu_forward_fn(struct stream *stream, const struct swiglu *op);
typedef void swiglu_backward_fn(struct stream *stream, const struct swiglu *op);
swiglu_forward_fn swiglu_forward_cpu, swiglu_forward_cuda;
swiglu_backward_fn swiglu_backward_cpu, swiglu_backward_cuda;

#ifdef __cplusplus
}
#endif
#endif
