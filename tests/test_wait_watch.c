// The warning that steps wait for data: when it comes, which part it names, that it does not come again at
// once, and that it ends. Then a run whose reads are slow, by a pread of this test's own.
#include "trainer/wait_watch.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/log.h"
#include "tests/support/report_fixture.h"
#include "tests/support/run_fixture.h"
#include "trainer/commands.h"
#include "trainer/files.h"

static char *folder, *log_path; // of one test

static int open_test(void **state)
{
    (void)state;
    folder = fixture_folder();
    log_path = fixture_path(folder, "log.txt");
    return log_file_set(log_path);
}

static int close_test(void **state)
{
    (void)state;
    log_file_set(NULL);
    free(log_path);
    fixture_folder_remove(folder);
    return 0;
}

static void must_say(const char *words)
{
    char *text = program_text(log_path);
    if (strstr(text, words) == NULL)
        fail_msg("'%s' is not in:\n%s", words, text);
    free(text);
}

// A step of one second that reads 2 GB; four reader threads.
static struct step_report step_waiting(double wait)
{
    static struct metrics metrics;
    struct step_report report = report_step_of(&metrics, 1);
    report.seconds = 1.0;
    report.wait_seconds = wait;
    report.copy_seconds = 0.0;
    report.read_bytes = 2e9;
    report.read_seconds = 1.0;
    report.disk_seconds = 0.5;
    return report;
}

static void feed(struct wait_watch *watch, const struct step_report *report, int steps)
{
    for (int i = 0; i < steps; i++)
        wait_watch_step(watch, report);
}

// ---- when ----------------------------------------------------------------------------------------

static void a_run_that_seldom_waits_is_told_nothing(void **state)
{
    (void)state;
    struct wait_watch watch = {0};
    struct step_report report = step_waiting(0.049);
    feed(&watch, &report, 1000);
    assert_int_equal(program_count(log_path, "waited for data"), 0);
    assert_int_equal(program_count(log_path, "no longer"), 0);
}

static void the_first_step_does_not_count(void **state)
{
    (void)state;
    struct wait_watch watch = {0};
    struct step_report first = step_waiting(0.0), report = step_waiting(0.0);
    first.seconds = first.wait_seconds = 100.0;
    feed(&watch, &first, 1);
    feed(&watch, &report, 100);
    assert_int_equal(program_count(log_path, "waited for data"), 0);
}

static void a_window_is_twenty_steps_and_ten_seconds(void **state)
{
    (void)state;
    struct wait_watch watch = {0};
    struct step_report report = step_waiting(0.5);
    feed(&watch, &report, 20);
    assert_int_equal(program_count(log_path, "waited for data"), 0);
    feed(&watch, &report, 1);
    assert_int_equal(
        program_count(log_path, "the GPU waited for data 50 % of the last 20 steps (20 s)"), 1);
    struct wait_watch fast = {0};
    report.seconds = 0.1;
    report.wait_seconds = 0.05;
    feed(&fast, &report, 99);
    assert_int_equal(program_count(log_path, "waited for data"), 1);
    feed(&fast, &report, 5);
    assert_int_equal(program_count(log_path, "waited for data"), 2);
}

static void it_is_said_again_after_ten_minutes_and_once_that_it_is_over(void **state)
{
    (void)state;
    struct wait_watch watch = {0};
    struct step_report late = step_waiting(0.5), fine = step_waiting(0.01);
    feed(&watch, &late, 1 + 600);
    assert_int_equal(program_count(log_path, "waited for data"), 1);
    feed(&watch, &late, 20);
    assert_int_equal(program_count(log_path, "waited for data"), 2);
    feed(&watch, &fine, 200);
    assert_int_equal(program_count(log_path, "waits for data no longer: 1.0 %"), 1);
    feed(&watch, &late, 200); // again within ten minutes
    feed(&watch, &fine, 20);
    assert_int_equal(program_count(log_path, "waited for data"), 2);
    assert_int_equal(program_count(log_path, "no longer"), 1);
    feed(&watch, &late, 400);
    assert_int_equal(program_count(log_path, "waited for data"), 3);
}

// ---- which part ----------------------------------------------------------------------------------

static void slow_disks_are_named_with_rates(void **state)
{
    (void)state;
    struct wait_watch watch = {0};
    struct step_report report = step_waiting(0.5);
    report.read_seconds = 3.9;
    report.disk_seconds = 3.5;
    feed(&watch, &report, 21);
    must_say("reading from disk (2 GB/s come, 4 GB/s are needed; the 4 reader threads spend 90 %");
    must_say("data.readers");
}

