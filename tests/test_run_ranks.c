// The same training on any number of ranks, through the real program under mpirun: losses, anchors and weights
// (cases C4, C6, C7, C12), and runs that continue on another number. What ends ranks by force is
// test_run_rank_kills.c's.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/log.h"
#include "data/safetensors.h"
#include "tests/support/run_fixture.h"
#include "trainer/files.h"

static struct run_fixture fixture;
enum { OWN_SETS = 3 };

static int open_all(void **state)
{
    (void)state;
    run_fixture_open(&fixture);
    run_fixture_set(&fixture, "data.rows_per_step=5"); // 3 and 2 rows, or 2, 2 and 1
    run_fixture_set(&fixture, "validation.every=5");
    run_fixture_set(&fixture, "data.val=[val.h5]");
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

// Validation too: its rows are spread like others.
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

// The line of the same step and kind.
static const cJSON *line_like(const cJSON *metrics, const cJSON *line)
{
    const char *kind = cJSON_HasObjectItem(line, "val_loss") ? "val_loss" : "lr";
    return program_line(metrics, (int64_t)program_number(line, "step"), kind);
}

// Every line of `second`, which may begin later, against `first`: losses to tolerance, counts and anchors
// exactly.
static void must_train_alike(const char *first, const char *second, double tolerance)
{
    static const char *const exact[] = {"anchors", "tokens", "rows", "lr", "epoch", "skipped"};
    static const char *const close[] = {"loss", "grad_norm", "val_loss", "val_accept_len_walk"};
    cJSON *a = program_metrics(run_path(&fixture, "%s", first));
    cJSON *b = program_metrics(run_path(&fixture, "%s", second));
    assert_true(cJSON_GetArraySize(b) > RUN_STEPS / 2);
    for (int i = 0; i < cJSON_GetArraySize(b); i++) {
        const cJSON *y = cJSON_GetArrayItem(b, i), *x = line_like(a, y);
        assert_non_null(x);
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
    assert_int_equal(program_step(run_path(&fixture, "%s", two)), RUN_STEPS);
    assert_int_equal(program_step(run_path(&fixture, "%s", three)), RUN_STEPS);
    assert_true(files_size(run_path(&fixture,
                                    "%s/checkpoints/step-%08d/adam_m-00003-of-00003"
                                    ".safetensors",
                                    three, RUN_STEPS)) > 0);
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

// Matrices are owned whole, so Muon needs no rank but the owner.
static void muon_trains_alike(void **state)
{
    (void)state;
    run_fixture_set(&fixture, "optimizer.kind=muon");
    run_fixture_set(&fixture, "optimizer.muon_weight_decay=0.1");
    must_train_on(0, "muon-1", "optimizer.muon_lr=1e-3");
    must_train_on(2, "muon-2", "optimizer.muon_lr=1e-3");
    must_train_alike("muon-1", "muon-2", 1e-4);
    must_have_near_weights("muon-1", "muon-2", RUN_STEPS, 1e-4);
    must_train_on(3, "muon-1", "optimizer.muon_lr=1e-3"); // reads what one rank wrote
    run_must_say(&fixture, "muon-1", "resuming from ");
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

// What servers read is what the masters of all ranks say, rounded.
static void servable_weights_are_whole(void **state)
{
    (void)state;
    run_fixture_set(&fixture, "data.rows_per_step=1"); // rank 1 never has a row
    must_train_on(0, "alone-1", "checkpoint.every=10");
    must_train_on(2, "alone-2", "checkpoint.every=10");
    must_train_alike("alone-1", "alone-2", 1e-12); // sums of validation rows in another order
    must_have_near_weights("alone-1", "alone-2", RUN_STEPS, 0.0);
    const char *first = run_checkpoint(&fixture, "alone-1", RUN_STEPS),
               *second = run_checkpoint(&fixture, "alone-2", RUN_STEPS);
    char *a = memory_format("%s/model.safetensors", first);
    char *b = memory_format("%s/model.safetensors", second);
    struct safetensors x, y;
    struct error err = {""};
    if (safetensors_open(&x, a, &err) != 0 || safetensors_open(&y, b, &err) != 0)
        fail_msg("%s", err.text);
    assert_int_equal(x.map_size, y.map_size);
    assert_memory_equal(x.map, y.map, x.map_size);
    safetensors_close(&x);
    safetensors_close(&y);
    free(a);
    free(b);
}

// ---- ranks with nothing (case C4) ----------------------------------------------------------------

enum { DOCUMENTS = 12, LENGTH = 200 };

// Each document fills a row. Those of an odd number have supervised tokens, but no two beside each other:
// rows without an anchor.
static void write_barren(const char *path)
{
    static int64_t lengths[DOCUMENTS];
    static uint8_t mask[DOCUMENTS * LENGTH];
    struct fixture_options options = run_train_shard();
    for (int64_t d = 0; d < DOCUMENTS; d++) {
        lengths[d] = LENGTH;
        for (int64_t t = 0; t < LENGTH; t++)
            mask[d * LENGTH + t] = d % 2 == 0 || t % 2 == 0;
    }
    options.documents = DOCUMENTS;
    options.lengths = lengths;
    options.loss_mask = mask;
    fixture_shard(path, &options);
}

static void ranks_with_nothing(void **state)
{
    (void)state;
    write_barren(run_path(&fixture, "train.h5"));
    write_barren(run_path(&fixture, "barren-val.h5"));
    run_fixture_set(&fixture, "data.rows_per_step=2");
    run_fixture_set(&fixture, "data.val=[barren-val.h5]");
    run_fixture_set(&fixture, "validation.rows=3");
    must_train_on(0, "barren-1", "checkpoint.every=10");
    must_train_on(2, "barren-2", "checkpoint.every=10");
    must_train_on(3, "barren-3", "checkpoint.every=10");
    must_train_alike("barren-1", "barren-2", 1e-5);
    must_train_alike("barren-1", "barren-3", 1e-5);
    must_have_near_weights("barren-1", "barren-2", RUN_STEPS, 1e-6);
    must_have_near_weights("barren-1", "barren-3", RUN_STEPS, 1e-6);
    double empty = run_state_number(&fixture, "barren-1", RUN_STEPS, "skipped_empty");
    assert_true(empty > 0.0 && empty < RUN_STEPS / 2);
    assert_true(run_state_number(&fixture, "barren-2", RUN_STEPS, "skipped_empty") == empty);
    run_must_say(&fixture, "barren-2", "no valid anchor in its 2 rows");
}

static void nothing_supervised(void **state)
{
    (void)state;
    static uint8_t mask[DOCUMENTS * LENGTH];
    static int64_t lengths[DOCUMENTS];
    struct fixture_options options = run_train_shard();
    for (int64_t d = 0; d < DOCUMENTS; d++)
        lengths[d] = LENGTH;
    options.documents = DOCUMENTS;
    options.lengths = lengths;
    options.loss_mask = mask;
    fixture_shard(run_path(&fixture, "train.h5"), &options);
    assert_int_equal(train_on(2, "unsupervised", "checkpoint.every=10"), 2);
    run_must_say(&fixture, "unsupervised", "supervised");
    assert_false(files_exists(run_path(&fixture, "unsupervised")));
}

// ---- another number of ranks continues -----------------------------------------------------------

static void must_continue(const char *name, const char *from, int ranks)
{
    fixture.ranks = ranks;
    assert_int_equal(run_train(&fixture, name, "--resume", run_checkpoint(&fixture, from, 8), NULL),
                     0);
    run_must_say(&fixture, name, "resuming from ");
    run_must_say(&fixture, name, "results agree to rounding");
    must_train_alike("plain-1", name, 1e-5);
    must_have_near_weights("plain-1", name, RUN_STEPS, 1e-6);
}

static void other_numbers_continue(void **state)
{
    (void)state;
    must_continue("from-2-on-1", "plain-2", 0);
    must_continue("from-1-on-2", "plain-1", 2);
    must_continue("from-2-on-3", "plain-2", 3);
    must_continue("from-3-on-2", "plain-3", 2);
}

// What else reads a checkpoint: eval its state, export its servable weights.
static void others_read_parts(void **state)
{
    (void)state;
    const char *checkpoint = run_checkpoint(&fixture, "plain-2", RUN_STEPS);
    assert_int_equal(run_command(&fixture, "eval-1", true, "eval", "--checkpoint",
                                 run_checkpoint(&fixture, "plain-1", RUN_STEPS), NULL),
                     0);
    assert_int_equal(
        run_command(&fixture, "eval-2", true, "eval", "--checkpoint", checkpoint, NULL), 0);
    assert_int_equal(run_command(&fixture, "export-2", false, "export", "--checkpoint", checkpoint,
                                 "--format", "zlab", "--out", run_path(&fixture, "exported"), NULL),
                     0);
    assert_true(files_size(run_path(&fixture, "exported/model.safetensors")) > 0);
    char *set = memory_format("drafter.init_from=%s", checkpoint);
    must_train_on(2, "begun-from-parts", set);
    free(set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(any_number_trains_alike, forget),
        cmocka_unit_test_setup(one_large_tensor, forget),
        cmocka_unit_test_setup(same_run_twice, forget),
        cmocka_unit_test_setup(muon_trains_alike, forget),
        cmocka_unit_test_setup(bf16_trains_alike, forget),
        cmocka_unit_test_setup(servable_weights_are_whole, forget),
        cmocka_unit_test_setup(ranks_with_nothing, forget),
        cmocka_unit_test_setup(nothing_supervised, forget),
        cmocka_unit_test_setup(other_numbers_continue, forget),
        cmocka_unit_test_setup(others_read_parts, forget),
    };
    if (!program_has_ranks()) {
        print_message("skipped: no mpirun, or a build without MPI\n");
        return 77;
    }
    return cmocka_run_group_tests(tests, open_all, close_all);
}
