// What an engine is, and what engines need of the ranks they serve.
#ifndef TRAINER_RANKS_INTERNAL_H
#define TRAINER_RANKS_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "kernels/backend.h"
#include "trainer/ranks.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    RANKS_CHANNELS = 16, // of NCCL, a multiprocessor each: the others go on with the backward pass
    RANKS_STAGE_BYTES = 1 << 18 // of host values from one rank at a time, on the GPU
};

// How values travel; comments in ranks.h say what each call does. Called by one thread, but for `waiting`.
struct ranks_engine {
    const char *name;
    void (*close)(void *state); // in good order, all ranks together
    void (*abort)(void *state); // the process ends; others may be gone
    void (*compute)(void *state, struct stream *compute);
    void (*reduce)(void *state, float *values, int64_t count, int owner);
    void (*broadcast)(void *state, void *bytes, size_t size, int owner);
    void (*group_begin)(void *state);
    void (*group_end)(void *state);
    void (*mark)(void *state, int slot);
    void (*wait)(void *state, int slot);
    void (*sum)(void *state, double *values, int64_t count);
    void (*max)(void *state, int64_t *values, int64_t count);
    void (*share)(void *state, void *bytes, size_t size, int from);
    void (*barrier)(void *state);
    // Seconds for which what is queued has stood still; 0: it has not. For the control thread, about ten times
    // a second.
    double (*waiting)(void *state);
};

// MPI, where it is built in. start: before the processes know each other; -1: not built in, MPI sees other ranks than
// the launcher, or they are not all on CPUs or all on GPUs. From start to tell the process ends when MPI takes more than
// `seconds`.
bool ranks_mpi_built(void);
int ranks_mpi_start(const struct ranks *ranks, bool cpu, double seconds, struct error *err);
// The bytes of rank 0 to everybody, before there is an engine. last: nothing else travels by MPI, which ends here,
// since mpirun takes a process that has started MPI and exits without ending it for a failed one.
void ranks_mpi_tell(void *bytes, size_t size, bool last);
const struct ranks_engine *ranks_mpi_engine(struct ranks *ranks, void **state);

// NCCL, where it is built in; NULL with err set: it is not, or does not start.
const struct ranks_engine *ranks_nccl_engine(struct ranks *ranks, void **state, struct error *err);

// The bytes of rank 0 to everybody over the control channel. -1: they have not come in time.
int ranks_tell(struct ranks *ranks, void *bytes, size_t size, struct error *err);

// Ends this process when another rank has failed. Engines call it in every loop that waits.
void ranks_check(struct ranks *ranks);

#ifdef __cplusplus
}
#endif
#endif
