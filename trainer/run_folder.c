// Owns the opening and closing of a run folder's files, and the cut of metrics.jsonl on resume.
// Does not own what a line of metrics says (report.c) or checkpoints.
#include "trainer/run_folder.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "trainer/files.h"
#include "trainer/folder_lock.h"

// ---- opening and closing -------------------------------------------------------------------------

void run_folder_name(struct run_folder *folder, const char *path)
{
    *folder = (struct run_folder){.lock_fd = -1};
    folder->path = memory_strdup(path);
    folder->checkpoints = memory_format("%s/checkpoints", path);
}

int run_folder_open(struct run_folder *folder, const char *path, struct error *err)
{
    run_folder_name(folder, path);
    folder->terminal = isatty(STDERR_FILENO) == 1;
    if (files_make_folder(folder->checkpoints, err) != 0 ||
        folder_lock_take(path, "run folder", &folder->lock_fd, err) != 0)
        return -1;
    char *log = memory_format("%s/log.txt", path);
    int result = 0;
    if (log_file_set(log) != 0)
        result = error_set(err, "%s: can not open: %s", log, strerror(errno));
    free(log);
    return result;
}

void run_folder_close(struct run_folder *folder)
{
    if (folder->terminal)
        log_status_line(NULL);
    if (folder->events != NULL)
        event_file_close(folder->events);
    if (folder->metrics != NULL)
        fclose(folder->metrics);
    if (folder->lock_fd >= 0) {
        log_file_set(NULL);
        close(folder->lock_fd);
    }
    free(folder->checkpoints);
    free(folder->path);
    *folder = (struct run_folder){.lock_fd = -1};
}

// ---- metrics.jsonl -------------------------------------------------------------------------------

// Whole, an object, and of a step or validation that the counters have behind them.
static bool line_is_kept(const char *line, ssize_t length, const struct counters *counters)
{
    if (length < 1 || line[length - 1] != '\n')
        return false; // torn by a kill
    cJSON *object = cJSON_Parse(line);
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, "step");
    int64_t last = cJSON_GetObjectItemCaseSensitive(object, "val_loss") != NULL
                       ? counters->last_validation
                       : counters->step;
    bool kept = cJSON_IsNumber(item) && item->valuedouble <= (double)last;
    cJSON_Delete(object);
    return kept;
}

struct cut {
    FILE *in;
    const struct counters *counters;
};

static void put_kept_lines(void *context, FILE *out)
{
    struct cut *cut = context;
    char *line = NULL;
    size_t room = 0;
    for (ssize_t n; (n = getline(&line, &room, cut->in)) >= 0;) {
        if (line_is_kept(line, n, cut->counters))
            fwrite(line, 1, (size_t)n, out);
    }
    free(line);
}

// By way of a second file, so that a kill meanwhile loses nothing.
static int cut_metrics(const char *path, const struct counters *counters, struct error *err)
{
    struct cut cut = {.in = fopen(path, "re"), .counters = counters};
    if (cut.in == NULL)
        return errno == ENOENT ? 0 : error_set(err, "%s: can not open: %s", path, strerror(errno));
    char *begun = memory_format("%s.tmp", path);
    int result = files_write(begun, put_kept_lines, &cut, err);
    if (result == 0 && ferror(cut.in)) // else lines that could not be read would be gone
        result = error_set(err, "%s: can not read: %s", path, strerror(errno));
    fclose(cut.in);
    if (result == 0 && rename(begun, path) != 0)
        result = error_set(err, "%s: can not replace: %s", path, strerror(errno));
    free(begun);
    return result;
}

static int open_metrics(struct run_folder *folder, const struct counters *resumed,
                        struct error *err)
{
    char *path = memory_format("%s/metrics.jsonl", folder->path);
    int result = resumed != NULL ? cut_metrics(path, resumed, err) : 0;
    if (result == 0 && (folder->metrics = fopen(path, resumed != NULL ? "ae" : "we")) == NULL)
        result = error_set(err, "%s: can not open: %s", path, strerror(errno));
    free(path);
    return result;
}

int run_folder_start(struct run_folder *folder, const struct counters *resumed, bool tensorboard,
                     struct error *err)
{
    if (open_metrics(folder, resumed, err) != 0)
        return -1;
    if (!tensorboard)
        return 0;
    char *path = memory_format("%s/events", folder->path);
    int64_t step = resumed != NULL ? resumed->step : -1;
    int result = event_files_cut(path, step, resumed != NULL ? resumed->last_validation : -1, err);
    if (result == 0)
        result = event_file_open(&folder->events, path, err);
    free(path);
    if (result == 0) // for readers that have read what is cut now
        event_file_restart(folder->events, step + 1);
    return result;
}
