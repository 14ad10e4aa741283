// EAGLE-3 through the real program: a run with a draft vocabulary that is killed and continued, on one rank
// and on two, scored, and what is refused. Rows of 32,768 tokens.
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
#include "tests/support/run_fixture.h"

enum { LIMIT = 120, TRIES = 20 };

static struct run_fixture fixture;

// In the place of one that may be there, which the command itself does not replace.
static void make_map(const char *name, const char *size, const char *shard)
{
    unlink(run_path(&fixture, "%s.safetensors", name));
    int status = run_command(&fixture, name, false, "vocab", "--size", size, "--out",
                             run_path(&fixture, "%s.safetensors", name),
                             run_path(&fixture, "%s", shard), NULL);
    assert_int_equal(status, 0);
}

static int open_all(void **state)
{
    (void)state;
    static const char *const sets[] = {"drafter.kind=eagle3",
                                       "drafter.ttt_steps=4",
                                       "drafter.fc_norm=true",
                                       "drafter.norm_output=true",
                                       "drafter.style=llama",
                                       "drafter.layers=2",
                                       "drafter.layer_types=[sliding_attention,full_attention]",
                                       "drafter.sliding_window=9",
                                       "drafter.lm_head=trainable",
                                       "loss.ttt_decay_base=0.8",
                                       "data.val=[val.h5]",
                                       "validation.every=5"};
    run_fixture_open(&fixture);
    make_map("map", "24", "train.h5");
    for (size_t i = 0; i < sizeof(sets) / sizeof(*sets); i++)
        run_fixture_set(&fixture, sets[i]);
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    run_fixture_close(&fixture);
    return 0;
}

static int train(const char *name, const char *set)
{
    return run_train(&fixture, name, "--set", "drafter.draft_vocab=map.safetensors", "--set", set,
                     NULL);
}

static void must_train(const char *name, const char *set)
{
    int status = train(name, set);
    if (status != 0)
        run_must_say(&fixture, name, "done: 20 steps");
    assert_int_equal(status, 0);
}

static void reports_what_it_learns(void **state)
{
    (void)state;
    must_train("whole", "drafter.init_std=0.02");
    run_must_say(&fixture, "whole", "24 of 64 tokens");
    run_must_say(&fixture, "whole", "every position that a ttt_step is scored at");
    run_must_say(&fixture, "whole", "outside the draft vocabulary");
    cJSON *metrics = program_metrics(run_path(&fixture, "whole"));
    const cJSON *line = program_line(metrics, RUN_STEPS, "lr");
    const cJSON *full = cJSON_GetObjectItem(line, "acc"),
                *given = cJSON_GetObjectItem(line, "acc_given");
    assert_int_equal(cJSON_GetArraySize(full), 4);
    assert_int_equal(cJSON_GetArraySize(given), 4);
    assert_true(cJSON_GetArrayItem(full, 0)->valuedouble ==
                cJSON_GetArrayItem(given, 0)->valuedouble);
    double share = program_number(line, "outside_share");
    assert_true(share > 0.0 && share < 1.0);
    assert_true(program_number(line, "anchors") == program_number(line, "valid_anchors"));
    assert_true(program_number(line, "slots") < 4.0 * program_number(line, "anchors"));
    cJSON_Delete(metrics);
}

// Steps that compare with the kept tokens alone learn the same; validation compares with all.
static void steps_may_leave_the_whole_vocabulary(void **state)
{
    (void)state;
    double loss[2][RUN_STEPS];
    for (int full = 0; full < 2; full++) {
        const char *name = full ? "full" : "brief";
        int status = run_train(
            &fixture, name, "--set", "drafter.draft_vocab=map.safetensors", "--set",
            "loss.out_of_vocab=kept", "--set",
            full ? "loss.full_vocab_metrics=true" : "loss.full_vocab_metrics=false", NULL);
        assert_int_equal(status, 0);
        cJSON *metrics = program_metrics(run_path(&fixture, "%s", name));
        for (int step = 1; step <= RUN_STEPS; step++) {
            const cJSON *line = program_line(metrics, step, "lr");
            assert_int_equal(cJSON_HasObjectItem(line, "outside_share"), full);
            loss[full][step - 1] = program_number(line, "loss");
        }
        double share =
            program_number(program_line(metrics, RUN_STEPS, "val_loss"), "val_outside_share");
        assert_true(share > 0.0 && share < 1.0);
        cJSON_Delete(metrics);
    }
    for (int i = 0; i < RUN_STEPS; i++)
        assert_true(fabs(loss[0][i] - loss[1][i]) <= 1e-4 * fabs(loss[1][i]));
    assert_int_equal(train("masked", "loss.full_vocab_metrics=false"), 2);
    run_must_say(&fixture, "masked", "loss.full_vocab_metrics");
}

