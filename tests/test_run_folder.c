// The run folder: one process at a time, lines of metrics that survive kills and resumes, progress.
#include "trainer/run_folder.h"

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "base/log.h"
#include "tests/support/report_fixture.h"
#include "tests/support/shard_fixture.h"
#include "trainer/files.h"

static char *folder; // of one test

static int open_test(void **state)
{
    (void)state;
    folder = fixture_folder();
    return 0;
}

static int close_test(void **state)
{
    (void)state;
    fixture_folder_remove(folder);
    return 0;
}

// ---- helpers -------------------------------------------------------------------------------------

static void open_run(struct run_folder *run, int64_t step, bool tensorboard)
{
    struct error err = {""};
    struct counters resumed = {.step = step, .last_validation = step};
    if (run_folder_open(run, folder, &err) != 0 ||
        run_folder_start(run, step > 0 ? &resumed : NULL, tensorboard, &err) != 0)
        fail_msg("%s", err.text);
}

static void write_text(const char *name, const char *text)
{
    struct error err = {""};
    char *path = fixture_path(folder, name);
    if (files_write_text(path, text, &err) != 0)
        fail_msg("%s", err.text);
    free(path);
}

// Line `n` of metrics.jsonl; NULL: there are fewer.
static cJSON *metrics_line(int n)
{
    char *text = fixture_text(folder, "metrics.jsonl"), *rest = NULL;
    char *line = strtok_r(text, "\n", &rest);
    for (; n > 0 && line != NULL; n--)
        line = strtok_r(NULL, "\n", &rest);
    cJSON *object = line != NULL ? cJSON_Parse(line) : NULL;
    free(text);
    return object;
}

static void assert_member(const cJSON *object, const char *name, const char *wanted)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    char *text = item != NULL ? cJSON_PrintUnformatted(item) : NULL;
    if (text == NULL || strcmp(text, wanted) != 0)
        fail_msg("%s is %s, wanted %s", name, text != NULL ? text : "absent", wanted);
    free(text);
}

static void assert_steps(const int *steps, int count)
{
    for (int i = 0; i <= count; i++) {
        cJSON *line = metrics_line(i);
        if (i == count)
            assert_null(line);
        else
            assert_int_equal(cJSON_GetObjectItem(line, "step")->valueint, steps[i]);
        cJSON_Delete(line);
    }
}

// ---- lock ----------------------------------------------------------------------------------------

static void a_second_run_is_refused_with_the_holder_named(void **state)
{
    (void)state;
    struct run_folder run, second;
    struct error err = {""};
    assert_int_equal(run_folder_open(&run, folder, &err), 0);
    assert_int_equal(run_folder_open(&second, folder, &err), -1);
    char holder[64];
    snprintf(holder, sizeof(holder), "process %ld on ", (long)getpid());
    assert_non_null(strstr(err.text, holder));
    assert_non_null(strstr(err.text, folder));
    run_folder_close(&second);
    run_folder_close(&run);
    assert_int_equal(run_folder_open(&run, folder, &err), 0);
    run_folder_close(&run);
}

static void a_killed_run_leaves_no_lock(void **state)
{
    (void)state;
    int ready[2];
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    struct run_folder run;
    struct error err = {""};
    if (child == 0) {
        char byte = run_folder_open(&run, folder, &err) == 0 ? 'y' : 'n';
        if (write(ready[1], &byte, 1) == 1)
            pause();
        _exit(1);
    }
    char byte = 0;
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(byte, 'y');
    assert_int_equal(run_folder_open(&run, folder, &err), -1);
    run_folder_close(&run);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    assert_int_equal(run_folder_open(&run, folder, &err), 0);
    run_folder_close(&run);
    close(ready[0]);
    close(ready[1]);
}

