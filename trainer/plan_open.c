// Owns the leniency of plans: which facts are taken from where when weights or shards are missing.
#include "trainer/plan_open.h"

#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "data/safetensors.h"
#include "data/shard_probe.h"
#include "data/vocab_map.h"
#include "trainer/files.h"

static bool has_weights(const char *path)
{
    static const char *const names[] = {"head.safetensors", "model.safetensors",
                                        "model.safetensors.index.json"};
    bool found = false;
    for (size_t i = 0; i < sizeof(names) / sizeof(*names) && !found; i++) {
        char *file = memory_format("%s/%s", path, names[i]);
        found = files_exists(file);
        free(file);
    }
    return found;
}

static int no_target(const struct config *config, struct error *err)
{
    return error_set(
        err,
        "target.path: %s is not there, and its name is not of a model whose sizes this program "
        "knows. "
        "Sizes are enough for a plan: give the model's config.json with --target-config FILE, or a "
        "file "
        "like {\"hidden_size\": 5120, \"vocab_size\": 248320, \"num_hidden_layers\": 64, "
        "\"tie_word_embeddings\": false}",
        config->target.path);
}

static int open_target(struct plan_input *input, const struct config *config,
                       const char *target_config, struct error *err)
{
    const char *path = config->target.path;
    struct target *target = &input->target;
    int status = 0;
    if (target_config != NULL || (files_is_folder(path) && !has_weights(path))) {
        const char *from = target_config != NULL ? target_config : path;
        status = target_open_sizes(target, from, err);
        if (status != 0)
            error_prefix(err, target_config != NULL ? "--target-config" : "target.path");
        snprintf(input->target_from, sizeof(input->target_from), "sizes of %s", from);
    } else if (files_is_folder(path)) {
        if (target_open(target, path, err) != 0)
            return error_prefix(err, "target.path");
        snprintf(input->target_from, sizeof(input->target_from), "%s", path);
    } else if (target_open_known(target, path)) {
        snprintf(input->target_from, sizeof(input->target_from),
                 "sizes of %s as published; %s is not there", target->path, path);
    } else {
        status = no_target(config, err);
    }
    return status;
}

// What a set of shards has in common, from the first one's header, and sums over all of them.
struct headers {
    struct shard *shards;
    size_t count;
};

static void close_headers(struct headers *headers)
{
    for (size_t i = 0; i < headers->count; i++)
        shard_close(&headers->shards[i]);
    free(headers->shards);
}

static int open_manifest_header(struct headers *headers, const char *path, struct error *err)
{
    headers->shards = memory_alloc(1, sizeof(*headers->shards));
    char **damaged = shard_probe_manifest(path);
    int result = shard_open_manifest_probed(&headers->shards[0], path, damaged[0], err);
    shard_probe_free(damaged, 1);
    if (result != 0)
        return error_prefix(err, "data.manifest");
    headers->count = 1;
    return 0;
}

static int open_headers(struct headers *headers, const struct config_texts *paths,
                        struct error *err)
{
    int faults = 0;
    char **damaged = shard_probe((const char *const *)paths->items, paths->count);
    headers->shards = memory_alloc(paths->count, sizeof(*headers->shards));
    for (size_t i = 0; i < paths->count; i++) {
        struct error found = {""};
        struct shard *shard = &headers->shards[headers->count];
        if (shard_open_probed(shard, paths->items[i], damaged[i], &found) == 0) {
            headers->count++;
            if (headers->count > 1)
                faults |= shard_compare(&headers->shards[0], shard, err);
        } else {
            faults |= error_add(err, "%s", found.text);
        }
    }
    shard_probe_free(damaged, paths->count);
    return faults != 0 ? -1 : 0;
}

// Rows of the first epoch as training packs them. Masks are not read, so that documents without a
// supervised token, which training leaves out, count.
static int64_t count_rows(const struct headers *headers, int64_t count, const struct config *config)
{
    struct documents all = {.items = memory_alloc((size_t)count, sizeof(*all.items))};
    struct packing packing;
    for (size_t i = 0; i < headers->count; i++) {
        const struct shard *shard = &headers->shards[i];
        for (int64_t n = 0; n < shard->documents; n++) {
            int64_t length = shard->doc_offsets[n + 1] - shard->doc_offsets[n];
            length = length < config->data.seq_len ? length : config->data.seq_len;
            all.items[all.count++] =
                (struct document){.id = shard->doc_ids[n], .length = (int32_t)length};
        }
    }
    packing_make(&packing, &all, config->data.seq_len, (uint64_t)config->run.seed, 0, true);
    int64_t rows = packing.rows;
    packing_release(&packing);
    free(all.items);
    return rows;
}

