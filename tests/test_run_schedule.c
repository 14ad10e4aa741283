// How runs end and what steps do on the way, through the real program: steps and learning rate (case
// C11), non-finite and empty steps (C12), validation, best and patience, eval and export of the result.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "data/safetensors.h"
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

static void set_all(const char *const *sets)
{
    for (; *sets != NULL; sets++)
        run_fixture_set(&fixture, *sets);
}

static void must_be_near(double got, double wanted, double tolerance, const char *what)
{
    if (!(fabs(got - wanted) <= tolerance))
        fail_msg("%s is %.17g, not %.17g", what, got, wanted);
}

// ---- steps and learning rate ---------------------------------------------------------------------

// Cosine from 2e-3 to 5 % after 10 % of warm-up.
static double expected_lr(int64_t step, int64_t total)
{
    double peak = 2e-3, end = 0.05, warmup = round(0.1 * (double)total);
    if ((double)step <= warmup)
        return peak * (double)step / warmup;
    double way = ((double)step - warmup) / ((double)total - warmup);
    return peak * (end + (1.0 - end) * 0.5 * (1.0 + cos(acos(-1.0) * way)));
}

static void must_have_steps(const char *run, int64_t total)
{
    cJSON *metrics = program_metrics(run_path(&fixture, "%s", run));
    assert_int_equal(cJSON_GetArraySize(metrics), total);
    for (int64_t step = 1; step <= total; step++) {
        const cJSON *line = program_line(metrics, step, "loss");
        assert_non_null(line);
        must_be_near(program_number(line, "lr"), expected_lr(step, total), 1e-15, "lr");
    }
    cJSON_Delete(metrics);
    assert_int_equal(program_checkpoint(run_path(&fixture, "%s", run)), total);
}

// 18 is no multiple of checkpoint.every.
static void max_steps_inside_the_epochs(void **state)
{
    (void)state;
    assert_int_equal(run_train(&fixture, "steps", "--set", "run.max_steps=18", NULL), 0);
    must_have_steps("steps", 18);
    assert_int_equal(
        run_train(&fixture, "end", "--set", "run.max_steps=3", "--set", "checkpoint.every=0", NULL),
        0);
    must_have_steps("end", 3);
    assert_int_equal(run_train(&fixture, "one", "--set", "run.max_steps=1", NULL), 0);
    assert_int_equal(program_checkpoint(run_path(&fixture, "one")), 1);
}

// Every document once an epoch; a step ends with its epoch.
static void epochs_end_with_a_part_of_a_step(void **state)
{
    (void)state;
    enum { EPOCHS = 3 };
    double tokens[EPOCHS] = {0.0}, rows[EPOCHS] = {0.0}, wanted = 0.0;
    struct fixture_options options = run_train_shard();
    for (int64_t d = 0; d < options.documents; d++)
        wanted += (double)options.lengths[d];
    set_all((const char *const[]){"run.max_steps=0", "run.epochs=3", "data.rows_per_step=5", NULL});
    assert_int_equal(run_train(&fixture, "epochs", NULL), 0);
    cJSON *metrics = program_metrics(run_path(&fixture, "epochs"));
    const cJSON *line;
    int64_t steps = 0, expected = 0;
    int parts = 0;
    cJSON_ArrayForEach(line, metrics)
    {
        int epoch = (int)program_number(line, "epoch");
        assert_in_range(epoch, 0, EPOCHS - 1);
        double held = program_number(line, "rows");
        assert_true(held >= 1.0 && held <= 5.0);
        parts += held < 5.0;
        tokens[epoch] += program_number(line, "tokens");
        rows[epoch] += held;
        steps++;
    }
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        assert_true(tokens[epoch] == wanted);
        expected += (int64_t)ceil(rows[epoch] / 5.0);
    }
    assert_int_equal(steps, expected);
    assert_true(parts > 0 && parts <= EPOCHS);
    cJSON_Delete(metrics);
    must_have_steps("epochs", steps);
}

static void open_trace(struct safetensors *trace, const char *run, int64_t step, const char *name,
                       const char *set)
{
    struct error err = {""};
    char *out = memory_format("%s.safetensors", name);
    assert_int_equal(run_command(&fixture, name, true, "trace", "--checkpoint",
                                 run_checkpoint(&fixture, run, step), "--out",
                                 run_path(&fixture, "%s", out), "--set", set, NULL),
                     0);
    if (safetensors_open(trace, run_path(&fixture, "%s", out), &err) != 0)
        fail_msg("%s", err.text);
    free(out);
}

