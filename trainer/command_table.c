// Owns the rows of the table of commands and options. How they are used is for those that command_table.h
// names.
#include "trainer/command_table.h"

#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "trainer/launch.h"

#define FIELD(name)     offsetof(struct options, name)
#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define NEED(option, words)                                                                        \
    {                                                                                              \
        .name = (option), .required = true, .help = (words)                                        \
    }
#define MAY(option, words)                                                                         \
    {                                                                                              \
        .name = (option), .help = (words)                                                          \
    }
#define OPTIONS(array) .options = (array), .option_count = COUNT_OF(array)

// In alphabetical order.
const struct option_row option_rows[] = {
    {.name = "allow-unservable",
     .kind = OPTION_PERHAPS,
     .value_at = FIELD(allow_unservable),
     .value = "NAMES",
     .choices = "sliding_window_non_causal\0window_origin\0layer_types\0style\0"
                "norm_before_residual\0norm_before_fc\0num_attention_heads\0"},
    {.name = "blocks",
     .kind = OPTION_TEXT,
     .value_at = FIELD(blocks),
     .value = "FILE",
     .completes = VALUE_FILE},
    {.name = "checkpoint",
     .kind = OPTION_TEXT,
     .value_at = FIELD(checkpoint),
     .value = "DIR",
     .completes = VALUE_FOLDER,
     .help =
         "the checkpoint: a folder `step-*` of `checkpoints` in a run's folder, or `best` there"},
    {.name = "config",
     .kind = OPTION_TEXT,
     .value_at = FIELD(config),
     .value = "FILE",
     .completes = VALUE_FILE,
     .help = "the run's YAML; `dtrain config` lists every key"},
    {.name = "device-memory",
     .kind = OPTION_TEXT,
     .value_at = FIELD(device_memory),
     .value = "BYTES"},
    {.name = "equal",
     .kind = OPTION_TEXT,
     .value_at = FIELD(equal),
     .value = "WHAT",
     .choices = "steps\0anchors\0block_rows\0time=\0none\0"},
    {.name = "fit", .kind = OPTION_FLAG, .value_at = FIELD(fit)},
    {.name = "format",
     .kind = OPTION_TEXT,
     .value_at = FIELD(format),
     .value = "NAME",
     .choices = "zlab\0specforge\0speculators\0"},
    {.name = "from-step",
     .kind = OPTION_COUNT,
     .value_at = FIELD(from_step),
     .value = "N",
     .least = 1},
    {.name = "gpus", .kind = OPTION_TEXT, .value_at = FIELD(gpus), .value = "N"},
    {.name = "grid",
     .kind = OPTION_TEXTS,
     .value_at = FIELD(grids),
     .count_at = FIELD(grid_count),
     .value = "KEY=V1,V2,...",
     .completes = VALUE_SETTING},
    {.name = "help", .kind = OPTION_ASK, .help = "this text"},
    {.name = "json", .kind = OPTION_FLAG, .value_at = FIELD(json)},
    {.name = "markdown", .kind = OPTION_FLAG, .value_at = FIELD(markdown)},
    {.name = "no-verdicts", .kind = OPTION_FLAG, .value_at = FIELD(no_verdicts)},
    {.name = "out",
     .kind = OPTION_TEXT,
     .value_at = FIELD(out),
     .value = "FILE",
     .completes = VALUE_FILE,
     .help = "the file to write"},
    {.name = "parallel",
     .kind = OPTION_COUNT,
     .value_at = FIELD(parallel),
     .value = "N",
     .least = 1},
    {.name = "plan-only", .kind = OPTION_FLAG, .value_at = FIELD(plan_only)},
    {.name = "raw",
     .kind = OPTION_FLAG,
     .value_at = FIELD(raw),
     .help = "the weights themselves, where the checkpoint has a moving average of them"},
    {.name = "replan", .kind = OPTION_FLAG, .value_at = FIELD(replan)},
    {.name = "resume",
     .kind = OPTION_TEXT,
     .value_at = FIELD(resume),
     .value = "auto|none|DIR",
     .completes = VALUE_FOLDER,
     .choices = "auto\0none\0"},
    {.name = "rows", .kind = OPTION_COUNT, .value_at = FIELD(rows), .value = "N"},
    {.name = "served", .kind = OPTION_FLAG, .value_at = FIELD(served)},
    {.name = "set",
     .kind = OPTION_TEXTS,
     .value_at = FIELD(sets),
     .count_at = FIELD(set_count),
     .value = "KEY=VALUE",
     .completes = VALUE_SETTING,
     .help = "overrides a key of the config; the section may be left out where the key is unique"},
    {.name = "show",
     .kind = OPTION_TEXT,
     .value_at = FIELD(show),
     .value = "DIR",
     .completes = VALUE_FOLDER},
    {.name = "size", .kind = OPTION_COUNT, .value_at = FIELD(size), .value = "N", .least = 1},
    {.name = "target",
     .kind = OPTION_TEXT,
     .value_at = FIELD(target),
     .value = "DIR",
     .completes = VALUE_FOLDER},
    {.name = "target-config",
     .kind = OPTION_TEXT,
     .value_at = FIELD(target_config),
     .value = "FILE",
     .completes = VALUE_FILE},
    {.name = "tflops", .kind = OPTION_TEXT, .value_at = FIELD(tflops), .value = "N"},
    {.name = "vary",
     .kind = OPTION_TEXT,
     .value_at = FIELD(vary),
     .value = "KEYS",
     .completes = VALUE_KEYS},
    {.name = "version", .kind = OPTION_ASK, .help = "version, commit and build of the program"},
};
const size_t option_row_count = COUNT_OF(option_rows);

