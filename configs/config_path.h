// Paths of a configuration.
#ifndef CONFIGS_CONFIG_PATH_H
#define CONFIGS_CONFIG_PATH_H

// `path` seen from `folder` (absolute, without links; NULL: the path stays as it is), in memory the
// caller frees. Leading "./" and "../" are resolved, the rest is kept as written.
char *config_path_resolve(const char *folder, const char *path);
// The absolute folder, without links, of a file; file NULL: the current folder. NULL with errno set
// when there is no such folder. The caller frees it.
char *config_path_folder(const char *file);
// What follows the last '/'.
const char *config_path_base(const char *path);

#endif
