// What the program refuses, with which status and words: command lines, configs, run folders in use or
// not usable, resumes that would not be resumes.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "tests/support/run_fixture.h"
#include "trainer/files.h"

static struct run_fixture fixture;

// A short run that tests resume from: 8 steps, saved at 4 and 8.
static int open_all(void **state)
{
    (void)state;
    run_fixture_open(&fixture);
    run_fixture_set(&fixture, "run.max_steps=8");
    run_fixture_set(&fixture, "data.val=[val.h5]");
    return run_train(&fixture, "run", NULL);
}

static int close_all(void **state)
{
    (void)state;
    run_fixture_close(&fixture);
    return 0;
}

static void write_text(const char *path, const char *text)
{
    struct error err = {""};
    if (files_write_text(path, text, &err) != 0)
        fail_msg("%s", err.text);
}

// ---- command lines -------------------------------------------------------------------------------

enum { MOST_WORDS = 8 };

static const struct command_line {
    const char *says;
    const char *words[MOST_WORDS];
} bad_command_lines[] = {
    {"--help", {NULL}},
    {"unknown command trian; did you mean train?", {"trian"}},
    {"say check, stats, order or manifest", {"data"}},
    {"say check, stats, order or manifest, not chek", {"data", "chek", "x.h5"}},
    {"--config is required", {"train"}},
    {"--config is required", {"--resume", "auto"}},
    {"no option --confg; did you mean --config?", {"--confg", "x.yaml"}},
    {"no option --quiet\nsee dtrain train --help", {"--quiet"}},
    {"no option -q; options are words", {"-q"}},
    {"--config: FILE is missing", {"--config"}},
    {"--replan takes no value", {"--config", "x.yaml", "--replan=yes"}},
    {"no option --blocks here; dtrain eval takes it", {"--config", "x.yaml", "--blocks", "y"}},
    {"unexpected word extra", {"--config", "x.yaml", "extra"}},
    {"--set max_steps: expected key=value, as --set max_steps=3",
     {"--config", "x.yaml", "--set", "max_steps", "3"}},
    {"--checkpoint is required", {"eval", "--config", "x.yaml"}},
    {"--rows: not a number", {"eval", "--rows", "many"}},
    {"--rows: not a number of 0 or more: -1", {"eval", "--rows", "-1"}},
    {"--rows: not a number", {"eval", "--rows", "99999999999999999999"}},
    {"--from-step: not a number of 1 or more: 0", {"data", "order", "--from-step", "0"}},
    {"--out is required", {"trace", "--config", "x.yaml"}},
    {"--format is required", {"export", "--checkpoint", "x", "--out", "y"}},
    {"--format hf", {"export", "--checkpoint", "x", "--format", "hf", "--out", "y"}},
    {"--size is required", {"vocab", "--out", "x", "y.h5"}},
    {"--size: not a number of 1 or more: 0", {"vocab", "--size", "0"}},
    {"at least one SHARD is required", {"vocab", "--size", "8", "--out", "x"}},
    {"at least one FILE is required", {"data", "check"}},
    {"at least one FILE is required", {"data", "stats"}},
    {"SHELL is required", {"completion"}},
    {"SHELL: say bash or zsh, not fish", {"completion", "fish"}},
    {"unexpected word zsh", {"completion", "bash", "zsh"}},
    {"there-is-none.yaml", {"--config", "there-is-none.yaml"}},
    {"there-is-none.yaml", {"eval", "--config", "there-is-none.yaml", "--checkpoint", "x"}},
    {"there-is-none.yaml", {"plan", "--config", "there-is-none.yaml"}},
    {"there-is-none.yaml", {"trace", "--config", "there-is-none.yaml", "--out", "x"}},
};

static void bad_command_lines_are_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(bad_command_lines) / sizeof(*bad_command_lines); i++) {
        const struct command_line *line = &bad_command_lines[i];
        int status = program_run(run_path(&fixture, "line.out"), line->words);
        if (status != 2)
            fail_msg("status %d, where '%s' is expected", status, line->says);
        run_must_say(&fixture, "line", line->says);
    }
}

