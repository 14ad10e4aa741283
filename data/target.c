// Owns finding embedding, head and final norm among a target's files, and mapping them. What the
// config says is read by target_config.c.
#include "data/target.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/bf16.h"
#include "base/crc32c.h"
#include "base/rng.h"
#include "data/safetensors.h"
#include "data/target_internal.h"

enum { OWNED_MAX = 3 };

struct target_files {
    cJSON *weight_map; // tensor name -> file name; NULL: everything is in files[0]
    struct safetensors *files;
    char **names; // of files, inside the directory
    size_t count;
    void *owned[OWNED_MAX]; // tensors that were converted or moved
    size_t owned_count;
};

// In front of embed_tokens.weight and norm.weight.
static const char *const model_prefixes[] = {"",
                                             "model.",
                                             "language_model.model.",
                                             "model.language_model.",
                                             "model.language_model.model.",
                                             "language_model.",
                                             "model.text_model.",
                                             "text_model.",
                                             "thinker.model.",
                                             "transformer.",
                                             "backbone.",
                                             "llm.model."};
static const char *const embed_names[] = {"embed_tokens", "wte", "word_embeddings", "embeddings"};
static const char *const norm_names[] = {"norm", "final_layernorm", "norm_f", "ln_f",
                                         "embedding_norm"};
// In front of lm_head.weight.
static const char *const head_prefixes[] = {
    "", "model.", "language_model.", "model.language_model.", "thinker.", "llm."};

#define COUNT(list) (sizeof(list) / sizeof(*(list)))

static int add_file(struct target_files *files, const char *directory, const char *name,
                    struct error *err)
{
    files->files = memory_resize(files->files, files->count + 1, sizeof(*files->files));
    files->names = memory_resize(files->names, files->count + 1, sizeof(*files->names));
    char *path = memory_format("%s/%s", directory, name);
    int result = safetensors_open(&files->files[files->count], path, err);
    free(path);
    if (result == 0)
        files->names[files->count++] = memory_strdup(name);
    return result;
}

static bool exists(const char *directory, const char *name)
{
    char *path = memory_format("%s/%s", directory, name);
    bool found = access(path, F_OK) == 0;
    free(path);
    return found;
}

static int open_index(struct target_files *files, const char *directory, const char *name,
                      struct error *err)
{
    cJSON *index = NULL;
    char *path = memory_format("%s/%s", directory, name);
    int result = target_read_json(path, &index, err);
    if (result == 0) {
        files->weight_map = cJSON_DetachItemFromObjectCaseSensitive(index, "weight_map");
        if (!cJSON_IsObject(files->weight_map))
            result = error_set(err, "%s: no weight_map", path);
    }
    cJSON_Delete(index);
    free(path);
    return result;
}

static int open_files(struct target_files *files, const char *directory, struct error *err)
{
    static const char *const single[] = {"head.safetensors", "model.safetensors"};
    static const char index[] = "model.safetensors.index.json";
    for (size_t i = 0; i < COUNT(single); i++) {
        if (exists(directory, single[i]))
            return add_file(files, directory, single[i], err);
    }
    if (exists(directory, index))
        return open_index(files, directory, index, err);
    return error_set(err, "%s: neither head.safetensors nor model.safetensors nor %s is there",
                     directory, index);
}

static bool has_tensor(const struct target_files *files, const char *name)
{
    if (files->weight_map != NULL)
        return cJSON_GetObjectItemCaseSensitive(files->weight_map, name) != NULL;
    return safetensors_find(&files->files[0], name) != NULL;
}

// The file that holds a tensor, opened when it is the first from there.
static const struct safetensors *file_of(struct target_files *files, const char *directory,
                                         const char *name, struct error *err)
{
    if (files->weight_map == NULL)
        return &files->files[0];
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(files->weight_map, name);
    if (!cJSON_IsString(item)) {
        error_set(err, "%s: the index names no file for '%s'", directory, name);
        return NULL;
    }
    for (size_t i = 0; i < files->count; i++) {
        if (strcmp(files->names[i], item->valuestring) == 0)
            return &files->files[i];
    }
    if (add_file(files, directory, item->valuestring, err) != 0)
        return NULL;
    return &files->files[files->count - 1];
}

