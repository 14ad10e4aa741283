// The commands that need no model state: config, export, data.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "data/check.h"
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
