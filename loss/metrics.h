// Sums over scored slots and blocks, and the numbers made from them. Sums add over groups, rows,
// micro-steps and ranks; they are divided once, at the end.
#ifndef LOSS_METRICS_H
#define LOSS_METRICS_H

#include <stdint.h>

#include "data/anchors.h"
#include "kernels/softmax_loss.h"

enum { METRICS_MAX_BLOCK = 64 };

struct metrics {
    double loss;                       // sum of weight * loss
    double weight;                     // sum of weights
    double slots;                      // slots of nonzero weight as applied
    double terms[LOSS_TERM_COUNT];     // sum of weight * term, for terms of nonzero weight
    double overlap;                    // sum over scored slots
    double blocks;                     // blocks with at least one scored slot
    double accepted;                   // sum over blocks of leading slots that agree
    double correct[METRICS_MAX_BLOCK]; // per slot k: student argmax = teacher argmax
    double scored[METRICS_MAX_BLOCK];  // per slot k
    double reached[METRICS_MAX_BLOCK]; // scored, and all predicted slots before it agreed
    double agreed[METRICS_MAX_BLOCK];  // reached, and it agreed as well
    double tokens, supervised, anchors, valid_anchors, rows, bad_documents;
    double outside; // scored slots whose teacher's largest logit is outside the draft vocabulary
    double covered; // supervised positions predicted by at least one slot
};

// What the loss found for each slot of a slots_make list, in its order (host memory).
struct slot_results {
    float *weight; // as applied, by loss.slot_weight; 0: masked by the teacher's argmax
    float *loss;   // the configured mixture
    float *terms;  // [S, LOSS_TERM_COUNT]
    // With a draft vocabulary teacher_lse is over the kept tokens, overlap and teacher_argmax are against
    // the whole vocabulary.
    float *student_lse, *teacher_lse, *overlap;
    int32_t *student_argmax, *teacher_argmax; // target ids
};

void metrics_add(struct metrics *sum, const struct metrics *other);
// Adds the slots of `blocks` blocks. first: the first slot that is predicted, 0 or 1. accepted[block]
// (may be NULL) receives the leading slots that agree.
void metrics_count_slots(struct metrics *sum, int32_t first, const struct slot *slots,
                         int64_t count, const struct slot_results *results, int64_t blocks,
                         int32_t *accepted);

// Derived numbers.
double metrics_loss(const struct metrics *sum,
                    int normalize);                        // NORMALIZE_*; 0 when nothing counted
double metrics_accept_len(const struct metrics *sum);      // 1 + leading agreements, mean of blocks
double metrics_eal_marginal(const struct metrics *sum);    // sum of products of acc[1..k], no bonus
double metrics_accuracy(const struct metrics *sum, int k); // NAN where nothing was scored
double metrics_conditional(const struct metrics *sum,
                           int k);                 // accuracy of the slots that were reached
double metrics_overlap(const struct metrics *sum); // mean of scored slots

// The walk: real decoding jumps over what it accepts.
struct walk {
    double blocks, tokens;                  // all documents: tokens = sum of accepted + 1
    double draft_tokens[METRICS_MAX_BLOCK]; // the same if only n drafts were used, n = index
    double draft_blocks[METRICS_MAX_BLOCK];
};
// One visited block, for reports.
typedef void walk_block_fn(void *context, uint64_t doc_id, int32_t position_in_document,
                           int32_t accepted);
// Walks every run of supervised positions of the row: a starts at the run's first position; while a is
// an anchor of `anchors` (ascending, `count`), a += accepted + 1. visit may be NULL; it is called for
// the full number of drafts.
void walk_row(struct walk *walk, const struct row *row, const int32_t *anchors,
              const int32_t *accepted, int64_t count, int64_t drafts, walk_block_fn *visit,
              void *context);
double walk_accept_len(const struct walk *walk);
double walk_accept_len_drafts(const struct walk *walk, int64_t drafts);

#endif
