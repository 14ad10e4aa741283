// Owns where a tensor's state lies. Does not own the memory.
#include "trainer/state_layout.h"

#include "base/log.h"
#include "trainer/update_rule.h"

bool state_exists(const struct state_layout *layout, enum state_array array)
{
    return array != STATE_EMA || (layout->optimizer != NULL && layout->optimizer->ema > 0.0);
}

static bool in_array(const struct state_layout *layout, enum state_array array, size_t param)
{
    if (!state_exists(layout, array))
        return false;
    return array != STATE_V || layout->optimizer == NULL ||
           !update_is_muon(layout->optimizer, &layout->params->items[param]);
}

bool state_has(const struct state_layout *layout, enum state_array array, size_t param)
{
    return ownership_mine(layout->ownership, param) && in_array(layout, array, param);
}

// Whether some tensors are not in the array, so that the others move together.
static bool has_gaps(const struct state_layout *layout, enum state_array array)
{
    return array == STATE_V && layout->optimizer != NULL &&
           layout->optimizer->kind == OPTIMIZER_MUON;
}

static int64_t aligned(int64_t elements)
{
    return (elements + PARAM_ALIGNMENT - 1) / PARAM_ALIGNMENT * PARAM_ALIGNMENT;
}

// Elements that the tensors before `end` take in the array of a rank.
static int64_t moved_together(const struct state_layout *layout, enum state_array array, int rank,
                              size_t end)
{
    int64_t elements = 0;
    for (size_t i = 0; i < end; i++) {
        bool owned = !ownership_shared(layout->ownership) || layout->ownership->owner[i] == rank;
        if (owned && in_array(layout, array, i))
            elements += aligned(layout->params->items[i].count);
    }
    return elements;
}

static int own_rank(const struct state_layout *layout)
{
    return ownership_shared(layout->ownership) ? layout->ownership->rank : 0;
}

int64_t state_offset(const struct state_layout *layout, enum state_array array, size_t param)
{
    BUG_UNLESS(state_has(layout, array, param));
    if (has_gaps(layout, array))
        return moved_together(layout, array, own_rank(layout), param);
    return ownership_offset(layout->ownership, layout->params, param);
}

static int64_t elements_of(const struct state_layout *layout, enum state_array array, int rank)
{
    int64_t elements = layout->params->elements;
    if (!state_exists(layout, array))
        return 0;
    if (has_gaps(layout, array))
        elements = moved_together(layout, array, rank, layout->params->count);
    else if (ownership_shared(layout->ownership))
        elements = layout->ownership->elements[rank];
    return elements > 0 ? elements : 1;
}

int64_t state_elements(const struct state_layout *layout, enum state_array array)
{
    return elements_of(layout, array, own_rank(layout));
}

size_t state_bytes(const struct state_layout *layout, enum state_array array)
{
    return (size_t)state_elements(layout, array) * sizeof(float);
}

size_t state_most_bytes(const struct state_layout *layout, int arrays, size_t unit)
{
    int ranks = ownership_shared(layout->ownership) ? layout->ownership->ranks : 1;
    size_t most = 0;
    for (int rank = 0; rank < ranks; rank++) {
        size_t bytes = 0;
        for (int a = 0; a < arrays; a++) {
            size_t one = (size_t)elements_of(layout, a, rank) * sizeof(float);
            bytes += (one + unit - 1) / unit * unit;
        }
        most = bytes > most ? bytes : most;
    }
    return most;
}
