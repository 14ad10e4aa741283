// What comes before a sweep's first point: plans of a whole grid, what points that do not fit have a say in, signals,
// and which GPUs a point gets. The last one runs the sweep in this process, which sees four GPUs that are not
// there (linked with --wrap=backend_cuda_count) and is started again for each point: then it says what it sees.
#include <errno.h>
#include <fcntl.h>
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
#include "kernels/backend.h"
#include "tests/support/run_fixture.h"
#include "trainer/command_line.h"
#include "trainer/files.h"

enum { LIMIT = 60, GPUS = 4 };

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

// `sweep` in the folder NAME without validation, of an epoch, with two further --grid or --set and one more word or
// two.
static int sweep(const char *name, const char *first, const char *second, const char *option,
                 const char *value)
{
    char *dir = memory_format("run.dir=%s", run_path(&fixture, "%s", name));
    int status =
        run_command(&fixture, name, true, "sweep", "--set", dir, "--set", "run.epochs=1", "--set",
                    "run.max_steps=0", "--set", "validation.every=0", "--set", "checkpoint.every=0",
                    "--grid", first, "--set", second, option, value, NULL);
    free(dir);
    return status;
}

static cJSON *table(const char *name)
{
    return program_json(run_path(&fixture, "%s/table.json", name));
}

static const cJSON *point_at(const cJSON *table, int point)
{
    return cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(table, "points"), point);
}

static double number_of(const cJSON *table, int point, const char *name)
{
    const cJSON *result = cJSON_GetObjectItemCaseSensitive(point_at(table, point), "result");
    return program_number(result, name);
}

// A row of 64 K tokens holds all documents, so that its epoch is one step, and does not fit.
#define ROWS    "seq_len=256,65536"
#define LIMITED "memory.limit=16MiB"

static void points_that_do_not_fit_set_nothing(void **state)
{
    (void)state;
    static const char *const ways[] = {"steps", "anchors", "block_rows", "none"};
    for (size_t i = 0; i < sizeof(ways) / sizeof(*ways); i++) {
        assert_int_equal(sweep(ways[i], ROWS, LIMITED, "--equal", ways[i]), 1);
        run_must_say(&fixture, ways[i], "1 of 2 points fit");
        cJSON *root = table(ways[i]);
        assert_true(number_of(root, 0, "steps") > 3.0);
        assert_string_equal(
            cJSON_GetObjectItemCaseSensitive(point_at(root, 1), "state")->valuestring,
            "does not fit");
        cJSON_Delete(root);
    }
    assert_int_equal(sweep("nothing", "seq_len=65536,32768", LIMITED, "--equal", "steps"), 1);
    run_must_say(&fixture, "nothing", "0 of 2 points fit");
}

// What was there before is left as it was, and nothing comes to it.
static void without_a_point_that_fits_nothing_is_written(void **state)
{
    (void)state;
    static const char *const places[] = {"empty", "above/it"};
    struct error err = {""};
    assert_int_equal(files_make_folder(run_path(&fixture, "empty"), &err), 0);
    for (int i = 0; i < 2; i++) {
        char *dir = memory_format("run.dir=%s", run_path(&fixture, "%s", places[i]));
        assert_int_equal(run_command(&fixture, "unfit", true, "sweep", "--set", dir, "--set",
                                     LIMITED, "--grid", "seq_len=65536,32768", NULL),
                         1);
        run_must_say(&fixture, "unfit", "0 of 2 points fit");
        run_must_say(&fixture, "unfit", "no point fits, so nothing is started");
        free(dir);
    }
    assert_false(files_exists(run_path(&fixture, "above")));
    assert_int_equal(rmdir(run_path(&fixture, "empty")), 0); // would fail with anything in it
}

// With more memory later the sweep stays what it was: what could not take as much is left out, in words.
static void what_fits_later_changes_nothing(void **state)
{
    (void)state;
    assert_int_equal(sweep("later", ROWS, LIMITED, "--equal", "steps"), 1);
    assert_int_equal(sweep("later", ROWS, "memory.limit=8GiB", "--equal", "steps"), 1);
    run_must_say(&fixture, "later", "did not fit when the sweep was begun; it has 1 steps");
    assert_int_equal(sweep("own", ROWS, LIMITED, "--equal", "none"), 1);
    assert_int_equal(sweep("own", ROWS, "memory.limit=8GiB", "--equal", "none"), 0);
    cJSON *root = table("own");
    assert_true(number_of(root, 1, "steps") == 1.0);
    cJSON_Delete(root);
}