static const struct command_option train_options[] = {
    NEED("config", NULL),
    MAY("set", NULL),
    MAY("resume", "`auto` (the default): the newest complete checkpoint of run.dir, or the "
                  "beginning; `none`: "
                  "the beginning, refused when run.dir holds checkpoints; DIR: this checkpoint"),
    MAY("replan", "continue although the machine or the execution differs"),
};

static const struct command_option eval_options[] = {
    NEED("config", NULL),
    NEED("checkpoint", NULL),
    MAY("set", NULL),
    MAY("raw", NULL),
    MAY("served", "weights rounded to bf16, as exports hold them"),
    MAY("rows", "packed rows to score (default: all)"),
    MAY("blocks", "write a JSON line for each visited block: doc_id, anchor, accepted"),
};

static const struct command_option trace_options[] = {
    NEED("config", NULL),
    NEED("out", "the safetensors file to write"),
    MAY("set", NULL),
    MAY("checkpoint", "the step that follows this checkpoint (default: the first step)"),
};

static const struct command_option plan_options[] = {
    NEED("config", NULL),
    MAY("set", NULL),
    MAY("device-memory", "memory of one GPU, as 96GiB (default: that of the GPU here); "
                         "memory.limit counts when it is "
                         "less"),
    MAY("gpus", "judge a run on N ranks, by the one that holds most (default: 1)"),
    MAY("fit", "the largest values of keys that fit"),
    MAY("vary",
        "with --fit: of which keys, as seq_len,layers (default: seq_len,layers,group_rows)"),
    MAY("json", "everything as one JSON object, every tensor with its bytes"),
    MAY("grid",
        "with --json: a plan for every combination of the values, an object a line, each for "
        "as many ranks as a run would start on --gpus"),
    MAY("target-config", "the target's config.json, where target.path is not there"),
    MAY("tflops", "rate for the least time of a step (default: 700, an H200)"),
};

static const struct command_option sweep_options[] = {
    MAY("config",
        "the YAML that all points have in common; its run.dir is the folder of the sweep"),
    MAY("grid",
        "values of a key of the config, as block_size=8,16; a value that is a list stands in "
        "brackets. Several --grid: every combination"),
    MAY("set", NULL),
    MAY("equal",
        "what is the same at all points: `steps` (the default); `anchors`, of EAGLE-3 positions; "
        "`block_rows`, anchors times block_size; `time=SECONDS`, about so long a time of steps, "
        "which are measured first; `none`: each point takes what its config says"),
    MAY("parallel", "points at a time, GPUs or CPU threads divided between them (default: 1)"),
    MAY("plan-only", "print which points fit, and start none"),
    MAY("device-memory", "memory of one GPU, as 96GiB (default: that of the GPU here)"),
    MAY("show", "print the table of a sweep as it stands, also of one that is running; DIR is its "
                "run.dir"),
};

