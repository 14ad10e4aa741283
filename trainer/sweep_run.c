// Owns the course of a sweep: which point runs when and on which GPUs, what its end means, and the end of
// all when a signal comes.
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/timer.h"
#include "trainer/files.h"
#include "trainer/folder_lock.h"
#include "trainer/run_end.h"
#include "trainer/sweep.h"

// A stopped run has to write a checkpoint; what a killed sweep has left has to be gone.
static const double tick_seconds = 0.25, end_seconds = 660.0, lock_seconds = 60.0;
// A measurement: so many steps at least, and so much of the budget.
enum { MEASURED_STEPS = 10 };
static const double measured_share = 0.02;

static void save_state(const struct sweep *sweep)
{
    struct error err;
    if (sweep_state_write(sweep, &err) != 0)
        log_warn("%s", err.text); // the runs themselves know how far they are
}

char *sweep_run_folder(const struct sweep_point *point)
{
    return point->measuring ? memory_format("%s/measured", point->folder)
                            : memory_strdup(point->folder);
}

static void read_watch(struct sweep_point *point)
{
    char *folder = sweep_run_folder(point);
    sweep_watch_read(&point->watch, folder);
    free(folder);
}

// ---- start ---------------------------------------------------------------------------------------

// Whether an earlier start's process is still ending in the point's folder. It is waited for.
static bool is_blocked(struct sweep_point *point)
{
    char *folder = sweep_run_folder(point), *holder = folder_lock_holder(folder);
    bool blocked = holder != NULL;
    if (!blocked)
        point->blocked = 0.0;
    else if (!(point->blocked > 0.0))
        point->blocked = timer_now();
    else if (timer_now() - point->blocked > lock_seconds)
        sweep_point_become(point, SWEEP_FAILED,
                           memory_format("%s: the run folder is in use by %s", folder, holder));
    free(holder);
    free(folder);
    return blocked;
}

enum { MOST_WORDS = 24 };

// Of a run in a folder of its own that writes no checkpoints: it is killed when it has told enough.
static size_t add_measuring(const char **words, const char *set_dir)
{
    static const char *const sets[] = {"validation.every=0", "validation.at_start=false",
                                       "checkpoint.every=0", "checkpoint.best=false",
                                       "log.tensorboard=false"};
    size_t count = 0;
    words[count++] = "--set";
    words[count++] = set_dir;
    for (size_t i = 0; i < sizeof(sets) / sizeof(*sets); i++) {
        words[count++] = "--set";
        words[count++] = sets[i];
    }
    return count;
}

static void start_process(struct sweep *sweep, struct sweep_point *point, int output)
{
    char *config = memory_format("%s/%s", point->folder, SWEEP_POINT_FILE);
    char *folder = sweep_run_folder(point);
    char *set_dir = memory_format("run.dir=%s", folder);
    const char *words[MOST_WORDS] = {"--config", config};
    if (point->measuring)
        add_measuring(words + 2, set_dir);
    const struct sweep_process process = {
        .arguments = words,
        .output = output,
        .errors = output,
        .gpus = sweep->slot_gpus != NULL ? sweep->slot_gpus[point->slot] : NULL};
    point->pid = sweep_process_start(sweep, &process);
    free(set_dir);
    free(folder);
    free(config);
}

static void start_point(struct sweep *sweep, struct sweep_point *point, int slot)
{
    char *path = memory_format("%s/output.txt", point->folder);
    int output = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (output < 0) {
        sweep_point_become(point, SWEEP_FAILED,
                           memory_format("%s: can not open: %s", path, strerror(errno)));
        free(path);
        return;
    }
    point->output_from = (int64_t)lseek(output, 0, SEEK_END);
    point->slot = slot;
    point->watch = (struct sweep_watch){.offset = 0};
    start_process(sweep, point, output);
    close(output);
    free(path);
    sweep_point_become(point, SWEEP_RUNNING, NULL);
    log_info("%s: %s", point->name,
             point->measuring ? "measuring the time of its steps" : "started");
    save_state(sweep);
}

static bool is_to_run(const struct sweep_point *point)
{
    return point->pid == 0 && (point->state == SWEEP_WAITING || point->state == SWEEP_STOPPED);
}

