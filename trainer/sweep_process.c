// Owns the processes of a sweep: their start, end and last words; and the wait that signals end.
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/timer.h"
#include "trainer/sweep.h"

// In the child.
static void become(const struct sweep *sweep, const struct sweep_process *process, char **words,
                   pid_t parent)
{
    child_begin(&sweep->held, parent);
    if (dup2(process->output, STDOUT_FILENO) < 0 || dup2(process->errors, STDERR_FILENO) < 0)
        _exit(EXIT_FAILED);
    if (process->gpus != NULL && setenv("CUDA_VISIBLE_DEVICES", process->gpus, 1) != 0)
        _exit(EXIT_FAILED);
    execv("/proc/self/exe", words);
    fprintf(stderr, "dtrain: can not be started again: %s\n", strerror(errno));
    _exit(EXIT_FAILED);
}

pid_t sweep_process_start(const struct sweep *sweep, const struct sweep_process *process)
{
    size_t count = 0;
    while (process->arguments[count] != NULL)
        count++;
    char **words = memory_alloc(count + 2, sizeof(*words));
    words[0] = sweep->options->arguments[0];
    memcpy(words + 1, process->arguments, count * sizeof(*words));
    pid_t parent = getpid();
    fflush(stdout);
    fflush(stderr);
    pid_t pid = fork();
    if (pid < 0)
        die("fork: %s", strerror(errno));
    if (pid == 0)
        become(sweep, process, words, parent);
    free(words);
    return pid;
}

bool sweep_process_ended(pid_t pid, int *status)
{
    pid_t ended = waitpid(pid, status, WNOHANG);
    if (ended < 0)
        die("waitpid: %s", strerror(errno));
    return ended == pid;
}

// `timeout` sends its signal twice within microseconds: that is one.
int sweep_await(struct sweep *sweep, double seconds)
{
    static const double apart_seconds = 0.05;
    int number = child_signals_await(&sweep->held, seconds);
    double now = timer_now();
    if (number == 0)
        return 0;
    if (sweep->signals > 0 && number == sweep->first_signal &&
        now - sweep->stopped_at < apart_seconds)
        return 0;
    if (sweep->signals++ == 0) {
        sweep->first_signal = number;
        sweep->stopped_at = now;
    }
    return number;
}

// The message of a log line "date time level rank message"; NULL: of another level.
static const char *error_message(const char *line)
{
    int at = 0;
    if (sscanf(line, "%*10s %*8s error %*d %n", &at) == 0 && at > 0)
        return line + at;
    return strncmp(line, "dtrain: ", 8) == 0 ? line + 8 : NULL;
}

char *sweep_last_error(char *text)
{
    char *found = NULL, *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line != NULL;
         line = strtok_r(NULL, "\n", &rest)) {
        const char *message = error_message(line);
        if (message == NULL)
            continue;
        free(found);
        found = memory_strdup(message);
    }
    return found;
}
