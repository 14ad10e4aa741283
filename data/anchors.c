// Owns which positions may start a block, which of them are drawn, and what the slots of a block are
// scored against. Does not own D-PACE weights (loss/) or anything that attends.
#include "data/anchors.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/rng.h"

struct anchor_key {
    uint64_t key;
    int32_t position; // in the row
};

static int64_t document_end(const struct row *row, int32_t position)
{
    return row->doc_offsets[row->doc_of[position] + 1];
}

// Position that slot k of anchor a predicts, minus a.
static int64_t predicted_offset(const struct block_layout *layout, int64_t k)
{
    return layout->predict_from_anchor ? k + 1 : k;
}

// ---- EAGLE-3 -------------------------------------------------------------------------------------

// Whether slot i of anchor a counts; with MASK_INDEX_SERVED, if all slots before it do.
static bool ttt_is_scored(const struct row *row, const struct block_layout *layout, int64_t anchor,
                          int64_t i)
{
    static const int64_t behind_anchor[] = {[MASK_INDEX_SERVED] = 1,
                                            [MASK_INDEX_LABEL] = 1,
                                            [MASK_INDEX_INPUT] = 0,
                                            [MASK_INDEX_FEATURE] = -1};
    int64_t end = document_end(row, (int32_t)anchor);
    int64_t masked = anchor + i + behind_anchor[layout->mask_index];
    bool served = layout->mask_index == MASK_INDEX_SERVED;
    return anchor + i < end && masked < end && row->loss_mask[masked] != 0 &&
           (!served || row->loss_mask[anchor] != 0);
}

// The first slot from `i` on that has weight; block_size: none.
static int64_t ttt_next(const struct row *row, const struct block_layout *layout, int32_t anchor,
                        int64_t i, float *weight)
{
    for (; i < layout->block_size; i++) {
        bool scored = ttt_is_scored(row, layout, anchor, i);
        *weight = fmaxf((float)pow(layout->ttt_decay_base, (double)i), layout->least_weight);
        if (scored && *weight > 0.0f) // a small base underflows
            return i;
        if (layout->mask_index == MASK_INDEX_SERVED)
            break;
    }
    return layout->block_size;
}

static bool ttt_anchor_is_valid(const struct row *row, const struct block_layout *layout,
                                int32_t anchor)
{
    float weight;
    return row->positions[anchor] > 0 &&
           ttt_next(row, layout, anchor, 0, &weight) < layout->block_size;
}

// Slots of block b in order, onto `slots`. Returns their number.
static int64_t ttt_slots(const struct row *row, const struct block_layout *layout, int32_t anchor,
                         int64_t b, struct slot *slots)
{
    int64_t made = 0, end = document_end(row, anchor);
    float weight;
    for (int64_t i = ttt_next(row, layout, anchor, 0, &weight); i < layout->block_size;
         i = ttt_next(row, layout, anchor, i + 1, &weight)) {
        int64_t label = anchor + 1 + i;
        slots[made++] =
            (struct slot){(int32_t)b, (int32_t)i, label < end ? row->input_ids[label] : -1,
                          (int32_t)(anchor + i), weight};
    }
    return made;
}

// ---- which anchors -------------------------------------------------------------------------------

bool anchor_is_valid(const struct row *row, const struct block_layout *layout, int32_t position)
{
    if (layout->eagle3)
        return ttt_anchor_is_valid(row, layout, position);
    int64_t end = document_end(row, position);
    if (position + 1 >= end || row->loss_mask[position] == 0 || row->loss_mask[position + 1] == 0)
        return false;
    return layout->tail != TAIL_WHOLE ||
           position + predicted_offset(layout, layout->block_size - 1) < end;
}

void anchor_scratch_open(struct anchor_scratch *scratch, int64_t tokens)
{
    // Half for the candidates in order, half for the selection, which reorders.
    scratch->keys = memory_alloc((size_t)tokens * 2, sizeof(*scratch->keys));
    scratch->capacity = tokens;
}

void anchor_scratch_close(struct anchor_scratch *scratch)
{
    free(scratch->keys);
    *scratch = (struct anchor_scratch){0};
}

// Total order: two candidates with the same 64 bits still have one winner.
static bool key_less(struct anchor_key a, struct anchor_key b)
{
    return a.key != b.key ? a.key < b.key : a.position < b.position;
}

// The element that sorting would put at `rank` (Hoare's quickselect). Keys are hashes, so the middle
// element is as good a pivot as any.
static struct anchor_key key_at_rank(struct anchor_key *keys, int64_t count, int64_t rank)
{
    int64_t low = 0, high = count - 1;
    while (low < high) {
        struct anchor_key pivot = keys[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (key_less(keys[i], pivot))
                i++;
            while (key_less(pivot, keys[j]))
                j--;
            if (i <= j) {
                struct anchor_key swapped = keys[i];
                keys[i++] = keys[j];
                keys[j--] = swapped;
            }
        }
        if (rank <= j)
            high = j;
        else if (rank >= i)
            low = i;
        else
            break;
    }
    return keys[rank];
}