static void questions_are_answered(void **state)
{
    (void)state;
    static const struct command_line asked[] = {
        {"Exit status", {"--help"}},
        {"dtrain 0.", {"--version"}},
        {"--checkpoint", {"eval", "--help"}},
        {"--target", {"data", "check", "--help"}},
        {"dtrain data order", {"data", "--help"}},
        {"usage: dtrain plan", {"plan", "-h"}},
        {"max_anchors", {"config"}},
    };
    for (size_t i = 0; i < sizeof(asked) / sizeof(*asked); i++) {
        assert_int_equal(program_run(run_path(&fixture, "asked.out"), asked[i].words), 0);
        run_must_say(&fixture, "asked", asked[i].says);
    }
}

// ---- configs -------------------------------------------------------------------------------------

// A line put in place of one of run.yaml's, with the place it is found at.
static const struct config_fault {
    const char *line, *instead, *says;
} config_faults[] = {
    {"  seed: 7\n", "  sed: 7\n", "run.yaml:3: run.sed"},
    {"  seed: 7\n", "  sed: 7\n", "seed?"},
    {"  seed: 7\n", "  seed: seven\n", "run.yaml:3: run.seed"},
    {"  seed: 7\n", "  seed: -7\n", "run.yaml:3: run.seed"},
    {"  seed: 7\n", "  seed: 7\n  seed: 8\n", "run.yaml:4: run.seed"},
    {"  max_anchors: 48\n", "  max_anchors: 0\n", "anchors.max_anchors"},
    {"  kl: 1.0\n", "  kl: 0\n", "loss"},
    {"  mask_token_id: 60\n", "", "drafter.mask_token_id"},
    {"  mask_token_id: 60\n", "  mask_token_id: 64\n", "run.yaml:19: drafter.mask_token_id: 64 is"},
    {"  mask_token_id: 60\n", "  mask_token_id: 1\n",
     "run.yaml:19: drafter.mask_token_id: 1 is the"},
    {"  path: target\n", "  path: .\n", "run.yaml:9: target.path: "},
    {"  path: target\n", "  path: target\n  layer_ids: [1, 4]\n",
     "run.yaml:10: target.layer_ids: layer 4 is not"},
    {"  path: target\n", "  path: nowhere\n", "target.path"},
    {"  path: target\n", "  name: x\n", "target.path"},
    {"  train: [train.h5]\n", "  train: [none-*.h5]\n", "data.train"},
    {"  train: [train.h5]\n", "  train: []\n", "data.train"},
    {"  train: [train.h5]\n", "  train: [train.h5, train.h5]\n", "listed twice"},
    {"  train: [train.h5]\n", "  train: [run.yaml]\n", "run.yaml"},
    {"  dir: unset\n", "", "run.dir"},
    {"run:\n", "run: [\n", "run.yaml:"},
};

// Every one ends with status 2 and makes no run folder.
static void config_faults_name_their_place(void **state)
{
    (void)state;
    char *text = program_text(run_path(&fixture, "run.yaml"));
    for (size_t i = 0; i < sizeof(config_faults) / sizeof(*config_faults); i++) {
        const struct config_fault *fault = &config_faults[i];
        char *at = strstr(text, fault->line);
        assert_non_null(at);
        char *changed = memory_format("%.*s%s%s", (int)(at - text), text, fault->instead,
                                      at + strlen(fault->line));
        write_text(run_path(&fixture, "changed.yaml"), changed);
        free(changed);
        const char *const words[] = {"--config", run_path(&fixture, "changed.yaml"), NULL};
        int status = program_run(run_path(&fixture, "fault.out"), words);
        if (status != 2)
            fail_msg("'%s' ended with status %d", fault->instead, status);
        const char *says =
            strncmp(fault->says, "run.yaml:", 9) == 0 ? fault->says + 8 : fault->says;
        run_must_say(&fixture, "fault", says);
        assert_false(files_exists(run_path(&fixture, "unset")));
    }
    free(text);
}

