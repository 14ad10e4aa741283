// Owns the drafter's forward pass: context of a row, blocks of a group.
#include "drafter/dflash_internal.h"

#include <math.h>
#include <string.h>

#include "base/log.h"
#include "data/anchors.h"

void dflash_need_weights(const struct dflash *d, int part)
{
    if (d->hooks != NULL)
        d->hooks->weights_needed(d->hooks->context, part);
}

struct attention dflash_attention(const struct dflash *d, int64_t l)
{
    const struct drafter_sizes *s = d->options.sizes;
    const struct dflash_layer *layer = &d->layers[l];
    const struct dflash_buffers *b = d->buffers;
    enum dtype type = d->options.compute;
    int64_t q = s->heads * s->head_dim, kv = s->kv_heads * s->head_dim;
    return (struct attention){.rows = d->blocks * s->block_size,
                              .block_size = s->block_size,
                              .context = d->input.row->tokens,
                              .heads = s->heads,
                              .kv_heads = s->kv_heads,
                              .head_dim = s->head_dim,
                              .causal = layer->sliding && s->sliding_causal,
                              .scale = 1.0f / sqrtf((float)s->head_dim),
                              .type = type,
                              .q = layer->q,
                              .k_block = layer->key,
                              .v_block = layer_at(layer->qkv_rows, type, q + kv),
                              .k_context = layer->context_k,
                              .v_context = layer_at(layer->context_kv, type, kv),
                              .v_block_stride = q + 2 * kv,
                              .v_context_stride = 2 * kv,
                              .begin = layer->sliding ? b->begin_sliding : b->begin_full,
                              .end = b->end,
                              .out = layer->attention,
                              .lse = layer->lse};
}

void dflash_context_forward(struct dflash *d, const struct backend *backend, struct stream *stream,
                            const struct row *row, const bf16 *features, bool noisy, uint64_t seed)
{
    const struct drafter_options *o = &d->options;
    const struct drafter_sizes *s = o->sizes;
    struct dflash_buffers *b = d->buffers;
    int64_t t = row->tokens, kv = s->kv_heads * s->head_dim;
    context_input_begin(&d->input, o, backend, stream, row, features, noisy, seed);
    context_input_load(&d->input, o, backend, stream);
    dflash_need_weights(d, 0);
    backend->kernels->gemm(stream, &(struct gemm){.m = t,
                                                  .n = s->hidden,
                                                  .k = b->fc.columns,
                                                  .transpose_b = true,
                                                  .alpha = 1.0f,
                                                  .a = d->input.fc_in,
                                                  .lda = d->input.fc_stride,
                                                  .b = b->fc.weight,
                                                  .c = b->fused,
                                                  .a_type = o->compute,
                                                  .b_type = o->compute,
                                                  .c_type = o->compute});
    struct rms_norm norm =
        layer_norm(&d->ops, t, b->fused, o->compute, &b->hidden_norm, b->context, b->fused_rstd);
    backend->kernels->rms_norm_forward(stream, &norm);
    for (int64_t l = 0; l < s->layers; l++) {
        struct dflash_layer *layer = &d->layers[l];
        dflash_need_weights(d, dflash_context_part(l));
        layer_linear(&d->ops, backend, stream, t, b->context, &layer->kv, NULL, layer->context_kv);
        struct norm_rope rope =
            layer_norm_rope(&d->ops, t, s->kv_heads, layer->context_kv, 2 * kv, &layer->k_norm,
                            d->input.positions, layer->context_k);
        backend->kernels->norm_rope_forward(stream, &rope);
        if (!o->training)
            continue;
        size_t bytes = (size_t)(t * kv) * sizeof(float);
        backend->zero(stream, layer->dcontext_k, bytes);
        backend->zero(stream, layer->dcontext_v, bytes);
    }
}

int64_t dflash_rows_behind(const struct dflash *d, int64_t l)
{
    return l == d->options.sizes->layers - 1 ? d->wanted : d->blocks * d->options.sizes->block_size;
}

bool dflash_picks(const struct dflash *d, int64_t l)
{
    return dflash_rows_behind(d, l) < d->blocks * d->options.sizes->block_size;
}

