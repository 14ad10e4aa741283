// Which rank owns which tensor: whole tensors, balanced by size. A rank holds masters and moments of its own
// tensors only, one after another in arrays of its own. A function of (parameters, number of ranks).
#ifndef TRAINER_OWNERSHIP_H
#define TRAINER_OWNERSHIP_H

#include "drafter/params.h"

struct ownership {
    const struct params *params;
    int ranks, rank;
    int *owner;        // [params->count]
    int64_t *offset;   // [params->count] elements, in the owner's arrays
    int64_t *elements; // [ranks] of a rank's arrays, padding included
};

// One rank: everything at its own offset. Several: the largest tensor first, each to the rank that has least
// so far; of equals to the one that has least of the same part of the model.
void ownership_open(struct ownership *ownership, const struct params *params, int ranks, int rank);
void ownership_close(struct ownership *ownership);

// NULL stands for one rank, in all of these.
bool ownership_shared(const struct ownership *ownership); // several ranks
bool ownership_mine(const struct ownership *ownership, size_t param);
// Of an own tensor, in this rank's arrays.
int64_t ownership_offset(const struct ownership *ownership, const struct params *params,
                         size_t param);

#endif
