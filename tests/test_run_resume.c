// Kill and resume through the real program: whatever ends a run, the next one continues it bitwise
// (cases C5 and C6). `run_resume --kills 50` kills that often. What a resume refuses is
// test_run_refusals.c's.
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

#include "base/bf16.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/rng.h"
#include "base/timer.h"
#include "data/safetensors.h"
#include "tests/support/run_fixture.h"

enum { LIMIT = 120, TRIES = 20 }; // seconds; attempts to hit a moment

static struct run_fixture fixture;
static int kills = 8;
static double whole_seconds; // of the uninterrupted run

static int open_all(void **state)
{
    (void)state;
    run_fixture_open(&fixture);
    // Steps long enough to be met by a signal, checkpoints large enough to be cut by one.
    run_fixture_set(&fixture, "drafter.intermediate_size=1024");
    double start = timer_now();
    int status = run_train(&fixture, "whole", NULL);
    whole_seconds = timer_now() - start;
    if (status != 0)
        run_must_say(&fixture, "whole", "done: 20 steps");
    return status;
}

// Keys that one test adds are not another's.
static int forget_sets(void **state)
{
    (void)state;
    fixture.set_count = 1;
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    run_fixture_close(&fixture);
    return 0;
}

static void must_resume_at(const char *name, int64_t step)
{
    char words[64];
    snprintf(words, sizeof(words), "/checkpoints/step-%08lld", (long long)step);
    run_must_say(&fixture, name, "resuming from ");
    run_must_say(&fixture, name, words);
}

// ---- the same again ------------------------------------------------------------------------------

static void same_run_twice(void **state)
{
    (void)state;
    assert_int_equal(run_train(&fixture, "again", "--set", "checkpoint.background=true", NULL), 0);
    run_must_equal(&fixture, "whole", "again", RUN_STEPS);
}

// Nothing is trained, written or appended when a finished run is started again.
static void finished_run_stays(void **state)
{
    (void)state;
    char *before = program_text(run_path(&fixture, "again/metrics.jsonl"));
    assert_int_equal(run_train(&fixture, "again", NULL), 0);
    must_resume_at("again", RUN_STEPS);
    run_must_say(&fixture, "again", "done: 20 steps");
    run_must_say(&fixture, "again", "steps: 20, and 20 are taken: nothing is left");
    assert_false(run_says(&fixture, "again", "the learning rate follows"));
    char *after = program_text(run_path(&fixture, "again/metrics.jsonl"));
    assert_string_equal(before, after);
    assert_false(run_says(&fixture, "again", "written in"));
    free(before);
    free(after);
}

// Another number of steps is another schedule; one that is behind the run leaves nothing to do.
static void other_lengths_are_told(void **state)
{
    (void)state;
    assert_int_equal(run_train(&fixture, "longer", "--set", "run.max_steps=8", NULL), 0);
    assert_false(run_says(&fixture, "longer", "the learning rate follows"));
    assert_int_equal(run_train(&fixture, "longer", "--set", "run.max_steps=10", NULL), 0);
    run_must_say(&fixture, "longer", "10 steps in all, where 8 were to be when ");
    run_must_say(&fixture, "longer", "steps: 10, from step 9");
    assert_int_equal(run_train(&fixture, "longer", "--set", "run.max_steps=4", NULL), 0);
    run_must_say(&fixture, "longer", "steps: 4, and 10 are taken: nothing is left");
}

// ---- killed --------------------------------------------------------------------------------------

// Step lines are written after the step, so the kill meets a later one.
static void kill_after_13_resumes_at_12(void **state)
{
    (void)state;
    int64_t reached = RUN_STEPS;
    for (int try = 0; try < TRIES && reached >= 16; try++) {
        struct program program = {0};
        run_remove(&fixture, "killed");
        run_train_start(&fixture, &program, "killed", NULL);
        program_wait_step(&program, run_path(&fixture, "killed"), 13, LIMIT);
        program_signal(&program, SIGKILL);
        int status = program_wait(&program, LIMIT);
        assert_true(status == 128 + SIGKILL || status == 0);
        reached = program_step(run_path(&fixture, "killed"));
    }
    assert_true(reached >= 13 && reached < 16);
    assert_int_equal(program_checkpoint(run_path(&fixture, "killed")), 12);
    assert_int_equal(run_train(&fixture, "killed", NULL), 0);
    must_resume_at("killed", 12);
    run_must_equal(&fixture, "whole", "killed", RUN_STEPS);
}

