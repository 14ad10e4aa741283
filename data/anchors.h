// Where blocks start (DFlash). A candidate's key is a hash of (seed, epoch, document, position); the
// smallest keys win, so the draw depends neither on ranks nor on resume (nor, per document, on packing).
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
};

// Anchor a is valid: loss_mask[a] = 1, loss_mask[a+1] = 1, a+1 in the same document; with TAIL_WHOLE
// also every predicted position in its document.
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
    int32_t label;       // token id at the predicted position
    int32_t teacher_row; // position in the row whose teacher predicts it
    float weight;        // by exp or uniform (dpace: 1); never 0
};

// Slots of nonzero weight of `count` blocks, in order of block and slot, into slots[count * B].
// Returns their number. Weight rules: predicted position inside the document and loss_mask 1 there;
// SLOT_MASK_PREFIX also ends the block at the first such zero.
int64_t slots_make(const struct row *row, const struct block_layout *layout, const int32_t *anchors,
                   int64_t count, struct slot *slots);

// Context range of query row (anchor, slot k) in a layer: [begin, end) of the packed row. window 0:
// full attention. origin: WINDOW_FROM_QUERY sees kv > anchor + k - window, WINDOW_FROM_ANCHOR sees
// kv >= anchor - window (speculators).
void context_range(const struct row *row, int32_t anchor, int64_t k, int64_t window, int origin,
                   int32_t *begin, int32_t *end);

#endif
