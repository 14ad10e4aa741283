// Owns what is told while points run: steps read from their metrics.jsonl as it grows, and the time left.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/timer.h"
#include "trainer/sweep.h"

// Between two lines where there is no terminal, and between two looks of the live line.
static const double plain_seconds = 30.0, live_seconds = 0.5;

static void take_line(struct sweep_watch *watch, const char *line)
{
    cJSON *object = cJSON_Parse(line);
    const cJSON *step = cJSON_GetObjectItemCaseSensitive(object, "step");
    const cJSON *seconds = cJSON_GetObjectItemCaseSensitive(object, "seconds");
    if (cJSON_IsNumber(step) && cJSON_IsNumber(seconds)) {
        watch->step = (int64_t)step->valuedouble;
        if (watch->step > SWEEP_WARM_STEPS) {
            watch->seconds += seconds->valuedouble;
            watch->counted++;
        }
    }
    cJSON_Delete(object);
}

static void read_lines(struct sweep_watch *watch, FILE *file)
{
    char *line = NULL;
    size_t room = 0;
    if (fseeko(file, (off_t)watch->offset, SEEK_SET) != 0)
        return;
    for (ssize_t n; (n = getline(&line, &room, file)) > 0 && line[n - 1] == '\n';) {
        take_line(watch, line);
        watch->offset += n;
    }
    free(line);
}

// A run that starts replaces or empties the file: then it is read from its beginning.
void sweep_watch_read(struct sweep_watch *watch, const char *folder)
{
    char *path = memory_format("%s/metrics.jsonl", folder);
    FILE *file = fopen(path, "re");
    struct stat info;
    if (file != NULL && fstat(fileno(file), &info) == 0) {
        if (watch->file != (uint64_t)info.st_ino || watch->offset > (int64_t)info.st_size)
            *watch = (struct sweep_watch){.file = (uint64_t)info.st_ino};
        read_lines(watch, file);
        // Lines that were there at the first look tell nothing of how long steps take now.
        if (watch->step > 0 && !(watch->first_seen > 0.0)) {
            watch->first_seen = timer_now();
            watch->first_step = watch->step;
        }
    }
    if (file != NULL)
        fclose(file);
    free(path);
}

// At the pace of what this process has seen, else of the steps' own times, which leave out validations.
double sweep_point_left(const struct sweep_point *point)
{
    const struct sweep_watch *watch = &point->watch;
    int64_t seen = watch->step - watch->first_step;
    double pace = (double)NAN;
    if (seen > 0)
        pace = (timer_now() - watch->first_seen) / (double)seen;
    else if (watch->counted > 0)
        pace = watch->seconds / (double)watch->counted;
    return pace * (double)(point->steps - watch->step);
}

// Seconds an operation, as far as points have been run: points that wait cost as much.
static double seconds_per_flop(const struct sweep *sweep)
{
    double seconds = 0.0, flops = 0.0;
    for (size_t i = 0; i < sweep->point_count; i++) {
        const struct sweep_point *point = &sweep->points[i];
        if (!(point->flops > 0.0))
            continue;
        if (point->watch.counted > 0) {
            seconds += point->watch.seconds;
            flops += (double)point->watch.counted * point->flops;
        } else if (point->state == SWEEP_DONE && point->result.step > 0) {
            seconds += point->result.seconds;
            flops += (double)point->result.step * point->flops;
        }
    }
    return flops > 0.0 ? seconds / flops : (double)NAN;
}

double sweep_left(const struct sweep *sweep)
{
    double per_flop = seconds_per_flop(sweep), sum = 0.0, longest = 0.0;
    for (size_t i = 0; i < sweep->point_count; i++) {
        const struct sweep_point *point = &sweep->points[i];
        bool runs = point->state == SWEEP_RUNNING && !point->measuring;
        double left = runs ? sweep_point_left(point) : (double)NAN;
        bool to_come = point->state == SWEEP_WAITING || point->state == SWEEP_STOPPED ||
                       point->state == SWEEP_RUNNING;
        if (!to_come)
            left = 0.0;
        else if (!isfinite(left))
            left = sweep->equal == SWEEP_EQUAL_TIME
                       ? sweep->budget
                       : per_flop * point->flops * (double)point->steps;
        sum += left;
        longest = left > longest ? left : longest;
    }
    double shared = sum / (double)sweep->parallel;
    return shared > longest || !isfinite(shared) ? shared : longest;
}

static const char *time_text(char *text, size_t size, double seconds)
{
    long long s = isfinite(seconds) ? (long long)seconds : 0;
    if (isfinite(seconds))
        snprintf(text, size, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
    else
        snprintf(text, size, "?");
    return text;
}

static size_t ended_points(const struct sweep *sweep)
{
    size_t ended = 0;
    for (size_t i = 0; i < sweep->point_count; i++)
        ended += sweep->points[i].state == SWEEP_DONE || sweep->points[i].state == SWEEP_FAILED ||
                 sweep->points[i].state == SWEEP_TOO_LARGE;
    return ended;
}

static char *point_text(const struct sweep_point *point)
{
    char left[32];
    long long step = (long long)point->watch.step;
    if (point->measuring)
        return memory_format("%s: measuring, step %lld", point->name, step);
    if (step > 0 && step >= point->steps) // validates, saves
        return memory_format("%s: step %lld/%lld  ending", point->name, step,
                             (long long)point->steps);
    return memory_format("%s: step %lld/%lld  ETA %s", point->name, step, (long long)point->steps,
                         time_text(left, sizeof(left), sweep_point_left(point)));
}

char *sweep_progress_text(const struct sweep *sweep)
{
    char left[32];
    char *text = memory_format("%zu of %zu points, ETA %s", ended_points(sweep), sweep->point_count,
                               time_text(left, sizeof(left), sweep_left(sweep)));
    for (size_t i = 0; i < sweep->point_count; i++) {
        if (sweep->points[i].state != SWEEP_RUNNING)
            continue;
        char *point = point_text(&sweep->points[i]);
        char *longer = memory_format("%s  |  %s", text, point);
        free(point);
        free(text);
        text = longer;
    }
    return text;
}

// Whether it is time to tell something.
static bool is_due(struct sweep *sweep)
{
    double now = timer_now();
    if (now - sweep->shown < (isatty(STDERR_FILENO) == 1 ? live_seconds : plain_seconds))
        return false;
    sweep->shown = now;
    return true;
}

static void show(char *text_taken)
{
    if (isatty(STDERR_FILENO) == 1)
        log_status_line(text_taken);
    else
        log_info("%s", text_taken);
    free(text_taken);
}

void sweep_show_count(struct sweep *sweep, const char *what, size_t count)
{
    if (is_due(sweep))
        show(memory_format("%s %zu of %zu points", what, count, sweep->point_count));
}

void sweep_show_progress(struct sweep *sweep)
{
    if (is_due(sweep))
        show(sweep_progress_text(sweep));
}
