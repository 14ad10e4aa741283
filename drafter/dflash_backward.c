// Owns the drafter's backward pass. Gradients of weights are added up in fp32 over groups and rows.
#include "drafter/dflash_internal.h"

#include "base/log.h"

void dflash_begin_gradients(struct dflash *d, const struct backend *backend, struct stream *stream)
{
    const struct params *params = d->options.params;
    for (size_t i = 0; i < params->count; i++)
        if (params->items[i].norm || drafter_is_markov(&params->items[i]))
            backend->zero(stream, d->options.grads + params->items[i].offset,
                          (size_t)params->items[i].count * sizeof(float));
    d->fresh_layers = d->fresh_fc = true;
}

void dflash_settle_gradients(struct dflash *d, const struct backend *backend, struct stream *stream)
{
    if (d->fresh_layers && d->fresh_fc)
        backend->zero(stream, d->options.grads,
                      (size_t)d->options.params->elements * sizeof(float));
    d->fresh_layers = d->fresh_fc = false;
}

// Of a layer's matrix: both.
static void linear_backward(const struct dflash *d, const struct backend *backend,
                            struct stream *stream, int64_t rows, const void *dout, const void *in,
                            const struct layer_tensor *weight, void *din)
{
    layer_weight_backward(&d->ops, backend, stream, rows, dout, in, weight, d->fresh_layers);
    layer_input_backward(&d->ops, backend, stream, rows, dout, weight, din);
}

// Brings back what the recompute level did not keep of layer l, but for the activations.
static void recompute(struct dflash *d, const struct backend *backend, struct stream *stream,
                      int64_t l)
{
    const struct drafter_sizes *s = d->options.sizes;
    struct dflash_layer *layer = &d->layers[l];
    int64_t n = d->blocks * s->block_size, behind = dflash_rows_behind(d, l);
    if (d->options.recompute == RECOMPUTE_LEVEL_LAYER)
        dflash_layer_forward(d, backend, stream, l, NULL);
    if (d->options.recompute != RECOMPUTE_LEVEL_CHEAP)
        return;
    struct rms_norm norm = layer_norm(&d->ops, n, layer->x, DTYPE_F32, &layer->input_norm,
                                      layer->n1, layer->input_rstd);
    backend->kernels->rms_norm_forward(stream, &norm);
    norm = layer_norm(&d->ops, behind, layer->mid, DTYPE_F32, &layer->post_norm, layer->n2,
                      layer->post_rstd);
    backend->kernels->rms_norm_forward(stream, &norm);
}

static void mlp_backward(struct dflash *d, const struct backend *backend, struct stream *stream,
                         int64_t l)
{
    const struct drafter_sizes *s = d->options.sizes;
    struct dflash_layer *layer = &d->layers[l];
    struct dflash_buffers *b = d->buffers;
    int64_t n = dflash_rows_behind(d, l);
    // Activations that were not kept come back in the place of their gradient.
    bool kept = dflash_keeps_cheap(&d->options);
    void *act = kept ? layer->act : b->dact;
    layer_input_backward(&d->ops, backend, stream, n, b->dx, &layer->down, b->dact);
    backend->kernels->swiglu_backward(stream, &(struct swiglu){.rows = n,
                                                               .width = s->intermediate,
                                                               .type = d->options.compute,
                                                               .gate_up = layer->gate_up_rows,
                                                               .y = kept ? NULL : act,
                                                               .dy = b->dact,
                                                               .dgate_up = layer->gate_up_rows});
    layer_weight_backward(&d->ops, backend, stream, n, b->dx, act, &layer->down, d->fresh_layers);
    linear_backward(d, backend, stream, n, layer->gate_up_rows, layer->n2, &layer->gate_up,
                    b->dnorm);
    layer_norm_backward(&d->ops, backend, stream, n, layer->mid, DTYPE_F32, layer->post_rstd,
                        &layer->post_norm, b->dnorm, b->dx, true);
}

