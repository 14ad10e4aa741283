// Owns the EAGLE-3 drafter's forward pass: a layer on a set of rows, and the steps of a group. The way from
// features to the context is eagle3_context.c's.
#include "drafter/eagle3_internal.h"

#include <math.h>
#include <string.h>

#include "base/log.h"

void eagle3_need_weights(const struct eagle3 *e, int part)
{
    if (e->hooks != NULL)
        e->hooks->weights_needed(e->hooks->context, part);
}

// ---- passes --------------------------------------------------------------------------------------

static void *rows_at(const struct eagle3 *e, void *base, int64_t row, int64_t width)
{
    return layer_at_mutable(base, e->options.compute, row * width);
}

// Where the first layer's input of a step is: after the first step it is the last layer's output, as it
// is or normed. Where nothing reads it on the way back, the steps after the first have one place.
static float *first_input(const struct eagle3 *e, int64_t step)
{
    const struct drafter_sizes *s = e->options.sizes;
    int64_t size = e->count * s->hidden;
    if (step > 0 && !s->norm_output)
        return e->buffers->last + (e->options.training ? (step - 1) * size : 0);
    bool apart = s->norm_output && eagle3_keeps(e, RECOMPUTE_LEVEL_CHEAP);
    int64_t place = eagle3_chains(e) && step > 1 ? 1 : step;
    return e->layers[0].steps.x + (apart ? place * size : 0);
}

// Where gradients of a step are. Where those of weights wait for all steps: the gradient of a step's output over
// that of its hidden state, and x's with the step before, whose output it was; of step 0 over mid's.
static void backward_places(const struct eagle3 *e, struct eagle3_pass *p)
{
    const struct eagle3_buffers *b = e->buffers;
    int64_t h = e->options.sizes->hidden, q = eagle3_q(e), kv = eagle3_kv(e);
    bool waits = eagle3_waits(e);
    int64_t at = waits ? p->step * e->count : 0;
    p->dact = rows_at(e, b->dact, eagle3_keeps_act(e) ? 0 : at, e->options.sizes->intermediate);
    p->dqkv = rows_at(e, b->dqkv, at, q + 2 * kv);
    p->dqkv_stride = waits || p->keys ? q + 2 * kv : q;
    if (!waits)
        return;
    p->dout = rows_at(e, b->hidden, at, h);
    p->dmid = rows_at(e, b->dmid, at, h);
    p->dx = p->step > 0 ? rows_at(e, b->hidden, at - e->count, h) : p->dmid;
}

struct eagle3_pass eagle3_step_pass(const struct eagle3 *e, int64_t l, int64_t step)
{
    const struct drafter_sizes *s = e->options.sizes;
    const struct eagle3_layer *layer = &e->layers[l];
    const struct eagle3_rows *r = &layer->steps;
    const struct eagle3_buffers *b = e->buffers;
    int64_t h = s->hidden, q = eagle3_q(e), kv = eagle3_kv(e), at = step * e->count;
    int64_t all = e->options.training ? at : 0;
    int64_t keep = eagle3_keeps(e, RECOMPUTE_LEVEL_LAYER) ? at : 0;
    int64_t norms = eagle3_keeps(e, RECOMPUTE_LEVEL_CHEAP) || eagle3_waits(e) ? at : 0;
    struct eagle3_pass p = {.l = l,
                            .step = step,
                            .rows = e->count,
                            .queries = true,
                            .keys = step > 0,
                            .token = b->token + at,
                            .places = b->step_places + at,
                            .begin = (layer->sliding ? b->step_sliding : b->step_full) + at,
                            .end = b->step_end + at};
    p.at.x = l == 0 ? first_input(e, step) : r->x + all * h;
    p.at.rstd1 = r->rstd1 + all;
    p.at.n1 = rows_at(e, r->n1, norms, h);
    p.at.residual = r->residual;
    p.at.q_raw = rows_at(e, r->q_raw, keep, q);
    p.at.q = rows_at(e, r->q, keep, q);
    p.at.attention = rows_at(e, r->attention, all, q);
    p.at.lse = r->lse + all * s->heads;
    p.at.mid = r->mid + keep * h;
    p.at.rstd2 = r->rstd2 + all;
    p.at.n2 = rows_at(e, r->n2, norms, h);
    p.at.gate_up = rows_at(e, r->gate_up, keep, 2 * s->intermediate);
    p.at.act = rows_at(e, r->act, eagle3_keeps_act(e) ? at : 0, s->intermediate);
    p.out = l + 1 < s->layers ? e->layers[l + 1].steps.x + all * h : b->last + all * h;
    if (e->options.training)
        backward_places(e, &p);
    if (step == 0)
        return p;
    int64_t own = (step - 1) * e->count;
    p.at.kv = rows_at(e, r->kv, own, 2 * kv);
    p.at.key = rows_at(e, r->key, own, kv);
    if (e->options.training) {
        int64_t first = l * (s->ttt_steps - 1) * eagle3_capacity(e);
        p.dkey = b->dkey + (first + own) * kv;
        p.dvalue = b->dvalue + (first + own) * kv;
    }
    return p;
}

