// A process beside this one in which shards are opened first, for a process with threads, which shard_probe's
// fork could find holding any lock: the program started again, waiting for the names of files.
#ifndef DATA_SHARD_HELPER_H
#define DATA_SHARD_HELPER_H

#include <stdbool.h>

#include "base/error.h"
#include "data/shard.h"

// The first word of a command line with which the program is such a process: it calls shard_helper_main, before
// anything else of it begins. Its standard input is the socket; without one it says so and ends with status 2.
#define SHARD_HELPER_WORD "open-shards"
void shard_helper_main(void) __attribute__((noreturn));

struct shard_helper;
// program: what is started, "/proc/self/exe" for this one. stop: asked while an answer is waited for; true ends the
// wait. Where no process can be started, shards are opened without.
struct shard_helper *shard_helper_open(const char *program, bool (*stop)(void *context),
                                       void *context);
void shard_helper_close(struct shard_helper *helper); // may be NULL

// shard_open of a file that the helper has opened before; when libhdf5 breaks down over it, that is the error. From
// one thread at a time. NULL: shard_open.
int shard_open_helped(struct shard *shard, const char *path, struct shard_helper *helper,
                      struct error *err);

#endif
