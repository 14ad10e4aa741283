// Owns the order of documents in an epoch and which of them share a row. Knows nothing of features,
// ranks or steps.
#include "data/packing.h"

#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/rng.h"

// Rows that are open at once. More fill rows better and cost time linearly; 64 leave less than a
// percent unfilled for conversations that are short beside the row.
enum { OPEN_ROWS = 64 };

struct order_key {
    uint64_t key;
    int32_t document;
};

static int compare_order(const void *left, const void *right)
{
    const struct order_key *a = left, *b = right;
    if (a->key != b->key)
        return a->key < b->key ? -1 : 1;
    return (a->document > b->document) - (a->document < b->document);
}

// order: [documents->count]
static void permute(const struct documents *documents, uint64_t seed, uint64_t epoch,
                    int32_t *order)
{
    struct order_key *keys = memory_alloc(documents->count, sizeof(*keys));
    for (size_t i = 0; i < documents->count; i++) {
        struct rng_key stream = rng_key_make(seed, epoch, documents->items[i].id, RNG_ORDER);
        keys[i] = (struct order_key){rng_u64(stream, 0), (int32_t)i};
    }
    qsort(keys, documents->count, sizeof(*keys), compare_order);
    for (size_t i = 0; i < documents->count; i++)
        order[i] = keys[i].document;
    free(keys);
}

// Rows that still take documents, in order of opening.
struct open_rows {
    int64_t row[OPEN_ROWS];
    int64_t room[OPEN_ROWS];
    int count;
};

// The open row that `length` fills best, the oldest of equals; -1: it fits in none.
static int best_fit(const struct open_rows *open, int64_t length)
{
    int best = -1;
    for (int i = 0; i < open->count; i++) {
        if (open->room[i] >= length && (best < 0 || open->room[i] < open->room[best]))
            best = i;
    }
    return best;
}

static void close_row(struct open_rows *open, int which)
{
    open->count--;
    for (int i = which; i < open->count; i++) {
        open->row[i] = open->row[i + 1];
        open->room[i] = open->room[i + 1];
    }
}

// Opens a row; the fullest one gives way when there are too many.
static int open_row(struct open_rows *open, int64_t row, int64_t seq_len)
{
    if (open->count == OPEN_ROWS)
        close_row(open, best_fit(open, 0));
    open->row[open->count] = row;
    open->room[open->count] = seq_len;
    return open->count++;
}

// Row of each document, rows numbered as they are opened. Returns the number of rows.
static int64_t assign_rows(const struct documents *documents, const int32_t *order, int64_t seq_len,
                           int64_t *row_of)
{
    struct open_rows open = {.count = 0};
    int64_t rows = 0;
    for (size_t i = 0; i < documents->count; i++) {
        int64_t length = documents->items[order[i]].length;
        BUG_UNLESS(length > 0 && length <= seq_len);
        int which = best_fit(&open, length);
        if (which < 0)
            which = open_row(&open, rows++, seq_len);
        row_of[order[i]] = open.row[which];
        open.room[which] -= length;
        if (open.room[which] == 0)
            close_row(&open, which);
    }
    return rows;
}

void packing_make(struct packing *packing, const struct documents *documents, int64_t seq_len,
                  uint64_t seed, uint64_t epoch, bool shuffle)
{
    size_t count = documents->count;
    BUG_UNLESS(count <= INT32_MAX);
    int32_t *order = memory_alloc(count, sizeof(*order));
    int64_t *row_of = memory_alloc(count, sizeof(*row_of));
    for (size_t i = 0; i < count; i++)
        order[i] = (int32_t)i;
    if (shuffle)
        permute(documents, seed, epoch, order);

    *packing = (struct packing){.rows = assign_rows(documents, order, seq_len, row_of)};
    packing->document = memory_alloc(count, sizeof(*packing->document));
    packing->row_offsets = memory_alloc((size_t)packing->rows + 1, sizeof(*packing->row_offsets));
    // Counting sort by row; inside a row documents keep the order of the permutation. While placing,
    // row_offsets[r] is where row r's next document goes, which ends as the start of row r + 1.
    int64_t *next = packing->row_offsets;
    for (size_t i = 0; i < count; i++)
        next[row_of[i]]++;
    for (int64_t r = 0, begin = 0; r <= packing->rows; r++) {
        int64_t inside = next[r];
        next[r] = begin;
        begin += inside;
    }
    for (size_t i = 0; i < count; i++) {
        packing->document[next[row_of[order[i]]]++] = order[i];
        packing->tokens += documents->items[i].length;
    }
    for (int64_t r = packing->rows; r > 0; r--)
        next[r] = next[r - 1];
    next[0] = 0;
    packing->row_places = memory_alloc((size_t)packing->rows + 1, sizeof(*packing->row_places));
    memcpy(packing->row_places, next, (size_t)packing->rows * sizeof(*next));
    free(order);
    free(row_of);
}

void packing_keep(struct packing *packing, const int32_t *owner, int32_t keep)
{
    int64_t rows = 0, documents = 0;
    for (int64_t r = 0; r < packing->rows; r++) {
        int64_t begin = packing->row_offsets[r], end = packing->row_offsets[r + 1];
        if (owner[r] != keep)
            continue;
        for (int64_t d = begin; d < end; d++)
            packing->document[documents + d - begin] = packing->document[d];
        packing->row_places[rows] = packing->row_places[r];
        packing->row_offsets[rows++] = documents; // of row r at most, which has been read
        documents += end - begin;
    }
    packing->row_offsets[rows] = documents;
    packing->rows = rows;
}

void packing_release(struct packing *packing)
{
    free(packing->document);
    free(packing->row_offsets);
    free(packing->row_places);
    *packing = (struct packing){0};
}
