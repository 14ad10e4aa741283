// Documents into rows of at most seq_len tokens: which documents share a row, in which order. Depends
// on (seed, epoch) and the documents only, never on ranks.
#ifndef DATA_PACKING_H
#define DATA_PACKING_H

#include "data/documents.h"

struct packing {
    int32_t *document;    // [documents] indices into documents.items, row after row
    int64_t *row_offsets; // [rows + 1] into document
    int64_t *row_places;  // [rows] where a row begins in the order of all rows of the epoch
    int64_t rows;
    int64_t tokens;
};

// A permutation of the documents by (seed, epoch), then best fit over a bounded set of open rows.
// shuffle false (validation): the documents' own order.
void packing_make(struct packing *packing, const struct documents *documents, int64_t seq_len,
                  uint64_t seed, uint64_t epoch, bool shuffle);
// Leaves only the rows r with owner[r] == keep, in their order. `tokens` stays that of all rows.
void packing_keep(struct packing *packing, const int32_t *owner, int32_t keep);
void packing_release(struct packing *packing);

#endif