static void checks_that_take_long_are_named(void **state)
{
    (void)state;
    struct wait_watch watch = {0};
    struct step_report report = step_waiting(0.5);
    report.read_seconds = 3.9;
    report.disk_seconds = 1.0;
    feed(&watch, &report, 21);
    must_say("checking values and CRC of what was read");
    must_say("data.check_crc");
}

static void idle_readers_are_named(void **state)
{
    (void)state;
    struct wait_watch watch = {0};
    struct step_report report = step_waiting(0.5);
    feed(&watch, &report, 21);
    must_say("rows that are read too late");
    must_say("busy only 25 % of the time");
    must_say("data.prefetch_rows");
}

static void copies_are_named(void **state)
{
    (void)state;
    struct wait_watch watch = {0};
    struct step_report report = step_waiting(0.1);
    report.copy_seconds = 0.3;
    feed(&watch, &report, 21);
    must_say("the GPU waited for data 40 %");
    must_say("copying rows to the GPU");
}

static void an_extractor_is_named(void **state)
{
    (void)state;
    struct wait_watch watch = {0};
    struct step_report report = step_waiting(0.5);
    report.spool = true;
    report.spool_wait_seconds = 0.4;
    feed(&watch, &report, 21);
    must_say("the extractor that fills data.spool (2 GB/s come, 4 GB/s are needed)");
    struct wait_watch other = {0};
    report.spool_wait_seconds = 0.0; // the features were there
    feed(&other, &report, 21);
    must_say("rows that are read too late");
}

// ---- a run ---------------------------------------------------------------------------------------

static double slowness; // seconds that a read of features takes more

ssize_t __wrap_pread(int fd, void *buffer, size_t size, off_t offset);
ssize_t __real_pread(int fd, void *buffer, size_t size, off_t offset);
ssize_t __wrap_pread(int fd, void *buffer, size_t size, off_t offset)
{
    struct timespec pause = {(time_t)slowness, (long)(1e9 * (slowness - (double)(time_t)slowness))};
    if (slowness > 0.0 && size >= 512)
        nanosleep(&pause, NULL);
    return __real_pread(fd, buffer, size, offset);
}

// Trains in this process. Returns the exit status.
static int train(const struct run_fixture *fixture, const char *name, const char *steps)
{
    char *dir = memory_format("run.dir=%s", run_path(fixture, "%s", name));
    char *config = memory_strdup(run_path(fixture, "run.yaml"));
    const char *sets[] = {dir, steps, "run.epochs=4000", "data.readers=1", "checkpoint.every=0"};
    struct options options = {.config = config,
                              .sets = sets,
                              .set_count = sizeof(sets) / sizeof(*sets),
                              .resume = "none",
                              .command = "test"};
    int status = command_train(&options);
    free(config);
    free(dir);
    return status;
}

static void a_run_with_slow_reads_says_so(void **state)
{
    (void)state;
    struct run_fixture fixture;
    run_fixture_open(&fixture);
    slowness = 0.12;
    assert_int_equal(train(&fixture, "slow", "run.max_steps=24"), EXIT_DONE);
    slowness = 0.0;
    assert_true(program_says(run_path(&fixture, "slow/log.txt"), "the CPU waited for data"));
    assert_true(program_says(run_path(&fixture, "slow/log.txt"), "reading from disk"));
    cJSON *metrics = program_metrics(run_path(&fixture, "slow"));
    const cJSON *line = program_line(metrics, 20, "loss");
    double seconds = program_number(line, "seconds");
    assert_true(program_number(line, "wait_seconds") > 0.5 * seconds);
    assert_true(program_number(line, "disk_seconds") > 0.5 * seconds);
    cJSON_Delete(metrics);
    run_fixture_close(&fixture);
}

static void a_run_with_fast_reads_does_not(void **state)
{
    (void)state;
    struct run_fixture fixture;
    run_fixture_open(&fixture);
    assert_int_equal(train(&fixture, "fast", "run.max_steps=60"), EXIT_DONE);
    assert_false(program_says(run_path(&fixture, "fast/log.txt"), "waited for data"));
    run_fixture_close(&fixture);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_test, close_test)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_run_that_seldom_waits_is_told_nothing),
        TEST(the_first_step_does_not_count),
        TEST(a_window_is_twenty_steps_and_ten_seconds),
        TEST(it_is_said_again_after_ten_minutes_and_once_that_it_is_over),
        TEST(slow_disks_are_named_with_rates),
        TEST(checks_that_take_long_are_named),
        TEST(idle_readers_are_named),
        TEST(copies_are_named),
        TEST(an_extractor_is_named),
        cmocka_unit_test(a_run_with_slow_reads_says_so),
        cmocka_unit_test(a_run_with_fast_reads_does_not),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
