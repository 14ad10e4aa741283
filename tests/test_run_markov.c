// A Markov head through the real program, on drafters of both kinds: a run that is killed and continued, any
// number of ranks, scoring, what it may start from, and exports, which hold it or are refused.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "data/safetensors.h"
#include "tests/support/run_fixture.h"

enum { LIMIT = 120, TRIES = 20, OWN_SETS = 5 };

static struct run_fixture fixture;

static int open_all(void **state)
{
    (void)state;
    run_fixture_open(&fixture);
    assert_int_equal(run_command(&fixture, "map", false, "vocab", "--size", "24", "--out",
                                 run_path(&fixture, "map.safetensors"),
                                 run_path(&fixture, "train.h5"), NULL),
                     0);
    run_fixture_set(&fixture, "drafter.markov_rank=3");
    run_fixture_set(&fixture, "loss.slot_weight=exp");
    run_fixture_set(&fixture, "optimizer.ema=0.9");
    run_fixture_set(&fixture, "data.val=[val.h5]");
    run_fixture_set(&fixture, "validation.every=5");
    return 0;
}

static int forget(void **state)
{
    (void)state;
    fixture.set_count = OWN_SETS;
    fixture.ranks = 0;
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    run_fixture_close(&fixture);
    return 0;
}

static void use_eagle3(void)
{
    static const char *const sets[] = {"drafter.kind=eagle3", "drafter.ttt_steps=3",
                                       "drafter.layers=1", "drafter.draft_vocab=map.safetensors",
                                       "drafter.lm_head=trainable"};
    for (size_t i = 0; i < sizeof(sets) / sizeof(*sets); i++)
        run_fixture_set(&fixture, sets[i]);
}

static void must_train(const char *name, const char *set)
{
    int status = run_train(&fixture, name, "--set", set, NULL);
    if (status != 0)
        run_must_say(&fixture, name, "done: 20 steps");
    assert_int_equal(status, 0);
}

static void must_refuse(const char *name, const char *set, const char *words)
{
    assert_int_equal(run_train(&fixture, name, "--set", set, NULL), 2);
    run_must_say(&fixture, name, words);
}

// Tables of both vocabularies, all of whose rows have moved: w1's too, of the tokens that documents hold.
static void must_have_tables(const char *name, int64_t vocab, int64_t draft)
{
    static const char *const names[] = {"markov_head.markov_w1.weight",
                                        "markov_head.markov_w2.weight"};
    const int64_t rows[] = {vocab, draft};
    struct safetensors m;
    struct error err = {""};
    char *path = memory_format("%s/adam_m.safetensors", run_checkpoint(&fixture, name, RUN_STEPS));
    assert_int_equal(safetensors_open(&m, path, &err), 0);
    for (int i = 0; i < 2; i++) {
        const struct safetensors_entry *entry = safetensors_find(&m, names[i]);
        int64_t moved = 0;
        assert_non_null(entry);
        assert_true(entry->shape[0] == rows[i] && entry->shape[1] == 3);
        for (int64_t r = 0; r < rows[i]; r++) {
            float value;
            memcpy(&value, entry->bytes + (size_t)(3 * r) * sizeof(value), sizeof(value));
            moved += value != 0.0f;
        }
        assert_true(moved > rows[i] / 2);
    }
    safetensors_close(&m);
    free(path);
}

static void killed_and_continued(const char *whole, const char *killed)
{
    int64_t reached = RUN_STEPS;
    must_train(whole, "checkpoint.every=4");
    for (int try = 0; try < TRIES && reached == RUN_STEPS; try++) {
        struct program program = {0};
        run_remove(&fixture, killed);
        run_train_start(&fixture, &program, killed, NULL);
        program_wait_step(&program, run_path(&fixture, "%s", killed), 9, LIMIT);
        program_signal(&program, SIGKILL);
        program_wait(&program, LIMIT);
        reached = program_step(run_path(&fixture, "%s", killed));
    }
    assert_true(reached >= 9 && reached < RUN_STEPS);
    must_train(killed, "checkpoint.every=4");
    run_must_say(&fixture, killed, "resuming from ");
    run_must_equal(&fixture, whole, killed, RUN_STEPS);
}

static void dflash_continues(void **state)
{
    (void)state;
    killed_and_continued("dflash", "dflash-killed");
    must_have_tables("dflash", 64, 64);
}

static void eagle3_continues(void **state)
{
    (void)state;
    use_eagle3();
    run_fixture_set(&fixture, "run.compute=bf16");
    killed_and_continued("eagle3", "eagle3-killed");
    must_have_tables("eagle3", 64, 24);
}

static void must_be_near(const char *first, const char *second)
{
    double distance = program_state_distance(run_checkpoint(&fixture, first, RUN_STEPS),
                                             run_checkpoint(&fixture, second, RUN_STEPS), "master");
    if (!(distance <= 1e-6))
        fail_msg("%s and %s: weights are %.3g apart", first, second, distance);
}

static void ranks_train_alike(const char *one, const char *two, const char *three)
{
    must_train(one, "data.rows_per_step=5");
    fixture.ranks = 2;
    must_train(two, "data.rows_per_step=5");
    fixture.ranks = 3;
    must_train(three, "data.rows_per_step=5");
    must_be_near(one, two);
    must_be_near(one, three);
}

static void any_number_of_ranks(void **state)
{
    (void)state;
    if (!program_has_ranks())
        skip();
    ranks_train_alike("dflash-1", "dflash-2", "dflash-3");
    fixture.ranks = 0;
    use_eagle3();
    ranks_train_alike("eagle3-1", "eagle3-2", "eagle3-3");
}