// Block rows that are wanted, as a matrix of their own.
static void pick_rows(const struct dflash *d, const struct backend *backend, struct stream *stream,
                      const void *in, enum dtype type, int64_t width, void *out)
{
    int64_t rows = d->blocks * d->options.sizes->block_size;
    backend->kernels->gather_rows(stream, &(struct gather_rows){.rows = d->wanted,
                                                                .width = width,
                                                                .in = in,
                                                                .in_rows = rows,
                                                                .in_stride = width,
                                                                .in_type = type,
                                                                .out_type = type,
                                                                .index = d->buffers->wanted,
                                                                .scale = 1.0f,
                                                                .out = out});
}

const void *dflash_attention_behind(const struct dflash *d, const struct backend *backend,
                                    struct stream *stream, int64_t l)
{
    const struct drafter_sizes *s = d->options.sizes;
    if (!dflash_picks(d, l))
        return d->layers[l].attention;
    pick_rows(d, backend, stream, d->layers[l].attention, d->options.compute,
              s->heads * s->head_dim, d->buffers->picked);
    return d->buffers->picked;
}

// Which rows are wanted: all where there is no list.
static void group_wanted(struct dflash *d, const struct backend *backend, struct stream *stream,
                         const int32_t *wanted, int64_t count)
{
    int32_t *list = d->h_index + 5 * d->options.group_rows;
    int64_t rows = d->blocks * d->options.sizes->block_size;
    d->wanted = wanted != NULL ? count : rows;
    BUG_UNLESS(d->wanted > 0 && d->wanted <= rows);
    if (d->wanted == rows)
        return;
    memcpy(list, wanted, (size_t)count * sizeof(*list));
    backend->copy_in(stream, d->buffers->wanted, list, (size_t)count * sizeof(*list));
}

// Token ids, positions and context bounds of the group's rows.
static void group_inputs(struct dflash *d, const struct backend *backend, struct stream *stream,
                         const int32_t *anchors, int64_t count)
{
    const struct drafter_sizes *s = d->options.sizes;
    const struct row *row = d->input.row;
    struct dflash_buffers *b = d->buffers;
    int64_t n = count * s->block_size, capacity = d->options.group_rows;
    int32_t *ids = d->h_index, *positions = ids + capacity, *full = positions + capacity,
            *sliding = full + capacity, *end = sliding + capacity;
    for (int64_t block = 0, r = 0; block < count; block++)
        for (int64_t k = 0; k < s->block_size; k++, r++) {
            int32_t anchor = anchors[block];
            ids[r] = k == 0 ? row->input_ids[anchor] : (int32_t)s->mask_token_id;
            positions[r] = row->positions[anchor] + (int32_t)k;
            context_range(row, anchor, k, 0, s->window_origin, &full[r], &end[r]);
            context_range(row, anchor, k, s->window, s->window_origin, &sliding[r], &end[r]);
        }
    size_t bytes = (size_t)n * sizeof(int32_t);
    backend->copy_in(stream, b->ids, ids, bytes);
    backend->copy_in(stream, b->row_positions, positions, bytes);
    backend->copy_in(stream, b->begin_full, full, bytes);
    backend->copy_in(stream, b->begin_sliding, sliding, bytes);
    backend->copy_in(stream, b->end, end, bytes);
}

// From a layer's input to its attention.
static void attention_layer_forward(struct dflash *d, const struct backend *backend,
                                    struct stream *stream, int64_t l)
{
    const struct drafter_sizes *s = d->options.sizes;
    struct dflash_layer *layer = &d->layers[l];
    struct dflash_buffers *b = d->buffers;
    enum dtype type = d->options.compute;
    int64_t n = d->blocks * s->block_size, q = s->heads * s->head_dim;
    int64_t kv = s->kv_heads * s->head_dim, stride = q + 2 * kv;

