// The ranks of a run: one process per GPU (or CPU process), what they exchange, and how they end together.
// Owns the communicator, its stream and the control channel; knows nothing of steps or tensors' names.
// Every rank makes the same calls in the same order. A rank that dies or stands still ends all others with a
// message that names it, within `parallel.timeout` seconds: no call here waits longer.
//
// Engines: "one" (a single process: nothing is sent, sums are what they are), "mpi" (CPU), "nccl" (CUDA).
// All sums have a fixed order: the same values on the same number of ranks give the same bits.
#ifndef TRAINER_RANKS_H
#define TRAINER_RANKS_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

struct config;
struct ranks;

// Joins the other processes: from the environment of torchrun, srun or mpirun, or as dtrain's own child.
// Without any of these: one rank. Errors (exit status 2) name the variable that is missing or contradicts.
int ranks_open(struct ranks **ranks, const struct config *config, struct error *err);
// Leaves in good order; every rank calls it, and waits there for the others. After ranks_fail it only frees. The last
// thing but its own memory that a process of several ranks sees to: it is killed where it lives for more than
// parallel.timeout and 15 seconds from here on.
void ranks_close(struct ranks *ranks);
int ranks_rank(const struct ranks *ranks);
int ranks_size(const struct ranks *ranks);
// This process among those of its machine: which GPU it takes.
int ranks_local(const struct ranks *ranks);
// What NCCL takes of each GPU for that many ranks. An estimate, and for more than eight on several machines.
size_t ranks_gpu_bytes(int64_t ranks);

// After the backend is chosen (ranks_open has left this process one visible GPU, which is its own):
// connects the engine. Before it nothing below may be called but ranks_signal, ranks_fail and ranks_close.
int ranks_connect(struct ranks *ranks, const struct backend *backend, struct error *err);
// The stream whose work the exchanges of backend memory wait for and are waited for by. Host values do not
// need it.
void ranks_compute(struct ranks *ranks, struct stream *compute);

// Exchanges of backend memory. They are queued on the communication stream, begin when what `compute` holds at
// the call has been done, and the memory must not be touched before ranks_wait of a later mark.
// Sum over ranks, in place, to `owner`; what the others hold after it is undefined.
void ranks_reduce(struct ranks *ranks, float *values, int64_t count, int owner);
// The owner's bytes to everybody, in place.
void ranks_broadcast(struct ranks *ranks, void *bytes, size_t size, int owner);
// Calls between begin and end travel together (one launch).
void ranks_group_begin(struct ranks *ranks);
void ranks_group_end(struct ranks *ranks);
// A place in the communication stream: everything queued so far. Marks may be used again; slot 0 to
// RANKS_MARKS - 1.
enum { RANKS_MARKS = 256 };
void ranks_mark(struct ranks *ranks, int slot);
// compute goes on only after that place; host does not wait.
void ranks_wait(struct ranks *ranks, int slot);

// Host values; they return when the result is there.
void ranks_sum(struct ranks *ranks, double *values, int64_t count); // the same bits on every rank
void ranks_max(struct ranks *ranks, int64_t *values, int64_t count);
// The bytes of rank `from` to everybody (names, hashes, decisions).
void ranks_share(struct ranks *ranks, void *bytes, size_t size, int from);
// All ranks have come here.
void ranks_barrier(struct ranks *ranks);

// A signal that any rank has received (SIGTERM, SIGINT, SIGUSR1), told to all over the control channel; 0: none.
// Without waiting: may be asked between anchor groups. Ranks may see it at different moments: what is done
// about it must be agreed upon by ranks_max.
int ranks_signal(const struct ranks *ranks);
// This rank can not go on. Prints the text as an error (once for all ranks that fail with the same words
// within a second) and tells the others, which then end with status 1 by themselves unless they call this, too.
// Returns within seconds; the caller then exits with its own status.
void ranks_fail(struct ranks *ranks, const char *text);
// The same before the first step: ranks that have not failed themselves end with status 2, too.
void ranks_refuse(struct ranks *ranks, const char *text);

#ifdef __cplusplus
}
#endif
#endif
