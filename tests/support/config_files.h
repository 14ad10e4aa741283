// Files for config tests: a fresh folder under TMPDIR, removed at the end with what is in it.
#ifndef TESTS_SUPPORT_CONFIG_FILES_H
#define TESTS_SUPPORT_CONFIG_FILES_H

#include "configs/config.h"

struct config_folder {
    char *path; // absolute, without links
};

void config_folder_open(struct config_folder *folder);
void config_folder_close(struct config_folder *folder);
// Path of a file in the folder, in memory the caller frees.
char *config_folder_path(const struct config_folder *folder, const char *name);
// Writes `name` (folders before a '/' are made) with this text; the path is the caller's.
char *config_folder_write(const struct config_folder *folder, const char *name, const char *text);

#endif
