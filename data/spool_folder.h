// What lies in a spool, the folder between an extractor and a training run: names of its shards, the
// state that the run leaves there for the extractor, and the locks of both.
//
// Documents are counted over all epochs in the order in which they are read: a document's serial number
// is epoch * documents + its place in the epoch's packing. A shard holds consecutive serial numbers of
// one epoch and is named by the first and the last of them.
#ifndef DATA_SPOOL_FOLDER_H
#define DATA_SPOOL_FOLDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

struct spool_file {
    int64_t first, last; // serial numbers
    int64_t bytes;
};

struct spool_listing {
    struct spool_file *items; // ascending by first, then last
    size_t count;
    int64_t bytes;
};

// The shards in the folder; files of other names (unfinished ones, the state) are not looked at.
int spool_list(struct spool_listing *listing, const char *folder, struct error *err);
void spool_listing_release(struct spool_listing *listing);
// FOLDER/features-FIRST-LAST.h5; the caller frees it.
char *spool_file_path(const char *folder, int64_t first, int64_t last);

// spool.json: what the extractor has to know. Written whole under another name, then renamed.
struct spool_state {
    uint64_t order;    // identity of the order of documents
    int64_t documents; // of an epoch
    int64_t serial;    // everything before it has been used
    int64_t needed;    // before it: wanted before anything more can be used, whatever the bytes
    int64_t end;       // documents that the run reads in all
    int64_t bytes;     // that shards may take
    bool finished;     // the run has ended and reads nothing more
};
int spool_state_write(const char *folder, const struct spool_state *state, struct error *err);
// 1 when there is a state, 0 when there is none, -1 when it is not one of this version.
int spool_state_read(struct spool_state *state, const char *folder, struct error *err);

// Makes the folder where it is missing and takes its lock, which the kernel drops with the process: a
// descriptor to close, or -1.
int spool_lock(const char *folder, struct error *err);
// Whether an extractor holds its lock (extractor.lock). Others than tools/extract.py may not take one.
bool spool_extractor_runs(const char *folder);

#endif