static void sets_are_checked(void **state)
{
    (void)state;
    assert_int_equal(run_train(&fixture, "set", "--set", "seed=x", NULL), 2);
    run_must_say(&fixture, "set", "--set run.seed");
    assert_int_equal(run_train(&fixture, "set", "--set", "every=3", NULL), 2); // not unique
    run_must_say(&fixture, "set", "every");
    // Faults that the target and the shards show have their place, too, in plans as in runs.
    assert_int_equal(run_train(&fixture, "set", "--set", "mask_token_id=64", NULL), 2);
    run_must_say(&fixture, "set", "--set drafter.mask_token_id: 64 is outside");
    assert_int_equal(run_command(&fixture, "plan", true, "plan", "--set", "mask_token_id=64", NULL),
                     2);
    run_must_say(&fixture, "plan", "--set drafter.mask_token_id: 64 is outside");
    assert_int_equal(run_train(&fixture, "set", "--set", "nonsense", NULL), 2);
    assert_int_equal(run_train(&fixture, "set", "--set", "drafter.style=llama", NULL), 2);
    assert_false(files_exists(run_path(&fixture, "set")));
}

// ---- the run folder ------------------------------------------------------------------------------

static void folder_in_use(void **state)
{
    (void)state;
    struct program program = {0};
    char holder[64];
    run_train_start(&fixture, &program, "used", "--set", "run.max_steps=2000", "--set",
                    "run.epochs=1000", NULL);
    snprintf(holder, sizeof(holder), "in use by process %ld", (long)program.pid);
    program_wait_step(&program, run_path(&fixture, "used"), 1, 60.0);
    // run.dir is set twice: the last holds.
    char *dir = memory_format("run.dir=%s", run_path(&fixture, "used"));
    int status = run_train(&fixture, "second", "--set", dir, NULL);
    free(dir);
    program_signal(&program, SIGTERM);
    assert_int_equal(program_wait(&program, 60.0), 75);
    assert_int_equal(status, 2);
    run_must_say(&fixture, "second", holder);
}

static void folders_that_can_not_be(void **state)
{
    (void)state;
    write_text(run_path(&fixture, "file"), "");
    assert_int_equal(run_train(&fixture, "file", NULL), 2);
    run_must_say(&fixture, "file", "can not create the folder");
    char *dir = memory_format("run.dir=%s", run_path(&fixture, "file/below"));
    assert_int_equal(run_train(&fixture, "below", "--set", dir, NULL), 2);
    run_must_say(&fixture, "below", "can not create the folder");
    free(dir);
}

// ---- what a resume refuses -----------------------------------------------------------------------

// A copy of a run folder, so that tests may damage it.
static void copy_run(const char *to)
{
    char *command = memory_format("cp -r '%s/run' '%s/%s'", fixture.folder, fixture.folder, to);
    assert_int_equal(system(command), 0);
    free(command);
}

static char *frozen(const char *run)
{
    char *config = program_text(run_path(&fixture, "%s/config.yaml", run));
    char *execution = program_text(run_path(&fixture, "%s/execution.json", run));
    char *metrics = program_text(run_path(&fixture, "%s/metrics.jsonl", run));
    char *all = memory_format("%s\n%s\n%s", config, execution, metrics);
    free(config);
    free(execution);
    free(metrics);
    return all;
}

// A refused resume leaves the run folder as it was.
static void must_refuse(const char *run, const char *says, const char *first, const char *second)
{
    char *before = frozen(run);
    int status = run_train(&fixture, run, first, second, NULL);
    char *after = frozen(run);
    if (status != 2)
        fail_msg("%s %s: status %d", first, second, status);
    run_must_say(&fixture, run, says);
    assert_string_equal(before, after);
    assert_int_equal(program_checkpoint(run_path(&fixture, "%s", run)), 8);
    free(before);
    free(after);
}

static void other_config(void **state)
{
    (void)state;
    copy_run("config");
    must_refuse("config", "run.seed: must stay the same on resume: it was 7 and is 8", "--set",
                "run.seed=8");
    must_refuse("config", "loss.tv", "--set", "loss.tv=1");
    must_refuse("config", "optimizer.lr", "--set", "optimizer.lr=1e-3");
    must_refuse("config", "drafter.layers", "--set", "drafter.layers=1");
    must_refuse("config", "data.seq_len", "--set", "data.seq_len=128");
    must_refuse("config", "memory.group_rows", "--set", "memory.group_rows=64");
    must_refuse("config", "kernels.path", "--set", "kernels.path=generic");
    must_refuse("config", "--resume none", "--resume", "none");
    // What may change: here, where the run is to go on.
    assert_int_equal(run_train(&fixture, "config", "--set", "run.max_steps=9", "--set",
                               "checkpoint.every=1", NULL),
                     0);
    run_must_say(&fixture, "config", "done: 9 steps");
}

