// `dtrain sweep` through the real program: that kills and restarts change nothing in its table, what is
// equal between points, what it refuses, and what becomes of points that fail or do not fit.
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "base/timer.h"
#include "tests/support/run_fixture.h"
#include "trainer/files.h"

enum {
    LIMIT = 120,
    WORDS = 40,
    TRIES = 5
}; // seconds, words of a command, attempts to hit a moment

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

// ---- the command ---------------------------------------------------------------------------------

struct words {
    const char *items[WORDS];
    int count;
};

// `sweep` of four points with validation, in the folder NAME, with further words.
static struct words sweep_words(const char *name, va_list args)
{
    struct words words = {{"sweep", "--config", run_path(&fixture, "run.yaml"), "--set",
                           run_path(&fixture, "%s", name), "--set", "data.val=[val.h5]", "--set",
                           "validation.every=5", "--set", "validation.draft_tokens=[1,3]"},
                          11};
    char *dir = memory_format("run.dir=%s", words.items[4]);
    words.items[4] = dir;
    for (const char *word; (word = va_arg(args, const char *)) != NULL;)
        words.items[words.count++] = word;
    return words;
}

static void start(struct program *program, const char *name, ...)
{
    va_list args;
    va_start(args, name);
    struct words words = sweep_words(name, args);
    va_end(args);
    program_start(program, run_path(&fixture, "%s.out", name), words.items);
    free((char *)words.items[4]);
}

static int sweep(const char *name, ...)
{
    struct program program = {0};
    va_list args;
    va_start(args, name);
    struct words words = sweep_words(name, args);
    va_end(args);
    program_start(&program, run_path(&fixture, "%s.out", name), words.items);
    free((char *)words.items[4]);
    return program_wait(&program, LIMIT);
}

#define GRID "--grid", "max_anchors=16,48", "--grid", "block_size=4,8"

static const char *const point_names[] = {
    "max_anchors=16,block_size=4", "max_anchors=16,block_size=8", "max_anchors=48,block_size=4",
    "max_anchors=48,block_size=8"};

static cJSON *table(const char *name)
{
    return program_json(run_path(&fixture, "%s/table.json", name));
}

static const cJSON *member(const cJSON *object, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    assert_non_null(item);
    return item;
}

static const cJSON *point_at(const cJSON *table, int point)
{
    return cJSON_GetArrayItem(member(table, "points"), point);
}

static double result_of(const cJSON *table, int point, const char *name)
{
    return program_number(member(point_at(table, point), "result"), name);
}

static const char *state_of(const cJSON *table, int point)
{
    return member(point_at(table, point), "state")->valuestring;
}

// What is the same whenever a point is run, of all points: all but what was measured.
static char *steady_text(const cJSON *table)
{
    cJSON *points = cJSON_Duplicate(member(table, "points"), true), *point;
    cJSON_ArrayForEach(point, points)
    {
        cJSON_DeleteItemFromObjectCaseSensitive(point, "measured");
        cJSON_DeleteItemFromObjectCaseSensitive(point, "front_time");
        cJSON_DeleteItemFromObjectCaseSensitive(point, "front_memory");
    }
    char *text = cJSON_PrintUnformatted(points);
    cJSON_Delete(points);
    return text;
}

static void tables_must_agree(const char *first, const char *second)
{
    cJSON *a = table(first), *b = table(second);
    char *x = steady_text(a), *y = steady_text(b);
    assert_true(strlen(x) > 400);
    assert_string_equal(x, y);
    cJSON_free(y);
    cJSON_free(x);
    cJSON_Delete(b);
    cJSON_Delete(a);
}

// ---- kills ---------------------------------------------------------------------------------------

