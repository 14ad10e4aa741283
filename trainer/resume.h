// Where a run continues: which checkpoint, and whether config, execution and data still fit it.
#ifndef TRAINER_RESUME_H
#define TRAINER_RESUME_H

#include "trainer/run_folder.h"
#include "trainer/session.h"

struct resume {
    const char *choice;        // "auto", "none" or a checkpoint directory
    bool replan;               // accept another execution
    char *path;                // the checkpoint; NULL: start from the beginning
    bool followed;             // no checkpoint, but the run folder's execution.json is obeyed
    int64_t epochs, max_steps; // of the checkpoint's config
    int64_t ranks;             // that wrote it
    bool warned;               // that results are not bitwise the same
    bool failed; // a fault of the checkpoint (status 1), not of config or data (status 2)
};

// Whether there may be something to continue or to obey: a checkpoint is named, or the run folder has
// held a run. Nothing is opened.
bool resume_likely(const struct resume *resume, const char *run_dir);
// Finds the checkpoint and compares config and execution with what it was made with. On resume, or
// where the run folder holds an execution.json that fits, session->execution becomes the frozen one.
// Writes nothing.
int resume_find(struct resume *resume, const struct run_folder *folder, struct session *session,
                struct error *err);
// Of several ranks: what rank 0 has found becomes every rank's, the session's execution too.
void resume_share(struct resume *resume, struct session *session);
// Fills state from the checkpoint, whose data must be the session's; without one, its counters only.
int resume_load(struct resume *resume, const struct session *session, struct model_state *state,
                struct error *err);
// Writes execution.json and the resolved config.yaml into the run folder.
int resume_freeze(const struct run_folder *folder, const struct session *session,
                  struct error *err);
// Whether a checkpoint's weights are of the session's drafter and layers, for commands that use them
// otherwise than by resuming. Tensors may fit although they were trained for something else.
int resume_check_drafter(const char *checkpoint, const struct session *session, struct error *err);
// Whether the checkpoint is the run folder's own one of `step`.
bool resume_is_own(const struct resume *resume, const struct run_folder *folder, int64_t step);
void resume_release(struct resume *resume);

#endif
