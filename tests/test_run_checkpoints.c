// Checkpoint folders that are broken, and disks that are full, under the real program (case C7).
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "tests/support/run_fixture.h"
#include "tests/support/small_disk.h"
#include "tests/support/shard_edit.h"
#include "trainer/files.h"

static struct run_fixture fixture;

// One checkpoint takes 700 kB.
static int open_all(void **state)
{
    (void)state;
    run_fixture_open(&fixture);
    run_fixture_set(&fixture, "drafter.intermediate_size=1024");
    return run_train(&fixture, "whole", NULL);
}

static int close_all(void **state)
{
    (void)state;
    run_fixture_close(&fixture);
    return 0;
}

static void rename_it(const char *from, const char *to)
{
    if (rename(from, to) != 0)
        fail_msg("%s: %s", from, strerror(errno));
}

// A run folder with the checkpoints of steps 4, 8 and 12.
static void copy_run(const char *to)
{
    char *command = memory_format("cp -r '%s/whole' '%s/%s'", fixture.folder, fixture.folder, to);
    assert_int_equal(system(command), 0);
    free(command);
    fixture_folder_remove(memory_strdup(run_checkpoint(&fixture, to, 16)));
    fixture_folder_remove(memory_strdup(run_checkpoint(&fixture, to, 20)));
    assert_int_equal(program_checkpoint(run_path(&fixture, "%s", to)), 12);
}

static const char *in_step(const char *run, int64_t step, const char *file)
{
    return run_path(&fixture, "%s/checkpoints/step-%08lld/%s", run, (long long)step, file);
}

static void halve(const char *path)
{
    edit_cut(path, files_size(path) / 2);
}

// Step 4 complete; step 8 with half a file and no DONE; of step 12 only what was begun; a stray.
static void broken_folder(void **state)
{
    (void)state;
    copy_run("broken");
    halve(in_step("broken", 8, "master.safetensors"));
    assert_int_equal(remove(in_step("broken", 8, "DONE")), 0);
    const char *begun = run_path(&fixture, "broken/checkpoints/.tmp-step-00000012-1");
    rename_it(run_checkpoint(&fixture, "broken", 12), begun);
    const char *stray = run_path(&fixture, "broken/checkpoints/abc");
    assert_int_equal(mkdir(stray, 0777), 0);

    assert_int_equal(
        run_train(&fixture, "broken", "--resume", run_checkpoint(&fixture, "broken", 8), NULL), 1);
    run_must_say(&fixture, "broken", in_step("broken", 8, "master.safetensors"));

    assert_int_equal(run_train(&fixture, "broken", NULL), 0);
    const char *output = run_path(&fixture, "broken.out");
    assert_int_equal(program_count(output, "left as they are, since writing them was not finished"),
                     1);
    assert_true(program_says(output, "not finished: .tmp-step-00000012-1, step-00000008\n"));
    assert_false(program_says(output, "abc"));
    run_must_say(&fixture, "broken", "/checkpoints/step-00000004");
    run_must_equal(&fixture, "whole", "broken", RUN_STEPS);
    // Nothing that was not finished is deleted.
    assert_true(files_is_folder(begun) && files_is_folder(stray));
    assert_true(files_is_folder(run_path(&fixture, "broken/checkpoints/step-00000008.incomplete")));
}

// Called complete and not: never resumed from, and named.
static void damaged_after_it_was_complete(void **state)
{
    (void)state;
    static const char *const files[] = {
        "master.safetensors", "adam_m.safetensors", "adam_v.safetensors", "config.yaml",
        "execution.json",     "state.json",         "config.json",        "model.safetensors"};
    for (size_t i = 0; i < sizeof(files) / sizeof(*files); i++) {
        char name[32];
        snprintf(name, sizeof(name), "damaged-%zu", i);
        copy_run(name);
        halve(in_step(name, 12, files[i]));
        char *before = program_text(run_path(&fixture, "%s/metrics.jsonl", name));
        assert_int_equal(run_train(&fixture, name, NULL), 1);
        run_must_say(&fixture, name, in_step(name, 12, files[i]));
        char *after = program_text(run_path(&fixture, "%s/metrics.jsonl", name));
        assert_string_equal(before, after);
        free(before);
        free(after);
        assert_int_equal(remove(in_step(name, 12, files[i])), 0);
        assert_int_equal(run_train(&fixture, name, NULL), 1);
        run_must_say(&fixture, name, files[i]);
        // A pipe in its place is not waited for.
        assert_int_equal(mkfifo(in_step(name, 12, files[i]), 0600), 0);
        assert_int_equal(run_train(&fixture, name, NULL), 1);
        run_must_say(&fixture, name, files[i]);
        assert_int_equal(remove(in_step(name, 12, files[i])), 0);
    }
    assert_int_equal(run_train(&fixture, "damaged-0", "--resume",
                               run_checkpoint(&fixture, "damaged-0", 8), NULL),
                     0);
    run_must_equal(&fixture, "whole", "damaged-0", RUN_STEPS);
}

