// Where a run continues: which checkpoint, and whether config, execution and data still fit it.
#ifndef TRAINER_RESUME_H
#define TRAINER_RESUME_H

#include "trainer/run_folder.h"
#include "trainer/session.h"

struct resume {
    const char *choice; // "auto", "none" or a checkpoint directory
    bool replan;        // accept another execution
    char *path;         // the checkpoint; NULL: start from the beginning
    bool failed;        // a fault of the checkpoint (status 1), not of the config (status 2)
};

// Finds the checkpoint, compares config and execution with what the run folder froze, and freezes them
// at the first start. On resume session->execution becomes the frozen one.
int resume_find(struct resume *resume, struct run_folder *folder, struct session *session,
                struct error *err);
// Fills state: from the checkpoint, or with initial weights.
int resume_load(const struct resume *resume, const struct session *session,
                struct model_state *state, struct error *err);
void resume_release(struct resume *resume);

#endif
