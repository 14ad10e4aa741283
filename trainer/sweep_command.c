// Owns `dtrain sweep`: its options, what it refuses before anything starts, the order of its parts.
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/timer.h"
#include "kernels/backend.h"
#include "trainer/files.h"
#include "trainer/folder_lock.h"
#include "trainer/rank_gpu.h"
#include "trainer/rank_place.h"
#include "trainer/signals.h"
#include "trainer/sweep.h"

enum { GPU_TEXT = 256 };

// ---- options -------------------------------------------------------------------------------------

static int take_equal(struct sweep *sweep, struct error *err)
{
    static const char *const known = "say steps, anchors, block_rows, time=SECONDS or none";
    const char *text = sweep->options->equal;
    char name[32];
    if (text == NULL)
        return 0;
    size_t n = strcspn(text, "=");
    snprintf(name, sizeof(name), "%.*s", (int)n, text);
    int equal = sweep_equal_find(name);
    bool timed = equal == SWEEP_EQUAL_TIME;
    if (equal < 0 || timed != (text[n] == '='))
        return error_set(err, "--equal %s: %s", text, known);
    sweep->equal = (enum sweep_equal)equal;
    if (!timed)
        return 0;
    char *end;
    sweep->budget = strtod(text + n + 1, &end);
    if (*end != '\0' || !(sweep->budget > 0.0 && sweep->budget < 1e9))
        return error_set(err, "--equal %s: not a number of seconds", text);
    return 0;
}

// Keys that say how many steps a run takes can not vary where the sweep decides that.
static int check_step_keys(const struct sweep *sweep, struct error *err)
{
    static const char *const keys[] = {"run.max_steps", "run.epochs"};
    int result = 0;
    for (size_t i = 0; i < sweep->grid.axis_count && sweep->equal != SWEEP_EQUAL_NONE; i++)
        for (size_t k = 0; k < sizeof(keys) / sizeof(*keys); k++)
            if (strcmp(sweep->grid.axes[i].key, keys[k]) == 0)
                result = error_add(err,
                                   "--grid %s: varies what --equal %s makes the same; --equal none "
                                   "takes each point's own steps",
                                   keys[k], sweep_equal_name(sweep->equal));
    return result;
}

static int check_place(struct error *err)
{
    struct rank_place place;
    if (rank_place_read(&place, rank_variable, NULL, err) != 0)
        return -1; // every run would say so
    if (place.size > 1)
        return error_set(err,
                         "sweep: is one process that starts its runs itself, and %s has started "
                         "%d; start one",
                         rank_launcher_name(place.launcher), place.size);
    return 0;
}

static void take_drafts(struct sweep *sweep)
{
    const struct config_ints *wanted = &sweep->config.validation.draft_tokens;
    sweep->drafts.items = memory_alloc(SWEEP_DRAFTS, sizeof(*sweep->drafts.items));
    for (size_t i = 0; i < wanted->count && i < SWEEP_DRAFTS; i++)
        sweep->drafts.items[sweep->drafts.count++] = wanted->items[i];
}

static int take_config(struct sweep *sweep, struct error *err)
{
    const struct options *o = sweep->options;
    if (o->config == NULL)
        return error_set(err, "sweep: --config is required, or --show; see dtrain sweep --help");
    if (o->grid_count == 0)
        return error_set(err, "sweep: --grid is required, as --grid block_size=8,16");
    if (sweep_grid_parse(&sweep->grid, o->grids, o->grid_count, err) != 0 ||
        take_equal(sweep, err) != 0 || check_step_keys(sweep, err) != 0 ||
        sweep_grid_check(&sweep->grid, o->config, o->sets, o->set_count, err) != 0)
        return -1;
    if (sweep_load_point(sweep, 0, &sweep->config, err) != 0)
        return -1;
    log_configure((enum log_level)sweep->config.log.level, 0);
    if (sweep->config.run.dir == NULL)
        return error_set(err, "%s: run.dir: required; the folder of the sweep", o->config);
    sweep->folder = memory_strdup(sweep->config.run.dir);
    sweep->validates = sweep->config.data.val.count > 0;
    if (!sweep->validates)
        log_warn("data.val: not given, so points are compared by their training loss and nothing "
                 "is known of acceptance");
    take_drafts(sweep);
    return 0;
}

