// Owns host memory for the state that training changes.
#include "trainer/model_state.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/memory.h"

void model_state_open(struct model_state *state, const struct params *params)
{
    model_state_open_as(state, &(struct state_layout){.params = params}, false);
}

static float *take(const struct state_layout *layout, enum state_array array)
{
    if (!state_exists(layout, array))
        return NULL;
    return memory_alloc((size_t)state_elements(layout, array), sizeof(float));
}

void model_state_open_weights(struct model_state *state, const struct params *params)
{
    *state = (struct model_state){.layout = {.params = params}};
    state->master = take(&state->layout, STATE_MASTER);
}

void model_state_open_as(struct model_state *state, const struct state_layout *layout, bool served)
{
    *state = (struct model_state){.layout = *layout};
    if (served)
        state->served = memory_alloc((size_t)layout->params->elements, sizeof(*state->served));
    state->master = take(layout, STATE_MASTER);
    state->m = take(layout, STATE_M);
    state->v = take(layout, STATE_V);
    state->ema = take(layout, STATE_EMA);
}

// Whole pages of an array, in slices: others that want address space do not wait long.
static void populate(void *array, size_t bytes, bool (*stop)(void *context), void *context)
{
    const uintptr_t page = 4096, slice = 64 << 20;
    uintptr_t at = ((uintptr_t)array + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)array + bytes) / page * page;
    if (at >= end)
        return;
    madvise((void *)at, end - at, MADV_HUGEPAGE); // refused where there are none
    for (; at < end && !stop(context); at += slice)
        if (madvise((void *)at, end - at < slice ? end - at : slice, MADV_POPULATE_WRITE) != 0)
            return; // an older kernel: pages come at first use
}

void model_state_populate(const struct model_state *state, bool (*stop)(void *context),
                          void *context)
{
    const struct state_layout *layout = &state->layout;
    populate(state->master, state_bytes(layout, STATE_MASTER), stop, context);
    populate(state->m, state_bytes(layout, STATE_M), stop, context);
    populate(state->v, state_bytes(layout, STATE_V), stop, context);
    if (state->ema != NULL)
        populate(state->ema, state_bytes(layout, STATE_EMA), stop, context);
    if (state->served != NULL)
        populate(state->served, (size_t)layout->params->elements * sizeof(*state->served), stop,
                 context);
}

void model_state_close(struct model_state *state)
{
    free(state->master);
    free(state->m);
    free(state->v);
    free(state->ema);
    free(state->served);
    *state = (struct model_state){0};
}