// First of the names that exists: "PREFIX" "NAME" ".weight"; NULL: none. The caller frees.
static char *first_name(const struct target_files *files, const char *const *prefixes,
                        size_t prefix_count, const char *const *names, size_t name_count)
{
    for (size_t p = 0; p < prefix_count; p++) {
        for (size_t n = 0; n < name_count; n++) {
            char *name = memory_format("%s%s.weight", prefixes[p], names[n]);
            if (has_tensor(files, name))
                return name;
            free(name);
        }
    }
    return NULL;
}

// A tensor whose norm or head has a bias is another function than the one that is computed here.
static int refuse_bias(const struct target_files *files, const char *directory, const char *weight,
                       struct error *err)
{
    int stem = (int)(strlen(weight) - strlen(".weight"));
    char *bias = memory_format("%.*s.bias", stem, weight);
    int result = 0;
    if (has_tensor(files, bias))
        result = error_set(err, "%s: tensor '%s': a bias there is not supported", directory, bias);
    free(bias);
    return result;
}

static float half_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t exponent = half >> 10 & 31u, fraction = half & 0x3ffu;
    if (exponent == 0) { // zero and subnormals: fraction times 2^-24
        float value = (float)fraction * 0x1p-24f;
        return sign != 0 ? -value : value;
    }
    uint32_t wide = exponent == 31 ? 255u : exponent + 112u; // inf and NaN; else bias 15 -> 127
    uint32_t bits = sign | wide << 23 | fraction << 13;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

// Copies when the file's bytes can not be used where they are.
static void take_bytes(struct target_files *files, const struct safetensors_entry *entry,
                       struct target_tensor *tensor)
{
    size_t elements = (size_t)(tensor->rows * tensor->columns);
    bool half = strcmp(entry->dtype, "F16") == 0;
    size_t size = dtype_size(tensor->dtype);
    tensor->data = entry->bytes;
    if (!half && (uintptr_t)entry->bytes % size == 0)
        return;
    void *copy = memory_alloc(elements, size);
    files->owned[files->owned_count++] = copy;
    tensor->data = copy;
    if (!half) {
        memcpy(copy, entry->bytes, elements * size);
        return;
    }
    float *values = copy;
    for (size_t i = 0; i < elements; i++) {
        uint16_t bits;
        memcpy(&bits, entry->bytes + 2 * i, sizeof(bits));
        values[i] = half_to_float(bits);
    }
}

// dims 1: a vector [columns]; 2: [any, columns].
static int take_tensor(struct target *target, const char *name, int dims,
                       struct target_tensor *tensor, struct error *err)
{
    const struct safetensors *file = file_of(target->files, target->path, name, err);
    if (file == NULL)
        return -1;
    const struct safetensors_entry *entry = safetensors_find(file, name);
    if (entry == NULL)
        return error_set(err, "%s: no tensor '%s', although the index says so", file->path, name);
    bool bf16_there = strcmp(entry->dtype, "BF16") == 0;
    if (!bf16_there && strcmp(entry->dtype, "F32") != 0 && strcmp(entry->dtype, "F16") != 0)
        return error_set(err, "%s: tensor '%s' is %s; only F32, BF16 and F16 are supported",
                         file->path, name, entry->dtype);
    if (entry->dims != dims || entry->size == 0 || entry->shape[dims - 1] != target->hidden_size)
        return error_set(err,
                         "%s: tensor '%s' has %d dimensions, the last of them %" PRId64
                         "; wanted are %d and hidden_size, %" PRId64,
                         file->path, name, entry->dims,
                         entry->dims > 0 ? entry->shape[entry->dims - 1] : 0, dims,
                         target->hidden_size);
    tensor->dtype = bf16_there ? DTYPE_BF16 : DTYPE_F32;
    tensor->rows = dims == 2 ? entry->shape[0] : 1;
    tensor->columns = target->hidden_size;
    take_bytes(target->files, entry, tensor);
    return 0;
}