static void left_alone(void **state)
{
    (void)state;
    assert_int_equal(sweep("alone", GRID, NULL), 0);
    run_must_say(&fixture, "alone", "4 of 4 points fit");
    run_must_say(&fixture, "alone", "best: max_anchors=");
    run_must_say(&fixture, "alone", "Points have different numbers of drafts");
    cJSON *root = table("alone"), *plan = program_json(run_path(&fixture, "alone/sweep.json"));
    for (int i = 0; i < 4; i++) {
        double planned = program_number(point_at(plan, i), "anchors");
        char *line = memory_format("%s  %9d  %12.0f  ", point_names[i], RUN_STEPS, planned);
        assert_true(planned > 0.0 && result_of(root, i, "anchors") == planned);
        run_must_say(&fixture, "alone", line);
        free(line);
        cJSON *metrics = program_metrics(run_path(&fixture, "alone/%s", point_names[i]));
        const cJSON *last = program_line(metrics, RUN_STEPS, "val_loss");
        assert_string_equal(member(point_at(root, i), "point")->valuestring, point_names[i]);
        assert_string_equal(state_of(root, i), "done");
        assert_true(result_of(root, i, "steps") == RUN_STEPS);
        assert_true(result_of(root, i, "accept_len_walk") ==
                    program_number(last, "val_accept_len_walk"));
        assert_true(result_of(root, i, "accept_len_walk_3") ==
                    program_number(last, "val_accept_len_walk_3"));
        assert_true(result_of(root, i, "best_accept_len_walk") >=
                    result_of(root, i, "accept_len_walk"));
        cJSON_Delete(metrics);
    }
    cJSON_Delete(plan);
    cJSON_Delete(root);
}

// Process of the run that holds a point's folder, as its lock says.
static pid_t holder(const char *name, const char *point)
{
    char *text = program_text(run_path(&fixture, "%s/%s/lock", name, point));
    long pid = 0;
    if (sscanf(text, "process %ld", &pid) != 1)
        fail_msg("%s has no holder: %s", point, text);
    free(text);
    return (pid_t)pid;
}

static void must_be_gone(pid_t pid)
{
    double end = timer_now() + 10.0;
    while (kill(pid, 0) == 0 && timer_now() < end)
        run_sleep(0.01);
    if (kill(pid, 0) == 0 || errno != ESRCH)
        fail_msg("process %ld outlives its sweep", (long)pid);
}

// Starts the sweep and waits until a point has taken a step.
static void start_until(struct program *program, const char *name, int point, int64_t step)
{
    *program = (struct program){0};
    start(program, name, GRID, NULL);
    program_wait_step(program, run_path(&fixture, "%s/%s", name, point_names[point]), step, LIMIT);
    assert_true(program_runs(program));
}

// The sweep alone by SIGKILL, then the run with it, then SIGTERM to the sweep: the next start goes on.
static void kills_change_nothing(void **state)
{
    (void)state;
    struct program program;
    start_until(&program, "killed", 0, 9);
    pid_t run = holder("killed", point_names[0]);
    program_signal(&program, SIGKILL);
    assert_int_equal(program_wait(&program, LIMIT), 128 + SIGKILL);
    must_be_gone(run);

    start_until(&program, "killed", 1, 6);
    kill(holder("killed", point_names[1]), SIGKILL);
    program_signal(&program, SIGKILL);
    assert_int_equal(program_wait(&program, LIMIT), 128 + SIGKILL);

    start_until(&program, "killed", 2, 11);
    run = holder("killed", point_names[2]);
    program_signal(&program, SIGTERM);
    assert_int_equal(program_wait(&program, LIMIT), 75);
    must_be_gone(run);
    assert_true(program_checkpoint(run_path(&fixture, "killed/%s", point_names[2])) >= 11);
    run_must_say(&fixture, "killed", "stopped: the same command goes on with the 2 points left\n");
    const char *output = run_path(&fixture, "killed/%s/output.txt", point_names[2]);
    assert_true(program_says(output, " steps: the sweep's command goes on\n"));
    assert_false(program_says(output, "the same command"));

    assert_int_equal(sweep("killed", "--show", run_path(&fixture, "killed"), NULL), 0);
    run_must_say(&fixture, "killed", "killed: not running");
    run_must_say(&fixture, "killed", "the same command goes on with it");

    assert_int_equal(sweep("killed", GRID, NULL), 0);
    tables_must_agree("alone", "killed");
    for (int i = 0; i < 4; i++)
        run_must_equal(&fixture,
                       run_path(&fixture, "alone/%s", point_names[i]) + strlen(fixture.folder) + 1,
                       run_path(&fixture, "killed/%s", point_names[i]) + strlen(fixture.folder) + 1,
                       RUN_STEPS);
}

