// What every kind of drafter is opened with, and what it tells others while its passes run.
#ifndef DRAFTER_DRAFTER_OPTIONS_H
#define DRAFTER_DRAFTER_OPTIONS_H

#include "data/row.h"
#include "drafter/drafter_sizes.h"
#include "kernels/kernels.h"

// What backward computes again instead of keeping.
enum recompute_level {
    RECOMPUTE_LEVEL_NONE,  // nothing
    RECOMPUTE_LEVEL_CHEAP, // norm outputs, MLP activations and the features as fc reads them
    RECOMPUTE_LEVEL_LAYER, // everything but each layer's input
};

struct drafter_options {
    const struct drafter_sizes *sizes;
    const struct params *params;
    enum dtype compute;
    int64_t max_tokens;                // most tokens of a row
    int64_t group_rows;                // most block rows of a group, a multiple of the block size
    struct feature_layout features;    // as read
    int32_t plane[DRAFTER_MAX_LAYERS]; // plane of each captured layer
    enum recompute_level recompute;
    // Those of EAGLE-3's MLP, too, where it has one layer and else computes nothing again.
    bool keep_activations;
    bool training;         // false: no gradients, one layer's activations
    enum noise_kind noise; // of noisy context
    float noise_std;
    float embed_scale;
    const void *weights; // [params->elements] compute dtype, backend memory: matrices are read here
    const float *norms;  // fp32, backend memory: norms are read here, each at its offset
    bool norms_packed;   // at its norm_offset instead
    float *grads;        // [params->elements] fp32, added to; NULL when not training
    const void *embed;   // [embed_rows, H] compute dtype, frozen
    int64_t embed_rows;
};

// For who exchanges weights and gradients with others while the passes run.
struct drafter_hooks {
    void *context;
    // What is queued from now on reads the weights of a part (struct param). Called for every row and group.
    void (*weights_needed)(void *context, int part);
    // In a row's last group: what is queued so far completes the row's gradients of a stage, one after the
    // other from 0.
    void (*gradients_final)(void *context, int stage);
};

#endif
