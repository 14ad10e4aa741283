// The control channel: every rank talks to rank 0 from a thread of its own, so that the death, the silence and the
// standing still of any rank are noticed and told, whatever the rest of the process is doing. It ends the process
// when the run can not go on: at once where engines ask (control_check), else after a short grace.
#ifndef TRAINER_RANK_CONTROL_H
#define TRAINER_RANK_CONTROL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "trainer/rank_join.h"

struct control;

// Asked about ten times a second: seconds for which what an engine has queued has stood still.
typedef double control_waiting_fn(void *context);
// Called before the process ends, in the thread that uses the engine.
typedef void control_abort_fn(void *context);

// Takes the peers that have met (rank 0: [size], others: rank 0 alone), frees them on close.
struct control *control_open(int rank, int size, struct rank_peer *peers, double timeout);
// In good order: the others have come here, too, or are about to.
void control_close(struct control *control);
// After an engine is there; NULL: it is going away.
void control_watch(struct control *control, control_waiting_fn *waiting, control_abort_fn *abort,
                   void *context);

// Around every exchange: the host waits for the others in it.
void control_enter(struct control *control);
void control_leave(struct control *control);
// Does not return when the run has failed.
void control_check(struct control *control);

// The bytes of rank 0 to all. -1: they have not come in time.
int control_tell(struct control *control, void *bytes, size_t size, struct error *err);
// As ranks_signal and ranks_fail. status: of ranks that do not fail themselves.
int control_signal(struct control *control);
void control_fail(struct control *control, const char *text, int status);

#endif
