// `dtrain data check` and `dtrain data stats`: every fault of a shard by file, document and row.
#ifndef DATA_CHECK_H
#define DATA_CHECK_H

#include <stdio.h>

#include "data/shard.h"

// Verdicts are kept in a side file beside the shard, FILE.verdict.json, keyed by the shard's size and
// time, so that training leaves bad documents out before packing.
struct verdict {
    bool present; // a side file exists and fits the shard's size and time
    uint8_t *bad; // [D] 1: bad
    char **words; // [D] of a bad document: "document D: what", lines of data check; else NULL
    int64_t documents;
    int64_t bad_count;
};
// No verdict for any document yet.
void verdict_init(struct verdict *verdict, const struct shard *shard);
// Calls a document bad. lines: faults as shard_check_document words them, with or without the path.
void verdict_add(struct verdict *verdict, const struct shard *shard, int64_t document,
                 const char *lines);
// The words of a bad document as data check printed them, added to err.
void verdict_lines(const struct verdict *verdict, const struct shard *shard, int64_t document,
                   struct error *err);
// An absent side file, or one that does not fit the shard's size and time, leaves present false.
int verdict_read(struct verdict *verdict, const struct shard *shard, struct error *err);
// Replaces the side file at once: readers see the old one or the new one.
int verdict_write(const struct verdict *verdict, const struct shard *shard, struct error *err);
void verdict_release(struct verdict *verdict);

struct check_summary {
    int64_t files, documents, tokens, supervised;
    int64_t faults; // lines printed
    int64_t bad_documents;
    int64_t unsupervised; // documents without a supervised token (reported, not a fault of bytes)
};

// Checks files one after another, also ids across them (duplicate doc_id), prints each fault as a line
// to out, writes the verdict files (unless write_verdicts is false), then a report: supervised share,
// length histogram, bytes. Returns 0 (no fault), 1 (faults), -1 (could not run; err).
int data_check(const char *const *paths, size_t count, bool write_verdicts, FILE *out,
               struct check_summary *summary, struct error *err);
// Only the report.
int data_stats(const char *const *paths, size_t count, FILE *out, struct error *err);

#endif
