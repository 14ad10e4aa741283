// Signals that end a run cleanly: SIGTERM, SIGINT, SIGUSR1 (Slurm's warning). The first asks the step
// loop to stop; a second one ends the process at once. The same signal from a launcher and from elsewhere is one.
#ifndef TRAINER_SIGNALS_H
#define TRAINER_SIGNALS_H

#include <stdbool.h>

// Holds the three back, for this process and what it becomes by exec: for the time before anything handles them.
void signals_hold(void);
// Ends that where none will be handled: one that has come ends the process.
void signals_let_go(void);
// Ends it with the handlers in place.
void signals_install(void);
// From here on none has an effect: everything that could be saved is.
void signals_ignore(void);
// The signal that asked to stop; 0: none.
int signals_received(void);
// For struct step: true once a signal came.
bool signals_stop(void *unused);

#endif
