// Owns the z-lab layout of a DFlash drafter: tensor names are the parameters' own, config.json states
// what was trained in the words that servers read; and what all layouts share. Does not own EAGLE-3's
// (export_eagle3.c), `dtrain export` (export_command.c) nor what servers do not run (export_servable.c).
#include "trainer/export_internal.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/bf16.h"
#include "base/memory.h"
#include "data/safetensors.h"
#include "trainer/json_text.h"

enum { CHUNK = 1 << 16 }; // values converted at a time

// ---- config.json ---------------------------------------------------------------------------------

void export_add_texts(cJSON *object, const char *name, const char *text)
{
    cJSON_AddItemToArray(cJSON_AddArrayToObject(object, name), cJSON_CreateString(text));
}

// The fewest digits that give the same float: 1e-06, not 9.9999999747524271e-07.
static void add_float(cJSON *object, const char *name, float value)
{
    char text[32];
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, (double)value);
        if (strtof(text, NULL) == value)
            break;
    }
    cJSON_AddRawToObject(object, name, text);
}

// With a decimal point: some readers take a whole factor for a mistake.
static void add_factor(cJSON *object, const char *name, double value)
{
    char text[32];
    snprintf(text, sizeof(text), "%.1f", value);
    if (strtod(text, NULL) == value)
        cJSON_AddRawToObject(object, name, text);
    else
        json_add_real(object, name, value);
}

void export_add_layer_ids(cJSON *object, const char *name, const struct drafter_sizes *sizes,
                          int64_t shift)
{
    cJSON *ids = cJSON_AddArrayToObject(object, name);
    for (int64_t i = 0; i < sizes->features; i++)
        cJSON_AddItemToArray(ids, json_int(sizes->target_layer_ids[i] + shift));
}

static void add_dflash(cJSON *object, const struct drafter_sizes *sizes)
{
    cJSON *dflash = cJSON_AddObjectToObject(object, "dflash_config");
    json_add_int(dflash, "mask_token_id", sizes->mask_token_id);
    export_add_layer_ids(dflash, "target_layer_ids", sizes, 0);
}

static void add_rope(cJSON *object, const struct drafter_sizes *sizes)
{
    json_add_real(object, "rope_theta", sizes->rope_theta);
    if (sizes->rope_scaling == ROPE_SCALING_NONE) {
        cJSON_AddNullToObject(object, "rope_scaling");
    } else {
        bool yarn = sizes->rope_scaling == ROPE_SCALING_YARN;
        cJSON *scaling = cJSON_AddObjectToObject(object, "rope_scaling");
        cJSON_AddStringToObject(scaling, "rope_type", yarn ? "yarn" : "linear");
        add_factor(scaling, "factor", sizes->rope_factor);
        if (yarn)
            json_add_int(scaling, "original_max_position_embeddings",
                         sizes->rope_original_positions);
    }
    // Stated, since some servers would take the target's style.
    cJSON_AddTrueToObject(object, "is_neox_style");
    json_add_int(object, "max_position_embeddings", sizes->max_position_embeddings);
}

static bool is_llama(const struct drafter_sizes *sizes)
{
    return sizes->kind == DRAFTER_EAGLE3 && !sizes->head_norms;
}

// layer_types decides; Llama's configuration has no windows by itself. max_window_layers is the layer count whatever the types are: vLLM asserts that
// for mixed layers, and readers with layer_types do not use it.
static void add_layer_types(cJSON *object, const struct drafter_sizes *sizes)
{
    if (is_llama(sizes) && !export_any_sliding(sizes))
        return;
    cJSON *types = cJSON_AddArrayToObject(object, "layer_types");
    for (int64_t i = 0; i < sizes->layers; i++)
        cJSON_AddItemToArray(
            types, cJSON_CreateString(sizes->sliding[i] ? "sliding_attention" : "full_attention"));
    if (export_any_sliding(sizes))
        json_add_int(object, "sliding_window", sizes->window);
    else
        cJSON_AddNullToObject(object, "sliding_window");
    cJSON_AddBoolToObject(object, "use_sliding_window", export_any_sliding(sizes));
    json_add_int(object, "max_window_layers", sizes->layers);
}

void export_add_layers(cJSON *object, const struct drafter_sizes *sizes)
{
    if (sizes->kind == DRAFTER_EAGLE3)
        cJSON_AddStringToObject(object, "model_type", is_llama(sizes) ? "llama" : "qwen3");
    json_add_int(object, "num_hidden_layers", sizes->layers);
    json_add_int(object, "hidden_size", sizes->hidden);
    json_add_int(object, "intermediate_size", sizes->intermediate);
    json_add_int(object, "num_attention_heads", sizes->heads);
    json_add_int(object, "num_key_value_heads", sizes->kv_heads);
    json_add_int(object, "head_dim", sizes->head_dim);
    cJSON_AddStringToObject(object, "hidden_act", "silu");
    add_float(object, "rms_norm_eps", sizes->eps);
    add_rope(object, sizes);
    cJSON_AddFalseToObject(object, "attention_bias");
    json_add_int(object, "vocab_size", sizes->vocab);
    add_layer_types(object, sizes);
}

void export_add_markov(cJSON *object, const struct drafter_sizes *sizes)
{
    if (sizes->markov_rank > 0)
        json_add_int(object, "markov_rank", sizes->markov_rank);
}

