// Owns the child process in which shards are opened first, and what such a process does.
#include "data/shard_probe.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/timer.h"
#include "data/hdf5_file.h"
#include "data/shard.h"
#include "data/shard_probe_internal.h"

enum {
    CPU_SECONDS = 30, // for the index of one shard
    END_SECONDS = 3,  // from the last word, or from SIGKILL
    LOOK_NANOSECONDS = 500000
};

// Address space beyond what the process has now. An index needs megabytes; a damaged length may ask
// for anything.
static const size_t EXTRA_MEMORY = (size_t)512 << 20;

static void limit_memory(void)
{
    unsigned long long pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    if (file == NULL)
        return;
    if (fscanf(file, "%llu", &pages) == 1) {
        rlim_t bytes = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + EXTRA_MEMORY;
        struct rlimit limit;
        if (getrlimit(RLIMIT_AS, &limit) == 0 && bytes < limit.rlim_cur) {
            limit.rlim_cur = bytes;
            setrlimit(RLIMIT_AS, &limit);
        }
    }
    fclose(file);
}

// Processor time, not time that passes: a slow file system is not a fault.
static void limit_time(void)
{
    struct rusage usage;
    struct rlimit limit;
    if (getrusage(RUSAGE_SELF, &usage) != 0 || getrlimit(RLIMIT_CPU, &limit) != 0)
        return;
    rlim_t seconds = (rlim_t)usage.ru_utime.tv_sec + (rlim_t)usage.ru_stime.tv_sec + CPU_SECONDS;
    if (seconds < limit.rlim_max) {
        limit.rlim_cur = seconds;
        setrlimit(RLIMIT_CPU, &limit);
    }
}

// The first and the last token, so that libhdf5 also reads where it must.
static void read_ends(const struct shard *shard)
{
    struct error ignored;
    bf16 *hidden = memory_alloc((size_t)shard->features.stride, sizeof(*hidden));
    for (int end = 0; end < 2; end++) {
        int64_t token = end == 0 ? 0 : shard->tokens - 1;
        int32_t id, top1;
        uint8_t mask;
        float logit, lse;
        shard_read_ids(shard, token, 1, &id, &ignored);
        shard_read_mask(shard, token, 1, &mask, &ignored);
        if (!shard->manifest)
            shard_read_hidden(shard, token, 1, hidden, &ignored);
        if (shard->has_teacher)
            shard_read_teacher(shard, token, 1, &top1, &logit, &lse, &ignored);
    }
    free(hidden);
}

bool probe_send(int pipe_end, const void *bytes, size_t size)
{
    const char *at = bytes;
    while (size > 0) {
        ssize_t sent = write(pipe_end, at, size);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0)
            return false;
        at += sent;
        size -= (size_t)sent;
    }
    return true;
}

bool probe_receive(int pipe_end, void *bytes, size_t size)
{
    char *at = bytes;
    while (size > 0) {
        ssize_t got = read(pipe_end, at, size);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        at += got;
        size -= (size_t)got;
    }
    return true;
}

void probe_begin(void)
{
    // Whatever handlers the process has: one of them could go on in it.
    static const int crashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    for (size_t i = 0; i < sizeof(crashes) / sizeof(*crashes); i++)
        signal(crashes[i], SIG_DFL);
    // Another thread may have held the log's lock; below this level it is not taken. What sanitizers
    // and libraries print of a crash is not for the user.
    log_configure(LOG_ERROR, 0);
    int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (null >= 0)
        dup2(null, STDERR_FILENO);
    struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    limit_memory();
}

bool probe_answer(const char *path, shard_open_fn *open_file, int pipe_end)
{
    struct shard shard;
    struct error fault = {""};
    limit_time();
    if (open_file(&shard, path, &fault) == 0) {
        read_ends(&shard);
        shard_close(&shard);
    }
    uint32_t length = (uint32_t)strlen(fault.text);
    return probe_send(pipe_end, &length, sizeof(length)) &&
           probe_send(pipe_end, fault.text, length);
}