// Gradients of wanted rows, to be those of block rows; 0 for the others.
static void spread_rows(const struct dflash *d, const struct backend *backend,
                        struct stream *stream, const void *in, int64_t width, void *out)
{
    enum dtype type = d->options.compute;
    int64_t rows = d->blocks * d->options.sizes->block_size;
    backend->kernels->scatter_rows(stream, &(struct scatter_rows){.rows = d->wanted,
                                                                  .width = width,
                                                                  .in = in,
                                                                  .in_type = type,
                                                                  .out_type = type,
                                                                  .index = d->buffers->wanted,
                                                                  .out = out,
                                                                  .out_rows = rows});
}

// From dx behind a layer's attention to dattention; dx then has a row for each block row.
static void output_backward(struct dflash *d, const struct backend *backend, struct stream *stream,
                            int64_t l)
{
    const struct drafter_sizes *s = d->options.sizes;
    struct dflash_layer *layer = &d->layers[l];
    struct dflash_buffers *b = d->buffers;
    bool picks = dflash_picks(d, l);
    int64_t n = d->blocks * s->block_size, h = s->hidden;
    const void *attention = dflash_attention_behind(d, backend, stream, l);
    void *to = picks ? b->dqkv : b->dattention;
    linear_backward(d, backend, stream, dflash_rows_behind(d, l), b->dx, attention, &layer->o, to);
    if (!picks)
        return;
    spread_rows(d, backend, stream, to, s->heads * s->head_dim, b->dattention);
    spread_rows(d, backend, stream, b->dx, h, b->dnorm);
    backend->copy(stream, b->dx, b->dnorm, (size_t)(n * h) * dtype_size(d->options.compute));
}

static void attention_backward(struct dflash *d, const struct backend *backend,
                               struct stream *stream, int64_t l)
{
    const struct drafter_sizes *s = d->options.sizes;
    struct dflash_layer *layer = &d->layers[l];
    struct dflash_buffers *b = d->buffers;
    enum dtype type = d->options.compute;
    int64_t n = d->blocks * s->block_size, q = s->heads * s->head_dim;
    int64_t kv = s->kv_heads * s->head_dim, stride = q + 2 * kv;

    output_backward(d, backend, stream, l);
    struct attention attention = dflash_attention(d, l);
    attention.dout = b->dattention;
    attention.delta = b->delta;
    attention.dq = b->dq;
    attention.dk_block = b->dkey;
    attention.dv_block = layer_at_mutable(b->dqkv, type, q + kv);
    attention.dk_context = layer->dcontext_k;
    attention.dv_context = layer->dcontext_v;
    backend->kernels->attention_backward(stream, &attention);

    struct norm_rope rope = layer_norm_rope(&d->ops, n, s->heads, layer->qkv_rows, stride,
                                            &layer->q_norm, b->row_positions, NULL);
    rope.dy = b->dq;
    rope.dy_type = type;
    rope.dx = b->dqkv;
    rope.dx_stride = stride;
    backend->kernels->norm_rope_backward(stream, &rope);
    rope = layer_norm_rope(&d->ops, n, s->kv_heads, layer_at(layer->qkv_rows, type, q), stride,
                           &layer->k_norm, b->row_positions, NULL);
    rope.dy = b->dkey;
    rope.dy_type = type;
    rope.dx = layer_at_mutable(b->dqkv, type, q);
    rope.dx_stride = stride;
    backend->kernels->norm_rope_backward(stream, &rope);

    linear_backward(d, backend, stream, n, b->dqkv, layer->n1, &layer->qkv, b->dnorm);
    layer_norm_backward(&d->ops, backend, stream, n, layer->x, DTYPE_F32, layer->input_rstd,
                        &layer->input_norm, b->dnorm, b->dx, true);
}

