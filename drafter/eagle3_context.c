// Owns the EAGLE-3 drafter's context: from features to g and from token ids to the embedding's part of the
// first layer's products, and back.
#include "drafter/eagle3_internal.h"

#include <string.h>

#include "base/log.h"

// g = in fc^T in fp32; rows of in are stride elements apart.
static void fc_forward(const struct eagle3 *e, const struct backend *backend, struct stream *stream,
                       const void *in, int64_t stride)
{
    const struct layer_tensor *fc = &e->buffers->fc;
    enum dtype type = e->options.compute;
    backend->kernels->gemm(stream, &(struct gemm){.m = e->input.row->tokens,
                                                  .n = fc->rows,
                                                  .k = fc->columns,
                                                  .transpose_b = true,
                                                  .alpha = 1.0f,
                                                  .a = in,
                                                  .lda = stride,
                                                  .b = fc->weight,
                                                  .c = e->layers[0].context.x,
                                                  .a_type = type,
                                                  .b_type = type,
                                                  .c_type = DTYPE_F32});
}

// Of fc without a norm before it.
static void fc_backward(const struct eagle3 *e, const struct backend *backend,
                        struct stream *stream)
{
    const struct eagle3_buffers *b = e->buffers;
    enum dtype type = e->options.compute;
    backend->kernels->gemm(stream, &(struct gemm){.m = b->fc.rows,
                                                  .n = b->fc.columns,
                                                  .k = e->input.row->tokens,
                                                  .transpose_a = true,
                                                  .alpha = 1.0f,
                                                  .beta = e->fresh_context ? 0.0f : 1.0f,
                                                  .a = b->dx_context,
                                                  .b = e->input.fc_in,
                                                  .ldb = e->input.fc_stride,
                                                  .c = b->fc.grad,
                                                  .a_type = type,
                                                  .b_type = type,
                                                  .c_type = DTYPE_F32});
}

// Gradients of a matrix and of the norm before it, whose input wants none: dout [T, rows of the matrix], in [T, its
// columns] as it is before the norm's weight.
static void split_backward(const struct eagle3 *e, const struct backend *backend,
                           struct stream *stream, const void *dout, const void *in,
                           const struct layer_tensor *matrix, const struct layer_tensor *norm)
{
    const struct eagle3_buffers *b = e->buffers;
    struct layer_tensor sums = {.grad = b->sums, .rows = matrix->rows, .columns = matrix->columns};
    int64_t stride = matrix->stride > 0 ? matrix->stride : matrix->columns;
    layer_weight_backward(&e->ops, backend, stream, e->input.row->tokens, dout, in, &sums, true);
    backend->kernels->norm_split(stream, &(struct norm_split){.rows = matrix->rows,
                                                              .width = matrix->columns,
                                                              .sums = b->sums,
                                                              .weight = norm->weight,
                                                              .matrix = matrix->weight,
                                                              .matrix_stride = stride,
                                                              .type = e->options.compute,
                                                              .dmatrix = matrix->grad,
                                                              .dmatrix_stride = stride,
                                                              .add = !e->fresh_context,
                                                              .dweight = norm->grad,
                                                              .scratch = e->ops.norm_scratch});
}

// The norm without its weight.
static struct layer_tensor bare(const struct eagle3 *e, struct layer_tensor norm)
{
    norm.weight = e->buffers->ones;
    return norm;
}

// norm [T, its width]; what is behind it needs no gradient of its input, so nothing is kept for it.
static void norm_forward(const struct eagle3 *e, const struct backend *backend,
                         struct stream *stream, const void *x, const struct layer_tensor *norm,
                         void *y)
{
    struct rms_norm op =
        layer_norm(&e->ops, e->input.row->tokens, x, e->options.compute, norm, y, NULL);
    backend->kernels->rms_norm_forward(stream, &op);
}