    struct rms_norm norm = layer_norm(&d->ops, n, layer->x, DTYPE_F32, &layer->input_norm,
                                      layer->n1, layer->input_rstd);
    backend->kernels->rms_norm_forward(stream, &norm);
    layer_linear(&d->ops, backend, stream, n, layer->n1, &layer->qkv, NULL, layer->qkv_rows);
    struct norm_rope rope = layer_norm_rope(&d->ops, n, s->heads, layer->qkv_rows, stride,
                                            &layer->q_norm, b->row_positions, layer->q);
    backend->kernels->norm_rope_forward(stream, &rope);
    rope = layer_norm_rope(&d->ops, n, s->kv_heads, layer_at(layer->qkv_rows, type, q), stride,
                           &layer->k_norm, b->row_positions, layer->key);
    backend->kernels->norm_rope_forward(stream, &rope);
    struct attention attention = dflash_attention(d, l);
    backend->kernels->attention_forward(stream, &attention);
}

// From a layer's attention to its end; out as in dflash_layer_forward.
static void mlp_forward(struct dflash *d, const struct backend *backend, struct stream *stream,
                        int64_t l, void *out)
{
    const struct drafter_sizes *s = d->options.sizes;
    struct dflash_layer *layer = &d->layers[l];
    int64_t n = dflash_rows_behind(d, l);
    const void *attention = dflash_attention_behind(d, backend, stream, l);
    const float *residual = layer->x;
    if (dflash_picks(d, l)) {
        pick_rows(d, backend, stream, layer->x, DTYPE_F32, s->hidden, layer->mid);
        residual = layer->mid;
    }
    layer_linear(&d->ops, backend, stream, n, attention, &layer->o, residual, layer->mid);
    struct rms_norm norm = layer_norm(&d->ops, n, layer->mid, DTYPE_F32, &layer->post_norm,
                                      layer->n2, layer->post_rstd);
    backend->kernels->rms_norm_forward(stream, &norm);
    layer_linear(&d->ops, backend, stream, n, layer->n2, &layer->gate_up, NULL,
                 layer->gate_up_rows);
    if (out == NULL) // computed again, and the backward pass finds the activations by itself
        return;
    backend->kernels->swiglu_forward(stream, &(struct swiglu){.rows = n,
                                                              .width = s->intermediate,
                                                              .type = d->options.compute,
                                                              .gate_up = layer->gate_up_rows,
                                                              .y = layer->act});
    layer_linear(&d->ops, backend, stream, n, layer->act, &layer->down, layer->mid, out);
}

void dflash_layer_forward(struct dflash *d, const struct backend *backend, struct stream *stream,
                          int64_t l, void *out)
{
    attention_layer_forward(d, backend, stream, l);
    mlp_forward(d, backend, stream, l, out);
}

const void *dflash_group_forward(struct dflash *d, const struct backend *backend,
                                 struct stream *stream, const int32_t *anchors, int64_t count,
                                 const int32_t *wanted, int64_t wanted_count)
{
    const struct drafter_options *o = &d->options;
    const struct drafter_sizes *s = o->sizes;
    struct dflash_buffers *b = d->buffers;
    int64_t n = count * s->block_size;
    if (n > o->group_rows)
        BUG("a group of %lld rows, planned for %lld", (long long)n, (long long)o->group_rows);
    d->blocks = count;
    group_inputs(d, backend, stream, anchors, count);
    group_wanted(d, backend, stream, wanted, wanted_count);
    backend->kernels->gather_rows(stream, &(struct gather_rows){.rows = n,
                                                                .width = s->hidden,
                                                                .in = o->embed,
                                                                .in_rows = o->embed_rows,
                                                                .in_stride = s->hidden,
                                                                .in_type = o->compute,
                                                                .out_type = DTYPE_F32,
                                                                .index = b->ids,
                                                                .scale = o->embed_scale,
                                                                .out = d->layers[0].x});
    for (int64_t l = 0; l < s->layers; l++) {
        dflash_need_weights(d, dflash_layer_part(s->layers, l));
        dflash_layer_forward(d, backend, stream, l,
                             l + 1 < s->layers ? d->layers[l + 1].x : b->last);
    }
    dflash_need_weights(d, o->params->parts - 1);
    struct rms_norm norm =
        layer_norm(&d->ops, d->wanted, b->last, DTYPE_F32, &b->norm, b->hidden, b->last_rstd);
    backend->kernels->rms_norm_forward(stream, &norm);
    return b->hidden;
}
