// Owns the EAGLE-3 drafter's backward pass: a layer on a set of rows, and the steps of a group, last to
// first. Gradients of weights are added up in fp32 over steps, groups and rows.
#include "drafter/eagle3_internal.h"

#include "base/log.h"

void eagle3_begin_gradients(struct eagle3 *e, const struct backend *backend, struct stream *stream)
{
    backend->zero(stream, e->options.grads, (size_t)e->options.params->elements * sizeof(float));
}

int eagle3_gradient_stages(int64_t layers)
{
    return 2 + 2 * (int)layers;
}

int eagle3_gradient_stage(int64_t layers, int part)
{
    return eagle3_gradient_stages(layers) - 1 - part;
}

static void tell_final(const struct eagle3 *e, bool last, int part)
{
    if (last && e->hooks != NULL)
        e->hooks->gradients_final(e->hooks->context,
                                  eagle3_gradient_stage(e->options.sizes->layers, part));
}

// out[index[i]] += in[i]; index NULL: i
static void add_rows(const struct backend *backend, struct stream *stream, int64_t rows,
                     int64_t width, const void *in, enum dtype in_type, const int32_t *index,
                     void *out, enum dtype out_type, int64_t out_rows, int64_t out_stride)
{
    backend->kernels->add_rows(stream, &(struct add_rows){.rows = rows,
                                                          .width = width,
                                                          .in = in,
                                                          .in_type = in_type,
                                                          .index = index,
                                                          .out = out,
                                                          .out_type = out_type,
                                                          .out_rows = out_rows,
                                                          .out_stride = out_stride});
}

// ---- one layer -----------------------------------------------------------------------------------

static void mlp_backward(const struct eagle3 *e, const struct backend *backend,
                         struct stream *stream, const struct eagle3_pass *p, void *dx)
{
    const struct eagle3_layer *layer = &e->layers[p->l];
    const struct eagle3_buffers *b = e->buffers;
    void *act = b->dact; // comes back in the place of its gradient
    layer_input_backward(&e->ops, backend, stream, p->rows, dx, &layer->down, b->dact);
    backend->kernels->swiglu_backward(stream,
                                      &(struct swiglu){.rows = p->rows,
                                                       .width = e->options.sizes->intermediate,
                                                       .type = e->options.compute,
                                                       .gate_up = p->at.gate_up,
                                                       .y = act,
                                                       .dy = b->dact,
                                                       .dgate_up = p->at.gate_up});
    layer_weight_backward(&e->ops, backend, stream, p->rows, dx, act, &layer->down, false);
    layer_weight_backward(&e->ops, backend, stream, p->rows, p->at.gate_up, p->at.n2,
                          &layer->gate_up, false);
    layer_input_backward(&e->ops, backend, stream, p->rows, p->at.gate_up, &layer->gate_up,
                         b->dnorm);
    layer_norm_backward(&e->ops, backend, stream, p->rows, p->at.mid, DTYPE_F32, p->at.rstd2,
                        &layer->norm2, b->dnorm, dx, true);
}

// Gradients of queries, and of all keys and values that they see.
static void attention_backward(const struct eagle3 *e, const struct backend *backend,
                               struct stream *stream, const struct eagle3_pass *p, const void *dx)
{
    const struct eagle3_layer *layer = &e->layers[p->l];
    const struct eagle3_buffers *b = e->buffers;
    layer_weight_backward(&e->ops, backend, stream, p->rows, dx, p->at.attention, &layer->o, false);
    layer_input_backward(&e->ops, backend, stream, p->rows, dx, &layer->o, b->dattention);
    struct attention attention = eagle3_attention(e, p);
    attention.dout = b->dattention;
    attention.delta = b->delta;
    attention.dq = b->dq;
    attention.dk_context = layer->dkey;
    attention.dv_context = layer->dvalue;
    backend->kernels->attention_backward(stream, &attention);
    if (p->step <= 0)
        return;
    struct eagle3_pass first = eagle3_step_pass(e, p->l, 1);
    struct diagonal diagonal = eagle3_diagonal(e, p);
    diagonal.dout = b->dattention;
    diagonal.dq = b->dq;
    diagonal.dk = first.dkey;
    diagonal.dv = first.dvalue;
    backend->kernels->diagonal_backward(stream, &diagonal);
}