static void folders_are_made_and_messages_logged(void **state)
{
    (void)state;
    char *deep = fixture_path(folder, "a/b/run");
    struct run_folder run;
    struct error err = {""};
    assert_int_equal(run_folder_open(&run, deep, &err), 0);
    assert_true(files_is_folder(run.checkpoints));
    log_warn("a message %d", 17);
    run_folder_close(&run);
    char *text = fixture_text(folder, "a/b/run/log.txt");
    assert_non_null(strstr(text, "a message 17"));
    free(text);
    free(deep);
}

// ---- metrics.jsonl -------------------------------------------------------------------------------

static void a_step_says_everything_by_name(void **state)
{
    (void)state;
    static const char *const fields[][2] = {
        {"step", "3"},
        {"epoch", "1"},
        {"loss", "1.5"},
        {"loss_kl", "0.75"},
        {"loss_tv", "0.25"},
        {"accept_len", "2.5"},
        {"eal_marginal", "1.125"},
        {"acc", "[null,0.75,0.5,null]"},
        {"overlap", "0.25"},
        {"lr", "0.0001"},
        {"grad_norm", "0.1"},
        {"clip_factor", "1"},
        {"skipped", "false"},
        {"rows", "2"},
        {"tokens", "5000000000"},
        {"supervised_share", "0.5"},
        {"coverage", "0.5"},
        {"anchors", "4"},
        {"valid_anchors", "9"},
        {"slots", "8"},
        {"weight", "4"},
        {"bad_documents", "1"},
        {"seconds", "2"},
        {"wait_seconds", "0.5"},
        {"read_seconds", "4"},
        {"disk_seconds", "3"},
        {"copy_seconds", "0.125"},
        {"forward_seconds", "0"},
        {"loss_seconds", "0"},
        {"backward_seconds", "0"},
        {"optimizer_seconds", "0"},
        {"save_seconds", "0"},
        {"tokens_per_second", "2500000000"},
        {"block_rows_per_second", "8"},
        {"wait_share", "0.3125"},
        {"flops", "1000000000000"},
        {"read_bytes", "8000000000"},
        {"read_gb_per_second", "2"},
        {"memory_bytes", "3000000000"},
        {"begin_bytes", "1000000000"},
        {"planned_bytes", "2000000000"},
    };
    enum { FIELDS = sizeof(fields) / sizeof(*fields) };
    struct run_folder run;
    open_run(&run, 0, false);
    report_write_step(&run, 3);
    run_folder_close(&run);
    cJSON *line = metrics_line(0);
    for (int i = 0; i < FIELDS; i++)
        assert_member(line, fields[i][0], fields[i][1]);
    assert_int_equal(cJSON_GetArraySize(line), FIELDS); // loss_js and the like are not there
    cJSON_Delete(line);
}

static void what_is_no_number_is_null(void **state)
{
    (void)state;
    struct run_folder run;
    open_run(&run, 0, true);
    struct metrics empty = {0};
    struct step_report report = report_step_of(&empty, 1);
    report.grad_norm = (double)INFINITY;
    report.skipped = true;
    struct error err = {""};
    assert_int_equal(run_folder_step(&run, &report, 1, &err), 0);
    run_folder_close(&run);
    cJSON *line = metrics_line(0);
    static const char *const names[] = {"loss",    "loss_kl",  "accept_len",       "eal_marginal",
                                        "overlap", "coverage", "supervised_share", "grad_norm"};
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        assert_member(line, names[i], "null");
    assert_member(line, "skipped", "true");
    cJSON_Delete(line);
}

static void losses_normalised_by_count_have_terms_by_count(void **state)
{
    (void)state;
    struct run_folder run;
    open_run(&run, 0, false);
    struct metrics metrics = report_metrics();
    struct step_report report = report_step_of(&metrics, 1);
    report.normalize = NORMALIZE_COUNT;
    struct error err = {""};
    assert_int_equal(run_folder_step(&run, &report, 1, &err), 0);
    run_folder_close(&run);
    cJSON *line = metrics_line(0);
    assert_member(line, "loss", "0.75");
    assert_member(line, "loss_kl", "0.375");
    cJSON_Delete(line);
}