// One feature under its norm, into rows `stride` elements apart.
static void norm_feature(const struct eagle3 *e, const struct backend *backend,
                         struct stream *stream, int64_t f, const struct layer_tensor *norm,
                         void *out, int64_t stride)
{
    enum dtype type = e->options.compute;
    int64_t h = e->options.sizes->hidden;
    backend->kernels->norm_chain(stream,
                                 &(struct norm_chain){.rows = e->input.row->tokens,
                                                      .width = h,
                                                      .eps = e->ops.eps,
                                                      .x_type = type,
                                                      .type = type,
                                                      .x = layer_at(e->input.fc_in, type, f * h),
                                                      .x_stride = e->input.fc_stride,
                                                      .weight = norm->weight,
                                                      .narrow = out,
                                                      .narrow_stride = stride});
}

void eagle3_features_forward(struct eagle3 *e, const struct backend *backend, struct stream *stream)
{
    const struct drafter_sizes *s = e->options.sizes;
    const struct eagle3_buffers *b = e->buffers;
    int64_t h = s->hidden;
    context_input_load(&e->input, &e->options, backend, stream);
    for (int64_t f = 0; s->fc_norm && f < s->features; f++)
        norm_feature(e, backend, stream, f, &b->fc_norm[f],
                     layer_at_mutable(b->normed, e->options.compute, f * h), s->features * h);
    if (s->norm_before_fc)
        norm_forward(e, backend, stream, e->input.fc_in, &b->input_norm, b->normed);
    if (s->fc_norm || s->norm_before_fc)
        fc_forward(e, backend, stream, b->normed, 0);
    else
        fc_forward(e, backend, stream, e->input.fc_in, e->input.fc_stride);
}

void eagle3_features_backward(struct eagle3 *e, const struct backend *backend,
                              struct stream *stream)
{
    const struct drafter_options *o = &e->options;
    const struct eagle3_buffers *b = e->buffers;
    const void *dg = b->dx_context;
    context_input_load(&e->input, o, backend, stream);
    for (int64_t f = 0; o->sizes->fc_norm && f < o->sizes->features; f++) {
        struct layer_tensor fc = eagle3_columns(o, b->fc, f * o->sizes->hidden);
        struct layer_tensor norm = bare(e, b->fc_norm[f]);
        norm_feature(e, backend, stream, f, &norm, b->normed, o->sizes->hidden);
        split_backward(e, backend, stream, dg, b->normed, &fc, &b->fc_norm[f]);
    }
    if (o->sizes->norm_before_fc) {
        struct layer_tensor norm = bare(e, b->input_norm);
        norm_forward(e, backend, stream, e->input.fc_in, &norm, b->normed);
        split_backward(e, backend, stream, dg, b->normed, &b->fc, &b->input_norm);
    } else if (!o->sizes->fc_norm) {
        fc_backward(e, backend, stream);
    }
}

// ---- the embedding's part ------------------------------------------------------------------------

// Of scaled rows: the norm of s x is that of x with eps / s^2.
static void norm_embeddings(const struct eagle3 *e, const struct backend *backend,
                            struct stream *stream, const struct layer_tensor *norm)
{
    const struct drafter_options *o = &e->options;
    const struct eagle3_buffers *b = e->buffers;
    int64_t h = o->sizes->hidden;
    backend->kernels->norm_chain(
        stream, &(struct norm_chain){.rows = e->input.row->tokens,
                                     .width = h,
                                     .eps = e->ops.eps / (o->embed_scale * o->embed_scale),
                                     .x_type = o->compute,
                                     .type = o->compute,
                                     .x = o->embed,
                                     .x_stride = h,
                                     .index = b->ids,
                                     .x_rows = o->embed_rows,
                                     .weight = norm->weight,
                                     .narrow = b->embed_normed,
                                     .narrow_stride = h});
}

void eagle3_embedding_forward(struct eagle3 *e, const struct backend *backend,
                              struct stream *stream)
{
    const struct eagle3_buffers *b = e->buffers;
    norm_embeddings(e, backend, stream, &b->embed_norm);
    layer_linear(&e->ops, backend, stream, e->input.row->tokens, b->embed_normed, &b->embed_qkv,
                 NULL, b->embed_part);
}

