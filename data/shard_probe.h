// Opens shards in a child process first: libhdf5 may crash, loop or allocate without bound on files
// whose structure is damaged, and a run should say which file that is instead of dying of it.
#ifndef DATA_SHARD_PROBE_H
#define DATA_SHARD_PROBE_H

#include <stddef.h>

#include "base/error.h"
#include "data/shard.h"

// For each file NULL, or why it can not be opened, as shard_open would say it, or that libhdf5 broke
// down over it. Where something else kills the child at a file, another one is started, once; then it
// is die(). Free with shard_probe_free.
char **shard_probe(const char *const *paths, size_t count);
// The same of a manifest, as shard_open_manifest would say it.
char **shard_probe_manifest(const char *path);
void shard_probe_free(char **messages, size_t count);

// shard_open and shard_open_manifest for a file that has been probed: its message, when it has one, is
// the error, and libhdf5 does not see the file again.
int shard_open_probed(struct shard *shard, const char *path, const char *message,
                      struct error *err);
int shard_open_manifest_probed(struct shard *shard, const char *path, const char *message,
                               struct error *err);

#endif
