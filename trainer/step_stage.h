// Rows' features on their way to the backend, on streams of their own: while one row is computed, the
// next one's features come.
#ifndef TRAINER_STEP_STAGE_H
#define TRAINER_STEP_STAGE_H

#include "data/row.h"
#include "kernels/backend.h"

enum { STEP_STAGES = 2 };

struct staged_row {
    bf16 *features;        // [seq_len] features of tokens, backend memory
    struct stream *copies; // that fill it
    const struct row *row; // whose features are in it or on their way; NULL: nobody waits for them
};

struct step_stage {
    const struct backend *backend;
    struct staged_row places[STEP_STAGES];
    int last; // the place filled last
};

// After features have been planned.
void step_stage_open(struct step_stage *stage, const struct backend *backend);
void step_stage_close(struct step_stage *stage);
// Starts copying the row's features, once what is queued on compute so far is done. The row stays as it
// is until it has been taken and that work has ended.
void step_stage_put(struct step_stage *stage, struct stream *compute, const struct row *row);
// The row's features for work that is queued on compute from now on; put first where they were not.
struct staged_row *step_stage_take(struct step_stage *stage, struct stream *compute,
                                   const struct row *row);
// The row is not run: its place is free again, and the row is not read any more.
void step_stage_drop(struct step_stage *stage, const struct row *row);

#endif