// ---- machine -------------------------------------------------------------------------------------

// GPUs first, first + 1, ... of the visible ones.
static char *gpu_list(int first, int count, struct error *err)
{
    char *list = memory_strdup("");
    for (int i = 0; i < count; i++) {
        char name[GPU_TEXT];
        if (rank_gpu_choose(getenv("CUDA_VISIBLE_DEVICES"), first + i, name, sizeof(name), err) !=
            0) {
            free(list);
            return NULL;
        }
        char *longer = memory_format("%s%s%s", list, i > 0 ? "," : "", name);
        free(list);
        list = longer;
    }
    return list;
}

// The most that any point's parallel.gpus asks for; 0: none asks.
static long long most_gpus(const struct sweep *sweep)
{
    long long most = sweep->config.parallel.gpus;
    for (size_t i = 0; i < sweep->grid.axis_count; i++)
        for (size_t v = 0; v < sweep->grid.axes[i].count; v++)
            if (strcmp(sweep->grid.axes[i].key, "parallel.gpus") == 0 &&
                strtoll(sweep->grid.axes[i].values[v], NULL, 10) > most)
                most = strtoll(sweep->grid.axes[i].values[v], NULL, 10);
    return most;
}

static int divide_gpus(struct sweep *sweep, int gpus, struct error *err)
{
    if (sweep->parallel > gpus)
        return error_set(err, "--parallel %d: %d GPU%s can be used on this machine",
                         sweep->parallel, gpus, gpus == 1 ? "" : "s");
    sweep->gpus = gpus / sweep->parallel;
    if (most_gpus(sweep) > sweep->gpus)
        return error_set(err,
                         "parallel.gpus: %lld, but with --parallel %d a point gets %d of the %d "
                         "GPU%s that can be used on this machine",
                         most_gpus(sweep), sweep->parallel, sweep->gpus, gpus,
                         gpus == 1 ? "" : "s");
    if (sweep->parallel == 1)
        return 0;
    if (sweep->gpus * sweep->parallel < gpus)
        log_info("each point gets %d of %d GPUs, %d stay idle", sweep->gpus, gpus,
                 gpus - sweep->gpus * sweep->parallel);
    sweep->slot_gpus = memory_alloc((size_t)sweep->parallel, sizeof(*sweep->slot_gpus));
    for (int slot = 0; slot < sweep->parallel; slot++)
        if ((sweep->slot_gpus[slot] = gpu_list(slot * sweep->gpus, sweep->gpus, err)) == NULL)
            return -1;
    return 0;
}

static void divide_threads(struct sweep *sweep)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (sweep->parallel == 1 || sweep->config.parallel.threads > 0)
        return;
    sweep->threads = cores / sweep->parallel > 1 ? cores / sweep->parallel : 1;
    log_info("%d points at a time with %lld CPU thread%s each", sweep->parallel,
             (long long)sweep->threads, sweep->threads == 1 ? "" : "s");
}

static int divide_machine(struct sweep *sweep, struct error *err)
{
    int gpus = sweep->config.run.device == DEVICE_CPU ? 0 : backend_cuda_count();
    long long wanted = sweep->options->parallel > 0 ? sweep->options->parallel : 1;
    size_t points = sweep_grid_points(&sweep->grid);
    // What no point would use is not set aside.
    sweep->parallel = wanted < (long long)points ? (int)wanted : (int)points;
    BUG_UNLESS(sweep->parallel > 0);
    if (gpus > 0)
        return divide_gpus(sweep, gpus, err);
    divide_threads(sweep);
    return 0;
}

// ---- folder --------------------------------------------------------------------------------------

static int check_folder(const struct sweep *sweep, struct error *err)
{
    char *checkpoints = memory_format("%s/checkpoints", sweep->folder);
    bool is_run = files_exists(checkpoints);
    free(checkpoints);
    if (is_run)
        return error_set(err,
                         "run.dir: %s is the folder of a run; a sweep needs one of its own: "
                         "--set run.dir=FOLDER",
                         sweep->folder);
    return files_check_folder(sweep->folder, err) != 0 ? error_prefix(err, "run.dir") : 0;
}

