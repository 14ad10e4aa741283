// finished.json of a run folder: that the run has come to its end, and how. It is written when the last
// checkpoint is complete and removed when a run starts in the folder, so that what is there is true.
#ifndef TRAINER_RUN_END_H
#define TRAINER_RUN_END_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

struct run_end {
    int64_t step;        // the last one
    int64_t total_steps; // that the config gave
    bool patience;       // validation.patience ended it before them
};

int run_end_write(const char *folder, const struct run_end *end, struct error *err);
void run_end_forget(const char *folder);
// False: the run has not come to its end, or goes on.
bool run_end_read(const char *folder, struct run_end *end);

#endif
