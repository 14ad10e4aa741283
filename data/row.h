// A packed row in host memory: everything a step needs of it.
#ifndef DATA_ROW_H
#define DATA_ROW_H

#include "data/documents.h"
#include "data/features.h"

struct row {
    int64_t tokens;    // T <= seq_len
    int64_t documents; // D
    int64_t planes, hidden_size;
    struct feature_layout features; // of hidden
    int32_t *input_ids;             // [T]
    int32_t *positions;             // [T] position in the document
    int32_t *doc_of;                // [T] index 0..D-1 of the token's document
    uint8_t *loss_mask;             // [T]; 0 throughout a bad document
    int64_t *doc_offsets;           // [D + 1] tokens
    uint64_t *doc_ids;              // [D]
    const struct document **docs;   // [D], borrowed
    uint8_t *blank;                 // [T] 1 in bad documents, whose features are zeros
    int64_t bad_documents;
    bf16 *hidden;   // [T] features of tokens ([T, P, H] unless float8); given allocator's memory
    uint64_t epoch; // for the random numbers keyed by epoch
    int64_t serial; // of its first document, counted over all epochs in the order of reading
    int64_t supervised;  // tokens with loss_mask 1
    double read_seconds; // spent reading it
    int64_t read_bytes;
    int64_t capacity; // tokens it has room for
};

// Memory for rows of up to `capacity` tokens. host_alloc may be NULL (then malloc).
void row_open(struct row *row, int64_t capacity, const struct feature_layout *features,
              void *(*host_alloc)(size_t));
void row_close(struct row *row, void (*host_free)(void *));

#endif