// Nothing is run again when all is done, and several at a time end with the same numbers.
static void done_points_stay(void **state)
{
    (void)state;
    char *before = program_text(run_path(&fixture, "alone/%s/output.txt", point_names[0]));
    assert_int_equal(sweep("alone", GRID, NULL), 0);
    char *after = program_text(run_path(&fixture, "alone/%s/output.txt", point_names[0]));
    assert_string_equal(before, after);
    free(after);
    free(before);
    assert_int_equal(sweep("beside", GRID, "--parallel", "2", NULL), 0);
    tables_must_agree("alone", "beside");
    assert_int_equal(
        program_run(run_path(&fixture, "shown.out"),
                    (const char *const[]){"sweep", "--show", run_path(&fixture, "beside"), NULL}),
        0);
    run_must_say(&fixture, "shown", "not running\nall points are done\n");
}

// What is left of a point's numbers is not taken for all of them.
static void lost_metrics_are_told(void **state)
{
    (void)state;
    char *metrics = memory_strdup(run_path(&fixture, "beside/%s/metrics.jsonl", point_names[1]));
    assert_int_equal(truncate(metrics, 40), 0);
    assert_int_equal(sweep("beside", GRID, NULL), 0);
    run_must_say(&fixture, "beside", "metrics.jsonl: tells of 0 of 20 steps");
    free(metrics);
}

// A sweep of its own folder whose first point's run is held in the middle: *run. On a busy machine the run may
// end before that; then once more.
static void hold_first(struct program *program, const char *name, pid_t *run)
{
    for (int try = 0; try < TRIES; try++) {
        start_until(program, name, 0, 5);
        *run = holder(name, point_names[0]);
        bool held = kill(*run, SIGSTOP) == 0;
        if (held && !files_exists(run_path(&fixture, "%s/%s/finished.json", name, point_names[0])))
            return;
        kill(*run, SIGCONT);
        program_signal(program, SIGKILL);
        program_wait(program, LIMIT);
        must_be_gone(*run);
        run_remove(&fixture, name);
    }
    fail_msg("no run could be held in %d tries", TRIES);
}

// A killed run is told as that; the sweep goes on with the others and tries it again the next time.
static void killed_run_is_tried_again(void **state)
{
    (void)state;
    struct program program;
    pid_t run;
    hold_first(&program, "shot", &run);
    kill(run, SIGKILL);
    assert_int_equal(program_wait(&program, LIMIT), 1);
    run_must_say(&fixture, "shot", "was ended by signal 9");
    cJSON *root = table("shot");
    assert_string_equal(state_of(root, 0), "failed");
    assert_string_equal(state_of(root, 3), "done");
    cJSON_Delete(root);
    assert_int_equal(sweep("shot", GRID, NULL), 0);
    tables_must_agree("alone", "shot");
}

// A run that is told to stop is not told alone: all stop, and go on together.
static void stopped_run_stops_all(void **state)
{
    (void)state;
    struct program program;
    pid_t run;
    hold_first(&program, "hushed", &run);
    kill(run, SIGTERM);
    kill(run, SIGCONT);
    assert_int_equal(program_wait(&program, LIMIT), 75);
    run_must_say(&fixture, "hushed", "has stopped by itself: the sweep stops, too");
    assert_int_equal(sweep("hushed", GRID, NULL), 0);
    tables_must_agree("alone", "hushed");
}

// ---- what is equal -------------------------------------------------------------------------------

// Drawn by a point's run before `step`.
static double anchors_before(const char *name, int point, double step)
{
    cJSON *metrics = program_metrics(run_path(&fixture, "%s/%s", name, point_names[point])), *line;
    double sum = 0.0;
    cJSON_ArrayForEach(line, metrics)
    {
        if (cJSON_GetObjectItemCaseSensitive(line, "anchors") != NULL &&
            program_number(line, "step") < step)
            sum += program_number(line, "anchors");
    }
    cJSON_Delete(metrics);
    return sum;
}