static void killed_and_continued(void **state)
{
    (void)state;
    int64_t reached = RUN_STEPS;
    for (int try = 0; try < TRIES && reached == RUN_STEPS; try++) {
        struct program program = {0};
        run_remove(&fixture, "killed");
        run_train_start(&fixture, &program, "killed", "--set",
                        "drafter.draft_vocab=map.safetensors", NULL);
        program_wait_step(&program, run_path(&fixture, "killed"), 9, LIMIT);
        program_signal(&program, SIGKILL);
        program_wait(&program, LIMIT);
        reached = program_step(run_path(&fixture, "killed"));
    }
    assert_true(reached >= 9 && reached < RUN_STEPS);
    must_train("killed", "drafter.init_std=0.02");
    run_must_say(&fixture, "killed", "resuming from ");
    run_must_equal(&fixture, "whole", "killed", RUN_STEPS);
}

// Scoring a checkpoint gives what validation gave.
static void scored_as_in_training(void **state)
{
    (void)state;
    assert_int_equal(run_command(&fixture, "score", true, "eval", "--checkpoint",
                                 run_checkpoint(&fixture, "whole", RUN_STEPS), "--set",
                                 "drafter.draft_vocab=map.safetensors", NULL),
                     0);
    cJSON *metrics = program_metrics(run_path(&fixture, "whole"));
    const cJSON *line = program_line(metrics, RUN_STEPS, "val_loss");
    char words[64];
    snprintf(words, sizeof(words), "accept_len_walk      %.4f  (%.0f blocks)",
             program_number(line, "val_accept_len_walk"), program_number(line, "val_walk_blocks"));
    run_must_say(&fixture, "score", words);
    run_must_say(&fixture, "score", "slots whose teacher wants a token that is not in the draft");
    cJSON_Delete(metrics);
    // Whatever positions are trained on: those that serving reaches.
    assert_int_equal(run_command(&fixture, "feature", true, "eval", "--checkpoint",
                                 run_checkpoint(&fixture, "whole", RUN_STEPS), "--set",
                                 "drafter.draft_vocab=map.safetensors", "--set",
                                 "loss.mask_index=feature", NULL),
                     0);
    run_must_say(&fixture, "feature", words);
    char *served = program_text(run_path(&fixture, "score.out"));
    char *loss = strstr(served, "\nloss ");
    assert_non_null(loss);
    loss[1 + strcspn(loss + 1, "\n")] = '\0';
    run_must_say(&fixture, "feature", loss);
    free(served);
}

// Those too that weigh nothing in training.
static void all_drafts_are_scored(void **state)
{
    (void)state;
    static const char *const members[] = {"\naccept_len_walk ", "\nacc ", "\nacc_given "};
    assert_int_equal(run_command(&fixture, "first", true, "eval", "--checkpoint",
                                 run_checkpoint(&fixture, "whole", RUN_STEPS), "--set",
                                 "drafter.draft_vocab=map.safetensors", "--set",
                                 "loss.ttt_decay_base=0", NULL),
                     0);
    char *score = program_text(run_path(&fixture, "score.out"));
    for (size_t i = 0; i < sizeof(members) / sizeof(*members); i++) {
        const char *begin = strstr(score, members[i]);
        assert_non_null(begin);
        char *line = memory_format("%.*s", (int)strcspn(begin + 1, "\n"), begin + 1);
        run_must_say(&fixture, "first", line);
        free(line);
    }
    free(score);
}

static void two_ranks_are_one(void **state)
{
    (void)state;
    if (!program_has_ranks())
        skip();
    must_train("one", "data.rows_per_step=5");
    fixture.ranks = 2;
    must_train("two", "data.rows_per_step=5");
    fixture.ranks = 0;
    double distance = program_state_distance(run_checkpoint(&fixture, "one", RUN_STEPS),
                                             run_checkpoint(&fixture, "two", RUN_STEPS), "master");
    if (!(distance <= 1e-6))
        fail_msg("weights are %.3g apart", distance);
    cJSON *a = program_metrics(run_path(&fixture, "one"));
    cJSON *b = program_metrics(run_path(&fixture, "two"));
    static const char *const equal[] = {"val_anchors", "val_slots", "val_walk_blocks"};
    const cJSON *x = program_line(a, RUN_STEPS, "val_loss"),
                *y = program_line(b, RUN_STEPS, "val_loss");
    for (size_t i = 0; i < sizeof(equal) / sizeof(*equal); i++)
        assert_true(program_number(x, equal[i]) == program_number(y, equal[i]));
    assert_true(fabs(program_number(x, "val_loss") - program_number(y, "val_loss")) < 1e-5);
    cJSON_Delete(a);
    cJSON_Delete(b);
}