// Queries', keys' and values' gradients through norm and rotation into dqkv, side by side as far as the
// pass has them.
static void rotate_back(const struct eagle3 *e, const struct backend *backend,
                        struct stream *stream, const struct eagle3_pass *p, int64_t stride)
{
    const struct drafter_sizes *s = e->options.sizes;
    const struct eagle3_layer *layer = &e->layers[p->l];
    const struct eagle3_buffers *b = e->buffers;
    enum dtype type = e->options.compute;
    int64_t q = eagle3_q(e), kv = eagle3_kv(e), keys = p->queries ? q : 0;
    struct norm_rope rope;
    if (p->queries) {
        rope = layer_norm_rope(&e->ops, p->rows, s->heads, p->at.q_raw, q, &layer->q_norm,
                               p->places, NULL);
        rope.dy = b->dq;
        rope.dy_type = type;
        rope.dx = b->dqkv;
        rope.dx_stride = stride;
        backend->kernels->norm_rope_backward(stream, &rope);
    }
    if (!p->keys)
        return;
    rope = layer_norm_rope(&e->ops, p->rows, s->kv_heads, p->at.kv, 2 * kv, &layer->k_norm,
                           p->places, NULL);
    rope.dy = p->dkey;
    rope.dy_type = DTYPE_F32;
    rope.dx = layer_at_mutable(b->dqkv, type, keys);
    rope.dx_stride = stride;
    backend->kernels->norm_rope_backward(stream, &rope);
    backend->kernels->convert(stream,
                              &(struct convert){.count = p->rows * kv,
                                                .width = kv,
                                                .to_stride = stride,
                                                .from = p->dvalue,
                                                .to = layer_at_mutable(b->dqkv, type, keys + kv),
                                                .from_type = DTYPE_F32,
                                                .to_type = type});
}

// From dqkv to the layer's input, whose gradient so far is dx.
static void products_backward(const struct eagle3 *e, const struct backend *backend,
                              struct stream *stream, const struct eagle3_pass *p,
                              const struct layer_tensor *weight, void *dx)
{
    const struct drafter_options *o = &e->options;
    const struct eagle3_buffers *b = e->buffers;
    const struct layer_tensor *norm = &e->layers[p->l].norm1;
    bool to_normed = p->queries && p->l == 0 && o->sizes->norm_before_residual;
    layer_weight_backward(&e->ops, backend, stream, p->rows, b->dqkv, p->at.n1, weight, false);
    if (p->l == 0)
        add_rows(backend, stream, p->rows, weight->rows, b->dqkv, o->compute, p->token,
                 b->dembed_part + (p->queries ? 0 : eagle3_q(e)), DTYPE_F32, e->input.row->tokens,
                 b->embed_qkv.rows);
    layer_input_backward(&e->ops, backend, stream, p->rows, b->dqkv, weight, b->dnorm);
    if (to_normed) // what attention is added to is the norm's output, too
        add_rows(backend, stream, p->rows, o->sizes->hidden, dx, o->compute, NULL, b->dnorm,
                 o->compute, p->rows, o->sizes->hidden);
    layer_norm_backward(&e->ops, backend, stream, p->rows, p->at.x, DTYPE_F32, p->at.rstd1, norm,
                        b->dnorm, dx, !to_normed);
}

void eagle3_pass_backward(struct eagle3 *e, const struct backend *backend, struct stream *stream,
                          const struct eagle3_pass *p, void *dx)
{
    const struct eagle3_layer *layer = &e->layers[p->l];
    const struct layer_tensor *weight = !p->queries ? &layer->kv
                                        : p->keys   ? &layer->qkv
                                                    : &layer->q;
    if (p->queries) {
        mlp_backward(e, backend, stream, p, dx);
        attention_backward(e, backend, stream, p, dx);
    }
    rotate_back(e, backend, stream, p, weight->rows);
    products_backward(e, backend, stream, p, weight, dx);
}