// The last step of an epoch with one row gives the gradient of a step of that row alone.
static void a_part_of_a_step_is_normalised_by_what_it_holds(void **state)
{
    (void)state;
    struct safetensors part, alone;
    int64_t last = 0, tensors = 0;
    set_all((const char *const[]){"run.max_steps=0", "run.epochs=1", "checkpoint.every=1",
                                  "data.seq_len=250", NULL});
    // As many rows in a step as leave one for the last.
    char set[64] = "data.rows_per_step=1";
    assert_int_equal(run_train(&fixture, "rows", "--set", set, NULL), 0);
    int64_t rows = program_step(run_path(&fixture, "rows"));
    assert_true(rows > 4);
    snprintf(set, sizeof(set), "data.rows_per_step=%lld", (long long)(rows - 1));
    assert_int_equal(run_train(&fixture, "part", "--set", set, NULL), 0);
    last = program_step(run_path(&fixture, "part"));
    assert_int_equal(last, 2);
    open_trace(&part, "part", 1, "trace-part", set);
    open_trace(&alone, "part", 1, "trace-alone", "data.rows_per_step=1");
    assert_null(safetensors_find(&part, "row1.input_ids"));
    for (size_t i = 0; i < part.count; i++) {
        const struct safetensors_entry *entry = &part.entries[i];
        const struct safetensors_entry *other = safetensors_find(&alone, entry->name);
        if (strncmp(entry->name, "grad.", 5) != 0)
            continue;
        assert_non_null(other);
        assert_int_equal(entry->size, other->size);
        assert_memory_equal(entry->bytes, other->bytes, entry->size);
        tensors++;
    }
    assert_true(tensors > 10);
    safetensors_close(&part);
    safetensors_close(&alone);
}

// ---- steps that change nothing -------------------------------------------------------------------

static void write_overflowing(int64_t first, int64_t count, uint64_t *id)
{
    struct fixture_options options = run_train_shard();
    struct fixture shard;
    fixture_make(&shard, &options);
    for (int64_t d = first; d < first + count; d++)
        fixture_overflow(&shard, d);
    *id = shard.doc_ids[first];
    fixture_write(&shard, run_path(&fixture, "train.h5"));
    fixture_release(&shard);
}

// The update of the step after `step` is what its trace says: skipped steps do not count in AdamW's.
static void update_must_be_traced(const char *run, int64_t step)
{
    struct safetensors trace, master;
    struct error err = {""};
    char *path = memory_format("%s/master.safetensors", run_checkpoint(&fixture, run, step + 1));
    open_trace(&trace, run, step, "trace-update", "run.seed=7");
    if (safetensors_open(&master, path, &err) != 0)
        fail_msg("%s", err.text);
    for (size_t i = 0; i < master.count; i++) {
        char *name = memory_format("updated.%s", master.entries[i].name);
        const struct safetensors_entry *updated = safetensors_find(&trace, name);
        assert_non_null(updated);
        assert_int_equal(updated->size, master.entries[i].size);
        assert_memory_equal(updated->bytes, master.entries[i].bytes, updated->size);
        free(name);
    }
    safetensors_close(&trace);
    safetensors_close(&master);
    free(path);
}

static void nonfinite_steps_are_skipped(void **state)
{
    (void)state;
    uint64_t id;
    char name[32];
    write_overflowing(17, 1, &id);
    set_all((const char *const[]){"drafter.init_std=0.5", "checkpoint.every=1",
                                  "run.max_nonfinite=1", NULL}); // in a row
    assert_int_equal(run_train(&fixture, "overflow", NULL), 0);
    cJSON *metrics = program_metrics(run_path(&fixture, "overflow"));
    const cJSON *line;
    int64_t skipped = 0, last = 0;
    cJSON_ArrayForEach(line, metrics)
    {
        int64_t step = (int64_t)program_number(line, "step");
        bool skip = cJSON_IsTrue(cJSON_GetObjectItem(line, "skipped"));
        assert_true(skip == !isfinite(program_number(line, "grad_norm")));
        skipped += skip;
        last = !skip && skipped > 0 ? step : last;
        if (skip && step > 1)
            assert_true(program_same_state(run_checkpoint(&fixture, "overflow", step - 1),
                                           run_checkpoint(&fixture, "overflow", step)));
        must_be_near(run_state_number(&fixture, "overflow", step, "skipped_nonfinite"),
                     (double)skipped, 0.0, "skipped_nonfinite");
        must_be_near(run_state_number(&fixture, "overflow", step, "applied"),
                     (double)(step - skipped), 0.0, "applied");
    }
    cJSON_Delete(metrics);
    assert_true(skipped >= 2 && skipped <= 4);
    assert_true(last > 1);
    update_must_be_traced("overflow", last - 1);
    snprintf(name, sizeof(name), " %llu", (unsigned long long)id);
    run_must_say(&fixture, "overflow", "is not finite; the step is skipped. Its documents:");
    run_must_say(&fixture, "overflow", name);
}

