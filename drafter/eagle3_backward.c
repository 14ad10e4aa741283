// Owns the EAGLE-3 drafter's backward pass: a layer on a set of rows, and the steps of a group, last to
// first. Gradients of weights are added up in fp32 over steps, groups and rows.
#include "drafter/eagle3_internal.h"

#include "base/log.h"

static void zero_all(const struct eagle3 *e, const struct backend *backend, struct stream *stream)
{
    backend->zero(stream, e->options.grads, (size_t)e->options.params->elements * sizeof(float));
}

// Norms and heads are added to; matrices, too, where every step adds to them by itself.
void eagle3_begin_gradients(struct eagle3 *e, const struct backend *backend, struct stream *stream)
{
    const struct params *params = e->options.params;
    e->fresh_layer = e->fresh_keys = e->fresh_context = eagle3_waits(e);
    if (!eagle3_waits(e))
        zero_all(e, backend, stream);
    for (size_t i = 0; i < params->count && eagle3_waits(e); i++)
        if (params->items[i].norm || params->items[i].part == params->parts - 1)
            backend->zero(stream, e->options.grads + params->items[i].offset,
                          (size_t)params->items[i].count * sizeof(float));
}

void eagle3_settle_gradients(struct eagle3 *e, const struct backend *backend, struct stream *stream)
{
    if (e->fresh_layer && e->fresh_context)
        zero_all(e, backend, stream);
    e->fresh_layer = e->fresh_keys = e->fresh_context = false;
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

// Of a step, unless it waits for the others.
static void weight_backward(const struct eagle3 *e, const struct backend *backend,
                            struct stream *stream, const struct eagle3_pass *p, const void *dout,
                            const void *in, const struct layer_tensor *weight)
{
    bool fresh = p->step < 0 && e->fresh_keys; // of the context, which has keys and values only
    if (p->step < 0 || !eagle3_waits(e))
        layer_weight_backward(&e->ops, backend, stream, p->rows, dout, in, weight, fresh);
}

static void mlp_backward(const struct eagle3 *e, const struct backend *backend,
                         struct stream *stream, const struct eagle3_pass *p)
{
    const struct eagle3_layer *layer = &e->layers[p->l];
    const struct eagle3_buffers *b = e->buffers;
    enum dtype type = e->options.compute;
    layer_input_backward(&e->ops, backend, stream, p->rows, p->dout, &layer->down, p->dact);
    backend->kernels->swiglu_backward(stream,
                                      &(struct swiglu){.rows = p->rows,
                                                       .width = e->options.sizes->intermediate,
                                                       .type = type,
                                                       .gate_up = p->at.gate_up,
                                                       .y = eagle3_keeps_act(e) ? NULL : p->dact,
                                                       .dy = p->dact,
                                                       .dgate_up = p->at.gate_up});
    weight_backward(e, backend, stream, p, p->dout, p->dact, &layer->down);
    weight_backward(e, backend, stream, p, p->at.gate_up, p->at.n2, &layer->gate_up);
    layer_input_backward(&e->ops, backend, stream, p->rows, p->at.gate_up, &layer->gate_up,
                         b->dnorm);
    struct rms_norm norm =
        layer_norm(&e->ops, p->rows, p->at.mid, DTYPE_F32, &layer->norm2, NULL, p->at.rstd2);
    norm.dy = b->dnorm;
    norm.dx = p->dmid;
    norm.dx_add = true;
    norm.dx_from = p->dmid != p->dout ? p->dout : NULL;
    backend->kernels->rms_norm_backward(stream, &norm);
}

// Gradients of queries, and of all keys and values that they see.
static void attention_backward(const struct eagle3 *e, const struct backend *backend,
                               struct stream *stream, const struct eagle3_pass *p)
{
    const struct eagle3_layer *layer = &e->layers[p->l];
    const struct eagle3_buffers *b = e->buffers;
    weight_backward(e, backend, stream, p, p->dmid, p->at.attention, &layer->o);
    layer_input_backward(&e->ops, backend, stream, p->rows, p->dmid, &layer->o, b->dattention);
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
    diagonal.fresh = p->step == e->steps - 1; // the first on the way back sees all keys
    backend->kernels->diagonal_backward(stream, &diagonal);
}

// Queries', keys' and values' gradients through norm and rotation into dqkv, side by side as far as the
// pass has them.
static void rotate_back(const struct eagle3 *e, const struct backend *backend,
                        struct stream *stream, const struct eagle3_pass *p)
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
        rope.dx = p->dqkv;
        rope.dx_stride = p->dqkv_stride;
        backend->kernels->norm_rope_backward(stream, &rope);
    }
    if (!p->keys)
        return;
    rope = layer_norm_rope(&e->ops, p->rows, s->kv_heads, p->at.kv, 2 * kv, &layer->k_norm,
                           p->places, NULL);
    rope.dy = p->dkey;
    rope.dy_type = DTYPE_F32;
    rope.dx = layer_at_mutable(p->dqkv, type, keys);
    rope.dx_stride = p->dqkv_stride;
    backend->kernels->norm_rope_backward(stream, &rope);
    backend->kernels->convert(stream,
                              &(struct convert){.count = p->rows * kv,
                                                .width = kv,
                                                .to_stride = p->dqkv_stride,
                                                .from = p->dvalue,
                                                .to = layer_at_mutable(p->dqkv, type, keys + kv),
                                                .from_type = DTYPE_F32,
                                                .to_type = type});
}