static void other_execution(void **state)
{
    (void)state;
    copy_run("execution");
    must_refuse("execution", "threads: 1 in execution.json, 2 now", "--set", "parallel.threads=2");
    run_must_say(&fixture, "execution", "--replan accepts this");
    assert_int_equal(run_train(&fixture, "execution", "--set", "parallel.threads=2", "--set",
                               "memory.group_rows=64", "--set", "kernels.path=generic", "--set",
                               "run.max_steps=10", "--replan", NULL),
                     0);
    run_must_say(&fixture, "execution", "resuming with another execution (--replan)");
    run_must_say(&fixture, "execution", "group_rows");
    run_must_say(&fixture, "execution", "kernels: auto in execution.json, generic now");
    // The new execution is frozen now.
    assert_int_equal(run_train(&fixture, "execution", "--set", "parallel.threads=2", "--set",
                               "memory.group_rows=64", "--set", "kernels.path=generic", "--set",
                               "run.max_steps=11", NULL),
                     0);
    assert_int_equal(run_train(&fixture, "execution", "--set", "run.max_steps=12", NULL), 2);
}

// Same files, same lengths, one other token.
static void other_data(void **state)
{
    (void)state;
    struct fixture_options options = run_train_shard();
    struct fixture shard;
    copy_run("data");
    fixture_make(&shard, &options);
    shard.input_ids[700] = (shard.input_ids[700] + 1) % 64;
    fixture_write(&shard, run_path(&fixture, "train.h5"));
    must_refuse("data", "was trained on other data", "--set", "run.max_steps=9");
    shard.input_ids[700] = (shard.input_ids[700] + 63) % 64;
    fixture_write(&shard, run_path(&fixture, "train.h5"));
    fixture_release(&shard);
    assert_int_equal(run_train(&fixture, "data", "--set", "run.max_steps=9", NULL), 0);
}

static int export_speculators(const char *name, const char *checkpoint)
{
    return run_command(&fixture, name, false, "export", "--format", "speculators", "--checkpoint",
                       checkpoint, "--target", run_path(&fixture, "target"), "--out",
                       run_path(&fixture, "%s", name), NULL);
}

// A target of the same sizes with other weights is another teacher: a run does not go on with it, an export
// would hold its head and embedding, and a score is of both.
static void other_target(void **state)
{
    (void)state;
    static const char warning[] = "was trained with another target";
    struct run_target target = {"qwen3", 8, 64, 1.0, 0.2, 12};
    char *checkpoint = memory_strdup(run_checkpoint(&fixture, "run", 4));
    copy_run("teacher");
    run_target_write(run_path(&fixture, "target"), &target);
    must_refuse("teacher", "the weights of target.path have changed", "--set", "run.max_steps=9");
    assert_int_equal(export_speculators("export-other", checkpoint), 1);
    run_must_say(&fixture, "export-other", warning);
    assert_false(files_exists(run_path(&fixture, "export-other")));
    assert_int_equal(
        run_command(&fixture, "eval-other", true, "eval", "--checkpoint", checkpoint, NULL), 0);
    run_must_say(&fixture, "eval-other", warning);
    target.seed = 11;
    run_target_write(run_path(&fixture, "target"), &target);
    assert_int_equal(run_train(&fixture, "teacher", "--set", "run.max_steps=9", NULL), 0);
    assert_int_equal(export_speculators("export-own", checkpoint), 0);
    assert_int_equal(
        run_command(&fixture, "eval-own", true, "eval", "--checkpoint", checkpoint, NULL), 0);
    assert_false(run_says(&fixture, "eval-own", warning));
    free(checkpoint);
}

// As from a shell's <(...): the second reading would find nothing in it.
static void a_config_that_is_read_once(void **state)
{
    (void)state;
    char *pipe = memory_strdup(run_path(&fixture, "pipe"));
    assert_int_equal(mkfifo(pipe, 0600), 0);
    const char *const train[] = {"--config", pipe, NULL};
    const char *const sweep[] = {"sweep", "--config", pipe, "--grid", "layers=1,2", NULL};
    assert_int_equal(program_run(run_path(&fixture, "pipe.out"), train), 2);
    run_must_say(&fixture, "pipe", "pipe: is a pipe, and is read more than once");
    assert_int_equal(program_run(run_path(&fixture, "pipe.out"), sweep), 2);
    run_must_say(&fixture, "pipe", "pipe: is a pipe, and is read more than once");
    free(pipe);
}

