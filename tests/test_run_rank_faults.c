// What goes wrong on one of two ranks is the same for both, through the real program under mpirun: gradients
// that are not finite (case C12), bad documents, damaged checkpoints and full disks (C7), signals (C6).
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "base/timer.h"
#include "tests/support/run_fixture.h"
#include "tests/support/shard_edit.h"
#include "tests/support/small_disk.h"
#include "trainer/commands.h"
#include "trainer/files.h"

enum { LIMIT = 120, OWN_SETS = 2, TRIES = 5, RANKS = 2 };
// A signal is held for half a second: a run of few steps would be over.
enum { LONG_STEPS = 600, SIGNALLED = 8 };

static struct run_fixture fixture;

static int open_all(void **state)
{
    (void)state;
    run_fixture_open(&fixture);
    run_fixture_set(&fixture, "data.rows_per_step=3");
    run_fixture_set(&fixture, "drafter.intermediate_size=1024"); // files large enough to be cut
    fixture.ranks = RANKS;
    int status = run_train(&fixture, "whole", NULL);
    if (status != 0)
        run_must_say(&fixture, "whole", "done: 20 steps");
    return status;
}

static int forget(void **state)
{
    (void)state;
    struct fixture_options train = run_train_shard();
    fixture.set_count = OWN_SETS;
    fixture.ranks = RANKS;
    fixture_shard(run_path(&fixture, "train.h5"), &train);
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    run_fixture_close(&fixture);
    return 0;
}

// ---- bad numbers ---------------------------------------------------------------------------------

// Document 17's values in a shard like that of training; nan: one value of it is none.
static uint64_t write_bad_document(const char *file, bool nan)
{
    enum { DOCUMENT = 17 };
    struct fixture_options options = run_train_shard();
    struct fixture shard;
    options.crc = !nan;
    fixture_make(&shard, &options);
    uint64_t id = shard.doc_ids[DOCUMENT];
    if (nan)
        fixture_hidden(&shard, shard.doc_offsets[DOCUMENT] + 3, 1)[2] = 0x7fc0;
    else
        fixture_overflow(&shard, DOCUMENT);
    fixture_write(&shard, run_path(&fixture, "%s", file));
    fixture_release(&shard);
    return id;
}

static void nonfinite_steps_are_skipped_by_all(void **state)
{
    (void)state;
    char id[32];
    snprintf(id, sizeof(id), " %llu", (unsigned long long)write_bad_document("train.h5", false));
    run_fixture_set(&fixture, "drafter.init_std=0.5");
    run_fixture_set(&fixture, "checkpoint.every=1");
    assert_int_equal(run_train(&fixture, "overflow-2", NULL), 0);
    fixture.ranks = 0;
    assert_int_equal(run_train(&fixture, "overflow-1", NULL), 0);
    cJSON *metrics = program_metrics(run_path(&fixture, "overflow-2"));
    const cJSON *line;
    int skipped = 0;
    cJSON_ArrayForEach(line, metrics)
    {
        int64_t step = (int64_t)program_number(line, "step");
        bool skip = cJSON_IsTrue(cJSON_GetObjectItem(line, "skipped"));
        skipped += skip;
        if (skip && step > 1)
            assert_true(program_same_state(run_checkpoint(&fixture, "overflow-2", step - 1),
                                           run_checkpoint(&fixture, "overflow-2", step)));
        assert_true(run_state_number(&fixture, "overflow-2", step, "skipped_nonfinite") == skipped);
        assert_true(run_state_number(&fixture, "overflow-1", step, "skipped_nonfinite") == skipped);
    }
    cJSON_Delete(metrics);
    assert_true(skipped >= 1 && skipped <= 6);
    // The rank is named, and only documents of its rows.
    run_must_say(&fixture, "overflow-2", "is not finite on rank ");
    run_must_say(&fixture, "overflow-2", id);
    assert_true(program_state_distance(run_checkpoint(&fixture, "overflow-1", RUN_STEPS),
                                       run_checkpoint(&fixture, "overflow-2", RUN_STEPS),
                                       "master") <= 1e-6);
}

static void bad_documents_are_counted_by_all(void **state)
{
    (void)state;
    write_bad_document("train.h5", true);
    run_fixture_set(&fixture, "data.on_bad_sample=skip");
    run_fixture_set(&fixture, "data.max_bad_fraction=0.5");
    assert_int_equal(run_train(&fixture, "skip-2", NULL), 0);
    fixture.ranks = 0;
    assert_int_equal(run_train(&fixture, "skip-1", NULL), 0);
    double bad = run_state_number(&fixture, "skip-1", RUN_STEPS, "bad_documents");
    assert_true(bad > 0.0);
    assert_true(run_state_number(&fixture, "skip-2", RUN_STEPS, "bad_documents") == bad);
    run_must_say(&fixture, "skip-2", "left out: ");
}