// Muon leaves both tables to AdamW, which has a second moment of them.
static void muon_leaves_the_tables(void **state)
{
    (void)state;
    struct safetensors v;
    struct error err = {""};
    run_fixture_set(&fixture, "optimizer.kind=muon");
    must_train("muon", "optimizer.muon_lr=1e-3");
    char *path =
        memory_format("%s/adam_v.safetensors", run_checkpoint(&fixture, "muon", RUN_STEPS));
    assert_int_equal(safetensors_open(&v, path, &err), 0);
    assert_non_null(safetensors_find(&v, "markov_head.markov_w1.weight"));
    assert_non_null(safetensors_find(&v, "markov_head.markov_w2.weight"));
    assert_null(safetensors_find(&v, "fc.weight"));
    safetensors_close(&v);
    free(path);
}

static void scored_as_in_training(void **state)
{
    (void)state;
    assert_int_equal(run_command(&fixture, "score", true, "eval", "--checkpoint",
                                 run_checkpoint(&fixture, "dflash", RUN_STEPS), NULL),
                     0);
    cJSON *metrics = program_metrics(run_path(&fixture, "dflash"));
    const cJSON *line = program_line(metrics, RUN_STEPS, "val_loss");
    char words[64];
    snprintf(words, sizeof(words), "accept_len_walk      %.4f  (%.0f blocks)",
             program_number(line, "val_accept_len_walk"), program_number(line, "val_walk_blocks"));
    run_must_say(&fixture, "score", words);
    cJSON_Delete(metrics);
}

static int export_of(const char *run, const char *format, const char *out)
{
    return run_command(&fixture, "export", false, "export", "--checkpoint",
                       run_checkpoint(&fixture, run, RUN_STEPS), "--format", format,
                       "--allow-unservable", "--out", run_path(&fixture, "%s", out), NULL);
}

// DFlash with the head is speculators' DSpark; no other layout may leave the head out.
static void exported_whole_or_not(void **state)
{
    (void)state;
    static const char *const formats[] = {"zlab", "specforge", "speculators"};
    for (int f = 0; f < 3; f++) {
        assert_int_equal(export_of("eagle3", formats[f], "none"), 1);
        run_must_say(&fixture, "export", "drafter.markov_rank: ");
        if (strcmp(formats[f], "speculators") == 0)
            continue;
        assert_int_equal(export_of("dflash", formats[f], "none"), 1);
        run_must_say(&fixture, "export", "drafter.markov_rank: ");
    }
    assert_int_equal(export_of("dflash", "speculators", "dspark"), 0);
    char *config = program_text(run_path(&fixture, "dspark/config.json"));
    cJSON *object = cJSON_Parse(config);
    assert_string_equal(cJSON_GetObjectItem(object, "speculators_model_type")->valuestring,
                        "dspark");
    assert_true(program_number(object, "markov_rank") == 3.0);
    assert_true(cJSON_IsFalse(cJSON_GetObjectItem(object, "enable_confidence_head")));
    cJSON_Delete(object);
    free(config);
}

// The window of a sliding layer is not known to mean the same there.
static void windows_are_not_exported(void **state)
{
    (void)state;
    run_fixture_set(&fixture, "drafter.layers=1");
    run_fixture_set(&fixture, "drafter.layer_types=[sliding_attention]");
    must_train("sliding", "drafter.sliding_window=8");
    assert_int_equal(export_of("sliding", "speculators", "none"), 1);
    run_must_say(&fixture, "export", "drafter.layer_types: with a Markov head only");
}

// A drafter with the head; and one without, where the two tables are allowed to start anew.
static void starts_from_others(void **state)
{
    (void)state;
    static const char allow[] = "drafter.init_allow=[markov_rank,markov_head.markov_w1.weight,"
                                "markov_head.markov_w2.weight]";
    char *own =
        memory_format("drafter.init_from=%s", run_checkpoint(&fixture, "dflash", RUN_STEPS));
    must_train("from-own", own);
    char *dspark = memory_format("drafter.init_from=%s", run_path(&fixture, "dspark"));
    must_train("from-dspark", dspark);
    run_must_equal(&fixture, "from-own", "from-dspark", RUN_STEPS);
    free(dspark);
    fixture.sets[0] = "drafter.markov_rank=0";
    must_train("plain", "checkpoint.every=10");
    must_refuse("without", own, "markov_rank: 3, but drafter.markov_rank is 0");
    fixture.sets[0] = "drafter.markov_rank=3";
    char *plain =
        memory_format("drafter.init_from=%s", run_checkpoint(&fixture, "plain", RUN_STEPS));
    must_refuse("from-plain", plain, "markov_head.markov_w1.weight: the tensor is missing");
    run_fixture_set(&fixture, allow);
    must_train("from-plain", plain);
    free(plain);
    free(own);
}

static void dpace_is_refused(void **state)
{
    (void)state;
    must_refuse("dpace", "loss.slot_weight=dpace",
                "drafter.markov_rank: can not be trained with loss.slot_weight dpace");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(dflash_continues, forget),
        cmocka_unit_test_teardown(eagle3_continues, forget),
        cmocka_unit_test_teardown(any_number_of_ranks, forget),
        cmocka_unit_test_teardown(muon_leaves_the_tables, forget),
        cmocka_unit_test_teardown(scored_as_in_training, forget),
        cmocka_unit_test_teardown(exported_whole_or_not, forget),
        cmocka_unit_test_teardown(windows_are_not_exported, forget),
        cmocka_unit_test_teardown(starts_from_others, forget),
        cmocka_unit_test_teardown(dpace_is_refused, forget),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
