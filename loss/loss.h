// The loss of one anchor group: student rows of nonzero weight, sorted by the position of their teacher
// row, in chunks; teacher logits once per distinct position; slot weights outside the vocabulary kernel.
// There is never a [rows, vocabulary] tensor: logits exist for chunk_rows rows at a time.
//
// Not here: division by the sum of weights (the optimizer does it once), the drafter's own layers.
#ifndef LOSS_LOSS_H
#define LOSS_LOSS_H

#include "configs/config.h"
#include "data/anchors.h"
#include "kernels/kernels.h"
#include "loss/metrics.h"

struct loss_options {
    const struct loss_config *config;
    int64_t hidden, vocab; // H, V
    int64_t block_size;    // B
    int64_t group_rows;    // most block rows of a group
    int64_t chunk_rows;    // student and distinct teacher rows whose logits exist together, >= 2
    enum dtype compute;    // of hidden states, head and gradients
    enum dtype logits;
    bool has_teacher;  // false: shards without a last hidden state
    bool teacher_norm; // the last hidden state is pre-norm: apply the target's final norm
    float norm_eps, norm_weight_offset;
    float logit_scale;
    const void *head;  // [V, H] compute dtype, backend memory, frozen
    const float *norm; // [H] fp32, backend memory, frozen; unread without teacher_norm
};

struct loss {
    struct loss_options options;
    float weight[LOSS_TERM_COUNT];
    // backend memory
    void *logits;    // [chunk_rows, V] students, then distinct teachers; later G and sums of dS
    void *student;   // [chunk_rows, H] gathered hidden states
    void *teacher;   // [chunk_rows, H] gathered last hidden states, normed
    float *gradient; // [group_rows, H] unweighted dS, in sorted order
    int32_t *index;  // [4, slot_count] row, teacher_row, label, position, in sorted order
    float *scale;    // [group_rows] slot weights in sorted order
    float *stats;    // [5 + terms, slot_count] loss, both lse, overlap, confidence; then the terms
    int32_t *argmax; // [2, slot_count] student, teacher
    // host memory, from the backend where it is copied to or from
    const struct backend *backend;
    struct loss_order *order;  // [group_rows] private
    struct loss_chunk *chunks; // [group_rows] private
    int32_t *h_index;          // as index, stats, argmax and scale
    float *h_stats;
    int32_t *h_argmax;
    float *h_scale;
    struct stream *copies; // of results to the host
};

// Asks the arena for all backend memory (see base/memory.h: called once for the size, once for real).
void loss_plan(struct loss *loss, const struct loss_options *options, struct arena *arena);
void loss_open(struct loss *loss, const struct backend *backend); // host memory, after planning
void loss_close(struct loss *loss);

struct loss_group {
    int64_t rows;              // N rows of hidden
    const void *hidden;        // [N, H] the drafter's output after its final norm
    const int32_t *hidden_row; // [slot_count] row of each slot; NULL: block * B + slot
    const bf16
        *last; // the row's last hidden states, as read: [T, H], last_stride apart; NULL: none
    int64_t last_stride;
    int64_t tokens;
    const struct slot *slots; // of the group's blocks, from slots_make
    int64_t slot_count;
    void *dhidden; // [N, H] gradient times slot weight, rows without a slot 0; NULL: no gradient
};

// Queues the group's loss. True: dhidden is among what is queued. False: it depends on the losses, and
// loss_group_collect queues it.
bool loss_group_queue(struct loss *loss, const struct backend *backend, struct stream *stream,
                      const struct loss_group *group);
// Waits for the results, but not for what has been queued on the stream since; next after
// loss_group_queue. results arrays hold slot_count entries each and are filled in the order of slots.
void loss_group_collect(struct loss *loss, const struct backend *backend, struct stream *stream,
                        const struct loss_group *group, struct slot_results *results);
// Both.
void loss_group_run(struct loss *loss, const struct backend *backend, struct stream *stream,
                    const struct loss_group *group, struct slot_results *results);

// D-PACE weights of one block's scored slots in order (alpha-smoothed confidences, suffix sums of prefix
// products; "D-PACE" as in the published speculators package). weight[i] for confidence[i].
void loss_dpace_weights(const float *confidence, int64_t count, double alpha, float *weight);

void slot_results_open(struct slot_results *results, int64_t slots);
void slot_results_close(struct slot_results *results);

#endif
