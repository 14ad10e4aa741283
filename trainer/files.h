// Folders and durable files: what checkpoints, exports and the run folder share.
#ifndef TRAINER_FILES_H
#define TRAINER_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/error.h"

// Creates a folder and its parents; none is an error.
int files_make_folder(const char *path, struct error *err);
// The same for a command that takes them away when it fails: those that were not there yet, outermost first. `made`
// is filled also on failure.
struct files_made {
    char **paths;
    size_t count;
};
int files_make_folder_noted(const char *path, struct files_made *made, struct error *err);
// Forgets them; removes, when asked to, those that hold nothing.
void files_made_end(struct files_made *made, bool remove_empty);
bool files_exists(const char *path);
bool files_is_folder(const char *path);
// Two names of one file or folder.
bool files_same(const char *first, const char *second);
// Size in bytes, -1: there is none.
int64_t files_size(const char *path);

// Writes a file that is on disk when this returns: `write` prints into it. On failure nothing is left.
typedef void files_write_fn(void *context, FILE *out);
int files_write(const char *path, files_write_fn *write, void *context, struct error *err);
int files_write_text(const char *path, const char *text, struct error *err);
// The whole file as text (caller frees), NULL: the error is filled.
char *files_read_text(const char *path, struct error *err);
// CRC-32C of the whole file.
int files_crc32c(const char *path, uint32_t *sum, struct error *err);
// Copies a file, durable as files_write.
int files_copy(const char *from, const char *to, struct error *err);
// Makes the entries of a folder durable.
int files_sync_folder(const char *path, struct error *err);
// Refuses a pipe where a file is read more than once.
int files_check_rereadable(const char *path, struct error *err);
// Where a command is to write, looked at before its work; nothing is left there. A file that comes by way of a second
// one beside it; one that is opened as it is, so also a device or a pipe; a folder that is made where it is missing.
// A file of HDF5 data that is there (features, a manifest) is refused.
int files_check_replace(const char *path, struct error *err);
int files_check_write(const char *path, struct error *err);
int files_check_folder(const char *path, struct error *err);
// Deletes a folder with the plain files in it (no folders inside).
int files_remove_folder(const char *path, struct error *err);

#endif
