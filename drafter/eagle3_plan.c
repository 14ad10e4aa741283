// Owns the EAGLE-3 drafter's buffers: which exist, how large, which layers and steps share them.
#include "drafter/eagle3_internal.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/log.h"

int64_t eagle3_q(const struct eagle3 *e)
{
    return e->options.sizes->heads * e->options.sizes->head_dim;
}

int64_t eagle3_kv(const struct eagle3 *e)
{
    return e->options.sizes->kv_heads * e->options.sizes->head_dim;
}

int64_t eagle3_capacity(const struct eagle3 *e)
{
    return e->options.group_rows / e->options.sizes->ttt_steps;
}

bool eagle3_keeps(const struct eagle3 *e, enum recompute_level level)
{
    return e->options.training && e->options.recompute < level;
}

bool eagle3_waits(const struct eagle3 *e)
{
    return e->options.sizes->layers == 1 && eagle3_keeps(e, RECOMPUTE_LEVEL_LAYER);
}

bool eagle3_sums_once(const struct eagle3 *e)
{
    return eagle3_waits(e) && eagle3_capacity(e) >= e->options.max_tokens - 1;
}

bool eagle3_keeps_act(const struct eagle3 *e)
{
    return e->options.keep_activations && eagle3_waits(e) && eagle3_keeps(e, RECOMPUTE_LEVEL_CHEAP);
}

bool eagle3_chains(const struct eagle3 *e)
{
    const struct drafter_sizes *s = e->options.sizes;
    return eagle3_waits(e) && s->norm_output && !s->norm_before_residual;
}

// A GPU reads four numbers at a time from the host, from addresses that are multiples of as many bytes; from others
// it reads byte after byte.
int64_t eagle3_apart(int64_t rows)
{
    return (rows + 3) / 4 * 4;
}

struct layer_tensor eagle3_columns(const struct drafter_options *o, struct layer_tensor matrix,
                                   int64_t first)
{
    matrix.weight = layer_at(matrix.weight, o->compute, first);
    matrix.grad = matrix.grad != NULL ? matrix.grad + first : NULL;
    matrix.stride = matrix.columns;
    matrix.columns = o->sizes->hidden;
    return matrix;
}

static void bind_qkv(struct eagle3_layer *layer, const struct drafter_options *o, int64_t l)
{
    const struct drafter_sizes *s = o->sizes;
    layer->q = layer_find_in(o, l, "self_attn.q_proj.weight");
    layer->qkv = layer->q;
    layer->qkv.rows = (s->heads + 2 * s->kv_heads) * s->head_dim; // q, k and v are joined
    layer->kv = layer_find_in(o, l, "self_attn.k_proj.weight");
    layer->kv.rows = 2 * s->kv_heads * s->head_dim;
    if (l > 0)
        return;
    layer->q = eagle3_columns(o, layer->q, s->hidden);
    layer->qkv = eagle3_columns(o, layer->qkv, s->hidden);
    layer->kv = eagle3_columns(o, layer->kv, s->hidden);
}

static void bind_layer(struct eagle3_layer *layer, const struct drafter_options *o, int64_t l)
{
    const struct drafter_sizes *s = o->sizes;
    layer->sliding = s->sliding[l];
    layer->norm1 = layer_find_in(o, l, l == 0 ? "hidden_norm.weight" : "input_layernorm.weight");
    bind_qkv(layer, o, l);
    if (s->head_norms) {
        layer->q_norm = layer_find_in(o, l, "self_attn.q_norm.weight");
        layer->k_norm = layer_find_in(o, l, "self_attn.k_norm.weight");
    }
    layer->o = layer_find_in(o, l, "self_attn.o_proj.weight");
    layer->norm2 = layer_find_in(o, l, "post_attention_layernorm.weight");
    layer->gate_up = layer_find_in(o, l, "mlp.gate_proj.weight");
    layer->gate_up.rows = 2 * s->intermediate; // gate and up are joined
    layer->down = layer_find_in(o, l, "mlp.down_proj.weight");
}

