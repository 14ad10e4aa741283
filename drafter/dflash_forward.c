// Owns the drafter's forward pass: context of a row, blocks of a group.
#include "drafter/dflash_internal.h"

#include <math.h>
#include <string.h>

#include "base/log.h"
#include "base/rng.h"
#include "data/anchors.h"

void dflash_need_weights(const struct dflash *d, int part)
{
    if (d->hooks != NULL)
        d->hooks->weights_needed(d->hooks->context, part);
}

void dflash_linear(const struct dflash *d, const struct backend *backend, struct stream *stream,
                   int64_t rows, const void *in, const struct dflash_tensor *weight,
                   const void *add, void *out)
{
    enum dtype type = d->options.compute;
    backend->kernels->gemm(stream, &(struct gemm){.m = rows,
                                                  .n = weight->rows,
                                                  .k = weight->columns,
                                                  .transpose_b = true,
                                                  .alpha = 1.0f,
                                                  .beta = add != NULL ? 1.0f : 0.0f,
                                                  .a = in,
                                                  .b = weight->weight,
                                                  .d = add,
                                                  .c = out,
                                                  .a_type = type,
                                                  .b_type = type,
                                                  .c_type = add != NULL ? DTYPE_F32 : type});
}

struct rms_norm dflash_norm(const struct dflash *d, int64_t rows, const void *x, enum dtype x_type,
                            const struct dflash_tensor *norm, void *y, float *rstd)
{
    return (struct rms_norm){.rows = rows,
                             .width = norm->rows,
                             .eps = d->options.sizes->eps,
                             .type = d->options.compute,
                             .x_type = x_type,
                             .x = x,
                             .weight = norm->weight,
                             .y = y,
                             .rstd = rstd,
                             .dweight = norm->grad,
                             .scratch = d->buffers->norm_scratch};
}

struct norm_rope dflash_norm_rope(const struct dflash *d, int64_t rows, int64_t heads,
                                  const void *x, int64_t stride, const struct dflash_tensor *norm,
                                  const int32_t *positions, void *y)
{
    const struct drafter_sizes *s = d->options.sizes;
    return (struct norm_rope){.rows = rows,
                              .heads = heads,
                              .head_dim = s->head_dim,
                              .eps = s->eps,
                              .type = d->options.compute,
                              .x = x,
                              .x_stride = stride,
                              .weight = norm->weight,
                              .positions = positions,
                              .cos = d->buffers->cos,
                              .sin = d->buffers->sin,
                              .table_rows = d->options.max_tokens + s->block_size,
                              .y = y,
                              .dweight = norm->grad,
                              .scratch = d->buffers->norm_scratch};
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
                              .context = d->row->tokens,
                              .heads = s->heads,
                              .kv_heads = s->kv_heads,
                              .head_dim = s->head_dim,
                              .causal = layer->sliding && s->sliding_causal,
                              .scale = 1.0f / sqrtf((float)s->head_dim),
                              .type = type,
                              .q = layer->q,
                              .k_block = layer->key,
                              .v_block = dflash_at(layer->qkv_rows, type, q + kv),
                              .k_context = layer->context_k,
                              .v_context = dflash_at(layer->context_kv, type, kv),
                              .v_block_stride = q + 2 * kv,
                              .v_context_stride = 2 * kv,
                              .begin = layer->sliding ? b->begin_sliding : b->begin_full,
                              .end = b->end,
                              .out = layer->attention,
                              .lse = layer->lse};
}

void dflash_load_context(struct dflash *d, const struct backend *backend, struct stream *stream)
{
    const struct drafter_options *o = &d->options;
    struct dflash_buffers *b = d->buffers;
    d->fc_in = dflash_reads_features(o) ? (const void *)d->features : b->context_in;
    if (dflash_reads_features(o))
        return;
    const struct feature_layout *f = &o->features;
    struct context_load load = {.tokens = d->row->tokens,
                                .layers = o->sizes->features,
                                .hidden = o->sizes->hidden,
                                .in = d->features,
                                .in_bytes = f->stride * (int64_t)sizeof(bf16),
                                .plane = o->plane,
                                .type = o->compute,
                                .out = b->context_in,
                                .noise = d->noise,
                                .noise_std = o->noise_std,
                                .noise_key = b->noise_key,
                                .positions = b->positions,
                                .blank = b->blank};
    if (f->float8) {
        load.in = d->features + f->codes;
        load.scales = (const float *)(const void *)d->features;
        load.scale_stride = load.in_bytes / (int64_t)sizeof(float);
    }
    backend->kernels->context_load(stream, &load);
}

// Positions, blanks and noise keys of the row's tokens.
static void row_inputs(struct dflash *d, const struct backend *backend, struct stream *stream,
                       uint64_t seed)
{
    struct dflash_buffers *b = d->buffers;
    const struct row *row = d->row;
    size_t tokens = (size_t)row->tokens;
    memcpy(b->h_positions, row->positions, tokens * sizeof(int32_t));
    memcpy(b->h_blank, row->blank, tokens);
    backend->copy_in(stream, b->positions, b->h_positions, tokens * sizeof(int32_t));
    backend->copy_in(stream, b->blank, b->h_blank, tokens);
    if (d->noise == NOISE_KIND_NONE)
        return;
    for (int64_t document = 0; document < row->documents; document++) {
        struct rng_key key = rng_key_make(seed, row->epoch, row->doc_ids[document], RNG_NOISE);
        for (int64_t t = row->doc_offsets[document]; t < row->doc_offsets[document + 1]; t++) {
            b->h_noise_key[2 * t] = key.word[0];
            b->h_noise_key[2 * t + 1] = key.word[1];
        }
    }
    backend->copy_in(stream, b->noise_key, b->h_noise_key, tokens * 2 * sizeof(uint32_t));
}