// EAGLE-3's anchors are its positions: as many as the runs then score.
static void eagle3_has_anchors(void **state)
{
    (void)state;
    static const char *const ways[] = {"anchors", "block_rows"};
    struct run_fixture dflash = fixture;
    run_fixture_set(&fixture, "drafter.kind=eagle3");
    run_fixture_set(&fixture, "drafter.style=llama");
    run_fixture_set(&fixture, "drafter.layers=1");
    for (int i = 0; i < 2; i++) {
        char *name = memory_format("eagle3-%s", ways[i]);
        assert_int_equal(sweep(name, i == 0 ? "rows_per_step=1,3" : "ttt_steps=2,4",
                               "loss.mask_index=label", "--equal", ways[i]),
                         0);
        cJSON *root = table(name), *plan = program_json(run_path(&fixture, "%s/sweep.json", name));
        double most = 0.0, steps = 0.0;
        for (int p = 0; p < 2; p++) {
            double anchors = number_of(root, p, "anchors");
            assert_true(anchors > 0.0 && anchors == program_number(point_at(plan, p), "anchors"));
            most = anchors > most ? anchors : most;
            steps = number_of(root, p, "steps");
        }
        assert_true(number_of(root, 0, "steps") > steps); // the second needs fewer
        cJSON_Delete(plan);
        cJSON_Delete(root);
        free(name);
    }
    fixture.set_count = dflash.set_count;
}

// An object a line, each as `plan` gives it for that point alone.
static void a_grid_is_planned_in_one_process(void **state)
{
    (void)state;
    assert_int_equal(run_command(&fixture, "grid", true, "plan", "--json", "--grid",
                                 "block_size=4,8", "--grid", "layers=1,2", NULL),
                     0);
    assert_int_equal(run_command(&fixture, "one", true, "plan", "--json", "--set", "block_size=8",
                                 "--set", "layers=1", NULL),
                     0);
    char *text = program_text(run_path(&fixture, "grid.out")), *rest = NULL;
    cJSON *third = NULL, *one = program_json(run_path(&fixture, "one.out"));
    int lines = 0;
    for (char *line = strtok_r(text, "\n", &rest); line != NULL; line = strtok_r(NULL, "\n", &rest))
        if (line[0] == '{' && lines++ == 2)
            third = cJSON_Parse(line);
    assert_int_equal(lines, 4);
    assert_non_null(third);
    cJSON_DeleteItemFromObjectCaseSensitive(third, "device_memory"); // what is free
    cJSON_DeleteItemFromObjectCaseSensitive(one, "device_memory");
    assert_true(cJSON_Compare(third, one, true));
    cJSON_Delete(third);
    cJSON_Delete(one);
    free(text);
    assert_int_equal(run_command(&fixture, "table", true, "plan", "--grid", "layers=1,2", NULL), 2);
    run_must_say(&fixture, "table", "it needs --json");
    assert_int_equal(
        run_command(&fixture, "bad", true, "plan", "--json", "--grid", "mask_token_id=60,1", NULL),
        2);
}

// Also while it plans: nothing is left behind, and status 75 says that the same command goes on.
static void a_signal_ends_the_planning(void **state)
{
    (void)state;
    char *grid = memory_strdup("seed=0");
    for (int i = 1; i < 1000; i++) {
        char *longer = memory_format("%s,%d", grid, i);
        free(grid);
        grid = longer;
    }
    char *dir = memory_format("run.dir=%s", run_path(&fixture, "long"));
    const char *words[] = {
        "sweep", "--config", run_path(&fixture, "run.yaml"), "--grid", grid, "--set",
        dir,     "--set",    "optimizer.grad_clip=0",        NULL};
    struct program program = {0};
    program_start(&program, run_path(&fixture, "long.out"), words);
    while (program_runs(&program) && !run_says(&fixture, "long", "nothing is known of acceptance"))
        run_sleep(0.02);
    run_sleep(0.3);
    program_signal(&program, SIGTERM);
    assert_int_equal(program_wait(&program, LIMIT), 75);
    run_must_say(&fixture, "long", "signal 15: stopping before the first point");
    assert_false(files_exists(run_path(&fixture, "long")));
    free(dir);
    free(grid);
}

// In the words of whoever found it, without those of a log around them.
static void what_can_not_be_planned_is_told(void **state)
{
    (void)state;
    assert_int_equal(sweep("files", "data.train=[train.h5],[none*.h5]", LIMITED, NULL, NULL), 2);
    run_must_say(&fixture, "files", "no file matches");
    assert_int_equal(sweep("memory", "layers=1,2", LIMITED, "--device-memory", "5"), 2);
    run_must_say(&fixture, "memory", "layers=1: can not be planned: --device-memory: 5 is no");
    assert_int_equal(run_command(&fixture, "shown", false, "sweep", "--show", "nowhere", NULL), 2);
    run_must_say(&fixture, "shown", "--show nowhere: there is no such folder in /");
    assert_int_equal(run_command(&fixture, "shown", false, "sweep", "--show", fixture.folder, NULL),
                     2);
    run_must_say(&fixture, "shown", ": holds no sweep.json");
}