static const struct command_option export_options[] = {
    NEED("checkpoint", NULL),
    NEED("format", "`zlab`: read by SGLang, vLLM and z-lab's code, DFlash only; `specforge`: the "
                   "same layout, and of EAGLE-3 what SGLang reads; `speculators`: read by vLLM and "
                   "speculators, holds the target's embedding and head"),
    {.name = "out", .required = true, .value = "DIR", .help = "the folder to write"},
    MAY("raw", NULL),
    MAY("target", "where the target is now (speculators; default: the run's target.path)"),
    MAY("allow-unservable", "write it although servers do not run it as trained; with NAMES, "
                            "separated by commas, only as "
                            "far as these go"),
};

static const struct command_option vocab_options[] = {
    NEED("size", "how many tokens the draft vocabulary has"),
    NEED("out", "the map to write, for drafter.draft_vocab"),
    MAY("target", "compare the vocabulary of the shards with this target's"),
};

static const struct command_option data_check_options[] = {
    MAY("target", "also recompute the teacher on a sample of positions"),
    MAY("no-verdicts", "do not write verdict files"),
};

static const struct command_option data_order_options[] = {
    NEED("config", NULL),
    MAY("set", NULL),
    MAY("from-step", "begin with the first document of step N"),
};

static const struct command_option data_manifest_options[] = {
    NEED("out", NULL),
};

static const struct command_option config_options[] = {
    MAY("markdown", "as docs/config.md"),
};

const struct command_option common_options[] = {
    MAY("help", NULL),
    MAY("version", NULL),
};
const size_t common_option_count = COUNT_OF(common_options);