static void child_main(const char *const *paths, size_t count, shard_open_fn *open_file,
                       int pipe_end)
{
    probe_begin();
    for (size_t i = 0; i < count; i++)
        if (!probe_answer(paths[i], open_file, pipe_end))
            break;
    _exit(0);
}

// Takes messages until the child ends. Returns the number of files it got through.
static size_t receive_messages(int pipe_end, size_t count, char **messages)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t length = 0;
        char text[sizeof(struct error)];
        if (!probe_receive(pipe_end, &length, sizeof(length)) || length >= sizeof(text) ||
            !probe_receive(pipe_end, text, length))
            return i;
        text[length] = '\0';
        if (length > 0)
            messages[i] = memory_strdup(text);
    }
    return count;
}

// Whether it has ended, at the latest after so many seconds.
static bool ends_within(pid_t child, double seconds, int *status)
{
    double until = timer_now() + seconds;
    while (waitpid(child, status, WNOHANG) == 0) {
        if (timer_now() > until)
            return false;
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NANOSECONDS}, NULL);
    }
    return true;
}

int probe_end(pid_t child)
{
    int status = 0;
    kill(child, SIGKILL);
    return ends_within(child, END_SECONDS, &status) ? status : W_EXITCODE(0, SIGKILL);
}

char *probe_crash_words(const char *path, int status)
{
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGXCPU)
        return memory_format("%s: damaged: libhdf5 does not come to an end with it", path);
    return memory_format("%s: damaged: libhdf5 crashes on it (%s)", path,
                         WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "it ended itself");
}

// Opens files in one child until one of them ends it. Returns the number of files dealt with. *killed: something else
// has killed the child, at the file behind these.
static size_t probe_some(const char *const *paths, size_t count, shard_open_fn *open_file,
                         char **messages, bool *killed)
{
    int ends[2], status = 0;
    *killed = false;
    if (pipe2(ends, O_CLOEXEC) != 0)
        return count;
    // Held over the fork, so that the child gets libhdf5 between two calls.
    hdf5_lock();
    pid_t child = fork();
    hdf5_unlock();
    if (child == 0) {
        close(ends[0]);
        child_main(paths, count, open_file, ends[1]);
    }
    close(ends[1]);
    size_t finished = child > 0 ? receive_messages(ends[0], count, messages) : count;
    close(ends[0]);
    if (child < 0) // the shards are then opened without this safety
        return count;
    bool ended = ends_within(child, END_SECONDS, &status);
    if (!ended)
        status = probe_end(child);
    if (finished >= count)
        return count;
    *killed = ended && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (*killed)
        return finished;
    messages[finished] = probe_crash_words(paths[finished], status);
    return finished + 1;
}

static char **probe_all(const char *const *paths, size_t count, shard_open_fn *open_file)
{
    char **messages = memory_alloc(count, sizeof(*messages));
    size_t killed_at = count; // the file at which a child was killed last; count: none was
    bool killed;
    for (size_t done = 0; done < count;) {
        done += probe_some(paths + done, count - done, open_file, messages + done, &killed);
        if (killed && killed_at == done)
            die("%s: the process that opens it first was killed twice (SIGKILL), by something "
                "else, as the kernel does where memory is short: nothing is known about the file",
                paths[done]);
        if (killed)
            killed_at = done;
    }
    return messages;
}

char **shard_probe(const char *const *paths, size_t count)
{
    return probe_all(paths, count, shard_open);
}

char **shard_probe_manifest(const char *path)
{
    return probe_all(&path, 1, shard_open_manifest);
}

void shard_probe_free(char **messages, size_t count)
{
    for (size_t i = 0; i < count; i++)
        free(messages[i]);
    free(messages);
}

int shard_open_probed(struct shard *shard, const char *path, const char *message, struct error *err)
{
    return message != NULL ? error_set(err, "%s", message) : shard_open(shard, path, err);
}

int shard_open_manifest_probed(struct shard *shard, const char *path, const char *message,
                               struct error *err)
{
    return message != NULL ? error_set(err, "%s", message) : shard_open_manifest(shard, path, err);
}