// Anchors that were planned from masks are those that the runs draw, and the budget is reached by the last
// step and by no earlier one.
static void equal_anchors(void **state)
{
    (void)state;
    static const char *const kinds[] = {"row", "document"};
    for (int k = 0; k < 2; k++) {
        char *per = memory_format("anchors.per=%s", kinds[k]), *name = memory_format("eq%d", k);
        assert_int_equal(sweep(name, GRID, "--equal", "anchors", "--set", per, NULL), 0);
        cJSON *root = table(name);
        cJSON *plan = program_json(run_path(&fixture, "%s/sweep.json", name));
        double budget = result_of(root, 0, "anchors");
        assert_true(result_of(root, 0, "steps") == RUN_STEPS);
        for (int i = 0; i < 4; i++) {
            double anchors = result_of(root, i, "anchors"), steps = result_of(root, i, "steps");
            assert_true(anchors == program_number(point_at(plan, i), "anchors"));
            assert_true(anchors >= budget);
            assert_true(anchors_before(name, i, steps) < budget);
        }
        assert_true(result_of(root, 3, "steps") < RUN_STEPS);
        cJSON_Delete(plan);
        cJSON_Delete(root);
        free(name);
        free(per);
    }
}

// Each point's steps are measured, then fixed: a restart takes as many.
static void equal_time(void **state)
{
    (void)state;
    struct program program = {0};
    const char *run = run_path(&fixture, "timed/max_anchors=48");
    start(&program, "timed", "--grid", "max_anchors=16,48", "--equal", "time=0.6", NULL);
    program_wait_step(&program, run, 1, LIMIT);
    program_signal(&program, SIGTERM);
    int status = program_wait(&program, LIMIT);
    assert_true(status == 75 || status == 0); // it may just have ended
    cJSON *before = program_json(run_path(&fixture, "timed/sweep.json"));
    assert_int_equal(sweep("timed", "--grid", "max_anchors=16,48", "--equal", "time=0.6", NULL), 0);
    cJSON *root = table("timed"), *plan = program_json(run_path(&fixture, "timed/sweep.json"));
    for (int i = 0; i < 2; i++) {
        const cJSON *point = point_at(before, i);
        double steps = program_number(point, "steps");
        double seconds = steps * program_number(point, "step_seconds");
        assert_true(steps > 1.0 && result_of(root, i, "steps") == steps);
        assert_true(seconds <= 0.6 && seconds + program_number(point, "step_seconds") > 0.6);
        assert_true(program_number(point_at(plan, i), "anchors") == result_of(root, i, "anchors"));
    }
    cJSON_Delete(plan);
    cJSON_Delete(root);
    cJSON_Delete(before);
}

// ---- points that are left out --------------------------------------------------------------------

// A measurement takes more steps than the config gives, and tells no time when it was cut short.
static void killed_measurement_fails(void **state)
{
    (void)state;
    struct program program = {0};
    const char *run = run_path(&fixture, "unmeasured/max_anchors=16/measured");
    start(&program, "unmeasured", "--grid", "max_anchors=16", "--equal", "time=100000", "--set",
          "run.max_steps=3", NULL);
    program_wait_step(&program, run, 4, LIMIT);
    assert_int_equal(program_run(run_path(&fixture, "measured.out"),
                                 (const char *const[]){"sweep", "--show",
                                                       run_path(&fixture, "unmeasured"), NULL}),
                     0);
    run_must_say(&fixture, "measured", "max_anchors=16: measuring, step ");
    assert_false(run_says(&fixture, "measured", "measuring, step 0"));
    kill(holder("unmeasured", "max_anchors=16/measured"), SIGKILL);
    assert_int_equal(program_wait(&program, LIMIT), 1);
    run_must_say(&fixture, "unmeasured", "max_anchors=16: failed: was ended by signal 9");
}

static void too_large_is_left_out(void **state)
{
    (void)state;
    assert_int_equal(
        sweep("large", "--grid", "layers=1,200", "--set", "memory.limit=8MiB", "--plan-only", NULL),
        1);
    run_must_say(&fixture, "large", "1 of 2 points fit");
    assert_false(files_exists(run_path(&fixture, "large")));
    assert_int_equal(sweep("large", "--grid", "layers=1,2", "--set", "data.train=[later*.h5]",
                           "--set", "target.layer_ids=[1,3,5]", "--plan-only", NULL),
                     0);
    run_must_say(&fixture, "large", "steps are not counted: ");
    assert_int_equal(sweep("large", "--grid", "layers=1,200", "--set", "memory.limit=8MiB", NULL),
                     1);
    run_must_say(&fixture, "large", "layers=200: does not fit: needs ");
    cJSON *root = table("large");
    assert_string_equal(state_of(root, 0), "done");
    assert_string_equal(state_of(root, 1), "does not fit");
    cJSON_Delete(root);
}

