// Which of how many processes this one is, as the environment of its launcher says.
#ifndef TRAINER_RANK_PLACE_H
#define TRAINER_RANK_PLACE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

// In the order in which they are looked for: torchrun may run under srun or mpirun, mpirun in a Slurm job.
enum rank_launcher {
    LAUNCHER_NONE,
    LAUNCHER_OWN, // dtrain's own supervisor, trainer/launch.h
    LAUNCHER_TORCHRUN,
    LAUNCHER_MPIRUN,
    LAUNCHER_SRUN,
};

struct rank_place {
    enum rank_launcher launcher;
    int rank, size, local; // local: among the processes of this machine
    bool one_machine;      // all ranks are here, as far as the launcher says
    bool mpi;       // MPI connects these processes: they come from mpirun, or perhaps from srun
    char host[256]; // where rank 0 is; "": the launcher does not say
    int port;       // the first of `ports` that rank 0 may listen on; 0: the launcher gives none
    int ports;
    int held_port; // one that the launcher itself listens on; 0: none
    int listen_fd; // own launch, rank 0: a socket that listens already; -1: none
    uint64_t job;  // of what names this job: strangers have another one
    // "": nothing. A Slurm job of several tasks in which this process is not one of them.
    char notice[256];
};

// Text of an environment variable, NULL: not set.
typedef const char *rank_variable_fn(void *context, const char *name);

// -1: a launcher's variables are half set or contradict; err names them.
int rank_place_read(struct rank_place *place, rank_variable_fn *variable, void *context,
                    struct error *err);
// A rank_variable_fn: of this process.
const char *rank_variable(void *unused, const char *name);
const char *rank_launcher_name(enum rank_launcher launcher);

// The first host of a Slurm list like "node[03-05,9],login": "node03". -1: it does not fit or is no list.
int rank_first_host(const char *list, char *host, int size);

// What dtrain's supervisor tells its children.
#define RANK_VARIABLE_RANK      "DTRAIN_RANK"
#define RANK_VARIABLE_SIZE      "DTRAIN_WORLD_SIZE"
#define RANK_VARIABLE_PORT      "DTRAIN_PORT"
#define RANK_VARIABLE_LISTEN_FD "DTRAIN_LISTEN_FD" // rank 0 only
#define RANK_VARIABLE_TOKEN     "DTRAIN_TOKEN"     // random text

#endif