struct eagle3_pass eagle3_context_pass(const struct eagle3 *e, int64_t l)
{
    const struct eagle3_layer *layer = &e->layers[l];
    const struct eagle3_buffers *b = e->buffers;
    bool last = l == e->options.sizes->layers - 1;
    int64_t q = eagle3_q(e), kv = eagle3_kv(e);
    struct eagle3_pass p = {.l = l,
                            .step = -1,
                            .rows = e->input.row->tokens,
                            .queries = !last,
                            .keys = true,
                            .at = layer->context,
                            .token = b->next,
                            .places = b->places,
                            .begin = layer->sliding ? b->begin_sliding : b->begin_full,
                            .end = b->end,
                            .out = last ? NULL : e->layers[l + 1].context.x,
                            .dact = b->dact,
                            .dqkv = b->dqkv,
                            .dqkv_stride = last ? 2 * kv : q + 2 * kv,
                            .dkey = layer->dkey,
                            .dvalue = layer->dvalue,
                            .dout = b->dx_context,
                            .dmid = b->dx_context,
                            .dx = b->dx_context};
    if (eagle3_sums_once(e)) { // behind the rows of the steps, where those have keys and values
        p.dqkv = rows_at(e, b->dqkv, e->steps * e->count, q + 2 * kv);
        p.dqkv = layer_at_mutable(p.dqkv, e->options.compute, q);
        p.dqkv_stride = q + 2 * kv;
    }
    return p;
}

// ---- one layer -----------------------------------------------------------------------------------

// A norm of fp32 rows, in fp32 and (NULL: not wanted) in compute dtype.
static struct norm_chain norm_both(const struct eagle3 *e, int64_t rows, const float *x,
                                   const struct layer_tensor *norm, float *wide, void *narrow,
                                   float *rstd)
{
    return (struct norm_chain){.rows = rows,
                               .width = norm->rows,
                               .eps = e->ops.eps,
                               .x_type = DTYPE_F32,
                               .type = e->options.compute,
                               .x = x,
                               .x_stride = norm->rows,
                               .weight = norm->weight,
                               .wide = wide,
                               .narrow = narrow,
                               .narrow_stride = norm->rows,
                               .rstd = rstd};
}

// Whether attention is added to the normed input.
static bool adds_to_normed(const struct eagle3 *e, const struct eagle3_pass *p)
{
    return p->l == 0 && e->options.sizes->norm_before_residual;
}

// What attention is added to.
static const float *residual_of(const struct eagle3 *e, const struct eagle3_pass *p)
{
    if (!adds_to_normed(e, p))
        return p->at.x;
    return e->options.compute == DTYPE_F32 ? p->at.n1 : p->at.residual;
}

// Whether what attention is added to is a rounded norm's output in fp32.
static bool keeps_both(const struct eagle3 *e, const struct eagle3_pass *p)
{
    return adds_to_normed(e, p) && e->options.compute != DTYPE_F32;
}

