// Which GEMM algorithms a run uses.
#ifndef TRAINER_TUNE_H
#define TRAINER_TUNE_H

#include "trainer/step.h"

// Before the first step of a run, once weights are loaded and before any row is staged: obeys the
// algorithms that the execution holds, or, when it holds none, takes those that an earlier run kept, or
// times those of every product of a step, Muon's update of all ranks' tensors included, and writes them there.
// Nothing is left of the made-up row that this computes. -1 when the library does not know an algorithm that the
// execution held.
int step_tune(struct step *step, struct execution *execution, struct error *err);

#endif