static void a_bad_document_ends_all(void **state)
{
    (void)state;
    write_bad_document("train.h5", true);
    run_fixture_set(&fixture, "data.on_bad_sample=fail");
    double begin = timer_now();
    assert_int_equal(run_train(&fixture, "fail-2", NULL), 1);
    assert_true(timer_now() - begin < 30.0);
    run_must_say(&fixture, "fail-2", "train.h5");
    run_must_say(&fixture, "fail-2", "document 17");
}

// The average has taken the weights' place by then: the others wait for scores, not for weights.
static void a_bad_validation_document_ends_all(void **state)
{
    (void)state;
    write_bad_document("bad-val.h5", true);
    run_fixture_set(&fixture, "data.val=[bad-val.h5]");
    run_fixture_set(&fixture, "validation.every=5");
    run_fixture_set(&fixture, "validation.rows=32");
    run_fixture_set(&fixture, "optimizer.ema=0.5");
    run_fixture_set(&fixture, "data.on_bad_sample=fail");
    double begin = timer_now();
    assert_int_equal(run_train(&fixture, "fail-val", NULL), 1);
    assert_true(timer_now() - begin < 30.0);
    run_must_say(&fixture, "fail-val", "bad-val.h5");
    run_must_say(&fixture, "fail-val", "document 17");
}

// ---- checkpoints ---------------------------------------------------------------------------------

static const char *in_step(const char *run, int64_t step, const char *file)
{
    return run_path(&fixture, "%s/checkpoints/step-%08lld/%s", run, (long long)step, file);
}

// The first steps of the whole run, to be damaged.
static void copy_run(const char *name)
{
    char *command = memory_format("cp -r %s %s && rm -r %s/checkpoints/step-00000016 "
                                  "%s/checkpoints/step-00000020",
                                  run_path(&fixture, "whole"), run_path(&fixture, "%s", name),
                                  run_path(&fixture, "%s", name), run_path(&fixture, "%s", name));
    if (system(command) != 0)
        fail_msg("%s", command);
    free(command);
}

static void broken_folder(void **state)
{
    (void)state;
    const char *part = "master-00002-of-00002.safetensors";
    copy_run("broken");
    edit_cut(in_step("broken", 8, part), files_size(in_step("broken", 8, part)) / 2);
    assert_int_equal(remove(in_step("broken", 8, "DONE")), 0);
    const char *begun = run_path(&fixture, "broken/checkpoints/.tmp-step-00000012-1");
    assert_int_equal(rename(run_checkpoint(&fixture, "broken", 12), begun), 0);
    assert_int_equal(
        run_train(&fixture, "broken", "--resume", run_checkpoint(&fixture, "broken", 8), NULL), 1);
    run_must_say(&fixture, "broken", in_step("broken", 8, part));
    assert_int_equal(run_train(&fixture, "broken", NULL), 0);
    run_must_say(&fixture, "broken", "not finished: .tmp-step-00000012-1, step-00000008\n");
    run_must_say(&fixture, "broken", "/checkpoints/step-00000004");
    run_must_equal(&fixture, "whole", "broken", RUN_STEPS);
}

// Of a checkpoint that is called complete: a part that is cut, one that is gone, one that can not be read.
static void unreadable_parts(void **state)
{
    (void)state;
    const char *part = in_step("damaged", 12, "adam_v-00001-of-00002.safetensors");
    copy_run("damaged");
    edit_byte(part, 3, 0xff); // the header's length
    assert_int_equal(run_train(&fixture, "damaged", NULL), 1);
    run_must_say(&fixture, "damaged", part);
    edit_cut(part, files_size(part) / 2);
    assert_int_equal(run_train(&fixture, "damaged", NULL), 1);
    run_must_say(&fixture, "damaged", part);
    assert_int_equal(remove(part), 0);
    assert_int_equal(run_train(&fixture, "damaged", NULL), 1);
    run_must_say(&fixture, "damaged", part);
    assert_int_equal(
        run_train(&fixture, "damaged", "--resume", run_checkpoint(&fixture, "damaged", 8), NULL),
        0);
    run_must_equal(&fixture, "whole", "damaged", RUN_STEPS);
}

