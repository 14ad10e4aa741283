// The program: finds the command, reads its options, runs it.
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/log.h"
#include "base/memory.h"
#include "trainer/commands.h"
#include "trainer/help.h"
#include "trainer/launch.h"
#include "trainer/rank_place.h"
#include "version.h"

enum option_id {
    OPTION_CONFIG = 1,
    OPTION_SET,
    OPTION_RESUME,
    OPTION_REPLAN,
    OPTION_CHECKPOINT,
    OPTION_OUT,
    OPTION_FORMAT,
    OPTION_ALLOW_UNSERVABLE,
    OPTION_BLOCKS,
    OPTION_TARGET,
    OPTION_ROWS,
    OPTION_SERVED,
    OPTION_NO_VERDICTS,
    OPTION_MARKDOWN,
    OPTION_TARGET_CONFIG,
    OPTION_DEVICE_MEMORY,
    OPTION_GPUS,
    OPTION_TFLOPS,
    OPTION_JSON,
    OPTION_FIT,
    OPTION_VARY,
    OPTION_FROM_STEP,
    OPTION_GRID,
    OPTION_EQUAL,
    OPTION_PARALLEL,
    OPTION_PLAN_ONLY,
    OPTION_SHOW,
    OPTION_HELP,
    OPTION_VERSION,
};

static const struct option long_options[] = {
    {"config", required_argument, NULL, OPTION_CONFIG},
    {"set", required_argument, NULL, OPTION_SET},
    {"resume", required_argument, NULL, OPTION_RESUME},
    {"replan", no_argument, NULL, OPTION_REPLAN},
    {"checkpoint", required_argument, NULL, OPTION_CHECKPOINT},
    {"out", required_argument, NULL, OPTION_OUT},
    {"format", required_argument, NULL, OPTION_FORMAT},
    {"allow-unservable", optional_argument, NULL, OPTION_ALLOW_UNSERVABLE},
    {"blocks", required_argument, NULL, OPTION_BLOCKS},
    {"target", required_argument, NULL, OPTION_TARGET},
    {"rows", required_argument, NULL, OPTION_ROWS},
    {"served", no_argument, NULL, OPTION_SERVED},
    {"no-verdicts", no_argument, NULL, OPTION_NO_VERDICTS},
    {"markdown", no_argument, NULL, OPTION_MARKDOWN},
    {"target-config", required_argument, NULL, OPTION_TARGET_CONFIG},
    {"device-memory", required_argument, NULL, OPTION_DEVICE_MEMORY},
    {"gpus", required_argument, NULL, OPTION_GPUS},
    {"tflops", required_argument, NULL, OPTION_TFLOPS},
    {"json", no_argument, NULL, OPTION_JSON},
    {"fit", no_argument, NULL, OPTION_FIT},
    {"vary", required_argument, NULL, OPTION_VARY},
    {"from-step", required_argument, NULL, OPTION_FROM_STEP},
    {"grid", required_argument, NULL, OPTION_GRID},
    {"equal", required_argument, NULL, OPTION_EQUAL},
    {"parallel", required_argument, NULL, OPTION_PARALLEL},
    {"plan-only", no_argument, NULL, OPTION_PLAN_ONLY},
    {"show", required_argument, NULL, OPTION_SHOW},
    {"help", no_argument, NULL, OPTION_HELP},
    {"version", no_argument, NULL, OPTION_VERSION},
    {NULL, 0, NULL, 0},
};

// A command, the options it takes (others are refused) and those it needs.
struct command {
    const char *name;
    int (*run)(const struct options *options);
    const char *takes; // names, space-separated
    const char *needs;
    bool files; // takes file names
};

// On several GPUs as several processes.
static int train(const struct options *options)
{
    struct rank_place place;
    struct error err = {0};
    if (rank_place_read(&place, rank_variable, NULL, &err) ==
        0) // else ranks_open says what is wrong
        log_configure(LOG_INFO, place.rank);
    int status = launch_train(options);
    return status >= 0 ? status : command_train(options);
}

static const struct command commands[] = {
    {"train", train, "config set resume replan", "config", false},
    {"eval", command_eval, "config set checkpoint blocks rows served", "config checkpoint", false},
    {"trace", command_trace, "config set checkpoint out", "config out", false},
    {"plan", command_plan, "config set json device-memory gpus fit vary target-config tflops",
     "config", false},
    {"sweep", command_sweep, "config set grid equal parallel plan-only device-memory show", "",
     false},
    {"export", command_export, "checkpoint format out target allow-unservable",
     "checkpoint format out", false},
    {"data check", command_data_check, "target no-verdicts", "", true},
    {"data stats", command_data_stats, "", "", true},
    {"data order", command_data_order, "config set from-step", "config", false},
    {"data manifest", command_data_manifest, "out", "out", true},
    {"config", command_config, "markdown", "", false},
};
enum { COMMAND_COUNT = sizeof(commands) / sizeof(commands[0]) };