static int open_folder(struct sweep *sweep, struct error *err)
{
    if (files_make_folder(sweep->folder, err) != 0 ||
        folder_lock_take(sweep->folder, "sweep", &sweep->lock_fd, err) != 0)
        return -1;
    char *log = memory_format("%s/log.txt", sweep->folder);
    if (log_file_set(log) != 0)
        log_warn("%s: can not be written", log);
    free(log);
    return 0;
}

// What comes before the first point.
struct early {
    const struct sweep *sweep;
    atomic_bool over;
};

// Before the first point nothing has to be saved, so a signal ends the process, whatever it is doing, and with it
// the one that plans.
static void *end_early(void *context)
{
    const struct timespec look = {.tv_nsec = 20000000};
    struct early *early = context;
    int number = -1;
    while (number < 0 && !atomic_load(&early->over))
        number = sigtimedwait(&early->sweep->held.stops, NULL, &look);
    if (number < 0)
        return NULL;
    log_status_line(NULL);
    log_info("signal %d: stopping before the first point; the same command goes on", number);
    _exit(EXIT_STOPPED);
}

static size_t count_fitting(const struct sweep *sweep)
{
    size_t count = 0;
    for (size_t i = 0; i < sweep->point_count; i++)
        count += sweep->points[i].state != SWEEP_TOO_LARGE;
    return count;
}

// Those that the next start runs, or tries again.
static size_t count_left(const struct sweep *sweep)
{
    size_t count = 0;
    for (size_t i = 0; i < sweep->point_count; i++)
        count += sweep->points[i].state != SWEEP_DONE && sweep->points[i].state != SWEEP_TOO_LARGE;
    return count;
}

static bool all_done(const struct sweep *sweep)
{
    for (size_t i = 0; i < sweep->point_count; i++)
        if (sweep->points[i].state != SWEEP_DONE)
            return false;
    return true;
}

// ---- the command ---------------------------------------------------------------------------------

// A plan alone needs no shards.
static int count_steps(struct sweep *sweep, struct error *err)
{
    struct error why = {""};
    if (sweep_count_steps(sweep, &why) == 0)
        return 0;
    if (!sweep->options->plan_only)
        return error_set(err, "%s", why.text);
    log_info("steps are not counted: %.*s", (int)strcspn(why.text, "\n"), why.text);
    return 0;
}

// A folder that holds no sweep yet is made when nothing is left to refuse, and there is something to run.
static int plan_points(struct sweep *sweep, struct error *err)
{
    bool only = sweep->options->plan_only, goes_on = sweep_state_exists(sweep->folder);
    if (sweep_check_points(sweep, err) != 0 || (!only && check_folder(sweep, err) != 0))
        return -1;
    if (goes_on && !only && open_folder(sweep, err) != 0)
        return -1;
    if (goes_on && sweep_state_continue(sweep, err) != 0)
        return -1;
    if (sweep_plan(sweep, err) != 0 || count_steps(sweep, err) != 0)
        return -1;
    return goes_on || only || count_fitting(sweep) == 0 ? 0 : open_folder(sweep, err);
}

// Everything up to the first point. Returns 0, or an exit status.
static int prepare(struct sweep *sweep, struct error *err)
{
    bool only = sweep->options->plan_only;
    if (check_place(err) != 0 || take_config(sweep, err) != 0 || divide_machine(sweep, err) != 0)
        return EXIT_REFUSED;
    sweep_points_open(sweep);
    sweep->shown = timer_now();
    if (plan_points(sweep, err) != 0)
        return EXIT_REFUSED;
    log_status_line(NULL);
    sweep_print_plan(sweep, stdout);
    fflush(stdout);
    if (!only && sweep->lock_fd < 0) {
        error_set(err, "no point fits, so nothing is started and %s is left as it was",
                  sweep->folder);
        return EXIT_FAILED;
    }
    if (!only && (sweep_write_configs(sweep, err) != 0 || sweep_state_write(sweep, err) != 0))
        return EXIT_FAILED;
    return 0;
}

static int prepare_watched(struct sweep *sweep, struct error *err)
{
    struct early early = {.sweep = sweep};
    pthread_t watcher;
    if (pthread_create(&watcher, NULL, end_early, &early) != 0)
        die("pthread_create failed");
    int status = prepare(sweep, err);
    atomic_store(&early.over, true);
    pthread_join(watcher, NULL);
    return status;
}

