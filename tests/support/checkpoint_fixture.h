// A small DFlash drafter with everything that a checkpoint says of it.
#ifndef TESTS_SUPPORT_CHECKPOINT_FIXTURE_H
#define TESTS_SUPPORT_CHECKPOINT_FIXTURE_H

#include "trainer/checkpoint.h"

struct drafter_fixture {
    struct config config;
    struct target target;
    struct drafter_sizes sizes;
    struct params params;
    struct execution execution;
    struct checkpoint_info info;
};

// `layers` layers, all full attention, hidden size 8, blocks of 8, mask token 60.
void drafter_fixture_open(struct drafter_fixture *fixture, int64_t layers);
void drafter_fixture_close(struct drafter_fixture *fixture);
// After a change of config.drafter: sizes and tensors anew.
void drafter_fixture_resolve(struct drafter_fixture *fixture);
// config.drafter.layer_types; `types` is a word a layer: "sliding full".
void drafter_fixture_layer_types(struct drafter_fixture *fixture, const char *types);
// Weights, moments and counters that differ for every step; padding stays 0.
void drafter_fixture_fill(struct model_state *state, int64_t step);
// Writes the checkpoint of `step` into a checkpoints folder.
void drafter_fixture_write(const struct drafter_fixture *fixture, const char *directory,
                           int64_t step);
// Whether a state is bitwise what drafter_fixture_fill gives for `step`.
bool drafter_fixture_matches(const struct model_state *state, int64_t step);

#endif
