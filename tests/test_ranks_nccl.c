// Two GPUs, each with a ranks_process started by the supervisor: exchanges by NCCL, the same bits twice, and the end
// of both when one is killed, stopped or busy. Skipped where fewer are visible.
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
#include "kernels/backend.h"
#include "tests/support/program.h"
#include "trainer/launch.h"
#include "trainer/rank_gpu.h"

enum {
    RANKS = 2,
    TIMEOUT = 10 /* parallel.timeout, more than NCCL takes to start */,
    NCCL_START = 40 /* seconds, on a cold machine */
};

static char folder[] = "/tmp/dtrain-nccl-XXXXXX";
static char *output; // of the last scene
static double seconds;

static void launch(const char *scene, const char *timeout)
{
    char gpus[RANKS][64], *words[5];
    const char *visible[RANKS];
    struct error err;
    const char *const fixed[] = {"ranks_process", scene, timeout, "cuda"};
    for (int i = 0; i < 4; i++)
        words[i] = memory_strdup(fixed[i]);
    words[4] = NULL;
    for (int rank = 0; rank < RANKS; rank++) {
        if (rank_gpu_choose(getenv("CUDA_VISIBLE_DEVICES"), rank, gpus[rank], sizeof(gpus[rank]),
                            &err) != 0)
            _exit(126);
        visible[rank] = gpus[rank];
    }
    const struct launch setup = {.ranks = RANKS,
                                 .program = DTRAIN_RANKS_PROCESS,
                                 .arguments = words,
                                 .gpus = visible,
                                 .notice_seconds = 6.0,
                                 .kill_seconds = 2.0,
                                 .linger_seconds = 20.0};
    _exit(launch_run(&setup));
}

// Its exit status; a scene that takes more than two minutes fails.
static int run(const char *scene, const char *timeout)
{
    int status;
    double start = timer_now();
    pid_t pid = fork(); // this process has not touched CUDA
    assert_true(pid >= 0);
    if (pid == 0) {
        int out = open(output, O_WRONLY | O_CREAT | O_TRUNC, 0666);
        dup2(out, STDOUT_FILENO);
        dup2(out, STDERR_FILENO);
        launch(scene, timeout);
    }
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (timer_now() - start > 120.0)
            kill(pid, SIGKILL);
        usleep(10000);
    }
    seconds = timer_now() - start;
    char *text = program_text(output);
    print_message("%s: %.1f s\n%s", scene, seconds, text);
    free(text);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static char *sums(void)
{
    char *text = program_text(output), *line = strstr(text, "sums ");
    assert_non_null(line);
    char *copy = memory_strdup(line);
    copy[strcspn(copy, "\n")] = '\0';
    free(text);
    return copy;
}

static void exchanges_are_exact_and_repeat(void **state)
{
    (void)state;
    assert_int_equal(run("exchange", "60"), 0);
    char *first = sums();
    assert_int_equal(run("exchange", "60"), 0);
    char *second = sums();
    assert_string_equal(first, second);
    free(first);
    free(second);
}

static void signals_reach_all(void **state)
{
    (void)state;
    assert_int_equal(run("signalled", "60"), 0);
}

static void must_end(const char *scene, const char *words)
{
    assert_int_equal(run(scene, "10"), 1);
    assert_true(program_says(output, "rank 1 ("));
    assert_true(program_says(output, words));
    assert_false(program_says(output, "do not end: killing them"));
    assert_true(seconds < NCCL_START + TIMEOUT + 10);
}

static void a_killed_rank_ends_all(void **state)
{
    (void)state;
    must_end("killed", "has ended without leaving the run");
    must_end("killed_queued", "has ended without leaving the run");
}

// The stopped one is killed by the supervisor.
static void a_stopped_rank_ends_all(void **state)
{
    (void)state;
    static const char *const scenes[] = {"stopped", "stopped_queued"};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(run(scenes[i], "10"), 1);
        assert_true(program_says(output, "rank 1 ("));
        assert_true(program_says(output, "it is stopped"));
        assert_true(seconds < NCCL_START + 2 * TIMEOUT + 20);
    }
}

static void a_rank_that_does_not_come_ends_all(void **state)
{
    (void)state;
    must_end("busy", "the other ranks have waited");
    must_end("fails", "the disk of this rank is full");
}

// In a process of its own, since CUDA does not survive a fork.
static int visible_gpus(void)
{
    int status;
    pid_t pid = fork();
    if (pid == 0)
        _exit(backend_cuda_count());
    return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status)
                                                                           : 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exchanges_are_exact_and_repeat),
        cmocka_unit_test(signals_reach_all),
        cmocka_unit_test(a_killed_rank_ends_all),
        cmocka_unit_test(a_stopped_rank_ends_all),
        cmocka_unit_test(a_rank_that_does_not_come_ends_all),
    };
    int gpus = visible_gpus();
    if (gpus < RANKS) {
        printf("SKIPPED: %d GPUs are visible, %d are needed\n", gpus, RANKS);
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