static void sum_documents(struct plan_documents *d, const struct headers *headers,
                          const struct config *config)
{
    int64_t seq_len = config->data.seq_len;
    double squares = 0.0;
    *d = (struct plan_documents){.shards = (int64_t)headers->count};
    for (size_t i = 0; i < headers->count; i++) {
        const struct shard *shard = &headers->shards[i];
        d->file_bytes += (double)shard->file_size;
        if (shard->manifest) // what goes through the spool in an epoch
            d->file_bytes += (double)(shard->tokens * feature_layout_file_bytes(&shard->features));
        d->documents += shard->documents;
        for (int64_t n = 0; n < shard->documents; n++) {
            int64_t length = shard->doc_offsets[n + 1] - shard->doc_offsets[n];
            length = length < seq_len ? length : seq_len;
            d->tokens += length;
            squares += (double)length * (double)length;
        }
    }
    d->mean_length = d->tokens > 0 ? squares / (double)d->tokens : 0.0;
    d->rows = count_rows(headers, d->documents, config);
}

static int check_target(const struct shard *shard, const struct target *target, struct error *err)
{
    if (shard->hidden_size != target->hidden_size)
        return error_set(err, "%s: hidden_size %lld, but the target has %lld", shard->path,
                         (long long)shard->hidden_size, (long long)target->hidden_size);
    if (shard->vocab_size != target->vocab_size)
        return error_set(err, "%s: vocab_size %lld, but the target has %lld", shard->path,
                         (long long)shard->vocab_size, (long long)target->vocab_size);
    return 0;
}

static int use_shards(struct plan_input *input, const struct config *config,
                      const struct headers *headers, struct error *err)
{
    struct plan_subject *s = &input->subject;
    struct shard *first = &headers->shards[0];
    struct documents as_documents = {.shards = headers->shards,
                                     .shard_count = headers->count,
                                     .hidden_size = first->hidden_size,
                                     .planes = first->planes,
                                     .layer_ids = first->layer_ids,
                                     .shard_layers = first->layers,
                                     .last_hidden = first->last_hidden};
    if (check_target(first, &input->target, err) != 0 ||
        documents_select_planes(&as_documents, &config->target.layer_ids, input->target.layers,
                                s->plane, DRAFTER_MAX_LAYERS, &s->features, &s->last_plane,
                                err) != 0)
        return -1;
    for (int64_t l = 0; l < s->features; l++)
        s->layer_ids[l] = first->layer_ids[s->plane[l]];
    s->planes = first->planes;
    s->last_hidden = first->last_hidden;
    s->float8 = first->features.float8;
    sum_documents(&input->documents, headers, config);
    s->documents = input->documents.documents;
    if (first->manifest)
        snprintf(input->data_from, sizeof(input->data_from), "data.manifest");
    else
        snprintf(input->data_from, sizeof(input->data_from), "%zu shard%s of data.train",
                 headers->count, headers->count == 1 ? "" : "s");
    return 0;
}

// Shards as they would be extracted for this config: its layers and the last hidden state. why: the
// words of there being none.
static int imagine_shards(struct plan_input *input, const struct config *config, const char *why,
                          struct error *err)
{
    struct plan_subject *s = &input->subject;
    const struct config_ints *ids = &config->target.layer_ids;
    if (ids->count == 0)
        return error_set(err, "target.layer_ids: needed to plan without shards, since no file of "
                              "data.train says which layers there are");
    if (ids->count > DRAFTER_MAX_LAYERS)
        return error_set(err, "target.layer_ids: %zu layers; at most %d are possible", ids->count,
                         DRAFTER_MAX_LAYERS);
    s->features = (int64_t)ids->count;
    for (int64_t l = 0; l < s->features; l++) {
        s->layer_ids[l] = ids->items[l];
        s->plane[l] = (int32_t)l;
    }
    s->planes = s->features + 1;
    s->last_plane = (int32_t)s->features;
    s->last_hidden = LAST_HIDDEN_PRE_NORM;
    snprintf(input->data_from, sizeof(input->data_from),
             "target.layer_ids and the last hidden state");
    snprintf(input->no_shards, sizeof(input->no_shards), "%.*s", (int)strcspn(why, "\n"), why);
    return 0;
}

// Whether a pattern of data.train stands for any file. `why`: a line for each that does not.
static bool is_there(const struct config *config, const char *pattern, struct error *why)
{
    struct config one = *config;
    struct error fault = {""};
    one.data.val = (struct config_texts){.count = 0};
    one.data.train = (struct config_texts){memory_alloc(1, sizeof(char *)), 1};
    one.data.train.items[0] = memory_strdup(pattern);
    bool found = config_expand_files(&one, &fault) == 0;
    if (!found)
        error_add(why, "%s", fault.text);
    for (size_t i = 0; i < one.data.train.count; i++)
        free(one.data.train.items[i]);
    free(one.data.train.items);
    free(one.data.val.items); // an empty list may have memory
    return found;
}

// Leaves the patterns of data.train that stand for files.
static void drop_missing(struct config *config, struct error *why)
{
    struct config_texts *train = &config->data.train;
    size_t kept = 0;
    for (size_t i = 0; i < train->count; i++) {
        if (is_there(config, train->items[i], why))
            train->items[kept++] = train->items[i];
        else
            free(train->items[i]);
    }
    train->count = kept;
}

