// What the files that write and read a checkpoint's contents share: names of files and counters.
#ifndef TRAINER_CHECKPOINT_INTERNAL_H
#define TRAINER_CHECKPOINT_INTERNAL_H

#include <inttypes.h>
#include <stdint.h>

#include "base/error.h"
#include "trainer/state_layout.h"

// Of state.json. From STATE_WITH_SUMS on all checksums are there, and one that is missing is damage; before, some or
// all of them may be.
enum { STATE_OLDEST = 1, STATE_WITH_SUMS = 2, STATE_VERSION = 2 };
#define STATE_FORMAT "dtrain-checkpoint"

#define COUNTERS(INT, REAL)                                                                        \
    INT(step)                                                                                      \
    INT(epoch)                                                                                     \
    INT(row)                                                                                       \
    INT(applied)                                                                                   \
    INT(skipped_nonfinite)                                                                         \
    INT(nonfinite_in_a_row)                                                                        \
    INT(skipped_empty)                                                                             \
    INT(bad_documents)                                                                             \
    INT(tokens)                                                                                    \
    REAL(best_accept_len_walk)                                                                     \
    INT(best_step)                                                                                 \
    INT(validations_without_better)                                                                \
    INT(last_validation)

// Arrays of fp32 state are each a file of every rank that wrote; these are all other files but state.json and
// DONE.
enum { OTHER_FILES = 5, SERVED_FILE = 0 }; // SERVED_FILE: model.safetensors
extern const char *const checkpoint_arrays[STATE_ARRAYS];
extern const char *const checkpoint_others[OTHER_FILES];

// Checksums (CRC-32C, hexadecimal): of a tensor of the state in its file's metadata, under SUM_PREFIX and its
// name, so that whoever reads a tensor can check it, whichever rank wrote it; of the other files in state.json, as
// last of state.json itself, in front of that entry.
#define SUM_PREFIX "crc32c."
#define SUM_FORMAT "%08" PRIx32
#define STATE_FILE "state.json"
enum { SUM_TEXT = 9 }; // bytes

typedef int checkpoint_sum_fn(const char *path, uint32_t *sum, struct error *err);
// Of a safetensors file's header. An array's file has the sums of its tensors there, so this stands for the file:
// another checkpoint's has another one.
checkpoint_sum_fn checkpoint_header_sum;
// Of the text of state.json in front of its own entry; of all of it where there is none.
uint32_t checkpoint_state_sum(const char *text);

// "master.safetensors", of several ranks "master-00001-of-00002.safetensors". The caller frees.
char *checkpoint_array_file(int array, int rank, int ranks);

#endif