// Of a matrix whose columns dqkv has from `column` on, from the pass's rows and what lies behind them, n in all.
static void columns_backward(const struct eagle3 *e, const struct backend *backend,
                             struct stream *stream, const struct eagle3_pass *p, int64_t n,
                             int64_t column, const struct layer_tensor *weight, bool fresh)
{
    enum dtype type = e->options.compute;
    backend->kernels->gemm(stream, &(struct gemm){.m = weight->rows,
                                                  .n = weight->columns,
                                                  .k = n,
                                                  .transpose_a = true,
                                                  .alpha = 1.0f,
                                                  .beta = fresh ? 0.0f : 1.0f,
                                                  .a = layer_at(p->dqkv, type, column),
                                                  .lda = p->dqkv_stride,
                                                  .b = p->at.n1,
                                                  .c = weight->grad,
                                                  .ldc = weight->stride,
                                                  .a_type = type,
                                                  .b_type = type,
                                                  .c_type = DTYPE_F32});
}

// From dqkv to the layer's normed input, and to the embedding's part of a step that waits for no other.
static void products_backward(const struct eagle3 *e, const struct backend *backend,
                              struct stream *stream, const struct eagle3_pass *p,
                              const struct layer_tensor *weight)
{
    const struct drafter_options *o = &e->options;
    const struct eagle3_buffers *b = e->buffers;
    if (p->step < 0 || !eagle3_waits(e))
        columns_backward(e, backend, stream, p, p->rows, 0, weight, p->step < 0 && e->fresh_keys);
    if (p->l == 0 && !eagle3_sums_once(e) && (p->step < 0 || !eagle3_waits(e)))
        add_rows(backend, stream, p->rows, weight->rows, p->dqkv, o->compute, p->token,
                 b->dembed_part + (p->queries ? 0 : eagle3_q(e)), DTYPE_F32, e->input.row->tokens,
                 b->embed_qkv.rows);
    backend->kernels->gemm(stream, &(struct gemm){.m = p->rows,
                                                  .n = weight->columns,
                                                  .k = weight->rows,
                                                  .alpha = 1.0f,
                                                  .a = p->dqkv,
                                                  .lda = p->dqkv_stride,
                                                  .b = weight->weight,
                                                  .ldb = weight->stride,
                                                  .c = b->dnorm,
                                                  .a_type = o->compute,
                                                  .b_type = o->compute,
                                                  .c_type = o->compute});
}

