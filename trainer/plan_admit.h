// Whether a run fits the memory that is free now, asked before it takes anything.
#ifndef TRAINER_PLAN_ADMIT_H
#define TRAINER_PLAN_ADMIT_H

#include "trainer/plan.h"

// For what memory is asked: it decides what may still be chosen, and what a refusal can offer.
enum plan_admission {
    ADMIT_NEW,       // a run from its beginning: every key may change
    ADMIT_FROZEN,    // as its first start chose: the session's execution stays as it is
    ADMIT_REPLANNED, // a run that continues, cut anew: only memory.* may change
    ADMIT_SCORING,   // a checkpoint is scored: only memory.* may change
};

// What an open session plans for, whatever memory is free.
struct plan_subject plan_session_subject(const struct session *session, bool training);

// What of the planned CUDA context and NCCL is in use when a run is admitted, so that it counts as free. joined_bytes:
// what came while the ranks were connected, so that another process's memory is not taken for NCCL's.
size_t plan_begun_bytes(int64_t ranks, size_t joined_bytes);

// Chooses what the config leaves open so that the session's run fits, and puts it into its execution.
// -1: it does not fit; err has the plan by group and the nearest values that do. *planned: bytes that it
// will take, on a CPU those of the host part included; may be NULL.
int plan_admit(struct session *session, enum plan_admission how, size_t *planned,
               struct error *err);

#endif
