// Owns the list of documents that a data set gives: who is in, who was left out and why. Reads ids
// and masks, never features.
#include "data/documents.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "data/check.h"
#include "data/id_table.h"
#include "data/shard_probe.h"
#include "data/shard_scan.h"

enum {
    FAULT_LINES = 50,
    FAULT_SPARE = 64,       // bytes kept for "and N more"
    DROPPED_LINES = 10,     // documents left out that are named in the log
    PIECE_TOKENS = 1 << 20, // ids and masks read at once
};

// Every fault of the data set as a line, up to a bound.
struct faults {
    struct error text;
    int lines;
    long long more;
};

static void faults_add(struct faults *faults, const char *lines)
{
    while (*lines != '\0') {
        size_t length = strcspn(lines, "\n");
        bool room = faults->more == 0 && faults->lines < FAULT_LINES &&
                    strlen(faults->text.text) + length + FAULT_SPARE < sizeof(faults->text.text);
        if (room) {
            error_add(&faults->text, "%.*s", (int)length, lines);
            faults->lines++;
        } else {
            faults->more++;
        }
        lines += length + (lines[length] == '\n');
    }
}

static int faults_result(struct faults *faults, struct error *err)
{
    if (faults->lines == 0 && faults->more == 0)
        return 0;
    if (faults->more > 0)
        error_add(&faults->text, "and %lld more", faults->more);
    *err = faults->text;
    return -1;
}

// A data set while it is opened.
struct opening {
    struct documents *documents;
    struct faults faults;
    struct id_table ids;
    int64_t seq_len;
    int on_bad_sample;
    size_t capacity; // of documents->items
    int64_t all_documents, all_tokens;
    int64_t dropped_told;
    // ids and masks of the documents at hand
    int32_t *piece_ids;
    uint8_t *piece_mask;
    int64_t piece_capacity;
};

static uint64_t fingerprint_bytes(uint64_t hash, const void *bytes, size_t size)
{
    const unsigned char *at = bytes;
    for (; size >= 8; size -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        hash ^= word * 0x9e3779b97f4a7c15u;
        hash = (hash << 29 | hash >> 35) * 0xbf58476d1ce4e5b9u;
    }
    uint64_t rest = size + 1;
    for (; size > 0; size--, at++)
        rest = rest << 8 | *at;
    hash ^= rest * 0x9e3779b97f4a7c15u;
    return (hash << 29 | hash >> 35) * 0xbf58476d1ce4e5b9u;
}

static void drop_bad(struct opening *opening, const char *words)
{
    opening->documents->dropped_bad++;
    if (opening->dropped_told++ < DROPPED_LINES)
        log_warn("left out: %s%s", words,
                 opening->dropped_told == DROPPED_LINES ? " (further ones are only counted)" : "");
}

// A document that can not be trained on because of its bytes: left out or a fault. Returns whether.
static bool is_bad(struct opening *opening, const struct shard *shard, int64_t document,
                   const struct verdict *verdict, const int32_t *ids, const uint8_t *mask)
{
    struct error found = {""};
    if (verdict->present && verdict->bad[document]) {
        verdict_lines(verdict, shard, document, &found);
    } else {
        int64_t length = shard->doc_offsets[document + 1] - shard->doc_offsets[document];
        if (shard_check_tokens(shard, document, length, ids, mask, &found) == 0)
            return false;
    }
    if (opening->on_bad_sample == BAD_SAMPLE_SKIP)
        drop_bad(opening, found.text);
    else
        faults_add(&opening->faults, found.text);
    return true;
}

static void check_duplicate(struct opening *opening, size_t shard, int64_t document)
{
    const struct shard *shards = opening->documents->shards;
    uint64_t id = shards[shard].doc_ids[document];
    const struct id_place *first = id_table_add(&opening->ids, id, shard, document);
    if (first == NULL)
        return;
    struct error found = {""};
    error_set(
        &found, "%s: document %lld: doc_id %llu is also that of document %d of %s%s",
        shards[shard].path, (long long)document, (unsigned long long)id, (int)first->document,
        shards[first->shard].path,
        shards[shard].has_doc_ids
            ? ""
            : " (made from the file's name, since there is no dataset doc_id: rename a file)");
    faults_add(&opening->faults, found.text);
}

