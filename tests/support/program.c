// Owns the process and the look at what it left. Set-ups to train on are run_fixture.c's.
#include "tests/support/program.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/timer.h"

enum { ARGUMENTS = 64 };

static void pause_shortly(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

// ---- the process ---------------------------------------------------------------------------------

// In the child: output into the file, limits, a signal, then the program. Only what is safe after fork.
static void become_program(const struct program *program, char *const *words)
{
    int out = open(program->output, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (out < 0 || dup2(out, STDOUT_FILENO) < 0 || dup2(out, STDERR_FILENO) < 0)
        _exit(126);
    if (program->file_limit > 0) {
        struct rlimit limit = {(rlim_t)program->file_limit, (rlim_t)program->file_limit};
        signal(SIGXFSZ, SIG_IGN);
        if (setrlimit(RLIMIT_FSIZE, &limit) != 0)
            _exit(126);
    }
    if (program->early_signal != 0) {
        sigset_t held;
        signal(program->early_signal,
               SIG_DFL); // a shell ignores some for what it runs beside itself
        sigemptyset(&held);
        sigaddset(&held, program->early_signal);
        if (sigprocmask(SIG_BLOCK, &held, NULL) != 0 || raise(program->early_signal) != 0)
            _exit(126);
    }
    execvp(words[0], words);
    _exit(127);
}

void program_start(struct program *program, const char *output, const char *const *arguments)
{
    char *words[ARGUMENTS] = {NULL}, number[16];
    int count = 0;
    snprintf(number, sizeof(number), "%d", program->ranks);
    const char *const launcher[] = {"mpirun",
                                    "--allow-run-as-root",
                                    "--oversubscribe",
                                    "--bind-to",
                                    "none",
                                    "-x",
                                    "ASAN_OPTIONS=detect_leaks=0", // of MPI's own
                                    "-n",
                                    number};
    for (size_t i = 0; program->ranks > 0 && i < sizeof(launcher) / sizeof(*launcher); i++)
        words[count++] = (char *)launcher[i];
    words[count++] = (char *)DTRAIN_BINARY;
    for (size_t i = 0; arguments[i] != NULL; i++) {
        BUG_UNLESS(count + 1 < ARGUMENTS);
        words[count++] = (char *)arguments[i];
    }
    program->output = memory_strdup(output);
    program->pid = fork();
    if (program->pid < 0)
        die("fork: %s", strerror(errno));
    if (program->pid == 0)
        become_program(program, words);
}

void program_signal(const struct program *program, int signal_number)
{
    if (kill(program->pid, signal_number) != 0)
        die("kill: %s", strerror(errno));
}

bool program_runs(const struct program *program)
{
    siginfo_t info = {0};
    if (waitid(P_PID, (id_t)program->pid, &info, WEXITED | WNOHANG | WNOWAIT) != 0)
        die("waitid: %s", strerror(errno));
    return info.si_pid == 0;
}

static void fail_with_output(const struct program *program, const char *what)
{
    char *text = program_text(program->output);
    size_t length = strlen(text), shown = 3000;
    print_error("%s\n", length > shown ? text + length - shown : text);
    free(text);
    fail_msg("%s", what);
}

int program_wait(struct program *program, double seconds)
{
    double end = timer_now() + seconds;
    struct rusage usage;
    int status;
    while (program_runs(program) && timer_now() < end)
        pause_shortly();
    bool late = program_runs(program);
    if (late)
        program_signal(program, SIGKILL);
    if (wait4(program->pid, &status, 0, &usage) != program->pid)
        die("wait4: %s", strerror(errno));
    program->pid = 0;
    program->cpu_seconds = (double)usage.ru_utime.tv_sec + (double)usage.ru_stime.tv_sec +
                           1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
    program->peak_bytes = (int64_t)usage.ru_maxrss * 1024;
    if (late)
        fail_with_output(program, "the program did not end in time");
    int result = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    // A sanitizer's report must not pass for an expected failure.
    if (program_says(program->output, "Sanitizer") ||
        program_says(program->output, "runtime error"))
        fail_with_output(program, "a sanitizer reported a fault");
    free(program->output);
    program->output = NULL;
    return result;
}

int program_run(const char *output, const char *const *arguments)
{
    struct program program = {0};
    program_start(&program, output, arguments);
    return program_wait(&program, 120.0);
}

// ---- several ranks --------------------------------------------------------------------------------

bool program_has_ranks(void)
{
    return DTRAIN_HAS_MPI && system("mpirun --version >/dev/null 2>&1") == 0;
}

// As /proc says; 0: it is gone.
static pid_t parent_of(pid_t pid)
{
    char path[64], text[512], *end;
    snprintf(path, sizeof(path), "/proc/%ld/stat", (long)pid);
    FILE *file = fopen(path, "r");
    size_t length = file != NULL ? fread(text, 1, sizeof(text) - 1, file) : 0;
    if (file != NULL)
        fclose(file);
    text[length] = '\0';
    end = strrchr(text, ')'); // of the name, then the state and the parent
    return end != NULL && end[2] != 'Z' ? (pid_t)strtol(end + 4, NULL, 10) : 0;
}

// Whatever name it gave itself.
static bool is_dtrain(pid_t pid)
{
    char path[64], target[1024];
    snprintf(path, sizeof(path), "/proc/%ld/exe", (long)pid);
    ssize_t length = readlink(path, target, sizeof(target) - 1);
    target[length > 0 ? length : 0] = '\0';
    return strcmp(target, DTRAIN_BINARY) == 0;
}

int program_ranks(const struct program *program, pid_t *pids, int capacity)
{
    DIR *directory = opendir("/proc");
    int count = 0;
    for (struct dirent *entry; directory != NULL && (entry = readdir(directory)) != NULL;) {
        pid_t pid = (pid_t)strtol(entry->d_name, NULL, 10);
        if (pid > 0 && count < capacity && parent_of(pid) == program->pid && is_dtrain(pid))
            pids[count++] = pid;
    }
    if (directory != NULL)
        closedir(directory);
    return count;
}

// ---- what it left --------------------------------------------------------------------------------

static char *read_file(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    size_t room = 1 << 16;
    char *text = memory_alloc(room, 1);
    *size = 0;
    for (size_t n; file != NULL && (n = fread(text + *size, 1, room - *size - 1, file)) > 0;) {
        *size += n;
        if (*size + 1 == room) {
            room *= 2;
            text = memory_resize(text, room, 1);
        }
    }
    text[*size] = '\0';
    if (file != NULL)
        fclose(file);
    return text;
}

char *program_text(const char *path)
{
    size_t size;
    return read_file(path, &size);
}

bool program_says(const char *path, const char *words)
{
    return program_count(path, words) > 0;
}

int program_count(const char *path, const char *words)
{
    BUG_UNLESS(words[0] != '\0');
    char *text = program_text(path);
    int count = 0;
    for (const char *at = text; (at = strstr(at, words)) != NULL; at++)
        count++;
    free(text);
    return count;
}

cJSON *program_json(const char *path)
{
    char *text = program_text(path);
    char *object = strchr(text, '{');
    cJSON *root = object != NULL ? cJSON_Parse(object) : NULL;
    if (root == NULL)
        fail_msg("not JSON: %s", text);
    free(text);
    return root;
}

cJSON *program_metrics(const char *run)
{
    char *path = memory_format("%s/metrics.jsonl", run), *text = program_text(path);
    cJSON *array = cJSON_CreateArray();
    for (char *line = text, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        *end = '\0';
        cJSON *object = cJSON_Parse(line);
        if (!cJSON_IsObject(object))
            fail_msg("%s: not an object: %s", path, line);
        cJSON_AddItemToArray(array, object);
    }
    free(text);
    free(path);
    return array;
}

cJSON *program_steady_metrics(const char *run)
{
    static const char *const unsteady[] = {"seconds",
                                           "wait_seconds",
                                           "read_seconds",
                                           "forward_seconds",
                                           "loss_seconds",
                                           "backward_seconds",
                                           "optimizer_seconds",
                                           "exchange_seconds",
                                           "save_seconds",
                                           "val_seconds",
                                           "tokens_per_second",
                                           "read_gb_per_second",
                                           "memory_bytes",
                                           "begin_bytes",
                                           "spool_wait_seconds",
                                           "spool_bytes",
                                           "copy_seconds",
                                           "disk_seconds",
                                           "wait_share",
                                           "mfu",
                                           "block_rows_per_second"};
    cJSON *metrics = program_metrics(run), *line;
    cJSON_ArrayForEach(line, metrics)
    {
        for (size_t i = 0; i < sizeof(unsteady) / sizeof(*unsteady); i++)
            cJSON_DeleteItemFromObjectCaseSensitive(line, unsteady[i]);
    }
    return metrics;
}

double program_number(const cJSON *line, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(line, name);
    if (cJSON_IsNull(item))
        return (double)NAN;
    if (!cJSON_IsNumber(item))
        fail_msg("no number '%s' in a line of metrics.jsonl", name);
    return item->valuedouble;
}

const cJSON *program_line(const cJSON *metrics, int64_t step, const char *name)
{
    const cJSON *line;
    cJSON_ArrayForEach(line, metrics)
    {
        const cJSON *at = cJSON_GetObjectItemCaseSensitive(line, "step");
        if (at->valuedouble == (double)step && cJSON_HasObjectItem(line, name))
            return line;
    }
    return NULL;
}

int64_t program_step(const char *run)
{
    cJSON *metrics = program_metrics(run);
    int64_t step = -1;
    const cJSON *line;
    cJSON_ArrayForEach(line, metrics)
    {
        step = (int64_t)program_number(line, "step");
    }
    cJSON_Delete(metrics);
    return step;
}

void program_wait_step(const struct program *program, const char *run, int64_t step, double seconds)
{
    double end = timer_now() + seconds;
    while (program_step(run) < step && program_runs(program)) {
        if (timer_now() > end)
            fail_with_output(program, "the awaited step did not come in time");
        pause_shortly();
    }
}

int64_t program_checkpoint(const char *run)
{
    char *folder = memory_format("%s/checkpoints", run);
    DIR *directory = opendir(folder);
    int64_t newest = -1;
    for (struct dirent *entry; directory != NULL && (entry = readdir(directory)) != NULL;) {
        char *done = memory_format("%s/%s/DONE", folder, entry->d_name);
        long long step;
        char rest;
        if (sscanf(entry->d_name, "step-%lld%c", &step, &rest) == 1 && access(done, F_OK) == 0 &&
            step > newest)
            newest = step;
        free(done);
    }
    if (directory != NULL)
        closedir(directory);
    free(folder);
    return newest;
}
