// Processes of this program that another one starts and watches (launch.c, sweep_process.c): how a child begins,
// which signals its supervisor waits for, and its end in words.
#ifndef TRAINER_CHILD_H
#define TRAINER_CHILD_H

#include <signal.h>
#include <sys/types.h>

enum { CHILD_STOPS = 3 };

struct child_signals {
    sigset_t stops; // what asks this process to stop: SIGTERM, SIGINT, SIGUSR1
    // What was held back at first, and was done about those: a child's again.
    sigset_t before;
    struct sigaction actions[CHILD_STOPS];
};

// Holds these and SIGCHLD back in all threads, so that none is lost between two looks.
void child_signals_hold(struct child_signals *signals);
void child_signals_release(const struct child_signals *signals);
// Waits at most so long. The number of a signal that asks to stop; 0: none came, or a child has ended.
int child_signals_await(const struct child_signals *signals, double seconds);
// The same for children alone; what asks to stop is left to others.
void child_await(double seconds);

// In the child, behind fork. It is killed when `parent` ends, and in a process group of its own: what the terminal
// sends to the foreground comes from the supervisor, once.
void child_begin(const struct child_signals *signals, pid_t parent);
// "ended with status 1", "was ended by signal 9 (Killed)", of what waitpid gives. The caller frees.
char *child_end_words(int status);

#endif
