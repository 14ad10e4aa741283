// Scores the validation rows: always the same ones, in the documents' own order.
#ifndef TRAINER_VALIDATION_H
#define TRAINER_VALIDATION_H

#include "trainer/session.h"

struct validation;

// Takes the memory of all passes, and starts reading the first rows of the first. `rows` at most, 0: all.
int validation_open(struct validation **validation, const struct session *session,
                    const struct step *step, int64_t rows, struct error *err);
// One pass: scores this rank's rows with `step` and adds up, over all ranks. Returns 0, 1 when stopped, -1
// with err. After anything but 0 there is no further pass.
int validation_run(struct validation *validation, struct step *step, struct metrics *metrics,
                   struct walk *walk, walk_block_fn *visit, void *context, struct error *err);
// Ends the reading; nothing is scored after it. False as in prefetch_stop: the session has to stay. NULL: nothing
// to do.
bool validation_stop(struct validation *validation);
// After the step's copies from its rows. False as in validation_stop.
bool validation_close(struct validation *validation);

#endif