// From there, and from mid, to the layer's input.
static void input_backward(const struct eagle3 *e, const struct backend *backend,
                           struct stream *stream, const struct eagle3_pass *p)
{
    const struct drafter_sizes *s = e->options.sizes;
    void *dnorm = e->buffers->dnorm;
    enum dtype type = e->options.compute;
    // Whether attention was added to the norm's output instead of its input.
    bool to_normed = p->queries && p->l == 0 && s->norm_before_residual;
    bool apart = p->dx != p->dmid;
    if (to_normed || apart)
        add_rows(backend, stream, p->rows, s->hidden, p->dmid, type, NULL,
                 to_normed ? dnorm : p->dx, type, p->rows, s->hidden);
    layer_norm_backward(&e->ops, backend, stream, p->rows, p->at.x, DTYPE_F32, p->at.rstd1,
                        &e->layers[p->l].norm1, dnorm, p->dx, apart || !to_normed);
}

// The matrix whose columns dqkv has.
static const struct layer_tensor *joined(const struct eagle3 *e, const struct eagle3_pass *p)
{
    const struct eagle3_layer *layer = &e->layers[p->l];
    return !p->queries ? &layer->kv : p->keys ? &layer->qkv : &layer->q;
}

static void to_products(const struct eagle3 *e, const struct backend *backend,
                        struct stream *stream, const struct eagle3_pass *p)
{
    if (p->queries) {
        mlp_backward(e, backend, stream, p);
        attention_backward(e, backend, stream, p);
    }
    rotate_back(e, backend, stream, p);
    products_backward(e, backend, stream, p, joined(e, p));
}

