// Owns the table of document ids.
#include "data/id_table.h"

#include <stdlib.h>

#include "base/memory.h"
#include "base/rng.h"

enum { FIRST_CAPACITY = 1024 };

void id_table_init(struct id_table *table)
{
    *table = (struct id_table){.places = NULL};
}

void id_table_release(struct id_table *table)
{
    free(table->places);
    id_table_init(table);
}

// The place of an id, or the empty one where it belongs. Ids may be 0, 1, 2, ...: they are mixed.
static struct id_place *find(const struct id_table *table, uint64_t id)
{
    size_t at = (size_t)rng_mix(id, 0) & (table->capacity - 1);
    while (table->places[at].shard >= 0 && table->places[at].id != id)
        at = (at + 1) & (table->capacity - 1);
    return &table->places[at];
}

static void grow(struct id_table *table)
{
    struct id_table larger = {.capacity =
                                  table->capacity > 0 ? 2 * table->capacity : FIRST_CAPACITY,
                              .count = table->count};
    larger.places = memory_alloc(larger.capacity, sizeof(*larger.places));
    for (size_t i = 0; i < larger.capacity; i++)
        larger.places[i].shard = -1;
    for (size_t i = 0; i < table->capacity; i++)
        if (table->places[i].shard >= 0)
            *find(&larger, table->places[i].id) = table->places[i];
    free(table->places);
    *table = larger;
}

const struct id_place *id_table_add(struct id_table *table, uint64_t id, size_t shard,
                                    int64_t document)
{
    if (2 * (table->count + 1) > table->capacity)
        grow(table);
    struct id_place *place = find(table, id);
    if (place->shard >= 0)
        return place;
    *place = (struct id_place){.id = id, .shard = (int32_t)shard, .document = (int32_t)document};
    table->count++;
    return NULL;
}