// Characters of a line of the terminal that stdout is; 0: it is none.
static size_t line_of_output(void)
{
    struct winsize size;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

static int run_all(struct sweep *sweep, struct error *err)
{
    int status = sweep_run(sweep);
    sweep_table_read(sweep);
    sweep_table_print(sweep, line_of_output(), stdout);
    if (sweep_table_write(sweep, err) != 0)
        return EXIT_FAILED;
    log_info("the table is in %s: table.txt, table.csv, table.json", sweep->folder);
    if (status == EXIT_STOPPED) {
        size_t left = count_left(sweep);
        log_info("stopped: the same command goes on with the %zu point%s left", left,
                 left == 1 ? "" : "s");
    }
    return status;
}

static void close_sweep(struct sweep *sweep)
{
    if (sweep->lock_fd >= 0) {
        log_file_set(NULL);
        close(sweep->lock_fd);
    }
    for (int slot = 0; sweep->slot_gpus != NULL && slot < sweep->parallel; slot++)
        free(sweep->slot_gpus[slot]);
    free(sweep->slot_gpus);
    config_release(&sweep->config);
    sweep_release(sweep);
}

// What runs, as far as its metrics tell. Nobody in the folder: what ran the sweep has ended or was killed.
static void look_on(struct sweep *sweep, bool in_use)
{
    sweep_table_read(sweep);
    for (size_t i = 0; i < sweep->point_count; i++) {
        struct sweep_point *point = &sweep->points[i];
        if (point->state != SWEEP_RUNNING)
            continue;
        if (!in_use)
            point->state = SWEEP_STOPPED;
        point->measuring = point->steps == 0;
        char *folder = sweep_run_folder(point);
        sweep_watch_read(&point->watch, folder);
        free(folder);
    }
}

// run.dir is relative to the config's file, and what --show is given to the folder that it is called in.
static void tell_no_sweep(const char *folder)
{
    char *here = getcwd(NULL, 0);
    if (files_exists(folder) || folder[0] == '/' || here == NULL)
        log_error("--show %s: %s; say the folder of a sweep, its run.dir", folder,
                  files_exists(folder) ? "holds no sweep.json" : "there is no such folder");
    else
        log_error("--show %s: there is no such folder in %s; say a sweep's folder as it is seen "
                  "from there (run.dir of a config is relative to the config's file)",
                  folder, here);
    free(here);
}

// How a sweep stands, from another process.
static int show(const struct options *options)
{
    struct sweep sweep = {.options = options, .lock_fd = -1, .parallel = 1};
    struct error err = {""};
    if (!sweep_state_exists(options->show)) {
        tell_no_sweep(options->show);
        return EXIT_REFUSED;
    }
    config_init(&sweep.config);
    int status = sweep_state_read(&sweep, options->show, &err) == 0 ? EXIT_DONE : EXIT_REFUSED;
    if (status == EXIT_DONE) {
        char *holder = folder_lock_holder(options->show);
        look_on(&sweep, holder != NULL);
        char *progress = sweep_progress_text(&sweep);
        printf("%s: %s%s\n", options->show, holder != NULL ? "running as " : "not running",
               holder != NULL ? holder : "");
        printf("%s\n", holder != NULL     ? progress
                       : all_done(&sweep) ? "all points are done"
                                          : "the same command goes on with it");
        sweep_table_print(&sweep, line_of_output(), stdout);
        free(progress);
        free(holder);
    } else {
        log_error("%s", err.text);
    }
    close_sweep(&sweep);
    return status;
}

int command_sweep(const struct options *options)
{
    if (options->show != NULL) {
        signals_let_go();
        return show(options);
    }
    struct sweep sweep = {.options = options, .lock_fd = -1};
    struct error err = {""};
    config_init(&sweep.config);
    child_signals_hold(&sweep.held);
    int status = EXIT_REFUSED;
    if (files_check_rereadable(options->config, &err) != 0)
        error_prefix(&err, "--config");
    else
        status = prepare_watched(&sweep, &err);
    if (status == 0 && options->plan_only)
        status = count_fitting(&sweep) == sweep.point_count ? EXIT_DONE : EXIT_FAILED;
    else if (status == 0)
        status = run_all(&sweep, &err);
    if (err.text[0] != '\0')
        log_error("%s", err.text);
    close_sweep(&sweep);
    return status;
}
