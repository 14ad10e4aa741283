// GEMM algorithms that earlier runs on a device chose by timing. Another choice would change no bits,
// since only algorithms are chosen that agree with the library's first proposal: that a fresh run takes
// what was chosen before saves the time and keeps choices, which timing does not repeat, equal. A file
// for each device, library, and shape of a step.
#ifndef TRAINER_ALGORITHM_CACHE_H
#define TRAINER_ALGORITHM_CACHE_H

#include "base/memory.h"
#include "trainer/execution.h"

// Where those files are by kernels.algorithms, NULL being .cache/dtrain in the user's home. NULL: nowhere,
// because the key is none or there is no home. The caller frees it.
char *algorithm_cache_folder(const char *key);
// The file for this execution and this table of a step's buffers. The caller frees it.
char *algorithm_cache_file(const char *folder, const struct arena *table,
                           const struct execution *execution);
// Takes what was chosen before for this execution and this table of a step's buffers. False, and nothing
// changed, when there is nothing or it can not be read.
bool algorithm_cache_read(const char *folder, const struct arena *table,
                          struct execution *execution);
// Keeps what the execution holds. When another run kept its choice meanwhile, takes that one: true.
bool algorithm_cache_keep(const char *folder, const struct arena *table,
                          struct execution *execution);

#endif