static bool has_word(const char *words, const char *word)
{
    size_t n = strlen(word);
    for (const char *at = words; (at = strstr(at, word)) != NULL; at += n)
        if ((at == words || at[-1] == ' ') && (at[n] == ' ' || at[n] == '\0'))
            return true;
    return false;
}

static int usage_error(const char *text, const char *word)
{
    fprintf(stderr, "dtrain: %s%s; see dtrain --help\n", text, word);
    return EXIT_REFUSED;
}

// The command named by argv[1] (and argv[2] for `data`); `train` when there is none. *skip: how many
// words it took. NULL: unknown.
static const struct command *find_command(int argc, char **argv, int *skip)
{
    *skip = 0;
    if (argc < 2 || argv[1][0] == '-')
        return &commands[0];
    char name[64];
    *skip = strcmp(argv[1], "data") == 0 && argc > 2 ? 2 : 1;
    snprintf(name, sizeof(name), *skip == 2 ? "%s %s" : "%s", argv[1], *skip == 2 ? argv[2] : "");
    for (size_t i = 0; i < COMMAND_COUNT; i++)
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
    return NULL;
}

static int unknown_command(int argc, char **argv)
{
    if (strcmp(argv[1], "data") == 0 && argc > 2 && strcmp(argv[2], "--help") == 0) {
        help_print(stdout, "data check", false);
        printf("\n");
        help_print(stdout, "data stats", false);
        printf("\n");
        help_print(stdout, "data order", false);
        printf("\n");
        help_print(stdout, "data manifest", false);
        return EXIT_DONE;
    }
    if (strcmp(argv[1], "data") == 0) {
        fprintf(stderr, "dtrain data: say check, stats, order or manifest");
        if (argc > 2 && argv[2][0] != '-')
            fprintf(stderr, ", not %s", argv[2]);
        fprintf(stderr, "; see dtrain --help\n");
        return EXIT_REFUSED;
    }
    const char *names[COMMAND_COUNT];
    for (size_t i = 0; i < COMMAND_COUNT; i++)
        names[i] = commands[i].name;
    const char *nearest = error_nearest(argv[1], names, COMMAND_COUNT);
    fprintf(stderr, "dtrain: unknown command %s", argv[1]);
    if (nearest != NULL)
        fprintf(stderr, "; did you mean %s?", nearest);
    fprintf(stderr, "\nsee dtrain --help\n");
    return EXIT_REFUSED;
}

static int take_count(const char *text, long long least, const char *fault, long long *count)
{
    char *end;
    *count = strtoll(text, &end, 10);
    return *end != '\0' || end == text || *count < least ? usage_error(fault, text) : 0;
}

// Those that only `plan` has.
static void take_plan_option(int id, struct options *options)
{
    switch (id) {
    case OPTION_TARGET_CONFIG:
        options->target_config = optarg;
        break;
    case OPTION_DEVICE_MEMORY:
        options->device_memory = optarg;
        break;
    case OPTION_GPUS:
        options->gpus = optarg;
        break;
    case OPTION_TFLOPS:
        options->tflops = optarg;
        break;
    case OPTION_JSON:
        options->json = true;
        break;
    case OPTION_FIT:
        options->fit = true;
        break;
    default:
        options->vary = optarg;
    }
}

// Those that only `sweep` has. Returns 0, or an exit status.
static int take_sweep_option(int id, struct options *options)
{
    switch (id) {
    case OPTION_GRID:
        options->grids[options->grid_count++] = optarg;
        break;
    case OPTION_EQUAL:
        options->equal = optarg;
        break;
    case OPTION_PARALLEL:
        return take_count(optarg, 1, "--parallel: not a number of points: ", &options->parallel);
    case OPTION_PLAN_ONLY:
        options->plan_only = true;
        break;
    default:
        options->show = optarg;
    }
    return 0;
}

