// Owns `dtrain plan`.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/byte_size.h"
#include "base/log.h"
#include "trainer/commands.h"
#include "trainer/json_text.h"
#include "trainer/plan_fit.h"
#include "trainer/plan_print.h"
#include "trainer/sweep_grid.h"

struct plan_run {
    const struct options *options;
    struct config config;
    struct plan_input input;
    struct plan plan;
    struct plan_work work;
    size_t device_memory; // 0: not known
    const char *memory_from;
    double tflops;
    bool of_grid, quiet;  // one of several; not the first of them, which tells the warnings of all
    char *keys[FIT_KEYS]; // of --vary
    size_t key_count;
};

// A run takes no more than memory.limit of the device that it is given; the smaller counts here, too.
static int take_memory(struct plan_run *run, struct error *err)
{
    uint64_t bytes = 0, limit = config_memory_limit(&run->config);
    size_t left = 0, total = 0;
    const char *text = run->options->device_memory;
    const struct backend *backend = run->input.subject.backend;
    if (text != NULL && byte_size_parse_memory(text, &bytes) != 0)
        return error_set(err, "--device-memory: %s is no amount of memory with a unit; say 96GiB",
                         text);
    run->memory_from = text != NULL ? "--device-memory" : "the device here";
    if (text == NULL && run->input.device == PLAN_DEVICE_HERE) {
        backend->memory(&left, &total);
        bytes = total;
    }
    if (limit > 0 && (bytes == 0 || limit < bytes)) {
        run->memory_from = "memory.limit";
        bytes = limit;
    }
    run->device_memory = (size_t)bytes;
    run->input.subject.limit = (size_t)bytes;
    return 0;
}

// Of N GPUs that are there, as many as a run takes that starts its ranks itself; it starts none on a CPU.
static int64_t ranks_of(const struct config *config, long long gpus)
{
    int64_t most = config->data.rows_per_step;
    if (config->run.device == DEVICE_CPU)
        return 1;
    if (config->parallel.gpus > 0)
        return config->parallel.gpus;
    return most < gpus ? most : gpus;
}

static int take_numbers(struct plan_run *run, struct error *err)
{
    const struct options *o = run->options;
    char *end;
    run->tflops = o->tflops != NULL ? strtod(o->tflops, &end) : PLAN_TFLOPS;
    if (o->tflops != NULL && (*end != '\0' || !(run->tflops > 0.0 && run->tflops < 1e9)))
        return error_set(err, "--tflops: %s is not a number above 0", o->tflops);
    long long gpus = o->gpus != NULL ? strtoll(o->gpus, &end, 10) : 1;
    if (o->gpus != NULL && (*end != '\0' || gpus < 1 || gpus > PLAN_MOST_RANKS))
        return error_set(err, "--gpus: %s is not a number from 1 to %d", o->gpus, PLAN_MOST_RANKS);
    run->input.subject.ranks = run->of_grid ? ranks_of(&run->config, gpus) : gpus;
    return 0;
}

// A key named twice, with its section or without, is asked once.
static int add_key(struct plan_run *run, const char *text, size_t length, struct error *err)
{
    struct config_int_key key;
    char *name = memory_format("%.*s", (int)length, text);
    int status = config_find_int(&run->config, name, &key, err);
    free(name);
    if (status != 0)
        return error_prefix(err, "--vary");
    for (size_t i = 0; i < run->key_count; i++)
        if (strcmp(run->keys[i], key.name) == 0)
            return 0;
    if (run->key_count == FIT_KEYS)
        return error_set(err, "--vary: at most %d keys", FIT_KEYS);
    run->keys[run->key_count++] = memory_strdup(key.name);
    return 0;
}

static int take_keys(struct plan_run *run, struct error *err)
{
    const char *text = run->options->vary != NULL ? run->options->vary
                                                  : "data.seq_len,drafter.layers,memory.group_rows";
    if (run->options->vary != NULL && !run->options->fit)
        return error_set(err, "--vary %s: names keys for --fit; give --fit as well", text);
    while (*text != '\0') {
        size_t n = strcspn(text, ", ");
        if (n > 0 && add_key(run, text, n, err) != 0)
            return -1;
        text += n + (text[n] != '\0');
    }
    return run->key_count > 0 ? 0 : error_set(err, "--vary: names no key");
}

