// What a run's steps compute, against what its devices could.
#ifndef TRAINER_RUN_WORK_H
#define TRAINER_RUN_WORK_H

#include "trainer/plan_work.h"

struct run_work {
    struct plan_work planned;
    double peak_flops; // a second, of all ranks' devices; 0: not known
};

// 10^12 dense bf16 operations a second, with sums in fp32, of a device by its name; 0: not known.
double run_work_peak(const char *hardware);
// Of an open session, as its execution says. -1: the config is faulty.
int run_work_open(struct run_work *work, const struct session *session, struct error *err);
// Useful operations of a step, all ranks together.
double run_work_done(const struct run_work *work, const struct metrics *metrics);

#endif
