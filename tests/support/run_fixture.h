// A folder with everything a small training run needs: a target of 64 tokens and 8 hidden values, a
// training and a validation shard, run.yaml. Tests change the files, add --set, and run the program.
#ifndef TESTS_SUPPORT_RUN_FIXTURE_H
#define TESTS_SUPPORT_RUN_FIXTURE_H

#include "tests/support/program.h"
#include "tests/support/shard_fixture.h"

enum { RUN_STEPS = 20, RUN_DOCUMENTS = 40 };

struct run_fixture {
    char *folder;
    const char *sets[24]; // "key=value" added to every command that reads the config
    int set_count;
    int ranks; // of train; 0: one process, without mpirun
};

// run.yaml trains 20 steps of two rows over several epochs, saves every 4, in fp32 with one thread.
void run_fixture_open(struct run_fixture *fixture);
void run_fixture_close(struct run_fixture *fixture);
void run_fixture_set(struct run_fixture *fixture, const char *set);
// A path in the folder. Valid until the test ends: few are made.
const char *run_path(const struct run_fixture *fixture, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

// The options of the two shards as they are by default; lengths vary, all ids are explicit.
struct fixture_options run_train_shard(void);
struct fixture_options run_val_shard(void);
// A target directory of random weights. The family decides whether norm weights are w or w - 1.
struct run_target {
    const char *model_type;
    int64_t hidden, vocab;
    double norm_mean, norm_std;
    uint64_t seed;
};
void run_target_write(const char *path, const struct run_target *target);

// train with run.dir NAME (below the folder) and further words, NULL at the end; its output goes to
// NAME.out. Returns the exit status.
int run_train(const struct run_fixture *fixture, const char *name, ...);
// The same, not waited for.
void run_train_start(const struct run_fixture *fixture, struct program *program, const char *name,
                     ...);
// Any command; `config`: with --config and the sets. Output into NAME.out.
int run_command(const struct run_fixture *fixture, const char *name, bool config, ...);
// Whether NAME.out has these words.
bool run_says(const struct run_fixture *fixture, const char *name, const char *words);
// Fails the test when it does not.
void run_must_say(const struct run_fixture *fixture, const char *name, const char *words);
// Deletes a run's folder, if there is one.
void run_remove(const struct run_fixture *fixture, const char *name);
void run_sleep(double seconds);
// Checkpoint folder of a step.
const char *run_checkpoint(const struct run_fixture *fixture, const char *name, int64_t step);
// A number of state.json in that folder.
double run_state_number(const struct run_fixture *fixture, const char *name, int64_t step,
                        const char *number);
// Fails when two run folders do not hold the same metrics lines and the same state at `step`.
void run_must_equal(const struct run_fixture *fixture, const char *first, const char *second,
                    int64_t step);
// The same but for some members of the lines, NULL at the end.
void run_must_equal_but(const struct run_fixture *fixture, const char *first, const char *second,
                        int64_t step, const char *const *members);

#endif