// Everything up to the plan itself.
static int open_plan(struct plan_run *run, struct error *err)
{
    const struct options *o = run->options;
    struct error warnings = {""}, shared = {""};
    if (config_load(&run->config, o->config, o->sets, o->set_count, err) != 0)
        return -1;
    log_configure((enum log_level)run->config.log.level, 0);
    if (config_warnings(&run->config, &warnings) > 0 && !run->quiet)
        log_warn("%s", warnings.text);
    if (plan_input_open(&run->input, &run->config, o->target_config, o->device_memory == NULL,
                        err) != 0)
        return -1;
    if (config_shared_files(&run->config, &shared) > 0 && !run->quiet)
        log_warn("%s", shared.text);
    if (take_memory(run, err) != 0 || take_numbers(run, err) != 0 || take_keys(run, err) != 0)
        return -1;
    if (o->fit && run->device_memory == 0)
        return error_set(err,
                         "--fit: say into what with --device-memory, as 96GiB; no GPU is here");
    if (plan_make(&run->plan, &run->input.subject, &run->config, NULL, err) != 0)
        return -1;
    plan_work(&run->work, &run->plan, &run->input.subject, &run->config, &run->input.documents,
              run->tflops);
    return 0;
}

static int add_fits(struct plan_run *run, cJSON *root, struct error *err)
{
    struct plan_fit fits[2 * FIT_KEYS];
    struct plan_fit_together together;
    size_t count = 0;
    const struct plan_subject *subject = &run->input.subject;
    for (size_t i = 0; i < run->key_count; i++)
        for (int open = 0; open < 2; open++)
            if (plan_fit_key(&fits[count++], subject, &run->config, &run->plan, run->keys[i],
                             open == 1, err) != 0)
                return error_prefix(err, "--vary");
    bool several = run->key_count > 1;
    if (several && plan_fit_together(&together, subject, &run->config, &run->plan,
                                     (const char *const *)run->keys, run->key_count, err) != 0)
        return error_prefix(err, "--vary");
    if (root != NULL)
        plan_fit_json(fits, count, several ? &together : NULL, root);
    else
        plan_fit_print(fits, count, several ? &together : NULL, run->device_memory, stdout);
    return 0;
}

static int report(struct plan_run *run, struct error *err)
{
    const struct plan_report r = {.config = &run->config,
                                  .input = &run->input,
                                  .plan = &run->plan,
                                  .work = &run->work,
                                  .device_memory = run->device_memory,
                                  .memory_from = run->memory_from,
                                  .tflops = run->tflops,
                                  .fitting = run->options->fit};
    cJSON *root = run->options->json ? plan_json(&r) : NULL;
    int status = 0;
    if (root == NULL)
        plan_print(&r, stdout);
    if (run->options->fit)
        status = add_fits(run, root, err);
    if (root != NULL && status == 0) {
        char *text = run->of_grid ? cJSON_PrintUnformatted(root) : cJSON_Print(root);
        printf("%s\n", text);
        cJSON_free(text);
    }
    cJSON_Delete(root);
    return status;
}

static int run_plan(struct plan_run *run)
{
    struct error err = {""};
    int status = EXIT_REFUSED;
    config_init(&run->config);
    if (open_plan(run, &err) != 0 || report(run, &err) != 0) {
        config_name_places(&run->config, &err);
        log_error("%s", err.text);
    } else {
        status = run->plan.fits ? EXIT_DONE : EXIT_FAILED;
    }
    for (size_t i = 0; i < run->key_count; i++)
        free(run->keys[i]);
    plan_release(&run->plan);
    plan_input_close(&run->input);
    config_release(&run->config);
    return status;
}

// Every point of a grid, one after another up to one that is refused.
static int plan_grid(const struct options *options)
{
    struct sweep_grid grid;
    struct error err = {""};
    int status = EXIT_DONE;
    if (!options->json || options->fit)
        error_set(&err, "--grid: gives an object a line, so it needs --json and knows no --fit; "
                        "dtrain sweep --plan-only prints a table");
    if (sweep_grid_parse(&grid, options->grids, options->grid_count, &err) != 0 ||
        err.text[0] != '\0') {
        log_error("%s", err.text);
        status = EXIT_REFUSED;
    }
    for (size_t i = 0; status != EXIT_REFUSED && i < sweep_grid_points(&grid); i++) {
        struct sweep_sets sets;
        sweep_sets_open(&sets, &grid, i, options->sets, options->set_count);
        struct options point = *options;
        point.sets = sets.items;
        point.set_count = sets.count;
        int one = run_plan(&(struct plan_run){.options = &point, .of_grid = true, .quiet = i > 0});
        status = one > status ? one : status;
        sweep_sets_close(&sets);
        fflush(stdout); // a sweep counts them
    }
    sweep_grid_release(&grid);
    return status;
}

int command_plan(const struct options *options)
{
    return options->grid_count > 0 ? plan_grid(options)
                                   : run_plan(&(struct plan_run){.options = options});
}