// Whether the normed input comes with the input: see eagle3_step_input and to_next.
static bool comes_normed(const struct eagle3 *e, const struct eagle3_pass *p)
{
    if (p->step == 0)
        return true;
    return p->l == 0 && p->step > 0 && e->options.sizes->norm_output && !keeps_both(e, p);
}

static void first_norm(const struct eagle3 *e, const struct backend *backend, struct stream *stream,
                       const struct eagle3_pass *p)
{
    const struct layer_tensor *norm = &e->layers[p->l].norm1;
    if (keeps_both(e, p)) {
        struct norm_chain both =
            norm_both(e, p->rows, p->at.x, norm, p->at.residual, p->at.n1, p->at.rstd1);
        backend->kernels->norm_chain(stream, &both);
        return;
    }
    struct rms_norm op =
        layer_norm(&e->ops, p->rows, p->at.x, DTYPE_F32, norm, p->at.n1, p->at.rstd1);
    backend->kernels->rms_norm_forward(stream, &op);
}

// From a step's output under the final norm to what the next step reads and, where it can be, to its normed input.
// hidden: in compute dtype; NULL: not wanted.
static void to_next(const struct eagle3 *e, const struct backend *backend, struct stream *stream,
                    int64_t step, void *hidden)
{
    const struct eagle3_buffers *b = e->buffers;
    struct eagle3_pass next = eagle3_step_pass(e, 0, step + 1);
    int64_t at = e->options.training ? step * e->count : 0;
    struct norm_chain both = norm_both(e, e->count, b->last + at * e->options.sizes->hidden,
                                       &b->norm, next.at.x, hidden, b->last_rstd + at);
    if (comes_normed(e, &next)) {
        both.second_weight = e->layers[0].norm1.weight;
        both.second = next.at.n1;
        both.second_rstd = next.at.rstd1;
    }
    backend->kernels->norm_chain(stream, &both);
}

// out = n1 weight^T, to which the first layer adds the columns from `first` on of the embedding's part.
static void product_with_embedding(const struct eagle3 *e, const struct backend *backend,
                                   struct stream *stream, const struct eagle3_pass *p,
                                   const struct layer_tensor *weight, int64_t first, void *out)
{
    enum dtype type = e->options.compute;
    int64_t stride = eagle3_q(e) + 2 * eagle3_kv(e);
    if (p->l > 0) {
        layer_linear(&e->ops, backend, stream, p->rows, p->at.n1, weight, NULL, out);
        return;
    }
    backend->kernels->gather_rows(
        stream, &(struct gather_rows){.rows = p->rows,
                                      .width = weight->rows,
                                      .in = layer_at(e->buffers->embed_part, type, first),
                                      .in_rows = e->input.row->tokens,
                                      .in_stride = stride,
                                      .in_type = type,
                                      .out_type = type,
                                      .index = p->token,
                                      .scale = 1.0f,
                                      .out = out});
    backend->kernels->gemm(stream, &(struct gemm){.m = p->rows,
                                                  .n = weight->rows,
                                                  .k = weight->columns,
                                                  .transpose_b = true,
                                                  .alpha = 1.0f,
                                                  .beta = 1.0f,
                                                  .a = p->at.n1,
                                                  .b = weight->weight,
                                                  .ldb = weight->stride,
                                                  .c = out,
                                                  .a_type = type,
                                                  .b_type = type,
                                                  .c_type = type});
}

static void queries_forward(const struct eagle3 *e, const struct backend *backend,
                            struct stream *stream, const struct eagle3_pass *p)
{
    const struct eagle3_layer *layer = &e->layers[p->l];
    product_with_embedding(e, backend, stream, p, &layer->q, 0, p->at.q_raw);
    struct norm_rope rope = layer_norm_rope(&e->ops, p->rows, e->options.sizes->heads, p->at.q_raw,
                                            eagle3_q(e), &layer->q_norm, p->places, p->at.q);
    backend->kernels->norm_rope_forward(stream, &rope);
}

