// Owns the memory of packed rows. What is in a row is written by prefetch.c.
#include "data/row.h"

#include <stdlib.h>

#include "base/log.h"
#include "base/memory.h"

void row_open(struct row *row, int64_t capacity, const struct feature_layout *features,
              void *(*host_alloc)(size_t))
{
    BUG_UNLESS(capacity > 0 && features->planes > 0 && features->hidden_size > 0);
    size_t n = (size_t)capacity; // a document has at least one token, so also the most documents
    *row = (struct row){.capacity = capacity,
                        .planes = features->planes,
                        .hidden_size = features->hidden_size,
                        .features = *features};
    row->input_ids = memory_alloc(n, sizeof(*row->input_ids));
    row->positions = memory_alloc(n, sizeof(*row->positions));
    row->doc_of = memory_alloc(n, sizeof(*row->doc_of));
    row->loss_mask = memory_alloc(n, sizeof(*row->loss_mask));
    row->doc_offsets = memory_alloc(n + 1, sizeof(*row->doc_offsets));
    row->doc_ids = memory_alloc(n, sizeof(*row->doc_ids));
    row->docs = memory_alloc(n, sizeof(*row->docs));
    row->blank = memory_alloc(n, sizeof(*row->blank));
    size_t bytes = n * (size_t)features->stride * sizeof(*row->hidden);
    row->hidden = host_alloc != NULL ? host_alloc(bytes) : malloc(bytes);
    if (row->hidden == NULL)
        die("out of host memory: %zu bytes wanted for the features of a row of %lld tokens", bytes,
            (long long)capacity);
}

void row_close(struct row *row, void (*host_free)(void *))
{
    free(row->input_ids);
    free(row->positions);
    free(row->doc_of);
    free(row->loss_mask);
    free(row->doc_offsets);
    free(row->doc_ids);
    free(row->docs);
    free(row->blank);
    if (host_free != NULL)
        host_free(row->hidden);
    else
        free(row->hidden);
    *row = (struct row){0};
}