// Its documents are not to blame: training, scoring and an export that would hold it end with its name.
static void a_target_that_is_not_finite(void **state)
{
    (void)state;
    static const char says[] =
        "target: row 0 of the target's final norm has a value that is not finite";
    static const unsigned char nan[] = {0, 0, 0xc0, 0x7f};
    struct run_target target = {"qwen3", 8, 64, 1.0, 0.2, 11};
    FILE *file = fopen(run_path(&fixture, "target/head.safetensors"), "r+b");
    assert_non_null(file);
    assert_int_equal(fseek(file, -(long)sizeof(nan), SEEK_END), 0);
    assert_int_equal(fwrite(nan, sizeof(nan), 1, file), 1);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(run_train(&fixture, "nan", NULL), 1);
    run_must_say(&fixture, "nan", says);
    assert_false(run_says(&fixture, "nan", "Its documents"));
    assert_int_equal(run_command(&fixture, "eval-nan", true, "eval", "--checkpoint",
                                 run_checkpoint(&fixture, "run", 4), NULL),
                     1);
    run_must_say(&fixture, "eval-nan", says);
    run_target_write(run_path(&fixture, "target"), &target);
}

// The same documents, extracted anew from other layers.
static void other_layers(void **state)
{
    (void)state;
    struct fixture_options train = run_train_shard(), val = run_val_shard();
    train.layer_ids = val.layer_ids = (const int32_t[]){0, 2, 4};
    copy_run("layers");
    fixture_shard(run_path(&fixture, "train.h5"), &train);
    fixture_shard(run_path(&fixture, "val.h5"), &val);
    must_refuse("layers", "was trained on the layers [1,3,5]", "--set", "run.max_steps=9");
    train.layer_ids = val.layer_ids = NULL;
    fixture_shard(run_path(&fixture, "train.h5"), &train);
    fixture_shard(run_path(&fixture, "val.h5"), &val);
}

// A key that the config leaves to the target, and another target at the same place.
static void other_target_defaults(void **state)
{
    (void)state;
    copy_run("theta");
    char *command = memory_format("sed -i 's/\"rope_theta\": 10000.0/\"rope_theta\": 50000.0/' %s",
                                  run_path(&fixture, "target/config.json"));
    assert_int_equal(system(command), 0);
    must_refuse("theta", "drafter.rope_theta", "--set", "run.max_steps=9");
    run_must_say(&fixture, "theta", "was trained with 10000, and it is 50000 now");
    free(command);
    command = memory_format("sed -i 's/\"rope_theta\": 50000.0/\"rope_theta\": 10000.0/' %s",
                            run_path(&fixture, "target/config.json"));
    assert_int_equal(system(command), 0);
    free(command);
    assert_int_equal(run_train(&fixture, "theta", "--set", "run.max_steps=9", NULL), 0);
}

// A checkpoint of another run folder: a stop before the first step leaves one here as well.
static void checkpoint_of_another_folder(void **state)
{
    (void)state;
    const char *from = run_checkpoint(&fixture, "run", 4);
    int64_t reached = 8;
    for (int try = 0; try < 40 && reached > 4; try++) {
        struct program program = {0};
        fixture_folder_remove(memory_strdup(run_path(&fixture, "moved")));
        run_train_start(&fixture, &program, "moved", "--resume", from, "--set",
                        "validation.every=4", NULL);
        while (!run_says(&fixture, "moved", "resuming from ") && program_runs(&program))
            usleep(200);
        program_signal(&program, SIGTERM); // the validation of step 4 gives it time to come
        int status = program_wait(&program, 60.0);
        assert_true(status == 75 || status == 0);
        reached = program_step(run_path(&fixture, "moved"));
    }
    assert_in_range(reached + 1, 0, 5);
    assert_int_equal(program_checkpoint(run_path(&fixture, "moved")), 4);
    assert_int_equal(run_train(&fixture, "moved", NULL), 0);
    assert_true(program_same_state(run_checkpoint(&fixture, "moved", 8),
                                   run_checkpoint(&fixture, "run", 8)));
}

