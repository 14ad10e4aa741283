// Owns what is alike in all supervisors of processes. Does not own which processes those are.
#include "trainer/child.h"

#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "trainer/commands.h"

static const int stops[CHILD_STOPS] = {SIGTERM, SIGINT, SIGUSR1};

// In a thread that a library had started before signals were held back: from here on it holds them, too, and this
// one goes to those who wait for it.
static void hand_on(int number, siginfo_t *info, void *context)
{
    ucontext_t *after = context;
    (void)info;
    for (int i = 0; i < CHILD_STOPS; i++)
        sigaddset(&after->uc_sigmask, stops[i]);
    kill(getpid(), number);
}

void child_signals_hold(struct child_signals *signals)
{
    struct sigaction action = {.sa_sigaction = hand_on, .sa_flags = SA_RESTART | SA_SIGINFO};
    sigemptyset(&signals->stops);
    for (int i = 0; i < CHILD_STOPS; i++)
        sigaddset(&signals->stops, stops[i]);
    sigset_t held = signals->stops;
    sigaddset(&held, SIGCHLD);
    sigprocmask(SIG_BLOCK, &held, &signals->before);
    action.sa_mask = signals->stops;
    for (int i = 0; i < CHILD_STOPS; i++)
        if (sigaction(stops[i], &action, &signals->actions[i]) != 0)
            die("sigaction failed");
}

void child_signals_release(const struct child_signals *signals)
{
    for (int i = 0; i < CHILD_STOPS; i++)
        if (sigaction(stops[i], &signals->actions[i], NULL) != 0)
            die("sigaction failed");
    sigprocmask(SIG_SETMASK, &signals->before, NULL);
}

// 0: none of them came.
static int await(const sigset_t *set, double seconds)
{
    const struct timespec limit = {.tv_sec = (time_t)seconds,
                                   .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    int number = sigtimedwait(set, NULL, &limit);
    return number > 0 ? number : 0;
}

int child_signals_await(const struct child_signals *signals, double seconds)
{
    sigset_t all = signals->stops;
    sigaddset(&all, SIGCHLD);
    int number = await(&all, seconds);
    return number != SIGCHLD ? number : 0;
}

void child_await(double seconds)
{
    sigset_t children;
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    await(&children, seconds);
}

void child_begin(const struct child_signals *signals, pid_t parent)
{
    // The parent may have been killed between fork and this.
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent)
        _exit(EXIT_FAILED);
    setpgid(0, 0);
    signal(SIGTTOU, SIG_IGN); // messages from the background
    child_signals_release(signals);
}

char *child_end_words(int status)
{
    if (WIFSIGNALED(status))
        return memory_format("was ended by signal %d (%s)", WTERMSIG(status),
                             strsignal(WTERMSIG(status)));
    return memory_format("ended with status %d", WEXITSTATUS(status));
}
