// The state that training changes, by parameter name, and the integers beside it: exactly what a
// checkpoint holds.
#ifndef TRAINER_MODEL_STATE_H
#define TRAINER_MODEL_STATE_H

#include "base/bf16.h"
#include "trainer/state_layout.h"

struct counters {
    int64_t step;    // optimizer steps done, skipped ones included
    int64_t epoch;   // of the next row
    int64_t row;     // next row in that epoch
    int64_t applied; // steps that changed weights (AdamW's own count for bias correction)
    int64_t skipped_nonfinite;
    int64_t nonfinite_in_a_row;
    int64_t skipped_empty;       // steps whose sum of weights was 0
    int64_t bad_documents;       // left out while reading
    int64_t tokens;              // seen so far
    double best_accept_len_walk; // 0: none yet
    int64_t best_step;
    int64_t validations_without_better;
    int64_t last_validation; // step of the last complete validation; -1: none yet
};

// Host memory: a snapshot for writing, or what was read.
struct model_state {
    struct state_layout layout; // whose tensors these are, and where
    // [state_elements of each]; NULL: not there; master alone: just weights
    float *master, *m, *v, *ema;
    // [params->elements] all weights as servers read them, on rank 0 of several, which owns only some of the
    // masters; else NULL
    bf16 *served;
    struct counters counters;
};

// All tensors, AdamW's arrays [params->elements].
void model_state_open(struct model_state *state, const struct params *params);
void model_state_open_weights(struct model_state *state, const struct params *params);
// served: room for all weights as servers read them.
void model_state_open_as(struct model_state *state, const struct state_layout *layout, bool served);
// Makes the system give the memory now instead of at first use, without touching contents: for a thread
// beside the one that uses it. Ends early when stop() says so.
void model_state_populate(const struct model_state *state, bool (*stop)(void *context),
                          void *context);
void model_state_close(struct model_state *state);

#endif
