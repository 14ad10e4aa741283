// Packed rows and documents made by hand, without shards.
#ifndef TESTS_SUPPORT_ROWS_H
#define TESTS_SUPPORT_ROWS_H

#include "data/row.h"

// A row of documents with these lengths: ids are the positions in the row, all tokens are supervised,
// document d has id 1000 + d, features are 0. Close with row_close(row, NULL).
void test_row_open_features(struct row *row, const int32_t *lengths, int64_t documents,
                            const struct feature_layout *features);
// The same of bf16 planes, the last one the last hidden state.
void test_row_open(struct row *row, const int32_t *lengths, int64_t documents, int64_t planes,
                   int64_t hidden_size);

// Documents of these lengths one after another in one shard, ids 1000 + index. Only what packing looks
// at is there. Free with test_documents_close.
void test_documents_open(struct documents *documents, const int32_t *lengths, size_t count);
void test_documents_close(struct documents *documents);

#endif
