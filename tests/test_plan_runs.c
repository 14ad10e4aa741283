// Runs and the plan before them: shards that are there, what is refused at the start and offered instead,
// cuts that become smaller, and when a frozen cut may; and what is said of memory when a run has ended.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"
#include "data/safetensors.h"
#include "tests/support/run_fixture.h"
#include "trainer/files.h"
#include "trainer/plan_admit.h"
#include "trainer/run.h"

static int64_t needed_by(struct run_fixture *fixture, const char *set)
{
    const char *more = set != NULL ? "--set" : NULL;
    assert_int_equal(run_command(fixture, "plan", true, "plan", "--json", more, set, NULL), 0);
    cJSON *root = program_json(run_path(fixture, "plan.out"));
    int64_t needed = (int64_t)program_number(root, "needed");
    assert_int_equal((int64_t)program_number(cJSON_GetObjectItem(root, "disk"), "documents"),
                     RUN_DOCUMENTS);
    cJSON_Delete(root);
    return needed;
}

static const char *limit_of(const struct run_fixture *fixture, int64_t bytes)
{
    // run_path keeps texts until the fixture is closed.
    return strstr(run_path(fixture, "memory.limit=%lld", (long long)bytes), "memory.limit");
}

// Shards that are there are planned with; patterns without any are named.
static void shards_that_are_there_are_used(void **state)
{
    (void)state;
    struct run_fixture fixture;
    run_fixture_open(&fixture);
    assert_int_equal(run_command(&fixture, "some", true, "plan", "--set",
                                 "data.train=[none-*.h5, train.h5, gone.h5]", NULL),
                     0);
    run_must_say(&fixture, "some", "from 1 shard of data.train");
    run_must_say(&fixture, "some", "left out: --set data.train: no file matches");
    run_must_say(&fixture, "some", "none-*.h5");
    run_must_say(&fixture, "some", "gone.h5: No such file");
    assert_false(run_says(&fixture, "some", "no shards yet"));
    run_fixture_close(&fixture);
}

// A drafter of either kind is described in its own words.
static void each_kind_has_its_words(void **state)
{
    (void)state;
    struct run_fixture fixture;
    run_fixture_open(&fixture);
    assert_int_equal(run_command(&fixture, "dflash", true, "plan", NULL), 0);
    run_must_say(&fixture, "dflash", "drafter   2 layers, ");
    run_must_say(&fixture, "dflash", " anchors, 384 block rows each, in 1 group\n");
    run_must_say(&fixture, "dflash",
                 "Every anchor drawn, every token supervised; a block row sees");
    assert_int_equal(run_command(&fixture, "eagle3", true, "plan", "--set", "drafter.kind=eagle3",
                                 "--set", "layers=1", NULL),
                     0);
    run_must_say(&fixture, "eagle3", "drafter   1 layer, ");
    run_must_say(&fixture, "eagle3", "2 rows of 255 positions, 7 ttt_steps each, in ");
    run_must_say(&fixture, "eagle3", "Every token supervised; a position sees");
    run_must_say(&fixture, "eagle3", "KiB of logits");
    assert_false(run_says(&fixture, "eagle3", "block row"));
    run_fixture_close(&fixture);
}

