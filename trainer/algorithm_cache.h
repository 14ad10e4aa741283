// GEMM algorithms that earlier runs on a device chose by timing, so that a run that starts fresh
// chooses the same: timing alone is not repeatable, and another algorithm adds in another order. A file
// in the user's cache folder for each device, library, and shape of a step.
#ifndef TRAINER_ALGORITHM_CACHE_H
#define TRAINER_ALGORITHM_CACHE_H

#include "base/memory.h"
#include "trainer/execution.h"

// Where those files are: .cache/dtrain in the user's home; NULL: there is no home. The caller frees it.
char *algorithm_cache_folder(void);
// Takes what was chosen before for this execution and this table of a step's buffers. False, and nothing
// changed, when there is nothing or it can not be read.
bool algorithm_cache_read(const char *folder, const struct arena *table,
                          struct execution *execution);
// Keeps what the execution holds. When another run kept its choice meanwhile, takes that one: true.
bool algorithm_cache_keep(const char *folder, const struct arena *table,
                          struct execution *execution);

#endif