// What a run folder says of the run: the config as it was resolved, and how it is executed.
static void run_folder_says_how(void **state)
{
    (void)state;
    assert_true(program_says(run_path(&fixture, "run/config.yaml"), "  mask_token_id: 60\n"));
    assert_true(program_says(run_path(&fixture, "run/config.yaml"), "  slot_decay_gamma: 7"));
    assert_true(program_says(run_path(&fixture, "run/execution.json"), "\"threads\":\t1"));
    copy_run("says");
    assert_int_equal(run_train(&fixture, "says", "--set", "parallel.threads=2", "--replan", "--set",
                               "log.every=3", NULL),
                     0);
    assert_true(program_says(run_path(&fixture, "says/config.yaml"), "log:\n  every: 3\n"));
    assert_true(program_says(run_path(&fixture, "says/execution.json"), "\"threads\":\t2"));
}

// A folder without checkpoints whose execution.json was frozen before, by this run or another one.
static void given_folder(const char *run, const char *execution)
{
    if (mkdir(run_path(&fixture, "%s", run), 0777) != 0)
        fail_msg("%s can not be made", run);
    write_text(run_path(&fixture, "%s/execution.json", run), execution);
}

// A text with another value for a member, as the file has it: "..." or a number.
static char *with_member(const char *text, const char *name, const char *value)
{
    char *quoted = memory_format("\"%s\":\t", name);
    const char *at = strstr(text, quoted);
    assert_non_null(at);
    at += strlen(quoted);
    free(quoted);
    return memory_format("%.*s%s%s", (int)(at - text), text, value, at + strcspn(at, ",\n"));
}

static const struct {
    const char *member, *value;
} bad_members[] = {
    {"group_rows", "0"},
    {"group_rows", "-8"},
    {"group_rows", "12"},
    {"group_rows", "80000"},
    {"group_rows", "4000000000"},
    {"chunk_rows", "0"},
    {"chunk_rows", "1"},
    {"chunk_rows", "-3"},
    {"chunk_rows", "4000000000"},
    {"threads", "0"},
    {"threads", "-1"},
    {"threads", "1000000"},
    {"recompute", "\"foo\""},
    {"group_rows", "\"many\""},
};

// The checkpoint as one of before there were checksums: its texts may be edited.
static void forget_sums(const char *name)
{
    const char *path = run_path(&fixture, "%s/state.json", name);
    char *text = program_text(path);
    char *sums = strstr(text, "\"crc32c\""), *version = strstr(text, "\"version\":\t2");
    assert_non_null(sums);
    assert_non_null(version);
    sums[1] = 'x';
    version[strlen("\"version\":\t")] = '1';
    write_text(path, text);
    free(text);
}

// Values that no step can be cut to: beside a checkpoint an error, without one a warning.
static void members_are_checked(void **state)
{
    (void)state;
    char *execution = program_text(run_path(&fixture, "run/execution.json"));
    int refused = 0;
    copy_run("members");
    forget_sums("members/checkpoints/step-00000008");
    for (size_t i = 0; i < sizeof(bad_members) / sizeof(*bad_members); i++) {
        char *bad = with_member(execution, bad_members[i].member, bad_members[i].value);
        const char *folder = run_path(&fixture, "fresh-%zu", i), *name = strrchr(folder, '/') + 1;
        given_folder(name, bad);
        assert_int_equal(run_train(&fixture, name, "--set", "run.max_steps=1", "--set",
                                   "parallel.threads=0", NULL),
                         0);
        run_must_say(&fixture, name, "this run chooses everything anew");
        run_must_say(&fixture, name, bad_members[i].member);
        if (strlen(bad) <= strlen(execution)) { // a checkpoint's files keep their sizes
            char *padded = memory_format("%-*s", (int)strlen(execution), bad);
            write_text(run_path(&fixture, "members/checkpoints/step-00000008/execution.json"),
                       padded);
            free(padded);
            assert_int_equal(run_train(&fixture, "members", "--set", "run.max_steps=9", NULL), 1);
            run_must_say(&fixture, "members", "step-00000008/execution.json");
            run_must_say(&fixture, "members", bad_members[i].member);
            refused++;
        }
        free(bad);
    }
    assert_true(refused >= 8);
    free(execution);
}

