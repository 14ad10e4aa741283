// Owns rows and documents made by hand for tests.
#include "tests/support/rows.h"

#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

void test_row_open(struct row *row, const int32_t *lengths, int64_t documents, int64_t planes,
                   int64_t hidden_size)
{
    struct feature_layout features = feature_layout_make(planes, true, hidden_size, false);
    test_row_open_features(row, lengths, documents, &features);
}

void test_row_open_features(struct row *row, const int32_t *lengths, int64_t documents,
                            const struct feature_layout *features)
{
    int64_t tokens = 0;
    for (int64_t d = 0; d < documents; d++)
        tokens += lengths[d];
    row_open(row, tokens, features, NULL);
    memset(row->hidden, 0, (size_t)(tokens * features->stride) * sizeof(*row->hidden));
    row->tokens = row->supervised = tokens;
    row->documents = documents;
    for (int64_t d = 0; d < documents; d++) {
        row->doc_ids[d] = 1000 + (uint64_t)d;
        row->doc_offsets[d + 1] = row->doc_offsets[d] + lengths[d];
        for (int64_t t = row->doc_offsets[d]; t < row->doc_offsets[d + 1]; t++) {
            row->input_ids[t] = (int32_t)t;
            row->positions[t] = (int32_t)(t - row->doc_offsets[d]);
            row->doc_of[t] = (int32_t)d;
            row->loss_mask[t] = 1;
        }
    }
}

void test_documents_open(struct documents *documents, const int32_t *lengths, size_t count)
{
    *documents = (struct documents){.count = count};
    documents->items = memory_alloc(count, sizeof(*documents->items));
    for (size_t i = 0; i < count; i++) {
        documents->items[i] = (struct document){.id = 1000 + (uint64_t)i,
                                                .first = documents->tokens,
                                                .index = (int32_t)i,
                                                .length = lengths[i],
                                                .full_length = lengths[i],
                                                .supervised = lengths[i]};
        documents->tokens += lengths[i];
    }
    documents->supervised = documents->tokens;
}

void test_documents_close(struct documents *documents)
{
    free(documents->items);
    *documents = (struct documents){0};
}
