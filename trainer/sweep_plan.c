// Owns the plans of all points: each is made by `dtrain plan` in a process of its own, so that no device
// memory stays taken here, and the table of what fits.
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "base/byte_size.h"
#include "base/log.h"
#include "base/memory.h"
#include "kernels/backend.h"
#include "trainer/sweep.h"

enum { MOST_WORDS = 32 };

struct words {
    const char **items;
    char *own[MOST_WORDS];
    size_t count, own_count;
};

static void add_own(struct words *words, char *taken)
{
    BUG_UNLESS(words->own_count < MOST_WORDS);
    words->own[words->own_count++] = taken;
    words->items[words->count++] = taken;
}

// Where a run would take the CPU because there is nothing else, a plan takes a GPU to come, unless it is told.
static void plan_words(struct words *words, const struct sweep *sweep,
                       const struct sweep_sets *sets)
{
    const char *memory = sweep->options->device_memory;
    size_t available = 0, total = 0;
    *words = (struct words){.items = memory_alloc(2 * sets->count + MOST_WORDS, sizeof(char *))};
    words->items[words->count++] = "plan";
    words->items[words->count++] = "--json";
    words->items[words->count++] = "--config";
    words->items[words->count++] = sweep->options->config;
    for (size_t i = 0; i < sets->count; i++) {
        words->items[words->count++] = "--set";
        words->items[words->count++] = sets->items[i];
    }
    if (sweep->gpus > 0)
        add_own(words, memory_format("--gpus=%d", sweep->gpus));
    else if (memory == NULL && sweep->config.run.device == DEVICE_AUTO)
        add_own(words, memory_format("--set=run.device=cpu"));
    backend_cpu()->memory(&available, &total);
    if (memory != NULL)
        add_own(words, memory_format("--device-memory=%s", memory));
    else if (sweep->gpus == 0 && sweep->parallel > 1) // points share the machine's memory
        add_own(words, memory_format("--device-memory=%zuB", total / (size_t)sweep->parallel));
}

static void words_close(struct words *words)
{
    for (size_t i = 0; i < words->own_count; i++)
        free(words->own[i]);
    free(words->items);
}

static char *whole_text(FILE *file)
{
    char *text = NULL;
    size_t size = 0, room = 0;
    rewind(file);
    do {
        room = room * 2 + 65536;
        text = memory_resize(text, room + 1, 1);
        size += fread(text + size, 1, room - size, file);
    } while (size == room);
    text[size] = '\0';
    return text;
}

static double number_at(const cJSON *root, const char *object, const char *name)
{
    const cJSON *at = object != NULL ? cJSON_GetObjectItemCaseSensitive(root, object) : root;
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(at, name);
    return cJSON_IsNumber(item) ? item->valuedouble : (double)NAN;
}

static int take_plan(struct sweep_point *point, const char *text)
{
    char need[BYTE_SIZE_TEXT], have[BYTE_SIZE_TEXT];
    cJSON *root = cJSON_Parse(text);
    const cJSON *step = cJSON_GetObjectItemCaseSensitive(root, "step");
    const cJSON *from = cJSON_GetObjectItemCaseSensitive(root, "device_memory_from");
    double needed = number_at(root, NULL, "needed"), limit = number_at(root, NULL, "device_memory");
    double disk = number_at(root, "disk", "checkpoint_bytes");
    int result = isfinite(needed) && isfinite(disk) ? 0 : -1;
    point->needed = result == 0 ? (int64_t)needed : 0;
    point->flops = number_at(step, "flops", "total");
    point->disk = result == 0 ? (int64_t)disk : 0;
    if (cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(root, "fits")))
        sweep_point_become(point, SWEEP_TOO_LARGE,
                           memory_format("needs %s, %s are there (%s)",
                                         byte_size_text(needed, need), byte_size_text(limit, have),
                                         cJSON_IsString(from) ? from->valuestring : "?"));
    cJSON_Delete(root);
    return result;
}

// 1: a signal came.
static int wait_for(struct sweep *sweep, pid_t pid, int *status)
{
    int stopped = 0;
    while (!sweep_process_ended(pid, status))
        if (sweep_await(sweep, 0.2) != 0) {
            kill(pid, SIGKILL);
            stopped = 1;
        }
    return stopped;
}

