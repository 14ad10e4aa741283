// dtrain as its own launcher: one rank for each GPU of this machine.
#ifndef TRAINER_LAUNCH_H
#define TRAINER_LAUNCH_H

#include "base/error.h"

struct options;

// What the ranks are: processes that run `program` (a path) with `arguments`, NULL at the end, rank 0 first.
struct launch {
    int ranks;
    const char *program;
    char *const *arguments;
    const char *const *gpus; // [ranks] CUDA_VISIBLE_DEVICES of each; NULL: left as it is
    int port;                // where rank 0 listens; 0: any
    // Seconds for ranks to end by themselves once one has failed, and then from SIGTERM to SIGKILL.
    double notice_seconds, kill_seconds;
    double linger_seconds; // for the others once one has ended in good order
};

// Starts them, passes SIGTERM, SIGINT and SIGUSR1 on, and waits until all have ended; none outlives this process.
// Returns their common exit status, 1 where they have none.
int launch_run(const struct launch *launch);

// The command `train`: on several GPUs of this machine, without a launcher, it starts this program again for each;
// else this process trains.
int command_launch(const struct options *options);

#endif
