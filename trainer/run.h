// A training run: what its files share. Opening is run_open.c's, one step run_step.c's, what it says of
// itself run_words.c's, its checkpoints run_save.c's; epochs, validation and signals are train.c's.
#ifndef TRAINER_RUN_H
#define TRAINER_RUN_H

#include "data/prefetch.h"
#include "trainer/checkpoint.h"
#include "trainer/commands.h"
#include "trainer/run_folder.h"
#include "trainer/run_spool.h"
#include "trainer/run_work.h"
#include "trainer/session.h"
#include "trainer/validation.h"

enum { NAMED_DOCUMENTS = 16 }; // documents of a step that an error lists

// When parts of the start had ended.
struct start_times {
    double begin, session, step, state, readers, products;
};

struct run {
    const struct options *options;
    struct config config;
    struct ranks *ranks; // NULL: not joined yet
    struct session session;
    struct release release; // that a fresh run starts from; open until then
    struct run_folder folder;
    struct start_times times;
    struct step step;
    struct checkpoint_writer *writer;
    struct checkpoint_info info;
    struct source *source;   // of plain shards, or NULL
    struct run_spool *spool; // or NULL
    struct prefetch *prefetch;
    struct row_shares shares; // of shares_epoch; none with one rank
    int64_t shares_epoch;     // -1: none yet
    struct row *next_row;     // taken from prefetch and staged; NULL: none
    struct validation *validation;
    struct counters counters;
    struct session_steps steps;
    struct run_work work;
    double peak_bytes; // of device memory
    // of device memory: in use when the run began (a GPU's context, other processes), and planned
    size_t begin_bytes, planned_bytes;
    bool warned_validation; // that it has nothing to score
    int64_t saved_step;     // newest step handed to the writer
    uint64_t step_docs[NAMED_DOCUMENTS];
    int64_t step_doc_count;
    // of the running step
    double wait_seconds, copy_seconds, read_seconds, read_bytes, save_seconds;
    double disk_seconds; // of the source until now
};

// From the config to a run that is ready for its first step. Every fault is a refusal (status 2)
// unless *status says otherwise.
int run_open(struct run *run, int *status, struct error *err);
// Frees the run, too, unless a thread that does not come back is left behind with it.
void run_close(struct run *run);
// For who waits on behalf of a run: true once a signal came, to whichever rank. context: the run.
bool run_stop(void *context);
// Rows of this rank among the epoch's next `rows`.
int64_t run_own_rows(struct run *run, int64_t rows);

// One optimizer step. 0: done, 1: stopped, -1: failed.
int run_step(struct run *run, struct error *err);
// Too many bad documents? -1 when there are.
int run_check_bad_fraction(const struct run *run, struct error *err);

// Copies the state and has it written; best: as the best so far. Every rank calls it at the same step.
void run_save(struct run *run, bool best);
// Puts where this rank's writing stands into the step's words; looks what all have said, after the step.
void run_tell_saving(struct run *run);
void run_conclude_saving(struct run *run);
// Waits for the last checkpoint. -1 on all ranks when it could not be written.
int run_finish_saving(struct run *run, struct error *err);

// The most memory so far: of the device, by everybody on it; on the CPU of this process.
double run_peak_memory(struct run *run);
void run_describe_start(const struct run *run);
void run_report_memory(struct run *run);
// Names the documents of the ranks whose gradients were not finite. Every rank calls it.
void run_name_nonfinite(const struct run *run, const struct step_outcome *outcome);
// What a step had none of, when it had no weight.
const char *run_nothing_of(const struct metrics *metrics);
// Once, when a whole epoch or run had nothing to train on.
void run_warn_nothing_learnt(const struct run *run);

#endif