static void keys_forward(const struct eagle3 *e, const struct backend *backend,
                         struct stream *stream, const struct eagle3_pass *p)
{
    const struct eagle3_layer *layer = &e->layers[p->l];
    product_with_embedding(e, backend, stream, p, &layer->kv, eagle3_q(e), p->at.kv);
    struct norm_rope rope = layer_norm_rope(&e->ops, p->rows, e->options.sizes->kv_heads, p->at.kv,
                                            2 * eagle3_kv(e), &layer->k_norm, p->places, p->at.key);
    backend->kernels->norm_rope_forward(stream, &rope);
}

struct attention eagle3_attention(const struct eagle3 *e, const struct eagle3_pass *p)
{
    const struct drafter_sizes *s = e->options.sizes;
    const struct eagle3_rows *context = &e->layers[p->l].context;
    int64_t kv = eagle3_kv(e);
    return (struct attention){.rows = p->rows,
                              .context = e->input.row->tokens,
                              .heads = s->heads,
                              .kv_heads = s->kv_heads,
                              .head_dim = s->head_dim,
                              .scale = 1.0f / sqrtf((float)s->head_dim),
                              .type = e->options.compute,
                              .q = p->at.q,
                              .k_context = context->key,
                              .v_context = layer_at(context->kv, e->options.compute, kv),
                              .v_context_stride = 2 * kv,
                              .begin = p->begin,
                              .end = p->end,
                              .out = p->at.attention,
                              .lse = p->at.lse};
}

struct diagonal eagle3_diagonal(const struct eagle3 *e, const struct eagle3_pass *p)
{
    const struct drafter_sizes *s = e->options.sizes;
    const struct eagle3_rows *own = &e->layers[p->l].steps;
    int64_t kv = eagle3_kv(e);
    return (struct diagonal){.rows = p->rows,
                             .steps = p->step,
                             .heads = s->heads,
                             .kv_heads = s->kv_heads,
                             .head_dim = s->head_dim,
                             .scale = 1.0f / sqrtf((float)s->head_dim),
                             .type = e->options.compute,
                             .q = p->at.q,
                             .k = own->key,
                             .v = layer_at(own->kv, e->options.compute, kv),
                             .k_step = p->rows * kv,
                             .k_stride = kv,
                             .v_step = p->rows * 2 * kv,
                             .v_stride = 2 * kv,
                             .out = p->at.attention,
                             .lse = p->at.lse};
}

static void attend(const struct eagle3 *e, const struct backend *backend, struct stream *stream,
                   const struct eagle3_pass *p)
{
    struct attention attention = eagle3_attention(e, p);
    backend->kernels->attention_forward(stream, &attention);
    if (p->step <= 0)
        return;
    struct diagonal diagonal = eagle3_diagonal(e, p);
    backend->kernels->diagonal_forward(stream, &diagonal);
}

// From attention to gate_up.
static void behind_attention(const struct eagle3 *e, const struct backend *backend,
                             struct stream *stream, const struct eagle3_pass *p)
{
    const struct eagle3_layer *layer = &e->layers[p->l];
    layer_linear(&e->ops, backend, stream, p->rows, p->at.attention, &layer->o, residual_of(e, p),
                 p->at.mid);
    struct rms_norm norm =
        layer_norm(&e->ops, p->rows, p->at.mid, DTYPE_F32, &layer->norm2, p->at.n2, p->at.rstd2);
    backend->kernels->rms_norm_forward(stream, &norm);
    layer_linear(&e->ops, backend, stream, p->rows, p->at.n2, &layer->gate_up, NULL, p->at.gate_up);
}

