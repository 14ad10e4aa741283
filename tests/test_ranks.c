// Several CPU processes under mpirun, each a ranks_process: exchanges, and what the others do when something happens
// to one of them. Skipped without mpirun.
#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "base/timer.h"
#include "tests/support/program.h"

// parallel.timeout of scenes that end by it, and of those that must end long before. A loaded machine is slow.
enum { SHORT = 10, LONG = 60, SLOW = 30 };

static char folder[] = "/tmp/dtrain-ranks-XXXXXX";
static char *output; // of the last scene
static double seconds;

// mpirun of a scene. Its exit status, 128 + the signal that ended it; a scene that takes two minutes fails.
static int run_on(const char *device, int ranks, const char *scene, int limit)
{
    char number[16], timeout[16];
    int status;
    snprintf(number, sizeof(number), "%d", ranks);
    snprintf(timeout, sizeof(timeout), "%d", limit);
    double start = timer_now();
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        int out = open(output, O_WRONLY | O_CREAT | O_TRUNC, 0666);
        dup2(out, STDOUT_FILENO);
        dup2(out, STDERR_FILENO);
        execlp("mpirun", "mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
               "-x",
               "ASAN_OPTIONS=detect_leaks=0", // of MPI's own
               "-n", number, DTRAIN_RANKS_PROCESS, scene, timeout, device, folder, (char *)NULL);
        _exit(127);
    }
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (timer_now() - start > 120.0)
            kill(pid, SIGKILL);
        usleep(10000);
    }
    seconds = timer_now() - start;
    assert_true(seconds < 120.0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int run(int ranks, const char *scene, int limit)
{
    return run_on("cpu", ranks, scene, limit);
}

static void must_say(const char *words)
{
    if (program_says(output, words))
        return;
    char *text = program_text(output);
    fail_msg("\"%s\" is not in:\n%s", words, text);
}

// No process that was given the test's folder lives on.
static bool any_left(void)
{
    DIR *processes = opendir("/proc");
    bool left = false;
    for (struct dirent *entry; processes != NULL && (entry = readdir(processes)) != NULL;) {
        char path[300], words[4096];
        snprintf(path, sizeof(path), "/proc/%s/cmdline", entry->d_name);
        int fd = open(path, O_RDONLY);
        ssize_t n = fd >= 0 ? read(fd, words, sizeof(words) - 1) : 0;
        if (fd >= 0)
            close(fd);
        if (n > 0 && memmem(words, (size_t)n, "ranks_process", 13) != NULL &&
            memmem(words, (size_t)n, folder, strlen(folder)) != NULL)
            left = true;
    }
    if (processes != NULL)
        closedir(processes);
    return left;
}

static void must_leave_nobody(void)
{
    for (int i = 0; i < 500 && any_left(); i++)
        usleep(10000);
    assert_false(any_left());
}

static void exchanges_are_exact(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks++)
        if (run(ranks, "exchange", LONG) != 0)
            fail_msg("%d ranks:\n%s", ranks, program_text(output));
}

// MPI tells where rank 0 is and has ended then: mpirun sees processes that end in good order.
static void ranks_meet_for_gpus(void **state)
{
    (void)state;
    assert_int_equal(run_on("cuda", 2, "meet", LONG), 0);
    must_say("rank 0 of 2");
    must_say("rank 1 of 2");
    assert_int_equal(run_on("mixed", 2, "meet", LONG), 2);
    must_say("a CPU, since it sees no GPU, another one does not");
}

static void a_signal_reaches_all(void **state)
{
    (void)state;
    if (run(3, "signalled", LONG) != 0)
        fail_msg("%s", program_text(output));
}

// The line names rank 2, the last of three.
static void must_end(const char *scene, const char *words, int limit)
{
    int status = run(3, scene, limit);
    assert_int_not_equal(status, 0);
    must_say("rank 2 (");
    must_say(words);
    if (!(seconds < (limit == SHORT ? SHORT + SLOW : SLOW)))
        fail_msg("%s took %.1f s:\n%s", scene, seconds, program_text(output));
    must_leave_nobody();
}

static void a_killed_rank_ends_all(void **state)
{
    (void)state;
    must_end("killed", "has ended without leaving the run", LONG);
}

static void a_rank_that_exits_ends_all(void **state)
{
    (void)state;
    must_end("ended", "has ended without leaving the run", LONG);
}

static void a_stopped_rank_ends_all(void **state)
{
    (void)state;
    must_end("stopped", "it is stopped, or its machine", SHORT);
}

static void a_rank_stopped_at_its_end_is_killed(void **state)
{
    (void)state;
    must_end("stopped_at_end", "has not ended 25 s after its last exchange: it is stopped", SHORT);
}

static void a_rank_that_does_not_come_ends_all(void **state)
{
    (void)state;
    must_end("busy", "the other ranks have waited", SHORT);
    must_say("it came to exchange 6, they are at 7");
}

static void a_failure_is_told(void **state)
{
    (void)state;
    must_end("fails", "the disk of this rank is full", LONG);
    // Once; on a slow machine also by the rank itself, which waits only so long to be heard.
    assert_in_range(program_count(output, "the disk of this rank is full"), 1, 2);
}

static void a_common_failure_is_said_once(void **state)
{
    (void)state;
    assert_int_equal(run(3, "all_fail", LONG), 2);
    assert_int_equal(program_count(output, "the data have no supervised token"), 1);
    must_leave_nobody();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exchanges_are_exact),
        cmocka_unit_test(ranks_meet_for_gpus),
        cmocka_unit_test(a_signal_reaches_all),
        cmocka_unit_test(a_killed_rank_ends_all),
        cmocka_unit_test(a_rank_that_exits_ends_all),
        cmocka_unit_test(a_stopped_rank_ends_all),
        cmocka_unit_test(a_rank_stopped_at_its_end_is_killed),
        cmocka_unit_test(a_rank_that_does_not_come_ends_all),
        cmocka_unit_test(a_failure_is_told),
        cmocka_unit_test(a_common_failure_is_said_once),
    };
    if (!program_has_ranks()) {
        printf("SKIPPED: no mpirun, or a build without MPI\n");
        return 77;
    }
    if (mkdtemp(folder) == NULL)
        return 1;
    output = memory_format("%s/out", folder);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(output);
    rmdir(folder);
    free(output);
    return failed;
}
