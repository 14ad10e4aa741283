// The supervisor: shell scripts, and once this program, stand for ranks. Exit statuses, what children are told,
// signals, and that nobody is left behind.
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
#include "trainer/launch.h"
#include "trainer/signals.h"

static char folder[] = "/tmp/dtrain-launch-XXXXXX";

// Runs the script as so many ranks, which end soon when one has failed. Seconds it took in *seconds.
static int run(int ranks, const char *script, double *seconds)
{
    char name[] = "sh", option[] = "-c", *text = memory_strdup(script);
    char *arguments[] = {name, option, text, NULL};
    const char *gpus[] = {"3", "GPU-5e1f", "0", "1"};
    const struct launch launch = {.ranks = ranks,
                                  .program = "/bin/sh",
                                  .arguments = arguments,
                                  .gpus = gpus,
                                  .notice_seconds = 0.5,
                                  .kill_seconds = 1.0,
                                  .linger_seconds = 2.0};
    double start = timer_now();
    int status = launch_run(&launch);
    if (seconds != NULL)
        *seconds = timer_now() - start;
    free(text);
    return status;
}

static void statuses_are_common_ones(void **state)
{
    (void)state;
    assert_int_equal(run(3, "exit 0", NULL), 0);
    assert_int_equal(run(3, "exit 75", NULL), 75);
    assert_int_equal(run(3, "exit 2", NULL), 2);
    assert_int_equal(run(3, "exit 5", NULL), 1);
    assert_int_equal(run(2, "exit $((75 * DTRAIN_RANK))", NULL), 1);
    assert_int_equal(run(2, "exit $((2 * DTRAIN_RANK))", NULL), 1);
    assert_int_equal(run(2, "kill -9 $$", NULL), 1);
}

static void children_are_told_who_they_are(void **state)
{
    (void)state;
    static const char script[] =
        "[ $DTRAIN_WORLD_SIZE = 3 ] || exit 11; [ ${#DTRAIN_TOKEN} = 32 ] || exit 12;"
        "[ $DTRAIN_PORT -gt 1023 ] || exit 13;"
        "case $DTRAIN_RANK:$CUDA_VISIBLE_DEVICES in 0:3|1:GPU-5e1f|2:0);; *) exit 14;; esac;"
        "if [ $DTRAIN_RANK = 0 ]; then [ -S /proc/$$/fd/$DTRAIN_LISTEN_FD ] || exit 15;"
        "else [ -z \"$DTRAIN_LISTEN_FD\" ] || exit 16; fi; exit 75";
    assert_int_equal(run(3, script, NULL), 75);
}

static void a_program_that_is_not_there_fails(void **state)
{
    (void)state;
    char name[] = "x", *arguments[] = {name, NULL};
    const struct launch launch = {
        .ranks = 2, .program = "/no/such/program", .arguments = arguments, .linger_seconds = 1.0};
    assert_int_equal(launch_run(&launch), 1);
}

// The process of a rank, by the file that it wrote; waits for it.
static pid_t pid_of(int rank)
{
    char path[128];
    int pid = 0;
    snprintf(path, sizeof(path), "%s/%d", folder, rank);
    for (int i = 0; i < 3000 && pid == 0; i++) {
        FILE *file = fopen(path, "r");
        if (file != NULL && fscanf(file, "%d", &pid) != 1)
            pid = 0;
        if (file != NULL)
            fclose(file);
        usleep(10000);
    }
    assert_true(pid > 0);
    return pid;
}

static void forget_pids(void)
{
    char path[128];
    for (int rank = 0; rank < 3; rank++) {
        snprintf(path, sizeof(path), "%s/%d", folder, rank);
        unlink(path);
    }
}

static void must_be_gone(pid_t pid)
{
    for (int i = 0; i < 3000 && kill(pid, 0) == 0; i++)
        usleep(10000);
    assert_int_not_equal(kill(pid, 0), 0);
}

// A script that gets ready, writes its process down and goes on.
static char *noted(const char *ready, const char *rest)
{
    return memory_format("%s; echo $$ > %s/$DTRAIN_RANK.new; mv %s/$DTRAIN_RANK.new "
                         "%s/$DTRAIN_RANK; %s",
                         ready, folder, folder, folder, rest);
}

