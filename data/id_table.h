// Finds a document id that was met before, over all shards of a data set.
#ifndef DATA_ID_TABLE_H
#define DATA_ID_TABLE_H

#include <stddef.h>
#include <stdint.h>

struct id_place {
    uint64_t id;
    int32_t shard; // -1: empty
    int32_t document;
};

struct id_table {
    struct id_place *places; // open addressing, at most half full
    size_t capacity, count;
};

void id_table_init(struct id_table *table);
void id_table_release(struct id_table *table);
// Adds an id. Returns NULL, or where it was met first (then nothing is added). Valid until the next
// call.
const struct id_place *id_table_add(struct id_table *table, uint64_t id, size_t shard,
                                    int64_t document);

#endif
