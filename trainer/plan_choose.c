// Owns the ladder of ever thriftier cuts: what a config leaves open is cut smaller or computed
// again until the step fits.
#include <stdio.h>
#include <string.h>

#include "trainer/plan.h"

enum { LEAST_CHUNK = 64 };

// Halvings of the first choice, and whether whole layers are computed again. Smaller chunks cost some
// teacher rows twice; smaller groups read and write the weight gradients more often, about 1 % of a step
// for each halving at first; computing layers again costs a third of their time.
static const struct rung {
    int chunk, group;
    bool layer;
} rungs[] = {
    {0, 0, false}, // cheap recomputation alone, where nothing was computed again
    {1, 0, false}, {1, 1, false}, {2, 1, false}, {2, 2, false}, {1, 1, true},
    {2, 2, true},  {3, 3, true},  {4, 4, true},  {5, 5, true},  {6, 6, true},
};

static int64_t halved(int64_t value, int times, int64_t multiple, int64_t least)
{
    int64_t result = (value >> times) / multiple * multiple;
    return result > least ? result : least < value ? least : value;
}

static void apply(struct plan_cut *cut, const struct plan_cut *first, const struct config *config,
                  int64_t block_size, const struct rung *rung)
{
    *cut = *first;
    if (config->memory.chunk_rows == 0)
        cut->chunk_rows = halved(first->chunk_rows, rung->chunk, 1, LEAST_CHUNK);
    if (config->memory.group_rows == 0)
        cut->group_rows = halved(first->group_rows, rung->group, block_size, block_size);
    if (config->memory.recompute != RECOMPUTE_AUTO)
        return;
    if (rung->layer)
        snprintf(cut->recompute, sizeof(cut->recompute), "layer");
    else if (strcmp(first->recompute, "none") == 0)
        snprintf(cut->recompute, sizeof(cut->recompute), "cheap");
}

struct plan_cut plan_cut_of(const struct execution *execution)
{
    struct plan_cut cut = {.group_rows = execution->group_rows,
                           .chunk_rows = execution->chunk_rows};
    memcpy(cut.recompute, execution->recompute, sizeof(cut.recompute));
    return cut;
}

bool plan_cut_equal(const struct plan_cut *a, const struct plan_cut *b)
{
    return a->group_rows == b->group_rows && a->chunk_rows == b->chunk_rows &&
           strcmp(a->recompute, b->recompute) == 0;
}

bool plan_thriftier(struct plan_cut *cut, const struct plan_cut *first, const struct config *config,
                    int64_t block_size, size_t *rung)
{
    struct plan_cut before = *cut;
    while (*rung < sizeof(rungs) / sizeof(*rungs)) {
        apply(cut, first, config, block_size, &rungs[(*rung)++]);
        if (!plan_cut_equal(cut, &before))
            return true;
    }
    *cut = before;
    return false;
}