// A bit that a disk lost: the run says where and what can be done, and goes on from the checkpoint before.
static void a_damaged_checkpoint_is_refused(void **state)
{
    (void)state;
    copy_run("damaged-state");
    FILE *file = fopen(
        run_path(&fixture, "damaged-state/checkpoints/step-00000008/adam_m.safetensors"), "r+b");
    assert_non_null(file);
    assert_int_equal(fseek(file, -2, SEEK_END), 0);
    int byte = fgetc(file);
    assert_int_equal(fseek(file, -2, SEEK_END), 0);
    assert_int_equal(fputc(byte ^ 8, file), byte ^ 8);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(run_train(&fixture, "damaged-state", "--set", "run.max_steps=9", NULL), 1);
    run_must_say(&fixture, "damaged-state", "step-00000008/adam_m.safetensors: tensor '");
    run_must_say(&fixture, "damaged-state", "step-00000008 away, or name an older checkpoint");
    // The run's own folder is no checkpoint, and nothing to be moved away.
    assert_int_not_equal(
        run_train(&fixture, "damaged-state", "--resume", run_path(&fixture, "damaged-state"), NULL),
        0);
    run_must_say(&fixture, "damaged-state", "is a run's folder: name one of the checkpoints in it");
    assert_int_equal(run_train(&fixture, "damaged-state", "--resume",
                               run_checkpoint(&fixture, "damaged-state", 4), NULL),
                     0);
    assert_true(program_same_state(run_checkpoint(&fixture, "damaged-state", 8),
                                   run_checkpoint(&fixture, "run", 8)));
}

static void first_start_is_followed(void **state)
{
    (void)state;
    char *execution = program_text(run_path(&fixture, "run/execution.json"));
    char *group = strstr(execution, "\"group_rows\":");
    assert_non_null(group);
    char *comma = strchr(group, ',');
    char *smaller =
        memory_format("%.*s\"group_rows\":\t32%s", (int)(group - execution), execution, comma);
    given_folder("given", smaller);
    assert_int_equal(run_train(&fixture, "given", "--set", "run.max_steps=1", NULL), 0);
    run_must_say(&fixture, "given", "groups of 32 rows");
    run_must_say(&fixture, "given", "given/execution.json in what the config leaves open");
    assert_true(program_says(run_path(&fixture, "given/execution.json"), "\"group_rows\":\t32"));
    // What the config says itself holds; then nothing of the file does.
    given_folder("other", smaller);
    assert_int_equal(run_train(&fixture, "other", "--set", "run.max_steps=1", "--set",
                               "parallel.threads=2", NULL),
                     0);
    run_must_say(&fixture, "other", "threads: 1 in execution.json, 2 now");
    assert_false(program_says(run_path(&fixture, "other/execution.json"), "\"group_rows\":\t32"));
    given_folder("generic", smaller);
    assert_int_equal(run_train(&fixture, "generic", "--set", "run.max_steps=1", "--set",
                               "kernels.path=generic", NULL),
                     0);
    run_must_say(&fixture, "generic", "this run chooses everything anew");
    run_must_say(&fixture, "generic", "kernels: auto in execution.json, generic now");
    given_folder("damaged", "{\"device\": 1}");
    assert_int_equal(run_train(&fixture, "damaged", "--set", "run.max_steps=1", NULL), 0);
    run_must_say(&fixture, "damaged", "this run chooses everything anew");
    free(execution);
    free(smaller);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_command_lines_are_refused),
        cmocka_unit_test(questions_are_answered),
        cmocka_unit_test(config_faults_name_their_place),
        cmocka_unit_test(sets_are_checked),
        cmocka_unit_test(folder_in_use),
        cmocka_unit_test(folders_that_can_not_be),
        cmocka_unit_test(other_config),
        cmocka_unit_test(other_execution),
        cmocka_unit_test(other_data),
        cmocka_unit_test(other_target),
        cmocka_unit_test(a_config_that_is_read_once),
        cmocka_unit_test(a_target_that_is_not_finite),
        cmocka_unit_test(other_layers),
        cmocka_unit_test(other_target_defaults),
        cmocka_unit_test(checkpoint_of_another_folder),
        cmocka_unit_test(run_folder_says_how),
        cmocka_unit_test(first_start_is_followed),
        cmocka_unit_test(members_are_checked),
        cmocka_unit_test(a_damaged_checkpoint_is_refused),
    };
    return cmocka_run_group_tests_name("run_refusals", tests, open_all, close_all);
}