static bool slot_is_free(const struct sweep *sweep, int slot)
{
    for (size_t i = 0; i < sweep->point_count; i++)
        if (sweep->points[i].pid != 0 && sweep->points[i].slot == slot)
            return false;
    return true;
}

// Whether any is left to run that has to be waited for.
static bool start_points(struct sweep *sweep)
{
    bool left = false;
    for (int slot = 0; slot < sweep->parallel; slot++) {
        bool taken = !slot_is_free(sweep, slot);
        for (size_t i = 0; i < sweep->point_count && !taken; i++) {
            struct sweep_point *point = &sweep->points[i];
            if (!is_to_run(point))
                continue;
            point->measuring = point->steps == 0;
            left = true;
            if (is_blocked(point))
                continue;
            start_point(sweep, point, slot);
            taken = point->pid != 0;
        }
    }
    return left;
}

// ---- end -----------------------------------------------------------------------------------------

static char *end_words(const struct sweep_point *point, int status)
{
    struct error none;
    char *path = memory_format("%s/output.txt", point->folder);
    char *text = files_read_text(path, &none), *end = child_end_words(status), *error = NULL;
    if (text != NULL)
        error = sweep_last_error(
            text + ((int64_t)strlen(text) > point->output_from ? point->output_from : 0));
    free(text);
    char *words = error != NULL ? memory_format("%s: %s", end, error) : memory_strdup(end);
    free(error);
    free(end);
    free(path);
    return words;
}

static void fail(struct sweep_point *point, int status)
{
    sweep_point_become(point, SWEEP_FAILED, end_words(point, status));
    log_error("%s: %s", point->name, point->reason);
}

static bool is_measured(const struct sweep *sweep, const struct sweep_watch *watch)
{
    return watch->counted >= MEASURED_STEPS && watch->seconds >= measured_share * sweep->budget;
}

// The steps that the budget holds; the point then starts anew, to take them.
static void conclude_measurement(struct sweep *sweep, struct sweep_point *point, int status)
{
    const struct sweep_watch *watch = &point->watch;
    struct error err = {""};
    point->measuring = false;
    if (!is_measured(sweep, watch)) {
        fail(point, status);
        return;
    }
    point->step_seconds = watch->seconds / (double)watch->counted;
    point->steps = (int64_t)(sweep->budget / point->step_seconds);
    point->steps = point->steps > 1 ? point->steps : 1;
    sweep_point_become(point, SWEEP_WAITING, NULL);
    log_info("%s: a step takes %.4g s: %lld steps in %g s", point->name, point->step_seconds,
             (long long)point->steps, sweep->budget);
    if (sweep_write_point(sweep, (size_t)(point - sweep->points), &err) != 0)
        sweep_point_become(point, SWEEP_FAILED, memory_strdup(err.text));
}

// A run never takes steps back that its finished.json tells of: then its metrics were lost since.
static void warn_of_lost_metrics(const struct sweep_point *point)
{
    struct run_end end;
    if (point->state == SWEEP_DONE && run_end_read(point->folder, &end) &&
        point->result.step < end.step)
        log_warn("%s/metrics.jsonl: tells of %lld of %lld steps, and so does the table; remove the "
                 "point's folder to have it run anew",
                 point->folder, (long long)point->result.step, (long long)end.step);
}

static void conclude_run(struct sweep *sweep, struct sweep_point *point, int status)
{
    bool exited = WIFEXITED(status);
    if (exited && WEXITSTATUS(status) == EXIT_DONE && sweep_point_finished(point)) {
        sweep_point_become(point, SWEEP_DONE, NULL);
        sweep_result_read(&point->result, point->folder, point->block_size, &sweep->drafts);
        log_info("%s: done, %lld steps", point->name, (long long)point->result.step);
        warn_of_lost_metrics(point);
    } else if ((exited && WEXITSTATUS(status) == EXIT_STOPPED) || sweep->signals > 0) {
        sweep_point_become(point, SWEEP_STOPPED, NULL);
        log_info("%s: stopped at step %lld", point->name, (long long)point->watch.step);
    } else {
        fail(point, status);
    }
}