static void failed_point_is_told(void **state)
{
    (void)state;
    assert_int_equal(run_train(&fixture, "first", "--set", "run.max_steps=2", NULL), 0);
    char *grid =
        memory_format("drafter.init_from=nowhere,%s", run_checkpoint(&fixture, "first", 2));
    assert_int_equal(sweep("failed", "--grid", grid, NULL), 1);
    run_must_say(&fixture, "failed", "init_from=nowhere: failed: ended with status 2: ");
    cJSON *root = table("failed");
    assert_string_equal(state_of(root, 0), "failed");
    assert_string_equal(state_of(root, 1), "done");
    assert_string_equal(member(root, "best")->valuestring,
                        member(point_at(root, 1), "point")->valuestring);
    cJSON_Delete(root);
    free(grid);
}

static void without_validation(void **state)
{
    (void)state;
    assert_int_equal(sweep("blind", "--grid", "max_anchors=16,48", "--set", "data.val=[]", "--set",
                           "validation.every=0", NULL),
                     0);
    run_must_say(&fixture, "blind", "nothing is known of acceptance");
    cJSON *root = table("blind");
    assert_string_equal(member(root, "ranked_by")->valuestring, "loss");
    int best = result_of(root, 0, "loss") < result_of(root, 1, "loss") ? 0 : 1;
    assert_string_equal(member(root, "best")->valuestring,
                        member(point_at(root, best), "point")->valuestring);
    cJSON_Delete(root);
}

// A key that the sweep may set by itself is each point's own where it is varied.
static void varied_threads(void **state)
{
    (void)state;
    static const char *const names[] = {"threads=1", "threads=2"};
    assert_int_equal(sweep("cores", "--grid", "threads=1,2", "--set", "run.max_steps=2",
                           "--parallel", "2", NULL),
                     0);
    for (int i = 0; i < 2; i++) {
        cJSON *root = program_json(run_path(&fixture, "cores/%s/execution.json", names[i]));
        assert_true(program_number(root, "threads") == i + 1);
        cJSON_Delete(root);
    }
}

static void more_at_a_time_than_points(void **state)
{
    (void)state;
    assert_int_equal(sweep("many", "--grid", "max_anchors=16,48", "--plan-only", "--set",
                           "parallel.threads=0", "--parallel", "4294967296", NULL),
                     0);
    run_must_say(&fixture, "many", "2 points at a time with ");
}

static void started_by_one_that_ignores_children(void **state)
{
    (void)state;
    struct program program = {0};
    signal(SIGCHLD, SIG_IGN); // which the program inherits
    start(&program, "ignored", "--grid", "max_anchors=16", "--plan-only", NULL);
    signal(SIGCHLD, SIG_DFL);
    assert_int_equal(program_wait(&program, LIMIT), 0);
}

// ---- refusals ------------------------------------------------------------------------------------

static void must_refuse(const char *words, const char *name, const char *grid, const char *option,
                        const char *value)
{
    assert_int_equal(sweep(name, "--grid", grid, option, value, NULL), 2);
    run_must_say(&fixture, name, words);
}

static void bad_grids_are_refused(void **state)
{
    (void)state;
    must_refuse("--grid drafter.block_size: 1 is out of range", "bad", "block_size=1,8", NULL,
                NULL);
    must_refuse("--grid optimizer.lr: expected a number, got x", "bad", "lr=1,x", NULL, NULL);
    must_refuse("unknown key; did you mean", "bad", "max_anchor=1", NULL, NULL);
    must_refuse("block_size: 8 is given twice", "bad", "block_size=8,8", NULL, NULL);
    must_refuse("lr=1e-3 and lr=0.001 are the same", "bad", "lr=1e-3,0.001", NULL, NULL);
    must_refuse("is varied by --grid", "bad", "lr=1,2", "--set", "optimizer.lr=1");
    must_refuse("varies what --equal steps makes the same", "bad", "max_steps=5,6", NULL, NULL);
    must_refuse("say steps, anchors", "bad", "lr=1,2", "--equal", "loss");
    must_refuse("can not be planned", "bad", "mask_token_id=60,1", NULL, NULL);
    assert_false(files_exists(run_path(&fixture, "bad/sweep.json")));
}