const struct command command_table[] = {
    {.name = "train",
     .run = command_launch,
     .stops = true,
     .summary = "trains a drafter; the command when none is named",
     .text = "Trains a drafter. Continues from the newest complete checkpoint of run.dir by "
             "itself.",
     OPTIONS(train_options)},
    {.name = "eval",
     .run = command_eval,
     .summary = "acceptance of a checkpoint on the validation shards",
     .text = "Acceptance of a checkpoint on the validation shards (data.val): accept_len_walk is "
             "the mean number of tokens a decoder would take per step.",
     OPTIONS(eval_options)},
    {.name = "trace",
     .run = command_trace,
     .summary = "one training step, with all that it computed",
     .text = "Runs one training step and writes everything needed to compute it again elsewhere.",
     OPTIONS(trace_options)},
    {.name = "plan",
     .run = command_plan,
     .summary = "memory and work of a run, before it is started",
     .text = "Memory that a run takes on the device and on the host, by group of tensors, before "
             "anything is allocated; operations, bytes read and disk. Needs no GPU, no shards and "
             "no weights of the target. Exit status 1 when it does not fit.",
     OPTIONS(plan_options)},
    {.name = "sweep",
     .run = command_sweep,
     .stops = true,
     .summary = "trains every combination of some keys' values and compares them",
     .text =
         "Trains with every combination of the values of --grid and compares them. All points "
         "are planned first, and those that do not fit are left out. Each is an ordinary run in "
         "a folder of its own below run.dir. The same command goes on with a sweep that was "
         "interrupted. It needs --config and --grid, or --show alone.\n\n"
         "The table is printed and written to table.txt, table.csv and table.json. Exit status "
         "1 when a point failed or does not fit.",
     OPTIONS(sweep_options)},
    {.name = "export",
     .run = command_export,
     .summary = "a checkpoint as a drafter that servers read",
     .text = "Writes a servable drafter (bf16 model.safetensors and config.json).",
     OPTIONS(export_options)},
    {.name = "vocab",
     .run = command_vocab,
     .summary = "a draft vocabulary for EAGLE-3 from the data",
     .text =
         "Counts the supervised tokens of the training shards, or of a manifest, keeps the most "
         "frequent ones, and prints how many of the supervised tokens they are. A run refuses a "
         "map that was made from other data than its own.",
     OPTIONS(vocab_options),
     .operand = "SHARD",
     .operand_completes = VALUE_FILE,
     .operands = true},
    {.name = "data check",
     .run = command_data_check,
     .summary = "every fault of feature shards",
     .text = "Every fault of feature shards by file, document and row; exit status 1 if there is "
             "any. Verdicts go to FILE.verdict.json, which training uses to leave bad documents "
             "out.",
     OPTIONS(data_check_options),
     .operand = "FILE",
     .operand_completes = VALUE_FILE,
     .operands = true},
    {.name = "data stats",
     .run = command_data_stats,
     .summary = "documents, tokens and bytes of feature shards",
     .text = "Documents, tokens, supervised share, lengths and bytes of feature shards.",
     .operand = "FILE",
     .operand_completes = VALUE_FILE,
     .operands = true},
    {.name = "data order",
     .run = command_data_order,
     .summary = "the order in which training reads its documents",
     .text = "The order in which training reads its documents: lines of serial number, epoch, "
             "step, doc_id and tokens, after lines that begin with # and say what an extractor "
             "needs to know.",
     OPTIONS(data_order_options)},
    {.name = "data manifest",
     .run = command_data_manifest,
     .summary = "all of feature shards but their features",
     .text = "Writes the manifest of the documents of feature shards: everything but their "
             "features.",
     OPTIONS(data_manifest_options),
     .operand = "SHARD",
     .operand_completes = VALUE_FILE,
     .operands = true},
    {.name = "config",
     .run = command_config,
     .summary = "every config key",
     .text = "Every config key: type, default, range, meaning, and whether it may change on "
             "resume.",
     OPTIONS(config_options)},
    {.name = "completion",
     .run = command_completion,
     .summary = "a script that completes dtrain's words in a shell",
     .text = "Prints a script that completes commands, options, config keys and their choices. "
             "For bash: `source <(dtrain completion bash)` in ~/.bashrc. For zsh: `dtrain "
             "completion zsh > DIR/_dtrain`, where DIR is in fpath before compinit runs.",
     .operand = "SHELL",
     .operand_choices = "bash\0zsh\0"},
    {.name = "man",
     .run = command_man,
     .summary = "the manual page",
     .text = "Prints the manual page as roff: `dtrain man | man -l -` shows it."},
};
const size_t command_count = COUNT_OF(command_table);

const struct command *command_default(void)
{
    return &command_table[0];
}

const struct command *command_find(const char *name)
{
    for (size_t i = 0; i < command_count; i++)
        if (strcmp(command_table[i].name, name) == 0)
            return &command_table[i];
    return NULL;
}

bool command_group(const struct command *command, char group[COMMAND_GROUP_BYTES])
{
    size_t length = strcspn(command->name, " ");
    BUG_UNLESS(length < COMMAND_GROUP_BYTES);
    snprintf(group, COMMAND_GROUP_BYTES, "%.*s", (int)length, command->name);
    return command->name[length] != '\0';
}

bool command_is_first(const struct command *command)
{
    size_t length = strcspn(command->name, " ");
    const struct command *first = command_table;
    while (strncmp(first->name, command->name, length) != 0 || strcspn(first->name, " ") != length)
        first++;
    return first == command;
}

const struct option_row *option_row_of(const char *name)
{
    for (size_t i = 0; i < option_row_count; i++)
        if (strcmp(option_rows[i].name, name) == 0)
            return &option_rows[i];
    BUG("no row for --%s", name);
}

const char *option_value(const struct command_option *option)
{
    return option->value != NULL ? option->value : option_row_of(option->name)->value;
}

const char *option_help(const struct command_option *option)
{
    return option->help != NULL ? option->help : option_row_of(option->name)->help;
}

const struct command_option *command_option_find(const struct command *command, const char *name)
{
    for (size_t i = 0; i < command->option_count; i++)
        if (strcmp(command->options[i].name, name) == 0)
            return &command->options[i];
    for (size_t i = 0; i < common_option_count; i++)
        if (strcmp(common_options[i].name, name) == 0)
            return &common_options[i];
    return NULL;
}
