// Owns the making of a manifest from shards. Holds all tokens and masks in memory, 5 bytes a token, as
// training does later.
#include "data/manifest.h"

#include <stdlib.h>

#include "base/memory.h"
#include "data/id_table.h"
#include "data/shard.h"
#include "data/shard_probe.h"

struct gathered {
    struct shard *shards;
    size_t shard_count;
    struct id_table ids;
    int64_t documents, tokens;
    int64_t *doc_offsets; // [documents + 1]
    uint64_t *doc_ids;    // [documents]
    int32_t *input_ids;   // [tokens]
    uint8_t *loss_mask;   // [tokens]
};

static int open_all(struct gathered *g, const char *const *paths, size_t count, struct error *err)
{
    int result = 0;
    char **damaged = shard_probe(paths, count);
    g->shards = memory_alloc(count, sizeof(*g->shards));
    for (size_t i = 0; i < count; i++) {
        struct error found = {""};
        struct shard *shard = &g->shards[g->shard_count];
        if (shard_open_probed(shard, paths[i], damaged[i], &found) != 0) {
            result = error_add(err, "%s", found.text);
            continue;
        }
        g->shard_count++;
        g->documents += shard->documents;
        g->tokens += shard->tokens;
        result |= shard_compare(&g->shards[0], shard, err);
    }
    shard_probe_free(damaged, count);
    return result;
}

static int add_id(struct gathered *g, size_t index, int64_t document, struct error *err)
{
    const struct shard *shard = &g->shards[index];
    const struct id_place *first = id_table_add(&g->ids, shard->doc_ids[document], index, document);
    if (first == NULL)
        return 0;
    return error_set(err, "%s: document %lld: doc_id %llu is also that of document %d of %s",
                     shard->path, (long long)document, (unsigned long long)shard->doc_ids[document],
                     (int)first->document, g->shards[first->shard].path);
}

static int gather(struct gathered *g, struct error *err)
{
    g->doc_offsets = memory_alloc((size_t)g->documents + 1, sizeof(*g->doc_offsets));
    g->doc_ids = memory_alloc((size_t)g->documents, sizeof(*g->doc_ids));
    g->input_ids = memory_alloc((size_t)g->tokens, sizeof(*g->input_ids));
    g->loss_mask = memory_alloc((size_t)g->tokens, sizeof(*g->loss_mask));
    int64_t document = 0, token = 0;
    for (size_t i = 0; i < g->shard_count; i++) {
        const struct shard *shard = &g->shards[i];
        for (int64_t d = 0; d < shard->documents; d++, document++) {
            if (add_id(g, i, d, err) != 0)
                return -1;
            g->doc_ids[document] = shard->doc_ids[d];
            g->doc_offsets[document + 1] = token + shard->doc_offsets[d + 1];
        }
        if (shard_read_ids(shard, 0, shard->tokens, g->input_ids + token, err) != 0 ||
            shard_read_mask(shard, 0, shard->tokens, g->loss_mask + token, err) != 0)
            return -1;
        token += shard->tokens;
    }
    return 0;
}

static int write_gathered(const char *path, const struct gathered *g, struct error *err)
{
    const struct shard *first = &g->shards[0];
    int32_t *layer_ids = memory_alloc((size_t)first->layers, sizeof(*layer_ids));
    for (int64_t l = 0; l < first->layers; l++)
        layer_ids[l] = (int32_t)first->layer_ids[l];
    struct shard_content content = {.manifest = true,
                                    .float8 = first->features.float8,
                                    .target_model = first->target_model,
                                    .layer_ids = layer_ids,
                                    .layers = first->layers,
                                    .planes = first->planes,
                                    .hidden_size = first->hidden_size,
                                    .vocab_size = first->vocab_size,
                                    .last_hidden = first->last_hidden,
                                    .documents = g->documents,
                                    .tokens = g->tokens,
                                    .doc_offsets = g->doc_offsets,
                                    .input_ids = g->input_ids,
                                    .loss_mask = g->loss_mask,
                                    .doc_ids = g->doc_ids};
    int result = shard_write(path, &content, err);
    free(layer_ids);
    return result;
}

int manifest_write(const char *path, const char *const *shards, size_t count, struct error *err)
{
    struct gathered g = {.shards = NULL};
    struct error found = {""};
    id_table_init(&g.ids);
    int result = open_all(&g, shards, count, &found);
    if (result == 0)
        result = gather(&g, &found);
    if (result == 0 && write_gathered(path, &g, &found) != 0)
        result = 1;
    if (result != 0)
        *err = found;
    for (size_t i = 0; i < g.shard_count; i++)
        shard_close(&g.shards[i]);
    free(g.shards);
    free(g.loss_mask);
    free(g.input_ids);
    free(g.doc_ids);
    free(g.doc_offsets);
    id_table_release(&g.ids);
    return result;
}