static void too_many_nonfinite_steps_stop(void **state)
{
    (void)state;
    uint64_t id;
    write_overflowing(0, RUN_DOCUMENTS, &id);
    set_all((const char *const[]){"drafter.init_std=0.5", "checkpoint.every=1",
                                  "run.max_nonfinite=2", NULL});
    // Once more: what was counted before a resume counts.
    for (int i = 0; i < 2; i++) {
        assert_int_equal(run_train(&fixture, "row", NULL), 1);
        run_must_say(&fixture, "row",
                     "3 steps in a row had a non-finite gradient "
                     "(run.max_nonfinite 2); the first bad tensor is ");
        assert_int_equal(program_step(run_path(&fixture, "row")), 3);
    }
    run_must_say(&fixture, "row", "resuming from");
    assert_int_equal(run_train(&fixture, "first", "--set", "run.max_nonfinite=0", NULL), 1);
    assert_int_equal(program_step(run_path(&fixture, "first")), 1);
}

// Documents that are shorter than what whole blocks need: no anchors, no weight, no change.
static void empty_steps_change_nothing(void **state)
{
    (void)state;
    static int64_t lengths[RUN_DOCUMENTS];
    for (int d = 0; d < RUN_DOCUMENTS; d++)
        lengths[d] = 5 + d % 3;
    struct fixture_options options = {
        .seed = 9, .layers = 3, .documents = RUN_DOCUMENTS, .lengths = lengths};
    fixture_shard(run_path(&fixture, "train.h5"), &options);
    set_all((const char *const[]){"anchors.tail=whole", "data.seq_len=64", NULL});
    assert_int_equal(run_train(&fixture, "empty", "--set", "optimizer.weight_decay=0.1", NULL), 0);
    assert_true(program_same_state(run_checkpoint(&fixture, "empty", 4),
                                   run_checkpoint(&fixture, "empty", RUN_STEPS)));
    must_be_near(run_state_number(&fixture, "empty", RUN_STEPS, "skipped_empty"), RUN_STEPS, 0.0,
                 "skipped_empty");
    must_be_near(run_state_number(&fixture, "empty", RUN_STEPS, "applied"), 0.0, 0.0, "applied");
    run_must_say(&fixture, "empty", "no valid anchor in its");
    run_must_say(&fixture, "empty", "nothing was learnt in");
    run_must_say(&fixture, "empty", "train.h5. A valid anchor is");
}

// ---- validation ----------------------------------------------------------------------------------

static const char *best_of(const char *run)
{
    static char target[256];
    ssize_t n = readlink(run_path(&fixture, "%s/checkpoints/best", run), target, 255);
    target[n > 0 ? n : 0] = '\0';
    return target;
}

// With a learning rate of 0 nothing gets better than the first validation after a step.
static void patience_ends_a_run(void **state)
{
    (void)state;
    set_all((const char *const[]){"data.val=[val.h5]", "validation.every=2",
                                  "validation.patience=3", "optimizer.lr=0", NULL});
    for (int i = 0; i < 2; i++) { // and stays ended
        assert_int_equal(run_train(&fixture, "patience", NULL), 0);
        run_must_say(&fixture, "patience", "the run ends early");
        assert_int_equal(program_step(run_path(&fixture, "patience")), 8);
        assert_int_equal(program_checkpoint(run_path(&fixture, "patience")), 8);
        assert_string_equal(best_of("patience"), "step-00000002");
    }
}