// What the model multiplies embeddings by is a number of its own dtype: bf16 sqrt(5376) is 73.5.
// 10 (F16) and 7 (BF16) bits of fraction stay.
static float round_to_dtype(float value, const char *dtype)
{
    if (strcmp(dtype, "BF16") == 0)
        return bf16_to_float(bf16_from_float(value));
    if (strcmp(dtype, "F16") == 0)
        return ldexpf(rintf(ldexpf(value, 10 - ilogbf(value))), ilogbf(value) - 10);
    return value;
}

static int load_embedding_and_norm(struct target *target, const struct target_facts *facts,
                                   struct error *err)
{
    int result = -1;
    char *norm = NULL, *embed = NULL;
    const char *prefix = NULL;
    for (size_t i = 0; embed == NULL && i < COUNT(model_prefixes); i++) {
        prefix = model_prefixes[i];
        embed = first_name(target->files, &prefix, 1, embed_names, COUNT(embed_names));
    }
    if (embed == NULL) {
        error_set(err,
                  "%s: no token embedding: 'embed_tokens.weight' is not there, nor under "
                  "model., model.language_model., language_model.model. and the like",
                  target->path);
        goto out;
    }
    norm = first_name(target->files, &prefix, 1, norm_names, COUNT(norm_names));
    if (norm == NULL) {
        error_set(err, "%s: no final norm '%snorm.weight' beside '%s'", target->path, prefix,
                  embed);
        goto out;
    }
    if (refuse_bias(target->files, target->path, norm, err) != 0 ||
        take_tensor(target, embed, 2, &target->embed, err) != 0 ||
        take_tensor(target, norm, 1, &target->norm, err) != 0)
        goto out;
    if (facts->embed_scale_is_root) {
        const struct safetensors *file = file_of(target->files, target->path, embed, err);
        target->embed_scale =
            round_to_dtype(target->embed_scale, safetensors_find(file, embed)->dtype);
    }
    result = 0;
out:
    free(embed);
    free(norm);
    return result;
}

// No lm_head tensor: the embedding must be said to be the head.
static int use_tied_head(struct target *target, const struct target_facts *facts, struct error *err)
{
    if (facts->tie == TIE_NO || facts->tie == TIE_SAID_NO)
        return error_set(err,
                         "%s: no tensor 'lm_head.weight', and tie_word_embeddings is %s in "
                         "config.json: a head is needed, or tie_word_embeddings true",
                         target->path, facts->tie == TIE_NO ? "not given" : "false");
    target->tied = true;
    target->head = target->embed;
    if (target->vocab_size > target->embed.rows)
        return error_set(err,
                         "%s: vocab_size is %" PRId64 ", but the embedding has %" PRId64 " rows",
                         target->path, target->vocab_size, target->embed.rows);
    if (target->vocab_size > 0)
        target->head.rows = target->vocab_size;
    return 0;
}

static bool same_tensor(const struct target_tensor *a, const struct target_tensor *b)
{
    return a->dtype == b->dtype && a->rows == b->rows &&
           memcmp(a->data, b->data, (size_t)(a->rows * a->columns) * dtype_size(a->dtype)) == 0;
}

static int use_own_head(struct target *target, const struct target_facts *facts, const char *head,
                        struct error *err)
{
    if (refuse_bias(target->files, target->path, head, err) != 0 ||
        take_tensor(target, head, 2, &target->head, err) != 0)
        return -1;
    if (target->vocab_size > 0 && target->vocab_size != target->head.rows)
        return error_set(err, "%s: vocab_size is %" PRId64 ", but '%s' has %" PRId64 " rows",
                         target->path, target->vocab_size, head, target->head.rows);
    if (target->head.rows > target->embed.rows)
        return error_set(err, "%s: '%s' has %" PRId64 " rows, the embedding only %" PRId64,
                         target->path, head, target->head.rows, target->embed.rows);
    if (facts->tie == TIE_SAID_YES) {
        // Servers would use the embedding and never look at the head.
        target->tied = same_tensor(&target->head, &target->embed);
        if (!target->tied)
            return error_set(err,
                             "%s: tie_word_embeddings is true, but '%s' is there and differs from "
                             "the embedding: remove one or correct config.json",
                             target->path, head);
    }
    return 0;
}

