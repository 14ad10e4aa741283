// The learning rate over steps: warm-up, every shape, and where they end (case C11).
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "trainer/schedule.h"

static struct schedule_config schedule_of(int kind)
{
    return (struct schedule_config){
        .kind = kind, .warmup_ratio = 0.1, .warmup_steps = CONFIG_UNSET, .decay_ratio = 0.2};
}

static void near(double got, double wanted)
{
    if (!(fabs(got - wanted) <= 1e-15))
        fail_msg("%.17g, wanted %.17g", got, wanted);
}

static void warm_up_rises_from_its_first_step_to_the_peak(void **state)
{
    (void)state;
    for (int kind = SCHEDULE_COSINE; kind <= SCHEDULE_CONSTANT; kind++) {
        struct schedule_config schedule = schedule_of(kind);
        for (int64_t step = 1; step <= 10; step++)
            near(schedule_lr(&schedule, 0.5, step, 100), 0.05 * (double)step);
    }
}

static void warmup_steps_replace_the_ratio(void **state)
{
    (void)state;
    struct schedule_config schedule = schedule_of(SCHEDULE_LINEAR);
    schedule.warmup_steps = 4;
    near(schedule_lr(&schedule, 1.0, 1, 100), 0.25);
    near(schedule_lr(&schedule, 1.0, 4, 100), 1.0);
    assert_true(schedule_lr(&schedule, 1.0, 5, 100) < 1.0);
    schedule.warmup_steps = 0;
    assert_true(schedule_lr(&schedule, 1.0, 1, 100) < 1.0);
}

static void the_last_step_is_the_end(void **state)
{
    (void)state;
    static const int64_t totals[] = {1, 2, 3, 7, 20, 1000003};
    for (size_t i = 0; i < sizeof(totals) / sizeof(*totals); i++) {
        for (int kind = SCHEDULE_COSINE; kind < SCHEDULE_CONSTANT; kind++) {
            struct schedule_config schedule = schedule_of(kind);
            schedule.min_lr_ratio = 0.25;
            near(schedule_lr(&schedule, 0.5, totals[i], totals[i]), 0.125);
            schedule.decay_ratio = 0.0;
            near(schedule_lr(&schedule, 0.5, totals[i], totals[i]), 0.125);
        }
        struct schedule_config constant = schedule_of(SCHEDULE_CONSTANT);
        near(schedule_lr(&constant, 0.5, totals[i], totals[i]), 0.5);
    }
}

static void shapes_between(void **state)
{
    (void)state;
    struct schedule_config schedule = schedule_of(SCHEDULE_COSINE);
    schedule.min_lr_ratio = 0.2;
    near(schedule_lr(&schedule, 1.0, 55, 100), 0.6); // half way
    near(schedule_lr(&schedule, 1.0, 40, 100), 0.2 + 0.8 * 0.75);
    schedule.kind = SCHEDULE_LINEAR;
    near(schedule_lr(&schedule, 1.0, 55, 100), 0.6);
    near(schedule_lr(&schedule, 1.0, 28, 100), 0.84);
    schedule.kind = SCHEDULE_WSD;
    near(schedule_lr(&schedule, 1.0, 11, 100), 1.0);
    near(schedule_lr(&schedule, 1.0, 80, 100), 1.0);
    near(schedule_lr(&schedule, 1.0, 90, 100), 0.6);
    schedule.kind = SCHEDULE_CONSTANT;
    near(schedule_lr(&schedule, 1.0, 99, 100), 1.0);
}

static void never_rises_after_warm_up_and_stays_within_bounds(void **state)
{
    (void)state;
    for (int kind = SCHEDULE_COSINE; kind <= SCHEDULE_CONSTANT; kind++) {
        struct schedule_config schedule = schedule_of(kind);
        schedule.min_lr_ratio = 0.1;
        double before = 1.0;
        for (int64_t step = 24; step <= 237; step++) {
            double lr = schedule_lr(&schedule, 1.0, step, 237);
            assert_true(lr <= before && lr >= 0.1 - 1e-15);
            before = lr;
        }
    }
}

static void all_warm_up_ends_at_the_peak(void **state)
{
    (void)state;
    struct schedule_config schedule = schedule_of(SCHEDULE_COSINE);
    schedule.warmup_ratio = 1.0;
    near(schedule_lr(&schedule, 1.0, 5, 10), 0.5);
    near(schedule_lr(&schedule, 1.0, 10, 10), 1.0);
    schedule.warmup_steps = 20; // longer than the run
    near(schedule_lr(&schedule, 1.0, 10, 10), 0.5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(warm_up_rises_from_its_first_step_to_the_peak),
        cmocka_unit_test(warmup_steps_replace_the_ratio),
        cmocka_unit_test(the_last_step_is_the_end),
        cmocka_unit_test(shapes_between),
        cmocka_unit_test(never_rises_after_warm_up_and_stays_within_bounds),
        cmocka_unit_test(all_warm_up_ends_at_the_peak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
