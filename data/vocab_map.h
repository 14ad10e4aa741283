// A draft vocabulary: the target's most frequent supervised tokens, as two tables (docs/file-formats.md).
// Kept ids ascend, so a draft id is the rank of its target id among them.
#ifndef DATA_VOCAB_MAP_H
#define DATA_VOCAB_MAP_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "data/documents.h"
#include "data/safetensors.h"

struct vocab_map {
    int64_t vocab_size;   // V
    int64_t draft_size;   // Vd
    int64_t *d2t;         // [Vd] offsets: target id = draft id + d2t[draft id]
    uint8_t *t2d;         // [V] 1: kept
    int32_t *draft_ids;   // [V] draft id of a target id, -1: outside
    int32_t *ids;         // [V] the kept ids ascending, then the others ascending
    double coverage;      // share of the supervised tokens that are kept
    uint64_t fingerprint; // of the documents that were counted
    char *target_model;
};

// Adds the supervised tokens of the documents, cut as they are, to counts [V].
int vocab_map_count(const struct documents *documents, int64_t *counts, struct error *err);
// The draft_size most frequent tokens of counts [V]; among equals the smaller id. Tokens that were never
// seen fill what is left. Refuses sizes outside 1 .. V.
int vocab_map_make(struct vocab_map *map, const int64_t *counts, int64_t vocab_size,
                   int64_t draft_size, struct error *err);
void vocab_map_release(struct vocab_map *map);

// Draft id of a target id, or -1: a label that is masked.
static inline int32_t vocab_map_draft(const struct vocab_map *map, int32_t target)
{
    return map->draft_ids[target];
}

// Share of counts [V] that the sizes[i] most frequent tokens have, each size at most V; sizes ascend.
// Returns how many distinct tokens were seen.
int64_t vocab_map_coverages(const int64_t *counts, int64_t vocab_size, const int64_t *sizes,
                            int64_t size_count, double *coverages);

// Temporary name, fsync, rename. documents: what was counted.
int vocab_map_write(const struct vocab_map *map, const struct documents *documents,
                    const char *path, struct error *err);
// Refuses tables that contradict each other and a map of another target, vocabulary or, where the
// documents are what it is to have been counted from, of other data.
int vocab_map_read(struct vocab_map *map, const struct documents *documents, bool counted,
                   const char *path, struct error *err);
// The tables alone, d2t and t2d (U8 or BOOL) of an open file: those of a released drafter. Release the map
// after an error, too.
int vocab_map_tables(struct vocab_map *map, const struct safetensors *file, struct error *err);
// How many documents the shards have that a map was made from; 0: the file does not say.
int64_t vocab_map_documents(const struct safetensors *file);
// Differs between maps that keep different tokens.
uint64_t vocab_map_hash(const struct vocab_map *map);

#endif
