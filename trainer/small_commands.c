// The commands that need no model state: config, export, data.
#include <stdio.h>
#include <stdlib.h>

#include "base/log.h"
#include "data/check.h"
#include "data/target.h"
#include "trainer/commands.h"
#include "trainer/export.h"
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
    int format = export_format_find(options->format);
    if (format < 0) {
        log_error("--format %s: this program writes zlab, specforge and speculators",
                  options->format);
        return EXIT_REFUSED;
    }
    if (export_check_allowed(options->allow_unservable, &err) != 0 ||
        export_check_out(options->out, &err) != 0) {
        log_error("%s", err.text);
        return EXIT_REFUSED;
    }
    const struct export_request request = {.checkpoint = options->checkpoint,
                                           .out = options->out,
                                           .format = (enum export_format)format,
                                           .target = options->target,
                                           .allow = options->allow_unservable};
    if ((options->raw ? export_raw_command : export_command)(&request, &err) == 0) {
        log_info("%s: config.json and model.safetensors in the layout %s", options->out,
                 options->format);
        return EXIT_DONE;
    }
    log_error("%s", err.text);
    return EXIT_FAILED;
}

// Before the shards are read, which takes long.
static int check_target(const char *path, struct error *err)
{
    struct target target;
    if (target_open(&target, path, err) != 0)
        return error_prefix(err, "--target");
    target_close(&target);
    return 0;
}

int command_data_check(const struct options *options)
{
    struct error err = {0};
    if (options->target != NULL && check_target(options->target, &err) != 0) {
        log_error("%s", err.text);
        return EXIT_REFUSED;
    }
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
    return EXIT_REFUSED;
}
