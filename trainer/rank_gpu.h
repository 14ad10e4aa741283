// Which GPU a rank sees: one, by CUDA_VISIBLE_DEVICES, so that every thread's first device is the right one.
#ifndef TRAINER_RANK_GPU_H
#define TRAINER_RANK_GPU_H

#include "base/error.h"

// The value that shows process number `local` of this machine its own GPU. list: the present value, NULL: not
// set. A list of one stays, since the launcher has chosen then; so does an empty one, which hides all.
int rank_gpu_choose(const char *list, int local, char *value, int size, struct error *err);

#endif