// Candidates of one document, ascending, onto `keys`. Returns their number.
static int64_t collect_candidates(const struct row *row, const struct block_layout *layout,
                                  int64_t document, uint64_t seed, struct anchor_key *keys)
{
    struct rng_key stream = rng_key_make(seed, row->epoch, row->doc_ids[document], RNG_ANCHOR);
    int32_t begin = (int32_t)row->doc_offsets[document];
    int32_t end = (int32_t)row->doc_offsets[document + 1];
    int64_t count = 0;
    for (int32_t t = begin; t < end; t++) {
        if (anchor_is_valid(row, layout, t))
            keys[count++] = (struct anchor_key){rng_u64(stream, (uint64_t)(t - begin)), t};
    }
    return count;
}

// The min(wanted, count) candidates of smallest key, ascending in position. Returns their number.
static int64_t keep_smallest(struct anchor_key *keys, int64_t count, int64_t wanted,
                             struct anchor_key *work, int32_t *anchors)
{
    if (count <= wanted) {
        for (int64_t i = 0; i < count; i++)
            anchors[i] = keys[i].position;
        return count;
    }
    memcpy(work, keys, (size_t)count * sizeof(*keys));
    struct anchor_key last = key_at_rank(work, count, wanted - 1);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!key_less(last, keys[i]))
            anchors[kept++] = keys[i].position;
    }
    return kept;
}

int64_t anchors_draw(const struct row *row, const struct block_layout *layout,
                     const struct anchors_config *config, uint64_t seed,
                     struct anchor_scratch *scratch, int32_t *anchors, int64_t *valid)
{
    BUG_UNLESS(row->tokens <= scratch->capacity && config->max_anchors > 0);
    struct anchor_key *keys = scratch->keys, *work = scratch->keys + scratch->capacity;
    int64_t pending = 0, drawn = 0, candidates = 0;
    for (int64_t d = 0; d < row->documents; d++) {
        int64_t found = collect_candidates(row, layout, d, seed, keys + pending);
        pending += found;
        candidates += found;
        if (config->per == ANCHORS_PER_DOCUMENT || d + 1 == row->documents) {
            drawn += keep_smallest(keys, pending, config->max_anchors, work, anchors + drawn);
            pending = 0;
        }
    }
    *valid = candidates;
    return drawn;
}

int64_t anchors_all(const struct row *row, const struct block_layout *layout, int32_t *anchors)
{
    int64_t count = 0;
    for (int32_t t = 0; t < row->tokens; t++) {
        if (anchor_is_valid(row, layout, t))
            anchors[count++] = t;
    }
    return count;
}

// w(k) by the first trained slot: 1 there, falling with the distance from it.
static float slot_weight(const struct block_layout *layout, int64_t k, int64_t first)
{
    if (layout->slot_weight != SLOT_WEIGHT_EXP)
        return 1.0f;
    return (float)exp(-(double)(k - first) / layout->slot_decay_gamma);
}

int64_t slots_make(const struct row *row, const struct block_layout *layout, const int32_t *anchors,
                   int64_t count, struct slot *slots)
{
    int64_t made = 0, first = layout->predict_from_anchor ? 0 : 1;
    for (int64_t b = 0; b < count; b++) {
        if (layout->eagle3) {
            made += ttt_slots(row, layout, anchors[b], b, slots + made);
            continue;
        }
        int64_t end = document_end(row, anchors[b]);
        for (int64_t k = first; k < layout->block_size; k++) {
            int64_t predicted = anchors[b] + predicted_offset(layout, k);
            if (predicted >= end)
                break;
            if (row->loss_mask[predicted] == 0) {
                if (layout->slot_mask == SLOT_MASK_PREFIX)
                    break;
                continue;
            }
            float weight = slot_weight(layout, k, first);
            if (weight > 0.0f) // a small gamma underflows
                slots[made++] = (struct slot){(int32_t)b, (int32_t)k, row->input_ids[predicted],
                                              (int32_t)predicted - 1, weight};
        }
    }
    return made;
}

void context_range(const struct row *row, int32_t anchor, int64_t k, int64_t window, int origin,
                   int32_t *begin, int32_t *end)
{
    int64_t first = row->doc_offsets[row->doc_of[anchor]];
    if (window > 0) {
        int64_t seen = origin == WINDOW_FROM_ANCHOR ? anchor - window : anchor + k - window + 1;
        first = seen > first ? seen : first;
    }
    *begin = (int32_t)(first < anchor ? first : anchor);
    *end = anchor;
}

void context_range_ttt(const struct row *row, int32_t t, int64_t i, int64_t window, int32_t *begin,
                       int32_t *end)
{
    int64_t first = row->doc_offsets[row->doc_of[t]];
    if (window > 0 && t + i - window + 1 > first)
        first = t + i - window + 1;
    *begin = (int32_t)(first < t + 1 ? first : t + 1);
    *end = t + 1;
}
