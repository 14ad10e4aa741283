// Bad shards through the real program (case C8): training stops with the words of `dtrain data check`,
// or leaves out and counts; what is left out by a verdict file might as well not be there.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "tests/support/run_fixture.h"
#include "tests/support/shard_edit.h"
#include "trainer/files.h"

static struct run_fixture fixture;

static int open_test(void **state)
{
    (void)state;
    run_fixture_open(&fixture);
    return 0;
}

static int close_test(void **state)
{
    (void)state;
    run_fixture_close(&fixture);
    return 0;
}

static const char *shard_path(void)
{
    return run_path(&fixture, "train.h5");
}

static int check_data(const char *more)
{
    return more != NULL
               ? run_command(&fixture, "check", false, "data", "check", shard_path(), more, NULL)
               : run_command(&fixture, "check", false, "data", "check", shard_path(), NULL);
}

// Every fault that the last data check printed is in the output of a run. Returns how many.
static int must_say_the_same(const char *run)
{
    char *text = program_text(run_path(&fixture, "check.out"));
    int faults = 0;
    for (char *line = text, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        *end = '\0';
        if (strncmp(line, shard_path(), strlen(shard_path())) != 0)
            continue;
        run_must_say(&fixture, run, line);
        faults++;
    }
    free(text);
    return faults;
}

static void must_have_no_step(const char *run)
{
    assert_int_equal(program_step(run_path(&fixture, "%s", run)), -1);
    assert_int_equal(program_checkpoint(run_path(&fixture, "%s", run)), -1);
}

// ---- structure -----------------------------------------------------------------------------------

static void short_features(void)
{
    struct edit_form form = {.rows = 1};
    struct fixture_options options = run_train_shard();
    for (int64_t d = 0; d < options.documents; d++)
        form.rows += (hsize_t)options.lengths[d];
    form.rows -= 2;
    edit_rewrite_dataset(shard_path(), "hidden_states", &form);
}

static void short_mask(void)
{
    struct edit_form form = {.rows = 0};
    struct fixture_options options = run_train_shard();
    for (int64_t d = 0; d < options.documents; d++)
        form.rows += (hsize_t)options.lengths[d];
    form.rows--;
    edit_rewrite_dataset(shard_path(), "loss_mask", &form);
}

static void change_shard(void (*change)(struct fixture *))
{
    struct fixture_options options = run_train_shard();
    struct fixture shard;
    fixture_make(&shard, &options);
    change(&shard);
    fixture_write(&shard, shard_path());
    fixture_release(&shard);
}

static void token_of_vocabulary_size(struct fixture *shard)
{
    shard->input_ids[shard->doc_offsets[3] + 5] = 64;
}

static void token_outside(void)
{
    change_shard(token_of_vocabulary_size);
}

static void cut_file(void)
{
    edit_cut(shard_path(), files_size(shard_path()) * 6 / 10);
}

static void no_documents(void)
{
    static const int64_t none[] = {0};
    static const hsize_t one[] = {1};
    edit_replace_dataset(shard_path(), "doc_offsets", 1, one, H5T_NATIVE_INT64, none);
}

static void no_last_hidden(void)
{
    edit_remove_attribute(shard_path(), "last_hidden");
}

static void layer_ids(const int64_t *ids)
{
    edit_integer_attribute(shard_path(), "target_layer_ids", H5T_STD_I32LE, ids, 3);
}

static void repeated_layer(void)
{
    layer_ids((const int64_t[]){1, 3, 3});
}

static void negative_layer(void)
{
    layer_ids((const int64_t[]){-1, 3, 5});
}

static void descending_layers(void)
{
    layer_ids((const int64_t[]){5, 3, 1});
}

static const struct structural {
    const char *words;
    void (*make)(void);
} structurals[] = {
    {"hidden_states has", short_features},
    {"loss_mask has", short_mask},
    {"document 3: row 5: token id 64", token_outside},
    {"truncated: the file has", cut_file},
    {"no documents", no_documents},
    {"last_hidden is missing", no_last_hidden},
    {"target_layer_ids", repeated_layer},
    {"target_layer_ids", negative_layer},
    {"target_layer_ids", descending_layers},
};

static void structural_faults_end_before_step_1(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(structurals) / sizeof(*structurals); i++) {
        struct fixture_options options = run_train_shard();
        char name[32];
        fixture_shard(shard_path(), &options);
        structurals[i].make();
        snprintf(name, sizeof(name), "structure-%zu", i);
        assert_int_equal(check_data("--no-verdicts"), 1);
        run_must_say(&fixture, "check", structurals[i].words);
        assert_int_equal(run_train(&fixture, name, NULL), 2);
        assert_true(must_say_the_same(name) > 0);
        must_have_no_step(name);
    }
}