void eagle3_pass_forward(struct eagle3 *e, const struct backend *backend, struct stream *stream,
                         const struct eagle3_pass *p)
{
    eagle3_need_weights(e, eagle3_keys_part(p->l));
    if (!comes_normed(e, p))
        first_norm(e, backend, stream, p);
    if (p->keys)
        keys_forward(e, backend, stream, p);
    if (!p->queries)
        return;
    queries_forward(e, backend, stream, p);
    attend(e, backend, stream, p);
    eagle3_need_weights(e, eagle3_rest_part(p->l));
    behind_attention(e, backend, stream, p);
    backend->kernels->swiglu_forward(stream,
                                     &(struct swiglu){.rows = p->rows,
                                                      .width = e->options.sizes->intermediate,
                                                      .type = e->options.compute,
                                                      .gate_up = p->at.gate_up,
                                                      .y = p->at.act});
    layer_linear(&e->ops, backend, stream, p->rows, p->at.act, &e->layers[p->l].down, p->at.mid,
                 p->out);
}

// The input of a step, where it or its norm's output was not kept.
static void input_again(const struct eagle3 *e, const struct backend *backend,
                        struct stream *stream, const struct eagle3_pass *p)
{
    const struct drafter_sizes *s = e->options.sizes;
    if (p->step == 0)
        eagle3_step_input(e, backend, stream);
    else if (p->l == 0 && s->norm_output)
        to_next(e, backend, stream, p->step - 1, NULL);
}

void eagle3_pass_recompute(struct eagle3 *e, const struct backend *backend, struct stream *stream,
                           const struct eagle3_pass *p)
{
    enum recompute_level level = p->step < 0 ? RECOMPUTE_LEVEL_LAYER : e->options.recompute;
    if (level == RECOMPUTE_LEVEL_NONE)
        return;
    if (p->step >= 0)
        input_again(e, backend, stream, p);
    if (!comes_normed(e, p))
        first_norm(e, backend, stream, p);
    if (!p->queries)
        return;
    if (level == RECOMPUTE_LEVEL_LAYER) {
        queries_forward(e, backend, stream, p);
        behind_attention(e, backend, stream, p);
        return;
    }
    struct rms_norm norm = layer_norm(&e->ops, p->rows, p->at.mid, DTYPE_F32,
                                      &e->layers[p->l].norm2, p->at.n2, p->at.rstd2);
    backend->kernels->rms_norm_forward(stream, &norm);
}

// ---- the steps of a group ------------------------------------------------------------------------

// Sends `count` arrays of `each` numbers that lie behind one another, several at a time as long as they are few
// enough for a GPU to read them itself, past the rows on their way to it (see backend_cuda.cu).
static void send_arrays(const struct backend *backend, struct stream *stream, int32_t *to,
                        const int32_t *from, int64_t count, int64_t each)
{
    enum { TOGETHER = 64 << 10 };
    int64_t some = each < TOGETHER ? TOGETHER / each : 1;
    for (int64_t i = 0; i < count; i += some) {
        int64_t n = (count - i < some ? count - i : some) * each;
        backend->copy_in(stream, to + i * each, from + i * each, (size_t)n * sizeof(*to));
    }
}

// For each step and token the row that reads its embedding.
static void group_readers(struct eagle3 *e, const struct backend *backend, struct stream *stream)
{
    const struct eagle3_buffers *b = e->buffers;
    int64_t tokens = e->input.row->tokens;
    for (int64_t i = 0, r = 0; i < e->steps; i++) {
        int32_t *reader = b->h_readers + i * tokens;
        for (int64_t t = 0; t < tokens; t++)
            reader[t] = -1;
        for (int64_t k = 0; k < e->count; k++, r++)
            reader[b->h_group[r]] = (int32_t)r; // its token
    }
    int64_t arrays = e->steps;
    if (eagle3_sums_once(e)) {
        int32_t *reader = b->h_readers + arrays++ * tokens;
        for (int32_t t = 0; t < tokens; t++)
            reader[eagle3_token(e->input.row, t, 0)] = (int32_t)(e->steps * e->count) + t;
    }
    send_arrays(backend, stream, b->readers, b->h_readers, arrays, tokens);
}