// Its matrices have one moment.
static void killed_with_muon(void **state)
{
    (void)state;
    int64_t reached = RUN_STEPS;
    run_fixture_set(&fixture, "optimizer.kind=muon");
    run_fixture_set(&fixture, "optimizer.muon_lr=2e-3");
    assert_int_equal(run_train(&fixture, "muon-whole", NULL), 0);
    for (int try = 0; try < TRIES && reached == RUN_STEPS; try++) {
        struct program program = {0};
        run_remove(&fixture, "muon");
        run_train_start(&fixture, &program, "muon", NULL);
        program_wait_step(&program, run_path(&fixture, "muon"), 9, LIMIT);
        program_signal(&program, SIGKILL);
        program_wait(&program, LIMIT);
        reached = program_step(run_path(&fixture, "muon"));
    }
    assert_true(reached >= 9 && reached < RUN_STEPS);
    assert_int_equal(run_train(&fixture, "muon", NULL), 0);
    run_must_say(&fixture, "muon", "resuming from ");
    run_must_equal(&fixture, "muon-whole", "muon", RUN_STEPS);
    // Another optimizer would find other moments.
    fixture.set_count = 1;
    assert_int_equal(run_train(&fixture, "muon", NULL), 2);
    run_must_say(&fixture, "muon", "optimizer.kind");
}

// Also while checkpoints are written, which is most of the time here, and while old ones are deleted.
static void kills_at_random_moments(void **state)
{
    (void)state;
    struct rng_key key = rng_key_make(31, 0, 0, RNG_TEST);
    int ended = 0, writing = 0;
    for (int round = 0; round < kills; round++) {
        struct program program = {0};
        run_train_start(&fixture, &program, "often", "--set", "checkpoint.every=1", "--set",
                        "checkpoint.keep=2", "--set", "checkpoint.background=true", NULL);
        run_sleep(whole_seconds * (double)rng_uniform(key, (uint64_t)round));
        program_signal(&program, SIGKILL);
        int status = program_wait(&program, LIMIT);
        writing += run_says(&fixture, "often", "left as they are, since");
        if (status == 0) {
            ended++;
            run_must_equal(&fixture, "whole", "often", RUN_STEPS);
            run_remove(&fixture, "often");
        } else {
            assert_int_equal(status, 128 + SIGKILL);
        }
    }
    assert_int_equal(run_train(&fixture, "often", NULL), 0);
    run_must_equal(&fixture, "whole", "often", RUN_STEPS);
    print_message("%d kills, %d runs ended before theirs, %d times leftovers were met\n",
                  kills - ended, ended, writing);
}

// ---- stopped by a signal -------------------------------------------------------------------------

// Stops a run in step `during` and continues it.
static void stop_and_continue(const char *name, int signal_number, const char *background)
{
    int64_t stopped = RUN_STEPS;
    for (int try = 0; try < TRIES && stopped == RUN_STEPS; try++) {
        struct program program = {0};
        run_remove(&fixture, name);
        run_train_start(&fixture, &program, name, "--set", background, NULL);
        program_wait_step(&program, run_path(&fixture, "%s", name), 8, LIMIT);
        program_signal(&program, signal_number);
        int status = program_wait(&program, LIMIT);
        stopped = program_step(run_path(&fixture, "%s", name));
        if (stopped < RUN_STEPS)
            assert_int_equal(status, 75);
    }
    assert_true(stopped >= 8 && stopped < RUN_STEPS);
    // Everything that was done is saved.
    assert_int_equal(program_checkpoint(run_path(&fixture, "%s", name)), stopped);
    run_must_say(&fixture, name, "stopping at step");
    char *last = memory_format("stopped after %lld of %d steps: the same command goes on\n",
                               (long long)stopped, RUN_STEPS);
    run_must_say(&fixture, name, last);
    free(last);
    assert_int_equal(run_train(&fixture, name, NULL), 0);
    must_resume_at(name, stopped);
    run_must_equal(&fixture, "whole", name, RUN_STEPS);
}

static void sigterm_saves_and_resumes(void **state)
{
    (void)state;
    stop_and_continue("term", SIGTERM, "checkpoint.background=false");
}

static void sigint_saves_and_resumes(void **state)
{
    (void)state;
    stop_and_continue("int", SIGINT, "checkpoint.background=true");
}

