// A run's side of a spool: which documents its steps have used, in serial numbers; what is said while it
// waits for the extractor, and for how long it waits.
#ifndef TRAINER_RUN_SPOOL_H
#define TRAINER_RUN_SPOOL_H

#include "trainer/session.h"

struct run_spool;

// data.spool_bytes must hold what one step reads and the shards at both of its ends.
int run_spool_check(const struct config *config, const struct documents *documents,
                    struct error *err);
// Documents that the steps read in all.
int64_t run_spool_end(const struct session *session, const struct session_steps *steps);

struct run_spool_options {
    const struct session *session;
    const struct session_steps *steps;
    const struct counters *counters;
    bool (*stop)(void *context); // asked in every wait
    void *stop_context;
};
// Rank 0 removes shards and writes the state. The counters are the run's own, read when this is asked to.
int run_spool_open(struct run_spool **spool, const struct run_spool_options *options,
                   struct error *err);
void run_spool_close(struct run_spool *spool); // NULL: nothing to do; after the prefetch
struct source *run_spool_source(struct run_spool *spool);

// After a step that every rank has completed, with the counters moved over it.
void run_spool_used(struct run_spool *spool);
// With several ranks, before a step: waits until every document of it is there, so that no rank stands in
// an exchange while another one waits for an extractor. Adds the seconds. True as run_spool_stop.
bool run_spool_await_step(struct run_spool *spool, double *seconds);
// The run has ended for good: the extractor may, too.
void run_spool_finish(struct run_spool *spool);

// For prefetch_options.stop, context the run_spool: asked while the step waits for a row. True when
// options.stop says so, and when nothing came for data.spool_wait seconds.
bool run_spool_stop(void *spool);
// Whether a step waited for the extractor since this was asked last.
bool run_spool_waited(struct run_spool *spool);

#endif
