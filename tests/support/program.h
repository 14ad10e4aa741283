// The real program, dtrain, in a process of its own: started, waited for with a limit, signalled, and
// what it leaves in a run folder. A program that does not end in time is killed and fails the test.
#ifndef TESTS_SUPPORT_PROGRAM_H
#define TESTS_SUPPORT_PROGRAM_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct program {
    pid_t pid;          // 0: not running
    char *output;       // file that holds its stdout and stderr
    int64_t file_limit; // bytes that one of its files may have, writing more fails; 0: any
    int ranks;          // processes, started by mpirun; 0: one, without it
    int early_signal;   // that waits for it when it begins, held back by who starts it; 0: none
    // after program_wait
    double cpu_seconds;
    int64_t peak_bytes; // resident
};

// Whether there is an mpirun, and dtrain can use it.
bool program_has_ranks(void);
// Processes of this program that live, at most `capacity` of them, in order of their start: mpirun's children
// when there are several ranks. Returns their number.
int program_ranks(const struct program *program, pid_t *pids, int capacity);
// Starts dtrain with these arguments, NULL at the end. *program: zeros, or with file_limit, ranks or early_signal set.
void program_start(struct program *program, const char *output, const char *const *arguments);
void program_signal(const struct program *program, int signal_number);
// Whether it has not ended yet.
bool program_runs(const struct program *program);
// Its exit status; 128 + number when a signal ended it.
int program_wait(struct program *program, double seconds);
// Starts and waits, a minute at most.
int program_run(const char *output, const char *const *arguments);

// A whole file as text in memory the caller frees; "" when there is none.
char *program_text(const char *path);
bool program_says(const char *path, const char *words);
// How often it does.
int program_count(const char *path, const char *words);
// The object that an output ends with, after warnings; fails the test when there is none.
cJSON *program_json(const char *path);

// metrics.jsonl of a run folder as an array of its objects, whole lines only; cJSON_Delete it.
cJSON *program_metrics(const char *run);
// The same without what depends on the clock and the machine.
cJSON *program_steady_metrics(const char *run);
// Number under a name of an object; fails the test when there is none. NaN for null.
double program_number(const cJSON *line, const char *name);
// The step's line, validations left aside (or only they, with name "val_loss"); NULL: none.
const cJSON *program_line(const cJSON *metrics, int64_t step, const char *name);
// Newest step in metrics.jsonl, -1: none yet.
int64_t program_step(const char *run);
// Waits until metrics.jsonl holds this step or the program has ended.
void program_wait_step(const struct program *program, const char *run, int64_t step,
                       double seconds);

// Newest complete checkpoint of a run folder, -1: none.
int64_t program_checkpoint(const char *run);
// Whether both checkpoint directories hold bitwise the same weights and moments, written by as many ranks.
bool program_same_state(const char *first, const char *second);

// Norm of the difference over norm of the first, over all tensors of an array ("master", "adam_m") of two
// checkpoint directories, whichever ranks wrote them.
double program_state_distance(const char *first, const char *second, const char *array);

#endif
