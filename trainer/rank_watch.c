// Owns the conclusions: which rank is dead, silent or stands still, and the end of this process that follows.
// Rank 0 judges all; the others only rank 0, and themselves when rank 0 should have.
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/timer.h"
#include "trainer/commands.h"
#include "trainer/rank_control_internal.h"

static const double left_seconds = 5.0;     // to wait for one that has left in good order
static const double rank0_seconds = 5.0;    // by which the others judge later than rank 0
static const double death_seconds = 2.0;    // for the process to end by itself after a death
static const double failure_grace = 5.0;    // after another rank's failure
static const double leaving_seconds = 15.0; // after its own

bool control_failed(const struct control *c)
{
    return atomic_load(&c->ended);
}

// Seconds since `when` in which this process has run. Up to when the thread came round, so that a pause within its
// round is not counted either.
static double seconds_since(const struct control *c, double when)
{
    return c->looked - (when > c->resumed ? when : c->resumed);
}

static double own_waiting(const struct control *c)
{
    double waiting = c->since > 0.0 ? seconds_since(c, c->since) : 0.0;
    double queued = c->waiting != NULL ? c->waiting(c->context) : 0.0;
    double running = seconds_since(c, c->resumed);
    queued = queued < running ? queued : running;
    return waiting > queued ? waiting : queued;
}

struct heartbeat control_own_beat(const struct control *c)
{
    return (struct heartbeat){.entered = c->entered,
                              .waiting_milliseconds = (int64_t)(own_waiting(c) * 1000.0)};
}

size_t numbered_text(struct numbered_text *out, int number, const char *text)
{
    out->number = number;
    snprintf(out->text, sizeof(out->text), "%s", text);
    return offsetof(struct numbered_text, text) + strlen(out->text) + 1;
}

static void end(struct control *c, int status, const char *text)
{
    c->end.status = status;
    c->end.when = timer_now();
    snprintf(c->end.text, sizeof(c->end.text), "%s", text);
    if (status == END_DEATH) {
        // Should nobody read what is logged, the process ends all the same.
        alarm((unsigned)(2.0 * leaving_seconds));
        log_status_line(NULL);
        log_error("%s", text);
    }
    atomic_store(&c->ended, true); // from here on the other threads may end the process
    pthread_cond_broadcast(&c->changed);
}

static void tell_end(struct control *c, int status, const char *text)
{
    struct numbered_text out;
    size_t size = numbered_text(&out, status, text);
    if (c->rank == 0)
        control_send_all(c, MESSAGE_END, &out, size);
}

static void end_by_death(struct control *c, const char *text)
{
    tell_end(c, END_DEATH, text);
    end(c, END_DEATH, text);
}

void control_take_end(struct control *c, int status, const char *text)
{
    if (!control_failed(c))
        end(c, status, text);
}

bool control_said(const struct control *c, const char *text)
{
    if (text[0] == '\0' || strcmp(text, c->text_here) == 0)
        return true;
    if (control_failed(c) && strcmp(text, c->end.text) == 0)
        return true;
    for (int i = 1; c->rank == 0 && i < c->size; i++)
        if (c->states[i].said && strcmp(text, c->states[i].text) == 0)
            return true;
    return false;
}

// What peer i has said, if nobody has said it before.
static void say_failure(struct control *c, int i)
{
    struct peer_state *peer = &c->states[i];
    if (!control_said(c, peer->text))
        log_error("%s: %s", c->peers[i].name, peer->text);
    peer->said = true;
}

void control_note_failure(struct control *c, int i, int status, const char *text)
{
    struct peer_state *peer = &c->states[i];
    peer->failed = true;
    peer->status = status;
    snprintf(peer->text, sizeof(peer->text), "%s", text);
    if (!(c->first_failure > 0.0))
        c->first_failure = timer_now();
    if (control_failed(c))
        say_failure(c, i);
    pthread_cond_broadcast(&c->changed);
}

void control_fail_here(struct control *c, int status, const char *text)
{
    log_status_line(NULL);
    if (text[0] != '\0')
        log_error("%s", text);
    snprintf(c->text_here, sizeof(c->text_here), "%s", text);
    c->failed_here = true;
    tell_end(c, status, text);
    end(c, status, text);
    for (int i = 1; i < c->size; i++)
        if (c->states[i].failed)
            say_failure(c, i);
}

void control_end_failed(struct control *c, int status, const char *text)
{
    if (!control_failed(c))
        end(c, status, text);
}

bool control_all_failed(const struct control *c)
{
    for (int i = 1; i < c->size; i++)
        if (!c->states[i].failed && !c->states[i].gone)
            return false;
    return true;
}