static void the_others_end_when_one_is_killed(void **state)
{
    (void)state;
    static const char *const rests[] = {"[ $DTRAIN_RANK = 1 ] && kill -9 $$; exec sleep 60",
                                        // One does not hear SIGTERM, one is stopped.
                                        "[ $DTRAIN_RANK = 1 ] && exit 1; trap '' TERM; [ "
                                        "$DTRAIN_RANK = 2 ] && kill -STOP $$; while :; do "
                                        "sleep 0.1; done",
                                        // One has ended in good order and the others do not.
                                        "[ $DTRAIN_RANK = 1 ] && exit 0; exec sleep 60"};
    for (size_t i = 0; i < sizeof(rests) / sizeof(rests[0]); i++) {
        double seconds;
        char *script = noted(":", rests[i]);
        forget_pids();
        assert_int_equal(run(3, script, &seconds), 1);
        assert_true(seconds < 30.0);
        for (int rank = 0; rank < 3; rank++)
            must_be_gone(pid_of(rank));
        free(script);
    }
}

// launch_run in a process of its own. Returns it once all ranks run.
static pid_t start(const char *ready, const char *rest)
{
    char *script = noted(ready, rest);
    forget_pids();
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        _exit(run(3, script, NULL));
    for (int rank = 0; rank < 3; rank++)
        pid_of(rank);
    free(script);
    return pid;
}

static int status_of(pid_t pid)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void signals_are_passed_on(void **state)
{
    (void)state;
    static const int numbers[] = {SIGTERM, SIGINT, SIGUSR1};
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        // exit 75 only for that signal
        char *ready = memory_format("trap 'exit 75' %d", numbers[i]);
        pid_t pid = start(ready, "while :; do sleep 0.05; done");
        kill(pid, numbers[i]);
        assert_int_equal(status_of(pid), 75);
        free(ready);
    }
}

static void a_second_signal_stops_what_does_not_hear(void **state)
{
    (void)state;
    pid_t pid = start("trap '' TERM INT", "while :; do sleep 0.1; done");
    double begin = timer_now();
    kill(pid, SIGINT);
    usleep(300000);
    kill(pid, SIGINT);
    assert_int_equal(status_of(pid), 1);
    assert_true(timer_now() - begin < 30.0);
    for (int rank = 0; rank < 3; rank++)
        must_be_gone(pid_of(rank));
}

static void no_orphan_outlives_the_supervisor(void **state)
{
    (void)state;
    pid_t pid = start("trap '' TERM HUP INT",
                      "[ $DTRAIN_RANK = 2 ] && kill -STOP $$; while :; do sleep 0.1; done");
    kill(pid, SIGKILL);
    assert_int_equal(status_of(pid), 128 + SIGKILL);
    for (int rank = 0; rank < 3; rank++)
        must_be_gone(pid_of(rank));
}

static const char held_word[] = "held";

// As a rank: 75 once SIGTERM has come and waits, which it does only where it is held back.
static int held_rank(void)
{
    sigset_t waiting;
    for (int i = 0; i < 3000; i++) {
        sigpending(&waiting);
        if (sigismember(&waiting, SIGTERM) == 1)
            return 75;
        usleep(10000);
    }
    return 1;
}

// One that was there before the supervisor is passed on, and ranks begin with it held back, until what they are
// handles it.
static void a_signal_that_was_held_back_is_passed_on(void **state)
{
    (void)state;
    char *arguments[] = {(char *)"test_launch", (char *)held_word, NULL};
    const struct launch launch = {.ranks = 3,
                                  .program = "/proc/self/exe",
                                  .arguments = arguments,
                                  .kill_seconds = 1.0,
                                  .linger_seconds = 2.0};
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        signals_hold();
        kill(getpid(), SIGTERM);
        _exit(launch_run(&launch));
    }
    assert_int_equal(status_of(pid), 75);
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], held_word) == 0)
        return held_rank();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(statuses_are_common_ones),
        cmocka_unit_test(children_are_told_who_they_are),
        cmocka_unit_test(a_program_that_is_not_there_fails),
        cmocka_unit_test(the_others_end_when_one_is_killed),
        cmocka_unit_test(signals_are_passed_on),
        cmocka_unit_test(a_signal_that_was_held_back_is_passed_on),
        cmocka_unit_test(a_second_signal_stops_what_does_not_hear),
        cmocka_unit_test(no_orphan_outlives_the_supervisor),
    };
    if (mkdtemp(folder) == NULL)
        return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    forget_pids();
    rmdir(folder);
    return failed;
}