static int plan_point(struct sweep *sweep, size_t at, struct error *err)
{
    struct sweep_point *point = &sweep->points[at];
    struct sweep_sets sets;
    struct words words;
    FILE *output = tmpfile(), *errors = tmpfile();
    if (output == NULL || errors == NULL)
        die("tmpfile: %s", strerror(errno));
    sweep_sets_open(&sets, &sweep->grid, at, sweep->options->sets, sweep->options->set_count);
    plan_words(&words, sweep, &sets);
    const struct sweep_process process = {
        .arguments = words.items, .output = fileno(output), .errors = fileno(errors)};
    int status = 0, result = wait_for(sweep, sweep_process_start(sweep, &process), &status);
    char *text = whole_text(output), *messages = whole_text(errors);
    bool planned = WIFEXITED(status) && WEXITSTATUS(status) <= EXIT_FAILED;
    if (result == 0 && (!planned || take_plan(point, text) != 0))
        result = error_set(err, "%s: can not be planned: %.3000s", point->name, messages);
    free(messages);
    free(text);
    words_close(&words);
    sweep_sets_close(&sets);
    fclose(errors);
    fclose(output);
    return result;
}

int sweep_plan(struct sweep *sweep, struct error *err)
{
    int result = 0;
    for (size_t i = 0; i < sweep->point_count && result == 0; i++)
        if (sweep->points[i].state != SWEEP_DONE)
            result = plan_point(sweep, i, err);
    return result;
}

// What the checkpoints of all points that are to run will take, and whether that is there.
static void print_disk(const struct sweep *sweep, FILE *out)
{
    const struct checkpoint_config *checkpoint = &sweep->config.checkpoint;
    // One more exists while a new one is written.
    double copies = (double)(checkpoint->keep + checkpoint->best + 1), bytes = 0.0;
    struct statvfs disk;
    char text[BYTE_SIZE_TEXT], left[BYTE_SIZE_TEXT], *folder = memory_strdup(sweep->folder), *slash;
    for (size_t i = 0; i < sweep->point_count; i++)
        if (sweep->points[i].state != SWEEP_TOO_LARGE)
            bytes += copies * (double)sweep->points[i].disk;
    while (statvfs(folder, &disk) != 0 && (slash = strrchr(folder, '/')) != NULL && slash != folder)
        *slash = '\0'; // up to what is there already
    bool known = statvfs(folder, &disk) == 0;
    double free_bytes = known ? (double)disk.f_bavail * (double)disk.f_frsize : 0.0;
    fprintf(out, "disk: up to %s for checkpoints\n", byte_size_text(bytes, text));
    if (known && bytes > free_bytes)
        log_warn("the checkpoints of all points take up to %s, %s are free; checkpoint.keep=1 and "
                 "checkpoint.best=false need least",
                 text, byte_size_text(free_bytes, left));
    free(folder);
}

void sweep_print_plan(const struct sweep *sweep, FILE *out)
{
    size_t width = strlen("point"), fit = 0;
    char text[BYTE_SIZE_TEXT], steps[32];
    for (size_t i = 0; i < sweep->point_count; i++) {
        size_t n = strlen(sweep->points[i].name);
        width = n > width ? n : width;
    }
    fprintf(out, "%-*s  %9s  %12s  %10s\n", (int)width, "point", "steps", "anchors", "memory");
    for (size_t i = 0; i < sweep->point_count; i++) {
        const struct sweep_point *point = &sweep->points[i];
        char anchors[32] = "-";
        bool fits = point->state != SWEEP_TOO_LARGE;
        if (isfinite(point->anchors))
            snprintf(anchors, sizeof(anchors), "%.0f", point->anchors);
        if (point->steps > 0)
            snprintf(steps, sizeof(steps), "%lld", (long long)point->steps);
        else
            snprintf(steps, sizeof(steps), "%s",
                     sweep->equal == SWEEP_EQUAL_TIME ? "measured" : "-");
        fprintf(out, "%-*s  %9s  %12s  %10s  %s%s\n", (int)width, point->name, steps, anchors,
                byte_size_text((double)point->needed, text),
                point->state == SWEEP_DONE ? "done"
                : fits                     ? "fits"
                                           : "does not fit: ",
                fits ? "" : point->reason);
        fit += fits;
    }
    fprintf(out, "%zu of %zu points fit\n", fit, sweep->point_count);
    print_disk(sweep, out);
}