// What a run that does not fit says is tried: with the first value it names the run fits.
static void a_run_that_does_not_fit_is_refused(void **state)
{
    (void)state;
    struct run_fixture fixture;
    run_fixture_open(&fixture);
    run_fixture_set(&fixture, "memory.group_rows=1024");
    run_fixture_set(&fixture, "memory.chunk_rows=2048");
    run_fixture_set(&fixture, "memory.recompute=none");
    const char *limit = limit_of(&fixture, needed_by(&fixture, NULL) - 100000);
    assert_int_equal(run_train(&fixture, "tight", "--set", limit, NULL), 2);
    run_must_say(&fixture, "tight", "nearest that fit");
    run_must_say(&fixture, "tight", "activations");
    run_must_say(&fixture, "tight", "allowed by memory.limit");
    run_must_say(&fixture, "tight", "run.yaml --fit --set run.device=cpu looks further");
    assert_false(files_exists(run_path(&fixture, "tight"))); // nothing was written
    char *text = program_text(run_path(&fixture, "tight.out"));
    char *offer = strstr(text, "--set memory.group_rows=");
    assert_non_null(offer);
    const char *smaller = run_path(&fixture, "%.*s", (int)strcspn(offer + 6, " "), offer + 6);
    smaller = strstr(smaller, "memory.group_rows");
    assert_int_equal(run_train(&fixture, "fits", "--set", limit, "--set", smaller, "--set",
                               "run.max_steps=1", NULL),
                     0);
    run_must_say(&fixture, "fits", "resident at most");
    run_must_say(&fixture, "fits", " when the run began (the program and its libraries) and ");
    cJSON *metrics = program_metrics(run_path(&fixture, "fits"));
    const cJSON *line = program_line(metrics, 1, "loss");
    assert_true(program_number(line, "begin_bytes") > 0.0);
    assert_true(program_number(line, "memory_bytes") >= program_number(line, "begin_bytes"));
    cJSON_Delete(metrics);
    // The offer, the first lines and the last one have one number.
    const char *needs = run_path(&fixture, "%.*s", (int)strcspn(strstr(offer, "needs ") + 6, ","),
                                 strstr(offer, "needs ") + 6);
    needs = strrchr(needs, '/') + 1;
    assert_int_equal(program_count(run_path(&fixture, "fits.out"), needs), 2);
    free(text);
    run_fixture_close(&fixture);
}

static void open_cuts_become_smaller(void **state)
{
    (void)state;
    struct run_fixture fixture;
    run_fixture_open(&fixture);
    run_fixture_set(&fixture, "run.max_steps=4");
    const char *limit = limit_of(&fixture, needed_by(&fixture, NULL) - 100000);
    assert_int_equal(run_train(&fixture, "cut", "--set", limit, NULL), 0);
    run_must_say(&fixture, "cut", "so that");
    assert_int_equal(run_command(&fixture, "scored", true, "eval", "--checkpoint",
                                 run_checkpoint(&fixture, "cut", 4), "--set", "data.val=[val.h5]",
                                 "--set", "memory.limit=1kB", NULL),
                     2);
    run_must_say(&fixture, "scored", "this run needs");
    assert_false(run_says(&fixture, "scored", "drafter.layers"));
    assert_false(run_says(&fixture, "scored", "data.seq_len"));
    run_fixture_close(&fixture);
}

// A run that began with plenty resumes with less only when its cut may change. What is not used is not
// said, and that results change is said once.
static void a_frozen_cut_is_not_changed_unasked(void **state)
{
    (void)state;
    struct run_fixture fixture;
    run_fixture_open(&fixture);
    run_fixture_set(&fixture, "checkpoint.every=2");
    const char *limit = limit_of(&fixture, needed_by(&fixture, NULL) - 100000);
    assert_int_equal(run_train(&fixture, "run", "--set", "run.max_steps=2", NULL), 0);
    assert_int_equal(run_train(&fixture, "run", "--set", "run.max_steps=4", "--set", limit, NULL),
                     2);
    run_must_say(&fixture, "run", "--replan lets it be cut smaller");
    assert_false(run_says(&fixture, "run", "so that"));
    assert_false(run_says(&fixture, "run", "data.seq_len"));
    assert_false(run_says(&fixture, "run", "drafter.layers"));
    assert_int_equal(
        run_train(&fixture, "run", "--set", "run.max_steps=4", "--set", limit, "--replan", NULL),
        0);
    assert_int_equal(program_checkpoint(run_path(&fixture, "run")), 4);
    assert_int_equal(program_count(run_path(&fixture, "run.out"), "so that"), 1);
    assert_int_equal(program_count(run_path(&fixture, "run.out"), "not bitwise the same"), 1);
    assert_int_equal(
        run_train(&fixture, "run", "--set", "memory.limit=1kB", "--set", "run.max_steps=6", NULL),
        2);
    run_must_say(&fixture, "run", "nothing near fits");
    run_must_say(&fixture, "run", "need a new run");
    run_fixture_close(&fixture);
}

