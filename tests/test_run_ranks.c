// The same training on any number of ranks, through the real program under mpirun: losses, anchors and weights
// (cases C4, C6, C7, C12), and runs that continue on another number. What ends ranks by force is
// test_run_rank_kills.c's.
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/bf16.h"
#include "base/log.h"
#include "tests/support/run_fixture.h"
#include "trainer/files.h"

static struct run_fixture fixture;
enum { OWN_SETS = 1 };

static int open_all(void **state)
{
    (void)state;
    run_fixture_open(&fixture);
    run_fixture_set(&fixture, "data.rows_per_step=5"); // 3 and 2 rows, or 2, 2 and 1
    return 0;
}

// Keys and files that one test adds are not another's.
static int forget(void **state)
{
    (void)state;
    struct fixture_options train = run_train_shard();
    fixture.set_count = OWN_SETS;
    fixture.ranks = 0;
    fixture_shard(run_path(&fixture, "train.h5"), &train);
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    run_fixture_close(&fixture);
    return 0;
}

static int train_on(int ranks, const char *name, const char *set)
{
    fixture.ranks = ranks;
    return run_train(&fixture, name, "--set", set, NULL);
}

static void must_train_on(int ranks, const char *name, const char *set)
{
    int status = train_on(ranks, name, set);
    if (status != 0)
        run_must_say(&fixture, name, "done: 20 steps");
    assert_int_equal(status, 0);
}

static bool near(double a, double b, double tolerance)
{
    return (isnan(a) && isnan(b)) || fabs(a - b) <= tolerance * (fabs(a) + 1e-30);
}

// Every line of metrics: losses to tolerance, counts and anchors exactly.
static void must_train_alike(const char *first, const char *second, double tolerance)
{
    static const char *const exact[] = {"anchors", "tokens", "rows", "lr", "epoch", "skipped"};
    static const char *const close[] = {"loss", "grad_norm", "val_loss", "val_accept_len_walk"};
    cJSON *a = program_metrics(run_path(&fixture, "%s", first));
    cJSON *b = program_metrics(run_path(&fixture, "%s", second));
    assert_true(cJSON_GetArraySize(a) > 0);
    assert_int_equal(cJSON_GetArraySize(a), cJSON_GetArraySize(b));
    for (int i = 0; i < cJSON_GetArraySize(a); i++) {
        const cJSON *x = cJSON_GetArrayItem(a, i), *y = cJSON_GetArrayItem(b, i);
        for (size_t k = 0; k < sizeof(exact) / sizeof(*exact); k++)
            if (!cJSON_Compare(cJSON_GetObjectItem(x, exact[k]), cJSON_GetObjectItem(y, exact[k]),
                               true) &&
                cJSON_HasObjectItem(x, exact[k]))
                fail_msg("line %d of %s and %s: %s differs", i + 1, first, second, exact[k]);
        for (size_t k = 0; k < sizeof(close) / sizeof(*close); k++)
            if (cJSON_HasObjectItem(x, close[k]) &&
                !near(program_number(x, close[k]), program_number(y, close[k]), tolerance))
                fail_msg("line %d of %s and %s: %s %.12g and %.12g", i + 1, first, second, close[k],
                         program_number(x, close[k]), program_number(y, close[k]));
    }
    cJSON_Delete(a);
    cJSON_Delete(b);
}

static void must_have_near_weights(const char *first, const char *second, int64_t step,
                                   double tolerance)
{
    double distance = program_state_distance(run_checkpoint(&fixture, first, step),
                                             run_checkpoint(&fixture, second, step), "master");
    print_message("%s and %s: weights %.2e apart\n", first, second, distance);
    if (!(distance <= tolerance))
        fail_msg("%s and %s: weights are %.3g apart at step %lld", first, second, distance,
                 (long long)step);
}

// ---- any number of ranks -------------------------------------------------------------------------

static void must_agree_on_any_number(const char *name, const char *set)
{
    char one[32], two[32], three[32];
    snprintf(one, sizeof(one), "%s-1", name);
    snprintf(two, sizeof(two), "%s-2", name);
    snprintf(three, sizeof(three), "%s-3", name);
    must_train_on(0, one, set);
    must_train_on(2, two, set);
    must_train_on(3, three, set);
    must_train_alike(one, two, 1e-5);
    must_train_alike(one, three, 1e-5);
    must_have_near_weights(one, two, RUN_STEPS, 1e-6);
    must_have_near_weights(one, three, RUN_STEPS, 1e-6);
}

static void any_number_trains_alike(void **state)
{
    (void)state;
    must_agree_on_any_number("plain", "checkpoint.background=true");
}

// One tensor is larger than all others together: no ownership balances.
static void one_large_tensor(void **state)
{
    (void)state;
    run_fixture_set(&fixture, "drafter.layers=1");
    must_agree_on_any_number("large", "drafter.intermediate_size=4");
}

// Two runs on two ranks are bitwise the same; the servable weights are the masters, rounded.
static void same_run_twice(void **state)
{
    (void)state;
    must_train_on(2, "again-2", "checkpoint.background=true");
    run_must_equal(&fixture, "plain-2", "again-2", RUN_STEPS);
}

static void bf16_trains_alike(void **state)
{
    (void)state;
    run_fixture_set(&fixture, "run.compute=bf16");
    must_train_on(0, "bf16-1", "checkpoint.every=10");
    must_train_on(2, "bf16-2", "checkpoint.every=10");
    must_train_alike("bf16-1", "bf16-2", 1e-2);
    must_have_near_weights("bf16-1", "bf16-2", RUN_STEPS, 1e-2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(any_number_trains_alike, forget),
        cmocka_unit_test_setup(one_large_tensor, forget),
        cmocka_unit_test_setup(same_run_twice, forget),
        cmocka_unit_test_setup(bf16_trains_alike, forget),
    };
    if (!program_has_ranks()) {
        print_message("skipped: no mpirun, or a build without MPI\n");
        return 77;
    }
    return cmocka_run_group_tests(tests, open_all, close_all);
}
