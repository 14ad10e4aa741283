// Pieces that the layers of every drafter are made of: products with weights and their gradients, norms,
// rotations, and where a tensor's weights and gradients are.
#ifndef DRAFTER_LAYER_H
#define DRAFTER_LAYER_H

#include "drafter/drafter_options.h"

// Weights and gradients of a tensor; a matrix [rows, columns], or columns of a wider one.
struct layer_tensor {
    const void *weight; // a matrix in compute dtype, a norm in fp32
    float *grad;
    int64_t rows, columns;
    int64_t stride; // elements between rows; 0: packed
};

// What is the same for all of them.
struct layer_ops {
    enum dtype type; // compute dtype
    float eps;
    int64_t head_dim;
    const float *cos, *sin; // [table_rows, head_dim / 2]
    int64_t table_rows;
    float *norm_scratch; // [RMS_NORM_PARTS, widest norm]; unread forward
};

// A parameter by its name, and one of layer l.
struct layer_tensor layer_find(const struct drafter_options *options, const char *name);
struct layer_tensor layer_find_in(const struct drafter_options *options, int64_t l,
                                  const char *name);
// Backend memory for [rows, columns], of layer l or (l < 0) of none.
void *layer_take(struct arena *arena, const char *group, int64_t l, const char *name,
                 enum dtype type, int64_t rows, int64_t columns);
// Pointer `elements` into an array of dtype.
const void *layer_at(const void *base, enum dtype type, int64_t elements);
void *layer_at_mutable(void *base, enum dtype type, int64_t elements);

// out[rows, weight.rows] = in[rows, weight.columns] weight^T; with add (fp32, may be out) out is fp32
void layer_linear(const struct layer_ops *ops, const struct backend *backend, struct stream *stream,
                  int64_t rows, const void *in, const struct layer_tensor *weight, const void *add,
                  void *out);
// weight.grad = (fresh) or += dout^T in
void layer_weight_backward(const struct layer_ops *ops, const struct backend *backend,
                           struct stream *stream, int64_t rows, const void *dout, const void *in,
                           const struct layer_tensor *weight, bool fresh);
// din[rows, columns] = dout weight
void layer_input_backward(const struct layer_ops *ops, const struct backend *backend,
                          struct stream *stream, int64_t rows, const void *dout,
                          const struct layer_tensor *weight, void *din);

struct rms_norm layer_norm(const struct layer_ops *ops, int64_t rows, const void *x,
                           enum dtype x_type, const struct layer_tensor *norm, void *y,
                           float *rstd);
// dx = or (add) += what dy gives; adds to the norm's gradient.
void layer_norm_backward(const struct layer_ops *ops, const struct backend *backend,
                         struct stream *stream, int64_t rows, const void *x, enum dtype x_type,
                         float *rstd, const struct layer_tensor *norm, const void *dy, void *dx,
                         bool add);
// x: rows of heads, stride elements apart; y packed. A norm without weight is none.
struct norm_rope layer_norm_rope(const struct layer_ops *ops, int64_t rows, int64_t heads,
                                 const void *x, int64_t stride, const struct layer_tensor *norm,
                                 const int32_t *positions, void *y);

// Rotary table into cos and sin [rows, head_dim / 2] of the backend.
void layer_fill_rope(const struct drafter_sizes *sizes, int64_t rows, const struct backend *backend,
                     struct stream *stream, float *cos, float *sin);

#endif
