// Owns reading the features of documents from plain shards. A spool (spool.c) is the other source
// behind the same operations.
#include "data/source.h"

#include <stdlib.h>

#include "base/memory.h"
#include "base/timer.h"
#include "data/shard.h"

static int read_from_shards(struct source *source, const struct document *document, int64_t serial,
                            int32_t *ids, uint8_t *mask, bf16 *hidden, struct error *err)
{
    (void)serial;
    const struct shard *shard = &source->documents->shards[document->shard];
    int64_t first = document->first, length = document->length;
    double start = timer_now();
    if (shard_read_ids(shard, first, length, ids, err) != 0 ||
        shard_read_mask(shard, first, length, mask, err) != 0 ||
        shard_read_hidden(shard, first, length, hidden, err) != 0)
        return -1;
    source_count_disk(source, start);
    bool check_crc = source->check_crc && document->length == document->full_length;
    if (shard_check_document(shard, document->index, length, ids, mask, hidden, check_crc, err) !=
        0)
        return SOURCE_BAD;
    return 0;
}

static void close_shards(struct source *source)
{
    free(source);
}

static const struct source_ops shard_source_ops = {"shards", read_from_shards, NULL, close_shards};

int source_open_shards(struct source **source, const struct documents *documents, bool check_crc,
                       struct error *err)
{
    if (documents->shards[0].manifest)
        return error_set(err,
                         "%s: a manifest has no features; only training reads them, through "
                         "data.spool. Give feature shards as data.train",
                         documents->shards[0].path);
    *source = memory_alloc(1, sizeof(**source));
    **source =
        (struct source){.ops = &shard_source_ops, .documents = documents, .check_crc = check_crc};
    return 0;
}

void source_close(struct source *source)
{
    if (source != NULL)
        source->ops->close(source);
}

double source_disk_seconds(const struct source *source)
{
    return 1e-9 * (double)atomic_load(&source->disk_nanoseconds);
}

void source_count_disk(struct source *source, double start)
{
    atomic_fetch_add(&source->disk_nanoseconds, (long long)(1e9 * (timer_now() - start)));
}
