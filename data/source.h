// Where a document's features come from: one interface, so that plain shards and a spool are two
// sources behind it.
#ifndef DATA_SOURCE_H
#define DATA_SOURCE_H

#include <stdatomic.h>

#include "data/documents.h"

struct source;

enum { SOURCE_BAD = 1 };

struct source_ops {
    const char *name;
    // Ids, mask and features (laid out as documents->features says) of a document: its first
    // `length` tokens. Called from several threads.
    // serial: its number in the order of all epochs (struct row). May wait for features to come.
    // Returns 0, SOURCE_BAD when its values are bad, -1 when it can not be read; err says what.
    int (*read)(struct source *source, const struct document *document, int64_t serial,
                int32_t *ids, uint8_t *mask, bf16 *hidden, struct error *err);
    // Ends waits in read, now and later: nobody wants the documents any more. NULL: it never waits.
    void (*interrupt)(struct source *source);
    void (*close)(struct source *source);
};

struct source {
    const struct source_ops *ops;
    const struct documents *documents;
    bool check_crc;
    atomic_llong disk_nanoseconds; // that threads have spent reading files, all of them together
};

// Features from the shards the documents were read from. A document that was cut to seq_len is checked
// without its CRC. Reads whole documents by pread; bad values are errors in the words of data check.
// Documents of a manifest have no features to read: an error.
int source_open_shards(struct source **source, const struct documents *documents, bool check_crc,
                       struct error *err);
void source_close(struct source *source);
// Seconds that threads have spent reading files so far; what they wait for and check is apart.
double source_disk_seconds(const struct source *source);
// For implementations: adds the time since `start` (timer_now).
void source_count_disk(struct source *source, double start);

#endif