static void sigusr1_saves_and_resumes(void **state)
{
    (void)state;
    stop_and_continue("usr1", SIGUSR1, "checkpoint.background=true");
}

// Both are pending when the program wakes, so it can do nothing between them.
static void second_signal_ends_at_once(void **state)
{
    (void)state;
    struct program program = {0};
    run_train_start(&fixture, &program, "twice", NULL);
    program_wait_step(&program, run_path(&fixture, "twice"), 5, LIMIT);
    program_signal(&program, SIGSTOP);
    program_signal(&program, SIGTERM);
    program_signal(&program, SIGINT);
    program_signal(&program, SIGCONT);
    int status = program_wait(&program, LIMIT);
    assert_true(status == 128 + SIGTERM || status == 128 + SIGINT);
    assert_false(run_says(&fixture, "twice", "stopping at step"));
    assert_int_equal(run_train(&fixture, "twice", NULL), 0);
    run_must_equal(&fixture, "whole", "twice", RUN_STEPS);
}

// Until the program's first instruction it is an ordinary death, afterwards a stop that has saved
// (test_run_signals.c).
static void signals_before_the_first_step(void **state)
{
    (void)state;
    run_fixture_set(&fixture, "data.val=[val.h5]");
    assert_int_equal(run_train(&fixture, "early-whole", NULL), 0);
    double delay = 0.0;
    for (int stopped = 0; stopped < 4; delay = 1.1 * delay + 0.002) {
        struct program program = {0};
        run_remove(&fixture, "early");
        run_train_start(&fixture, &program, "early", NULL);
        run_sleep(delay);
        program_signal(&program, SIGTERM);
        int status = program_wait(&program, LIMIT);
        assert_true(status == 128 + SIGTERM || status == 75);
        if (status != 75)
            continue;
        stopped++;
        assert_true(program_checkpoint(run_path(&fixture, "early")) >= 0);
    }
    assert_int_equal(run_train(&fixture, "early", NULL), 0);
    run_must_equal(&fixture, "early-whole", "early", RUN_STEPS);
}

// ---- with validation -----------------------------------------------------------------------------

static const char *const with_validation[] = {"data.val=[val.h5]", "validation.every=3",
                                              "validation.rows=64"};

// Starts, waits for the step's line and sends the signal.
static int signal_after(const char *name, int64_t step, int signal_number)
{
    struct program program = {0};
    run_train_start(&fixture, &program, name, NULL);
    program_wait_step(&program, run_path(&fixture, "%s", name), step, LIMIT);
    program_signal(&program, signal_number);
    return program_wait(&program, LIMIT);
}

static void best_must_equal(const char *first, const char *second)
{
    char a[256] = "", b[256] = "";
    assert_true(readlink(run_path(&fixture, "%s/checkpoints/best", first), a, 255) > 0);
    assert_true(readlink(run_path(&fixture, "%s/checkpoints/best", second), b, 255) > 0);
    assert_string_equal(a, b);
}

// The validation of step 6 begins right after that step's line. One run is killed in it; another
// stopped in it, which saves step 6 not validated, and killed after it, so that it is done once more.
// No line of metrics is lost or doubled, and the best step is the one of the run that was left alone.
static void stops_during_validation(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(with_validation) / sizeof(*with_validation); i++)
        run_fixture_set(&fixture, with_validation[i]);
    assert_int_equal(run_train(&fixture, "valid-whole", NULL), 0);
    int status = signal_after("valid-kill", 6, SIGKILL);
    assert_true(status == 128 + SIGKILL || status == 0); // 0: this process was kept waiting
    assert_int_equal(run_train(&fixture, "valid-kill", NULL), 0);
    run_must_equal(&fixture, "valid-whole", "valid-kill", RUN_STEPS);
    best_must_equal("valid-whole", "valid-kill");
    status = signal_after("valid", 6, SIGTERM);
    assert_true(status == 75 || status == 0);
    status = signal_after("valid", 7, SIGKILL);
    assert_true(status == 128 + SIGKILL || status == 0);
    assert_int_equal(run_train(&fixture, "valid", NULL), 0);
    run_must_equal(&fixture, "valid-whole", "valid", RUN_STEPS);
    best_must_equal("valid-whole", "valid");
}