// What servers do not know but a reader of the checkpoint must: only where it differs from serving.
static void add_unservable(cJSON *object, const struct drafter_sizes *sizes)
{
    if (sizes->predict_from_anchor)
        cJSON_AddTrueToObject(object, "sample_from_anchor");
    if (export_any_sliding(sizes) && !sizes->sliding_causal)
        cJSON_AddTrueToObject(object, "sliding_window_non_causal");
    if (export_any_sliding(sizes) && sizes->window_origin != WINDOW_FROM_QUERY)
        cJSON_AddStringToObject(object, "window_origin", "anchor");
    export_add_markov(object, sizes);
}

static cJSON *make_config(const struct drafter_sizes *sizes, const struct target *target)
{
    cJSON *object = cJSON_CreateObject();
    export_add_texts(object, "architectures", "DFlashDraftModel");
    cJSON_AddStringToObject(cJSON_AddObjectToObject(object, "auto_map"), "AutoModel",
                            "dflash.DFlashDraftModel");
    cJSON_AddStringToObject(object, "model_type", "qwen3");
    json_add_int(object, "block_size", sizes->block_size);
    add_dflash(object, sizes);
    json_add_int(object, "num_target_layers", sizes->target_layers);
    export_add_layers(object, sizes);
    cJSON_AddBoolToObject(object, "tie_word_embeddings", target->tied);
    cJSON_AddStringToObject(object, "dtype", "bfloat16");
    add_unservable(object, sizes);
    return object;
}

// ---- model.safetensors ---------------------------------------------------------------------------

static int write_values(struct safetensors_writer *writer, int index, const float *values,
                        int64_t count, struct error *err)
{
    bf16 *chunk = memory_alloc(CHUNK, sizeof(*chunk));
    int result = 0;
    for (int64_t begin = 0; begin < count && result == 0; begin += CHUNK) {
        int64_t n = count - begin < CHUNK ? count - begin : CHUNK;
        for (int64_t i = 0; i < n; i++)
            chunk[i] = bf16_from_float(values[begin + i]);
        result = safetensors_writer_write(writer, index, (size_t)begin * sizeof(bf16), chunk,
                                          (size_t)n * sizeof(bf16), err);
    }
    free(chunk);
    return result;
}

int export_write_param(struct safetensors_writer *writer, int index,
                       const struct export_weights *weights, const struct param *param,
                       struct error *err)
{
    if (weights->master != NULL)
        return write_values(writer, index, weights->master + param->offset, param->count, err);
    return safetensors_writer_write(writer, index, 0, weights->served + param->offset,
                                    (size_t)param->count * sizeof(bf16), err);
}

int export_write_rows(struct safetensors_writer *writer, int index,
                      const struct target_tensor *tensor, const int32_t *ids, int64_t rows,
                      struct error *err)
{
    int64_t width = tensor->columns;
    size_t bytes = (size_t)width * sizeof(bf16);
    bf16 *row = memory_alloc(1, bytes);
    int result = 0;
    for (int64_t r = 0; r < rows && result == 0; r++) {
        int64_t first = (ids != NULL ? ids[r] : r) * width;
        for (int64_t i = 0; i < width; i++)
            row[i] = tensor->dtype == DTYPE_BF16
                         ? ((const bf16 *)tensor->data)[first + i]
                         : bf16_from_float(((const float *)tensor->data)[first + i]);
        result = safetensors_writer_write(writer, index, (size_t)r * bytes, row, bytes, err);
    }
    free(row);
    return result;
}

int export_write_model(const char *path, export_fill_fn *fill, const void *context,
                       struct error *err)
{
    struct safetensors_writer *writer;
    if (safetensors_writer_open(&writer, path, err) != 0)
        return -1;
    safetensors_writer_metadata(writer, "format", "pt"); // transformers asks for it
    int result = fill(writer, context, err);
    struct error close_err = {""};
    int closed = safetensors_writer_close(writer, result == 0, &close_err);
    if (result == 0 && closed != 0)
        return error_set(err, "%s", close_err.text);
    return result;
}

static int fill_zlab(struct safetensors_writer *writer, const void *context, struct error *err)
{
    const struct export_drafter *drafter = context;
    const struct params *params = drafter->params;
    for (size_t i = 0; i < params->count; i++) {
        const struct param *param = &params->items[i];
        safetensors_writer_add(writer, param->name, DTYPE_BF16, param->dims, param->shape);
    }
    int result = safetensors_writer_begin(writer, err);
    for (size_t i = 0; i < params->count && result == 0; i++)
        result = export_write_param(writer, (int)i, &drafter->weights, &params->items[i], err);
    return result;
}

int export_servable_write(const char *directory, const struct export_drafter *drafter,
                          struct error *err)
{
    bool eagle3 = drafter->sizes->kind == DRAFTER_EAGLE3;
    char *model = memory_format("%s/model.safetensors", directory);
    char *config = memory_format("%s/config.json", directory);
    int result = eagle3 ? export_specforge_model(model, drafter, err)
                        : export_write_model(model, fill_zlab, drafter, err);
    if (result == 0) {
        cJSON *object = eagle3 ? export_specforge_config(drafter->sizes, drafter->target)
                               : make_config(drafter->sizes, drafter->target);
        result = json_write_file(object, config, err);
        cJSON_Delete(object);
    }
    free(config);
    free(model);
    return result;
}