static void bind_all(struct eagle3 *e)
{
    const struct drafter_options *o = &e->options;
    struct eagle3_buffers *b = e->buffers;
    b->fc = layer_find(o, "fc.weight");
    if (o->sizes->norm_before_fc)
        b->input_norm = layer_find(o, "input_norm.weight");
    for (int64_t f = 0; o->sizes->fc_norm && f < o->sizes->features; f++) {
        char name[48];
        snprintf(name, sizeof(name), "fc_norm.%lld.weight", (long long)f);
        b->fc_norm[f] = layer_find(o, name);
    }
    b->norm = layer_find(o, "norm.weight");
    for (int64_t l = 0; l < o->sizes->layers; l++)
        bind_layer(&e->layers[l], o, l);
    b->embed_norm = layer_find_in(o, 0, "input_layernorm.weight");
    b->embed_qkv = layer_find_in(o, 0, "self_attn.q_proj.weight");
    b->embed_qkv.rows = eagle3_q(e) + 2 * eagle3_kv(e);
    b->embed_qkv = eagle3_columns(o, b->embed_qkv, 0);
}

static void plan_context_layer(struct eagle3 *e, int64_t l, struct arena *arena)
{
    const struct drafter_options *o = &e->options;
    const struct drafter_sizes *s = o->sizes;
    struct eagle3_layer *layer = &e->layers[l];
    struct eagle3_rows *r = &layer->context;
    int64_t t = o->max_tokens, q = eagle3_q(e), kv = eagle3_kv(e);
    const char *group = "context";
    r->x = layer_take(arena, group, l, "context_x", DTYPE_F32, t, s->hidden);
    r->rstd1 = layer_take(arena, group, l, "context_rstd", DTYPE_F32, t, 1);
    r->kv = layer_take(arena, group, l, "context_kv", o->compute, t, 2 * kv);
    r->key = layer_take(arena, group, l, "context_k", o->compute, t, kv);
    if (l < s->layers - 1) {
        r->attention = layer_take(arena, group, l, "context_attention", o->compute, t, q);
        r->lse = layer_take(arena, group, l, "context_lse", DTYPE_F32, t, s->heads);
        r->rstd2 = layer_take(arena, group, l, "context_rstd2", DTYPE_F32, t, 1);
    }
    if (!o->training)
        return;
    layer->dkey = layer_take(arena, group, l, "dcontext_k", DTYPE_F32, t, kv);
    layer->dvalue = layer_take(arena, group, l, "dcontext_v", DTYPE_F32, t, kv);
}

// Widest of the norms whose input wants no gradient.
static int64_t first_width(const struct drafter_sizes *s)
{
    return s->norm_before_fc ? s->features * s->hidden : s->hidden;
}

static void plan_context(struct eagle3 *e, struct arena *arena)
{
    const struct drafter_options *o = &e->options;
    const struct drafter_sizes *s = o->sizes;
    struct eagle3_buffers *b = e->buffers;
    int64_t t = o->max_tokens, qkv = eagle3_q(e) + 2 * eagle3_kv(e);
    const char *group = "context";
    b->cos =
        layer_take(arena, group, -1, "rope_cos", DTYPE_F32, e->ops.table_rows, s->head_dim / 2);
    b->sin =
        layer_take(arena, group, -1, "rope_sin", DTYPE_F32, e->ops.table_rows, s->head_dim / 2);
    context_input_plan(&e->input, o, arena);
    b->ids = layer_take(arena, group, -1, "ids", DTYPE_I32, 3, t); // next and places behind them
    if (s->layers > 1) {
        b->begin_full = layer_take(arena, group, -1, "context_full", DTYPE_I32, t, 1);
        b->begin_sliding = layer_take(arena, group, -1, "context_sliding", DTYPE_I32, t, 1);
        b->end = layer_take(arena, group, -1, "context_end", DTYPE_I32, t, 1);
    }
    b->embed_part = layer_take(arena, group, -1, "embed_part", o->compute, t, qkv);
    if (o->training) {
        b->ones = layer_take(arena, group, -1, "ones", DTYPE_F32, first_width(s), 1);
        b->dembed_part = layer_take(arena, group, -1, "dembed_part", DTYPE_F32, t, qkv);
        b->dx_context = layer_take(arena, group, -1, "dx_context", o->compute, t, s->hidden);
    }
    if (eagle3_waits(e))
        b->readers = layer_take(arena, group, -1, "readers", DTYPE_I32, s->ttt_steps + 1, t);
    for (int64_t l = 0; l < s->layers; l++)
        plan_context_layer(e, l, arena);
}

