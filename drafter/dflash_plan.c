// Owns the drafter's buffers: which exist, how large, which layers share them.
#include "drafter/dflash_internal.h"

#include <stdlib.h>

#include "base/log.h"

bool dflash_keeps_cheap(const struct drafter_options *options)
{
    return options->training && options->recompute == RECOMPUTE_LEVEL_NONE;
}

static void bind_layer(struct dflash_layer *layer, const struct drafter_options *o, int64_t l)
{
    const struct drafter_sizes *s = o->sizes;
    layer->sliding = s->sliding[l];
    layer->input_norm = layer_find_in(o, l, "input_layernorm.weight");
    layer->qkv = layer_find_in(o, l, "self_attn.q_proj.weight");
    layer->qkv.rows = (s->heads + 2 * s->kv_heads) * s->head_dim; // q, k and v are joined
    layer->kv = layer_find_in(o, l, "self_attn.k_proj.weight");
    layer->kv.rows = 2 * s->kv_heads * s->head_dim; // k and v are joined
    layer->q_norm = layer_find_in(o, l, "self_attn.q_norm.weight");
    layer->k_norm = layer_find_in(o, l, "self_attn.k_norm.weight");
    layer->o = layer_find_in(o, l, "self_attn.o_proj.weight");
    layer->post_norm = layer_find_in(o, l, "post_attention_layernorm.weight");
    layer->gate_up = layer_find_in(o, l, "mlp.gate_proj.weight");
    layer->gate_up.rows = 2 * s->intermediate; // gate and up are joined
    layer->down = layer_find_in(o, l, "mlp.down_proj.weight");
}

static void plan_context(struct dflash *d, struct arena *arena)
{
    const struct drafter_options *o = &d->options;
    const struct drafter_sizes *s = o->sizes;
    struct dflash_buffers *b = d->buffers;
    int64_t t = o->max_tokens, h = s->hidden, kv = s->kv_heads * s->head_dim;
    const char *group = "context";
    b->cos =
        layer_take(arena, group, -1, "rope_cos", DTYPE_F32, t + s->block_size, s->head_dim / 2);
    b->sin =
        layer_take(arena, group, -1, "rope_sin", DTYPE_F32, t + s->block_size, s->head_dim / 2);
    if (dflash_keeps_cheap(o) && !context_input_direct(o))
        context_input_plan_loaded(&d->input, o, arena);
    b->fused = layer_take(arena, group, -1, "fused", o->compute, t, h);
    b->fused_rstd = layer_take(arena, group, -1, "fused_rstd", DTYPE_F32, t, 1);
    b->context = layer_take(arena, group, -1, "context", o->compute, t, h);
    context_input_plan(&d->input, o, arena);
    for (int64_t l = 0; l < s->layers; l++) {
        struct dflash_layer *layer = &d->layers[l];
        layer->context_kv = layer_take(arena, group, l, "context_kv", o->compute, t, 2 * kv);
        layer->context_k = layer_take(arena, group, l, "context_k", o->compute, t, kv);
        if (!o->training)
            continue;
        layer->dcontext_k = layer_take(arena, group, l, "dcontext_k", DTYPE_F32, t, kv);
        layer->dcontext_v = layer_take(arena, group, l, "dcontext_v", DTYPE_F32, t, kv);
    }
}

// Of the context, what no group's loss lies between.
static void plan_context_scratch(struct dflash *d, struct arena *arena)
{
    const struct drafter_options *o = &d->options;
    const struct drafter_sizes *s = o->sizes;
    struct dflash_buffers *b = d->buffers;
    int64_t t = o->max_tokens, h = s->hidden, kv = s->kv_heads * s->head_dim;
    const char *group = "context";
    if (!dflash_keeps_cheap(o) && !context_input_direct(o))
        context_input_plan_loaded(&d->input, o, arena);
    if (!o->training)
        return;
    b->dcontext = layer_take(arena, group, -1, "dcontext", DTYPE_F32, t, h);
    b->dcontext_rows = layer_take(arena, group, -1, "dcontext_rows", o->compute, t, h);
    b->dkv = layer_take(arena, group, -1, "dkv", o->compute, t, 2 * kv);
}

