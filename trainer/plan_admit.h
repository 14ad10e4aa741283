// Whether a run fits the memory that is free now, asked before it takes anything.
#ifndef TRAINER_PLAN_ADMIT_H
#define TRAINER_PLAN_ADMIT_H

#include "trainer/plan.h"

// Chooses what the config leaves open so that the session's run fits, and puts it into its execution;
// frozen: the execution stays as it is. -1: it does not fit; err has the plan by group and the nearest
// values that do. training false: for scoring only. *planned: bytes that it will take; may be NULL.
int plan_admit(struct session *session, bool training, bool frozen, size_t *planned,
               struct error *err);

#endif
