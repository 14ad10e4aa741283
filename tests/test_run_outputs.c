// Where commands write: a place that can not be written is refused before their work. Each command line has a second
// fault, which only that work would find.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "tests/support/run_fixture.h"
#include "trainer/files.h"

static struct run_fixture fixture;

static int open_all(void **state)
{
    (void)state;
    run_fixture_open(&fixture);
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    run_fixture_close(&fixture);
    return 0;
}

// A command with its option for what it writes; the words before that end with the second fault.
static const struct writer {
    const char *option;
    bool config, replaces; // with --config; by way of a file beside
    const char *words[6];
} writers[] = {
    {"--out", true, true, {"trace", "--checkpoint", "nowhere"}},
    {"--out", false, true, {"vocab", "nowhere.h5", "--size", "4"}},
    {"--out", false, true, {"data", "manifest", "nowhere.h5"}},
    {"--blocks", true, false, {"eval", "--set", "data.val=[val.h5]", "--checkpoint", "nowhere"}},
};

static int write_to(const struct writer *writer, const char *place)
{
    const char *words[12];
    int count = 0;
    for (int i = 0; i < 6 && writer->words[i] != NULL; i++)
        words[count++] = writer->words[i];
    if (writer->config) {
        words[count++] = "--config";
        words[count++] = run_path(&fixture, "run.yaml");
    }
    words[count++] = writer->option;
    words[count++] = place;
    words[count] = NULL;
    return program_run(run_path(&fixture, "out.out"), words);
}

static void must_refuse(const struct writer *writer, const char *place, const char *says)
{
    int status = write_to(writer, place);
    char *words = memory_format("%s: %s", writer->option, says);
    if (status != 2)
        fail_msg("%s: status %d, where '%s' is expected", writer->words[0], status, words);
    run_must_say(&fixture, "out", words);
    assert_false(run_says(&fixture, "out", "nowhere"));
    free(words);
}

static void places_of_files_are_checked_first(void **state)
{
    (void)state;
    char *missing = memory_strdup(run_path(&fixture, "no/such/file"));
    for (size_t i = 0; i < sizeof(writers) / sizeof(*writers); i++) {
        must_refuse(&writers[i], fixture.folder, fixture.folder);
        run_must_say(&fixture, "out", "is a folder; name a file");
        must_refuse(&writers[i], missing, missing);
        run_must_say(&fixture, "out", "no/such; make it first");
        must_refuse(&writers[i], "/proc/file", "/proc: no file can be created here");
        must_refuse(&writers[i], "new/", "new/: is a folder");
        if (writers[i].replaces)
            must_refuse(&writers[i], "/dev/null", "/dev/null: is not a plain file");
        else
            assert_int_equal(write_to(&writers[i], "/dev/null"), 1);
        // What can be written is left alone.
        assert_true(write_to(&writers[i], run_path(&fixture, "file")) > 0);
        run_must_say(&fixture, "out", "nowhere");
        assert_false(files_exists(run_path(&fixture, "file")));
    }
    free(missing);
}

static int export_to(const char *place)
{
    return run_command(&fixture, "out", false, "export", "--checkpoint", "nowhere", "--format",
                       "zlab", "--out", place, NULL);
}

static void places_of_exports_are_checked_first(void **state)
{
    (void)state;
    char *folder = memory_strdup(run_path(&fixture, "taken"));
    struct error err = {""};
    assert_int_equal(export_to("/proc/drafter"), 2);
    run_must_say(&fixture, "out", "--out: /proc: no file can be created here");
    assert_int_equal(export_to(run_path(&fixture, "run.yaml")), 2);
    run_must_say(&fixture, "out", "run.yaml: is not a folder");
    assert_int_equal(files_make_folder(folder, &err), 0);
    assert_int_equal(files_write_text(run_path(&fixture, "taken/config.json"), "{}", &err), 0);
    assert_int_equal(export_to(folder), 2);
    run_must_say(&fixture, "out", "taken/config.json: exists already");
    assert_int_equal(export_to(run_path(&fixture, "new/drafter")), 1);
    run_must_say(&fixture, "out", "nowhere");
    assert_false(files_exists(run_path(&fixture, "new")));
    free(folder);
}

static int sweep_to(const char *place, const char *more)
{
    char *dir = memory_format("run.dir=%s", place);
    int status = run_command(&fixture, "out", true, "sweep", "--grid", "layers=1,2", "--set", dir,
                             "--device-memory", "5", more, NULL);
    free(dir);
    return status;
}

// Which nothing is written to by --plan-only.
static void the_place_of_a_sweep_is_checked_first(void **state)
{
    (void)state;
    assert_int_equal(sweep_to("/proc/sweep", NULL), 2);
    run_must_say(&fixture, "out", "run.dir: /proc: no file can be created here");
    assert_int_equal(sweep_to(run_path(&fixture, "run.yaml/sweep"), NULL), 2);
    run_must_say(&fixture, "out", "run.yaml: is not a folder");
    assert_int_equal(sweep_to("/proc/sweep", "--plan-only"), 2);
    run_must_say(&fixture, "out", "can not be planned");
}

