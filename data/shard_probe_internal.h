// What a process does that opens shards for another one: shard_probe.c's, which is forked, and shard_helper.c's,
// which is a program of its own.
#ifndef DATA_SHARD_PROBE_INTERNAL_H
#define DATA_SHARD_PROBE_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "data/shard.h"

typedef int shard_open_fn(struct shard *shard, const char *path, struct error *err);

// In that process: crashes end it, without a core file or words of their own, and memory is bounded.
void probe_begin(void);
// Opens one file, in bounded time, and sends what is to be said of it: the length of a message, then its text.
// Length 0: sound. false: nobody hears it any more.
bool probe_answer(const char *path, shard_open_fn *open_file, int pipe_end);
// Kills such a process. Its status, as of waitpid: its own where it had ended by itself. What a file system holds even
// then is left behind some seconds later, as one that was killed.
int probe_end(pid_t child);
// Of a file at which such a process has ended with that status of waitpid. The caller frees.
char *probe_crash_words(const char *path, int status);

bool probe_send(int pipe_end, const void *bytes, size_t size);
bool probe_receive(int pipe_end, void *bytes, size_t size);

#endif
