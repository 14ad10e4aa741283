// Features that an extractor delivers while training runs: the source of a manifest's documents. What
// lies in the folder is said in data/spool_folder.h, the convention in docs/file-formats.md.
//
// Reads wait until the shard with their document is there. Shards are removed when everything in them
// has been used; what a resumed run reads again is extracted again, so that the bytes on disk do not
// depend on how often a run saves.
#ifndef DATA_SPOOL_H
#define DATA_SPOOL_H

#include "data/source.h"

struct spool_options {
    const char *folder;
    const struct documents *documents; // of the manifest
    uint64_t order;                    // spool_order
    int64_t serial, needed, end;       // as in spool_state
    int64_t bytes;
    bool owner; // one reader of a spool removes shards and writes the state: rank 0
    bool check_crc;
    const char *program; // opens shards first (data/shard_helper.h); NULL: opened without
};

// Identity of the order in which a run reads its documents, whatever the epoch.
uint64_t spool_order(const struct documents *documents, uint64_t seed, int64_t seq_len);

// Takes the lock, removes what lies before options->serial, writes the state. A folder that holds shards
// of another order is refused.
int source_open_spool(struct source **source, const struct spool_options *options,
                      struct error *err);

// The rest is for a source of source_open_spool alone.

// All documents before `serial` have been used by every reader; up to `needed` is used together next.
void spool_used(struct source *source, int64_t serial, int64_t needed);
// No further document will be read: the extractor may end.
void spool_finish(struct source *source);
// The first document from `first` on, before `end`, whose shard is not in the folder; end: all are there.
int64_t spool_missing(struct source *source, int64_t first, int64_t end);
// The first document that a reader waits for and that the run needs; false: none.
bool spool_waiting(struct source *source, int64_t *serial);
// Of the shards in the folder when it was looked at last.
int64_t spool_bytes(struct source *source);

#endif
