// The run folder: lock, config.yaml, execution.json, metrics.jsonl, log.txt, events/, checkpoints/.
#ifndef TRAINER_RUN_FOLDER_H
#define TRAINER_RUN_FOLDER_H

#include <stdbool.h>
#include <stdio.h>

#include "configs/config.h"
#include "loss/metrics.h"
#include "trainer/model_state.h"
#include "trainer/wait_watch.h"

// Sums over recent steps, older ones fading: what rates, shares and the ETA are made from.
struct recent {
    double steps, seconds, wait, copy, forward, loss, backward, optimizer, exchange, save, tokens,
        flops;
};

struct run_folder {
    char *path, *checkpoints;
    int lock_fd;
    FILE *metrics;             // metrics.jsonl
    struct event_file *events; // TensorBoard; NULL: none
    bool terminal;             // stderr is one: a live line
    bool metrics_failed;       // a line was lost to a full disk; said once
    struct recent recent;
    struct wait_watch watch;
    // since this process began; what validations add to the ETA
    double steps, validation_seconds;
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
    bool ttt;         // slots are ttt_steps: accuracies of those that were reached as well
    bool draft_vocab; // the drafter knows some tokens of the target only
    double lr, grad_norm, clip_factor;
    bool skipped; // non-finite or empty: nothing changed
    double seconds, wait_seconds, copy_seconds, forward_seconds, loss_seconds, backward_seconds,
        optimizer_seconds, save_seconds;
    int ranks;               // several: exchange_seconds is said
    double exchange_seconds; // that the step waited for what ranks exchange
    // of the reader threads of all ranks, `readers` of them; disk_seconds: the part in which files were read
    double read_seconds, disk_seconds, read_bytes;
    int64_t readers;
    const char *device;   // in words: "GPU", "CPU"
    double flops;         // of useful work
    double peak_flops;    // a second, of all ranks' devices; 0: not known
    double memory_bytes;  // peak resident (CPU) or device memory in use
    double begin_bytes;   // of memory_bytes, in use when the run began
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
    bool ttt, draft_vocab;
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
// Scalars of a step: begin, each of them, end, which writes them.
void event_file_begin(struct event_file *file, int64_t step);
void event_file_scalar(struct event_file *file, const char *tag, double value);
void event_file_end(struct event_file *file);
void event_file_close(struct event_file *file);
// Cuts what the files of a folder tell of later steps than `step`, of validations later than `validation`, and
// half a record at their end. -1 for both: all of it.
int event_files_cut(const char *directory, int64_t step, int64_t validation, struct error *err);

#endif
