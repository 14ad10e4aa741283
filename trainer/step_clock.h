// How long the parts of a step take on the backend: marks on the stream, read after a sync that was
// there anyway.
#ifndef TRAINER_STEP_CLOCK_H
#define TRAINER_STEP_CLOCK_H

#include "kernels/backend.h"

enum step_part {
    STEP_FORWARD,
    STEP_LOSS,
    STEP_BACKWARD,
    STEP_OPTIMIZER,
    STEP_EXCHANGE,
    STEP_COPY,
    STEP_PARTS,
    STEP_BETWEEN
};

struct step_clock {
    double seconds[STEP_PARTS];             // of the laps that have been read
    enum step_part part[STREAM_TIME_SLOTS]; // what the lap that ends with a slot's mark belongs to
    int last;                               // slot of the newest mark
    int unread;                             // laps whose times are not known yet
};

// A fresh clock: its first lap starts here.
void step_clock_start(struct step_clock *clock, const struct backend *backend,
                      struct stream *stream);
// Sums start at 0 again. Laps that have not been read yet will count for the new sums.
void step_clock_clear(struct step_clock *clock);
// The work queued since the last mark is of `part`; STEP_BETWEEN: of none.
void step_clock_lap(struct step_clock *clock, const struct backend *backend, struct stream *stream,
                    enum step_part part);
// When all but the newest `running` laps' work is known to be done: adds those laps up. Needed once in
// STREAM_TIME_SLOTS - 1 laps.
void step_clock_read(struct step_clock *clock, const struct backend *backend, struct stream *stream,
                     int running);

#endif
