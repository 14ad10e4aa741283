// Owns host memory for the state that training changes.
#include "trainer/model_state.h"

#include <stdlib.h>

#include "base/memory.h"

static void *zeros(size_t bytes)
{
    return memory_alloc(bytes, 1);
}

void model_state_open(struct model_state *state, const struct params *params)
{
    model_state_open_in(state, params, zeros, free);
}

void model_state_open_in(struct model_state *state, const struct params *params,
                         void *(*host_alloc)(size_t), void (*host_free)(void *))
{
    size_t bytes = (size_t)params->elements * sizeof(float);
    *state = (struct model_state){.params = params, .free = host_free};
    state->master = host_alloc(bytes);
    state->m = host_alloc(bytes);
    state->v = host_alloc(bytes);
}

void model_state_close(struct model_state *state)
{
    if (state->free != NULL) {
        state->free(state->master);
        state->free(state->m);
        state->free(state->v);
    }
    *state = (struct model_state){0};
}