// ids and mask: of the whole document.
static void add_document(struct opening *opening, size_t index, int64_t document,
                         const struct verdict *verdict, const int32_t *ids, const uint8_t *mask)
{
    struct documents *documents = opening->documents;
    const struct shard *shard = &documents->shards[index];
    int64_t first = shard->doc_offsets[document];
    int64_t full = shard->doc_offsets[document + 1] - first;
    uint64_t facts[2] = {shard->doc_ids[document], (uint64_t)full};
    uint64_t hash = fingerprint_bytes(documents->fingerprint, facts, sizeof(facts));
    hash = fingerprint_bytes(hash, ids, (size_t)full * sizeof(*ids));
    documents->fingerprint = fingerprint_bytes(hash, mask, (size_t)full);

    check_duplicate(opening, index, document);
    if (is_bad(opening, shard, document, verdict, ids, mask))
        return;
    int64_t length = full < opening->seq_len ? full : opening->seq_len;
    int64_t supervised = 0;
    for (int64_t i = 0; i < length; i++)
        supervised += mask[i];
    if (supervised == 0) {
        documents->dropped_unsupervised++;
        return;
    }
    uint64_t kept[2] = {shard->doc_ids[document], (uint64_t)length};
    documents->kept_fingerprint =
        fingerprint_bytes(documents->kept_fingerprint, kept, sizeof(kept));
    documents->cut += length < full;
    documents->tokens += length;
    documents->supervised += supervised;
    documents->items[documents->count++] = (struct document){.id = shard->doc_ids[document],
                                                             .first = first,
                                                             .shard = (int32_t)index,
                                                             .index = (int32_t)document,
                                                             .length = (int32_t)length,
                                                             .full_length = (int32_t)full,
                                                             .supervised = (int32_t)supervised};
}

// Documents [first, result) whose tokens are read together: as many as fit a piece, at least one.
static int64_t piece_end(const struct shard *shard, int64_t first)
{
    int64_t end = first + 1;
    while (end < shard->documents &&
           shard->doc_offsets[end + 1] - shard->doc_offsets[first] <= PIECE_TOKENS)
        end++;
    return end;
}

static void reserve_piece(struct opening *opening, int64_t tokens)
{
    if (tokens <= opening->piece_capacity)
        return;
    opening->piece_capacity = tokens > PIECE_TOKENS ? tokens : PIECE_TOKENS;
    opening->piece_ids = memory_resize(opening->piece_ids, (size_t)opening->piece_capacity,
                                       sizeof(*opening->piece_ids));
    opening->piece_mask = memory_resize(opening->piece_mask, (size_t)opening->piece_capacity,
                                        sizeof(*opening->piece_mask));
}

static void add_shard(struct opening *opening, size_t index)
{
    struct documents *documents = opening->documents;
    const struct shard *shard = &documents->shards[index];
    struct verdict verdict;
    struct error found = {""};
    opening->all_documents += shard->documents;
    opening->all_tokens += shard->tokens;
    opening->capacity += (size_t)shard->documents;
    documents->items =
        memory_resize(documents->items, opening->capacity, sizeof(*documents->items));
    if (verdict_read(&verdict, shard, &found) != 0) {
        faults_add(&opening->faults, found.text);
        return;
    }
    for (int64_t d = 0; d < shard->documents;) {
        int64_t end = piece_end(shard, d);
        int64_t first = shard->doc_offsets[d], tokens = shard->doc_offsets[end] - first;
        reserve_piece(opening, tokens);
        if (shard_read_ids(shard, first, tokens, opening->piece_ids, &found) != 0 ||
            shard_read_mask(shard, first, tokens, opening->piece_mask, &found) != 0) {
            faults_add(&opening->faults, found.text);
            break;
        }
        for (; d < end; d++) {
            int64_t at = shard->doc_offsets[d] - first;
            add_document(opening, index, d, &verdict, opening->piece_ids + at,
                         opening->piece_mask + at);
        }
    }
    verdict_release(&verdict);
}

