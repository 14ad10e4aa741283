// Owns which kind of drafter a call goes to. Does not own what any of them does.
#include "drafter/drafter.h"

#include "base/log.h"

static bool is_eagle3(const struct drafter *drafter)
{
    return drafter->options.sizes->kind == DRAFTER_EAGLE3;
}

void drafter_params(const struct drafter_sizes *sizes, struct params *params)
{
    if (sizes->kind == DRAFTER_EAGLE3)
        eagle3_params(sizes, params);
    else
        dflash_params(sizes, params);
}

int drafter_gradient_stage(const struct drafter_sizes *sizes, int part)
{
    return sizes->kind == DRAFTER_EAGLE3 ? eagle3_gradient_stage(sizes->layers, part)
                                         : dflash_gradient_stage(sizes->layers, part);
}

int drafter_gradient_stages(const struct drafter_sizes *sizes)
{
    return sizes->kind == DRAFTER_EAGLE3 ? eagle3_gradient_stages(sizes->layers)
                                         : dflash_gradient_stages(sizes->layers);
}

void drafter_plan(struct drafter *drafter, const struct drafter_options *options,
                  struct arena *arena)
{
    *drafter = (struct drafter){.options = *options};
    if (is_eagle3(drafter))
        eagle3_plan(&drafter->eagle3, options, arena);
    else
        dflash_plan(&drafter->dflash, options, arena);
}

void drafter_plan_scratch(struct drafter *drafter, struct arena *arena)
{
    if (is_eagle3(drafter))
        eagle3_plan_scratch(&drafter->eagle3, arena);
    else
        dflash_plan_scratch(&drafter->dflash, arena);
}

void drafter_open(struct drafter *drafter, const struct backend *backend, struct stream *stream)
{
    if (is_eagle3(drafter))
        eagle3_open(&drafter->eagle3, backend, stream);
    else
        dflash_open(&drafter->dflash, backend, stream);
}

void drafter_close(struct drafter *drafter)
{
    if (drafter->options.sizes == NULL) // was never planned
        return;
    if (is_eagle3(drafter))
        eagle3_close(&drafter->eagle3);
    else
        dflash_close(&drafter->dflash);
}

void drafter_set_hooks(struct drafter *drafter, const struct drafter_hooks *hooks)
{
    drafter->dflash.hooks = hooks;
    drafter->eagle3.hooks = hooks;
}

void drafter_begin_gradients(struct drafter *drafter, const struct backend *backend,
                             struct stream *stream)
{
    if (is_eagle3(drafter))
        eagle3_begin_gradients(&drafter->eagle3, backend, stream);
    else
        dflash_begin_gradients(&drafter->dflash, backend, stream);
}

void drafter_settle_gradients(struct drafter *drafter, const struct backend *backend,
                              struct stream *stream)
{
    if (is_eagle3(drafter))
        eagle3_settle_gradients(&drafter->eagle3, backend, stream);
    else
        dflash_settle_gradients(&drafter->dflash, backend, stream);
}

void drafter_context_forward(struct drafter *drafter, const struct backend *backend,
                             struct stream *stream, const struct row *row, const bf16 *features,
                             bool noisy, uint64_t seed)
{
    drafter->features = features;
    if (is_eagle3(drafter))
        eagle3_context_forward(&drafter->eagle3, backend, stream, row, features, noisy, seed);
    else
        dflash_context_forward(&drafter->dflash, backend, stream, row, features, noisy, seed);
}

// Only the slots' block rows come back, in the slots' order. A group without slots goes through whole.
static const void *dflash_forward(struct drafter *drafter, const struct backend *backend,
                                  struct stream *stream, const int32_t *anchors, int64_t count,
                                  const struct slot *slots, int64_t slot_count, int32_t *hidden_row,
                                  int64_t *hidden_rows)
{
    int64_t size = drafter->options.sizes->block_size;
    for (int64_t i = 0; i < slot_count; i++)
        hidden_row[i] = (int32_t)(slots[i].block * size + slots[i].slot);
    const void *hidden = dflash_group_forward(&drafter->dflash, backend, stream, anchors, count,
                                              slot_count > 0 ? hidden_row : NULL, slot_count);
    for (int64_t i = 0; i < slot_count; i++)
        hidden_row[i] = (int32_t)i;
    *hidden_rows = slot_count > 0 ? slot_count : count * size;
    return hidden;
}

// As many steps as some slot needs; rows lie step by step.
static const void *eagle3_forward(struct drafter *drafter, const struct backend *backend,
                                  struct stream *stream, const int32_t *anchors, int64_t count,
                                  const struct slot *slots, int64_t slot_count, int32_t *hidden_row,
                                  int64_t *hidden_rows)
{
    int32_t last = 0;
    for (int64_t i = 0; i < slot_count; i++) {
        last = slots[i].slot > last ? slots[i].slot : last;
        hidden_row[i] = (int32_t)(slots[i].slot * count + slots[i].block);
    }
    *hidden_rows = (last + 1) * count;
    return eagle3_group_forward(&drafter->eagle3, backend, stream, anchors, count, last + 1);
}

const void *drafter_group_forward(struct drafter *drafter, const struct backend *backend,
                                  struct stream *stream, const int32_t *anchors, int64_t count,
                                  const struct slot *slots, int64_t slot_count, int32_t *hidden_row,
                                  int64_t *hidden_rows)
{
    if (is_eagle3(drafter))
        return eagle3_forward(drafter, backend, stream, anchors, count, slots, slot_count,
                              hidden_row, hidden_rows);
    return dflash_forward(drafter, backend, stream, anchors, count, slots, slot_count, hidden_row,
                          hidden_rows);
}

void *drafter_group_gradient(struct drafter *drafter)
{
    return is_eagle3(drafter) ? eagle3_group_gradient(&drafter->eagle3)
                              : dflash_group_gradient(&drafter->dflash);
}

void drafter_group_backward(struct drafter *drafter, const struct backend *backend,
                            struct stream *stream, bool last)
{
    if (is_eagle3(drafter))
        eagle3_group_backward(&drafter->eagle3, backend, stream, last);
    else
        dflash_group_backward(&drafter->dflash, backend, stream, last);
}

void drafter_noise(const struct drafter *drafter, const struct row *row, uint64_t seed, float *out)
{
    context_input_noise(&drafter->options, row, seed, out);
}
