// Owns the supervisor: children, the signals they are passed, and their end. It knows nothing of training.
#include "trainer/launch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/timer.h"
#include "trainer/child.h"
#include "trainer/commands.h"
#include "trainer/rank_place.h"
#include "trainer/rank_wire.h"

static const double tick_seconds = 0.1;

struct child {
    pid_t pid; // 0: ended
    int status;
};

struct supervisor {
    const struct launch *launch;
    struct child *children; // [ranks]
    int running;
    struct child_signals held;
    int signals;        // that were passed on
    double first_end;   // when a child ended; 0: none has
    double first_fault; // when one ended with a fault
    double terminated;  // when the others were sent SIGTERM; 0: not yet
    bool killed;
};

static void set_variable(const char *name, const char *value)
{
    if (setenv(name, value, 1) != 0)
        die("setenv %s: %s", name, strerror(errno));
}

static void set_number(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof(text), "%d", value);
    set_variable(name, text);
}

// In the child.
static void become_rank(const struct supervisor *s, int rank, int listener, int port, pid_t parent)
{
    const struct launch *launch = s->launch;
    child_begin(&s->held, parent);
    set_number(RANK_VARIABLE_RANK, rank);
    set_number(RANK_VARIABLE_SIZE, launch->ranks);
    set_number(RANK_VARIABLE_PORT, port);
    if (rank == 0) {
        set_number(RANK_VARIABLE_LISTEN_FD, listener);
        if (fcntl(listener, F_SETFD, 0) != 0)
            _exit(EXIT_FAILED);
    }
    if (launch->gpus != NULL)
        set_variable("CUDA_VISIBLE_DEVICES", launch->gpus[rank]);
    execv(launch->program, launch->arguments);
    fprintf(stderr, "dtrain: %s can not be started: %s\n", launch->program, strerror(errno));
    _exit(EXIT_FAILED);
}

static void set_token(void)
{
    unsigned char bytes[16];
    char text[2 * sizeof(bytes) + 1];
    if (getrandom(bytes, sizeof(bytes), 0) != (ssize_t)sizeof(bytes))
        die("getrandom: %s", strerror(errno));
    for (size_t i = 0; i < sizeof(bytes); i++)
        snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    set_variable(RANK_VARIABLE_TOKEN, text);
}

static int start_all(struct supervisor *s)
{
    pid_t parent = getpid();
    int port = s->launch->port;
    int listener = wire_listen(&port, 1);
    if (listener < 0) {
        log_error("no TCP port to listen on%s: %s", port > 0 ? " (parallel.port)" : "",
                  strerror(errno));
        return -1;
    }
    set_token();
    fflush(stdout);
    fflush(stderr);
    for (int rank = 0; rank < s->launch->ranks; rank++) {
        pid_t pid = fork();
        if (pid < 0)
            die("fork: %s", strerror(errno));
        if (pid == 0)
            become_rank(s, rank, listener, port, parent);
        s->children[rank].pid = pid;
        s->running++;
    }
    close(listener);
    return 0;
}

static void send_all(const struct supervisor *s, int number)
{
    for (int rank = 0; rank < s->launch->ranks; rank++)
        if (s->children[rank].pid > 0)
            kill(s->children[rank].pid, number);
}

// What ends with a status has said why.
static void tell_signal(int rank, pid_t pid, int status)
{
    char *end = child_end_words(status);
    if (WIFSIGNALED(status))
        log_error("rank %d (process %d) %s", rank, (int)pid, end);
    free(end);
}

static bool is_fault(int status)
{
    return !WIFEXITED(status) ||
           (WEXITSTATUS(status) != EXIT_DONE && WEXITSTATUS(status) != EXIT_STOPPED);
}

static void reap(struct supervisor *s)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        int rank = 0;
        while (rank < s->launch->ranks && s->children[rank].pid != pid)
            rank++;
        if (rank == s->launch->ranks)
            continue;
        s->children[rank].pid = 0;
        s->children[rank].status = status;
        s->running--;
        if (!(s->first_end > 0.0))
            s->first_end = timer_now();
        if (!is_fault(status))
            continue;
        if (!(s->terminated > 0.0))
            tell_signal(rank, pid, status);
        if (!(s->first_fault > 0.0))
            s->first_fault = timer_now();
    }
}

// Once one has failed the others end by themselves, since they notice; then they are asked to, then made to.
static void end_others(struct supervisor *s)
{
    double now = timer_now();
    if (s->running == 0)
        return;
    if (!(s->first_fault > 0.0)) {
        if (s->first_end > 0.0 && now - s->first_end > s->launch->linger_seconds)
            s->first_fault = now;
        return;
    }
    if (!(s->terminated > 0.0)) {
        if (now - s->first_fault > s->launch->notice_seconds) {
            s->terminated = now;
            send_all(s, SIGTERM);
        }
        return;
    }
    if (now - s->terminated > s->launch->kill_seconds && !s->killed) {
        log_error("%d ranks do not end: killing them", s->running);
        s->killed = true;
        send_all(s, SIGKILL);
    }
}

// A second signal stops at once, and not all may still hear it.
static void pass_on(struct supervisor *s, int number)
{
    send_all(s, number);
    s->signals++;
    if (s->signals > 1 && !(s->first_fault > 0.0))
        s->first_fault = timer_now();
}

static void watch(struct supervisor *s)
{
    while (s->running > 0) {
        int number = child_signals_await(&s->held, tick_seconds);
        if (number != 0)
            pass_on(s, number);
        reap(s);
        end_others(s);
    }
}

static int common_status(const struct supervisor *s)
{
    int first = s->children[0].status;
    if (!WIFEXITED(first))
        return EXIT_FAILED;
    for (int rank = 1; rank < s->launch->ranks; rank++)
        if (s->children[rank].status != first)
            return EXIT_FAILED;
    int status = WEXITSTATUS(first);
    bool known = status == EXIT_DONE || status == EXIT_REFUSED || status == EXIT_STOPPED;
    return known ? status : EXIT_FAILED;
}

int launch_run(const struct launch *launch)
{
    struct supervisor s = {.launch = launch};
    int status = EXIT_FAILED;
    s.children = memory_alloc((size_t)launch->ranks, sizeof(*s.children));
    child_signals_hold(&s.held);
    if (start_all(&s) == 0) {
        watch(&s);
        status = common_status(&s);
    }
    child_signals_release(&s.held);
    free(s.children);
    return status;
}