// A plan alone says which vocabulary is missing, and counts steps without it.
static void a_plan_names_the_missing_vocabulary(void **state)
{
    (void)state;
    const int sets = fixture.set_count;
    char *dir = memory_format("run.dir=%s", run_path(&fixture, "map"));
    run_fixture_set(&fixture, "drafter.kind=eagle3");
    run_fixture_set(&fixture, "drafter.style=llama");
    run_fixture_set(&fixture, "drafter.layers=1");
    assert_int_equal(run_command(&fixture, "map", true, "sweep", "--plan-only", "--set", dir,
                                 "--grid", "draft_vocab=ma.safetensors,mb.safetensors", NULL),
                     0);
    run_must_say(&fixture, "map", "drafter.draft_vocab: ");
    run_must_say(&fixture, "map", "ma.safetensors is not there");
    run_must_say(&fixture, "map", "point draft_vocab=mb.safetensors)");
    assert_false(run_says(&fixture, "map", "steps are not counted"));
    assert_int_equal(run_command(&fixture, "map", true, "sweep", "--plan-only", "--set", dir,
                                 "--set", "data.train=[later*.h5]", "--set",
                                 "target.layer_ids=[1,3,5]", "--grid", "ttt_steps=2,4", NULL),
                     0);
    run_must_say(&fixture, "map", "no file matches");
    assert_int_equal(run_command(&fixture, "map", true, "sweep", "--plan-only", "--set", dir,
                                 "--set", "data.val=[later*.h5]", "--grid", "ttt_steps=2,4", NULL),
                     0);
    assert_false(run_says(&fixture, "map", "steps are not counted"));
    fixture.set_count = sets;
    free(dir);
}

// A key that changes nothing at any point is refused; one that changes something at some points is told.
static void keys_without_effect_are_told(void **state)
{
    (void)state;
    const int sets = fixture.set_count;
    assert_int_equal(sweep("idle", "muon_lr=0.1,0.2", LIMITED, "--plan-only", NULL), 2);
    run_must_say(&fixture, "idle",
                 "--grid optimizer.muon_lr: has no effect without optimizer.kind muon; the points "
                 "would be the same");
    // 7 is the default, of which config_warnings says nothing.
    assert_int_equal(sweep("idle", "ttt_steps=7,3", LIMITED, "--plan-only", NULL), 2);
    run_must_say(&fixture, "idle", "--grid drafter.ttt_steps: has no effect with");
    assert_int_equal(sweep("idle", "ttt_steps=3", LIMITED, "--plan-only", NULL), 0);
    run_must_say(&fixture, "idle", "--grid drafter.ttt_steps: has no effect with");
    char *dir = memory_format("run.dir=%s", run_path(&fixture, "idle"));
    assert_int_equal(run_command(&fixture, "idle", true, "sweep", "--plan-only", "--set", dir,
                                 "--grid", "optimizer.kind=adamw,muon", "--grid", "muon_lr=0.1,0.2",
                                 NULL),
                     0);
    free(dir);
    run_must_say(&fixture, "idle", "--grid optimizer.muon_lr: has no effect");
    run_must_say(&fixture, "idle", "such points that differ in it alone are the same");
    run_fixture_set(&fixture, "drafter.style=llama");
    run_fixture_set(&fixture, "drafter.layers=1");
    run_fixture_set(&fixture, "drafter.kind=eagle3");
    assert_int_equal(sweep("idle", "max_anchors=32,96", LIMITED, "--plan-only", NULL), 2);
    run_must_say(&fixture, "idle", "max_anchors: has no effect with drafter.kind eagle3; the ");
    fixture.set_count = sets;
}

// ---- GPUs ----------------------------------------------------------------------------------------

int __wrap_backend_cuda_count(void);

int __wrap_backend_cuda_count(void)
{
    return GPUS;
}

// A point's run: names its GPUs, and whether another one has any of them at this moment.
static int be_a_run(const char *folder)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    char *names = memory_strdup(visible != NULL ? visible : "all"), *rest = NULL;
    char *held[GPUS];
    int count = 0;
    printf("visible: %s\n", names);
    for (char *gpu = strtok_r(names, ",", &rest); gpu != NULL; gpu = strtok_r(NULL, ",", &rest)) {
        char *lock = memory_format("%s/../held-%s", folder, gpu);
        int fd = open(lock, O_CREAT | O_EXCL | O_WRONLY, 0600);
        if (fd < 0)
            printf("shared: %s\n", lock);
        else
            close(fd);
        held[count++] = lock;
    }
    nanosleep(&(struct timespec){.tv_nsec = 400000000}, NULL);
    while (count-- > 0) {
        unlink(held[count]);
        free(held[count]);
    }
    free(names);
    return 0;
}

