// Owns the division of tensors among ranks. Does not own memory that the offsets point into.
#include "trainer/ownership.h"

#include <stdlib.h>

#include "base/log.h"
#include "base/memory.h"

struct item {
    int64_t count;
    size_t param;
};

static int largest_first(const void *left, const void *right)
{
    const struct item *a = left, *b = right;
    if (a->count != b->count)
        return a->count > b->count ? -1 : 1;
    return (a->param > b->param) - (a->param < b->param);
}

// in_part: elements of a part that each rank has, [parts, ranks]
static int rank_with_least(int ranks, const int64_t *owned, const int64_t *in_part)
{
    int least = 0;
    for (int r = 1; r < ranks; r++)
        if (owned[r] < owned[least] || (owned[r] == owned[least] && in_part[r] < in_part[least]))
            least = r;
    return least;
}

static void give_tensors(struct ownership *o)
{
    size_t count = o->params->count;
    int parts = o->params->parts > 0 ? o->params->parts : 1;
    struct item *items = memory_alloc(count, sizeof(*items));
    int64_t *owned = memory_alloc((size_t)o->ranks, sizeof(*owned));
    int64_t *in_parts = memory_alloc((size_t)o->ranks * (size_t)parts, sizeof(*in_parts));
    for (size_t i = 0; i < count; i++)
        items[i] = (struct item){o->params->items[i].count, i};
    qsort(items, count, sizeof(*items), largest_first);
    for (size_t i = 0; i < count; i++) {
        const struct param *param = &o->params->items[items[i].param];
        int64_t *in_part = in_parts + (size_t)param->part * (size_t)o->ranks;
        int rank = rank_with_least(o->ranks, owned, in_part);
        o->owner[items[i].param] = rank;
        owned[rank] += param->count;
        in_part[rank] += param->count;
    }
    free(in_parts);
    free(owned);
    free(items);
}

void ownership_open(struct ownership *o, const struct params *params, int ranks, int rank)
{
    BUG_UNLESS(ranks > 0 && rank >= 0 && rank < ranks);
    *o = (struct ownership){.params = params, .ranks = ranks, .rank = rank};
    o->owner = memory_alloc(params->count, sizeof(*o->owner));
    o->offset = memory_alloc(params->count, sizeof(*o->offset));
    o->elements = memory_alloc((size_t)ranks, sizeof(*o->elements));
    if (ranks > 1)
        give_tensors(o);
    for (size_t i = 0; i < params->count; i++) {
        const struct param *param = &params->items[i];
        int64_t *end = &o->elements[o->owner[i]];
        o->offset[i] = ranks == 1 ? param->offset : *end;
        *end =
            (o->offset[i] + param->count + PARAM_ALIGNMENT - 1) / PARAM_ALIGNMENT * PARAM_ALIGNMENT;
    }
}

void ownership_close(struct ownership *o)
{
    free(o->owner);
    free(o->offset);
    free(o->elements);
    *o = (struct ownership){.params = NULL};
}

bool ownership_shared(const struct ownership *o)
{
    return o != NULL && o->ranks > 1;
}

bool ownership_mine(const struct ownership *o, size_t param)
{
    return !ownership_shared(o) || o->owner[param] == o->rank;
}

int64_t ownership_offset(const struct ownership *o, const struct params *params, size_t param)
{
    BUG_UNLESS(ownership_mine(o, param));
    return ownership_shared(o) ? o->offset[param] : params->items[param].offset;
}