// Steps whose input of the first layer is kept: that of step 0, and of the others none, one or all.
static int64_t first_inputs(const struct eagle3 *e)
{
    const struct drafter_sizes *s = e->options.sizes;
    int64_t others = s->ttt_steps - 1;
    if (!s->norm_output)
        others = 0;
    else if (eagle3_chains(e) && others > 1)
        others = 1;
    return 1 + others;
}

// Of a layer's steps, what is kept for each; the rest is scratch of one step.
static void plan_layer(struct eagle3 *e, int64_t l, struct arena *arena)
{
    const struct drafter_options *o = &e->options;
    const struct drafter_sizes *s = o->sizes;
    struct eagle3_rows *r = &e->layers[l].steps;
    int64_t one = eagle3_capacity(e), n = o->training ? o->group_rows : one, h = s->hidden;
    int64_t q = eagle3_q(e), kv = eagle3_kv(e);
    int64_t own = s->ttt_steps > 1 ? one * (s->ttt_steps - 1) : one;
    const char *group = "activations";
    if (l > 0)
        r->x = layer_take(arena, group, l, "x", DTYPE_F32, n, h);
    else if (eagle3_keeps(e, RECOMPUTE_LEVEL_CHEAP))
        r->x = layer_take(arena, group, l, "x", DTYPE_F32, first_inputs(e) * one, h);
    r->rstd1 = layer_take(arena, group, l, "rstd1", DTYPE_F32, n, 1);
    r->rstd2 = layer_take(arena, group, l, "rstd2", DTYPE_F32, n, 1);
    r->kv = layer_take(arena, group, l, "kv", o->compute, own, 2 * kv);
    r->key = layer_take(arena, group, l, "k", o->compute, own, kv);
    r->attention = layer_take(arena, group, l, "attention", o->compute, n, q);
    r->lse = layer_take(arena, group, l, "lse", DTYPE_F32, n, s->heads);
    if (eagle3_keeps(e, RECOMPUTE_LEVEL_LAYER)) {
        r->q = layer_take(arena, group, l, "q", o->compute, n, q);
        r->q_raw = s->head_norms ? layer_take(arena, group, l, "q_raw", o->compute, n, q) : r->q;
        r->mid = layer_take(arena, group, l, "mid", DTYPE_F32, n, h);
        r->gate_up = layer_take(arena, group, l, "gate_up", o->compute, n, 2 * s->intermediate);
    }
    if (eagle3_keeps(e, RECOMPUTE_LEVEL_CHEAP)) {
        r->n1 = layer_take(arena, group, l, "n1", o->compute, n, h);
        r->n2 = layer_take(arena, group, l, "n2", o->compute, n, h);
    }
    if (eagle3_keeps_act(e))
        r->act = layer_take(arena, group, l, "act", o->compute, n, s->intermediate);
}

static void plan_group(struct eagle3 *e, struct arena *arena)
{
    const struct drafter_options *o = &e->options;
    struct eagle3_buffers *b = e->buffers;
    int64_t n = o->group_rows, one = eagle3_capacity(e), h = o->sizes->hidden;
    int64_t kept = o->training ? n : one;
    const char *group = "activations";
    b->token = layer_take(arena, group, -1, "rows", DTYPE_I32, EAGLE3_ROW_ARRAYS, eagle3_apart(n));
    b->position = layer_take(arena, group, -1, "positions", DTYPE_I32, one, 1);
    for (int64_t l = 0; l < o->sizes->layers; l++)
        plan_layer(e, l, arena);
    b->last = layer_take(arena, group, -1, "last", DTYPE_F32, kept, h);
    b->last_rstd = layer_take(arena, group, -1, "last_rstd", DTYPE_F32, kept, 1);
    b->hidden = layer_take(arena, group, -1, "hidden", o->compute, n, h);
}

