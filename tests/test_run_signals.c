// Signals that come before the program has begun its work: a training run and a sweep end with their status
// however early it was, other commands by the signal. Later ones are test_run_resume.c's.
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
#include "tests/support/run_fixture.h"

enum { LIMIT = 120 }; // seconds

static const int numbers[] = {SIGTERM, SIGINT, SIGUSR1};
enum { NUMBERS = sizeof(numbers) / sizeof(numbers[0]) };

static struct run_fixture fixture;

static int open_test(void **state)
{
    (void)state;
    run_fixture_open(&fixture);
    return 0;
}

static int close_test(void **state)
{
    (void)state;
    run_fixture_close(&fixture);
    return setenv("OMP_WAIT_POLICY", "passive", 1);
}

// Without the policy the program starts itself again with it.
static void set_policy(bool given)
{
    int status = given ? setenv("OMP_WAIT_POLICY", "passive", 1) : unsetenv("OMP_WAIT_POLICY");
    assert_int_equal(status, 0);
}

// A run that was stopped before its first step goes on.
static void must_train(const char *name)
{
    assert_true(program_checkpoint(run_path(&fixture, "%s", name)) == 0);
    assert_int_equal(run_train(&fixture, name, NULL), 0);
}

static void a_signal_waits_for_a_run(void **state)
{
    (void)state;
    for (int i = 0; i < 2 * NUMBERS; i++) {
        struct program program = {.early_signal = numbers[i / 2]};
        set_policy(i % 2 == 0);
        run_train_start(&fixture, &program, "run", NULL);
        assert_int_equal(program_wait(&program, LIMIT), 75);
        run_must_say(&fixture, "run", "stopping at step 0");
        must_train("run");
        run_remove(&fixture, "run");
    }
}

static int command_status(int signal_number, const char *const *words)
{
    struct program program = {.early_signal = signal_number};
    program_start(&program, run_path(&fixture, "command.out"), words);
    return program_wait(&program, LIMIT);
}

static void a_signal_waits_for_a_sweep(void **state)
{
    (void)state;
    const char *words[] = {"sweep",
                           "--config",
                           run_path(&fixture, "run.yaml"),
                           "--set",
                           memory_format("run.dir=%s", run_path(&fixture, "sweep")),
                           "--grid",
                           "block_size=2,3",
                           NULL};
    for (int i = 0; i < 2; i++) {
        set_policy(i == 0);
        assert_int_equal(command_status(SIGTERM, words), 75);
        run_must_say(&fixture, "command", "signal 15: stopping");
        run_remove(&fixture, "sweep");
    }
    free((char *)words[4]);
}

static void a_signal_ends_other_commands(void **state)
{
    (void)state;
    const char *config = run_path(&fixture, "run.yaml"), *folder = run_path(&fixture, "run");
    const char *const commands[][6] = {
        {"--help"},
        {"train", "--help"},
        {"plan", "--config", config},
        {"sweep", "--show", folder},
        {"eval", "--config", config, "--checkpoint", folder},
    };
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        set_policy(i % 2 == 0);
        for (int n = 0; n < NUMBERS; n++)
            assert_int_equal(command_status(numbers[n], commands[i]), 128 + numbers[n]);
    }
}

// ---- at any moment -------------------------------------------------------------------------------

struct look {
    bool held; // SIGTERM has no power to end the process
    // Libraries have begun to run: one has a thread, or the program has started itself again.
    bool begun;
};

// Before that it is a copy of this process, with what this one was started with.
static bool is_dtrain(const struct program *program)
{
    char path[64], target[1024];
    snprintf(path, sizeof(path), "/proc/%ld/exe", (long)program->pid);
    ssize_t length = readlink(path, target, sizeof(target) - 1);
    target[length > 0 ? length : 0] = '\0';
    return strcmp(target, DTRAIN_BINARY) == 0;
}

// Whether it was started with the policy, which then stands among words that each end with a NUL.
static bool has_policy(const struct program *program)
{
    static const char policy[] = "OMP_WAIT_POLICY=passive";
    char path[64], words[1 << 16];
    snprintf(path, sizeof(path), "/proc/%ld/environ", (long)program->pid);
    FILE *file = fopen(path, "r");
    size_t size = file != NULL ? fread(words, 1, sizeof(words), file) : 0; // none of one that ended
    if (file != NULL)
        fclose(file);
    return memmem(words, size, policy, sizeof(policy)) != NULL;
}

// Of a process that stands still; what it ends with is left to others.
static struct look look_at(const struct program *program)
{
    struct look look = {false, false};
    siginfo_t info;
    char path[64];
    unsigned long long blocked = 0, caught = 0, bit = 1ULL << (SIGTERM - 1);
    int threads = 0;
    program_signal(program, SIGSTOP);
    assert_int_equal(waitid(P_PID, (id_t)program->pid, &info, WSTOPPED | WEXITED | WNOWAIT), 0);
    snprintf(path, sizeof(path), "/proc/%ld/status", (long)program->pid);
    char *text = program_text(path), *at = strstr(text, "\nSigBlk:");
    if (at != NULL)
        sscanf(at, "\nSigBlk: %llx", &blocked);
    if ((at = strstr(text, "\nSigCgt:")) != NULL)
        sscanf(at, "\nSigCgt: %llx", &caught);
    if ((at = strstr(text, "\nThreads:")) != NULL)
        sscanf(at, "\nThreads: %d", &threads);
    free(text);
    look.held = ((blocked | caught) & bit) != 0;
    look.begun = is_dtrain(program) && (threads > 1 || has_policy(program));
    return look;
}

// A moment before the program can do anything remains: until then it ends by the signal.
static void a_signal_at_any_moment(void **state)
{
    (void)state;
    int stopped = 0, ended = 0;
    set_policy(false);
    double milliseconds = 1.0;
    // Longer where the machine is busy and the program is not there by then.
    for (; milliseconds <= 80.0 || (stopped == 0 && milliseconds < 20000.0);
         milliseconds += 1.0 + milliseconds / 16) {
        struct program program = {0};
        run_train_start(&fixture, &program, "run", NULL);
        run_sleep(1e-3 * milliseconds);
        struct look look = look_at(&program);
        program_signal(&program, SIGTERM);
        program_signal(&program, SIGCONT);
        int status = program_wait(&program, LIMIT);
        if (status == 0) { // it had trained: this process was kept waiting
            run_remove(&fixture, "run");
            continue;
        }
        if (look.begun && !look.held)
            fail_msg("SIGTERM has nobody waiting for it after %.1f ms", milliseconds);
        assert_int_equal(status, look.held ? 75 : 128 + SIGTERM);
        stopped += look.held;
        ended += !look.held;
    }
    print_message("%d stopped, %d ended before their first instruction\n", stopped, ended);
    assert_true(stopped > 0);
    assert_int_equal(run_train(&fixture, "run", NULL), 0);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, open_test, close_test)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_signal_waits_for_a_run),
        TEST(a_signal_waits_for_a_sweep),
        TEST(a_signal_ends_other_commands),
        TEST(a_signal_at_any_moment),
    };
    return cmocka_run_group_tests_name("run_signals", tests, NULL, NULL);
}
