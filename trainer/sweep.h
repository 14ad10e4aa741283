// `dtrain sweep`: runs the points of a grid and compares them. What its files share: the points, what is
// known of each, and the sweep's folder. Each point is an ordinary run, a process of its own, in a folder
// of its own.
//   sweep_grid.c keys, values, names        sweep_steps.c  steps of each point, by what is equal
//   sweep_check.c every point's config      sweep_plan.c   memory of each point
//   sweep_state.c sweep.json, restarts      sweep_run.c    which point runs when, signals
//   sweep_process.c child processes         sweep_result.c numbers of a run
//   sweep_watch.c progress, time left       sweep_front.c  which points are best
//   sweep_table.c the table                 sweep_command.c the command
#ifndef TRAINER_SWEEP_H
#define TRAINER_SWEEP_H

#include <stdio.h>

#include "trainer/child.h"
#include "trainer/commands.h"
#include "trainer/sweep_grid.h"

enum sweep_equal {
    SWEEP_EQUAL_STEPS,
    SWEEP_EQUAL_ANCHORS,
    SWEEP_EQUAL_BLOCK_ROWS,
    SWEEP_EQUAL_TIME,
    SWEEP_EQUAL_NONE,
};

enum sweep_state {
    SWEEP_WAITING,
    SWEEP_RUNNING,
    SWEEP_STOPPED, // begun; goes on when the sweep does
    SWEEP_DONE,
    SWEEP_FAILED,    // is tried again when the sweep is started again
    SWEEP_TOO_LARGE, // for the memory: never started
};

enum { SWEEP_DRAFTS = 16 };           // numbers of drafts that are compared
enum { SWEEP_MANY_EPOCHS = 1000000 }; // equal time: as many as the time holds

// What a run has reached so far, from its metrics.jsonl. NAN: not known.
struct sweep_result {
    // the same whenever the point is run
    int64_t step; // newest
    double rows, tokens, anchors;
    double walk, best_walk; // accept_len_walk of the last validation, and the best after step 0
    int64_t best_step;
    double walk_drafts[SWEEP_DRAFTS]; // of the last validation, by the sweep's numbers of drafts
    int most_drafts;                  // that walk and best_walk allow a block; 0: not validated
    double accept_len, overlap, val_loss; // of the last validation
    double loss;                          // of training, mean of the last tenth of the steps
    // measured
    double seconds, val_seconds; // of all steps, of all validations
    double tokens_per_second, block_rows_per_second, step_seconds;
    double memory;
};

// What is read of a growing metrics.jsonl while its run goes on.
struct sweep_watch {
    uint64_t file;  // which file it is; another one is read from its beginning
    int64_t offset; // of what is not read yet
    int64_t step, first_step;
    double first_seen; // when the step first_step was seen; of this process of the run
    double seconds;    // of steps after SWEEP_WARM_STEPS
    int64_t counted;   // such steps
};

enum { SWEEP_WARM_STEPS = 2 }; // of a measurement, which do not count

struct sweep_point {
    char *name, *folder; // "max_anchors=512,block_size=8"; SWEEP/NAME
    enum sweep_state state;
    char *reason;        // of FAILED and TOO_LARGE, in words; NULL: none
    int64_t block_size;  // rows of an anchor; of eagle3 ttt_steps
    int64_t steps;       // that it takes; 0: not known yet (equal time)
    double anchors;      // that these steps draw; NAN: not counted
    double step_seconds; // equal time: as measured; 0: not yet
    int64_t needed;      // bytes, as planned
    double flops;        // of a step, as planned
    int64_t disk;        // bytes of a checkpoint, as planned
    // while it runs
    pid_t pid; // 0: does not
    int slot;
    bool measuring;
    int64_t output_from; // where this start's messages begin in output.txt
    double blocked;      // when its folder was first found in use; 0: it is not
    struct sweep_watch watch;
    struct sweep_result result;
    bool front_time, front_memory; // on the Pareto front, as sweep_compare found
};

struct sweep {
    const struct options *options;
    struct config config; // of the first point, with the sweep's folder as run.dir
    struct sweep_grid grid;
    struct sweep_point *points; // [point_count]
    size_t point_count;
    enum sweep_equal equal;
    double budget;             // seconds a point, of equal time
    bool validates;            // there are validation shards
    struct config_ints drafts; // that accept_len_walk is compared at; owned
    char *folder;
    int lock_fd; // -1: not held
    // how points run
    int parallel;
    int gpus;         // of each point; 0: on the CPU
    int64_t threads;  // of points on the CPU whose config does not say; 0: all cores
    char **slot_gpus; // [parallel] CUDA_VISIBLE_DEVICES; NULL: left as it is
    struct child_signals held;
    int signals;          // that have come
    int first_signal;     // the first one's number
    double stopped_at;    // when the first signal came; 0: none has
    bool stops_by_itself; // without a signal so far
    bool killed;
    double shown; // when progress was last told
};

const char *sweep_state_name(enum sweep_state state);
const char *sweep_equal_name(enum sweep_equal equal);
// The state of that name, -1: there is none.
int sweep_state_find(const char *name);
int sweep_equal_find(const char *name);
void sweep_point_become(struct sweep_point *point, enum sweep_state state, char *reason_taken);