// As after `--out *.h5`.
static void no_shard_is_written_over(void **state)
{
    (void)state;
    struct error err = {""};
    uint32_t before, after;
    char *shard = memory_strdup(run_path(&fixture, "train.h5"));
    assert_int_equal(files_crc32c(shard, &before, &err), 0);
    for (size_t i = 0; i < sizeof(writers) / sizeof(*writers); i++) {
        must_refuse(&writers[i], shard, shard);
        run_must_say(&fixture, "out", "train.h5: is there and holds HDF5 data");
    }
    assert_int_equal(
        run_command(&fixture, "out", false, "data", "manifest", "--out", shard, shard, NULL), 2);
    assert_int_equal(
        run_command(&fixture, "out", false, "vocab", "--size", "4", "--out", shard, shard, NULL),
        2);
    assert_int_equal(files_crc32c(shard, &after, &err), 0);
    assert_int_equal(after, before);
    free(shard);
}

// What does not fit fails, with the status of what was begun, and leaves nothing.
static void what_does_not_fit_is_an_error(void **state)
{
    (void)state;
    char *manifest = memory_strdup(run_path(&fixture, "small/manifest.h5"));
    char *map = memory_strdup(run_path(&fixture, "small/map.safetensors"));
    struct rlimit limit;
    struct error err = {""};
    assert_int_equal(files_make_folder(run_path(&fixture, "small"), &err), 0);
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    for (rlim_t most = 512; most <= 4096; most *= 2) {
        struct rlimit lower = {most, limit.rlim_max};
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &lower), 0);
        int status = run_command(&fixture, "out", false, "data", "manifest", "--out", manifest,
                                 run_path(&fixture, "train.h5"), NULL);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        assert_int_equal(status, 1);
        run_must_say(&fixture, "out", "manifest.h5: can not be written: File too large");
        assert_int_equal(rmdir(run_path(&fixture, "small")), 0);
        assert_int_equal(files_make_folder(run_path(&fixture, "small"), &err), 0);
    }
    struct program program = {.file_limit = 512};
    const char *words[] = {"vocab", "--size", "32", "--out", map, run_path(&fixture, "train.h5"),
                           NULL};
    program_start(&program, run_path(&fixture, "out.out"), words);
    assert_int_equal(program_wait(&program, 120.0), 1);
    run_must_say(&fixture, "out", "--out: ");
    assert_int_equal(rmdir(run_path(&fixture, "small")), 0);
    free(map);
    free(manifest);
}

// Before the shards, of which verdicts are written.
static void the_target_of_a_check_is_opened_first(void **state)
{
    (void)state;
    assert_int_equal(run_command(&fixture, "out", false, "data", "check", "--target", "nowhere",
                                 run_path(&fixture, "train.h5"), NULL),
                     2);
    run_must_say(&fixture, "out", "--target: nowhere/config.json");
    assert_false(files_exists(run_path(&fixture, "train.h5.verdict.json")));
}

// With --raw's folder of links, too, which a checkpoint with a moving average needs.
static int export_small(const char *out, const char *raw)
{
    const char *words[] = {"export",
                           "--checkpoint",
                           run_checkpoint(&fixture, "run", RUN_STEPS),
                           "--format",
                           "zlab",
                           "--out",
                           out,
                           raw,
                           NULL};
    struct program program = {.file_limit = 2048};
    program_start(&program, run_path(&fixture, "out.out"), words);
    return program_wait(&program, 120.0);
}

// It takes away what it has made, and nothing else.
static void a_failed_export_leaves_no_folder(void **state)
{
    (void)state;
    static const char *const raws[] = {NULL, "--raw"};
    char *there = memory_strdup(run_path(&fixture, "there"));
    char *new = memory_format("%s/new", there), *deep = memory_format("%s/a//b/", new);
    char *other = memory_format("%s/other", there);
    struct error err = {""};
    assert_int_equal(run_train(&fixture, "run", "--set", "optimizer.ema=0.5", NULL), 0);
    assert_int_equal(files_make_folder(there, &err), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(export_small(deep, raws[i]), 1);
        run_must_say(&fixture, "out", "File too large");
        assert_false(files_exists(new));
        assert_int_equal(export_small(there, raws[i]), 1); // also while it is empty
        assert_true(files_is_folder(there));
        assert_int_equal(files_write_text(other, "a", &err), 0);
        assert_int_equal(export_small(there, raws[i]), 1);
        assert_int_equal(unlink(other), 0);
        assert_int_equal(rmdir(there), 0); // nothing else is in it
        assert_int_equal(files_make_folder(there, &err), 0);
    }
    free(other);
    free(deep);
    free(new);
    free(there);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(places_of_files_are_checked_first),
        cmocka_unit_test(places_of_exports_are_checked_first),
        cmocka_unit_test(the_place_of_a_sweep_is_checked_first),
        cmocka_unit_test(no_shard_is_written_over),
        cmocka_unit_test(what_does_not_fit_is_an_error),
        cmocka_unit_test(the_target_of_a_check_is_opened_first),
        cmocka_unit_test(a_failed_export_leaves_no_folder),
    };
    return cmocka_run_group_tests_name("run_outputs", tests, open_all, close_all);
}