// An execution.json without a checkpoint binds nobody: with less memory the run chooses anew.
static void nothing_to_continue_is_cut_anew(void **state)
{
    (void)state;
    struct run_fixture fixture;
    run_fixture_open(&fixture);
    run_fixture_set(&fixture, "run.max_steps=1");
    const char *limit = limit_of(&fixture, needed_by(&fixture, NULL) - 100000);
    assert_int_equal(run_train(&fixture, "run", NULL), 0);
    assert_int_equal(rename(run_checkpoint(&fixture, "run", 1), run_path(&fixture, "away")), 0);
    assert_int_equal(run_train(&fixture, "run", "--set", limit, NULL), 0);
    run_must_say(&fixture, "run",
                 "run/execution.json can not be obeyed, this run chooses everything anew");
    run_must_say(&fixture, "run", "so that");
    assert_int_equal(program_checkpoint(run_path(&fixture, "run")), 1);
    run_fixture_close(&fixture);
}

// More or fewer layers need another list of types, which --set of the layers alone does not give.
static void listed_layers_are_offered_with_their_list(void **state)
{
    (void)state;
    struct run_fixture fixture;
    run_fixture_open(&fixture);
    run_fixture_set(&fixture, "drafter.layer_types=[full_attention,full_attention]");
    run_fixture_set(&fixture, "memory.recompute=layer");
    run_fixture_set(&fixture, "memory.group_rows=8");
    run_fixture_set(&fixture, "memory.chunk_rows=2");
    const char *limit = limit_of(&fixture, needed_by(&fixture, NULL) - 3000);
    assert_int_equal(run_train(&fixture, "listed", "--set", limit, NULL), 2);
    run_must_say(&fixture, "listed", "drafter.layers=1 with a list drafter.layer_types of as many");
    assert_false(run_says(&fixture, "listed", "--set drafter.layers"));
    run_fixture_close(&fixture);
}

// Rows and steps are those of the run, and what is missing without shards is said.
static void steps_are_those_of_the_run(void **state)
{
    (void)state;
    struct run_fixture fixture;
    run_fixture_open(&fixture);
    run_fixture_set(&fixture, "run.max_steps=0");
    run_fixture_set(&fixture, "run.epochs=1");
    assert_int_equal(run_command(&fixture, "steps", true, "plan", "--json", NULL), 0);
    cJSON *root = program_json(run_path(&fixture, "steps.out"));
    const cJSON *run = cJSON_GetObjectItem(root, "run");
    int64_t steps = (int64_t)program_number(run, "steps");
    assert_int_equal(steps, (int64_t)program_number(run, "epoch_steps"));
    cJSON_Delete(root);
    assert_int_equal(run_train(&fixture, "run", NULL), 0);
    run_must_say(&fixture, "run",
                 run_path(&fixture, "steps: %lld, from step 1", (long long)steps) +
                     strlen(run_path(&fixture, "%s", "")));
    run_fixture_set(&fixture, "run.max_steps=7");
    assert_int_equal(run_command(&fixture, "none", true, "plan", "--set", "data.train=[none.h5]",
                                 "--set", "target.layer_ids=[1,5]", NULL),
                     0);
    run_must_say(&fixture, "none", "not known without the shards of data.train");
    run_must_say(&fixture, "none", "7 at most, by run.max_steps");
    run_fixture_close(&fixture);
}

// Of all tensors in the file; 0: it is not there.
static double tensor_bytes(const char *folder, const char *name)
{
    struct safetensors file;
    struct error err = {""};
    double bytes = 0.0;
    char *path = memory_format("%s/%s", folder, name);
    if (files_exists(path)) {
        if (safetensors_open(&file, path, &err) != 0)
            fail_msg("%s", err.text);
        for (size_t i = 0; i < file.count; i++)
            bytes += (double)file.entries[i].size;
        safetensors_close(&file);
    }
    free(path);
    return bytes;
}

