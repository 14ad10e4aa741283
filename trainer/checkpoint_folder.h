// Names and states of directories in a checkpoints folder: what is complete, what is begun, what is
// published and what is put aside. Shared by the files of checkpoint.h.
#ifndef TRAINER_CHECKPOINT_FOLDER_H
#define TRAINER_CHECKPOINT_FOLDER_H

#include "base/error.h"

#include <stdbool.h>
#include <stdint.h>

// Path of step's directory. The caller frees.
char *checkpoint_path(const char *directory, int64_t step);
bool checkpoint_is_complete(const char *path); // has DONE
// A new, empty temporary directory for `step`; the caller frees the path. NULL: the error is filled.
char *checkpoint_begin(const char *directory, int64_t step, struct error *err);
// Makes a written temporary directory the checkpoint of `step`: rename, then DONE, everything durable.
// What an earlier run left incomplete under that name is put aside; a complete one is replaced in one
// step. On failure nothing new is left under the step's name; the temporary directory may remain.
int checkpoint_publish(const char *directory, const char *temporary, int64_t step,
                       struct error *err);
// Puts complete checkpoints of steps after `step` aside: once a run that went back has saved, they
// belong to another line of the run and must neither be resumed nor push its own out. A warning names
// them.
int checkpoint_set_aside_after(const char *directory, int64_t step, struct error *err);

#endif
