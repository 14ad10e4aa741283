// Owns what goes into a step before it runs and comes out of it afterwards: target, weights, moments.
#include "trainer/step.h"

#include <stdlib.h>

#include "base/log.h"

struct frozen {
    const struct target_tensor *tensor;
    enum dtype type;      // as it is on the backend
    const int32_t *order; // row i is row order[i]; NULL: i
};

// Elements [first, first + count) as they lie in the tensor.
static void convert_elements(const struct frozen *frozen, int64_t first, int64_t count, void *out)
{
    bool from_bf16 = frozen->tensor->dtype == DTYPE_BF16, to_bf16 = frozen->type == DTYPE_BF16;
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

static void convert_frozen(void *context, size_t at, size_t bytes, void *out)
{
    const struct frozen *frozen = context;
    int64_t first = (int64_t)(at / dtype_size(frozen->type));
    int64_t end = first + (int64_t)(bytes / dtype_size(frozen->type));
    int64_t width = frozen->tensor->columns;
    if (frozen->order == NULL) {
        convert_elements(frozen, first, end - first, out);
        return;
    }
    for (int64_t i = first; i < end;) { // rows, the first and last of which may be cut
        int64_t row = i / width, column = i % width, count = width - column;
        count = count < end - i ? count : end - i;
        convert_elements(frozen, frozen->order[row] * width + column, count,
                         (unsigned char *)out + (size_t)(i - first) * dtype_size(frozen->type));
        i += count;
    }
}

void step_load_frozen(struct step *step, const struct target_tensor *tensor, const int32_t *order,
                      void *to, enum dtype type)
{
    struct frozen frozen = {tensor, type, order};
    transfer_in(&step->transfer, to, (size_t)(tensor->rows * tensor->columns) * dtype_size(type),
                convert_frozen, &frozen);
}

// An own tensor's weights, from its master.
static void make_tensor(struct step *step, size_t i)
{
    const struct step_setup *s = &step->setup;
    enum dtype type;
    void *weights = step_weights_of(step, i, &type);
    const float *master = step->master + ownership_offset(s->ownership, s->params, i);
    int64_t count = s->params->items[i].count;
    if (type == DTYPE_F32)
        s->backend->copy(step->stream, weights, master, (size_t)count * sizeof(float));
    else
        s->backend->kernels->convert(step->stream, &(struct convert){.count = count,
                                                                     .from = master,
                                                                     .to = weights,
                                                                     .from_type = DTYPE_F32,
                                                                     .to_type = type});
}

// From the masters of all ranks.
static void share_weights(struct step *step)
{
    const struct params *params = step->setup.params;
    for (int part = 0; part < params->parts; part++) {
        for (size_t i = 0; i < params->count; i++)
            if (params->items[i].part == part && ownership_mine(step->setup.ownership, i))
                make_tensor(step, i);
        step_exchange_weights(step, part);
    }
    step_exchange_settle(step);
}

// The weights in compute type, from the masters.
static void make_weights(struct step *step)
{
    const struct backend *backend = step->setup.backend;
    if (step->exchange.shared)
        share_weights(step);
    else if (step->weights != (void *)step->master)
        backend->kernels->convert(step->stream,
                                  &(struct convert){.count = step->setup.params->elements,
                                                    .from = step->master,
                                                    .to = step->weights,
                                                    .from_type = DTYPE_F32,
                                                    .to_type = step->drafter.options.compute});
    backend->sync(step->stream);
}

static void load_array(struct step *step, enum state_array array, float *to,
                       const struct model_state *state, float *from)
{
    size_t bytes = state_bytes(&step->state, array);
    BUG_UNLESS(state_bytes(&state->layout, array) == bytes);
    transfer_in(&step->transfer, to, bytes, transfer_copy, from);
}

void step_load(struct step *step, const struct model_state *state)
{
    load_array(step, STATE_MASTER, step->master, state, state->master);
    if (step->setup.training) {
        load_array(step, STATE_M, step->m, state, state->m);
        load_array(step, STATE_V, step->v, state, state->v);
    }
    if (step->ema != NULL)
        load_array(step, STATE_EMA, step->ema, state, state->ema);
    make_weights(step);
}

struct initial {
    const struct step *step;
    const struct release *release;
    int64_t first; // element of the flat array that is made first
};

// A trained head starts as the target's rows of its tokens.
static void head_values(const struct step_setup *s, int64_t first, int64_t count, float *out)
{
    const struct param *head =
        s->sizes->trainable_head ? params_find(s->params, "lm_head.weight") : NULL;
    const struct target *t = s->target;
    if (head == NULL)
        return;
    int64_t begin = first > head->offset ? first : head->offset;
    int64_t end = head->offset + head->count;
    end = first + count < end ? first + count : end;
    const int32_t *order = s->map != NULL ? s->map->ids : NULL;
    struct frozen frozen = {t->tied ? &t->embed : &t->head, DTYPE_F32, order};
    if (begin < end)
        convert_frozen(&frozen, (size_t)(begin - head->offset) * sizeof(float),
                       (size_t)(end - begin) * sizeof(float), out + (begin - first));
}

static void initial_values(void *context, size_t at, size_t bytes, void *out)
{
    const struct initial *initial = context;
    const struct step_setup *setup = &initial->step->setup;
    int64_t first = initial->first + (int64_t)(at / sizeof(float));
    int64_t count = (int64_t)(bytes / sizeof(float));
    params_values(setup->params, (uint64_t)setup->config->run.seed, setup->config->drafter.init_std,
                  first, count, out);
    head_values(setup, first, count, out);
    release_values(initial->release, setup->params, first, count, out);
}

static void initialize_own(struct step *step, struct initial *initial)
{
    const struct step_setup *s = &step->setup;
    for (size_t i = 0; i < s->params->count; i++) {
        if (!ownership_mine(s->ownership, i))
            continue;
        initial->first = s->params->items[i].offset;
        transfer_in(&step->transfer, step->master + ownership_offset(s->ownership, s->params, i),
                    (size_t)s->params->items[i].count * sizeof(float), initial_values, initial);
    }
}

void step_initialize(struct step *step, const struct release *release)
{
    const struct backend *backend = step->setup.backend;
    struct initial initial = {step, release, 0};
    size_t bytes = state_bytes(&step->state, STATE_MASTER);
    backend->zero(step->stream, step->m, state_bytes(&step->state, STATE_M));
    backend->zero(step->stream, step->v, state_bytes(&step->state, STATE_V));
    if (ownership_shared(step->setup.ownership)) {
        backend->zero(step->stream, step->master, bytes);
        backend->sync(step->stream);
        initialize_own(step, &initial);
    } else {
        transfer_in(&step->transfer, step->master, bytes, initial_values, &initial);
    }
    if (step->ema != NULL)
        backend->copy(step->stream, step->ema, step->master, bytes);
    make_weights(step);
}

void step_exchange_average(struct step *step)
{
    if (step->ema == NULL)
        return;
    step_exchange_settle(step);
    step->setup.backend->kernels->exchange(
        step->stream, &(struct exchange){.count = state_elements(&step->state, STATE_MASTER),
                                         .a = step->master,
                                         .b = step->ema});
    make_weights(step);
}

// Every tensor's weights, rounded as in an export.
static void save_served(struct step *step, bf16 *served)
{
    const struct params *params = step->setup.params;
    int64_t largest = 0;
    for (size_t i = 0; i < params->count; i++)
        largest = params->items[i].count > largest ? params->items[i].count : largest;
    float *values = memory_alloc((size_t)largest, sizeof(*values));
    for (size_t i = 0; i < params->count; i++) {
        enum dtype type;
        const void *weights = step_weights_of(step, i, &type);
        int64_t count = params->items[i].count;
        bf16 *to = served + params->items[i].offset;
        transfer_out(&step->transfer, weights, (size_t)count * dtype_size(type),
                     type == DTYPE_F32 ? (void *)values : (void *)to);
        for (int64_t k = 0; type == DTYPE_F32 && k < count; k++)
            to[k] = bf16_from_float(values[k]);
    }
    free(values);
}

static void save_array(struct step *step, enum state_array array, const float *from,
                       const struct model_state *state, float *to)
{
    size_t bytes = state_bytes(&step->state, array);
    BUG_UNLESS(state_bytes(&state->layout, array) == bytes);
    transfer_out(&step->transfer, from, bytes, to);
}

void step_save(struct step *step, struct model_state *state)
{
    step_exchange_settle(step);
    step->setup.backend->sync(step->stream);
    save_array(step, STATE_MASTER, step->master, state, state->master);
    save_array(step, STATE_M, step->m, state, state->m);
    save_array(step, STATE_V, step->v, state, state->v);
    if (step->ema != NULL)
        save_array(step, STATE_EMA, step->ema, state, state->ema);
    // What servers read is the average where there is one; alone, a rank makes it of its own.
    if (step->exchange.shared)
        step_exchange_average(step);
    if (state->served != NULL)
        save_served(step, state->served);
    if (step->exchange.shared)
        step_exchange_average(step);
}