static void no_such_checkpoint(void **state)
{
    (void)state;
    assert_int_equal(
        run_train(&fixture, "none", "--resume", run_checkpoint(&fixture, "whole", 7), NULL), 1);
    run_must_say(&fixture, "none", "there is no such checkpoint directory");
    run_must_say(&fixture, "none", "step-00000007");
}

// ---- full disks ----------------------------------------------------------------------------------

// Files of more than 100 kB can not be written: no checkpoint at all.
static void no_checkpoint_can_be_written(void **state)
{
    (void)state;
    struct program program = {.file_limit = 100000};
    run_train_start(&fixture, &program, "limited", NULL);
    assert_int_equal(program_wait(&program, 60.0), 1);
    run_must_say(&fixture, "limited", "could not be written; the run goes on");
    run_must_say(&fixture, "limited", "master.safetensors");
    assert_int_equal(program_step(run_path(&fixture, "limited")), RUN_STEPS);
    assert_int_equal(program_checkpoint(run_path(&fixture, "limited")), -1);
    assert_int_equal(run_train(&fixture, "limited", NULL), 0);
    run_must_equal(&fixture, "whole", "limited", RUN_STEPS);
}

// A stop is status 75 only when what it saved resumes.
static void a_stop_that_can_not_save(void **state)
{
    (void)state;
    struct program program = {.file_limit = 100000};
    run_train_start(&fixture, &program, "unsaved", NULL);
    program_wait_step(&program, run_path(&fixture, "unsaved"), 5, 60.0);
    program_signal(&program, SIGTERM);
    assert_int_equal(program_wait(&program, 60.0), 1);
    assert_int_equal(program_checkpoint(run_path(&fixture, "unsaved")), -1);
}

// Step 4 fits, later ones do not: each is reported, the run goes on to its end, which is not saved.
// When there is room again step 4 resumes.
static void full_disk(void **state)
{
    (void)state;
    small_disk_mount(run_path(&fixture, "full"));
    assert_int_equal(run_train(&fixture, "full", NULL), 1);
    const char *output = run_path(&fixture, "full.out");
    assert_int_equal(program_count(output, "could not be written; the run goes on"), 4);
    assert_true(program_says(output, "No space left on device"));
    assert_int_equal(program_step(run_path(&fixture, "full")), RUN_STEPS);
    assert_int_equal(program_checkpoint(run_path(&fixture, "full")), 4);
    small_disk_enlarge(run_path(&fixture, "full"));
    assert_int_equal(run_train(&fixture, "full", NULL), 0);
    run_must_say(&fixture, "full", "/checkpoints/step-00000004");
    run_must_equal(&fixture, "whole", "full", RUN_STEPS);
    small_disk_unmount(run_path(&fixture, "full"));
}

// Room is made while it runs: the end is saved, so all is well but for what was reported. The run is long, so
// that it has not ended before the first fault is seen and room made.
static void full_for_a_while(void **state)
{
    enum { STEPS = 400 };
    (void)state;
    struct program program = {0};
    run_fixture_set(&fixture, "run.max_steps=400");
    run_fixture_set(&fixture, "run.epochs=400");
    run_fixture_set(&fixture, "checkpoint.keep=2");
    assert_int_equal(run_train(&fixture, "long", NULL), 0);
    small_disk_mount(run_path(&fixture, "while"));
    run_train_start(&fixture, &program, "while", "--set", "checkpoint.background=true", NULL);
    const char *output = run_path(&fixture, "while.out");
    while (!program_says(output, "could not be written; the run goes on")) {
        assert_true(program_runs(&program));
        run_sleep(0.002);
    }
    small_disk_enlarge(run_path(&fixture, "while"));
    assert_int_equal(program_wait(&program, 120.0), 0);
    run_must_equal(&fixture, "long", "while", STEPS);
    small_disk_unmount(run_path(&fixture, "while"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(broken_folder),
        cmocka_unit_test(damaged_after_it_was_complete),
        cmocka_unit_test(no_such_checkpoint),
        cmocka_unit_test(no_checkpoint_can_be_written),
        cmocka_unit_test(a_stop_that_can_not_save),
        cmocka_unit_test(full_disk),
        cmocka_unit_test(full_for_a_while),
    };
    return cmocka_run_group_tests_name("run_checkpoints", tests, open_all, close_all);
}
