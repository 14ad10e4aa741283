// The DFlash drafter: forward and backward of one packed row, in anchor groups.
// Network as released z-lab checkpoints define it (Qwen3 style): the context of every layer is
// c = hidden_norm(fc(features)); a layer's keys are k_norm([Wk c ; Wk n]) with rotary positions, its
// values [Wv c ; Wv n], n = input_layernorm(x); a block sees the context before its anchor and itself.
//
// Order of calls for a row: dflash_context_forward, then for each group dflash_group_forward, (loss),
// dflash_group_backward (last: also the context's backward, layer by layer).
//
// Only rows that somebody wants the hidden states of go through the last layer's output projection and MLP:
// its keys and values are all that the others are there for.
#ifndef DRAFTER_DFLASH_H
#define DRAFTER_DFLASH_H

#include "drafter/context_input.h"
#include "drafter/layer.h"

struct dflash_layer; // one layer's weights, gradients and kept activations

struct dflash {
    struct drafter_options options;
    struct dflash_layer *layers; // [sizes->layers]
    struct dflash_buffers *buffers;
    const struct drafter_hooks *hooks; // NULL: none; to be set after planning
    struct layer_ops ops;
    struct context_input input; // of the row between context_forward and the last group
    // Gradients of matrices that nothing has been added to: the next product overwrites what is there.
    bool fresh_layers, fresh_fc;
    int64_t blocks; // of the group in flight
    int64_t wanted; // rows of it that go through the last layer's end
    // Host memory that copies are queued from: overwritten only after a sync.
    const struct backend *backend; // whose host memory it is; NULL: none yet
    int32_t *h_index;              // [6, group_rows] inputs of a group
};

// The stage of the backward pass that completes a part's gradients, and how many there are: stage 0 is norm,
// 1 the last layer, ..., layers + 1 fc and hidden_norm.
int dflash_gradient_stage(int64_t layers, int part);
int dflash_gradient_stages(int64_t layers);

// Asks the arena for backend memory. Called twice (base/memory.h); dflash_close frees host memory.
void dflash_plan(struct dflash *dflash, const struct drafter_options *options, struct arena *arena);
// The rest of it: what holds nothing from dflash_group_forward's return to dflash_group_backward's call,
// so that the loss may have the same memory. After dflash_plan.
void dflash_plan_scratch(struct dflash *dflash, struct arena *arena);
// Fills what is constant (rotary table). After the arena has been placed. The stream must be synced
// between the forward passes of two groups, of two rows too: host memory is used again.
void dflash_open(struct dflash *dflash, const struct backend *backend, struct stream *stream);
void dflash_close(struct dflash *dflash);

// From now on gradients are summed anew. Those of matrices hold anything until a whole row has been
// through the backward pass, or dflash_settle_gradients.
void dflash_begin_gradients(struct dflash *dflash, const struct backend *backend,
                            struct stream *stream);
// Gradients hold zeros if nothing has been added to them since.
void dflash_settle_gradients(struct dflash *dflash, const struct backend *backend,
                             struct stream *stream);
// Context path of a row whose features are in backend memory: fused features, then keys and
// values of every layer. noisy: with the options' noise, keyed by seed. Clears the context's gradients.
void dflash_context_forward(struct dflash *dflash, const struct backend *backend,
                            struct stream *stream, const struct row *row, const bf16 *features,
                            bool noisy, uint64_t seed);
// Blocks of anchors[0 .. count): N = count * block_size <= group_rows. Returns hidden states after the final
// norm of the block rows wanted[0 .. wanted_count), ascending (NULL: of all N), [wanted_count, H], valid until
// their gradient is put where dflash_group_gradient says.
const void *dflash_group_forward(struct dflash *dflash, const struct backend *backend,
                                 struct stream *stream, const int32_t *anchors, int64_t count,
                                 const int32_t *wanted, int64_t wanted_count);
// Where the gradient with respect to those hidden states is to be put, one row for each: over them.
void *dflash_group_gradient(struct dflash *dflash);
// Adds the group's gradients. last: the row's last group; as soon as a layer's own backward is done its
// context keys' and values' backward runs, then fc and hidden_norm.
void dflash_group_backward(struct dflash *dflash, const struct backend *backend,
                           struct stream *stream, bool last);

#endif