static void other_maps_are_refused(void **state)
{
    (void)state;
    make_map("other", "30", "train.h5");
    make_map("foreign", "24", "val.h5");
    assert_int_equal(
        run_train(&fixture, "whole", "--set", "drafter.draft_vocab=other.safetensors", NULL), 2);
    // Another one under the name of the run's own.
    make_map("map", "23", "train.h5");
    assert_int_equal(train("whole", "run.max_steps=21"), 2);
    run_must_say(&fixture, "whole", "was trained with a map of 24 tokens, and the one in use");
    assert_int_equal(run_command(&fixture, "score", true, "eval", "--checkpoint",
                                 run_checkpoint(&fixture, "whole", RUN_STEPS), "--set",
                                 "drafter.draft_vocab=map.safetensors", NULL),
                     2);
    run_must_say(&fixture, "score", "was trained with a map of 24 tokens, and the one in use");
    make_map("map", "64", "train.h5");
    assert_int_equal(train("whole", "run.max_steps=21"), 2);
    run_must_say(&fixture, "whole", "was trained with a map of 24 tokens, and the one in use");
    make_map("map", "24", "train.h5");
    assert_int_equal(
        run_train(&fixture, "new", "--set", "drafter.draft_vocab=foreign.safetensors", NULL), 2);
    run_must_say(&fixture, "new", "drafter.draft_vocab");
    assert_int_equal(train("new", "drafter.sliding_window=3"), 2);
    run_must_say(&fixture, "new", "drafter.sliding_window: 3 is less than drafter.ttt_steps");
    assert_int_equal(train("new", "drafter.norm_before_fc=true"), 2);
    run_must_say(&fixture, "new", "drafter.fc_norm: given together with drafter.norm_before_fc");
}

// A checkpoint of a map of every token holds no tables.
static void a_map_of_every_token_is_one_too(void **state)
{
    (void)state;
    static const char own[] = "drafter.draft_vocab=all.safetensors";
    make_map("all", "64", "train.h5");
    for (int steps = 2; steps <= 4; steps += 2) {
        int status = run_train(&fixture, "all", "--set", own, "--set",
                               steps == 2 ? "run.max_steps=2" : "run.max_steps=4", NULL);
        assert_int_equal(status, 0);
    }
    make_map("all", "63", "train.h5");
    assert_int_equal(run_command(&fixture, "all-scored", true, "eval", "--checkpoint",
                                 run_checkpoint(&fixture, "all", 4), "--set", own, NULL),
                     2);
    run_must_say(&fixture, "all-scored", "was trained with a map of 64 tokens, and the one in use");
}

// One document that fills a row.
static void long_rows(void **state)
{
    (void)state;
    static const int64_t length = 32768;
    struct fixture_options train_shard = run_train_shard();
    train_shard.documents = 1;
    train_shard.lengths = &length;
    fixture_shard(run_path(&fixture, "train.h5"), &train_shard);
    int status =
        run_train(&fixture, "long", "--set", "data.seq_len=32768", "--set", "data.rows_per_step=1",
                  "--set", "run.max_steps=1", "--set", "drafter.layers=1", "--set",
                  "drafter.layer_types=[full_attention]", "--set", "drafter.ttt_steps=2", NULL);
    if (status != 0)
        run_must_say(&fixture, "long", "done: 1 steps");
    assert_int_equal(status, 0);
    cJSON *metrics = program_metrics(run_path(&fixture, "long"));
    const cJSON *line = program_line(metrics, 1, "lr");
    assert_true(program_number(line, "tokens") == 32768.0);
    assert_true(program_number(line, "anchors") > 16384.0);
    assert_true(isfinite(program_number(line, "grad_norm")));
    cJSON_Delete(metrics);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reports_what_it_learns),
        cmocka_unit_test(steps_may_leave_the_whole_vocabulary),
        cmocka_unit_test(killed_and_continued),
        cmocka_unit_test(scored_as_in_training),
        cmocka_unit_test(all_drafts_are_scored),

        cmocka_unit_test(two_ranks_are_one),
        cmocka_unit_test(other_maps_are_refused),
        cmocka_unit_test(a_map_of_every_token_is_one_too),
        cmocka_unit_test(long_rows),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
