// The commands of the program. Each returns the exit status of the process: 0 done; 1 what was begun failed, or
// the answer is no; 2 command line, config or data refused before any work; 75 stopped by a signal or by
// data.spool_wait, with a checkpoint that resumes.
#ifndef TRAINER_COMMANDS_H
#define TRAINER_COMMANDS_H

#include <stdbool.h>
#include <stddef.h>

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_REFUSED = 2, EXIT_STOPPED = 75 };

// What the command line says; strings are borrowed from argv.
struct options {
    const char *config;
    const char **sets;
    size_t set_count;
    const char *resume; // "auto" (default), "none" or a checkpoint directory
    bool replan;
    const char *checkpoint; // a checkpoint directory
    const char *out;
    const char *format;
    const char *allow_unservable; // names, "": all; NULL: not given
    const char *blocks;           // eval: file for one line a visited block
    const char *target;           // data check, export: target directory
    long long rows;               // eval: rows to score; 0: all
    bool served;                  // eval: weights rounded to bf16, as exports hold them
    bool raw;                     // eval, export: not the moving average of the weights
    bool no_verdicts;
    bool markdown;
    const char *target_config, *device_memory, *gpus, *tflops, *vary; // plan
    bool json, fit;                                                   // plan
    const char **grids; // plan, sweep: KEY=VALUE,VALUE,...
    size_t grid_count;
    const char *equal, *show; // sweep
    long long parallel;       // sweep: points at a time; 0: not given
    bool plan_only;           // sweep
    long long from_step;      // data order; 0: not given
    long long size;           // vocab: tokens of the map; 0: not given
    char **files;             // what follows the options
    int file_count;
    const char *command; // the whole command line as typed
    char **arguments;    // the same as it came, NULL at the end
};

int command_train(const struct options *options);
int command_eval(const struct options *options);
int command_trace(const struct options *options);
int command_plan(const struct options *options);
int command_sweep(const struct options *options);
int command_export(const struct options *options);
int command_vocab(const struct options *options);
int command_data_check(const struct options *options);
int command_data_stats(const struct options *options);
int command_data_order(const struct options *options);
int command_data_manifest(const struct options *options);
int command_config(const struct options *options);
int command_completion(const struct options *options);
int command_man(const struct options *options);

#endif
