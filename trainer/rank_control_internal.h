// What the two halves of the control channel share: rank_control.c moves messages, rank_watch.c judges.
// Everything is under the lock but what says otherwise.
#ifndef TRAINER_RANK_CONTROL_INTERNAL_H
#define TRAINER_RANK_CONTROL_INTERNAL_H

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#include "trainer/rank_control.h"

struct heartbeat {
    int64_t entered;              // exchanges so far, the running one included
    int64_t waiting_milliseconds; // in it, or for what is queued; 0: it does not wait
};

struct peer_state {
    struct heartbeat last;
    double heard; // when
    bool left;    // in good order
    bool gone;    // its connection is closed
    bool failed;  // has said that it can not go on
    bool said;    // and that has been printed
    int status;   // with which
    char text[4096];
};

// A number and a text, as messages carry them. Returns the size.
struct numbered_text {
    int32_t number;
    char text[WIRE_PAYLOAD / 2];
};
size_t numbered_text(struct numbered_text *out, int number, const char *text);

enum { END_DEATH = 0 }; // instead of an exit status: of a rank, nobody goes on

struct control {
    int rank, size;
    double timeout;
    struct rank_peer *peers;   // [size] on rank 0; rank 0 alone on others
    struct peer_state *states; // likewise
    struct pollfd *ready;      // the thread's own
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool stop;
    atomic_bool leaving; // without the lock: this process ends by itself

    int64_t entered;
    double since;   // of the running exchange; 0: none
    double beat;    // the last one sent
    double looked;  // when the thread last came round
    double resumed; // since when this process runs without a pause
    control_waiting_fn *waiting;
    control_abort_fn *abort;
    void *context;

    int signal;         // that all know of
    double signal_seen; // when one came here
    bool signal_passed;

    unsigned char bytes[WIRE_PAYLOAD]; // for control_tell
    size_t bytes_size;

    double first_failure; // when a rank has said that it can not go on; 0: none has
    bool failed_here;
    char text_here[4096];
    struct {
        int status; // of the exit; END_DEATH, or ranks may still end on their own
        double when;
        char text[4096];
    } end;             // set once, before `ended`
    atomic_bool ended; // without the lock: the run can not go on
};

// A failure is held this long, in which other ranks fail with the same words.
static const double failure_seconds = 1.0;

void control_send_all(struct control *control, uint32_t type, const void *payload, size_t size);

// rank_watch.c
bool control_failed(const struct control *control); // without the lock
struct heartbeat control_own_beat(const struct control *control);
// Once a tick.
void control_judge(struct control *control);
// Peer i says that it can not go on (rank 0), this rank 0 itself can not.
void control_note_failure(struct control *control, int i, int status, const char *text);
void control_fail_here(struct control *control, int status, const char *text);
// Whether these words have been printed, by this rank or by rank 0; no words have.
bool control_said(const struct control *control, const char *text);
// This rank does not go on, if it was not known yet.
void control_end_failed(struct control *control, int status, const char *text);
bool control_all_failed(const struct control *control);
// Rank 0 says that the run ends.
void control_take_end(struct control *control, int status, const char *text);
// Ends the process, as the thread that waits in an exchange; returns while that is too early. Without the lock.
void control_end_now(struct control *control);
// Ends the process when it has not ended by itself in time. Without the lock.
void control_end_late(struct control *control);

#endif