// Stopped after the validation at its start, whose line must stay.
static void stopped_at_step_zero(void **state)
{
    (void)state;
    run_fixture_set(&fixture, "data.val=[val.h5]");
    struct program program = {0};
    int64_t step = RUN_STEPS;
    for (int try = 0; try < TRIES && step > 0; try++) {
        run_remove(&fixture, "zero");
        run_train_start(&fixture, &program, "zero", NULL);
        program_wait_step(&program, run_path(&fixture, "zero"), 0, LIMIT);
        program_signal(&program, SIGTERM);
        assert_int_equal(program_wait(&program, LIMIT), 75);
        step = program_step(run_path(&fixture, "zero"));
    }
    assert_int_equal(step, 0);
    assert_int_equal(program_checkpoint(run_path(&fixture, "zero")), 0);
    assert_int_equal(run_train(&fixture, "zero", NULL), 0);
    must_resume_at("zero", 0);
    run_must_equal(&fixture, "early-whole", "zero", RUN_STEPS);
}

// ---- what a step is ------------------------------------------------------------------------------

static double scalar(const struct safetensors *trace, const char *name)
{
    double value;
    const struct safetensors_entry *entry = safetensors_find(trace, name);
    assert_non_null(entry);
    assert_string_equal(entry->dtype, "F64");
    memcpy(&value, entry->bytes, sizeof(value));
    return value;
}

static void open_trace(struct safetensors *trace, const char *name)
{
    struct error err = {""};
    if (safetensors_open(trace, run_path(&fixture, "%s", name), &err) != 0)
        fail_msg("%s", err.text);
}

static void trace_step(const char *run, int64_t step, const char *out)
{
    char name[64];
    snprintf(name, sizeof(name), "trace-%s", run);
    assert_int_equal(run_command(&fixture, name, true, "trace", "--checkpoint",
                                 run_checkpoint(&fixture, run, step), "--out",
                                 run_path(&fixture, "%s", out), NULL),
                     0);
}

static void trace_must_be_line(const struct safetensors *trace, const char *run, int64_t step)
{
    static const char *const names[] = {"loss", "lr", "grad_norm", "clip_factor"};
    cJSON *metrics = program_metrics(run_path(&fixture, "%s", run));
    const cJSON *line = program_line(metrics, step, "loss");
    assert_non_null(line);
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        char name[32];
        snprintf(name, sizeof(name), "scalar.%s", names[i]);
        double said = program_number(line, names[i]), traced = scalar(trace, name);
        if (!(fabs(said - traced) <= 1e-12 * fabs(said)))
            fail_msg("%s: %.17g in metrics.jsonl, %.17g in the trace", names[i], said, traced);
    }
    cJSON_Delete(metrics);
}

// Order of documents and anchors of the step after a resume: from the interrupted and the whole run.
static void traces_after_a_resume_agree(void **state)
{
    (void)state;
    struct safetensors whole, killed;
    trace_step("whole", 12, "a.safetensors");
    trace_step("killed", 12, "b.safetensors");
    open_trace(&whole, "a.safetensors");
    open_trace(&killed, "b.safetensors");
    assert_int_equal(whole.count, killed.count);
    assert_non_null(safetensors_find(&whole, "row1.anchors"));
    for (size_t i = 0; i < whole.count; i++) {
        assert_string_equal(whole.entries[i].name, killed.entries[i].name);
        assert_int_equal(whole.entries[i].size, killed.entries[i].size);
        assert_memory_equal(whole.entries[i].bytes, killed.entries[i].bytes, whole.entries[i].size);
    }
    trace_must_be_line(&whole, "whole", 13);
    safetensors_close(&whole);
    safetensors_close(&killed);
}

// Where the number of steps comes from the epochs, and the learning rate from it.
static void trace_of_a_step_is_the_step(void **state)
{
    (void)state;
    struct safetensors trace;
    run_fixture_set(&fixture, "run.max_steps=0");
    run_fixture_set(&fixture, "run.epochs=2");
    assert_int_equal(run_train(&fixture, "epochs", NULL), 0);
    trace_step("epochs", 8, "c.safetensors");
    open_trace(&trace, "c.safetensors");
    trace_must_be_line(&trace, "epochs", 9);
    safetensors_close(&trace);
}

// ---- norms move (C5) -----------------------------------------------------------------------------

// Norm weights start at 1; at this rate one update is less than half a step of bf16 there, so weights
// kept in bf16 would stay.
static const double small_lr = 5e-4;

struct norms {
    int weights, moved, bf16_moved;
};

