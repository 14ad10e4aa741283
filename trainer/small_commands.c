// The commands that need no model state: config, export, data, plan.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "data/check.h"
#include "trainer/commands.h"
#include "trainer/export.h"
#include "trainer/session.h"
#include "trainer/teacher_check.h"

int command_config(const struct options *options)
{
    if (options->markdown)
        config_write_markdown(stdout);
    else
        config_describe(stdout);
    return EXIT_DONE;
}

int command_export(const struct options *options)
{
    struct error err = {0};
    if (strcmp(options->format, "zlab") != 0) {
        log_error("--format %s: this program writes zlab", options->format);
        return EXIT_REFUSED;
    }
    if (export_command(options->checkpoint, options->format, options->out,
                       options->allow_unservable, &err) == 0)
        return EXIT_DONE;
    log_error("%s", err.text);
    return EXIT_FAILED;
}

int command_data_check(const struct options *options)
{
    struct error err = {0};
    struct check_summary summary = {0};
    const char *const *files = (const char *const *)options->files;
    size_t count = (size_t)options->file_count;
    int status = data_check(files, count, !options->no_verdicts, stdout, &summary, &err);
    if (status >= 0 && options->target != NULL) {
        int teacher = teacher_check(files, count, options->target, stdout, &err);
        status = teacher != 0 ? teacher : status;
    }
    if (status < 0)
        log_error("%s", err.text);
    return status == 0 ? EXIT_DONE : EXIT_FAILED;
}

int command_data_stats(const struct options *options)
{
    struct error err = {0};
    if (data_stats((const char *const *)options->files, (size_t)options->file_count, stdout,
                   &err) == 0)
        return EXIT_DONE;
    log_error("%s", err.text);
    return EXIT_FAILED;
}

static void print_plan(const struct arena *arena, const struct execution *e)
{
    printf("%-14s %12s\n", "group", "MiB");
    for (size_t i = 0; i < arena->count; i++) {
        const char *group = arena->entries[i].group;
        bool seen = false;
        for (size_t j = 0; j < i && !seen; j++)
            seen = strcmp(arena->entries[j].group, group) == 0;
        if (!seen)
            printf("%-14s %12.1f\n", group, (double)arena_group_bytes(arena, group) / 1048576.0);
    }
    printf("%-14s %12.1f\n\n", "all", (double)arena->bytes / 1048576.0);
    printf("device %s, compute %s, group_rows %lld, chunk_rows %lld, recompute %s, logits %s\n",
           e->device, e->compute, (long long)e->group_rows, (long long)e->chunk_rows, e->recompute,
           e->logits);
}

int command_plan(const struct options *options)
{
    struct config config;
    struct session session = {0};
    struct error err = {0};
    int status = EXIT_REFUSED;
    config_init(&config);
    if (session_config(&config, options->config, options->sets, options->set_count, SESSION_TRAIN,
                       &err) != 0 ||
        session_open(&session, &config, SESSION_TRAIN, &err) != 0) {
        log_error("%s", err.text);
    } else {
        struct arena arena;
        struct step_setup setup = session_step_setup(&session, true);
        arena_init(&arena);
        step_plan(&arena, &setup);
        print_plan(&arena, &session.execution);
        arena_release(&arena);
        status = EXIT_DONE;
    }
    session_close(&session);
    config_release(&config);
    return status;
}
