// The moving average of weights through the real program: what it is, that training goes on beside it bitwise as
// without it, and who reads it.
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/bf16.h"
#include "base/log.h"
#include "data/safetensors.h"
#include "tests/support/run_fixture.h"
#include "trainer/files.h"

enum { LIMIT = 120, TRIES = 20, OWN_SETS = 3 };
static const double decay = 0.5; // large steps show

static struct run_fixture fixture;

static int open_all(void **state)
{
    (void)state;
    run_fixture_open(&fixture);
    run_fixture_set(&fixture, "data.val=[val.h5]");
    run_fixture_set(&fixture, "validation.every=5");
    run_fixture_set(&fixture, "checkpoint.keep=20");
    return 0;
}

static int forget(void **state)
{
    (void)state;
    fixture.set_count = OWN_SETS;
    fixture.ranks = 0;
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    run_fixture_close(&fixture);
    return 0;
}

static void train(const char *name, const char *set)
{
    int status = run_train(&fixture, name, "--set", set, NULL);
    if (status != 0)
        run_must_say(&fixture, name, "done: 20 steps");
    assert_int_equal(status, 0);
}

static void open_file(struct safetensors *file, const char *folder, const char *name)
{
    struct error err = {""};
    char *path = memory_format("%s/%s", folder, name);
    if (safetensors_open(file, path, &err) != 0)
        fail_msg("%s", err.text);
    free(path);
}

static float value_at(const struct safetensors_entry *entry, size_t i)
{
    float value;
    memcpy(&value, entry->bytes + i * sizeof(value), sizeof(value));
    return value;
}

// ---- what it is

// The averages of every step from the masters of every step.
static void average_follows_the_masters(void **state)
{
    (void)state;
    run_fixture_set(&fixture, "optimizer.ema=0.5");
    train("average", "checkpoint.every=1");
    struct safetensors before, master, average;
    for (int step = 2; step <= RUN_STEPS; step++) {
        open_file(&before, run_checkpoint(&fixture, "average", step - 1), "ema.safetensors");
        open_file(&master, run_checkpoint(&fixture, "average", step), "master.safetensors");
        open_file(&average, run_checkpoint(&fixture, "average", step), "ema.safetensors");
        assert_int_equal(master.count, average.count);
        double keep = fmin(decay, (1.0 + step) / (10.0 + step)), moved = 0.0;
        for (size_t t = 0; t < average.count; t++) {
            const struct safetensors_entry *now = &average.entries[t];
            const struct safetensors_entry *w = safetensors_find(&master, now->name);
            const struct safetensors_entry *old = safetensors_find(&before, now->name);
            for (size_t i = 0; i < now->size / sizeof(float); i++) {
                double want =
                    keep * (double)value_at(old, i) + (1.0 - keep) * (double)value_at(w, i);
                double got = (double)value_at(now, i);
                if (!(fabs(got - want) <= 1e-6 * fabs(want) + 1e-9))
                    fail_msg("step %d, %s[%zu] is %g, wanted %g", step, now->name, i, got, want);
                moved += fabs(got - (double)value_at(old, i));
            }
        }
        assert_true(moved > 0.0);
        safetensors_close(&before);
        safetensors_close(&master);
        safetensors_close(&average);
    }
}

// Weights change places for validation and come back: the run without an average has the same bits.
static void training_goes_on_bitwise(const char *compute, const char *with, const char *without)
{
    run_fixture_set(&fixture, compute);
    train(without, "checkpoint.every=10");
    run_fixture_set(&fixture, "optimizer.ema=0.5");
    train(with, "checkpoint.every=10");
    static const char *const arrays[] = {"master", "adam_m", "adam_v"};
    for (int i = 0; i < 3; i++)
        assert_true(program_state_distance(run_checkpoint(&fixture, without, RUN_STEPS),
                                           run_checkpoint(&fixture, with, RUN_STEPS),
                                           arrays[i]) == 0.0);
}

static void training_goes_on_in_fp32(void **state)
{
    (void)state;
    training_goes_on_bitwise("run.compute=fp32", "with-32", "without-32");
}

static void training_goes_on_in_bf16(void **state)
{
    (void)state;
    training_goes_on_bitwise("run.compute=bf16", "with-16", "without-16");
}