static void another_sweep_is_refused(void **state)
{
    (void)state;
    must_refuse("was begun with --grid max_anchors=16,48 --grid block_size=4,8", "alone",
                "max_anchors=16,48", NULL, NULL);
    assert_int_equal(sweep("alone", GRID, "--set", "optimizer.lr=1e-3", NULL), 2);
    run_must_say(&fixture, "alone", "optimizer.lr: must stay the same on resume");
    assert_int_equal(sweep("alone", GRID, "--set", "run.max_steps=21", NULL), 2);
    run_must_say(&fixture, "alone", "run.max_steps: must stay the same in a sweep");
    assert_int_equal(sweep("alone", GRID, "--set", "parallel.threads=7", NULL), 2);
    run_must_say(&fixture, "alone", "parallel.threads: must stay the same in a sweep");
    assert_int_equal(sweep("alone", GRID, "--equal", "anchors", NULL), 2);
    run_must_say(&fixture, "alone", "--equal: it was steps and is anchors");
    assert_int_equal(sweep("alone/max_anchors=16,block_size=4", GRID, NULL), 2);
    char *text = program_text(run_path(&fixture, "alone/max_anchors=16,block_size=4.out"));
    assert_non_null(
        strstr(text, "is the folder of a run; a sweep needs one of its own: --set run.dir="));
    free(text);
}

// Two sweeps in one folder.
static void second_sweep_is_refused(void **state)
{
    (void)state;
    struct program program = {0}; // whose points take long enough for all that is tried here
    start(&program, "twice", GRID, "--set", "run.max_steps=4000", "--set", "run.epochs=1000", NULL);
    program_wait_step(&program, run_path(&fixture, "twice/%s", point_names[0]), 1, LIMIT);
    assert_int_equal(
        program_run(run_path(&fixture, "second.out"),
                    (const char *const[]){"sweep", "--show", run_path(&fixture, "twice"), NULL}),
        0);
    run_must_say(&fixture, "second", "twice: running as process ");
    run_must_say(&fixture, "second", "0 of 4 points, ETA ");
    char *dir = memory_format("run.dir=%s", run_path(&fixture, "twice"));
    const char *const words[] = {"sweep",
                                 "--config",
                                 run_path(&fixture, "run.yaml"),
                                 "--set",
                                 dir,
                                 "--grid",
                                 "max_anchors=16,48",
                                 NULL};
    assert_int_equal(program_run(run_path(&fixture, "second.out"), words), 2);
    run_must_say(&fixture, "second", "the sweep is in use by process");
    program_signal(&program, SIGINT);
    assert_int_equal(program_wait(&program, LIMIT), 75);
    free(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(left_alone),
        cmocka_unit_test(kills_change_nothing),
        cmocka_unit_test(done_points_stay),
        cmocka_unit_test(lost_metrics_are_told),
        cmocka_unit_test(killed_run_is_tried_again),
        cmocka_unit_test(stopped_run_stops_all),
        cmocka_unit_test(equal_anchors),
        cmocka_unit_test(equal_time),
        cmocka_unit_test(killed_measurement_fails),
        cmocka_unit_test(too_large_is_left_out),
        cmocka_unit_test(failed_point_is_told),
        cmocka_unit_test(without_validation),
        cmocka_unit_test(varied_threads),
        cmocka_unit_test(more_at_a_time_than_points),
        cmocka_unit_test(started_by_one_that_ignores_children),
        cmocka_unit_test(bad_grids_are_refused),
        cmocka_unit_test(another_sweep_is_refused),
        cmocka_unit_test(second_sweep_is_refused),
    };
    return cmocka_run_group_tests_name("sweep", tests, open_all, close_all);
}