static void full_disk(void **state)
{
    (void)state;
    small_disk_mount(run_path(&fixture, "full"));
    run_fixture_set(&fixture, "checkpoint.background=true");
    assert_int_equal(run_train(&fixture, "full", NULL), 1);
    run_must_say(&fixture, "full", "could not be written; the run goes on");
    run_must_say(&fixture, "full", "No space left on device");
    assert_int_equal(program_step(run_path(&fixture, "full")), RUN_STEPS);
    assert_int_equal(program_checkpoint(run_path(&fixture, "full")), 4);
    small_disk_enlarge(run_path(&fixture, "full"));
    assert_int_equal(run_train(&fixture, "full", NULL), 0);
    run_must_say(&fixture, "full", "/checkpoints/step-00000004");
    run_must_equal(&fixture, "whole", "full", RUN_STEPS);
    small_disk_unmount(run_path(&fixture, "full"));
}

// ---- signals -------------------------------------------------------------------------------------

// Waits until the program has ranks, then signals one.
static void signal_rank(const struct program *program, int rank, int signal_number)
{
    pid_t pids[RANKS];
    if (program_ranks(program, pids, RANKS) == RANKS)
        kill(pids[rank], signal_number);
}

// Steps are to be many, not long.
static void set_long(void)
{
    run_fixture_set(&fixture, "run.epochs=1000");
    run_fixture_set(&fixture, "run.max_steps=600");
    run_fixture_set(&fixture, "checkpoint.every=200");
    run_fixture_set(&fixture, "drafter.intermediate_size=64");
}

static void stop_and_continue(const char *name, int rank, int signal_number)
{
    int64_t stopped = LONG_STEPS;
    set_long();
    assert_int_equal(run_train(&fixture, "long", NULL), 0); // the second time nothing is left to do
    for (int try = 0; try < TRIES && stopped == LONG_STEPS; try++) {
        struct program program = {0};
        fixture_folder_remove(memory_strdup(run_path(&fixture, "%s", name)));
        run_train_start(&fixture, &program, name, NULL);
        program_wait_step(&program, run_path(&fixture, "%s", name), SIGNALLED, LIMIT);
        signal_rank(&program, rank, signal_number);
        double begin = timer_now();
        int status = program_wait(&program, LIMIT);
        stopped = program_step(run_path(&fixture, "%s", name));
        if (stopped < LONG_STEPS) {
            assert_int_equal(status, 75);
            assert_true(timer_now() - begin < 10.0);
        }
    }
    assert_true(stopped >= SIGNALLED && stopped < LONG_STEPS);
    assert_int_equal(program_checkpoint(run_path(&fixture, "%s", name)), stopped);
    run_must_say(&fixture, name, "stopping at step");
    assert_int_equal(run_train(&fixture, name, NULL), 0);
    run_must_equal(&fixture, "long", name, LONG_STEPS);
}

static void sigterm_to_rank_0(void **state)
{
    (void)state;
    stop_and_continue("term-0", 0, SIGTERM);
}

static void sigusr1_to_rank_1(void **state)
{
    (void)state;
    stop_and_continue("usr-1", 1, SIGUSR1);
}

// While the first is held, unless this machine slept in between: then the run has stopped in good order.
static void a_second_signal_ends_all_at_once(void **state)
{
    (void)state;
    int status = EXIT_STOPPED;
    set_long();
    for (int try = 0; try < TRIES && status == EXIT_STOPPED; try++) {
        struct program program = {0};
        run_remove(&fixture, "twice");
        run_train_start(&fixture, &program, "twice", NULL);
        program_wait_step(&program, run_path(&fixture, "twice"), SIGNALLED, LIMIT);
        signal_rank(&program, 1, SIGINT);
        run_sleep(0.2);
        signal_rank(&program, 1, SIGINT);
        double begin = timer_now();
        status = program_wait(&program, LIMIT);
        assert_true(timer_now() - begin < 10.0);
    }
    assert_true(status != 0 && status != EXIT_STOPPED);
    run_must_say(&fixture, "twice", "rank 1 (");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(nonfinite_steps_are_skipped_by_all, forget),
        cmocka_unit_test_setup(bad_documents_are_counted_by_all, forget),
        cmocka_unit_test_setup(a_bad_document_ends_all, forget),
        cmocka_unit_test_setup(a_bad_validation_document_ends_all, forget),
        cmocka_unit_test_setup(broken_folder, forget),
        cmocka_unit_test_setup(unreadable_parts, forget),
        cmocka_unit_test_setup(sigterm_to_rank_0, forget),
        cmocka_unit_test_setup(sigusr1_to_rank_1, forget),
        cmocka_unit_test_setup(a_second_signal_ends_all_at_once, forget),
        cmocka_unit_test_setup(full_disk, forget),
    };
    if (!program_has_ranks()) {
        print_message("skipped: no mpirun, or a build without MPI\n");
        return 77;
    }
    return cmocka_run_group_tests(tests, open_all, close_all);
}