// ---- who reads it

// A number line of `eval`.
static double line_of(const char *name, const char *word)
{
    char *text = program_text(run_path(&fixture, "%s.out", name));
    char *at = strstr(text, word);
    assert_non_null(at);
    double value = strtod(at + strlen(word), NULL);
    free(text);
    return value;
}

static double eval_loss(const char *name, const char *run, const char *raw)
{
    assert_int_equal(run_command(&fixture, name, true, "eval", "--checkpoint",
                                 run_checkpoint(&fixture, run, RUN_STEPS), raw, NULL),
                     0);
    assert_int_equal(run_says(&fixture, name, "moving average"), raw == NULL);
    return line_of(name, "\nloss ");
}

static double last_val_loss(const char *run)
{
    cJSON *metrics = program_metrics(run_path(&fixture, "%s", run));
    double loss = program_number(program_line(metrics, RUN_STEPS, "val_loss"), "val_loss");
    cJSON_Delete(metrics);
    return loss;
}

static void validation_and_eval_use_it(void **state)
{
    (void)state;
    run_fixture_set(&fixture, "optimizer.ema=0.5");
    double average = eval_loss("eval-average", "average", NULL);
    double raw = eval_loss("eval-raw", "average", "--raw");
    assert_true(fabs(average - last_val_loss("average")) <= 1e-6 * average);
    assert_true(fabs(raw - last_val_loss("without-32")) <= 1e-6 * raw);
    assert_true(fabs(raw - average) > 1e-4 * average);
}

static void export_as(const char *name, const char *out, const char *format, const char *raw)
{
    if (run_command(&fixture, name, false, "export", "--checkpoint",
                    run_checkpoint(&fixture, "average", RUN_STEPS), "--format", format, "--out",
                    out, raw, NULL) != 0)
        run_must_say(&fixture, name, "no failure");
}

// What a layout holds is an array of the checkpoint, rounded.
static void must_hold(const char *folder, const char *array)
{
    struct safetensors model, values;
    open_file(&model, folder, "model.safetensors");
    open_file(&values, run_checkpoint(&fixture, "average", RUN_STEPS), array);
    for (size_t t = 0; t < values.count; t++) {
        const struct safetensors_entry *from = &values.entries[t];
        const struct safetensors_entry *to = safetensors_find(&model, from->name);
        assert_non_null(to);
        assert_int_equal(to->size * 2, from->size);
        for (size_t i = 0; i < to->size / sizeof(bf16); i++) {
            bf16 got, want = bf16_from_float(value_at(from, i));
            memcpy(&got, to->bytes + i * sizeof(got), sizeof(got));
            assert_int_equal(got, want);
        }
    }
    safetensors_close(&model);
    safetensors_close(&values);
}

static void must_make_folder(const char *path)
{
    struct error err = {""};
    if (files_make_folder(path, &err) != 0)
        fail_msg("%s", err.text);
}

static void exports_hold_it(void **state)
{
    (void)state;
    static const char *const formats[] = {"zlab", "speculators"};
    for (int f = 0; f < 2; f++) {
        const char *average = run_path(&fixture, "export-%s", formats[f]);
        const char *raw = run_path(&fixture, "export-raw-%s", formats[f]);
        char *left = memory_format("%s/.tmp-raw", raw),
             *stale = memory_format("%s/state.json", left);
        export_as("export", average, formats[f], NULL);
        must_make_folder(raw); // as an export that was killed leaves it
        must_make_folder(left);
        assert_int_equal(symlink("nowhere", stale), 0);
        export_as("export-raw", raw, formats[f], "--raw");
        must_hold(average, "ema.safetensors");
        must_hold(raw, "master.safetensors");
        assert_false(files_is_folder(left));
        free(stale);
        free(left);
    }
}

