// Owns the process's signal handlers.
#include "trainer/signals.h"

#include <signal.h>
#include <stddef.h>
#include <unistd.h>

#include "base/log.h"
#include "base/timer.h"

// A launcher passes on what a whole job is sent, so that one signal arrives twice: from the launcher and from the
// system. Only the second from the same side is another one; and `timeout` sends its signal twice within
// microseconds, so that the same number soon after is the same signal.
enum sender { FROM_PARENT, FROM_OTHERS, SENDERS };
static const double apart_seconds = 0.05;

// A handler can reach nothing but globals.
static volatile sig_atomic_t received;
static volatile struct {
    sig_atomic_t number; // of the first; 0: none yet
    double first;        // when
} senders[SENDERS];
static pid_t parent;

static void handle(int signal_number, siginfo_t *info, void *unused)
{
    (void)unused;
    double now = timer_now();
    enum sender from = info->si_pid == parent ? FROM_PARENT : FROM_OTHERS;
    int before = senders[from].number;
    if (before != 0 && (before != signal_number || now - senders[from].first > apart_seconds))
        _exit(128 + signal_number);
    if (before == 0)
        senders[from].first = now;
    senders[from].number = signal_number;
    received = signal_number;
}

// Before main, where sanitizers watch nothing yet.
__attribute__((no_sanitize_address)) static void mask_all(int how)
{
    sigset_t stops;
    sigemptyset(&stops);
    sigaddset(&stops, SIGTERM);
    sigaddset(&stops, SIGINT);
    sigaddset(&stops, SIGUSR1);
    sigprocmask(how, &stops, NULL);
}

__attribute__((no_sanitize_address)) void signals_hold(void)
{
    mask_all(SIG_BLOCK);
}

void signals_let_go(void)
{
    mask_all(SIG_UNBLOCK);
}

static void set_all(const struct sigaction *action)
{
    if (sigaction(SIGTERM, action, NULL) != 0 || sigaction(SIGINT, action, NULL) != 0 ||
        sigaction(SIGUSR1, action, NULL) != 0)
        die("sigaction failed");
}

void signals_install(void)
{
    struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_RESTART | SA_SIGINFO};
    sigemptyset(&action.sa_mask);
    // One handler at a time.
    sigaddset(&action.sa_mask, SIGTERM);
    sigaddset(&action.sa_mask, SIGINT);
    sigaddset(&action.sa_mask, SIGUSR1);
    parent = getppid();
    set_all(&action);
    signals_let_go();
    signal(SIGPIPE, SIG_IGN);
}

void signals_ignore(void)
{
    struct sigaction action = {.sa_handler = SIG_IGN};
    sigemptyset(&action.sa_mask);
    set_all(&action);
}

int signals_received(void)
{
    return received;
}

bool signals_stop(void *unused)
{
    (void)unused;
    return received != 0;
}
