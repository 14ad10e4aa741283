// Owns the control thread and the calls of other threads into it. What is concluded from what peers say and do not
// say is in rank_watch.c.
#include "trainer/rank_control.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/timer.h"
#include "trainer/commands.h"
#include "trainer/rank_control_internal.h"
#include "trainer/signals.h"

enum { TICK = 50 /* milliseconds */ };
static const double beat_seconds = 1.0;
// A launcher sends its signal, too, because a rank has died: that is known by then.
static const double signal_seconds = 0.5;
static const double leave_seconds = 10.0;

static int peer_count(const struct control *c)
{
    return c->rank == 0 ? c->size : 1;
}

static void beat(struct control *c)
{
    struct heartbeat own = control_own_beat(c);
    for (int i = 0; i < peer_count(c); i++)
        wire_send(&c->peers[i].wire, MESSAGE_HEARTBEAT, &own, sizeof(own));
    c->beat = timer_now();
}

void control_send_all(struct control *c, uint32_t type, const void *payload, size_t size)
{
    for (int i = 0; i < peer_count(c); i++)
        wire_send(&c->peers[i].wire, type, payload, size);
}

static void take_signal(struct control *c, int number)
{
    if (c->signal != 0)
        return;
    c->signal = number;
    if (c->rank == 0)
        control_send_all(c, MESSAGE_SIGNAL, &number, sizeof(number));
}

static void pass_signal(struct control *c)
{
    int number = signals_received();
    if (number == 0 || c->signal != 0)
        return;
    if (!(c->signal_seen > 0.0))
        c->signal_seen = timer_now();
    if (timer_now() - c->signal_seen < signal_seconds)
        return;
    if (c->rank == 0)
        take_signal(c, number);
    else if (!c->signal_passed)
        wire_send(&c->peers[0].wire, MESSAGE_SIGNAL, &number, sizeof(number));
    c->signal_passed = true;
}

static void take_bytes(struct control *c, const struct wire_message *message)
{
    memcpy(c->bytes, message->payload, message->size);
    c->bytes_size = message->size;
    pthread_cond_broadcast(&c->changed);
}

static void take_message(struct control *c, int i, struct wire_message *message)
{
    struct peer_state *peer = &c->states[i];
    int32_t number = 0;
    const char *text = (const char *)message->payload + sizeof(number);
    message->payload[WIRE_PAYLOAD - 1] = '\0';
    if (message->size >= sizeof(number))
        memcpy(&number, message->payload, sizeof(number));
    switch ((enum rank_message)message->type) {
    case MESSAGE_HEARTBEAT:
        if (message->size == sizeof(peer->last))
            memcpy(&peer->last, message->payload, sizeof(peer->last));
        break;
    case MESSAGE_SIGNAL:
        take_signal(c, number);
        break;
    case MESSAGE_FAILED:
        control_note_failure(c, i, number, text);
        break;
    case MESSAGE_END:
        control_take_end(c, number, text);
        break;
    case MESSAGE_LEAVE:
        peer->left = true;
        pthread_cond_broadcast(&c->changed);
        break;
    case MESSAGE_BYTES:
        take_bytes(c, message);
        break;
    case MESSAGE_HELLO:
    case MESSAGE_WELCOME:
    case MESSAGE_REFUSED:
    case MESSAGE_START:
        break;
    }
}

static void receive(struct control *c, int i)
{
    struct wire *wire = &c->peers[i].wire;
    int got;
    if (c->states[i].gone)
        return;
    while ((got = wire_receive(wire)) == 1) {
        c->states[i].heard = timer_now();
        take_message(c, i, &wire->in);
    }
    if (got < 0) {
        c->states[i].gone = true;
        pthread_cond_broadcast(&c->changed);
    }
}

static void wait_for_news(struct control *c)
{
    for (int i = 0; i < peer_count(c); i++)
        c->ready[i] = (struct pollfd){.fd = c->peers[i].wire.fd, .events = POLLIN};
    poll(c->ready, (nfds_t)peer_count(c), TICK);
}

// Signals or a batch system may stop a whole job and continue it: what passed meanwhile is nobody's silence. Short
// pauses need no mention.
static void note_pause(struct control *c)
{
    double now = timer_now();
    if (now - c->looked > 0.5 * c->timeout)
        c->resumed = now;
    c->looked = now;
}

static void *run(void *context)
{
    struct control *c = context;
    bool stop = false;
    while (!stop) {
        wait_for_news(c);
        pthread_mutex_lock(&c->lock);
        note_pause(c);
        for (int i = 0; i < peer_count(c); i++)
            receive(c, i);
        if (timer_now() - c->beat >= beat_seconds)
            beat(c);
        control_judge(c);
        if (!control_failed(c))
            pass_signal(c);
        stop = c->stop;
        pthread_mutex_unlock(&c->lock);
        control_end_late(c);
    }
    return NULL;
}