// A buffer of layer l. `own`: the layer's own, kept until its backward pass; else one for all layers,
// among the scratch.
#define LAYER_BUFFER(own, field, name, type, columns)                                              \
    if ((own) != scratch)                                                                          \
    layer->field = (own) || l == 0 ? layer_take(arena, "activations", l, name, type, n, columns)   \
                                   : d->layers[0].field

// The kept ones, or the scratch.
static void plan_layers(struct dflash *d, struct arena *arena, bool scratch)
{
    const struct drafter_options *o = &d->options;
    const struct drafter_sizes *s = o->sizes;
    int64_t n = o->group_rows, h = s->hidden, q = s->heads * s->head_dim;
    int64_t kv = s->kv_heads * s->head_dim;
    bool keep = o->training && o->recompute != RECOMPUTE_LEVEL_LAYER;
    bool keep_cheap = dflash_keeps_cheap(o);
    for (int64_t l = 0; l < s->layers; l++) {
        struct dflash_layer *layer = &d->layers[l];
        LAYER_BUFFER(true, x, "x", DTYPE_F32, h);
        LAYER_BUFFER(keep, input_rstd, "input_rstd", DTYPE_F32, 1);
        LAYER_BUFFER(keep_cheap, n1, "n1", o->compute, h);
        LAYER_BUFFER(keep, qkv_rows, "qkv", o->compute, q + 2 * kv);
        LAYER_BUFFER(keep, q, "q", o->compute, q);
        LAYER_BUFFER(keep, key, "k", o->compute, kv);
        LAYER_BUFFER(keep, attention, "attention", o->compute, q);
        LAYER_BUFFER(keep, lse, "lse", DTYPE_F32, s->heads);
        LAYER_BUFFER(keep, mid, "mid", DTYPE_F32, h);
        LAYER_BUFFER(keep, post_rstd, "post_rstd", DTYPE_F32, 1);
        LAYER_BUFFER(keep_cheap, n2, "n2", o->compute, h);
        LAYER_BUFFER(keep, gate_up_rows, "gate_up", o->compute, 2 * s->intermediate);
        LAYER_BUFFER(keep_cheap, act, "act", o->compute, s->intermediate);
    }
}

static void plan_group(struct dflash *d, struct arena *arena)
{
    const struct drafter_options *o = &d->options;
    struct dflash_buffers *b = d->buffers;
    int64_t n = o->group_rows, h = o->sizes->hidden;
    const char *group = "activations";
    b->ids = layer_take(arena, group, -1, "ids", DTYPE_I32, n, 1);
    b->row_positions = layer_take(arena, group, -1, "row_positions", DTYPE_I32, n, 1);
    b->begin_full = layer_take(arena, group, -1, "begin_full", DTYPE_I32, n, 1);
    b->begin_sliding = layer_take(arena, group, -1, "begin_sliding", DTYPE_I32, n, 1);
    b->end = layer_take(arena, group, -1, "end", DTYPE_I32, n, 1);
    b->wanted = layer_take(arena, group, -1, "wanted", DTYPE_I32, n, 1);
    b->last = layer_take(arena, group, -1, "last", DTYPE_F32, n, h);
    b->last_rstd = layer_take(arena, group, -1, "last_rstd", DTYPE_F32, n, 1);
    b->hidden = layer_take(arena, group, -1, "hidden", o->compute, n, h);
    b->dx = b->hidden; // nobody reads hidden any more when its gradient comes
}