// What each step of each position reads.
static void group_inputs(struct eagle3 *e, const struct backend *backend, struct stream *stream,
                         const int32_t *anchors)
{
    const struct drafter_sizes *s = e->options.sizes;
    const struct row *row = e->input.row;
    struct eagle3_buffers *b = e->buffers;
    int64_t count = e->count, apart = eagle3_apart(e->steps * count);
    int32_t *token = b->h_group, *places = token + apart, *full = places + apart,
            *end = full + apart, *sliding = end + apart, *position = sliding + apart;
    for (int64_t i = 0, r = 0; i < e->steps; i++)
        for (int64_t k = 0; k < count; k++, r++) {
            int32_t t = anchors[k] - 1;
            BUG_UNLESS(t >= 0 && row->positions[anchors[k]] > 0);
            token[r] = eagle3_token(row, t, i);
            places[r] = row->positions[t] + 1 + (int32_t)i;
            context_range_ttt(row, t, i, 0, &full[r], &end[r]);
            context_range_ttt(row, t, i, s->window, &sliding[r], &end[r]);
            position[k] = t;
        }
    b->step_places = b->token + apart;
    b->step_full = b->step_places + apart;
    b->step_end = b->step_full + apart;
    b->step_sliding = b->step_end + apart;
    // The last of them is that of sliding layers.
    send_arrays(backend, stream, b->token, token, EAGLE3_ROW_ARRAYS - (s->window == 0), apart);
    backend->copy_in(stream, b->position, position, (size_t)count * sizeof(int32_t));
    if (eagle3_waits(e))
        group_readers(e, backend, stream);
}

void eagle3_step_input(const struct eagle3 *e, const struct backend *backend, struct stream *stream)
{
    int64_t last = e->options.sizes->layers - 1;
    struct eagle3_pass p = eagle3_step_pass(e, last, 0);
    struct norm_chain both =
        norm_both(e, e->count, e->layers[last].context.x, &e->layers[last].norm1,
                  keeps_both(e, &p) ? p.at.residual : NULL, p.at.n1, p.at.rstd1);
    both.index = e->buffers->position;
    both.x_rows = e->input.row->tokens;
    both.copy = p.at.x;
    backend->kernels->norm_chain(stream, &both);
}

// The final norm of a step, and where the next step reads it.
static void step_end(struct eagle3 *e, const struct backend *backend, struct stream *stream,
                     int64_t step)
{
    const struct drafter_sizes *s = e->options.sizes;
    const struct eagle3_buffers *b = e->buffers;
    int64_t at = step * e->count, kept = e->options.training ? at : 0;
    const float *last = b->last + kept * s->hidden;
    void *hidden = rows_at(e, b->hidden, at, s->hidden);
    if (s->norm_output && step + 1 < e->steps) {
        to_next(e, backend, stream, step, hidden);
        return;
    }
    struct rms_norm norm =
        layer_norm(&e->ops, e->count, last, DTYPE_F32, &b->norm, hidden, b->last_rstd + kept);
    backend->kernels->rms_norm_forward(stream, &norm);
}

const void *eagle3_group_forward(struct eagle3 *e, const struct backend *backend,
                                 struct stream *stream, const int32_t *anchors, int64_t count,
                                 int64_t steps)
{
    const struct drafter_sizes *s = e->options.sizes;
    BUG_UNLESS(steps > 0 && steps <= s->ttt_steps && count > 0 && count <= eagle3_capacity(e));
    e->count = count;
    e->steps = steps;
    group_inputs(e, backend, stream, anchors);
    eagle3_step_input(e, backend, stream);
    for (int64_t i = 0; i < steps; i++) {
        // What the layers before the last make of step 0 is the context's.
        for (int64_t l = i == 0 ? s->layers - 1 : 0; l < s->layers; l++) {
            struct eagle3_pass pass = eagle3_step_pass(e, l, i);
            eagle3_pass_forward(e, backend, stream, &pass);
        }
        eagle3_need_weights(e, e->options.params->parts - 1);
        step_end(e, backend, stream, i);
    }
    return e->buffers->hidden;
}
