// Reads packed rows ahead of the step with a few threads, in order.
#ifndef DATA_PREFETCH_H
#define DATA_PREFETCH_H

#include "data/packing.h"
#include "data/row.h"
#include "data/source.h"

struct prefetch;

struct prefetch_options {
    int64_t depth; // rows ahead; depth + 1 rows are allocated, since one is with the step
    int threads;
    int on_bad_sample;
    int64_t seq_len;
    double stall_seconds;        // how long no progress is borne; 0: 600
    double stop_seconds;         // how long prefetch_stop waits for a reader; 0: stall_seconds
    void *(*host_alloc)(size_t); // NULL: malloc
    void (*host_free)(void *);
    // Asked while prefetch_next waits; true: give up. NULL: never.
    bool (*stop)(void *context);
    void *stop_context;
};

// Names the rows that will be asked for: fills `packing` for an epoch. Called from reader threads in
// order of epochs, once an epoch; epoch_count epochs in all.
typedef void prefetch_epoch_fn(void *context, uint64_t epoch, struct packing *packing);

// Starts reading at row `first_row` of epoch `first_epoch` and goes on over epoch_count epochs.
int prefetch_open(struct prefetch **prefetch, struct source *source,
                  const struct prefetch_options *options, prefetch_epoch_fn *epoch_packing,
                  void *context, uint64_t first_epoch, int64_t first_row, uint64_t epoch_count,
                  struct error *err);
// Ends the reading, at any moment; rows that are lent stay as they are. False: a reader that is stuck in the
// kernel is left behind, so all that it may still use has to stay: the source, its documents, and the
// context of the packings. NULL: nothing to do.
bool prefetch_stop(struct prefetch *prefetch);
// Stops what still reads and frees the rows. False as in prefetch_stop: the rows stay, too.
bool prefetch_close(struct prefetch *prefetch);

// Next row: 1 and *row (borrowed until prefetch_return), 0 at the end of all epochs, 2 when stop() said
// so while waiting, -1 on a bad sample with `fail` or an unreadable file (err). *wait_seconds: how long
// the caller was kept waiting.
// Waits are bounded: readers that make no progress for stall_seconds are an error naming the file.
// Errors stay: every later call returns the same one.
int prefetch_next(struct prefetch *prefetch, struct row **row, double *wait_seconds,
                  struct error *err);
// The same where the row is there already; false: it is not, for whatever reason prefetch_next will give.
bool prefetch_try_next(struct prefetch *prefetch, struct row **row);
void prefetch_return(struct prefetch *prefetch, struct row *row);

#endif
