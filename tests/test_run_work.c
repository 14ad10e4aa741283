// The useful operations of a step against a count by hand, and the peak rates that they are held against.
#include "trainer/run_work.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/support/run_fixture.h"

static void devices_are_known_by_whole_names(void **state)
{
    (void)state;
    assert_true(run_work_peak("NVIDIA H200") == 989.0);
    assert_true(run_work_peak("NVIDIA H20") == 148.0);
    assert_true(run_work_peak("NVIDIA GH200 480GB") == 989.0);
    assert_true(run_work_peak("NVIDIA H100 80GB HBM3") == 989.0);
    assert_true(run_work_peak("NVIDIA H100 PCIe") == 756.0);
    assert_true(run_work_peak("NVIDIA A100-SXM4-80GB") == 312.0);
    assert_true(run_work_peak("NVIDIA A10") == 125.0);
    assert_true(run_work_peak("NVIDIA A10G") == 0.0);
    assert_true(run_work_peak("NVIDIA L40S") == 362.0);
    assert_true(run_work_peak("NVIDIA L4") == 121.0);
    assert_true(run_work_peak("NVIDIA GeForce RTX 4090") == 165.2);
    assert_true(run_work_peak("NVIDIA H100 80GB HBM3 MIG 1g.10gb") == 0.0);
    assert_true(run_work_peak("AMD EPYC") == 0.0);
}

static void counts_scale_the_parts(void **state)
{
    (void)state;
    struct plan_work work = {.rows = 2,
                             .tokens = 100.0,
                             .anchors = 10.0,
                             .scored = 70.0,
                             .teachers = 50.0,
                             .context = 1e3,
                             .forward = 2e4,
                             .backward = 4e4,
                             .recompute = 9e9,
                             .attention = 5e4,
                             .scored_layers = 6e3,
                             .student = 1e5,
                             .gradient = 2e5,
                             .teacher = 3e5};
    struct plan_counts as_planned = {200.0, 20.0, 140.0, 100.0};
    struct plan_counts fewer = {100.0, 10.0, 35.0, 10.0};
    struct plan_counts nothing = {200.0, 0.0, 0.0, 0.0};
    assert_true(plan_work_useful(&work, &as_planned) == 1e3 + 2e4 + 4e4 + 5e4 + 1e5 + 2e5 + 3e5);
    assert_true(fabs(plan_work_useful(&work, &fewer) - (0.5e3 + 0.5 * (2e4 + 4e4 + 5e4 - 6e3) +
                                                        0.25 * (6e3 + 1e5 + 2e5) + 3e4)) < 1e-6);
    assert_true(plan_work_useful(&work, &nothing) == 1e3);
}

// Twice the products of the fixture's step, as its shapes say: H 8, heads 2 x 4, MLP 12, V 64, two layers,
// three captured planes, blocks of 8.
static double by_hand(const cJSON *line)
{
    const struct fixture_options shard = run_train_shard();
    double tokens = 0.0, squares = 0.0;
    for (int64_t d = 0; d < RUN_DOCUMENTS; d++) {
        tokens += (double)shard.lengths[d];
        squares += (double)(shard.lengths[d] * shard.lengths[d]);
    }
    double seen = squares / tokens / 2.0 + 8.0; // of a block row, on average
    double t = program_number(line, "tokens"), r = program_number(line, "slots");
    double n = 8.0 * program_number(line, "anchors");
    double covered =
        program_number(line, "coverage") * program_number(line, "supervised_share") * t;
    double fc = t * 3 * 8 * 8, keys = 2 * t * 8 * (8 + 8);
    double before = 8 * 8 + 8 * 16, behind = 8 * 8 + 3 * 8 * 12;
    double layers = 2 * n * before + n * behind + r * behind;
    double attention = 2 * n * 8 * seen;
    return 2.0 *
           (2 * fc + 3 * keys + 3 * layers + 7 * attention + 2 * r * 8 * 64 + covered * 8 * 64);
}

static void a_run_reports_its_useful_operations(void **state)
{
    (void)state;
    struct run_fixture fixture;
    run_fixture_open(&fixture);
    run_fixture_set(&fixture, "run.max_steps=3");
    assert_int_equal(run_train(&fixture, "plain", NULL), 0);
    assert_int_equal(run_train(&fixture, "rated", "--set", "log.peak_tflops=0.5", NULL), 0);
    cJSON *plain = program_metrics(run_path(&fixture, "plain"));
    cJSON *rated = program_metrics(run_path(&fixture, "rated"));
    for (int64_t step = 1; step <= 3; step++) {
        const cJSON *line = program_line(rated, step, "loss");
        double flops = program_number(line, "flops"), wanted = by_hand(line);
        double mfu = flops / program_number(line, "seconds") / 0.5e12;
        assert_true(!(fabs(flops - wanted) > 1e-9 * wanted));
        assert_true(!(fabs(program_number(line, "mfu") - mfu) > 1e-9 * mfu));
        assert_null(cJSON_GetObjectItem(program_line(plain, step, "loss"), "mfu")); // of a CPU
    }
    assert_true(program_says(run_path(&fixture, "rated/log.txt"), "  MFU "));
    assert_false(program_says(run_path(&fixture, "plain/log.txt"), "  MFU "));
    cJSON_Delete(plain);
    cJSON_Delete(rated);
    run_fixture_close(&fixture);
}

// What a step's parts take is its time, but for what the host does between them.
static void parts_add_up_to_the_step(void **state)
{
    (void)state;
    static const char *const names[] = {"wait_seconds", "copy_seconds",     "forward_seconds",
                                        "loss_seconds", "backward_seconds", "optimizer_seconds"};
    struct run_fixture fixture;
    double all = 0.0, parts = 0.0;
    run_fixture_open(&fixture);
    assert_int_equal(run_train(&fixture, "run", NULL), 0);
    cJSON *metrics = program_metrics(run_path(&fixture, "run")), *line;
    cJSON_ArrayForEach(line, metrics)
    {
        all += program_number(line, "seconds");
        for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
            parts += program_number(line, names[i]);
    }
    if (!(parts > 0.5 * all && parts < 1.05 * all))
        fail_msg("parts take %g s of %g", parts, all);
    cJSON_Delete(metrics);
    run_fixture_close(&fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(devices_are_known_by_whole_names),
        cmocka_unit_test(counts_scale_the_parts),
        cmocka_unit_test(a_run_reports_its_useful_operations),
        cmocka_unit_test(parts_add_up_to_the_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
