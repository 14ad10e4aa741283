// Owns host memory for the state that training changes.
#include "trainer/model_state.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/memory.h"

void model_state_open(struct model_state *state, const struct params *params)
{
    model_state_open_own(state, params, NULL, false);
}

void model_state_open_own(struct model_state *state, const struct params *params,
                          const struct ownership *ownership, bool served)
{
    size_t elements = (size_t)ownership_elements(ownership, params);
    *state = (struct model_state){.params = params, .ownership = ownership};
    if (served)
        state->served = memory_alloc((size_t)params->elements, sizeof(*state->served));
    state->master = memory_alloc(elements, sizeof(float));
    state->m = memory_alloc(elements, sizeof(float));
    state->v = memory_alloc(elements, sizeof(float));
}

size_t model_state_bytes(const struct model_state *state)
{
    return (size_t)ownership_elements(state->ownership, state->params) * sizeof(float);
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
    size_t bytes = model_state_bytes(state);
    populate(state->master, bytes, stop, context);
    populate(state->m, bytes, stop, context);
    populate(state->v, bytes, stop, context);
    if (state->served != NULL)
        populate(state->served, (size_t)state->params->elements * sizeof(*state->served), stop,
                 context);
}

void model_state_close(struct model_state *state)
{
    free(state->master);
    free(state->m);
    free(state->v);
    free(state->served);
    *state = (struct model_state){0};
}