// Arrays that an optimizer has, and what EAGLE-3's servable weights hold beside parameters.
static void checkpoints_take_what_is_planned(void **state)
{
    (void)state;
    static const char *const sets[][3] = {
        {"drafter.kind=dflash", "optimizer.kind=adamw", "optimizer.ema=0"},
        {"drafter.kind=dflash", "optimizer.kind=muon", "optimizer.ema=0.9"},
        {"drafter.kind=eagle3", "drafter.lm_head=frozen", "optimizer.ema=0"},
        {"drafter.kind=eagle3", "drafter.lm_head=frozen", "drafter.draft_vocab=map.safetensors"},
        {"drafter.kind=eagle3", "drafter.lm_head=trainable", "drafter.draft_vocab=map.safetensors"},
    };
    static const char *const files[] = {"master.safetensors", "adam_m.safetensors",
                                        "adam_v.safetensors", "ema.safetensors",
                                        "model.safetensors"};
    struct run_fixture fixture;
    run_fixture_open(&fixture);
    assert_int_equal(run_command(&fixture, "map", false, "vocab", "--size", "24", "--out",
                                 run_path(&fixture, "map.safetensors"),
                                 run_path(&fixture, "train.h5"), NULL),
                     0);
    run_fixture_set(&fixture, "run.max_steps=1");
    int common = fixture.set_count;
    for (size_t i = 0; i < sizeof(sets) / sizeof(*sets); i++) {
        fixture.set_count = common;
        for (int s = 0; s < 3; s++)
            run_fixture_set(&fixture, sets[i][s]);
        assert_int_equal(run_command(&fixture, "plan", true, "plan", "--json", NULL), 0);
        cJSON *root = program_json(run_path(&fixture, "plan.out"));
        double planned = program_number(cJSON_GetObjectItem(root, "disk"), "checkpoint_bytes");
        cJSON_Delete(root);
        run_remove(&fixture, "saved");
        assert_int_equal(run_train(&fixture, "saved", NULL), 0);
        double written = 0.0;
        for (size_t f = 0; f < sizeof(files) / sizeof(*files); f++)
            written += tensor_bytes(run_checkpoint(&fixture, "saved", 1), files[f]);
        if (!(planned == written))
            fail_msg("%s, %s: %.0f bytes planned, %.0f written", sets[i][0], sets[i][1], planned,
                     written);
    }
    run_fixture_close(&fixture);
}

static void card_of_two_processes(size_t *free_bytes, size_t *total_bytes)
{
    *total_bytes = (size_t)140 << 30;
    *free_bytes = *total_bytes - ((size_t)38 << 30);
}

// A card has other processes' memory in use, too: what came since the run began is held against what was to come.
static void a_gpu_tells_the_runs_own_memory(void **state)
{
    (void)state;
    static const struct backend card = {.name = "card", .memory = card_of_two_processes};
    static int others;
    struct run_fixture fixture;
    struct run *run = memory_alloc(1, sizeof(*run));
    run_fixture_open(&fixture);
    run->session.backend = &card;
    snprintf(run->session.execution.device, sizeof(run->session.execution.device), "cuda");
    run->begin_bytes = (size_t)3 << 30;
    assert_int_equal(log_file_set(run_path(&fixture, "memory.out")), 0);
    run->planned_bytes = ((size_t)36 << 30) + plan_begun_bytes(1, 0);
    run_report_memory(run);
    run->session.ranks = (struct ranks *)&others; // never looked into
    run->session.rank_count = 2;
    run->session.joined_bytes = (size_t)512 << 20;
    run->planned_bytes += (size_t)512 << 20;
    run_report_memory(run);
    assert_int_equal(log_file_set(NULL), 0);
    run_must_say(&fixture, "memory",
                 "38.00 GiB in use at most: 3.00 GiB when the run began (CUDA context, and all "
                 "that other processes hold) and 35.00 GiB since, where 36.00 GiB of the planned "
                 "36.47 GiB were to come");
    run_must_say(&fixture, "memory",
                 "(CUDA context and NCCL, and all that other processes hold) and 35.00 GiB since, "
                 "where 36.00 GiB of the planned 36.97 GiB were to come");
    run_fixture_close(&fixture);
    free(run);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shards_that_are_there_are_used),
        cmocka_unit_test(each_kind_has_its_words),
        cmocka_unit_test(a_run_that_does_not_fit_is_refused),
        cmocka_unit_test(open_cuts_become_smaller),
        cmocka_unit_test(a_frozen_cut_is_not_changed_unasked),
        cmocka_unit_test(nothing_to_continue_is_cut_anew),
        cmocka_unit_test(listed_layers_are_offered_with_their_list),
        cmocka_unit_test(steps_are_those_of_the_run),
        cmocka_unit_test(checkpoints_take_what_is_planned),
        cmocka_unit_test(a_gpu_tells_the_runs_own_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
