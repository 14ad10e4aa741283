// Owns the speculators layout of a DFlash drafter: config.json of a DFlashSpeculator and the z-lab
// tensors with the target's embedding and head beside them.
#include "trainer/export_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/memory.h"

// ---- config.json ---------------------------------------------------------------------------------

static void add_proposals(cJSON *object, const struct export_speculators *drafter)
{
    const struct drafter_sizes *sizes = drafter->sizes;
    cJSON *serving = cJSON_AddObjectToObject(object, "speculators_config");
    cJSON_AddStringToObject(serving, "algorithm", "dflash");
    cJSON *method = cJSON_CreateObject();
    cJSON_AddItemToArray(cJSON_AddArrayToObject(serving, "proposal_methods"), method);
    cJSON_AddStringToObject(method, "proposal_type", "greedy");
    json_add_int(method, "speculative_tokens", sizes->block_size - 1);
    json_add_int(method, "verifier_accept_k", 1);
    cJSON_AddRawToObject(method, "accept_tolerance", "0.0");
    cJSON_AddStringToObject(serving, "default_proposal_method", "greedy");
    cJSON *verifier = cJSON_AddObjectToObject(serving, "verifier");
    cJSON_AddStringToObject(verifier, "name_or_path", drafter->target_name);
    export_add_texts(verifier, "architectures", drafter->target->architecture);
}

static void add_layer_config(cJSON *object, const struct drafter_sizes *sizes)
{
    cJSON *layers = cJSON_AddObjectToObject(object, "transformer_layer_config");
    cJSON_AddStringToObject(layers, "model_type", "qwen3");
    export_add_layers(layers, sizes);
    cJSON_AddFalseToObject(layers, "tie_word_embeddings");
    cJSON_AddStringToObject(layers, "dtype", "bfloat16");
}

// vLLM turns sliding_window_non_causal into one causal flag for all layers: stated as false it would
// make full layers causal, left out it makes sliding layers bidirectional.
static void add_windows(cJSON *object, const struct drafter_sizes *sizes)
{
    if (!export_any_sliding(sizes))
        return;
    cJSON_AddBoolToObject(object, "sliding_window_non_causal", !sizes->sliding_causal);
    if (sizes->window_origin != WINDOW_FROM_QUERY)
        cJSON_AddStringToObject(object, "window_origin", "anchor");
}

static cJSON *make_config(const struct export_speculators *drafter)
{
    const struct drafter_sizes *sizes = drafter->sizes;
    cJSON *object = cJSON_CreateObject();
    export_add_texts(object, "architectures", "DFlashSpeculator");
    cJSON_AddStringToObject(object, "speculators_model_type", "dflash");
    cJSON_AddStringToObject(object, "speculators_version", "0.9.0"); // the layout's
    add_proposals(object, drafter);
    add_layer_config(object, sizes);
    json_add_int(object, "draft_vocab_size", sizes->vocab);
    json_add_int(object, "target_hidden_size", sizes->hidden);
    json_add_int(object, "block_size", sizes->block_size);
    // What enters a layer has the number of that layer there.
    cJSON *ids = cJSON_AddArrayToObject(object, "aux_hidden_state_layer_ids");
    for (int64_t i = 0; i < sizes->features; i++)
        cJSON_AddItemToArray(ids, json_int(sizes->target_layer_ids[i] + 1));
    json_add_int(object, "mask_token_id", sizes->mask_token_id);
    cJSON_AddFalseToObject(object, "sample_from_anchor");
    add_windows(object, sizes);
    cJSON_AddFalseToObject(object, "tie_word_embeddings");
    cJSON_AddStringToObject(object, "dtype", "bfloat16");
    return object;
}

// ---- model.safetensors ---------------------------------------------------------------------------

// The first V rows of a target's matrix as bf16.
static int write_rows(struct safetensors_writer *writer, int index,
                      const struct drafter_sizes *sizes, const struct target_tensor *tensor,
                      struct error *err)
{
    int64_t width = sizes->hidden;
    bf16 *row = memory_alloc((size_t)width, sizeof(*row));
    int result = 0;
    for (int64_t r = 0; r < sizes->vocab && result == 0; r++) {
        for (int64_t i = 0; i < width; i++)
            row[i] = tensor->dtype == DTYPE_BF16
                         ? ((const bf16 *)tensor->data)[r * width + i]
                         : bf16_from_float(((const float *)tensor->data)[r * width + i]);
        size_t bytes = (size_t)width * sizeof(*row);
        result = safetensors_writer_write(writer, index, (size_t)r * bytes, row, bytes, err);
    }
    free(row);
    return result;
}

static int write_tensors(struct safetensors_writer *writer,
                         const struct export_speculators *drafter, struct error *err)
{
    const struct safetensors *model = drafter->model;
    const int64_t shape[] = {drafter->sizes->vocab, drafter->sizes->hidden};
    safetensors_writer_metadata(writer, "format", "pt");
    int embed = safetensors_writer_add(writer, "embed_tokens.weight", DTYPE_BF16, 2, shape);
    int head = safetensors_writer_add(writer, "lm_head.weight", DTYPE_BF16, 2, shape);
    for (size_t i = 0; i < model->count; i++) {
        const struct safetensors_entry *entry = &model->entries[i];
        safetensors_writer_add(writer, entry->name, DTYPE_BF16, entry->dims, entry->shape);
    }
    if (safetensors_writer_begin(writer, err) != 0 ||
        write_rows(writer, embed, drafter->sizes, &drafter->target->embed, err) != 0 ||
        write_rows(writer, head, drafter->sizes, &drafter->target->head, err) != 0)
        return -1;
    int result = 0;
    for (size_t i = 0; i < model->count && result == 0; i++)
        result = safetensors_writer_write(writer, head + 1 + (int)i, 0, model->entries[i].bytes,
                                          model->entries[i].size, err);
    return result;
}

static int write_model(const struct export_speculators *drafter, const char *path,
                       struct error *err)
{
    struct safetensors_writer *writer;
    if (safetensors_writer_open(&writer, path, err) != 0)
        return -1;
    int result = write_tensors(writer, drafter, err);
    struct error close_err = {""};
    int closed = safetensors_writer_close(writer, result == 0, &close_err);
    if (result == 0 && closed != 0)
        return error_set(err, "%s", close_err.text);
    return result;
}

int export_speculators_write(const struct export_speculators *drafter, const char *model_path,
                             const char *config_path, struct error *err)
{
    if (write_model(drafter, model_path, err) != 0)
        return -1;
    cJSON *object = make_config(drafter);
    int result = json_write_file(object, config_path, err);
    cJSON_Delete(object);
    return result;
}
