// Owns the process that opens shards for one with threads: its start, what the two say to each other, its end.
// What it does with a file is shard_probe.c's.
#include "data/shard_helper.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/memory.h"
#include "base/timer.h"
#include "data/shard_probe_internal.h"

// A file's name is sent as its length and its text. BEGUN comes back before the file is opened, so that an end of
// the process that has nothing to do with the file is not laid at its door; then what probe_answer says.
enum {
    BEGUN = 0x64747261,
    ANSWER_SECONDS = 300, // that pass, so that slow file systems are waited for
    LOOK_MILLISECONDS = 50,
    REFUSED = 2 // the program's status for a wrong call
};

struct shard_helper {
    char *program;
    bool (*stop)(void *context);
    void *context;
    pid_t pid; // 0: none runs
    int socket;
    bool given_up; // it does not work here, whatever the file
};

// ---- the process ---------------------------------------------------------------------------------

// Whoever calls it by hand.
static void refuse_others(void)
{
    struct stat input;
    if (fstat(STDIN_FILENO, &input) == 0 && S_ISSOCK(input.st_mode))
        return;
    fprintf(stderr,
            "dtrain " SHARD_HELPER_WORD ": a training run that reads a spool starts this by "
            "itself, to open shards beside it, and talks to it through a socket; it does "
            "nothing by hand. `dtrain data check FILE` looks at a shard\n");
    _exit(REFUSED);
}

void shard_helper_main(void)
{
    char path[PATH_MAX];
    uint32_t length, begun = BEGUN;
    int other = STDIN_FILENO;
    refuse_others();
    probe_begin();
    while (probe_receive(other, &length, sizeof(length))) {
        if (length >= sizeof(path) || !probe_receive(other, path, length))
            _exit(REFUSED); // not a name from shard_open_helped
        path[length] = '\0';
        if (!probe_send(other, &begun, sizeof(begun)) || !probe_answer(path, shard_open, other))
            break;
    }
    _exit(0);
}

// Signals that end the run by its own ways are sent to all processes of a job: this one ends with its socket.
static pid_t spawn(const char *program, int socket)
{
    char name[] = "dtrain", word[] = SHARD_HELPER_WORD, *words[] = {name, word, NULL};
    static const int stops[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1};
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t blocked;
    pid_t pid = 0;
    sigemptyset(&blocked);
    for (size_t i = 0; i < sizeof(stops) / sizeof(*stops); i++)
        sigaddset(&blocked, stops[i]);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigmask(&attributes, &blocked);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, socket, STDIN_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
    if (posix_spawn(&pid, program, &actions, &attributes, words, environ) != 0)
        pid = 0;
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    return pid;
}

static void start(struct shard_helper *helper)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
        return;
    helper->pid = spawn(helper->program, ends[1]);
    helper->socket = ends[0];
    close(ends[1]);
    if (helper->pid == 0)
        close(ends[0]);
}

// Returns its status. One that has ended by itself keeps its own.
static int end(struct shard_helper *helper)
{
    int status = probe_end(helper->pid);
    close(helper->socket);
    helper->pid = 0;
    return status;
}

// One that was ended while it waited for a file is forgotten, so that another one is started.
static void look_after(struct shard_helper *helper)
{
    if (helper->pid == 0 || waitpid(helper->pid, NULL, WNOHANG) == 0)
        return;
    close(helper->socket);
    helper->pid = 0;
}

struct shard_helper *shard_helper_open(const char *program, bool (*stop)(void *context),
                                       void *context)
{
    struct shard_helper *helper = memory_alloc(1, sizeof(*helper));
    helper->program = memory_strdup(program);
    helper->stop = stop;
    helper->context = context;
    start(helper);
    return helper;
}

void shard_helper_close(struct shard_helper *helper)
{
    if (helper == NULL)
        return;
    if (helper->pid > 0)
        end(helper);
    free(helper->program);
    free(helper);
}

// ---- a file --------------------------------------------------------------------------------------

enum heard { HEARD, HEARD_END, HEARD_STOP, HEARD_NOTHING };

static enum heard await(const struct shard_helper *helper, double until)
{
    struct pollfd socket = {.fd = helper->socket, .events = POLLIN};
    while (poll(&socket, 1, LOOK_MILLISECONDS) <= 0) {
        if (helper->stop(helper->context))
            return HEARD_STOP;
        if (timer_now() > until)
            return HEARD_NOTHING;
    }
    return HEARD;
}

// What it says in few bytes comes in one piece.
static enum heard hear(const struct shard_helper *helper, void *bytes, size_t size, double until)
{
    enum heard heard = size > 0 ? await(helper, until) : HEARD;
    if (heard == HEARD && !probe_receive(helper->socket, bytes, size))
        heard = HEARD_END;
    return heard;
}

static bool tell(const struct shard_helper *helper, const char *path)
{
    char words[sizeof(uint32_t) + PATH_MAX];
    uint32_t length = (uint32_t)strlen(path);
    memcpy(words, &length, sizeof(length));
    memcpy(words + sizeof(length), path, length);
    size_t size = sizeof(length) + length;
    return send(helper->socket, words, size, MSG_NOSIGNAL) == (ssize_t)size;
}

// The answer: "" for a sound file. *begun: that the file was come to.
static enum heard listen_to(const struct shard_helper *helper, char *text, size_t size, bool *begun)
{
    double until = timer_now() + ANSWER_SECONDS;
    uint32_t word = 0, length = 0;
    enum heard heard = hear(helper, &word, sizeof(word), until);
    *begun = heard == HEARD && word == BEGUN;
    if (heard == HEARD)
        heard = *begun ? hear(helper, &length, sizeof(length), until) : HEARD_END;
    if (heard == HEARD)
        heard = length < size ? hear(helper, text, length, until) : HEARD_END;
    if (heard == HEARD)
        text[length] = '\0';
    return heard;
}

// What is against the file, into err; -1 also when the wait was ended.
static int ask(struct shard_helper *helper, const char *path, struct error *err)
{
    char text[sizeof(struct error)];
    bool begun = false;
    enum heard heard =
        tell(helper, path) ? listen_to(helper, text, sizeof(text), &begun) : HEARD_END;
    if (heard == HEARD)
        return text[0] != '\0' ? error_set(err, "%s", text) : 0;
    int status = end(helper);
    if (heard == HEARD_STOP)
        return error_set(err, "%s: the wait for it was ended", path);
    helper->given_up = !begun;
    // What has not come to the file, or was killed at it, was ended by something else.
    if (!begun || (heard == HEARD_END && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL))
        return 0;
    if (heard == HEARD_NOTHING)
        return error_set(err, "%s: libhdf5 has not opened it after %d s", path, ANSWER_SECONDS);
    char *words = probe_crash_words(path, status);
    error_set(err, "%s", words);
    free(words);
    return -1;
}

int shard_open_helped(struct shard *shard, const char *path, struct shard_helper *helper,
                      struct error *err)
{
    if (helper != NULL)
        look_after(helper);
    if (helper != NULL && helper->pid == 0 && !helper->given_up)
        start(helper);
    if (helper != NULL && helper->pid > 0 && strlen(path) < PATH_MAX && ask(helper, path, err) != 0)
        return -1;
    return shard_open(shard, path, err);
}