struct control *control_open(int rank, int size, struct rank_peer *peers, double timeout)
{
    struct control *c = memory_alloc(1, sizeof(*c));
    pthread_condattr_t attributes;
    sigset_t all, before;
    c->rank = rank;
    c->size = size;
    c->peers = peers;
    c->timeout = timeout;
    c->states = memory_alloc((size_t)size, sizeof(*c->states));
    c->ready = memory_alloc((size_t)size, sizeof(*c->ready));
    c->looked = timer_now();
    for (int i = 0; i < size; i++)
        c->states[i].heard = c->looked;
    if (rank == 0)
        c->states[0].gone = true; // there is no peer of this number
    if (pthread_mutex_init(&c->lock, NULL) != 0 || pthread_condattr_init(&attributes) != 0 ||
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) != 0 ||
        pthread_cond_init(&c->changed, &attributes) != 0)
        die("pthread: no lock");
    pthread_condattr_destroy(&attributes);
    // Signals are for the main thread, which may sit in a call that they should end.
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failure = pthread_create(&c->thread, NULL, run, c);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failure != 0)
        die("pthread_create: %s", strerror(failure));
    return c;
}

void control_watch(struct control *c, control_waiting_fn *waiting, control_abort_fn *abort,
                   void *context)
{
    pthread_mutex_lock(&c->lock);
    c->waiting = waiting;
    c->abort = abort;
    c->context = context;
    pthread_mutex_unlock(&c->lock);
}

void control_enter(struct control *c)
{
    pthread_mutex_lock(&c->lock);
    c->entered++;
    c->since = timer_now();
    pthread_mutex_unlock(&c->lock);
}

void control_leave(struct control *c)
{
    pthread_mutex_lock(&c->lock);
    c->since = 0.0;
    pthread_mutex_unlock(&c->lock);
}

// Under the lock. Waits for `changed`, or for the next tick.
static void wait_changed(struct control *c)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += TICK * 1000000L;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_nsec -= 1000000000L;
        until.tv_sec++;
    }
    pthread_cond_timedwait(&c->changed, &c->lock, &until);
}

int control_tell(struct control *c, void *bytes, size_t size, struct error *err)
{
    int result = 0;
    double deadline = timer_now() + c->timeout;
    BUG_UNLESS(size <= sizeof(c->bytes));
    pthread_mutex_lock(&c->lock);
    if (c->rank == 0) {
        control_send_all(c, MESSAGE_BYTES, bytes, size);
    } else {
        while (c->bytes_size != size && timer_now() < deadline && !control_failed(c))
            wait_changed(c);
        if (c->bytes_size == size)
            memcpy(bytes, c->bytes, size);
        else
            result = error_set(err, "%s has not sent what all ranks need", c->peers[0].name);
        c->bytes_size = 0;
    }
    pthread_mutex_unlock(&c->lock);
    return result;
}

int control_signal(struct control *c)
{
    pthread_mutex_lock(&c->lock);
    int number = c->signal;
    pthread_mutex_unlock(&c->lock);
    return number;
}

static bool all_left(const struct control *c)
{
    for (int i = 0; i < peer_count(c); i++)
        if (!c->states[i].left && !c->states[i].gone)
            return false;
    return true;
}

// Rank 0 stays until all have left, so that nobody takes its going for its death. After a failure the thread
// stays, to end a process that does not come to its end.
void control_close(struct control *c)
{
    double deadline = timer_now() + leave_seconds;
    pthread_mutex_lock(&c->lock);
    c->leaving = true;
    control_send_all(c, MESSAGE_LEAVE, NULL, 0);
    while (c->rank == 0 && !control_failed(c) && !all_left(c) && timer_now() < deadline)
        wait_changed(c);
    c->stop = !control_failed(c);
    bool stay = !c->stop;
    pthread_mutex_unlock(&c->lock);
    if (stay)
        return;
    pthread_join(c->thread, NULL);
    for (int i = 0; i < peer_count(c); i++)
        wire_close(&c->peers[i].wire);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    free(c->peers);
    free(c->states);
    free(c->ready);
    free(c);
}

void control_check(struct control *c)
{
    if (!control_failed(c))
        return;
    control_end_now(c);
}

// On other ranks than 0: rank 0 prints the text, if it can still be told.
static void pass_failure(struct control *c, int status, const char *text)
{
    struct numbered_text out;
    size_t size = numbered_text(&out, status, text);
    double deadline = timer_now() + 2.0 * failure_seconds;
    bool sent = wire_send(&c->peers[0].wire, MESSAGE_FAILED, &out, size) == 0;
    while (sent && !control_failed(c) && !c->states[0].gone && timer_now() < deadline)
        wait_changed(c);
    if (!control_failed(c) && text[0] != '\0')
        log_error("%s", text);
}

void control_fail(struct control *c, const char *text, int status)
{
    char cut[WIRE_PAYLOAD / 2];
    snprintf(cut, sizeof(cut), "%s", text);
    pthread_mutex_lock(&c->lock);
    c->leaving = true;
    if (control_failed(c)) {
        if (!control_said(c, cut))
            log_error("%s", text);
    } else if (c->rank == 0) {
        double deadline = timer_now() + failure_seconds;
        control_fail_here(c, status, cut);
        while (timer_now() < deadline && !control_all_failed(c))
            wait_changed(c);
    } else {
        pass_failure(c, status, cut);
        control_end_failed(c, status, cut);
    }
    pthread_mutex_unlock(&c->lock);
}