// Rank 0: ranks that have said that they can not go on, once the others have had time to say the same.
static void judge_failures(struct control *c)
{
    char text[256];
    int first = 0;
    if (!(c->first_failure > 0.0) || timer_now() - c->first_failure < failure_seconds)
        return;
    log_status_line(NULL);
    for (int i = c->size - 1; i > 0; i--)
        if (c->states[i].failed)
            first = i;
    for (int i = first; i < c->size; i++)
        if (c->states[i].failed)
            say_failure(c, i);
    snprintf(text, sizeof(text), "%s can not go on", c->peers[first].name);
    tell_end(c, c->states[first].status, text);
    end(c, c->states[first].status, text);
}

// Dead or silent peers. Whether there is one.
static bool judge_peers(struct control *c)
{
    char text[512];
    for (int i = 0; i < (c->rank == 0 ? c->size : 1); i++) {
        const struct peer_state *peer = &c->states[i];
        double silent = seconds_since(c, peer->heard);
        if (peer->left || peer->failed || (c->rank == 0 && i == 0))
            continue;
        if (!peer->gone && silent <= c->timeout)
            continue;
        if (peer->gone)
            snprintf(
                text, sizeof(text),
                "%s has ended without leaving the run: it was killed, or its own messages say why",
                c->peers[i].name);
        else
            snprintf(
                text, sizeof(text),
                "%s has said nothing for %.0f s (parallel.timeout): it is stopped, or its machine "
                "or the network to it is down",
                c->peers[i].name, silent);
        end_by_death(c, text);
        return true;
    }
    return false;
}

static struct heartbeat beat_of(const struct control *c, int rank)
{
    return rank == c->rank ? control_own_beat(c) : c->states[rank].last;
}

static const char *name_of(const struct control *c, int rank)
{
    return rank == 0 ? "rank 0" : c->peers[rank].name;
}

// Rank 0: some rank waits in an exchange for too long. Who does not come?
static void judge_waiting(struct control *c)
{
    int behind = 0;
    double longest = 0.0;
    int64_t most = 0;
    char text[512];
    for (int rank = 0; rank < c->size; rank++) {
        struct heartbeat beat = beat_of(c, rank);
        double waiting = (double)beat.waiting_milliseconds * 1e-3;
        longest = waiting > longest ? waiting : longest;
        most = beat.entered > most ? beat.entered : most;
        if (beat.entered < beat_of(c, behind).entered)
            behind = rank;
        if (c->states[rank].left && waiting <= 0.0 && own_waiting(c) > left_seconds) {
            snprintf(text, sizeof(text), "%s has left the run, which goes on without it",
                     name_of(c, rank));
            end_by_death(c, text);
            return;
        }
    }
    if (longest <= c->timeout)
        return;
    int64_t last = beat_of(c, behind).entered;
    double silent = behind == c->rank ? 0.0 : seconds_since(c, c->states[behind].heard);
    if (last < most && silent > 0.5 * c->timeout) // more than a late heartbeat
        snprintf(
            text, sizeof(text),
            "the other ranks have waited %.0f s (parallel.timeout) for %s, of which nothing has "
            "been heard for %.0f s: it is stopped, or its machine or the network to it is down",
            longest, name_of(c, behind), silent);
    else if (last < most)
        snprintf(
            text, sizeof(text),
            "the other ranks have waited %.0f s (parallel.timeout) for %s: it came to exchange "
            "%lld, they are at %lld; it is busy alone, waits for its data, or is stuck",
            longest, name_of(c, behind), (long long)last, (long long)most);
    else
        snprintf(
            text, sizeof(text),
            "exchange %lld stands still for %.0f s (parallel.timeout) although every rank has come "
            "to it: a GPU, or the network between ranks",
            (long long)most, longest);
    end_by_death(c, text);
}

void control_judge(struct control *c)
{
    char text[256];
    if (control_failed(c) || judge_peers(c))
        return;
    if (c->rank == 0) {
        judge_failures(c);
        if (!control_failed(c))
            judge_waiting(c);
        return;
    }
    if (own_waiting(c) <= c->timeout + rank0_seconds)
        return;
    snprintf(
        text, sizeof(text),
        "this rank has waited %.0f s in exchange %lld (parallel.timeout) and rank 0 does not end "
        "the run",
        own_waiting(c), (long long)c->entered);
    end_by_death(c, text);
}

// A process that has said nothing yet says why it ends.
static void leave_now(struct control *c)
{
    bool death = c->end.status == END_DEATH;
    if (!death && !c->leaving && c->rank != 0)
        log_error("ending: %s", c->end.text);
    _exit(death ? EXIT_FAILED : c->end.status);
}

void control_end_now(struct control *c)
{
    double since = timer_now() - c->end.when;
    if (c->end.status != END_DEATH && since < failure_seconds)
        return;
    if (c->abort != NULL)
        c->abort(c->context);
    leave_now(c);
}

void control_end_late(struct control *c)
{
    if (!control_failed(c))
        return;
    double grace = c->end.status == END_DEATH ? death_seconds : failure_grace;
    if (c->leaving)
        grace = leaving_seconds;
    if (timer_now() - c->end.when > grace)
        leave_now(c);
}