static int load_head(struct target *target, const struct target_facts *facts, struct error *err)
{
    static const char *const head_names[] = {"lm_head"};
    char *head = first_name(target->files, head_prefixes, COUNT(head_prefixes), head_names,
                            COUNT(head_names));
    int result =
        head == NULL ? use_tied_head(target, facts, err) : use_own_head(target, facts, head, err);
    target->vocab_size = target->head.rows;
    free(head);
    return result;
}

int target_open(struct target *target, const char *path, struct error *err)
{
    struct target_facts facts = {.tie = TIE_NO};
    *target = (struct target){.path = memory_strdup(path)};
    target->files = memory_alloc(1, sizeof(*target->files));
    char *file = memory_format("%s/config.json", path);
    int result = target_read_config(target, file, &facts, err);
    free(file);
    if (result == 0 && open_files(target->files, path, err) == 0 &&
        load_embedding_and_norm(target, &facts, err) == 0 && load_head(target, &facts, err) == 0)
        return 0;
    target_close(target);
    return -1;
}

void target_close(struct target *target)
{
    struct target_files *files = target->files;
    if (files != NULL) {
        for (size_t i = 0; i < files->count; i++) {
            safetensors_close(&files->files[i]);
            free(files->names[i]);
        }
        for (size_t i = 0; i < files->owned_count; i++)
            free(files->owned[i]);
        cJSON_Delete(files->weight_map);
        free(files->files);
        free(files->names);
        free(files);
    }
    free(target->path);
    free(target->model_type);
    free(target->architecture);
    free(target->special_ids);
    *target = (struct target){0};
}

static uint64_t mix_rows(uint64_t hash, const struct target_tensor *tensor)
{
    enum { ROWS = 1000 };
    size_t bytes = (size_t)tensor->columns * dtype_size(tensor->dtype);
    int64_t step = tensor->rows > ROWS ? tensor->rows / ROWS : 1;
    uint32_t crc = 0;
    for (int64_t row = 0; row < tensor->rows; row += step)
        crc = crc32c(crc, (const unsigned char *)tensor->data + (size_t)row * bytes, bytes);
    return rng_mix(hash, crc);
}

uint64_t target_fingerprint(const struct target *target)
{
    uint64_t hash = mix_rows(0, &target->norm);
    hash = mix_rows(hash, &target->embed);
    return mix_rows(hash, &target->head);
}

// The first row with a value that is not finite, -1: there is none. Rows behind the vocabulary are padding.
static int64_t bad_row(const struct target_tensor *tensor, int64_t vocab_size)
{
    int64_t rows = tensor->rows < vocab_size ? tensor->rows : vocab_size;
    const float *floats = tensor->data;
    const bf16 *halves = tensor->data;
    for (int64_t row = 0; row < rows; row++) {
        int64_t first = row * tensor->columns;
        int bad = 0;
        for (int64_t i = first; i < first + tensor->columns; i++)
            bad |=
                tensor->dtype == DTYPE_BF16 ? bf16_is_nonfinite(halves[i]) : !isfinite(floats[i]);
        if (bad)
            return row;
    }
    return -1;
}

int target_check_finite(const struct target *target, struct error *err)
{
    const struct {
        const char *name;
        const struct target_tensor *tensor;
    } parts[] = {{"final norm", &target->norm},
                 {"token embedding", &target->embed},
                 {"head", &target->head}};
    size_t count = target->tied ? 2 : COUNT(parts);
    for (size_t i = 0; i < count; i++) {
        int64_t row = bad_row(parts[i].tensor, target->vocab_size);
        if (row >= 0)
            return error_set(err,
                             "%s: row %" PRId64 " of the target's %s has a value that is not "
                             "finite; its file is damaged, or was written so",
                             target->path, row, parts[i].name);
    }
    return 0;
}