// A run that was stopped although this process has had no signal: so it is meant for all, and the sweep's own
// comes in a moment, or only that run has no data. Either way the others would not be what was asked for.
static void follow_stopped(struct sweep *sweep, const struct sweep_point *point)
{
    double end = timer_now() + 1.0;
    if (point->state != SWEEP_STOPPED)
        return;
    while (sweep->signals == 0 && timer_now() < end)
        sweep_await(sweep, 0.1);
    if (sweep->signals > 0)
        return;
    log_warn("%s has stopped by itself: the sweep stops, too", point->name);
    sweep->stops_by_itself = true;
    sweep->signals = 1;
    sweep->first_signal = SIGTERM;
    sweep->stopped_at = timer_now();
}

static void send_all(const struct sweep *sweep, int number)
{
    for (size_t i = 0; i < sweep->point_count; i++)
        if (sweep->points[i].pid != 0)
            kill(sweep->points[i].pid, sweep->points[i].measuring ? SIGKILL : number);
}

static void write_tables(struct sweep *sweep)
{
    struct error err;
    sweep_table_read(sweep);
    if (sweep_table_write(sweep, &err) != 0)
        log_warn("%s", err.text);
}

static void end_point(struct sweep *sweep, struct sweep_point *point, int status)
{
    bool measured = point->measuring;
    read_watch(point);
    point->pid = 0;
    if (measured && sweep->signals > 0)
        sweep_point_become(point, SWEEP_WAITING, NULL);
    else if (measured)
        conclude_measurement(sweep, point, status);
    else
        conclude_run(sweep, point, status);
    point->measuring = false;
    save_state(sweep);
    if (measured)
        return;
    write_tables(sweep);
    bool before = sweep->signals > 0;
    follow_stopped(sweep, point);
    if (!before && sweep->signals > 0)
        send_all(sweep, sweep->first_signal);
}

// ---- the loop ------------------------------------------------------------------------------------

static void look(struct sweep *sweep, struct sweep_point *point)
{
    read_watch(point);
    if (point->measuring && is_measured(sweep, &point->watch))
        kill(point->pid, SIGKILL);
}

static void look_at_all(struct sweep *sweep)
{
    for (size_t i = 0; i < sweep->point_count; i++) {
        struct sweep_point *point = &sweep->points[i];
        int status;
        if (point->pid == 0)
            continue;
        if (sweep_process_ended(point->pid, &status))
            end_point(sweep, point, status);
        else
            look(sweep, point);
    }
}

static int running(const struct sweep *sweep)
{
    int count = 0;
    for (size_t i = 0; i < sweep->point_count; i++)
        count += sweep->points[i].pid != 0;
    return count;
}

// Runs save by themselves after the first signal and end at once after the second.
static void pass_on(struct sweep *sweep, int number)
{
    bool late = sweep->stops_by_itself; // the runs have been told already
    sweep->stops_by_itself = false;
    if (late)
        return;
    log_info("signal %d: stopping %d running point%s", number, running(sweep),
             running(sweep) == 1 ? "" : "s");
    send_all(sweep, number);
}

static void end_late(struct sweep *sweep)
{
    if (sweep->signals == 0 || sweep->killed || timer_now() - sweep->stopped_at < end_seconds)
        return;
    log_error("%d points do not end: killing them", running(sweep));
    sweep->killed = true;
    send_all(sweep, SIGKILL);
}

static int exit_status(const struct sweep *sweep)
{
    bool all = true;
    for (size_t i = 0; i < sweep->point_count; i++)
        all = all && sweep->points[i].state == SWEEP_DONE;
    return sweep->signals > 0 && !all ? EXIT_STOPPED : all ? EXIT_DONE : EXIT_FAILED;
}

int sweep_run(struct sweep *sweep)
{
    sweep_table_read(sweep); // of points that are done
    for (size_t i = 0; i < sweep->point_count; i++)
        warn_of_lost_metrics(&sweep->points[i]);
    for (;;) {
        bool left = sweep->signals == 0 && start_points(sweep);
        if (!left && running(sweep) == 0)
            break;
        int number = sweep_await(sweep, tick_seconds);
        if (number != 0)
            pass_on(sweep, number);
        look_at_all(sweep);
        end_late(sweep);
        sweep_show_progress(sweep);
    }
    log_status_line(NULL);
    return exit_status(sweep);
}