static void count_norms(struct norms *norms, const char *name, const struct safetensors *master,
                        const struct safetensors *model)
{
    for (size_t i = 0; i < master->count; i++) {
        const struct safetensors_entry *entry = &master->entries[i];
        if (strstr(entry->name, "norm") == NULL)
            continue;
        const struct safetensors_entry *served = safetensors_find(model, entry->name);
        assert_non_null(served);
        assert_string_equal(served->dtype, "BF16");
        for (size_t k = 0; k < entry->size / sizeof(float); k++) {
            float value;
            bf16 rounded;
            memcpy(&value, entry->bytes + k * sizeof(value), sizeof(value));
            memcpy(&rounded, served->bytes + k * sizeof(rounded), sizeof(rounded));
            if (rounded != bf16_from_float(value))
                fail_msg("%s: %s[%zu] is %.9g, exported as %.9g", name, entry->name, k,
                         (double)value, (double)bf16_to_float(rounded));
            norms->weights++;
            norms->moved += fabs((double)value - 1.0) > 2.0 * small_lr;
            norms->bf16_moved += rounded != bf16_from_float(1.0f);
        }
    }
}

static void norms_must_have_moved(const char *name, int64_t step)
{
    struct safetensors master, model;
    struct error err = {""};
    struct norms norms = {0};
    const char *folder = run_checkpoint(&fixture, name, step);
    char *a = memory_format("%s/master.safetensors", folder);
    char *b = memory_format("%s/model.safetensors", folder);
    if (safetensors_open(&master, a, &err) != 0 || safetensors_open(&model, b, &err) != 0)
        fail_msg("%s", err.text);
    count_norms(&norms, name, &master, &model);
    safetensors_close(&master);
    safetensors_close(&model);
    free(a);
    free(b);
    assert_true(norms.weights >= 8 * 6);
    if (norms.moved * 2 < norms.weights || norms.bf16_moved * 2 < norms.weights)
        fail_msg("%s: of %d norm weights %d have moved, %d in bf16", name, norms.weights,
                 norms.moved, norms.bf16_moved);
}

static void norms_move(void **state)
{
    (void)state;
    const char *const sets[] = {
        "run.max_steps=100",       "schedule.kind=constant", "optimizer.lr=5e-4",
        "schedule.warmup_ratio=0", "optimizer.grad_clip=0",  "drafter.intermediate_size=16",
        "checkpoint.every=50",     "run.compute=bf16",       "run.epochs=20"};
    for (size_t i = 0; i < sizeof(sets) / sizeof(*sets); i++)
        run_fixture_set(&fixture, sets[i]);
    assert_int_equal(run_train(&fixture, "norms-whole", NULL), 0);
    norms_must_have_moved("norms-whole", 100);
    assert_int_equal(run_train(&fixture, "norms", "--set", "run.max_steps=50", NULL), 0);
    assert_int_equal(run_train(&fixture, "norms", NULL), 0);
    must_resume_at("norms", 50);
    norms_must_have_moved("norms", 100);
    run_must_equal(&fixture, "norms-whole", "norms", 100);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--kills") == 0)
        kills = atoi(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(same_run_twice, forget_sets),
        cmocka_unit_test_setup(finished_run_stays, forget_sets),
        cmocka_unit_test_setup(other_lengths_are_told, forget_sets),
        cmocka_unit_test_setup(kill_after_13_resumes_at_12, forget_sets),
        cmocka_unit_test_setup(killed_with_muon, forget_sets),
        cmocka_unit_test_setup(kills_at_random_moments, forget_sets),
        cmocka_unit_test_setup(sigterm_saves_and_resumes, forget_sets),
        cmocka_unit_test_setup(sigint_saves_and_resumes, forget_sets),
        cmocka_unit_test_setup(sigusr1_saves_and_resumes, forget_sets),
        cmocka_unit_test_setup(second_signal_ends_at_once, forget_sets),
        cmocka_unit_test_setup(signals_before_the_first_step, forget_sets),
        cmocka_unit_test_setup(stops_during_validation, forget_sets),
        cmocka_unit_test_setup(stopped_at_step_zero, forget_sets),
        cmocka_unit_test_setup(traces_after_a_resume_agree, forget_sets),
        cmocka_unit_test_setup(trace_of_a_step_is_the_step, forget_sets),
        cmocka_unit_test_setup(norms_move, forget_sets),
    };
    return cmocka_run_group_tests_name("run_resume", tests, open_all, close_all);
}