static void open_shards(struct opening *opening, const struct config_texts *paths)
{
    struct documents *documents = opening->documents;
    documents->shards = memory_alloc(paths->count, sizeof(*documents->shards));
    char **damaged = shard_probe((const char *const *)paths->items, paths->count);
    for (size_t i = 0; i < paths->count; i++) {
        struct error found = {""};
        struct shard *shard = &documents->shards[documents->shard_count];
        if (shard_open_probed(shard, paths->items[i], damaged[i], &found) != 0) {
            faults_add(&opening->faults, found.text);
            continue;
        }
        documents->shard_count++;
        if (shard_compare(&documents->shards[0], shard, &found) != 0)
            faults_add(&opening->faults, found.text);
    }
    shard_probe_free(damaged, paths->count);
}

static void take_common_facts(struct documents *documents)
{
    const struct shard *first = &documents->shards[0];
    documents->hidden_size = first->hidden_size;
    documents->vocab_size = first->vocab_size;
    documents->planes = first->planes;
    documents->features = first->features;
    documents->shard_layers = first->layers;
    documents->last_hidden = first->last_hidden;
    documents->target_model = memory_strdup(first->target_model);
    documents->layer_ids = memory_alloc((size_t)first->layers, sizeof(*documents->layer_ids));
    memcpy(documents->layer_ids, first->layer_ids,
           (size_t)first->layers * sizeof(*documents->layer_ids));
}

static void warn_of_made_ids(const struct documents *documents)
{
    size_t without = 0, example = 0;
    for (size_t i = 0; i < documents->shard_count; i++)
        if (!documents->shards[i].has_doc_ids && without++ == 0)
            example = i;
    if (without > 0)
        log_warn(
            "%zu of %zu shards have no doc_id (the first: %s): ids are made from file name and "
            "index, so renamed or regrouped files give other anchors and another order",
            without, documents->shard_count, documents->shards[example].path);
}

static int check_any(const struct opening *opening, struct error *err)
{
    const struct documents *documents = opening->documents;
    if (documents->count > 0)
        return 0;
    char cut[96] = "";
    if (opening->seq_len < INT32_MAX) // else nobody cuts
        snprintf(cut, sizeof(cut),
                 " among their first %lld (data.seq_len, by which documents are cut)",
                 (long long)opening->seq_len);
    return error_set(err,
                     "no supervised token in the data set: of %lld documents (%lld tokens), %lld "
                     "have no token with loss_mask 1%s, %lld are bad",
                     (long long)opening->all_documents, (long long)opening->all_tokens,
                     (long long)documents->dropped_unsupervised, cut,
                     (long long)documents->dropped_bad);
}

static void open_manifest(struct opening *opening, const char *path)
{
    struct documents *documents = opening->documents;
    struct error found = {""};
    documents->shards = memory_alloc(1, sizeof(*documents->shards));
    char **damaged = shard_probe_manifest(path);
    if (shard_open_manifest_probed(&documents->shards[0], path, damaged[0], &found) == 0)
        documents->shard_count = 1;
    else
        faults_add(&opening->faults, found.text);
    shard_probe_free(damaged, 1);
}

// What the files that are open hold. Ends the opening.
static int take_documents(struct opening *opening, struct error *err)
{
    struct documents *documents = opening->documents;
    id_table_init(&opening->ids);
    for (size_t i = 0; i < documents->shard_count; i++)
        add_shard(opening, i);
    int result = faults_result(&opening->faults, err);
    if (result == 0)
        result = check_any(opening, err);
    if (result == 0) {
        take_common_facts(documents);
        warn_of_made_ids(documents);
    } else {
        documents_close(documents);
    }
    id_table_release(&opening->ids);
    free(opening->piece_ids);
    free(opening->piece_mask);
    return result;
}

int documents_open(struct documents *documents, const struct config_texts *paths, int64_t seq_len,
                   int on_bad_sample, struct error *err)
{
    *documents = (struct documents){.shards = NULL};
    if (paths->count == 0)
        return error_set(err, "no shards were given");
    struct opening opening = {
        .documents = documents, .seq_len = seq_len, .on_bad_sample = on_bad_sample};
    open_shards(&opening, paths);
    return take_documents(&opening, err);
}

