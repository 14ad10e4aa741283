// The EAGLE-3 drafter with training-time test: forward and backward of one packed row, in groups of
// positions. At ttt_step i position t reads the embedding of x[t+1+i] and h^i, h^0 = g = fc(features),
// h^{i+1} = the last layer's output (with norm_output after the final norm); it attends to the keys of
// step 0 of its document up to itself and to its own keys of steps 1..i.
//
// Keys and values of step 0 are the row's context: made once for all positions. Given them, the steps of a
// position depend on no other position. So a group is any positions, and its rows lie step by step: row
// i * count + b. The anchor of a position t is t + 1, its slot i is ttt_step i (data/anchors.h).
//
// The first layer's queries, keys and values are products with embedding and hidden state side by side.
// The embedding's part depends on the token alone, so it is made once a row, and gradients by it are summed
// before they go back through its weights.
#ifndef DRAFTER_EAGLE3_H
#define DRAFTER_EAGLE3_H

#include "data/anchors.h"
#include "drafter/context_input.h"
#include "drafter/layer.h"

struct eagle3_layer; // one layer's weights, gradients and kept activations

struct eagle3 {
    struct drafter_options options;
    struct eagle3_layer *layers; // [sizes->layers]
    struct eagle3_buffers *buffers;
    const struct drafter_hooks *hooks; // NULL: none; to be set after planning
    struct layer_ops ops;
    struct context_input input; // of the row between context_forward and the last group
    int64_t count;              // positions of the group in flight
    int64_t steps;              // of ttt_steps, those that some slot of it is scored at
    bool first_group;           // none of the row has been through the backward pass
    // Whether nothing has been added to gradients since eagle3_begin_gradients: of the layer's matrices, of those
    // of keys and values, of what the context is made with.
    bool fresh_layer, fresh_keys, fresh_context;
    const struct backend *backend; // whose host memory is held; NULL: none yet
};

// The stage of the backward pass that completes a part's gradients, and how many there are: parts backwards.
int eagle3_gradient_stage(int64_t layers, int part);
int eagle3_gradient_stages(int64_t layers);

// As dflash.h's functions of the same names.
void eagle3_plan(struct eagle3 *eagle3, const struct drafter_options *options, struct arena *arena);
void eagle3_plan_scratch(struct eagle3 *eagle3, struct arena *arena);
void eagle3_open(struct eagle3 *eagle3, const struct backend *backend, struct stream *stream);
void eagle3_close(struct eagle3 *eagle3);
void eagle3_begin_gradients(struct eagle3 *eagle3, const struct backend *backend,
                            struct stream *stream);
void eagle3_settle_gradients(struct eagle3 *eagle3, const struct backend *backend,
                             struct stream *stream);
void eagle3_context_forward(struct eagle3 *eagle3, const struct backend *backend,
                            struct stream *stream, const struct row *row, const bf16 *features,
                            bool noisy, uint64_t seed);
// Positions anchors[0 .. count) - 1, as many steps as their slots have. Returns hidden states after the final
// norm, [steps * count, H] step by step.
const void *eagle3_group_forward(struct eagle3 *eagle3, const struct backend *backend,
                                 struct stream *stream, const int32_t *anchors, int64_t count,
                                 int64_t steps);
void *eagle3_group_gradient(struct eagle3 *eagle3);
void eagle3_group_backward(struct eagle3 *eagle3, const struct backend *backend,
                           struct stream *stream, bool last);

#endif
