// Owns the process that waits for the end of this one.
#include "trainer/end_guard.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"

enum { TICK = 100 /* milliseconds */ };

// Behind fork in a process of several threads: system calls alone. `ended` is readable once nobody has its other end.
__attribute__((noreturn)) static void guard(int ended, int milliseconds, pid_t guarded,
                                            const char *text)
{
    struct pollfd end = {.fd = STDIN_FILENO, .events = POLLIN};
    // A file that stays open here, a launcher's pipe or a rank's connection, would keep others waiting. Standard error
    // is for the line; it closes with this process, right after the other one.
    if (dup2(ended, STDIN_FILENO) < 0)
        _exit(0);
    closefrom(STDERR_FILENO + 1); // also under kernels before 5.9, which have no close_range
    close(STDOUT_FILENO);
    // Signals are held back. In small waits, so that time in which this process is stopped, too, is not counted.
    int left = milliseconds, ready = 0;
    for (; left > 0 && (ready = poll(&end, 1, TICK)) == 0; left -= TICK)
        ;
    if (ready == 0 && getppid() == guarded) {
        if (write(STDERR_FILENO, text, strlen(text)) < 0) {
            // It is killed all the same.
        }
        kill(guarded, SIGKILL);
    }
    _exit(0);
}

void end_guard_begin(double seconds, const char *who)
{
    int ends[2]; // the second stays open for as long as this process lives
    sigset_t all, before;
    pid_t guarded = getpid(), pid = -1;
    char *text = memory_format("dtrain: %s (process %d) has not ended %.0f s after its last "
                               "exchange: it is stopped or stuck, "
                               "and is killed; what it saved is complete\n",
                               who, (int)guarded, seconds);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pipe2(ends, O_CLOEXEC) == 0)
        pid = fork();
    if (pid == 0)
        guard(ends[0], (int)(1e3 * seconds), guarded, text);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (pid > 0)
        close(ends[0]);
    else
        log_debug("the end of this process is not guarded: %s", strerror(errno));
    free(text);
}