// Context keys and values of layer l, whose gradients are complete: adds to dcontext [T, H].
static void context_layer_backward(struct dflash *d, const struct backend *backend,
                                   struct stream *stream, int64_t l)
{
    const struct drafter_sizes *s = d->options.sizes;
    struct dflash_layer *layer = &d->layers[l];
    struct dflash_buffers *b = d->buffers;
    enum dtype type = d->options.compute;
    int64_t t = d->input.row->tokens, kv = s->kv_heads * s->head_dim;
    struct norm_rope rope = layer_norm_rope(&d->ops, t, s->kv_heads, layer->context_kv, 2 * kv,
                                            &layer->k_norm, d->input.positions, NULL);
    rope.dy = layer->dcontext_k;
    rope.dy_type = DTYPE_F32;
    rope.dx = b->dkv;
    rope.dx_stride = 2 * kv;
    backend->kernels->norm_rope_backward(stream, &rope);
    backend->kernels->convert(stream, &(struct convert){.count = t * kv,
                                                        .width = kv,
                                                        .to_stride = 2 * kv,
                                                        .from = layer->dcontext_v,
                                                        .to = layer_at_mutable(b->dkv, type, kv),
                                                        .from_type = DTYPE_F32,
                                                        .to_type = type});
    // The layer's own backward pass has been there before.
    layer_weight_backward(&d->ops, backend, stream, t, b->dkv, b->context, &layer->kv, false);
    backend->kernels->gemm(stream, &(struct gemm){.m = t,
                                                  .n = s->hidden,
                                                  .k = 2 * kv,
                                                  .alpha = 1.0f,
                                                  .beta = l == s->layers - 1 ? 0.0f : 1.0f,
                                                  .a = b->dkv,
                                                  .b = layer->kv.weight,
                                                  .c = b->dcontext,
                                                  .a_type = type,
                                                  .b_type = type,
                                                  .c_type = DTYPE_F32});
}

static void fused_backward(struct dflash *d, const struct backend *backend, struct stream *stream)
{
    struct dflash_buffers *b = d->buffers;
    enum dtype type = d->options.compute;
    int64_t t = d->input.row->tokens;
    backend->kernels->convert(stream, &(struct convert){.count = t * d->options.sizes->hidden,
                                                        .from = b->dcontext,
                                                        .to = b->dcontext_rows,
                                                        .from_type = DTYPE_F32,
                                                        .to_type = type});
    layer_norm_backward(&d->ops, backend, stream, t, b->fused, d->options.compute, b->fused_rstd,
                        &b->hidden_norm, b->dcontext_rows, b->dcontext_rows, false);
    if (!dflash_keeps_cheap(&d->options))
        context_input_load(&d->input, &d->options, backend, stream);
    backend->kernels->gemm(stream, &(struct gemm){.m = b->fc.rows,
                                                  .n = b->fc.columns,
                                                  .k = t,
                                                  .transpose_a = true,
                                                  .alpha = 1.0f,
                                                  .beta = d->fresh_fc ? 0.0f : 1.0f,
                                                  .a = b->dcontext_rows,
                                                  .b = d->input.fc_in,
                                                  .ldb = d->input.fc_stride,
                                                  .c = b->fc.grad,
                                                  .a_type = type,
                                                  .b_type = type,
                                                  .c_type = DTYPE_F32});
    d->fresh_fc = false;
}

int dflash_gradient_stage(int64_t layers, int part)
{
    int n = (int)layers;
    if (part == 0 || part == 1 + 2 * n)
        return part == 0 ? n + 1 : 0;
    return part <= n ? n + 1 - part : 2 * n + 1 - part;
}

int dflash_gradient_stages(int64_t layers)
{
    return (int)layers + 2;
}

static void tell_final(const struct dflash *d, bool last, int64_t stage)
{
    if (last && d->hooks != NULL)
        d->hooks->gradients_final(d->hooks->context, (int)stage);
}

void *dflash_group_gradient(struct dflash *d)
{
    return d->buffers->dx;
}

void dflash_group_backward(struct dflash *d, const struct backend *backend, struct stream *stream,
                           bool last)
{
    const struct drafter_sizes *s = d->options.sizes;
    struct dflash_buffers *b = d->buffers;
    BUG_UNLESS(d->options.training);
    layer_norm_backward(&d->ops, backend, stream, d->wanted, b->last, DTYPE_F32, b->last_rstd,
                        &b->norm, b->dx, b->dx, false);
    tell_final(d, last, 0);
    for (int64_t l = s->layers - 1; l >= 0; l--) {
        recompute(d, backend, stream, l);
        mlp_backward(d, backend, stream, l);
        attention_backward(d, backend, stream, l);
        if (last)
            context_layer_backward(d, backend, stream, l);
        tell_final(d, last, s->layers - l);
    }
    d->fresh_layers = false;
    if (last)
        fused_backward(d, backend, stream);
    tell_final(d, last, s->layers + 1);
}
