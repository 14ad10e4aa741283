// Owns the pieces that layers of every drafter are made of. Does not own their order.
#include "drafter/layer.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/log.h"

const void *layer_at(const void *base, enum dtype type, int64_t elements)
{
    return (const unsigned char *)base + (size_t)elements * dtype_size(type);
}

void *layer_at_mutable(void *base, enum dtype type, int64_t elements)
{
    return (unsigned char *)base + (size_t)elements * dtype_size(type);
}

static int64_t norm_offset(const struct drafter_options *o, const struct param *param)
{
    return o->norms_packed ? param->norm_offset : param->offset;
}

struct layer_tensor layer_find(const struct drafter_options *o, const char *name)
{
    const struct param *param = params_find(o->params, name);
    if (param == NULL)
        BUG("no parameter %s", name);
    return (struct layer_tensor){
        .weight = param->norm ? (const void *)(o->norms + norm_offset(o, param))
                              : layer_at(o->weights, o->compute, param->offset),
        .grad = o->grads != NULL ? o->grads + param->offset : NULL,
        .rows = param->shape[0],
        .columns = param->dims == 2 ? param->shape[1] : 1,
    };
}

struct layer_tensor layer_find_in(const struct drafter_options *o, int64_t l, const char *name)
{
    char full[96];
    snprintf(full, sizeof(full), "layers.%lld.%s", (long long)l, name);
    return layer_find(o, full);
}

void *layer_take(struct arena *arena, const char *group, int64_t l, const char *name,
                 enum dtype type, int64_t rows, int64_t columns)
{
    char full[64];
    if (l < 0)
        snprintf(full, sizeof(full), "%s", name);
    else
        snprintf(full, sizeof(full), "layers.%lld.%s", (long long)l, name);
    return arena_take(arena, group, full, type, rows, columns, 1);
}

void layer_linear(const struct layer_ops *ops, const struct backend *backend, struct stream *stream,
                  int64_t rows, const void *in, const struct layer_tensor *weight, const void *add,
                  void *out)
{
    backend->kernels->gemm(stream, &(struct gemm){.m = rows,
                                                  .n = weight->rows,
                                                  .k = weight->columns,
                                                  .transpose_b = true,
                                                  .alpha = 1.0f,
                                                  .beta = add != NULL ? 1.0f : 0.0f,
                                                  .a = in,
                                                  .b = weight->weight,
                                                  .ldb = weight->stride,
                                                  .d = add,
                                                  .c = out,
                                                  .a_type = ops->type,
                                                  .b_type = ops->type,
                                                  .c_type = add != NULL ? DTYPE_F32 : ops->type});
}

void layer_weight_backward(const struct layer_ops *ops, const struct backend *backend,
                           struct stream *stream, int64_t rows, const void *dout, const void *in,
                           const struct layer_tensor *weight, bool fresh)
{
    backend->kernels->gemm(stream, &(struct gemm){.m = weight->rows,
                                                  .n = weight->columns,
                                                  .k = rows,
                                                  .transpose_a = true,
                                                  .alpha = 1.0f,
                                                  .beta = fresh ? 0.0f : 1.0f,
                                                  .a = dout,
                                                  .b = in,
                                                  .c = weight->grad,
                                                  .ldc = weight->stride,
                                                  .a_type = ops->type,
                                                  .b_type = ops->type,
                                                  .c_type = DTYPE_F32});
}

void layer_input_backward(const struct layer_ops *ops, const struct backend *backend,
                          struct stream *stream, int64_t rows, const void *dout,
                          const struct layer_tensor *weight, void *din)
{
    backend->kernels->gemm(stream, &(struct gemm){.m = rows,
                                                  .n = weight->columns,
                                                  .k = weight->rows,
                                                  .alpha = 1.0f,
                                                  .a = dout,
                                                  .b = weight->weight,
                                                  .ldb = weight->stride,
                                                  .c = din,
                                                  .a_type = ops->type,
                                                  .b_type = ops->type,
                                                  .c_type = ops->type});
}

struct rms_norm layer_norm(const struct layer_ops *ops, int64_t rows, const void *x,
                           enum dtype x_type, const struct layer_tensor *norm, void *y, float *rstd)
{
    return (struct rms_norm){.rows = rows,
                             .width = norm->rows,
                             .eps = ops->eps,
                             .type = ops->type,
                             .x_type = x_type,
                             .x = x,
                             .weight = norm->weight,
                             .y = y,
                             .rstd = rstd,
                             .dweight = norm->grad,
                             .scratch = ops->norm_scratch};
}

void layer_norm_backward(const struct layer_ops *ops, const struct backend *backend,
                         struct stream *stream, int64_t rows, const void *x, enum dtype x_type,
                         float *rstd, const struct layer_tensor *weight, const void *dy, void *dx,
                         bool add)
{
    struct rms_norm norm = layer_norm(ops, rows, x, x_type, weight, NULL, rstd);
    norm.dy = dy;
    norm.dx = dx;
    norm.dx_add = add;
    backend->kernels->rms_norm_backward(stream, &norm);
}

struct norm_rope layer_norm_rope(const struct layer_ops *ops, int64_t rows, int64_t heads,
                                 const void *x, int64_t stride, const struct layer_tensor *norm,
                                 const int32_t *positions, void *y)
{
    return (struct norm_rope){.rows = rows,
                              .heads = heads,
                              .head_dim = ops->head_dim,
                              .eps = ops->eps,
                              .type = ops->type,
                              .x = x,
                              .x_stride = stride,
                              .weight = norm->weight,
                              .positions = positions,
                              .cos = ops->cos,
                              .sin = ops->sin,
                              .table_rows = ops->table_rows,
                              .y = y,
                              .dweight = norm->grad,
                              .scratch = ops->norm_scratch};
}

void layer_fill_rope(const struct drafter_sizes *sizes, int64_t rows, const struct backend *backend,
                     struct stream *stream, float *cos, float *sin)
{
    size_t count = (size_t)(rows * sizes->head_dim / 2);
    float *table = memory_alloc(2 * count, sizeof(*table));
    drafter_rope_table(sizes, rows, table, table + count);
    backend->copy_in(stream, cos, table, count * sizeof(*table));
    backend->copy_in(stream, sin, table + count, count * sizeof(*table));
    backend->sync(stream);
    free(table);
}
