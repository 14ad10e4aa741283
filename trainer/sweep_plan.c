// Owns the plans of all points, which `dtrain plan` makes in a process of its own, so that no device memory
// stays taken here, and the table of what fits.
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

enum { FIXED_WORDS = 16 };

struct words {
    const char **items;
    char *own[FIXED_WORDS];
    size_t count, own_count;
};

static void add_own(struct words *words, char *taken)
{
    BUG_UNLESS(words->own_count < FIXED_WORDS);
    words->own[words->own_count++] = taken;
    words->items[words->count++] = taken;
}

static void add_all(struct words *words, const char *option, const char *const *texts, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        words->items[words->count++] = option;
        words->items[words->count++] = texts[i];
    }
}

// Where a run would take the CPU because there is nothing else, a plan takes a GPU to come, unless it is told.
static void plan_words(struct words *words, const struct sweep *sweep)
{
    const struct options *o = sweep->options;
    size_t available = 0, total = 0, most = 2 * (o->set_count + o->grid_count) + FIXED_WORDS;
    *words = (struct words){.items = memory_alloc(most, sizeof(char *))};
    words->items[words->count++] = "plan";
    words->items[words->count++] = "--json";
    add_all(words, "--config", &o->config, 1);
    add_all(words, "--set", o->sets, o->set_count);
    add_all(words, "--grid", o->grids, o->grid_count);
    if (sweep->gpus > 0)
        add_own(words, memory_format("--gpus=%d", sweep->gpus));
    else if (o->device_memory == NULL && sweep->config.run.device == DEVICE_AUTO)
        add_own(words, memory_format("--set=run.device=cpu"));
    backend_cpu()->memory(&available, &total);
    if (o->device_memory != NULL)
        add_own(words, memory_format("--device-memory=%s", o->device_memory));
    else if (sweep->gpus == 0 && sweep->parallel > 1) // points share the machine's memory
        add_own(words, memory_format("--device-memory=%zuB", total / (size_t)sweep->parallel));
}

static void words_close(struct words *words)
{
    for (size_t i = 0; i < words->own_count; i++)
        free(words->own[i]);
    free(words->items);
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

// The process that plans all points, and what it has said: an object a line, in the order of the points.
struct planner {
    pid_t pid;
    FILE *output, *errors;
    char *text; // of output so far
    size_t size, taken;
    size_t planned; // points
};

static void planner_open(struct planner *planner, const struct sweep *sweep)
{
    struct words words;
    *planner = (struct planner){.output = tmpfile(), .errors = tmpfile()};
    if (planner->output == NULL || planner->errors == NULL)
        die("tmpfile: %s", strerror(errno));
    plan_words(&words, sweep);
    const struct sweep_process process = {.arguments = words.items,
                                          .output = fileno(planner->output),
                                          .errors = fileno(planner->errors)};
    planner->pid = sweep_process_start(sweep, &process);
    words_close(&words);
}

static void planner_close(struct planner *planner)
{
    free(planner->text);
    fclose(planner->errors);
    fclose(planner->output);
}

// All of a file from `size` on, behind text. The place at which the child writes stays.
static char *read_more(FILE *file, char *text, size_t *size)
{
    enum { PIECE = 1 << 16 };
    ssize_t n;
    do {
        text = memory_resize(text, *size + PIECE + 1, 1);
        n = pread(fileno(file), text + *size, PIECE, (off_t)*size);
        if (n < 0)
            die("pread: %s", strerror(errno));
        *size += (size_t)n;
    } while (n > 0);
    text[*size] = '\0';
    return text;
}

// Whole lines that have come. -1: one is not a plan.
static int take_lines(struct planner *planner, struct sweep *sweep)
{
    planner->text = read_more(planner->output, planner->text, &planner->size);
    for (;;) {
        char *line = planner->text + planner->taken, *end = strchr(line, '\n');
        if (end == NULL || planner->planned == sweep->point_count)
            return 0;
        *end = '\0';
        struct sweep_point *point = &sweep->points[planner->planned];
        if (point->state != SWEEP_DONE && take_plan(point, line) != 0)
            return -1;
        planner->taken += (size_t)(end - line) + 1;
        planner->planned++;
    }
}

static int refuse(struct planner *planner, const struct sweep *sweep, int status, struct error *err)
{
    size_t size = 0;
    char *messages = read_more(planner->errors, NULL, &size), *end = child_end_words(status);
    char *error = sweep_last_error(messages);
    error_set(err, "%s: can not be planned: %.3000s", sweep->points[planner->planned].name,
              error != NULL ? error : end);
    free(error);
    free(end);
    free(messages);
    return -1;
}

int sweep_plan(struct sweep *sweep, struct error *err)
{
    struct planner planner;
    int status = 0, result = 0;
    bool ended = false;
    planner_open(&planner, sweep);
    while (!ended) {
        ended = sweep_process_ended(planner.pid, &status);
        if (result == 0)
            result = take_lines(&planner, sweep);
        sweep_show_count(sweep, "planned", planner.planned);
        if (!ended)
            child_await(0.1);
    }
    if (planner.planned < sweep->point_count)
        result = refuse(&planner, sweep, status, err);
    planner_close(&planner);
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
                     fits && sweep->equal == SWEEP_EQUAL_TIME ? "measured" : "-");
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