void eagle3_embedding_backward(struct eagle3 *e, const struct backend *backend,
                               struct stream *stream)
{
    const struct drafter_options *o = &e->options;
    const struct eagle3_buffers *b = e->buffers;
    int64_t t = e->input.row->tokens, count = t * b->embed_qkv.rows;
    const void *gradient = b->dembed_part;
    struct layer_tensor norm = bare(e, b->embed_norm);
    norm_embeddings(e, backend, stream, &norm);
    if (o->compute != DTYPE_F32 && !eagle3_sums_once(e)) {
        backend->kernels->convert(stream, &(struct convert){.count = count,
                                                            .from = b->dembed_part,
                                                            .to = b->dqkv,
                                                            .from_type = DTYPE_F32,
                                                            .to_type = o->compute});
        gradient = b->dqkv;
    }
    split_backward(e, backend, stream, gradient, b->embed_normed, &b->embed_qkv, &b->embed_norm);
}

// ---- the context ---------------------------------------------------------------------------------

// Beyond the document nothing is scored or seen, so any token will do; but gradients by token are added for
// all rows at once, so no two positions may read the same one: the document begins again.
int32_t eagle3_token(const struct row *row, int32_t t, int64_t step)
{
    int64_t first = row->doc_offsets[row->doc_of[t]], end = row->doc_offsets[row->doc_of[t] + 1];
    return (int32_t)(first + (t + 1 + step - first) % (end - first));
}

// What step 0 of every position reads, and (several layers) sees.
static void context_inputs(struct eagle3 *e, const struct backend *backend, struct stream *stream)
{
    const struct drafter_sizes *s = e->options.sizes;
    const struct row *row = e->input.row;
    struct eagle3_buffers *b = e->buffers;
    int64_t tokens = row->tokens, capacity = e->options.max_tokens;
    int32_t *ids = b->h_context, *next = ids + capacity, *places = next + capacity,
            *full = places + capacity, *sliding = full + capacity, *end = sliding + capacity;
    size_t bytes = (size_t)tokens * sizeof(int32_t);
    memcpy(ids, row->input_ids, bytes);
    for (int32_t t = 0; t < tokens; t++) {
        next[t] = eagle3_token(row, t, 0);
        places[t] = row->positions[t] + 1;
        context_range_ttt(row, t, 0, 0, &full[t], &end[t]);
        context_range_ttt(row, t, 0, s->window, &sliding[t], &end[t]);
    }
    b->next = b->ids + capacity;
    b->places = b->next + capacity;
    backend->copy_in(stream, b->ids, ids, 2 * (size_t)capacity * sizeof(int32_t) + bytes);
    if (s->layers == 1)
        return;
    backend->copy_in(stream, b->begin_full, full, bytes);
    backend->copy_in(stream, b->begin_sliding, sliding, bytes);
    backend->copy_in(stream, b->end, end, bytes);
}

static void clear_gradients(const struct eagle3 *e, const struct backend *backend,
                            struct stream *stream)
{
    const struct drafter_options *o = &e->options;
    size_t tokens = (size_t)e->input.row->tokens;
    size_t keys = tokens * (size_t)eagle3_kv(e) * sizeof(float);
    for (int64_t l = 0; l < o->sizes->layers; l++) {
        backend->zero(stream, e->layers[l].dkey, keys);
        backend->zero(stream, e->layers[l].dvalue, keys);
    }
    if (!eagle3_waits(e)) // else the first group overwrites it
        backend->zero(stream, e->buffers->dembed_part,
                      tokens * (size_t)e->buffers->embed_qkv.rows * sizeof(float));
}

void eagle3_context_forward(struct eagle3 *e, const struct backend *backend, struct stream *stream,
                            const struct row *row, const bf16 *features, bool noisy, uint64_t seed)
{
    const struct drafter_options *o = &e->options;
    context_input_begin(&e->input, o, backend, stream, row, features, noisy, seed);
    context_inputs(e, backend, stream);
    eagle3_need_weights(e, 0);
    eagle3_features_forward(e, backend, stream);
    eagle3_need_weights(e, eagle3_keys_part(0));
    eagle3_embedding_forward(e, backend, stream);
    for (int64_t l = 0; l < o->sizes->layers; l++) {
        struct eagle3_pass pass = eagle3_context_pass(e, l);
        eagle3_pass_forward(e, backend, stream, &pass);
    }
    if (o->training)
        clear_gradients(e, backend, stream);
    e->first_group = true;
}
