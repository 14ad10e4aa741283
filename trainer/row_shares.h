// Which rank computes which row: the rows of each step are spread so that work, not rows, is balanced. A
// function of (config, data, step, number of ranks): known before anything is read.
#ifndef TRAINER_ROW_SHARES_H
#define TRAINER_ROW_SHARES_H

#include "configs/config.h"
#include "data/packing.h"
#include "drafter/drafter_sizes.h"
#include "drafter/params.h"

// What a row costs, in floating-point operations. Each supervised token is taken for an anchor.
struct row_work {
    double token, block;  // of a token of the context, of a block without its attention
    double visible;       // of a block and a token of context that it sees
    int64_t most_per_row; // anchors; 0: any number
    int64_t most_per_document;
};
// whole_teacher: EAGLE-3's teacher is multiplied over the whole vocabulary, not over the draft vocabulary alone.
struct row_work row_work_of(const struct drafter_sizes *sizes, const struct params *params,
                            bool whole_teacher);
double row_work_estimate(const struct row_work *work, const struct documents *documents,
                         const struct packing *packing, int64_t row);

struct row_shares {
    int32_t *owner; // [rows] rank of each row of an epoch
    int64_t rows;
};

// rows_per_step rows at a time, each time the row that costs most first, to the rank that has least to do.
void row_shares_make(struct row_shares *shares, const struct packing *packing,
                     const struct documents *documents, const struct row_work *work,
                     int64_t rows_per_step, int ranks);
void row_shares_release(struct row_shares *shares);
// Rows of a rank among rows [begin, end).
int64_t row_shares_count(const struct row_shares *shares, int rank, int64_t begin, int64_t end);

#endif
