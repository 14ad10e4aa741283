// The elementwise parts of a Muon update (Jordan et al. 2024) of one matrix; its products are plain gemms:
//   g = grad_scale * grad; m = momentum m + (1 - momentum) g; u = momentum m + (1 - momentum) g
//   x = u / max(|u|, MUON_LEAST_NORM); products make x all but orthogonal; p = keep p - step x.
// The arrays of an op here lie apart from one another.
#ifndef KERNELS_MUON_H
#define KERNELS_MUON_H

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MUON_LEAST_NORM 1e-7

struct muon_momentum {
    int64_t count;
    float *grad; // [count] fp32; becomes u, the momentum as Nesterov looks ahead
    float *m;    // [count] fp32, updated in place
    double momentum, grad_scale;
};

struct muon_normalise {
    int64_t count;
    const float *from;     // [count] u
    const double *squares; // [1] |u|^2, backend memory
    void *to;              // [count] x
    enum dtype to_type;    // fp32 or bf16
};

struct muon_update {
    int64_t count;
    float *param;  // [count] fp32, updated in place
    const void *x; // [count] in x_type
    enum dtype x_type;
    void *copy; // [count] the parameters in copy_type after the update; NULL: none
    enum dtype copy_type;
    double keep, step;
};

typedef void muon_momentum_fn(struct stream *stream, const struct muon_momentum *op);
typedef void muon_normalise_fn(struct stream *stream, const struct muon_normalise *op);
typedef void muon_update_fn(struct stream *stream, const struct muon_update *op);
muon_momentum_fn muon_momentum_cpu, muon_momentum_cuda;
muon_normalise_fn muon_normalise_cpu, muon_normalise_cuda;
muon_update_fn muon_update_cpu, muon_update_cuda;

#ifdef __cplusplus
}
#endif
#endif
