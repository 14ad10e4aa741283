// Says when steps wait for data, and for which part of it.
#ifndef TRAINER_WAIT_WATCH_H
#define TRAINER_WAIT_WATCH_H

#include <stdbool.h>
#include <stdint.h>

struct step_report;

struct wait_watch {
    bool begun; // the first step has passed; it waits for the first row in any case
    // sums of the running window
    int64_t steps;
    double seconds, wait, copy, read, disk, bytes, spool;
    double elapsed; // seconds of all steps
    double told;    // `elapsed` at the last warning
    int64_t warned; // warnings so far
    bool waits;     // the last thing that was said is a warning
};

// Adds a step. At the end of a window, which is at least 20 steps and 10 seconds: a warning when more than 5 %
// of it were spent waiting, ten minutes after the one before at the earliest, and a line when that is over.
void wait_watch_step(struct wait_watch *watch, const struct step_report *report);

#endif