// ---- the steps of a group ------------------------------------------------------------------------

static void *gradient_of_step(const struct eagle3 *e, int64_t step)
{
    return layer_at_mutable(e->buffers->hidden, e->options.compute,
                            step * e->count * e->options.sizes->hidden);
}

void *eagle3_group_gradient(struct eagle3 *e)
{
    return e->buffers->hidden;
}

// Through the final norm of a step: dh is the gradient of what the next step read (NULL: there is none).
// Returns the gradient of the last layer's output.
static void *norm_backward(const struct eagle3 *e, const struct backend *backend,
                           struct stream *stream, int64_t step, void *dh)
{
    const struct drafter_options *o = &e->options;
    const struct eagle3_buffers *b = e->buffers;
    int64_t h = o->sizes->hidden, at = step * e->count;
    void *dhidden = gradient_of_step(e, step), *dx = dhidden;
    if (dh != NULL && o->sizes->norm_output)
        add_rows(backend, stream, e->count, h, dh, o->compute, NULL, dhidden, o->compute, e->count,
                 h);
    else if (dh != NULL)
        dx = dh;
    layer_norm_backward(&e->ops, backend, stream, e->count, b->last + at * h, DTYPE_F32,
                        b->last_rstd + at, &b->norm, dhidden, dx, dx != dhidden);
    return dx;
}

// The steps' own keys and values.
static void clear_own(const struct eagle3 *e, const struct backend *backend, struct stream *stream)
{
    const struct drafter_sizes *s = e->options.sizes;
    size_t bytes = (size_t)((e->steps - 1) * e->count * eagle3_kv(e)) * sizeof(float);
    for (int64_t l = 0; l < s->layers && e->steps > 1; l++) {
        struct eagle3_pass first = eagle3_step_pass(e, l, 1);
        backend->zero(stream, first.dkey, bytes);
        backend->zero(stream, first.dvalue, bytes);
    }
}

// The context, whose keys' and values' gradients are complete: the last layer's keys and values, then the
// layers before it, then what they are made of.
static void context_backward(struct eagle3 *e, const struct backend *backend, struct stream *stream)
{
    for (int64_t l = e->options.sizes->layers - 1; l >= 0; l--) {
        struct eagle3_pass pass = eagle3_context_pass(e, l);
        eagle3_pass_recompute(e, backend, stream, &pass);
        eagle3_pass_backward(e, backend, stream, &pass, e->buffers->dx_context);
        if (pass.queries)
            tell_final(e, true, eagle3_rest_part(l));
        if (l == 0)
            eagle3_embedding_backward(e, backend, stream);
        tell_final(e, true, eagle3_keys_part(l));
    }
    eagle3_features_backward(e, backend, stream);
    tell_final(e, true, 0);
}

void eagle3_group_backward(struct eagle3 *e, const struct backend *backend, struct stream *stream,
                           bool last)
{
    const struct drafter_options *o = &e->options;
    const struct eagle3_buffers *b = e->buffers;
    int64_t layers = o->sizes->layers;
    void *dx = NULL;
    BUG_UNLESS(o->training);
    clear_own(e, backend, stream);
    for (int64_t i = e->steps - 1; i >= 0; i--) {
        dx = norm_backward(e, backend, stream, i, dx);
        if (i == 0)
            tell_final(e, last, o->params->parts - 1);
        for (int64_t l = layers - 1; l >= (i == 0 ? layers - 1 : 0); l--) {
            struct eagle3_pass pass = eagle3_step_pass(e, l, i);
            eagle3_pass_recompute(e, backend, stream, &pass);
            eagle3_pass_backward(e, backend, stream, &pass, dx);
        }
    }
    tell_final(e, last, eagle3_rest_part(layers - 1));
    add_rows(backend, stream, e->count, o->sizes->hidden, dx, o->compute, b->position,
             b->dx_context, o->compute, e->input.row->tokens, o->sizes->hidden);
    if (last)
        context_backward(e, backend, stream);
}
