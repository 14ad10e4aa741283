// Owns what goes into a step before it runs and comes out of it afterwards: target, weights, moments.
#include "trainer/step.h"

struct frozen {
    const struct target_tensor *tensor;
    enum dtype type; // as it is on the backend
};

static void convert_frozen(void *context, size_t at, size_t bytes, void *out)
{
    const struct frozen *frozen = context;
    bool from_bf16 = frozen->tensor->dtype == DTYPE_BF16, to_bf16 = frozen->type == DTYPE_BF16;
    int64_t first = (int64_t)(at / dtype_size(frozen->type));
    int64_t count = (int64_t)(bytes / dtype_size(frozen->type));
    const bf16 *from = (const bf16 *)frozen->tensor->data + (from_bf16 ? first : 0);
    const float *from_float = (const float *)frozen->tensor->data + (from_bf16 ? 0 : first);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i++) {
        float value = from_bf16 ? bf16_to_float(from[i]) : from_float[i];
        if (to_bf16)
            ((bf16 *)out)[i] = bf16_from_float(value);
        else
            ((float *)out)[i] = value;
    }
}

void step_load_frozen(struct step *step, const struct target_tensor *tensor, void *to,
                      enum dtype type)
{
    struct frozen frozen = {tensor, type};
    transfer_in(&step->transfer, to, (size_t)(tensor->rows * tensor->columns) * dtype_size(type),
                convert_frozen, &frozen);
}

static size_t state_bytes(const struct step *step)
{
    return (size_t)step->setup.params->elements * sizeof(float);
}

// The weights in compute type, from the masters.
static void make_weights(struct step *step)
{
    const struct backend *backend = step->setup.backend;
    if (step->weights != (void *)step->master)
        backend->kernels->convert(step->stream,
                                  &(struct convert){.count = step->setup.params->elements,
                                                    .from = step->master,
                                                    .to = step->weights,
                                                    .from_type = DTYPE_F32,
                                                    .to_type = step->dflash.options.compute});
    backend->sync(step->stream);
}

void step_load(struct step *step, const struct model_state *state)
{
    transfer_in(&step->transfer, step->master, state_bytes(step), transfer_copy, state->master);
    if (step->setup.training) {
        transfer_in(&step->transfer, step->m, state_bytes(step), transfer_copy, state->m);
        transfer_in(&step->transfer, step->v, state_bytes(step), transfer_copy, state->v);
    }
    make_weights(step);
}

struct initial {
    const struct step *step;
    const struct release *release;
};

static void initial_values(void *context, size_t at, size_t bytes, void *out)
{
    const struct initial *initial = context;
    const struct step_setup *setup = &initial->step->setup;
    int64_t first = (int64_t)(at / sizeof(float)), count = (int64_t)(bytes / sizeof(float));
    params_values(setup->params, (uint64_t)setup->config->run.seed, setup->config->drafter.init_std,
                  first, count, out);
    release_values(initial->release, setup->params, first, count, out);
}

void step_initialize(struct step *step, const struct release *release)
{
    const struct backend *backend = step->setup.backend;
    struct initial initial = {step, release};
    backend->zero(step->stream, step->m, state_bytes(step));
    backend->zero(step->stream, step->v, state_bytes(step));
    transfer_in(&step->transfer, step->master, state_bytes(step), initial_values, &initial);
    make_weights(step);
}

void step_save(struct step *step, struct model_state *state)
{
    step->setup.backend->sync(step->stream);
    transfer_out(&step->transfer, step->master, state_bytes(step), state->master);
    transfer_out(&step->transfer, step->m, state_bytes(step), state->m);
    transfer_out(&step->transfer, step->v, state_bytes(step), state->v);
}