// What only the target or the config can contradict.
static void wrong_layers_end_before_step_1(void **state)
{
    (void)state;
    const char *const sets[] = {"target.layer_ids=[3, 1]", "target.layer_ids=[1, 3, 3]",
                                "target.layer_ids=[1, 2]", "target.layer_ids=[-1, 3]",
                                "target.layer_ids=[1, 8]"};
    for (size_t i = 0; i < sizeof(sets) / sizeof(*sets); i++) {
        assert_int_equal(run_train(&fixture, "layers", "--set", sets[i], NULL), 2);
        run_must_say(&fixture, "layers", "target.layer_ids");
        must_have_no_step("layers");
    }
    layer_ids((const int64_t[]){1, 3, 8}); // of layers 0 to 7
    assert_int_equal(run_train(&fixture, "layers", NULL), 2);
    run_must_say(&fixture, "layers", "target_layer_ids holds 8");
    run_must_say(&fixture, "layers", "train.h5");
}

static void no_supervised_token(struct fixture *shard)
{
    memset(shard->loss_mask, 0, (size_t)shard->content.tokens);
}

static void nothing_supervised_is_said(void **state)
{
    (void)state;
    change_shard(no_supervised_token);
    assert_int_equal(run_train(&fixture, "empty", NULL), 2);
    run_must_say(&fixture, "empty", "no supervised token in the data set");
    run_must_say(&fixture, "empty", "among their first 256 (data.seq_len, by which");
    must_have_no_step("empty");
}

// ---- values --------------------------------------------------------------------------------------

enum { BAD = 11 }; // the document that is made bad

static void nan_value(struct fixture *shard)
{
    fixture_hidden(shard, shard->doc_offsets[BAD] + 7, 1)[2] = 0x7fc0;
}

static void inf_value(struct fixture *shard)
{
    fixture_hidden(shard, shard->doc_offsets[BAD] + 7, 3)[0] = 0xff80;
}

static void zero_plane(struct fixture *shard)
{
    for (int64_t t = shard->doc_offsets[BAD]; t < shard->doc_offsets[BAD + 1]; t++)
        memset(fixture_hidden(shard, t, 1), 0, 8 * sizeof(bf16));
}

static void equal_planes(struct fixture *shard)
{
    for (int64_t t = shard->doc_offsets[BAD]; t < shard->doc_offsets[BAD + 1]; t++)
        memcpy(fixture_hidden(shard, t, 2), fixture_hidden(shard, t, 1), 8 * sizeof(bf16));
}

static const struct value_fault {
    const char *words;
    void (*make)(struct fixture *shard);
} value_faults[] = {
    {"document 11: row 7 of plane 1 (layer 3): NaN", nan_value},
    {"document 11: row 7 of plane 3 (last hidden state): inf", inf_value},
    {"document 11: plane 1 (layer 3): all zero", zero_plane},
    {"document 11: plane 1 (layer 3) and plane 2 (layer 5) are bitwise equal", equal_planes},
};
enum { VALUE_FAULTS = sizeof(value_faults) / sizeof(*value_faults) };

// The lines of a run that failed are the first ones of a run over sound data.
static void must_be_prefix(const char *run, const char *sound)
{
    cJSON *a = program_steady_metrics(run_path(&fixture, "%s", run));
    cJSON *b = program_steady_metrics(run_path(&fixture, "%s", sound));
    int lines = cJSON_GetArraySize(a);
    assert_true(lines < cJSON_GetArraySize(b));
    for (int i = 0; i < lines; i++)
        assert_true(cJSON_Compare(cJSON_GetArrayItem(a, i), cJSON_GetArrayItem(b, i), true));
    cJSON_Delete(a);
    cJSON_Delete(b);
}

static void bad_values_stop_before_they_are_used(void **state)
{
    (void)state;
    assert_int_equal(run_train(&fixture, "sound", NULL), 0);
    for (int i = 0; i < VALUE_FAULTS; i++) {
        char name[32];
        snprintf(name, sizeof(name), "values-%d", i);
        change_shard(value_faults[i].make);
        assert_int_equal(check_data("--no-verdicts"), 1);
        run_must_say(&fixture, "check", value_faults[i].words);
        assert_int_equal(run_train(&fixture, name, NULL), 1);
        assert_true(must_say_the_same(name) > 0);
        must_be_prefix(name, "sound");
    }
}