static int be_dtrain(int argc, char **argv)
{
    struct command_line line;
    struct error err;
    if (strcmp(argv[1], "--config") == 0) {
        char *slash = strrchr(argv[2], '/');
        *slash = '\0'; // of FOLDER/point.yaml
        return be_a_run(argv[2]);
    }
    int status = command_line_read(&line, argc, argv, &err);
    status = status == 0 ? line.command->run(&line.options) : 2;
    command_line_release(&line);
    return status;
}

// A sweep of four points, two at a time, of this process. The exit status.
static int sweep_here(const char *name, const char *grid, const char *set, int parallel)
{
    char *dir = memory_format("run.dir=%s", run_path(&fixture, "%s", name));
    const char *sets[] = {dir, "run.device=auto", "run.max_steps=4", set};
    char *arguments[] = {memory_strdup("dtrain"), NULL};
    const struct options options = {.config = run_path(&fixture, "run.yaml"),
                                    .sets = sets,
                                    .set_count = 4,
                                    .grids = &grid,
                                    .grid_count = 1,
                                    .parallel = parallel,
                                    .device_memory = "8GiB",
                                    .arguments = arguments,
                                    .command = "test"};
    int status = command_sweep(&options);
    free(arguments[0]);
    free(dir);
    return status;
}

// How many of four points have seen these GPUs.
static int points_with(const char *name, const char *words)
{
    int count = 0;
    for (int i = 4; i <= 16; i *= 2) {
        const char *path = run_path(&fixture, "%s/block_size=%d/output.txt", name, i);
        assert_false(program_says(path, "shared"));
        count += program_says(path, words);
    }
    return count;
}

static void each_point_has_its_own_gpus(void **state)
{
    (void)state;
    static const char *const grid = "block_size=4,8,16";
    unsetenv("CUDA_VISIBLE_DEVICES");
    // No point is trained, so all fail.
    assert_int_equal(sweep_here("two", grid, "parallel.gpus=2", 2), 1);
    assert_true(points_with("two", "visible: 0,1\n") > 0);
    assert_true(points_with("two", "visible: 2,3\n") > 0);
    assert_int_equal(points_with("two", "visible: 0,1\n") + points_with("two", "visible: 2,3\n"),
                     3);
    setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,7,9", 1);
    assert_int_equal(sweep_here("named", grid, "parallel.gpus=0", 3), 1);
    for (int i = 0; i < 3; i++) { // one stays idle
        static const char *const one[] = {"visible: GPU-a\n", "visible: GPU-b\n", "visible: 7\n"};
        assert_int_equal(points_with("named", one[i]), 1);
    }
    unsetenv("CUDA_VISIBLE_DEVICES");
    assert_int_equal(sweep_here("all", grid, "parallel.gpus=4", 1), 1);
    assert_int_equal(points_with("all", "visible: all\n"), 3);
}

static void more_gpus_than_a_point_gets_are_refused(void **state)
{
    (void)state;
    assert_int_equal(sweep_here("most", "block_size=4,8", "parallel.gpus=3", 2), 2);
    assert_int_equal(sweep_here("most", "parallel.gpus=1,2,3", "block_size=4", 2), 2);
    assert_int_equal(sweep_here("most", "block_size=4,8,16,32,64", "parallel.gpus=1", 5), 2);
    assert_false(files_exists(run_path(&fixture, "most")));
}

int main(int argc, char **argv)
{
    if (argc > 1)
        return be_dtrain(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(points_that_do_not_fit_set_nothing),
        cmocka_unit_test(without_a_point_that_fits_nothing_is_written),
        cmocka_unit_test(what_fits_later_changes_nothing),
        cmocka_unit_test(eagle3_has_anchors),
        cmocka_unit_test(a_grid_is_planned_in_one_process),
        cmocka_unit_test(a_signal_ends_the_planning),
        cmocka_unit_test(what_can_not_be_planned_is_told),
        cmocka_unit_test(a_plan_names_the_missing_vocabulary),
        cmocka_unit_test(keys_without_effect_are_told),
        cmocka_unit_test(each_point_has_its_own_gpus),
        cmocka_unit_test(more_gpus_than_a_point_gets_are_refused),
    };
    return cmocka_run_group_tests_name("sweep_plan", tests, open_all, close_all);
}
