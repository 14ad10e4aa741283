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

// A draft vocabulary: the student knows draft ids only. The head's rows, and so the columns of the
// teacher's logits, are then ordered: the kept ids ascending, whose column is their draft id, then the
// others ascending. Losses are against the softmax over the kept columns; a label outside adds nothing to
// ce_data.
struct loss_vocab {
    int64_t draft;        // Vd; 0 or V: the student knows the whole vocabulary, the rest is unread
    const int32_t *ids;   // [V] backend memory: target id of a row of the head
    const int32_t *h_ids; // [V] host: the same
    const int32_t *draft_of; // [V] host: draft id of a target id, -1: outside
    // Slots whose teacher's argmax over all columns is outside weigh 0. Without a teacher: whose label is.
    bool mask_outside;
    // Groups with a gradient, too, compare with the teacher over all columns; else argmax and overlap of
    // theirs are of the kept ones. mask_outside needs it.
    bool full_in_training;
};

// A Markov head: the logits of a slot get w2 times the row of w1 of the token in front of the one that it
// predicts, a target id.
struct loss_markov {
    int64_t rank;   // r; 0: there is none
    const void *w1; // [V, r] compute dtype, backend memory
    const void *w2; // [Vd or V, r]
    float *dw1;     // [V, r] fp32: its gradient is added here; NULL: it is not trained
    float *dw2;     // [Vd or V, r] likewise
};

// Backend memory of a group's results, until they are on the host.
struct loss_results {
    bool kept; // nothing that is queued behind the loss writes there, so that it waits for no copy
    float *stats;    // [5 + terms, slot_count] loss, both lse, overlap, confidence; then the terms
    int32_t *argmax; // [2, slot_count] student, teacher
    // with a map and a teacher, else NULL: the teacher over all columns
    int32_t *full_argmax; // [slot_count] column; distinct teachers of a chunk from its first row on
    float *full_overlap;  // [slot_count]
};

struct loss_options {
    const struct loss_config *config;
    int64_t hidden, vocab; // H, V
    int64_t block_size;    // B
    int64_t group_rows;    // most block rows of a group
    // Student and distinct teacher rows whose logits exist together, >= 2. With a draft vocabulary the
    // same memory holds more student rows, which are shorter.
    int64_t chunk_rows;
    // Distinct teacher rows of a chunk at most, where the kept columns alone are compared, so that they, too, are
    // short; never less than chunk_rows.
    int64_t teacher_rows;
    enum dtype compute; // of hidden states, head and gradients
    enum dtype logits;
    bool has_teacher;  // false: shards without a last hidden state
    bool teacher_norm; // the last hidden state is pre-norm: apply the target's final norm
    float norm_eps, norm_weight_offset;
    float logit_scale;
    const void *head;  // [V, H] compute dtype, backend memory, frozen
    const float *norm; // [H] fp32, backend memory, frozen; unread without teacher_norm
    struct loss_vocab map;
    // [Vd or V, H] compute dtype, backend memory: the student's head. NULL: the first rows of `head`.
    const void *student_head;
    float *dhead; // [Vd or V, H] fp32: its gradient is added here; NULL: it is frozen
    struct loss_markov markov;
    struct loss_results results; // from loss_plan_results; not kept: loss_plan takes them
    // No slot's weight is other than 0 or 1, so that dS may be rounded before it is weighted.
    bool whole_weights;
};

struct loss {
    struct loss_options options;
    float weight[LOSS_TERM_COUNT];
    // backend memory
    void *logits;   // [chunk_rows, V] students, then distinct teachers; later G and sums of dS
    void *student;  // [chunk_rows, H] gathered hidden states; of a map [most_students, H]
    void *teacher;  // [chunk_rows or teacher_rows, H] gathered last hidden states, normed
    void *gradient; // [group_rows, H] unweighted dS, in sorted order
    // Of these: fp32; compute's with whole weights, where the product's sums are not in parts.
    enum dtype gradient_type;
    int32_t *index; // [4, slot_count] row, teacher_row, label, position, in sorted order
    float *scale;   // [group_rows] slot weights in sorted order
    struct loss_results results;
    // [chunk_rows] over all columns, distinct teachers of the chunk; NULL where results.full_argmax is.
    float *full_lse;
    // with a Markov head, else NULL
    void *previous;       // [most students of a chunk, r] rows of w1
    float *dprevious;     // [group_rows, r] their unweighted gradient, in sorted order
    int32_t *token_index; // markov.c's
    // host memory, from the backend where it is copied to or from
    const struct backend *backend;
    struct loss_order *order;    // [group_rows] private
    struct loss_chunk *chunks;   // [group_rows] private
    struct loss_token *by_token; // [group_rows + 1] private; these two only with a Markov head
    int32_t *h_token_index;      // as token_index
    int64_t token_count;         // distinct ones of the running group
    int64_t width;               // of a student's logits: V, or Vd of a map
    int32_t *h_index;            // as index, stats, argmax and scale
    float *h_stats;
    int32_t *h_argmax;
    float *h_scale;
    int32_t *h_full_argmax;
    float *h_full_overlap;
    int64_t chunk_count;   // of the running group
    struct stream *copies; // of results to the host
};

// Asks the arena for all backend memory (see base/memory.h: called once for the size, once for real).
void loss_plan(struct loss *loss, const struct loss_options *options, struct arena *arena);
// Memory for options->results that is not to be shared with what comes behind the loss.
struct loss_results loss_plan_results(const struct loss_options *options, struct arena *arena);
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
    const int32_t *input_ids; // [T] host: of the row; unread without a Markov head
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
// With a map: argmaxes are target ids, teacher_argmax and overlap are of the whole vocabulary (see
// full_in_training), teacher_lse is of the kept columns, and weight is 0 where it was masked.
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