void eagle3_plan(struct eagle3 *e, const struct drafter_options *options, struct arena *arena)
{
    const struct drafter_sizes *s = options->sizes;
    BUG_UNLESS(options->group_rows % s->ttt_steps == 0 && s->block_size == s->ttt_steps);
    *e = (struct eagle3){.options = *options};
    e->layers = memory_alloc((size_t)s->layers, sizeof(*e->layers));
    e->buffers = memory_alloc(1, sizeof(*e->buffers));
    e->ops = (struct layer_ops){.type = options->compute,
                                .eps = s->eps,
                                .head_dim = s->head_dim,
                                .table_rows = options->max_tokens + s->ttt_steps};
    bind_all(e);
    plan_context(e, arena);
    plan_group(e, arena);
    e->ops.cos = e->buffers->cos;
    e->ops.sin = e->buffers->sin;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

// What one step, or the context of one layer, needs besides what is kept. The context of a single layer
// has keys and values only.
static struct eagle3_rows plan_shared(struct eagle3 *e, struct arena *arena)
{
    const struct drafter_options *o = &e->options;
    const struct drafter_sizes *s = o->sizes;
    bool context = s->layers > 1;
    int64_t one = eagle3_capacity(e), all = eagle3_waits(e) ? o->group_rows : one;
    int64_t most = larger(o->max_tokens, all), n = context ? most : one, h = s->hidden;
    int64_t q = eagle3_q(e);
    const char *group = "activations";
    struct eagle3_rows r = {
        .n1 = layer_take(arena, group, -1, "n1", o->compute,
                         eagle3_keeps(e, RECOMPUTE_LEVEL_CHEAP) ? o->max_tokens : most, h)};
    if (!eagle3_keeps_act(e))
        r.act = layer_take(arena, group, -1, "act", o->compute, n, s->intermediate);
    if (s->norm_before_residual && o->compute != DTYPE_F32)
        r.residual = layer_take(arena, group, -1, "residual", DTYPE_F32, most, h);
    if (!eagle3_keeps(e, RECOMPUTE_LEVEL_CHEAP))
        r.x = layer_take(arena, group, -1, "x", DTYPE_F32, one, h);
    if (context || !eagle3_keeps(e, RECOMPUTE_LEVEL_LAYER)) {
        r.q = layer_take(arena, group, -1, "q", o->compute, n, q);
        r.q_raw = s->head_norms ? layer_take(arena, group, -1, "q_raw", o->compute, n, q) : r.q;
        r.mid = layer_take(arena, group, -1, "mid", DTYPE_F32, n, h);
        r.gate_up = layer_take(arena, group, -1, "gate_up", o->compute, n, 2 * s->intermediate);
    }
    if (context || !eagle3_keeps(e, RECOMPUTE_LEVEL_CHEAP))
        r.n2 = layer_take(arena, group, -1, "n2", o->compute, context ? n : all, h);
    return r;
}

static void use_shared(struct eagle3_rows *rows, const struct eagle3_rows *shared)
{
    rows->n1 = rows->n1 != NULL ? rows->n1 : shared->n1;
    rows->x = rows->x != NULL ? rows->x : shared->x;
    rows->residual = shared->residual;
    if (rows->q == NULL) {
        rows->q = shared->q;
        rows->q_raw = shared->q_raw;
        rows->mid = shared->mid;
        rows->gate_up = shared->gate_up;
    }
    rows->n2 = rows->n2 != NULL ? rows->n2 : shared->n2;
    rows->act = rows->act != NULL ? rows->act : shared->act;
}

static void plan_features(struct eagle3 *e, struct arena *arena)
{
    const struct drafter_options *o = &e->options;
    const struct drafter_sizes *s = o->sizes;
    struct eagle3_buffers *b = e->buffers;
    int64_t t = o->max_tokens, h = s->hidden;
    const char *group = "context";
    if (!context_input_direct(o))
        context_input_plan_loaded(&e->input, o, arena);
    if (s->fc_norm || s->norm_before_fc)
        b->normed = layer_take(arena, group, -1, "fc_normed", o->compute, t, s->features * h);
    b->embed_normed = layer_take(arena, group, -1, "embed_normed", o->compute, t, h);
}

static void plan_backward(struct eagle3 *e, struct arena *arena)
{
    const struct drafter_options *o = &e->options;
    const struct drafter_sizes *s = o->sizes;
    struct eagle3_buffers *b = e->buffers;
    bool waits = eagle3_waits(e);
    int64_t one = eagle3_capacity(e), most = larger(o->max_tokens, one), h = s->hidden;
    int64_t n = s->layers > 1 ? most : one, q = eagle3_q(e), kv = eagle3_kv(e);
    int64_t all = waits ? o->group_rows : n;
    int64_t widest = larger(first_width(s), s->head_dim);
    int64_t own = s->ttt_steps > 1 ? s->layers * one * (s->ttt_steps - 1) : 1;
    const char *group = "backward";
    b->dnorm = layer_take(arena, group, -1, "dnorm", o->compute, most, h);
    b->dact = layer_take(arena, group, -1, "dact", o->compute, eagle3_keeps_act(e) ? one : all,
                         s->intermediate);
    b->dattention = layer_take(arena, group, -1, "dattention", o->compute, n, q);
    b->dq = layer_take(arena, group, -1, "dq", o->compute, n, q);
    b->dqkv = layer_take(arena, group, -1, "dqkv", o->compute,
                         eagle3_sums_once(e) ? all + o->max_tokens : larger(most, all), q + 2 * kv);
    if (waits)
        b->dmid = layer_take(arena, group, -1, "dmid", o->compute, all, h);
    b->delta = layer_take(arena, group, -1, "delta", DTYPE_F32, n, s->heads);
    b->dkey = layer_take(arena, group, -1, "dk", DTYPE_F32, own, kv);
    b->dvalue = layer_take(arena, group, -1, "dv", DTYPE_F32, own, kv);
    b->sums = layer_take(arena, group, -1, "sums", DTYPE_F32,
                         larger((q + 2 * kv) * h, h * first_width(s)), 1);
    b->norm_scratch =
        layer_take(arena, group, -1, "norm_scratch", DTYPE_F32, RMS_NORM_PARTS, widest);
}

void eagle3_plan_scratch(struct eagle3 *e, struct arena *arena)
{
    plan_features(e, arena);
    struct eagle3_rows shared = plan_shared(e, arena);
    for (int64_t l = 0; l < e->options.sizes->layers; l++) {
        use_shared(&e->layers[l].steps, &shared);
        use_shared(&e->layers[l].context, &shared);
    }
    if (e->options.training)
        plan_backward(e, arena);
    e->ops.norm_scratch = e->buffers->norm_scratch;
}

static void fill_ones(const struct eagle3 *e, const struct backend *backend, struct stream *stream)
{
    size_t width = (size_t)first_width(e->options.sizes);
    float *ones = memory_alloc(width, sizeof(*ones));
    for (size_t i = 0; i < width; i++)
        ones[i] = 1.0f;
    backend->copy_in(stream, e->buffers->ones, ones, width * sizeof(*ones));
    backend->sync(stream);
    free(ones);
}

void eagle3_open(struct eagle3 *e, const struct backend *backend, struct stream *stream)
{
    const struct drafter_options *o = &e->options;
    size_t tokens = (size_t)o->max_tokens;
    e->backend = backend;
    context_input_open(&e->input, o, backend);
    e->buffers->h_context = backend->host_alloc(tokens * 6 * sizeof(int32_t));
    size_t apart = (size_t)eagle3_apart(o->group_rows);
    e->buffers->h_group =
        backend->host_alloc((EAGLE3_ROW_ARRAYS + 1) * apart * sizeof(*e->buffers->h_group));
    if (eagle3_waits(e))
        e->buffers->h_readers =
            backend->host_alloc(tokens * (size_t)(o->sizes->ttt_steps + 1) * sizeof(int32_t));
    layer_fill_rope(o->sizes, e->ops.table_rows, backend, stream, e->buffers->cos, e->buffers->sin);
    if (o->training)
        fill_ones(e, backend, stream);
}

void eagle3_close(struct eagle3 *e)
{
    context_input_close(&e->input);
    if (e->backend != NULL) {
        e->backend->host_free(e->buffers->h_context);
        e->backend->host_free(e->buffers->h_group);
        if (e->buffers->h_readers != NULL)
            e->backend->host_free(e->buffers->h_readers);
    }
    free(e->buffers);
    free(e->layers);
    *e = (struct eagle3){.layers = NULL};
}