void dflash_noise(const struct dflash *d, const struct row *row, uint64_t seed, float *out)
{
    const struct drafter_options *o = &d->options;
    int64_t layers = o->sizes->features, hidden = o->sizes->hidden;
    for (int64_t document = 0; document < row->documents; document++) {
        struct rng_key key = rng_key_make(seed, row->epoch, row->doc_ids[document], RNG_NOISE);
        for (int64_t t = row->doc_offsets[document]; t < row->doc_offsets[document + 1]; t++)
            for (int64_t i = 0; i < layers * hidden; i++) {
                uint64_t counter = (uint64_t)(row->positions[t] * layers * hidden + i);
                float draw = o->noise == NOISE_KIND_NORMAL
                                 ? rng_normal(key, counter)
                                 : 2.0f * rng_uniform(key, counter) - 1.0f;
                out[t * layers * hidden + i] = o->noise_std * draw;
            }
    }
}

void dflash_context_forward(struct dflash *d, const struct backend *backend, struct stream *stream,
                            const struct row *row, const bf16 *features, bool noisy, uint64_t seed)
{
    const struct drafter_options *o = &d->options;
    const struct drafter_sizes *s = o->sizes;
    struct dflash_buffers *b = d->buffers;
    int64_t t = row->tokens, kv = s->kv_heads * s->head_dim;
    if (t > o->max_tokens)
        BUG("a row of %lld tokens, planned for %lld", (long long)t, (long long)o->max_tokens);
    d->row = row;
    d->features = features;
    d->noise = noisy ? o->noise : NOISE_KIND_NONE;
    row_inputs(d, backend, stream, seed);
    dflash_load_context(d, backend, stream);
    dflash_need_weights(d, 0);
    backend->kernels->gemm(stream, &(struct gemm){.m = t,
                                                  .n = s->hidden,
                                                  .k = b->fc.columns,
                                                  .transpose_b = true,
                                                  .alpha = 1.0f,
                                                  .a = d->fc_in,
                                                  .lda = d->fc_stride,
                                                  .b = b->fc.weight,
                                                  .c = b->fused,
                                                  .a_type = o->compute,
                                                  .b_type = o->compute,
                                                  .c_type = o->compute});
    struct rms_norm norm =
        dflash_norm(d, t, b->fused, o->compute, &b->hidden_norm, b->context, b->fused_rstd);
    backend->kernels->rms_norm_forward(stream, &norm);
    for (int64_t l = 0; l < s->layers; l++) {
        struct dflash_layer *layer = &d->layers[l];
        dflash_need_weights(d, dflash_context_part(l));
        dflash_linear(d, backend, stream, t, b->context, &layer->kv, NULL, layer->context_kv);
        struct norm_rope rope = dflash_norm_rope(d, t, s->kv_heads, layer->context_kv, 2 * kv,
                                                 &layer->k_norm, b->positions, layer->context_k);
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
    const struct row *row = d->row;
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

    struct rms_norm norm =
        dflash_norm(d, n, layer->x, DTYPE_F32, &layer->input_norm, layer->n1, layer->input_rstd);
    backend->kernels->rms_norm_forward(stream, &norm);
    dflash_linear(d, backend, stream, n, layer->n1, &layer->qkv, NULL, layer->qkv_rows);
    struct norm_rope rope = dflash_norm_rope(d, n, s->heads, layer->qkv_rows, stride,
                                             &layer->q_norm, b->row_positions, layer->q);
    backend->kernels->norm_rope_forward(stream, &rope);
    rope = dflash_norm_rope(d, n, s->kv_heads, dflash_at(layer->qkv_rows, type, q), stride,
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
    dflash_linear(d, backend, stream, n, attention, &layer->o, residual, layer->mid);
    struct rms_norm norm =
        dflash_norm(d, n, layer->mid, DTYPE_F32, &layer->post_norm, layer->n2, layer->post_rstd);
    backend->kernels->rms_norm_forward(stream, &norm);
    dflash_linear(d, backend, stream, n, layer->n2, &layer->gate_up, NULL, layer->gate_up_rows);
    if (out == NULL) // computed again, and the backward pass finds the activations by itself
        return;
    backend->kernels->swiglu_forward(stream, &(struct swiglu){.rows = n,
                                                              .width = s->intermediate,
                                                              .type = d->options.compute,
                                                              .gate_up = layer->gate_up_rows,
                                                              .y = layer->act});
    dflash_linear(d, backend, stream, n, layer->act, &layer->down, layer->mid, out);
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
        dflash_norm(d, d->wanted, b->last, DTYPE_F32, &b->norm, b->hidden, b->last_rstd);
    backend->kernels->rms_norm_forward(stream, &norm);
    return b->hidden;
}