// Puts one option into `options`. Returns 0, or an exit status.
static int take_option(const struct command *command, int id, struct options *options)
{
    const char *name = long_options[id - 1].name;
    if (!has_word(command->takes, name)) {
        fprintf(stderr, "dtrain %s: no option --%s; see dtrain %s --help\n", command->name, name,
                command->name);
        return EXIT_REFUSED;
    }
    switch ((enum option_id)id) {
    case OPTION_CONFIG:
        options->config = optarg;
        break;
    case OPTION_SET:
        options->sets[options->set_count++] = optarg;
        break;
    case OPTION_RESUME:
        options->resume = optarg;
        break;
    case OPTION_REPLAN:
        options->replan = true;
        break;
    case OPTION_CHECKPOINT:
        options->checkpoint = optarg;
        break;
    case OPTION_OUT:
        options->out = optarg;
        break;
    case OPTION_FORMAT:
        options->format = optarg;
        break;
    case OPTION_ALLOW_UNSERVABLE:
        options->allow_unservable = optarg != NULL ? optarg : "";
        break;
    case OPTION_BLOCKS:
        options->blocks = optarg;
        break;
    case OPTION_TARGET:
        options->target = optarg;
        break;
    case OPTION_ROWS:
        return take_count(optarg, 0, "--rows: not a number of rows: ", &options->rows);
    case OPTION_FROM_STEP:
        return take_count(optarg, 1,
                          "--from-step: not a step, which count from 1: ", &options->from_step);
    case OPTION_SERVED:
        options->served = true;
        break;
    case OPTION_NO_VERDICTS:
        options->no_verdicts = true;
        break;
    case OPTION_MARKDOWN:
        options->markdown = true;
        break;
    case OPTION_TARGET_CONFIG:
    case OPTION_DEVICE_MEMORY:
    case OPTION_GPUS:
    case OPTION_TFLOPS:
    case OPTION_JSON:
    case OPTION_FIT:
    case OPTION_VARY:
        take_plan_option(id, options);
        break;
    case OPTION_GRID:
    case OPTION_EQUAL:
    case OPTION_PARALLEL:
    case OPTION_PLAN_ONLY:
    case OPTION_SHOW:
        return take_sweep_option(id, options);
    case OPTION_HELP:
    case OPTION_VERSION:
        break;
    }
    return 0;
}

static int check_needs(const struct command *command, const struct options *options)
{
    const struct {
        const char *name, *value;
    } given[] = {{"config", options->config},
                 {"checkpoint", options->checkpoint},
                 {"format", options->format},
                 {"out", options->out}};
    for (size_t i = 0; i < sizeof(given) / sizeof(given[0]); i++)
        if (has_word(command->needs, given[i].name) && given[i].value == NULL) {
            fprintf(stderr, "dtrain %s: --%s is required; see dtrain %s --help\n", command->name,
                    given[i].name, command->name);
            return EXIT_REFUSED;
        }
    if (command->files && options->file_count == 0)
        return usage_error("name the shards to look at: ", command->name);
    if (!command->files && options->file_count > 0)
        return usage_error("unexpected word ", options->files[0]);
    return 0;
}

// The command line in one string, for provenance. The caller frees.
static char *join_command(int argc, char **argv)
{
    size_t n = 1;
    for (int i = 0; i < argc; i++)
        n += strlen(argv[i]) + 1;
    char *text = memory_alloc(n, 1), *end = text;
    for (int i = 0; i < argc; i++)
        end = stpcpy(stpcpy(end, argv[i]), i + 1 < argc ? " " : "");
    return text;
}

static int run(const struct command *command, int skip, int argc, char **argv,
               struct options *options)
{
    int status = 0, id;
    optind = 1;
    while (status == 0 &&
           (id = getopt_long(argc - skip, argv + skip, "h", long_options, NULL)) != -1) {
        if (id == '?')
            status = EXIT_REFUSED;
        else if (id == OPTION_HELP || id == 'h') {
            help_print(stdout, command->name, skip == 0);
            return EXIT_DONE;
        } else if (id == OPTION_VERSION) {
            printf("dtrain %s (%s, %s)\n", DTRAIN_VERSION, DTRAIN_COMMIT, DTRAIN_BUILD);
            return EXIT_DONE;
        } else
            status = take_option(command, id, options);
    }
    options->files = argv + skip + optind;
    options->file_count = argc - skip - optind;
    if (status == 0)
        status = check_needs(command, options);
    return status == 0 ? command->run(options) : status;
}

// OpenMP's threads spin while they wait unless told otherwise: beside other work that is ruinous, and
// alone it gains little. The runtime reads the policy when it is loaded, so the program starts itself
// again with it; a policy that the user has set stays.
static void wait_without_spinning(char **argv)
{
    if (getenv("OMP_WAIT_POLICY") != NULL || setenv("OMP_WAIT_POLICY", "passive", 1) != 0)
        return;
    execv("/proc/self/exe", argv); // returns only when it fails: then the threads spin
}

int main(int argc, char **argv)
{
    wait_without_spinning(argv);
    int skip;
    struct options options = {0};
    if (argc < 2) {
        help_print(stderr, "train", true);
        return EXIT_REFUSED;
    }
    const struct command *command = find_command(argc, argv, &skip);
    if (command == NULL)
        return unknown_command(argc, argv);
    char *line = join_command(argc, argv);
    options.sets = memory_alloc((size_t)argc, sizeof(*options.sets));
    options.grids = memory_alloc((size_t)argc, sizeof(*options.grids));
    options.command = line;
    options.arguments = argv;
    int status = run(command, skip, argc, argv, &options);
    if ((fflush(stdout) != 0 || ferror(stdout)) && status == EXIT_DONE) {
        log_error("standard output can not be written");
        status = EXIT_FAILED;
    }
    free(options.grids);
    free(options.sets);
    free(line);
    return status;
}
