// Draft vocabularies: counting, choosing, the file (safetensors) and what is refused about it.
#include "data/vocab_map.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/memory.h"
#include "base/rng.h"

int vocab_map_count(const struct documents *documents, int64_t *counts, struct error *err)
{
    int64_t capacity = 1;
    for (size_t i = 0; i < documents->count; i++)
        if (documents->items[i].length > capacity)
            capacity = documents->items[i].length;
    int32_t *ids = memory_alloc((size_t)capacity, sizeof(*ids));
    uint8_t *mask = memory_alloc((size_t)capacity, sizeof(*mask));
    int result = 0;
    for (size_t i = 0; i < documents->count && result == 0; i++) {
        const struct document *item = &documents->items[i];
        const struct shard *shard = &documents->shards[item->shard];
        result = shard_read_ids(shard, item->first, item->length, ids, err);
        if (result == 0)
            result = shard_read_mask(shard, item->first, item->length, mask, err);
        for (int32_t t = 0; t < item->length && result == 0; t++)
            counts[ids[t]] += mask[t];
    }
    free(ids);
    free(mask);
    return result;
}

struct counted {
    int64_t count;
    int64_t id;
};

static int compare_counted(const void *a, const void *b)
{
    const struct counted *x = a, *y = b;
    if (x->count != y->count)
        return x->count > y->count ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

static void alloc_tables(struct vocab_map *map, int64_t vocab_size, int64_t draft_size)
{
    *map = (struct vocab_map){.vocab_size = vocab_size, .draft_size = draft_size};
    map->d2t = memory_alloc((size_t)draft_size, sizeof(*map->d2t));
    map->t2d = memory_alloc((size_t)vocab_size, sizeof(*map->t2d));
    map->draft_ids = memory_alloc((size_t)vocab_size, sizeof(*map->draft_ids));
    map->ids = memory_alloc((size_t)vocab_size, sizeof(*map->ids));
}

// draft_ids and ids from t2d. Returns how many tokens are kept.
static int64_t number_kept(struct vocab_map *map)
{
    int64_t kept = 0, other;
    for (int64_t v = 0; v < map->vocab_size; v++) {
        map->draft_ids[v] = map->t2d[v] ? (int32_t)kept : -1;
        if (map->t2d[v])
            map->ids[kept++] = (int32_t)v;
    }
    other = kept;
    for (int64_t v = 0; v < map->vocab_size; v++)
        if (!map->t2d[v])
            map->ids[other++] = (int32_t)v;
    return kept;
}

int vocab_map_make(struct vocab_map *map, const int64_t *counts, int64_t vocab_size,
                   int64_t draft_size, struct error *err)
{
    *map = (struct vocab_map){0};
    if (draft_size < 1 || draft_size > vocab_size)
        return error_set(err, "a draft vocabulary of %lld tokens: allowed are 1 to %lld",
                         (long long)draft_size, (long long)vocab_size);
    alloc_tables(map, vocab_size, draft_size);
    struct counted *order = memory_alloc((size_t)vocab_size, sizeof(*order));
    int64_t all = 0, covered = 0;
    for (int64_t v = 0; v < vocab_size; v++) {
        order[v] = (struct counted){.count = counts[v], .id = v};
        all += counts[v];
    }
    qsort(order, (size_t)vocab_size, sizeof(*order), compare_counted);
    for (int64_t i = 0; i < draft_size; i++) {
        map->t2d[order[i].id] = 1;
        covered += order[i].count;
    }
    free(order);
    number_kept(map);
    for (int64_t v = 0; v < vocab_size; v++)
        if (map->t2d[v])
            map->d2t[map->draft_ids[v]] = v - map->draft_ids[v];
    map->coverage = all > 0 ? (double)covered / (double)all : 0.0;
    return 0;
}

static int descending(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

int64_t vocab_map_coverages(const int64_t *counts, int64_t vocab_size, const int64_t *sizes,
                            int64_t size_count, double *coverages)
{
    int64_t *sorted = memory_alloc((size_t)vocab_size, sizeof(*sorted));
    int64_t all = 0, covered = 0, seen = 0, at = 0;
    memcpy(sorted, counts, (size_t)vocab_size * sizeof(*sorted));
    qsort(sorted, (size_t)vocab_size, sizeof(*sorted), descending);
    for (int64_t v = 0; v < vocab_size; v++) {
        all += sorted[v];
        seen += sorted[v] > 0;
    }
    for (int64_t i = 0; i < size_count; i++) {
        for (; at < sizes[i]; at++)
            covered += sorted[at];
        coverages[i] = all > 0 ? (double)covered / (double)all : 0.0;
    }
    free(sorted);
    return seen;
}

void vocab_map_release(struct vocab_map *map)
{
    free(map->d2t);
    free(map->t2d);
    free(map->draft_ids);
    free(map->ids);
    free(map->target_model);
    *map = (struct vocab_map){0};
}

static void add_number(struct safetensors_writer *writer, const char *key, int64_t value)
{
    char text[32];
    snprintf(text, sizeof(text), "%" PRId64, value);
    safetensors_writer_metadata(writer, key, text);
}

// With those that can not be trained on: what headers alone say.
static int64_t documents_in_shards(const struct documents *documents)
{
    int64_t count = 0;
    for (size_t i = 0; i < documents->shard_count; i++)
        count += documents->shards[i].documents;
    return count;
}

static int write_tables(struct safetensors_writer *writer, const struct vocab_map *map,
                        const struct documents *documents, struct error *err)
{
    char text[32];
    safetensors_writer_metadata(writer, "target", documents->target_model);
    add_number(writer, "vocab_size", map->vocab_size);
    add_number(writer, "draft_vocab_size", map->draft_size);
    snprintf(text, sizeof(text), "%.17g", map->coverage);
    safetensors_writer_metadata(writer, "coverage", text);
    snprintf(text, sizeof(text), "%016" PRIx64, documents->fingerprint);
    safetensors_writer_metadata(writer, "fingerprint", text);
    add_number(writer, "documents", documents_in_shards(documents));
    int d2t = safetensors_writer_add(writer, "d2t", DTYPE_I64, 1, &map->draft_size);
    int t2d = safetensors_writer_add(writer, "t2d", DTYPE_U8, 1, &map->vocab_size);
    if (safetensors_writer_begin(writer, err) != 0 ||
        safetensors_writer_write(writer, d2t, 0, map->d2t,
                                 (size_t)map->draft_size * sizeof(*map->d2t), err) != 0)
        return -1;
    return safetensors_writer_write(writer, t2d, 0, map->t2d, (size_t)map->vocab_size, err);
}

int vocab_map_write(const struct vocab_map *map, const struct documents *documents,
                    const char *path, struct error *err)
{
    struct safetensors_writer *writer = NULL;
    char *temporary = memory_format("%s.tmp", path);
    int result = safetensors_writer_open(&writer, temporary, err);
    if (result == 0) {
        bool written = write_tables(writer, map, documents, err) == 0;
        result = safetensors_writer_close(writer, written, err);
        if (!written)
            result = -1;
    }
    if (result == 0 && rename(temporary, path) != 0) {
        result = error_set(err, "%s: can not be written: %s", path, strerror(errno));
        unlink(temporary);
    }
    free(temporary);
    return result;
}

// Whether the map was made for these documents: target, vocabulary and data.
static int check_origin(const struct vocab_map *map, const struct documents *documents,
                        bool counted, const char *path, struct error *err)
{
    static const char again[] = "make one with: dtrain vocab --size N --out FILE SHARD..., where "
                                "the shards are exactly those of data.train";
    if (map->vocab_size != documents->vocab_size)
        return error_set(
            err, "%s: made for a vocabulary of %lld tokens, that of the shards has %lld; %s", path,
            (long long)map->vocab_size, (long long)documents->vocab_size, again);
    if (strcmp(map->target_model, documents->target_model) != 0)
        return error_set(err, "%s: made for target %s, the shards are of %s; %s", path,
                         map->target_model, documents->target_model, again);
    if (counted && map->fingerprint != documents->fingerprint)
        return error_set(err,
                         "%s: made from other data than is trained on (other documents, tokens, "
                         "masks or names of files): its fingerprint is %016" PRIx64
                         ", that of the data is %016" PRIx64 "; %s",
                         path, map->fingerprint, documents->fingerprint, again);
    return 0;
}

static int check_tables(struct vocab_map *map, const char *path, struct error *err)
{
    if (map->draft_size < 1)
        return error_set(err, "%s: d2t is empty; a draft vocabulary has a token at least", path);
    for (int64_t v = 0; v < map->vocab_size; v++)
        if (map->t2d[v] > 1)
            return error_set(err, "%s: t2d[%lld] is %d", path, (long long)v, map->t2d[v]);
    int64_t kept = number_kept(map);
    if (kept != map->draft_size)
        return error_set(err, "%s: t2d keeps %lld tokens, d2t has %lld", path, (long long)kept,
                         (long long)map->draft_size);
    for (int64_t v = 0; v < map->vocab_size; v++) {
        int32_t draft = map->draft_ids[v];
        if (draft >= 0 && map->d2t[draft] != v - draft)
            return error_set(err, "%s: d2t[%d] is %lld, but t2d wants %lld", path, (int)draft,
                             (long long)map->d2t[draft], (long long)(v - draft));
    }
    return 0;
}

// What the metadata says of a table's size must be that size: a file whose tables were exchanged is not this map.
static int check_size(const struct safetensors *file, const char *key, const char *table,
                      int64_t size, struct error *err)
{
    const char *text = safetensors_metadata(file, key);
    char *end = NULL;
    if (text == NULL)
        return error_set(err, "%s: metadata %s is missing", file->path, key);
    long long said = strtoll(text, &end, 10);
    if (end == text || *end != '\0' || said != size)
        return error_set(err,
                         "%s: metadata %s is \"%s\", but %s has %lld elements; make the map again "
                         "with dtrain vocab",
                         file->path, key, text, table, (long long)size);
    return 0;
}

static int read_metadata(struct vocab_map *map, const struct safetensors *file, struct error *err)
{
    if (check_size(file, "vocab_size", "t2d", map->vocab_size, err) != 0 ||
        check_size(file, "draft_vocab_size", "d2t", map->draft_size, err) != 0)
        return -1;
    const char *target = safetensors_metadata(file, "target");
    const char *fingerprint = safetensors_metadata(file, "fingerprint");
    const char *coverage = safetensors_metadata(file, "coverage");
    char *end = NULL;
    if (target == NULL || fingerprint == NULL || coverage == NULL)
        return error_set(err, "%s: metadata %s is missing", file->path,
                         target == NULL        ? "target"
                         : fingerprint == NULL ? "fingerprint"
                                               : "coverage");
    map->target_model = memory_strdup(target);
    map->coverage = strtod(coverage, &end);
    if (end == coverage || *end != '\0' || !(map->coverage >= 0.0 && map->coverage <= 1.0))
        return error_set(err, "%s: metadata coverage is \"%s\", not a share from 0 to 1",
                         file->path, coverage);
    map->fingerprint = strtoull(fingerprint, &end, 16);
    if (end == fingerprint || *end != '\0')
        return error_set(err, "%s: fingerprint is not a hexadecimal number", file->path);
    return 0;
}

int vocab_map_tables(struct vocab_map *map, const struct safetensors *file, struct error *err)
{
    static const int64_t any = -1;
    const struct safetensors_entry *members = safetensors_find(file, "t2d");
    bool is_bool = members != NULL && strcmp(members->dtype, "BOOL") == 0;
    *map = (struct vocab_map){0};
    const struct safetensors_entry *d2t = safetensors_get(file, "d2t", "I64", 1, &any, err);
    const struct safetensors_entry *t2d =
        d2t != NULL ? safetensors_get(file, "t2d", is_bool ? "BOOL" : "U8", 1, &any, err) : NULL;
    if (d2t == NULL || t2d == NULL)
        return -1;
    alloc_tables(map, t2d->shape[0], d2t->shape[0]);
    memcpy(map->d2t, d2t->bytes, d2t->size);
    memcpy(map->t2d, t2d->bytes, t2d->size);
    return check_tables(map, file->path, err);
}

int vocab_map_read(struct vocab_map *map, const struct documents *documents, bool counted,
                   const char *path, struct error *err)
{
    struct safetensors file;
    *map = (struct vocab_map){0};
    if (safetensors_open(&file, path, err) != 0)
        return -1;
    int result = vocab_map_tables(map, &file, err);
    if (result == 0)
        result = read_metadata(map, &file, err);
    if (result == 0)
        result = check_origin(map, documents, counted, path, err);
    if (result != 0)
        vocab_map_release(map);
    safetensors_close(&file);
    return result;
}

int64_t vocab_map_documents(const struct safetensors *file)
{
    const char *text = safetensors_metadata(file, "documents");
    return text != NULL ? strtoll(text, NULL, 10) : 0;
}

uint64_t vocab_map_hash(const struct vocab_map *map)
{
    uint64_t hash = rng_mix((uint64_t)map->vocab_size, (uint64_t)map->draft_size);
    for (int64_t i = 0; i < map->draft_size; i++)
        hash = rng_mix(hash, (uint64_t)map->ids[i]);
    return hash;
}
