// Learning rate over steps, and where an epoch's steps end.
#ifndef TRAINER_SCHEDULE_H
#define TRAINER_SCHEDULE_H

#include "configs/config.h"

// Learning rate of optimizer step `step` (1 .. total): rises linearly over the warm-up steps (the last
// of them has the peak), then follows the kind; the last step has min_lr_ratio * lr (constant: lr).
double schedule_lr(const struct schedule_config *schedule, double peak, int64_t step,
                   int64_t total);

#endif
