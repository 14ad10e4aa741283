// The run folder: lock, config.yaml, execution.json, metrics.jsonl, log.txt, events/, checkpoints/.
#ifndef TRAINER_RUN_FOLDER_H
#define TRAINER_RUN_FOLDER_H

#include <stdbool.h>
#include <stdio.h>

#include "configs/config.h"
#include "loss/metrics.h"
#include "trainer/model_state.h"

struct run_folder {
    char *path, *checkpoints;
    int lock_fd;
    FILE *metrics;             // metrics.jsonl
    struct event_file *events; // TensorBoard; NULL: none
    bool terminal;             // stderr is one: a live line
    bool metrics_failed;       // a line was lost to a full disk; said once
    // sums over recent steps, older ones fading: what rates and ETA are made from
    double recent_steps, recent_seconds, recent_wait, recent_tokens;
};

// Creates what is missing and takes the lock (an error names the process that holds it). Sets the log
// file.
int run_folder_open(struct run_folder *folder, const char *path, struct error *err);
// Of a rank that writes nothing there but its part of checkpoints: names only.
void run_folder_name(struct run_folder *folder, const char *path);
void run_folder_close(struct run_folder *folder);
// Opens metrics.jsonl for appending, cut to the whole lines of what a resumed run has behind it: steps
// and validations up to the counters'. NULL: the run starts, nothing is kept. Starts a new event file
// when tensorboard is wanted.
int run_folder_start(struct run_folder *folder, const struct counters *resumed, bool tensorboard,
                     struct error *err);

// One step's or validation's numbers: names once, here.
struct step_report {
    int64_t step, total_steps, epoch;
    const struct metrics *metrics;
    int normalize;              // NORMALIZE_* of the loss
    const double *term_weights; // [LOSS_TERM_COUNT] terms of weight 0 are not reported
    int64_t block_size;
    double lr, grad_norm, clip_factor;
    bool skipped; // non-finite or empty: nothing changed
    double seconds, wait_seconds, read_seconds, forward_seconds, loss_seconds, backward_seconds,
        optimizer_seconds, save_seconds; // read_seconds: of the reader threads
    int ranks;                           // several: exchange_seconds is said
    double exchange_seconds;             // that the step waited for what ranks exchange
    double read_bytes;
    double memory_bytes;  // peak resident (CPU) or device memory in use
    double planned_bytes; // of device memory
    bool spool;           // features come through one:
    double spool_wait_seconds, spool_bytes;
};
struct validation_report {
    int64_t step, epoch;
    const struct metrics *metrics;
    const struct walk *walk;
    const struct config_ints *draft_tokens;
    int normalize;
    int64_t block_size;
    double seconds;
    bool best;
};
// A line in metrics.jsonl, scalars in events/, and progress: the live line on a terminal, a plain line
// every `every` steps elsewhere. A full disk loses the line with one warning, other faults are errors.
int run_folder_step(struct run_folder *folder, const struct step_report *report, int64_t every,
                    struct error *err);
int run_folder_validation(struct run_folder *folder, const struct validation_report *report,
                          struct error *err);

// TensorBoard event files (events.out.tfevents.*): scalars only.
struct event_file;
int event_file_open(struct event_file **file, const char *directory, struct error *err);
// Tells readers to forget what earlier files hold of `step` and later steps (after a resume).
void event_file_restart(struct event_file *file, int64_t step);
void event_file_scalar(struct event_file *file, int64_t step, const char *tag, double value);
void event_file_flush(struct event_file *file);
void event_file_close(struct event_file *file);

#endif
