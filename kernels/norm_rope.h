// Queries and keys on their way to attention: RMS norm per head (q_norm, k_norm; optional), then the
// rotary embedding in rotate-half form over the full head:
//   y[i] = n[i] cos - n[i + d/2] sin, y[i + d/2] = n[i + d/2] cos + n[i] sin, i < d/2.
#ifndef KERNELS_NORM_ROPE_H
#define KERNELS_NORM_ROPE_H

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

struct norm_rope {
    int64_t rows, heads, head_dim;
    float eps;
    enum dtype type;
    const void *x;            // [rows, heads, head_dim], rows x_stride apart
    int64_t x_stride;         // elements
    const float *weight;      // [head_dim] fp32 as in rms_norm.h; NULL: no norm
    const int32_t *positions; // [rows], below table_rows
    const float *cos, *sin;   // [table_rows, head_dim / 2], scaling included
    int64_t table_rows;
    void *y; // [rows, heads, head_dim], packed (forward); may be x when that is packed, too

    // backward only
    const void *dy; // [rows, heads, head_dim], packed; fp32 when dy_type says so
    enum dtype dy_type;
    void *dx; // like x, rows dx_stride apart; overwritten. May be x when the strides are the same
    int64_t dx_stride;
    float *dweight; // [head_dim], added to; NULL with weight NULL
    float *scratch; // [RMS_NORM_PARTS, head_dim] fp32
};

typedef void norm_rope_forward_fn(struct stream *stream, const struct norm_rope *op);
typedef void norm_rope_backward_fn(struct stream *stream, const struct norm_rope *op);
norm_rope_forward_fn norm_rope_forward_cpu, norm_rope_forward_cuda;
norm_rope_backward_fn norm_rope_backward_cpu, norm_rope_backward_cuda;

#ifdef __cplusplus
}
#endif
#endif