// Documents too short for a whole block: no block is scored, none is the best, nothing stops.
static void validation_with_nothing_to_score(void **state)
{
    (void)state;
    static const int64_t lengths[] = {5, 6, 7};
    struct fixture_options options = {
        .seed = 8, .layers = 3, .documents = 3, .lengths = lengths, .crc = true};
    fixture_shard(run_path(&fixture, "val.h5"), &options);
    set_all((const char *const[]){"anchors.tail=whole", "data.val=[val.h5]", "validation.every=4",
                                  "validation.patience=2", NULL});
    assert_int_equal(run_train(&fixture, "nothing", NULL), 0);
    assert_int_equal(program_step(run_path(&fixture, "nothing")), RUN_STEPS);
    char *said = program_text(run_path(&fixture, "nothing.out"));
    char *warning = strstr(said, "no valid anchor in the validation rows");
    assert_non_null(warning);
    assert_null(strstr(warning + 1, "no valid anchor in the validation rows"));
    assert_null(strstr(said, "nothing was learnt"));
    free(said);
    cJSON *metrics = program_metrics(run_path(&fixture, "nothing"));
    const cJSON *line = program_line(metrics, 4, "val_loss");
    assert_non_null(line);
    assert_true(isnan(program_number(line, "val_loss")));
    must_be_near(program_number(line, "val_walk_blocks"), 0.0, 0.0, "val_walk_blocks");
    assert_false(cJSON_IsTrue(cJSON_GetObjectItem(line, "val_best")));
    cJSON_Delete(metrics);
    assert_string_equal(best_of("nothing"), "");
}

static void best_is_kept_and_marked(void **state)
{
    (void)state;
    set_all((const char *const[]){"data.val=[val.h5]", "validation.every=1", "checkpoint.every=0",
                                  "checkpoint.keep=1", "validation.draft_tokens=[1, 3]", NULL});
    assert_int_equal(run_train(&fixture, "best", NULL), 0);
    cJSON *metrics = program_metrics(run_path(&fixture, "best"));
    double best = 0.0, best_step = 0.0;
    for (int64_t step = 1; step <= RUN_STEPS; step++) {
        const cJSON *line = program_line(metrics, step, "val_loss");
        assert_non_null(line);
        double walk = program_number(line, "val_accept_len_walk");
        assert_true(cJSON_IsTrue(cJSON_GetObjectItem(line, "val_best")) == (walk > best));
        assert_true(program_number(line, "val_accept_len_walk_1") <= 2.0);
        if (walk > best) {
            best = walk;
            best_step = (double)step;
        }
    }
    assert_non_null(program_line(metrics, 0, "val_loss"));
    cJSON_Delete(metrics);
    char name[32];
    snprintf(name, sizeof(name), "step-%08lld", (long long)best_step);
    assert_string_equal(best_of("best"), name);
    assert_true(files_exists(run_path(&fixture, "best/checkpoints/best/DONE")));
    assert_int_equal(program_checkpoint(run_path(&fixture, "best")), RUN_STEPS);
    assert_int_equal(run_train(&fixture, "unmarked", "--set", "checkpoint.best=false", NULL), 0);
    assert_string_equal(best_of("unmarked"), "");
    assert_int_equal(program_checkpoint(run_path(&fixture, "unmarked")), RUN_STEPS);
}

// ---- eval ----------------------------------------------------------------------------------------

static void must_print(const char *run, const char *format, double value)
{
    char words[96];
    snprintf(words, sizeof(words), format, value);
    run_must_say(&fixture, run, words);
}

static void blocks_must_sum_to(const char *path, const cJSON *line)
{
    char *text = program_text(path);
    double blocks = 0.0, tokens = 0.0;
    for (char *at = text, *end; (end = strchr(at, '\n')) != NULL; at = end + 1) {
        *end = '\0';
        cJSON *block = cJSON_Parse(at);
        assert_true(cJSON_IsObject(block));
        assert_true(program_number(block, "anchor") >= 0.0);
        blocks += 1.0;
        tokens += 1.0 + program_number(block, "accepted");
        cJSON_Delete(block);
    }
    free(text);
    must_be_near(blocks, program_number(line, "val_walk_blocks"), 0.0, "blocks");
    must_be_near(tokens / blocks, program_number(line, "val_accept_len_walk"), 1e-12,
                 "accept_len_walk");
}