int documents_open_manifest(struct documents *documents, const char *path, int64_t seq_len,
                            int on_bad_sample, struct error *err)
{
    *documents = (struct documents){.shards = NULL};
    struct opening opening = {
        .documents = documents, .seq_len = seq_len, .on_bad_sample = on_bad_sample};
    open_manifest(&opening, path);
    return take_documents(&opening, err);
}

void documents_close(struct documents *documents)
{
    for (size_t i = 0; i < documents->shard_count; i++)
        shard_close(&documents->shards[i]);
    free(documents->shards);
    free(documents->items);
    free(documents->layer_ids);
    free(documents->target_model);
    *documents = (struct documents){.shards = NULL};
}

static int64_t plane_of_layer(const struct documents *documents, int64_t layer)
{
    for (int64_t p = 0; p < documents->shard_layers; p++)
        if (documents->layer_ids[p] == layer)
            return p;
    return -1;
}

static void list_layers(const struct documents *documents, char *text, size_t size)
{
    size_t at = 0;
    text[0] = '\0';
    for (int64_t p = 0; p < documents->shard_layers && at + 24 < size; p++)
        at += (size_t)snprintf(text + at, size - at, "%s%lld", p > 0 ? ", " : "",
                               (long long)documents->layer_ids[p]);
}

// The shards' own ids against the target: an id beyond its layers means another numbering.
static int check_shard_layers(const struct documents *documents, int64_t target_layers,
                              struct error *err)
{
    int64_t highest = documents->layer_ids[documents->shard_layers - 1];
    if (highest < target_layers)
        return 0;
    return error_add(err,
                     "%s: target_layer_ids holds %lld, but the target has %lld layers (0 to %lld); "
                     "vLLM's numbering is one higher than the shards'",
                     documents->shards[0].path, (long long)highest, (long long)target_layers,
                     (long long)(target_layers - 1));
}

// One id of the config. before: the id before it, or -1.
static int check_layer(const struct documents *documents, int64_t layer, int64_t before,
                       bool has_before, int64_t target_layers, struct error *err)
{
    if (layer < 0 || layer >= target_layers)
        return error_add(err, "target.layer_ids: %lld is not a layer of the target (0 to %lld)",
                         (long long)layer, (long long)(target_layers - 1));
    if (has_before && layer == before)
        return error_add(err, "target.layer_ids: %lld is given twice", (long long)layer);
    if (has_before && layer < before)
        return error_add(
            err,
            "target.layer_ids: %lld comes after %lld; the order must be ascending, as in "
            "the shards",
            (long long)layer, (long long)before);
    if (plane_of_layer(documents, layer) < 0) {
        char stored[512];
        list_layers(documents, stored, sizeof(stored));
        return error_add(err, "target.layer_ids: layer %lld is not in the shards, which hold %s",
                         (long long)layer, stored);
    }
    return 0;
}

int documents_select_planes(const struct documents *documents, const struct config_ints *layer_ids,
                            int64_t target_layers, int32_t *plane, int64_t capacity,
                            int64_t *layers, int32_t *last_plane, struct error *err)
{
    struct error found = {""};
    bool all = layer_ids == NULL || layer_ids->count == 0;
    int64_t count = all ? documents->shard_layers : (int64_t)layer_ids->count;
    const int64_t *ids = all ? documents->layer_ids : layer_ids->items;
    int result = check_shard_layers(documents, target_layers, &found);
    if (count > capacity)
        result = error_add(&found, "target.layer_ids: %lld layers; at most %lld are possible",
                           (long long)count, (long long)capacity);
    for (int64_t i = 0; i < count && !all; i++)
        result |=
            check_layer(documents, ids[i], i > 0 ? ids[i - 1] : -1, i > 0, target_layers, &found);
    if (result != 0) {
        *err = found;
        return -1;
    }
    for (int64_t i = 0; i < count; i++)
        plane[i] = (int32_t)plane_of_layer(documents, ids[i]);
    *layers = count;
    *last_plane =
        documents->last_hidden == LAST_HIDDEN_ABSENT ? -1 : (int32_t)documents->planes - 1;
    return 0;
}