static int open_manifest(struct plan_input *input, const struct config *config, struct error *err)
{
    struct headers headers = {.count = 0};
    input->subject.validates = config->data.val.count > 0;
    int status = open_manifest_header(&headers, config->data.manifest, err);
    if (status == 0)
        status = use_shards(input, config, &headers, err);
    close_headers(&headers);
    return status;
}

static int open_data(struct plan_input *input, struct config *config, struct error *err)
{
    if (config->data.manifest != NULL && files_exists(config->data.manifest))
        return open_manifest(input, config, err);
    struct headers headers = {.count = 0};
    struct error missing = {""};
    struct config_texts val = config->data.val;
    input->subject.validates = val.count > 0;
    config->data.val =
        (struct config_texts){.count = 0}; // of no consequence whether they are there
    if (config->data.train.count == 0)
        error_set(&missing, "data.train is empty");
    drop_missing(config, &missing);
    bool found = config->data.train.count > 0 && config_expand_files(config, &missing) == 0;
    free(config->data.val.items); // an empty list may have memory
    config->data.val = val;
    if (!found)
        return imagine_shards(input, config, missing.text, err);
    input->missing_shards = missing;
    int status = open_headers(&headers, &config->data.train, err);
    if (status == 0)
        status = use_shards(input, config, &headers, err);
    close_headers(&headers);
    return status;
}

// How many tokens a map that is not there yet is taken for: what most drafters have.
enum { USUAL_DRAFT_VOCAB = 32000 };

// A run compares all tokens and masks; here only the number of documents is known.
static void compare_map_data(const struct plan_input *input, const struct config *config,
                             int64_t counted)
{
    int64_t there = input->documents.documents;
    if (counted > 0 && there > 0 && input->missing_shards.text[0] == '\0' && counted != there)
        log_warn("drafter.draft_vocab: %s was made from %lld documents, %s %lld: a run will "
                 "refuse it; make one with dtrain vocab and exactly those shards",
                 config->drafter.draft_vocab, (long long)counted,
                 config->data.manifest != NULL ? "data.manifest has"
                                               : "the shards of data.train have",
                 (long long)there);
}

// The size of the draft vocabulary; of its file only the tables are looked at, and how much was counted.
static int open_map(struct plan_input *input, const struct config *config, struct error *err)
{
    const char *path = config->drafter.draft_vocab;
    int64_t vocab = input->target.vocab_size, *size = &input->subject.draft_vocab;
    struct safetensors file;
    struct vocab_map map;
    if (config->drafter.kind != DRAFTER_EAGLE3 || path == NULL)
        return 0;
    if (!files_exists(path)) {
        *size = vocab < USUAL_DRAFT_VOCAB ? vocab : USUAL_DRAFT_VOCAB;
        log_warn("drafter.draft_vocab: %s is not there; planned for one of %lld tokens", path,
                 (long long)*size);
        return 0;
    }
    if (safetensors_open(&file, path, err) != 0)
        return error_prefix(err, "drafter.draft_vocab");
    int result = vocab_map_tables(&map, &file, err);
    if (result == 0 && map.vocab_size != vocab)
        result = error_set(err, "%s is a map of %lld tokens, and the target has %lld", path,
                           (long long)map.vocab_size, (long long)vocab);
    *size = map.draft_size;
    if (result == 0)
        compare_map_data(input, config, vocab_map_documents(&file));
    vocab_map_release(&map);
    safetensors_close(&file);
    return result == 0 ? 0 : error_prefix(err, "drafter.draft_vocab");
}

// auto without a GPU: whoever plans here trains elsewhere.
static void choose_backend(struct plan_input *input, const struct config *config, bool look)
{
    struct error why = {""};
    bool cpu = config->run.device == DEVICE_CPU;
    const struct backend *cuda = cpu || !look ? NULL : backend_cuda(&why);
    input->device = cpu || cuda != NULL ? PLAN_DEVICE_HERE
                    : look              ? PLAN_DEVICE_NONE
                                        : PLAN_DEVICE_UNASKED;
    input->subject.backend = cpu ? backend_cpu() : cuda != NULL ? cuda : backend_planned();
}

int plan_input_open(struct plan_input *input, struct config *config, const char *target_config,
                    bool look, struct error *err)
{
    *input = (struct plan_input){.device = PLAN_DEVICE_UNASKED};
    struct plan_subject *s = &input->subject;
    s->training = true;
    s->ranks = 1;
    s->target = &input->target;
    if (session_check_built(config, err) != 0 ||
        open_target(input, config, target_config, err) != 0)
        return -1;
    if (open_data(input, config, err) != 0 || open_map(input, config, err) != 0)
        return -1;
    choose_backend(input, config, look);
    return 0;
}

void plan_input_close(struct plan_input *input)
{
    target_close(&input->target);
}
