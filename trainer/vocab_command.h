// `dtrain vocab`: makes a draft vocabulary from the supervised tokens of documents.
#ifndef TRAINER_VOCAB_COMMAND_H
#define TRAINER_VOCAB_COMMAND_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/error.h"

struct vocab_request {
    const char *const *files; // feature shards, or one manifest
    size_t file_count;
    int64_t size; // Vd
    const char *out;
    const char *target; // directory whose head must have the shards' vocabulary; NULL: not compared
};

// Writes the map, unless it is there already (another one in its place is refused), then what it covers to `report`.
// Files are taken in the order of their names, as a run takes them. -1: refused; 1: the map could not be written.
int vocab_command(const struct vocab_request *request, FILE *report, struct error *err);

#endif