void eagle3_pass_backward(struct eagle3 *e, const struct backend *backend, struct stream *stream,
                          const struct eagle3_pass *p)
{
    to_products(e, backend, stream, p);
    input_backward(e, backend, stream, p);
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

// Through the final norm of a step: the gradient of the last layer's output comes in the place of the hidden
// state's. dh: of what the next step read (NULL: there is none), which is added.
static void *norm_backward(const struct eagle3 *e, const struct backend *backend,
                           struct stream *stream, int64_t step, const void *dh)
{
    const struct drafter_options *o = &e->options;
    const struct eagle3_buffers *b = e->buffers;
    int64_t h = o->sizes->hidden, at = step * e->count;
    void *dhidden = gradient_of_step(e, step);
    if (dh != NULL && o->sizes->norm_output)
        add_rows(backend, stream, e->count, h, dh, o->compute, NULL, dhidden, o->compute, e->count,
                 h);
    layer_norm_backward(&e->ops, backend, stream, e->count, b->last + at * h, DTYPE_F32,
                        b->last_rstd + at, &b->norm, dhidden, dhidden, false);
    if (dh != NULL && !o->sizes->norm_output)
        add_rows(backend, stream, e->count, h, dh, o->compute, NULL, dhidden, o->compute, e->count,
                 h);
    return dhidden;
}

// From what a step's products left in dnorm, and from mid, through the norm of its input and the final norm of the
// step before: that step's gradient of the last layer's output, in the place of its hidden state's.
static void chain_backward(const struct eagle3 *e, const struct backend *backend,
                           struct stream *stream, const struct eagle3_pass *p)
{
    const struct eagle3_buffers *b = e->buffers;
    const struct layer_tensor *second = &e->layers[0].norm1;
    int64_t h = e->options.sizes->hidden, at = (p->step - 1) * e->count;
    void *dhidden = gradient_of_step(e, p->step - 1);
    backend->kernels->norm_chain_backward(
        stream, &(struct norm_chain_gradient){.rows = e->count,
                                              .width = h,
                                              .type = e->options.compute,
                                              .x = b->last + at * h,
                                              .weight = b->norm.weight,
                                              .rstd = b->last_rstd + at,
                                              .second_weight = second->weight,
                                              .second_rstd = p->at.rstd1,
                                              .dsecond = b->dnorm,
                                              .dy = dhidden,
                                              .more = p->dmid,
                                              .dx = dhidden,
                                              .dweight = b->norm.grad,
                                              .second_dweight = second->grad,
                                              .scratch = e->ops.norm_scratch});
}

// The gradient of the embedding's part in columns [first, first + width): those of the rows of the steps from `step`
// on that read a token. Added up once: with the context's where all have them.
static void embedding_part(const struct eagle3 *e, const struct backend *backend,
                           struct stream *stream, int64_t step, int64_t first, int64_t width)
{
    const struct eagle3_buffers *b = e->buffers;
    int64_t tokens = e->input.row->tokens, stride = b->embed_qkv.rows;
    bool once = eagle3_sums_once(e);
    enum dtype type = e->options.compute, out = once ? type : DTYPE_F32;
    backend->kernels->gather_sum(
        stream, &(struct gather_sum){.rows = tokens,
                                     .width = width,
                                     .terms = e->steps - step + (once && step > 0),
                                     .in = layer_at(b->dqkv, type, first),
                                     .in_rows = e->steps * e->count + (once ? tokens : 0),
                                     .in_stride = stride,
                                     .in_type = type,
                                     .from = b->readers + step * tokens,
                                     .from_stride = tokens,
                                     .add = !once && !e->first_group,
                                     .out = layer_at_mutable(b->dembed_part, out, first),
                                     .out_stride = stride,
                                     .out_type = out});
}

// Of queries all steps have some; keys and values of step 0 are the context's.
static void embedding_queries(const struct eagle3 *e, const struct backend *backend,
                              struct stream *stream)
{
    embedding_part(e, backend, stream, 0, 0, eagle3_q(e));
}

static void embedding_keys(const struct eagle3 *e, const struct backend *backend,
                           struct stream *stream)
{
    embedding_part(e, backend, stream, 1, eagle3_q(e), 2 * eagle3_kv(e));
}

// The context, whose keys' and values' gradients are complete: the last layer's keys and values, then the
// layers before it, then what they are made of.
static void context_backward(struct eagle3 *e, const struct backend *backend, struct stream *stream)
{
    for (int64_t l = e->options.sizes->layers - 1; l >= 0; l--) {
        struct eagle3_pass pass = eagle3_context_pass(e, l);
        eagle3_pass_recompute(e, backend, stream, &pass);
        eagle3_pass_backward(e, backend, stream, &pass);
        e->fresh_keys = false;
        if (pass.queries)
            tell_final(e, true, eagle3_rest_part(l));
        if (l == 0 && eagle3_sums_once(e))
            embedding_keys(e, backend, stream);
        if (l == 0)
            eagle3_embedding_backward(e, backend, stream);
        tell_final(e, true, eagle3_keys_part(l));
    }
    eagle3_features_backward(e, backend, stream);
    e->fresh_context = false;
    tell_final(e, true, 0);
}

// Layer by layer. Returns the gradient of step 0's input.
static void *steps_backward(struct eagle3 *e, const struct backend *backend, struct stream *stream,
                            bool last)
{
    const struct drafter_options *o = &e->options;
    int64_t layers = o->sizes->layers;
    void *dx = NULL;
    for (int64_t i = e->steps - 1; i >= 0; i--) {
        dx = norm_backward(e, backend, stream, i, dx);
        if (i == 0)
            tell_final(e, last, o->params->parts - 1);
        for (int64_t l = layers - 1; l >= (i == 0 ? layers - 1 : 0); l--) {
            struct eagle3_pass pass = eagle3_step_pass(e, l, i);
            pass.dout = pass.dmid = pass.dx = dx;
            eagle3_pass_recompute(e, backend, stream, &pass);
            eagle3_pass_backward(e, backend, stream, &pass);
        }
    }
    return dx;
}

// Gradients of the layer's weights from the rows of all steps.
static void weights_backward(struct eagle3 *e, const struct backend *backend, struct stream *stream)
{
    const struct eagle3_layer *layer = &e->layers[0];
    struct eagle3_pass first = eagle3_step_pass(e, 0, 0);
    int64_t n = e->steps * e->count;
    bool fresh = e->fresh_layer;
    layer_weight_backward(&e->ops, backend, stream, n, first.dout,
                          eagle3_keeps_act(e) ? first.at.act : first.dact, &layer->down, fresh);
    layer_weight_backward(&e->ops, backend, stream, n, first.at.gate_up, first.at.n2,
                          &layer->gate_up, fresh);
    layer_weight_backward(&e->ops, backend, stream, n, first.dmid, first.at.attention, &layer->o,
                          fresh);
    columns_backward(e, backend, stream, &first, n, 0, &layer->q, fresh);
    e->fresh_layer = false;
    if (e->steps == 1) // keys and values of step 0 are the context's
        return;
    struct eagle3_pass second = eagle3_step_pass(e, 0, 1);
    columns_backward(e, backend, stream, &second, n - e->count, eagle3_q(e), &layer->kv,
                     e->fresh_keys);
    e->fresh_keys = false;
}

// From the gradient of a step's normed input to that of the last layer's output of the step before, which the step
// read under the final norm or as it is.
static void to_step_before(const struct eagle3 *e, const struct backend *backend,
                           struct stream *stream, const struct eagle3_pass *p)
{
    bool norm_output = e->options.sizes->norm_output;
    if (eagle3_chains(e)) {
        chain_backward(e, backend, stream, p);
        return;
    }
    if (!norm_output)
        norm_backward(e, backend, stream, p->step - 1, NULL);
    input_backward(e, backend, stream, p);
    if (norm_output)
        norm_backward(e, backend, stream, p->step - 1, NULL);
}

// The one layer, whose weights' gradients wait for all steps. Returns the gradient of step 0's input.
static void *waiting_steps_backward(struct eagle3 *e, const struct backend *backend,
                                    struct stream *stream, bool last)
{
    struct eagle3_pass pass = eagle3_step_pass(e, 0, 0);
    norm_backward(e, backend, stream, e->steps - 1, NULL);
    for (int64_t i = e->steps - 1; i >= 0; i--) {
        if (i == 0)
            tell_final(e, last, e->options.params->parts - 1);
        pass = eagle3_step_pass(e, 0, i);
        eagle3_pass_recompute(e, backend, stream, &pass);
        to_products(e, backend, stream, &pass);
        if (i > 0)
            to_step_before(e, backend, stream, &pass);
    }
    weights_backward(e, backend, stream);
    embedding_queries(e, backend, stream);
    if (!eagle3_sums_once(e))
        embedding_keys(e, backend, stream);
    input_backward(e, backend, stream, &pass); // of step 0, over mid's gradient
    return pass.dx;
}

// The gradient of step 0's input to the rows of the context that it was read from; the first group's overwrites all.
static void to_context(const struct eagle3 *e, const struct backend *backend, struct stream *stream,
                       const void *dx)
{
    const struct eagle3_buffers *b = e->buffers;
    enum dtype type = e->options.compute;
    int64_t tokens = e->input.row->tokens, h = e->options.sizes->hidden;
    if (!e->first_group) {
        add_rows(backend, stream, e->count, h, dx, type, b->position, b->dx_context, type, tokens,
                 h);
        return;
    }
    backend->kernels->scatter_rows(stream, &(struct scatter_rows){.rows = e->count,
                                                                  .width = h,
                                                                  .in = dx,
                                                                  .in_type = type,
                                                                  .out_type = type,
                                                                  .index = b->position,
                                                                  .out = b->dx_context,
                                                                  .out_rows = tokens});
}

void eagle3_group_backward(struct eagle3 *e, const struct backend *backend, struct stream *stream,
                           bool last)
{
    const struct drafter_options *o = &e->options;
    BUG_UNLESS(o->training);
    void *dx = eagle3_waits(e) ? waiting_steps_backward(e, backend, stream, last)
                               : steps_backward(e, backend, stream, last);
    tell_final(e, last, eagle3_rest_part(o->sizes->layers - 1));
    to_context(e, backend, stream, dx);
    e->first_group = false;
    if (last)
        context_backward(e, backend, stream);
}