// The document's bytes are not the ones that were written.
static void changed_bytes_stop(void **state)
{
    (void)state;
    struct fixture_options options = run_train_shard();
    struct fixture shard;
    uint32_t crcs[RUN_DOCUMENTS] = {0};
    hsize_t count = RUN_DOCUMENTS;
    fixture_make(&shard, &options);
    fixture_write(&shard, shard_path());
    fixture_release(&shard);
    edit_replace_dataset(shard_path(), "doc_crc32c", 1, &count, H5T_NATIVE_UINT32, crcs);
    assert_int_equal(run_train(&fixture, "crc", NULL), 1);
    run_must_say(&fixture, "crc", "CRC-32C");
    assert_int_equal(run_train(&fixture, "crc-off", "--set", "data.check_crc=false", NULL), 0);
}

static double sum_of(const char *run, const char *name)
{
    cJSON *metrics = program_metrics(run_path(&fixture, "%s", run)), *line;
    double sum = 0.0;
    cJSON_ArrayForEach(line, metrics)
    {
        assert_true(program_number(line, "loss") > 0.0);
        sum += program_number(line, name);
    }
    cJSON_Delete(metrics);
    return sum;
}

static const char skip[] = "data.on_bad_sample=skip";

// One of 40 documents, met once an epoch.
static void skip_counts(void **state)
{
    (void)state;
    run_fixture_set(&fixture, skip);
    for (int i = 0; i < VALUE_FAULTS; i++) {
        char name[32];
        snprintf(name, sizeof(name), "skip-%d", i);
        change_shard(value_faults[i].make);
        assert_int_equal(check_data("--no-verdicts"), 1);
        assert_int_equal(run_train(&fixture, name, "--set", "data.max_bad_fraction=0.03", NULL), 0);
        run_must_say(&fixture, name, "left out: ");
        assert_true(must_say_the_same(name) > 0);
        assert_true(sum_of(name, "bad_documents") >= 2.0);
    }
}

static void too_many_bad_documents_stop(void **state)
{
    (void)state;
    run_fixture_set(&fixture, skip);
    change_shard(nan_value);
    assert_int_equal(run_train(&fixture, "many", "--set", "data.max_bad_fraction=0.02", NULL), 1);
    run_must_say(&fixture, "many", "1 of 40 documents have bad values");
    run_must_say(&fixture, "many", "data.max_bad_fraction");
    // Known before the first step: by a verdict, or by ids that are looked at then.
    assert_int_equal(check_data(NULL), 1);
    assert_int_equal(run_train(&fixture, "known", "--set", "data.max_bad_fraction=0.02", NULL), 2);
    run_must_say(&fixture, "known", "1 of 40 documents have bad values");
    must_have_no_step("known");
    change_shard(token_of_vocabulary_size);
    assert_int_equal(run_train(&fixture, "ids", "--set", "data.max_bad_fraction=0.02", NULL), 2);
    run_must_say(&fixture, "ids", "1 of 40 documents have bad values");
    assert_int_equal(run_train(&fixture, "ids", "--set", "data.max_bad_fraction=0.03", NULL), 0);
}

// With verdicts at hand `fail` stops before the first step, with the same words.
static void verdicts_stop_before_step_1(void **state)
{
    (void)state;
    change_shard(nan_value);
    assert_int_equal(check_data(NULL), 1);
    assert_int_equal(run_train(&fixture, "verdict", NULL), 2);
    assert_true(must_say_the_same("verdict") > 0);
    must_have_no_step("verdict");
}

// ---- as if they were not there -------------------------------------------------------------------

static const int64_t left_out[] = {0, BAD, RUN_DOCUMENTS - 1};
enum { LEFT_OUT = sizeof(left_out) / sizeof(*left_out) };

static void three_bad_documents(struct fixture *shard)
{
    for (int i = 0; i < LEFT_OUT; i++)
        fixture_hidden(shard, shard->doc_offsets[left_out[i]] + i, i)[i] = 0x7fc0;
}

static bool is_left_out(int64_t document)
{
    for (int i = 0; i < LEFT_OUT; i++)
        if (left_out[i] == document)
            return true;
    return false;
}

