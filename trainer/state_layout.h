// Which fp32 arrays the trained state consists of, which tensors are in each, and where. A rank's arrays hold
// the tensors that it owns; tensors without a second moment (those that Muon takes) have no room in the array
// of second moments. A function of (config, parameters, ownership).
#ifndef TRAINER_STATE_LAYOUT_H
#define TRAINER_STATE_LAYOUT_H

#include "configs/config.h"
#include "trainer/ownership.h"

// STATE_EMA: the moving average of the masters.
enum state_array { STATE_MASTER, STATE_M, STATE_V, STATE_EMA, STATE_ARRAYS };

struct state_layout {
    const struct params *params;
    const struct ownership *ownership;        // NULL: one rank owns everything
    const struct optimizer_config *optimizer; // NULL: AdamW without an average
};

// Whether there is such an array.
bool state_exists(const struct state_layout *layout, enum state_array array);
// Whether an own tensor is in the array.
bool state_has(const struct state_layout *layout, enum state_array array, size_t param);
// Of a tensor that is: elements from the array's start.
int64_t state_offset(const struct state_layout *layout, enum state_array array, size_t param);
// Of this rank's array; at least 1, so that it is there, and 0 of one that does not exist.
int64_t state_elements(const struct state_layout *layout, enum state_array array);
size_t state_bytes(const struct state_layout *layout, enum state_array array);
// Of the `arrays` first ones together, each rounded up to `unit` bytes, on the rank that has most.
size_t state_most_bytes(const struct state_layout *layout, int arrays, size_t unit);

#endif
