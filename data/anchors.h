// Where blocks start and what their slots are scored against. DFlash: a candidate's key is a hash of
// (seed, epoch, document, position); the smallest keys win, so the draw depends neither on ranks nor on
// resume (nor, per document, on packing). EAGLE-3: a block is a position t with its ttt_steps, and a = t+1
// is called its anchor: ttt_step i is slot i, whose teacher row is a+i and whose label is x[a+1+i].
#ifndef DATA_ANCHORS_H
#define DATA_ANCHORS_H

#include "configs/config.h"
#include "data/row.h"

// What slots a block has, from the drafter's and the anchors' keys.
struct block_layout {
    int64_t block_size; // B
    bool predict_from_anchor;
    int tail;        // TAIL_MASK, TAIL_WHOLE
    int slot_mask;   // SLOT_MASK_PREFIX, SLOT_MASK_EACH
    int slot_weight; // SLOT_WEIGHT_*; dpace is decided after the losses are known
    double slot_decay_gamma;
    // EAGLE-3: block_size is ttt_steps, predict_from_anchor true; of the members above no other is read.
    bool eagle3;
    int mask_index;        // MASK_INDEX_*
    double ttt_decay_base; // weight of slot i: ttt_decay_base^i, at least
    float least_weight;    // this; above 0 no slot is left out for its weight
};

// Anchor a is valid: loss_mask[a] = 1, loss_mask[a+1] = 1, a+1 in the same document; with TAIL_WHOLE
// also every predicted position in its document. EAGLE-3: a-1 is in the same document, and a slot of a
// has weight.
bool anchor_is_valid(const struct row *row, const struct block_layout *layout, int32_t position);

// Memory for anchors_draw over rows of up to `tokens` tokens.
struct anchor_scratch {
    struct anchor_key *keys; // private
    int64_t capacity;
};
void anchor_scratch_open(struct anchor_scratch *scratch, int64_t tokens);
void anchor_scratch_close(struct anchor_scratch *scratch);

// min(max_anchors, valid) anchors per row or per document, ascending, into anchors[row->tokens].
// Returns their number; *valid: how many candidates there were.
int64_t anchors_draw(const struct row *row, const struct block_layout *layout,
                     const struct anchors_config *config, uint64_t seed,
                     struct anchor_scratch *scratch, int32_t *anchors, int64_t *valid);
// All valid anchors (validation).
int64_t anchors_all(const struct row *row, const struct block_layout *layout, int32_t *anchors);

// One slot that is scored.
struct slot {
    int32_t block;       // index into the anchors given
    int32_t slot;        // k
    int32_t label;       // token id at the predicted position; -1: that is beyond the document
    int32_t teacher_row; // position in the row whose teacher predicts it
    float weight;        // by exp, uniform (dpace: 1) or ttt_decay_base; never 0
};

// Slots of nonzero weight of `count` blocks, in order of block and slot, into slots[count * B].
// Returns their number. Weight rules: predicted position inside the document and loss_mask 1 there;
// SLOT_MASK_PREFIX also ends the block at the first such zero. EAGLE-3, slot i of position t: the teacher
// row is inside the document, and
//   MASK_INDEX_SERVED   x[t+1] and all labels up to the slot's are supervised and inside the document
//   MASK_INDEX_LABEL    loss_mask[t+2+i] = 1, inside the document
//   MASK_INDEX_INPUT    loss_mask[t+1+i] = 1 (speculators); the document's last teacher row has no label
//   MASK_INDEX_FEATURE  loss_mask[t+i] = 1 (EAGLE, SpecForge); likewise
int64_t slots_make(const struct row *row, const struct block_layout *layout, const int32_t *anchors,
                   int64_t count, struct slot *slots);

// Context range of query row (anchor, slot k) in a layer: [begin, end) of the packed row. window 0:
// full attention. origin: WINDOW_FROM_QUERY sees kv > anchor + k - window, WINDOW_FROM_ANCHOR sees
// kv >= anchor - window (speculators).
void context_range(const struct row *row, int32_t anchor, int64_t k, int64_t window, int origin,
                   int32_t *begin, int32_t *end);
// The same of EAGLE-3: keys of ttt_step 0 that ttt_step i of any position t sees. The window is measured
// from t+i.
void context_range_ttt(const struct row *row, int32_t t, int64_t i, int64_t window, int32_t *begin,
                       int32_t *end);

#endif