static void eval_is_the_validation(void **state)
{
    (void)state;
    set_all((const char *const[]){"data.val=[val.h5]", "validation.every=4", NULL});
    assert_int_equal(run_train(&fixture, "eval", NULL), 0);
    cJSON *metrics = program_metrics(run_path(&fixture, "eval"));
    const cJSON *line = program_line(metrics, 8, "val_loss");
    assert_int_equal(run_command(&fixture, "scores", true, "eval", "--checkpoint",
                                 run_checkpoint(&fixture, "eval", 8), "--rows", "4", "--blocks",
                                 run_path(&fixture, "blocks.jsonl"), NULL),
                     0);
    must_print("scores", "rows                 %.0f\n", program_number(line, "val_rows"));
    must_print("scores", "tokens               %.0f\n", program_number(line, "val_tokens"));
    must_print("scores", "loss                 %.6f\n", program_number(line, "val_loss"));
    must_print("scores", "accept_len_walk      %.4f", program_number(line, "val_accept_len_walk"));
    must_print("scores", "accept_len           %.4f\n", program_number(line, "val_accept_len"));
    must_print("scores", "eal_marginal         %.4f\n", program_number(line, "val_eal_marginal"));
    must_print("scores", "overlap              %.4f\n", program_number(line, "val_overlap"));
    blocks_must_sum_to(run_path(&fixture, "blocks.jsonl"), line);
    // Another checkpoint scores otherwise.
    assert_int_equal(run_command(&fixture, "others", true, "eval", "--checkpoint",
                                 run_checkpoint(&fixture, "eval", 20), NULL),
                     0);
    must_print("others", "loss                 %.6f\n",
               program_number(program_line(metrics, 20, "val_loss"), "val_loss"));
    cJSON_Delete(metrics);
}

static void eval_refusals(void **state)
{
    (void)state;
    assert_int_equal(run_train(&fixture, "run", "--set", "run.max_steps=4", NULL), 0);
    const char *checkpoint = run_checkpoint(&fixture, "run", 4);
    assert_int_equal(run_command(&fixture, "noval", true, "eval", "--checkpoint", checkpoint, NULL),
                     2);
    run_must_say(&fixture, "noval", "data.val");
    run_fixture_set(&fixture, "data.val=[val.h5]");
    assert_int_equal(run_command(&fixture, "layers", true, "eval", "--checkpoint", checkpoint,
                                 "--set", "drafter.layers=1", NULL),
                     2);
    run_must_say(&fixture, "layers", "drafter.layers");
    assert_int_equal(run_command(&fixture, "trace", true, "trace", "--checkpoint", checkpoint,
                                 "--out", "unwritten", "--set", "drafter.layers=1", NULL),
                     2);
    run_must_say(&fixture, "trace", "drafter.layers");
    assert_int_equal(run_command(&fixture, "trace", true, "trace", "--checkpoint", "there-is-none",
                                 "--out", "unwritten", NULL),
                     1);
    assert_false(files_exists("unwritten"));
    assert_int_equal(run_command(&fixture, "stats", false, "data", "stats", "none.h5", NULL), 2);
    assert_int_equal(run_command(&fixture, "stats", false, "data", "manifest", "--out", "unwritten",
                                 "none.h5", NULL),
                     2);
    // The tensors fit, but they were trained for something else.
    const char *const sets[] = {"drafter.block_size=4", "drafter.mask_token_id=61",
                                "drafter.rope_theta=500"};
    for (size_t i = 0; i < sizeof(sets) / sizeof(*sets); i++) {
        assert_int_equal(run_command(&fixture, "other", true, "eval", "--checkpoint", checkpoint,
                                     "--set", sets[i], NULL),
                         2);
        run_must_say(&fixture, "other", "must be what the weights were trained with");
    }
    // All layers of the shards, in words; then shards of other layers.
    assert_int_equal(run_command(&fixture, "same", true, "eval", "--checkpoint", checkpoint,
                                 "--set", "target.layer_ids=[1, 3, 5]", NULL),
                     0);
    edit_integer_attribute(run_path(&fixture, "val.h5"), "target_layer_ids", H5T_STD_I32LE,
                           (const int64_t[]){0, 2, 4}, 3);
    assert_int_equal(run_command(&fixture, "moved", true, "eval", "--checkpoint", checkpoint, NULL),
                     2);
    run_must_say(&fixture, "moved", "was trained on the layers [1,3,5]");
    edit_cut(run_path(&fixture, "run/checkpoints/step-00000004/adam_m.safetensors"), 100);
    assert_int_equal(
        run_command(&fixture, "damaged", true, "eval", "--checkpoint", checkpoint, NULL), 1);
    run_must_say(&fixture, "damaged", "adam_m.safetensors");
    assert_int_equal(run_command(&fixture, "none", true, "eval", "--checkpoint",
                                 run_path(&fixture, "nowhere"), NULL),
                     1);
    run_must_say(&fixture, "none", "nowhere");
}