static void a_validation_carries_its_prefix(void **state)
{
    (void)state;
    static const char *const fields[][2] = {
        {"step", "20"},
        {"epoch", "1"},
        {"val_accept_len_walk", "3.25"},
        {"val_accept_len_walk_2", "2.5"},
        {"val_accept_len_walk_5", "null"},
        {"val_walk_blocks", "4"},
        {"val_loss", "1.5"},
        {"val_accept_len", "2.5"},
        {"val_eal_marginal", "1.125"},
        {"val_acc", "[null,0.75,0.5,null]"},
        {"val_overlap", "0.25"},
        {"val_rows", "2"},
        {"val_tokens", "5000000000"},
        {"val_seconds", "1.5"},
        {"val_best", "true"},
    };
    struct run_folder run;
    open_run(&run, 0, false);
    struct metrics metrics = report_metrics();
    struct walk walk = {.blocks = 4.0, .tokens = 13.0};
    walk.draft_blocks[2] = 2.0;
    walk.draft_tokens[2] = 5.0;
    int64_t drafts[] = {2, 5};
    struct config_ints draft_tokens = {drafts, 2};
    struct validation_report report = {.step = 20,
                                       .epoch = 1,
                                       .metrics = &metrics,
                                       .walk = &walk,
                                       .draft_tokens = &draft_tokens,
                                       .normalize = NORMALIZE_WEIGHTED,
                                       .block_size = 4,
                                       .seconds = 1.5,
                                       .best = true};
    struct error err = {""};
    assert_int_equal(run_folder_validation(&run, &report, &err), 0);
    run_folder_close(&run);
    cJSON *line = metrics_line(0);
    for (size_t i = 0; i < sizeof(fields) / sizeof(*fields); i++)
        assert_member(line, fields[i][0], fields[i][1]);
    cJSON_Delete(line);
}

static void a_resume_keeps_whole_lines_up_to_its_step(void **state)
{
    (void)state;
    static const int kept[] = {0, 1, 2, 2, 3}, from_start[] = {1};
    write_text("metrics.jsonl", "{\"step\":0,\"val_loss\":1}\n"
                                "{\"step\":1,\"loss\":1}\n"
                                "{\"step\":2,\"loss\":1}\n"
                                "{\"step\":2,\"val_loss\":1}\n"
                                "{\"step\":3,\"los{\"step\":3,\"loss\":1}\n" // torn, then continued
                                "{\"loss\":1}\n"
                                "{\"step\":3,\"loss\":1}\n"
                                "{\"step\":2,\"loss\":1}"); // torn, or at least without its end
    struct run_folder run;
    open_run(&run, 2, false);
    report_write_step(&run, 3);
    run_folder_close(&run);
    assert_steps(kept, 5);
    open_run(&run, 0, false); // a run that starts has no lines
    report_write_step(&run, 1);
    run_folder_close(&run);
    assert_steps(from_start, 1);
}

static void a_resume_of_everything_changes_nothing(void **state)
{
    (void)state;
    struct run_folder run;
    open_run(&run, 0, false);
    for (int64_t step = 1; step <= 5; step++)
        report_write_step(&run, step);
    run_folder_close(&run);
    char *before = fixture_text(folder, "metrics.jsonl");
    open_run(&run, 5, false);
    run_folder_close(&run);
    char *after = fixture_text(folder, "metrics.jsonl");
    assert_string_equal(before, after);
    free(before);
    free(after);
}

static void a_full_disk_does_not_end_the_run(void **state)
{
    (void)state;
    struct run_folder run;
    open_run(&run, 0, false);
    fclose(run.metrics);
    run.metrics = fopen("/dev/full", "a");
    assert_non_null(run.metrics);
    report_write_step(&run, 1);
    report_write_step(&run, 2);
    assert_true(run.metrics_failed);
    run_folder_close(&run);
}