// Of either file that `export --raw` reads values from.
static void damage_is_not_exported(void **state)
{
    (void)state;
    static const char *const files[] = {"model.safetensors", "master.safetensors"};
    static const char *const texts[] = {"/model.safetensors: its checksum",
                                        "/master.safetensors: tensor '"};
    const char *out = run_path(&fixture, "export-damaged");
    for (int f = 0; f < 2; f++) {
        char *path =
            memory_format("%s/%s", run_checkpoint(&fixture, "average", RUN_STEPS), files[f]);
        fixture_flip_last_bit(path);
        int status = run_command(&fixture, "damaged", false, "export", "--checkpoint",
                                 run_checkpoint(&fixture, "average", RUN_STEPS), "--format", "zlab",
                                 "--out", out, "--raw", NULL);
        fixture_flip_last_bit(path);
        assert_int_equal(status, 1);
        run_must_say(&fixture, "damaged", texts[f]);
        char *model = memory_format("%s/model.safetensors", out);
        assert_false(files_exists(model));
        free(model);
        free(path);
    }
}

// ---- resume and ranks

static void killed_and_resumed(void **state)
{
    (void)state;
    int64_t reached = RUN_STEPS;
    run_fixture_set(&fixture, "optimizer.ema=0.5");
    run_fixture_set(&fixture, "optimizer.kind=muon");
    run_fixture_set(&fixture, "drafter.intermediate_size=512"); // steps that a signal meets
    train("whole", "checkpoint.every=4");
    for (int try = 0; try < TRIES && reached == RUN_STEPS; try++) {
        struct program program = {0};
        run_remove(&fixture, "killed");
        run_train_start(&fixture, &program, "killed", "--set", "checkpoint.every=4", NULL);
        program_wait_step(&program, run_path(&fixture, "killed"), 7, LIMIT);
        program_signal(&program, SIGKILL);
        program_wait(&program, LIMIT);
        reached = program_step(run_path(&fixture, "killed"));
    }
    assert_true(reached >= 7 && reached < RUN_STEPS);
    train("killed", "checkpoint.every=4");
    run_must_say(&fixture, "killed", "resuming from ");
    run_must_equal(&fixture, "whole", "killed", RUN_STEPS);
}

// There is nothing that an average could begin with in the middle.
static void switched_on_is_refused(void **state)
{
    (void)state;
    assert_int_equal(run_train(&fixture, "without-32", "--set", "run.compute=fp32", "--set",
                               "optimizer.ema=0.9", NULL),
                     2);
    run_must_say(&fixture, "without-32", "optimizer.ema");
}

static void ranks_agree(void **state)
{
    (void)state;
    if (!program_has_ranks())
        skip();
    run_fixture_set(&fixture, "optimizer.ema=0.5");
    run_fixture_set(&fixture, "run.compute=bf16");
    train("one", "checkpoint.every=10");
    fixture.ranks = 2;
    train("two", "checkpoint.every=10");
    const char *one = run_checkpoint(&fixture, "one", RUN_STEPS);
    const char *two = run_checkpoint(&fixture, "two", RUN_STEPS);
    assert_true(program_state_distance(one, two, "ema") <= 1e-2);
    struct safetensors model, part;
    open_file(&model, two, "model.safetensors");
    size_t seen = 0;
    for (int rank = 1; rank <= 2; rank++) {
        char *name = memory_format("ema-%05d-of-00002.safetensors", rank);
        open_file(&part, two, name);
        free(name);
        for (size_t t = 0; t < part.count; t++, seen++) {
            const struct safetensors_entry *to = safetensors_find(&model, part.entries[t].name);
            for (size_t i = 0; i < to->size / sizeof(bf16); i++) {
                bf16 got, want = bf16_from_float(value_at(&part.entries[t], i));
                memcpy(&got, to->bytes + i * sizeof(got), sizeof(got));
                assert_int_equal(got, want);
            }
        }
        safetensors_close(&part);
    }
    assert_int_equal(seen, model.count);
    safetensors_close(&model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(average_follows_the_masters, forget),
        cmocka_unit_test_setup(training_goes_on_in_fp32, forget),
        cmocka_unit_test_setup(training_goes_on_in_bf16, forget),
        cmocka_unit_test_setup(validation_and_eval_use_it, forget),
        cmocka_unit_test_setup(exports_hold_it, forget),
        cmocka_unit_test_setup(damage_is_not_exported, forget),
        cmocka_unit_test_setup(killed_and_resumed, forget),
        cmocka_unit_test_setup(switched_on_is_refused, forget),
        cmocka_unit_test_setup(ranks_agree, forget),
    };
    return cmocka_run_group_tests_name("run_average", tests, open_all, close_all);
}
