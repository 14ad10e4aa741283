// An extractor for tests, in a process of its own: copies the documents of a shard that is there already
// into a spool, in the order that `dtrain data order` printed, obeying the spool's state.
#ifndef TESTS_SUPPORT_SPOOL_FEEDER_H
#define TESTS_SUPPORT_SPOOL_FEEDER_H

#include <stdint.h>
#include <sys/types.h>

#include "tests/support/shard_fixture.h"

struct feeder {
    const char *folder;           // the spool
    const char *order;            // file with the output of dtrain data order
    const struct fixture *source; // the documents
    int64_t documents;            // in a shard
    unsigned pause_us;            // before each shard
    pid_t pid;                    // 0: not running
};

void feeder_start(struct feeder *feeder);
void feeder_kill(struct feeder *feeder);
// Its exit status; one that does not end in time is killed and fails the test.
int feeder_wait(struct feeder *feeder, double seconds);

// The order file as a table of documents of `source`, by serial number; the caller frees it.
int64_t *feeder_order(const char *order, const struct fixture *source, int64_t *count);
// Writes documents order[first .. last] of the source as a shard of the spool. Errors are in err.
int feeder_write(const char *folder, const struct fixture *source, const int64_t *order,
                 int64_t first, int64_t last, struct error *err);

#endif
