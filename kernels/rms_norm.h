// Root mean square norm over rows: y = x * rstd * (weight + weight_offset),
// rstd = 1 / sqrt(mean(x^2) + eps). (Zhang and Sennrich 2019.)
// Outputs may lie on inputs only where it is said: y on x, and dx on dy unless it is added to.
#ifndef KERNELS_RMS_NORM_H
#define KERNELS_RMS_NORM_H

#include <stdbool.h>

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

struct rms_norm {
    int64_t rows, width;
    float eps;
    float weight_offset; // 1 for norms stored as w - 1, else 0
    enum dtype type;     // of y and both gradients: fp32 or bf16
    enum dtype x_type;   // of x: the same, or fp32
    const void *x;       // [rows, width]
    const float *weight; // [width] fp32 always: rounding it would shift whole columns
    void *y;             // [rows, width] forward; may be x
    float *rstd;         // [rows] written forward (NULL: not kept), read backward

    // backward only
    const void *dy;      // [rows, width]
    void *dx;            // [rows, width]; may be dy when dx_add is false
    bool dx_add;         // dx += instead of dx =
    float *dweight;      // [width], added to; NULL: frozen
    float *scratch;      // [RMS_NORM_PARTS, width] fp32, for deterministic column sums
    const void *dx_from; // [rows, width] what dx_add adds to, apart from dx; NULL: dx
};
enum { RMS_NORM_PARTS = 256 };

typedef void rms_norm_forward_fn(struct stream *stream, const struct rms_norm *norm);
typedef void rms_norm_backward_fn(struct stream *stream, const struct rms_norm *norm);
rms_norm_forward_fn rms_norm_forward_cpu, rms_norm_forward_cuda;
rms_norm_backward_fn rms_norm_backward_cpu, rms_norm_backward_cuda;

#ifdef __cplusplus
}
#endif
#endif