static void a_line_that_does_not_fit_is_taken_back(void **state)
{
    (void)state;
    static const int steps[] = {1, 3};
    struct run_folder run;
    open_run(&run, 0, false);
    report_write_step(&run, 1);
    char *text = fixture_text(folder, "metrics.jsonl");
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit limit;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    struct rlimit lower = {strlen(text) + 50, limit.rlim_max};
    struct metrics metrics = report_metrics();
    struct step_report report = report_step_of(&metrics, 2);
    struct error err = {""};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &lower), 0);
    int result = run_folder_step(&run, &report, 10, &err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    assert_int_equal(result, -1);
    assert_non_null(strstr(err.text, "metrics.jsonl"));
    report_write_step(&run, 3);
    run_folder_close(&run);
    assert_steps(steps, 2);
    free(text);
}

static void progress_comes_every_so_many_steps_and_at_the_end(void **state)
{
    (void)state;
    struct run_folder run;
    open_run(&run, 0, false);
    run.terminal = false;
    for (int64_t step = 1; step <= 100; step += step < 21 ? 1 : 79)
        report_write_step(&run, step);
    run_folder_close(&run);
    char *text = fixture_text(folder, "log.txt");
    assert_non_null(strstr(text, "step 10/100 "));
    assert_non_null(strstr(text, "step 20/100 "));
    assert_non_null(strstr(text, "step 100/100 "));
    assert_null(strstr(text, "step 1/100 "));
    assert_null(strstr(text, "step 19/100 "));
    assert_non_null(strstr(text, "data wait 31 %"));
    assert_non_null(strstr(text, "ETA 0:03:00")); // 90 steps of 2 s
    free(text);
}

static void write_validation(struct run_folder *run, int64_t step, double seconds)
{
    struct metrics metrics = report_metrics();
    struct walk walk = {.blocks = 4.0, .tokens = 13.0};
    struct config_ints none = {0};
    const struct validation_report report = {.step = step,
                                             .metrics = &metrics,
                                             .walk = &walk,
                                             .draft_tokens = &none,
                                             .normalize = NORMALIZE_WEIGHTED,
                                             .block_size = 4,
                                             .seconds = seconds};
    struct error err = {""};
    assert_int_equal(run_folder_validation(run, &report, &err), 0);
}

static void the_time_left_has_validations_as_they_came(void **state)
{
    (void)state;
    struct run_folder run;
    open_run(&run, 0, false);
    run.terminal = false;
    write_validation(&run, 0, 1000.0);
    for (int64_t step = 1; step <= 10; step++)
        report_write_step(&run, step);
    write_validation(&run, 10, 20.0);
    for (int64_t step = 11; step <= 20; step++)
        report_write_step(&run, step);
    run_folder_close(&run);
    char *text = fixture_text(folder, "log.txt");
    assert_non_null(strstr(text, "step 10/100  ETA 0:03:00")); // 90 steps of 2 s
    assert_non_null(strstr(text, "step 20/100  ETA 0:04:00")); // 80 of 2 s, and 20 s for 20 of them
    free(text);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_test, close_test)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_second_run_is_refused_with_the_holder_named),
        TEST(a_killed_run_leaves_no_lock),
        TEST(folders_are_made_and_messages_logged),
        TEST(a_step_says_everything_by_name),
        TEST(what_is_no_number_is_null),
        TEST(losses_normalised_by_count_have_terms_by_count),
        TEST(a_validation_carries_its_prefix),
        TEST(a_resume_keeps_whole_lines_up_to_its_step),
        TEST(a_resume_of_everything_changes_nothing),
        TEST(a_full_disk_does_not_end_the_run),
        TEST(a_line_that_does_not_fit_is_taken_back),
        TEST(progress_comes_every_so_many_steps_and_at_the_end),
        TEST(the_time_left_has_validations_as_they_came),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
