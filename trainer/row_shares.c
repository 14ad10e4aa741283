// Owns the spreading of rows over ranks and the estimate of their work.
#include "trainer/row_shares.h"

#include <stdlib.h>

#include "base/log.h"
#include "base/memory.h"

struct row_work row_work_of(const struct drafter_sizes *sizes, const struct params *params,
                            bool whole_teacher)
{
    double layers = (double)sizes->layers, hidden = (double)sizes->hidden;
    double kv = (double)(sizes->kv_heads * sizes->head_dim);
    double q = (double)(sizes->heads * sizes->head_dim), fc = 0.0, all = 0.0;
    // A Markov head's rows of w1 are looked up; w2 is multiplied with once a slot, like the head.
    double markov = (double)(sizes->markov_rank * sizes->draft_vocab);
    for (size_t i = 0; i < params->count; i++) {
        if (drafter_is_markov(&params->items[i]))
            continue;
        all += (double)params->items[i].count;
        fc += params->items[i].part == 0 ? (double)params->items[i].count : 0.0;
    }
    if (sizes->kind ==
        DRAFTER_EAGLE3) { // the head, and the embedding's half of the first layer, which comes once a token
        double half = hidden * (q + 2.0 * kv), head = hidden * (double)sizes->draft_vocab;
        double step = all - fc - half - (sizes->trainable_head ? head : 0.0);
        double teacher = (double)(whole_teacher ? sizes->vocab : sizes->draft_vocab);
        double block = (double)sizes->block_size * (6.0 * step + 4.0 * head + 6.0 * markov);
        return (struct row_work){.token = 6.0 * (fc + half + layers * 2.0 * kv * hidden),
                                 .block = block + 2.0 * hidden * teacher,
                                 .visible = 14.0 * layers * q * (double)sizes->block_size};
    }
    // Forward and backward of a product are 6 operations a weight; student logits, their gradient and at
    // most as many teacher logits are 6 for each value of the head.
    double row = 6.0 * (all - fc + markov) + 6.0 * hidden * (double)sizes->vocab;
    return (struct row_work){.token = 6.0 * (fc + layers * 2.0 * kv * hidden),
                             .block = row * (double)sizes->block_size,
                             .visible = 14.0 * layers * q * (double)sizes->block_size};
}

static int64_t at_most(int64_t value, int64_t most)
{
    return most > 0 && value > most ? most : value;
}

double row_work_estimate(const struct row_work *work, const struct documents *documents,
                         const struct packing *packing, int64_t row)
{
    double tokens = 0.0, anchors = 0.0, seen = 0.0;
    for (int64_t d = packing->row_offsets[row]; d < packing->row_offsets[row + 1]; d++) {
        const struct document *document = &documents->items[packing->document[d]];
        double own = (double)at_most(document->supervised, work->most_per_document);
        tokens += (double)document->length;
        anchors += own;
        seen += own * 0.5 * (double)document->length; // anchors lie anywhere in it
    }
    double drawn = (double)at_most((int64_t)anchors, work->most_per_row);
    if (anchors > 0.0)
        seen *= drawn / anchors;
    return work->token * tokens + work->block * drawn + work->visible * seen;
}

struct costly {
    double work;
    int64_t row;
};

static int costly_first(const void *left, const void *right)
{
    const struct costly *a = left, *b = right;
    if (a->work < b->work || a->work > b->work)
        return a->work > b->work ? -1 : 1;
    return (a->row > b->row) - (a->row < b->row);
}

static int least_busy(const double *busy, int ranks)
{
    int least = 0;
    for (int r = 1; r < ranks; r++)
        least = busy[r] < busy[least] ? r : least;
    return least;
}

void row_shares_make(struct row_shares *shares, const struct packing *packing,
                     const struct documents *documents, const struct row_work *work,
                     int64_t rows_per_step, int ranks)
{
    BUG_UNLESS(ranks > 0 && rows_per_step > 0);
    int64_t most = rows_per_step < packing->rows ? rows_per_step : packing->rows;
    struct costly *order = memory_alloc((size_t)most + 1, sizeof(*order));
    double *busy = memory_alloc((size_t)ranks, sizeof(*busy));
    shares->rows = packing->rows;
    shares->owner = memory_alloc((size_t)packing->rows + 1, sizeof(*shares->owner));
    for (int64_t begin = 0; begin < packing->rows; begin += most) {
        int64_t count = packing->rows - begin < most ? packing->rows - begin : most;
        for (int64_t i = 0; i < count; i++)
            order[i] =
                (struct costly){row_work_estimate(work, documents, packing, begin + i), begin + i};
        qsort(order, (size_t)count, sizeof(*order), costly_first);
        for (int r = 0; r < ranks; r++)
            busy[r] = 0.0;
        for (int64_t i = 0; i < count; i++) {
            int rank = least_busy(busy, ranks);
            shares->owner[order[i].row] = rank;
            busy[rank] += order[i].work;
        }
    }
    free(busy);
    free(order);
}

void row_shares_release(struct row_shares *shares)
{
    free(shares->owner);
    *shares = (struct row_shares){.owner = NULL};
}

int64_t row_shares_count(const struct row_shares *shares, int rank, int64_t begin, int64_t end)
{
    int64_t count = 0;
    BUG_UNLESS(end <= shares->rows);
    for (int64_t r = begin; r < end; r++)
        count += shares->owner[r] == rank;
    return count;
}