// Moves what is kept to the front of every array.
static void without_them(struct fixture *shard)
{
    int64_t kept = 0, tokens = 0;
    size_t row = (size_t)(shard->content.planes * shard->content.hidden_size);
    for (int64_t d = 0; d < RUN_DOCUMENTS; d++) {
        int64_t first = shard->doc_offsets[d], length = shard->doc_offsets[d + 1] - first;
        if (is_left_out(d))
            continue;
        memmove(shard->input_ids + tokens, shard->input_ids + first,
                (size_t)length * sizeof(*shard->input_ids));
        memmove(shard->loss_mask + tokens, shard->loss_mask + first, (size_t)length);
        memmove(shard->hidden_states + (size_t)tokens * row,
                shard->hidden_states + (size_t)first * row, (size_t)length * row * sizeof(bf16));
        shard->doc_ids[kept] = shard->doc_ids[d];
        tokens += length;
        // Offsets behind are still to be read: kept <= d, so this one is not.
        shard->doc_offsets[kept++] = tokens - length;
    }
    shard->doc_offsets[kept] = tokens;
    shard->content.documents = kept;
    shard->content.tokens = tokens;
}

static void left_out_is_as_not_there(void **state)
{
    (void)state;
    change_shard(three_bad_documents);
    assert_int_equal(check_data(NULL), 1);
    run_fixture_set(&fixture, skip);
    run_fixture_set(&fixture, "data.max_bad_fraction=0.1");
    assert_int_equal(run_train(&fixture, "with", NULL), 0);
    run_must_say(&fixture, "with", "3 bad");
    assert_true(sum_of("with", "bad_documents") == 0.0); // none was read
    change_shard(without_them);
    assert_int_equal(run_train(&fixture, "without", NULL), 0);
    run_must_equal(&fixture, "with", "without", RUN_STEPS);
}

// A document left out since: another order of rows, so not this run's continuation.
static void new_verdicts_do_not_change_a_run(void **state)
{
    (void)state;
    change_shard(nan_value);
    run_fixture_set(&fixture, skip);
    run_fixture_set(&fixture, "data.max_bad_fraction=0.1");
    run_fixture_set(&fixture, "schedule.kind=constant");
    assert_int_equal(run_train(&fixture, "since", "--set", "run.max_steps=8", NULL), 0);
    assert_int_equal(check_data(NULL), 1);
    assert_int_equal(run_train(&fixture, "since", NULL), 2);
    run_must_say(&fixture, "since", "left out (1 are now");
    assert_int_equal(remove(run_path(&fixture, "train.h5.verdict.json")), 0);
    assert_int_equal(run_train(&fixture, "since", NULL), 0);
    run_must_say(&fixture, "since", "resuming from");
}

// ---- validation shards ---------------------------------------------------------------------------

static void bad_validation_shards(void **state)
{
    (void)state;
    struct fixture_options options = run_val_shard();
    struct fixture shard;
    run_fixture_set(&fixture, "data.val=[val.h5]");
    fixture_make(&shard, &options);
    fixture_hidden(&shard, 3, 0)[0] = 0x7fc0;
    fixture_write(&shard, run_path(&fixture, "val.h5"));
    fixture_release(&shard);
    assert_int_equal(run_train(&fixture, "val", NULL), 1);
    run_must_say(&fixture, "val", "val.h5: document 0: row 3 of plane 0");
    must_have_no_step("val");
    assert_int_equal(run_train(&fixture, "val-skip", "--set", skip, NULL), 0);
    edit_remove_attribute(run_path(&fixture, "val.h5"), "last_hidden");
    assert_int_equal(run_train(&fixture, "val-structure", NULL), 2);
    run_must_say(&fixture, "val-structure", "data.val: ");
    options.last_hidden = LAST_HIDDEN_POST_NORM;
    fixture_shard(run_path(&fixture, "val.h5"), &options);
    assert_int_equal(run_train(&fixture, "val-other", NULL), 2);
    run_must_say(&fixture, "val-other",
                 "differ in dtype, planes, layer ids, hidden size or last_hidden");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_test, close_test)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(structural_faults_end_before_step_1),
        TEST(wrong_layers_end_before_step_1),
        TEST(nothing_supervised_is_said),
        TEST(bad_values_stop_before_they_are_used),
        TEST(changed_bytes_stop),
        TEST(skip_counts),
        TEST(too_many_bad_documents_stop),
        TEST(verdicts_stop_before_step_1),
        TEST(left_out_is_as_not_there),
        TEST(new_verdicts_do_not_change_a_run),
        TEST(bad_validation_shards),
    };
    return cmocka_run_group_tests_name("run_data", tests, NULL, NULL);
}
