// Owns the speculators layout: config.json, and of a DFlash drafter the z-lab tensors with the target's
// embedding and head beside them. The tensors of EAGLE-3 are export_eagle3.c's.
#include "trainer/export_internal.h"

// ---- config.json ---------------------------------------------------------------------------------

bool export_is_dspark(const struct drafter_sizes *sizes)
{
    return sizes->kind == DRAFTER_DFLASH && sizes->markov_rank > 0;
}

static const char *algorithm(const struct drafter_sizes *sizes)
{
    if (sizes->kind == DRAFTER_EAGLE3)
        return "eagle3";
    return export_is_dspark(sizes) ? "dspark" : "dflash";
}

static int64_t draft_count(const struct drafter_sizes *sizes)
{
    if (sizes->kind == DRAFTER_EAGLE3)
        return sizes->ttt_steps;
    return sizes->predict_from_anchor ? sizes->block_size : sizes->block_size - 1;
}

static void add_proposals(cJSON *object, const struct export_speculators *drafter)
{
    const struct drafter_sizes *sizes = drafter->sizes;
    cJSON *serving = cJSON_AddObjectToObject(object, "speculators_config");
    cJSON_AddStringToObject(serving, "algorithm", algorithm(sizes));
    cJSON *method = cJSON_CreateObject();
    cJSON_AddItemToArray(cJSON_AddArrayToObject(serving, "proposal_methods"), method);
    cJSON_AddStringToObject(method, "proposal_type", "greedy");
    json_add_int(method, "speculative_tokens", draft_count(sizes));
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
    if (sizes->kind == DRAFTER_DFLASH)
        cJSON_AddStringToObject(layers, "model_type", "qwen3");
    export_add_layers(layers, sizes);
    cJSON_AddFalseToObject(layers, "tie_word_embeddings");
    cJSON_AddStringToObject(layers, "dtype", "bfloat16");
    if (sizes->kind == DRAFTER_EAGLE3 && sizes->features != 3) // where vLLM looks for it
        json_add_int(layers, "num_aux_hidden_states", sizes->features);
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

static void add_dflash_speculator(cJSON *object, const struct drafter_sizes *sizes)
{
    json_add_int(object, "draft_vocab_size", sizes->vocab);
    json_add_int(object, "target_hidden_size", sizes->hidden);
    json_add_int(object, "block_size", sizes->block_size);
    // What enters a layer has the number of that layer there.
    export_add_layer_ids(object, "aux_hidden_state_layer_ids", sizes, 1);
    json_add_int(object, "mask_token_id", sizes->mask_token_id);
    cJSON_AddBoolToObject(object, "sample_from_anchor", sizes->predict_from_anchor);
    add_windows(object, sizes);
    if (!export_is_dspark(sizes))
        return;
    json_add_int(object, "markov_rank", sizes->markov_rank);
    cJSON_AddStringToObject(object, "markov_head_type", "vanilla");
    cJSON_AddFalseToObject(object, "enable_confidence_head");
    cJSON_AddFalseToObject(object, "confidence_head_with_markov");
}

static cJSON *make_config(const struct export_speculators *drafter)
{
    const struct drafter_sizes *sizes = drafter->sizes;
    bool eagle3 = sizes->kind == DRAFTER_EAGLE3;
    cJSON *object = cJSON_CreateObject();
    const char *dflash = export_is_dspark(sizes) ? "DSparkSpeculator" : "DFlashSpeculator";
    export_add_texts(object, "architectures", eagle3 ? "Eagle3Speculator" : dflash);
    cJSON_AddStringToObject(object, "speculators_model_type", algorithm(sizes));
    cJSON_AddStringToObject(object, "speculators_version", "0.9.0"); // the layout's
    add_proposals(object, drafter);
    add_layer_config(object, sizes);
    if (eagle3)
        export_add_eagle3_speculator(object, sizes);
    else
        add_dflash_speculator(object, sizes);
    cJSON_AddFalseToObject(object, "tie_word_embeddings");
    cJSON_AddStringToObject(object, "dtype", "bfloat16");
    return object;
}

// ---- model.safetensors ---------------------------------------------------------------------------

static int fill_dflash(struct safetensors_writer *writer, const void *context, struct error *err)
{
    const struct export_speculators *drafter = context;
    const struct safetensors *model = drafter->model;
    int64_t rows = drafter->sizes->vocab;
    const int64_t shape[] = {rows, drafter->sizes->hidden};
    int embed = safetensors_writer_add(writer, "embed_tokens.weight", DTYPE_BF16, 2, shape);
    int head = safetensors_writer_add(writer, "lm_head.weight", DTYPE_BF16, 2, shape);
    for (size_t i = 0; i < model->count; i++) {
        const struct safetensors_entry *entry = &model->entries[i];
        safetensors_writer_add(writer, entry->name, DTYPE_BF16, entry->dims, entry->shape);
    }
    if (safetensors_writer_begin(writer, err) != 0 ||
        export_write_rows(writer, embed, &drafter->target->embed, NULL, rows, err) != 0 ||
        export_write_rows(writer, head, &drafter->target->head, NULL, rows, err) != 0)
        return -1;
    int result = 0;
    for (size_t i = 0; i < model->count && result == 0; i++)
        result = safetensors_writer_write(writer, head + 1 + (int)i, 0, model->entries[i].bytes,
                                          model->entries[i].size, err);
    return result;
}

int export_speculators_write(const struct export_speculators *drafter, const char *model_path,
                             const char *config_path, struct error *err)
{
    bool eagle3 = drafter->sizes->kind == DRAFTER_EAGLE3;
    if (export_write_model(model_path, eagle3 ? export_eagle3_speculators_fill : fill_dflash,
                           drafter, err) != 0)
        return -1;
    cJSON *object = make_config(drafter);
    int result = json_write_file(object, config_path, err);
    cJSON_Delete(object);
    return result;
}
