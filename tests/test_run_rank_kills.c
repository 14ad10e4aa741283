// Whatever ends a rank, the others end too, within a bounded time and naming it, no process is left, and the
// next run continues bitwise. `run_rank_kills --kills 50` kills that often.
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "base/rng.h"
#include "base/timer.h"
#include "tests/support/run_fixture.h"

// Seconds in which everything has ended after a rank was killed, and after one stood still.
enum { RANKS = 2, LIMIT = 120, DEAD_LIMIT = 20, TIMEOUT = 5, STUCK_LIMIT = TIMEOUT + 20 };

static struct run_fixture fixture;
static int kills = 10;
static double whole_seconds; // of the uninterrupted run

static int open_all(void **state)
{
    (void)state;
    run_fixture_open(&fixture);
    run_fixture_set(&fixture, "data.rows_per_step=3");
    run_fixture_set(&fixture, "drafter.intermediate_size=1024");
    run_fixture_set(&fixture, "parallel.timeout=5");
    fixture.ranks = RANKS;
    double start = timer_now();
    int status = run_train(&fixture, "whole", NULL);
    whole_seconds = timer_now() - start;
    if (status != 0)
        run_must_say(&fixture, "whole", "done: 20 steps");
    return status;
}

static int close_all(void **state)
{
    (void)state;
    run_fixture_close(&fixture);
    return 0;
}

// The ranks once all of them are there; false: the program has ended before.
static bool find_ranks(const struct program *program, pid_t *pids)
{
    double end = timer_now() + LIMIT;
    while (program_runs(program)) {
        if (program_ranks(program, pids, RANKS) == RANKS)
            return true;
        assert_true(timer_now() < end);
        run_sleep(0.002);
    }
    return false;
}

// As pgrep, ps and nvidia-smi show it.
static void must_be_named(pid_t pid)
{
    char path[64], name[32] = "";
    snprintf(path, sizeof(path), "/proc/%ld/comm", (long)pid);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    assert_non_null(fgets(name, sizeof(name), file));
    fclose(file);
    assert_string_equal(name, "dtrain\n");
}

// Nothing of it is left: not even a rank whose launcher is gone. One that is killed while it waits for a disk
// ends when that answers.
static void must_be_gone(const pid_t *pids)
{
    double end = timer_now() + DEAD_LIMIT;
    for (int r = 0; r < RANKS; r++)
        while (kill(pids[r], 0) == 0) {
            if (timer_now() > end)
                fail_msg("process %ld of the run is left", (long)pids[r]);
            run_sleep(0.01);
        }
}

// ---- killed --------------------------------------------------------------------------------------

// Kills one rank after `seconds`. Returns whether there was something to kill.
static bool kill_round(const char *name, int rank, double seconds, int *status)
{
    struct program program = {0};
    pid_t pids[RANKS];
    run_train_start(&fixture, &program, name, "--set", "checkpoint.every=1", "--set",
                    "checkpoint.keep=2", "--set", "checkpoint.background=true", NULL);
    double begin = timer_now();
    bool found = find_ranks(&program, pids);
    while (found && timer_now() - begin < seconds)
        run_sleep(0.002);
    if (found)
        kill(pids[rank], SIGKILL);
    double killed = timer_now();
    *status = program_wait(&program, LIMIT);
    if (!found)
        return false;
    if (!(timer_now() - killed < DEAD_LIMIT))
        fail_msg("it took %.1f s until all had ended", timer_now() - killed);
    must_be_gone(pids);
    return true;
}

// Also while checkpoints are written, which is most of the time here.
static void kills_at_random_moments(void **state)
{
    (void)state;
    struct rng_key key = rng_key_make(47, 0, 0, RNG_TEST);
    int ended = 0, writing = 0;
    for (int round = 0; round < kills; round++) {
        uint64_t draw = 2 * (uint64_t)round;
        int status = 0, rank = (int)(rng_u64(key, draw) % RANKS);
        double share = (double)rng_uniform(key, draw + 1);
        kill_round("often", rank, whole_seconds * share, &status);
        writing += run_says(&fixture, "often", "left as they are, since");
        if (status == 0) {
            ended++;
            run_must_equal(&fixture, "whole", "often", RUN_STEPS);
            run_remove(&fixture, "often");
        }
    }
    assert_int_equal(run_train(&fixture, "often", NULL), 0);
    run_must_equal(&fixture, "whole", "often", RUN_STEPS);
    print_message("%d kills, %d runs ended before theirs, %d times leftovers were met\n",
                  kills - ended, ended, writing);
}

// The launcher dies: its ranks end, too.
static void launcher_killed(void **state)
{
    (void)state;
    struct program program = {0};
    pid_t pids[RANKS];
    run_train_start(&fixture, &program, "orphans", NULL);
    assert_true(find_ranks(&program, pids));
    program_wait_step(&program, run_path(&fixture, "orphans"), 3, LIMIT);
    must_be_named(pids[0]);
    program_signal(&program, SIGKILL);
    program_wait(&program, LIMIT);
    must_be_gone(pids);
    assert_int_equal(run_train(&fixture, "orphans", NULL), 0);
    run_must_equal(&fixture, "whole", "orphans", RUN_STEPS);
}

// ---- standing still ------------------------------------------------------------------------------

static void stopped_rank_ends_all(void **state)
{
    (void)state;
    struct program program = {0};
    pid_t pids[RANKS];
    run_train_start(&fixture, &program, "still", NULL);
    assert_true(find_ranks(&program, pids));
    program_wait_step(&program, run_path(&fixture, "still"), 5, LIMIT);
    kill(pids[1], SIGSTOP);
    int status = program_wait(&program, STUCK_LIMIT);
    assert_true(status != 0 && status != 75);
    kill(pids[1], SIGKILL); // where the launcher could not
    must_be_gone(pids);
    run_must_say(&fixture, "still", "rank 1");
    assert_int_equal(run_train(&fixture, "still", NULL), 0);
    run_must_equal(&fixture, "whole", "still", RUN_STEPS);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kills_at_random_moments),
        cmocka_unit_test(launcher_killed),
        cmocka_unit_test(stopped_rank_ends_all),
    };
    if (argc == 3 && strcmp(argv[1], "--kills") == 0)
        kills = atoi(argv[2]);
    if (!program_has_ranks()) {
        print_message("skipped: no mpirun, or a build without MPI\n");
        return 77;
    }
    return cmocka_run_group_tests(tests, open_all, close_all);
}
