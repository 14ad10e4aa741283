// Owns which kind of drafter a call goes to. Does not own what any of them does.
#include "drafter/drafter.h"

#include "base/log.h"

void drafter_params(const struct drafter_sizes *sizes, struct params *params)
{
    dflash_params(sizes, params);
}

int drafter_gradient_stage(const struct drafter_sizes *sizes, int part)
{
    return dflash_gradient_stage(sizes->layers, part);
}

int drafter_gradient_stages(const struct drafter_sizes *sizes)
{
    return dflash_gradient_stages(sizes->layers);
}

void drafter_plan(struct drafter *drafter, const struct drafter_options *options,
                  struct arena *arena)
{
    *drafter = (struct drafter){.kind = DRAFTER_DFLASH, .options = *options};
    dflash_plan(&drafter->dflash, options, arena);
}

void drafter_plan_scratch(struct drafter *drafter, struct arena *arena)
{
    dflash_plan_scratch(&drafter->dflash, arena);
}

void drafter_open(struct drafter *drafter, const struct backend *backend, struct stream *stream)
{
    dflash_open(&drafter->dflash, backend, stream);
}

void drafter_close(struct drafter *drafter)
{
    dflash_close(&drafter->dflash);
}

void drafter_set_hooks(struct drafter *drafter, const struct drafter_hooks *hooks)
{
    drafter->dflash.hooks = hooks;
}

void drafter_begin_gradients(struct drafter *drafter, const struct backend *backend,
                             struct stream *stream)
{
    dflash_begin_gradients(&drafter->dflash, backend, stream);
}

void drafter_settle_gradients(struct drafter *drafter, const struct backend *backend,
                              struct stream *stream)
{
    dflash_settle_gradients(&drafter->dflash, backend, stream);
}

void drafter_context_forward(struct drafter *drafter, const struct backend *backend,
                             struct stream *stream, const struct row *row, const bf16 *features,
                             bool noisy, uint64_t seed)
{
    drafter->features = features;
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

const void *drafter_group_forward(struct drafter *drafter, const struct backend *backend,
                                  struct stream *stream, const int32_t *anchors, int64_t count,
                                  const struct slot *slots, int64_t slot_count, int32_t *hidden_row,
                                  int64_t *hidden_rows)
{
    return dflash_forward(drafter, backend, stream, anchors, count, slots, slot_count, hidden_row,
                          hidden_rows);
}

void *drafter_group_gradient(struct drafter *drafter)
{
    return dflash_group_gradient(&drafter->dflash);
}

void drafter_group_backward(struct drafter *drafter, const struct backend *backend,
                            struct stream *stream, bool last)
{
    dflash_group_backward(&drafter->dflash, backend, stream, last);
}

void drafter_noise(const struct drafter *drafter, const struct row *row, uint64_t seed, float *out)
{
    context_input_noise(&drafter->options, row, seed, out);
}