// Points from the grid, all waiting.
void sweep_points_open(struct sweep *sweep);
void sweep_release(struct sweep *sweep);

// ---- sweep_state.c -------------------------------------------------------------------------------

// Whether FOLDER/sweep.json is there.
bool sweep_state_exists(const char *folder);
#define SWEEP_POINT_FILE "point.yaml" // in a point's folder: the config of its run
// Whether that is a point's config: a file of this name, with sweep.json in the folder above its own.
bool sweep_is_point(const char *config);
// Fills a zeroed sweep with what FOLDER/sweep.json says: grid, points, states.
int sweep_state_read(struct sweep *sweep, const char *folder, struct error *err);
int sweep_state_write(const struct sweep *sweep, struct error *err);
// Takes over what an earlier start of the same sweep has left: refuses another grid or config by what
// differs, a line each.
int sweep_state_continue(struct sweep *sweep, struct error *err);
// Says that the folder holds another sweep, by what differs, a line each. Returns -1.
int sweep_refuse_to_go_on(const struct sweep *sweep, const char *differs, struct error *err);
// Writes FOLDER/config.yaml, with which the next start's config is compared, and every point's
// NAME/point.yaml, which its run reads.
int sweep_write_configs(const struct sweep *sweep, struct error *err);
int sweep_write_point(const struct sweep *sweep, size_t point, struct error *err);
// Looks at its run's finished.json: whether the point has all its steps behind it.
bool sweep_point_finished(const struct sweep_point *point);

// ---- sweep_check.c, sweep_steps.c, sweep_plan.c --------------------------------------------------

// A point's config with its files, as the sweep's config and --set give it.
int sweep_load_point(const struct sweep *sweep, size_t point, struct config *config,
                     struct error *err);

// Refuses points whose files are not there, keys of the grid that change nothing, and what a sweep can not run; sets
// the points' block sizes.
int sweep_check_points(struct sweep *sweep, struct error *err);
// Plans every point as `dtrain plan` does; those that do not fit become SWEEP_TOO_LARGE.
int sweep_plan(struct sweep *sweep, struct error *err);
// Sets steps and anchors of every point that fits, from its config and documents. What is equal follows from
// points that have steps from an earlier start of the sweep, or else from those that fit.
int sweep_count_steps(struct sweep *sweep, struct error *err);
void sweep_print_plan(const struct sweep *sweep, FILE *out);

// ---- sweep_process.c -----------------------------------------------------------------------------

// A child process of this program.
struct sweep_process {
    const char *const *arguments; // after the program's name, NULL at the end
    int output, errors;           // descriptors
    const char *gpus;             // CUDA_VISIBLE_DEVICES; NULL: left as it is
};
// In a process group of its own; it is killed when this process ends.
pid_t sweep_process_start(const struct sweep *sweep, const struct sweep_process *process);
// Whether it has ended; then *status is what waitpid gives.
bool sweep_process_ended(pid_t pid, int *status);
// Waits at most so long; the number of a signal that asks this process to stop, 0: none, or a child ended.
int sweep_await(struct sweep *sweep, double seconds);
// The last error in a text of log lines, which this cuts up; the caller frees. NULL: there is none.
char *sweep_last_error(char *text);

// ---- sweep_watch.c, sweep_result.c ---------------------------------------------------------------

// Reads what the run's metrics.jsonl (in FOLDER) has got since the last call.
void sweep_watch_read(struct sweep_watch *watch, const char *folder);
// "3 of 9 points, ETA 0:12:00  |  NAME: step 40/100  ETA 0:01:30"; the caller frees.
char *sweep_progress_text(const struct sweep *sweep);
// Tells it: as the live line, or a plain line now and then.
void sweep_show_progress(struct sweep *sweep);
// The same of what comes before the first point: "planned 120 of 1000 points".
void sweep_show_count(struct sweep *sweep, const char *what, size_t count);
// Seconds until the running point, and until the sweep ends; NAN: not known yet.
double sweep_point_left(const struct sweep_point *point);
double sweep_left(const struct sweep *sweep);

// All of FOLDER/metrics.jsonl.
void sweep_result_read(struct sweep_result *result, const char *folder, int64_t block_size,
                       const struct config_ints *drafts);

// ---- sweep_front.c, sweep_table.c, sweep_run.c ---------------------------------------------------

// What is done by what points are ranked by; NULL: no point has been scored.
const struct sweep_point *sweep_best(const struct sweep *sweep);
// Sets which points are on the Pareto fronts, from their results.
void sweep_compare(struct sweep *sweep);

// Reads every point's result, and compares them.
void sweep_table_read(struct sweep *sweep);
// In so many characters a line, where some columns do not fit without them and a line that says which; 0: in full.
void sweep_table_print(const struct sweep *sweep, size_t most, FILE *out);
// table.txt, table.csv and table.json.
int sweep_table_write(const struct sweep *sweep, struct error *err);

// The folder of the point's run, or of its measurement while it is measured; the caller frees.
char *sweep_run_folder(const struct sweep_point *point);
// Runs what is not done. Returns an exit status.
int sweep_run(struct sweep *sweep);

#endif