static void plan_backward(struct dflash *d, struct arena *arena)
{
    const struct drafter_options *o = &d->options;
    const struct drafter_sizes *s = o->sizes;
    struct dflash_buffers *b = d->buffers;
    int64_t n = o->group_rows, h = s->hidden, q = s->heads * s->head_dim;
    int64_t kv = s->kv_heads * s->head_dim;
    const char *group = "backward";
    b->dnorm = layer_take(arena, group, -1, "dnorm", o->compute, n, h);
    b->dact = dflash_keeps_cheap(o)
                  ? layer_take(arena, group, -1, "dact", o->compute, n, s->intermediate)
                  : d->layers[0].act;
    b->dattention = layer_take(arena, group, -1, "dattention", o->compute, n, q);
    b->dq = layer_take(arena, group, -1, "dq", o->compute, n, q);
    b->picked = b->dq; // picked once more before dq comes
    b->dkey = layer_take(arena, group, -1, "dkey", o->compute, n, kv);
    b->dqkv = layer_take(arena, group, -1, "dqkv", o->compute, n, q + 2 * kv);
    b->delta = layer_take(arena, group, -1, "delta", DTYPE_F32, n, s->heads);
    b->norm_scratch = layer_take(arena, group, -1, "norm_scratch", DTYPE_F32, RMS_NORM_PARTS,
                                 h > s->head_dim ? h : s->head_dim);
}

// What training has in the place of a gradient.
static void plan_scoring(struct dflash *d, struct arena *arena)
{
    const struct drafter_options *o = &d->options;
    d->buffers->picked = layer_take(arena, "activations", -1, "picked", o->compute, o->group_rows,
                                    o->sizes->heads * o->sizes->head_dim);
}

void dflash_plan(struct dflash *d, const struct drafter_options *options, struct arena *arena)
{
    BUG_UNLESS(options->group_rows % options->sizes->block_size == 0);
    *d = (struct dflash){.options = *options};
    d->layers = memory_alloc((size_t)options->sizes->layers, sizeof(*d->layers));
    d->buffers = memory_alloc(1, sizeof(*d->buffers));
    const struct drafter_options *o = &d->options;
    d->buffers->fc = layer_find(o, "fc.weight");
    d->buffers->hidden_norm = layer_find(o, "hidden_norm.weight");
    d->buffers->norm = layer_find(o, "norm.weight");
    for (int64_t l = 0; l < o->sizes->layers; l++)
        bind_layer(&d->layers[l], o, l);
    plan_context(d, arena);
    plan_layers(d, arena, false);
    plan_group(d, arena);
    d->ops = (struct layer_ops){.type = o->compute,
                                .eps = o->sizes->eps,
                                .head_dim = o->sizes->head_dim,
                                .cos = d->buffers->cos,
                                .sin = d->buffers->sin,
                                .table_rows = o->max_tokens + o->sizes->block_size};
}

void dflash_plan_scratch(struct dflash *d, struct arena *arena)
{
    plan_context_scratch(d, arena);
    plan_layers(d, arena, true);
    if (d->options.training)
        plan_backward(d, arena);
    else
        plan_scoring(d, arena);
    d->ops.norm_scratch = d->buffers->norm_scratch;
}

static void open_host(struct dflash *d, const struct backend *backend)
{
    size_t rows = (size_t)d->options.group_rows;
    d->backend = backend;
    context_input_open(&d->input, &d->options, backend);
    d->h_index = backend->host_alloc(rows * 6 * sizeof(int32_t));
}

void dflash_open(struct dflash *d, const struct backend *backend, struct stream *stream)
{
    const struct drafter_sizes *s = d->options.sizes;
    layer_fill_rope(s, d->options.max_tokens + s->block_size, backend, stream, d->buffers->cos,
                    d->buffers->sin);
    open_host(d, backend);
}

void dflash_close(struct dflash *d)
{
    context_input_close(&d->input);
    if (d->backend != NULL)
        d->backend->host_free(d->h_index);
    free(d->buffers);
    free(d->layers);
    *d = (struct dflash){0};
}
