// Owns host memory for the state that training changes.
#include "trainer/model_state.h"

#include <stdlib.h>

#include "base/memory.h"

void model_state_open(struct model_state *state, const struct params *params)
{
    size_t elements = (size_t)params->elements;
    *state = (struct model_state){.params = params};
    state->master = memory_alloc(elements, sizeof(float));
    state->m = memory_alloc(elements, sizeof(float));
    state->v = memory_alloc(elements, sizeof(float));
}

void model_state_close(struct model_state *state)
{
    free(state->master);
    free(state->m);
    free(state->v);
    *state = (struct model_state){0};
}
