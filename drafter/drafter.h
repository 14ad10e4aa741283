// A drafter of any kind: what the step calls. A row goes through drafter_context_forward, then for each
// group of blocks drafter_group_forward, (loss), drafter_group_backward (last: also the context's).
#ifndef DRAFTER_DRAFTER_H
#define DRAFTER_DRAFTER_H

#include "data/anchors.h"
#include "drafter/dflash.h"
#include "drafter/eagle3.h"

struct drafter {
    struct drafter_options options; // whose sizes say which of the two it is
    const bf16 *features;           // of the running row
    struct dflash dflash;
    struct eagle3 eagle3;
};

// The stage of the backward pass that completes a part's gradients, and how many there are.
int drafter_gradient_stage(const struct drafter_sizes *sizes, int part);
int drafter_gradient_stages(const struct drafter_sizes *sizes);

// Asks the arena for backend memory. Called twice (base/memory.h); drafter_close frees host memory.
void drafter_plan(struct drafter *drafter, const struct drafter_options *options,
                  struct arena *arena);
// The rest of it: what holds nothing from drafter_group_forward's return to drafter_group_backward's call,
// so that the loss may have the same memory. After drafter_plan.
void drafter_plan_scratch(struct drafter *drafter, struct arena *arena);
// Fills what is constant. After the arena has been placed. The stream must be synced between the forward
// passes of two groups, of two rows too: host memory is used again.
void drafter_open(struct drafter *drafter, const struct backend *backend, struct stream *stream);
void drafter_close(struct drafter *drafter);
void drafter_set_hooks(struct drafter *drafter, const struct drafter_hooks *hooks);

// From now on gradients are summed anew. Those of matrices hold anything until a whole row has been
// through the backward pass, or drafter_settle_gradients.
void drafter_begin_gradients(struct drafter *drafter, const struct backend *backend,
                             struct stream *stream);
// Gradients hold zeros if nothing has been added to them since.
void drafter_settle_gradients(struct drafter *drafter, const struct backend *backend,
                              struct stream *stream);
// Context path of a row whose features are in backend memory. noisy: with the options' noise, keyed by
// seed. Clears the context's gradients.
void drafter_context_forward(struct drafter *drafter, const struct backend *backend,
                             struct stream *stream, const struct row *row, const bf16 *features,
                             bool noisy, uint64_t seed);
// Blocks of anchors[0 .. count) with their scored slots. Returns hidden states after the final norm
// [*hidden_rows, H], valid until their gradient is put where drafter_group_gradient says, and the row
// of each slot in hidden_row[slot_count].
const void *drafter_group_forward(struct drafter *drafter, const struct backend *backend,
                                  struct stream *stream, const int32_t *anchors, int64_t count,
                                  const struct slot *slots, int64_t slot_count, int32_t *hidden_row,
                                  int64_t *hidden_rows);
// Where the gradient with respect to those hidden states is to be put, one row for each: over them.
void *drafter_group_gradient(struct drafter *drafter);
// Adds the group's gradients. last: the row's last group.
void drafter_group_backward(struct drafter *drafter, const struct backend *backend,
                            struct stream *stream, bool last);

// Noise as context_load adds it, for a trace: out [T, L, H] fp32.
void drafter_noise(const struct drafter *drafter, const struct row *row, uint64_t seed, float *out);

#endif