// No step of the run follows its last one; of a longer run one does.
static void trace_of_a_run_that_is_over(void **state)
{
    (void)state;
    struct safetensors trace;
    assert_int_equal(run_train(&fixture, "run", "--set", "run.max_steps=4", NULL), 0);
    assert_int_equal(run_command(&fixture, "over", true, "trace", "--checkpoint",
                                 run_checkpoint(&fixture, "run", 4), "--out",
                                 run_path(&fixture, "over.safetensors"), "--set", "run.max_steps=4",
                                 NULL),
                     2);
    run_must_say(&fixture, "over", "step-00000004: is of step 4, and the run ends with step 4");
    run_must_say(&fixture, "over", "--set run.max_steps");
    assert_false(files_exists(run_path(&fixture, "over.safetensors")));
    open_trace(&trace, "run", 4, "longer", "run.max_steps=5");
    assert_string_equal(safetensors_metadata(&trace, "step"), "5");
    safetensors_close(&trace);
}

// ---- export --------------------------------------------------------------------------------------

static int export_run(const char *name, int64_t step, const char *out, const char *more)
{
    return run_command(&fixture, "export", false, "export", "--checkpoint",
                       run_checkpoint(&fixture, name, step), "--format", "zlab", "--out",
                       run_path(&fixture, "%s", out), more, NULL);
}

static void must_be_copy(const char *run, const char *out, const char *file)
{
    char *text = program_text(run_path(&fixture, "%s/%s", out, file));
    char *from = program_text(run_path(&fixture, "%s/checkpoints/step-00000004/%s", run, file));
    assert_int_equal(files_size(run_path(&fixture, "%s/%s", out, file)),
                     files_size(run_path(&fixture, "%s/checkpoints/step-00000004/%s", run, file)));
    assert_string_equal(text, from);
    free(text);
    free(from);
}

static void export_and_its_refusals(void **state)
{
    (void)state;
    run_fixture_set(&fixture, "run.max_steps=4");
    assert_int_equal(run_train(&fixture, "plain", NULL), 0);
    assert_int_equal(export_run("plain", 4, "served", NULL), 0);
    must_be_copy("plain", "served", "config.json");
    must_be_copy("plain", "served", "model.safetensors");
    assert_int_equal(export_run("plain", 4, "served", NULL), 2);
    run_must_say(&fixture, "export", "exists already");

    assert_int_equal(run_train(&fixture, "ahead", "--set", "predict_from_anchor=true", NULL), 0);
    assert_int_equal(export_run("ahead", 4, "ahead-served", NULL), 1);
    run_must_say(&fixture, "export", "predict_from_anchor");
    assert_int_equal(export_run("ahead", 4, "ahead-served", "--allow-unservable"), 1);
    assert_false(files_exists(run_path(&fixture, "ahead-served")));

    edit_cut(run_path(&fixture, "plain/checkpoints/step-00000004/model.safetensors"), 100);
    assert_int_equal(export_run("plain", 4, "cut-served", NULL), 1);
    run_must_say(&fixture, "export", "model.safetensors");
    assert_false(files_exists(run_path(&fixture, "cut-served")));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_test, close_test)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(max_steps_inside_the_epochs),
        TEST(epochs_end_with_a_part_of_a_step),
        TEST(a_part_of_a_step_is_normalised_by_what_it_holds),
        TEST(nonfinite_steps_are_skipped),
        TEST(too_many_nonfinite_steps_stop),
        TEST(empty_steps_change_nothing),
        TEST(patience_ends_a_run),
        TEST(validation_with_nothing_to_score),
        TEST(best_is_kept_and_marked),
        TEST(eval_is_the_validation),
        TEST(eval_refusals),
        TEST(trace_of_a_run_that_is_over),
        TEST(export_and_its_refusals),
    };
    return cmocka_run_group_tests_name("run_schedule", tests, NULL, NULL);
}
