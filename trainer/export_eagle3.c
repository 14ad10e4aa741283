// Owns EAGLE-3's two layouts: SpecForge's, which checkpoints hold and SGLang reads, and speculators'. Their
// tensors differ in the first layer's prefix and in the embedding, their config.json in nearly everything.
#include "trainer/export_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

static const char first_layer[] = "layers.0.", mid_layer[] = "midlayer.";

// ---- SpecForge -----------------------------------------------------------------------------------

// Later layers' norm of what enters them: vLLM and speculators call it input_layernorm, SGLang hidden_norm.
// A file with both is read by all of them. NULL: the tensor has one name only.
static char *second_name(const char *name)
{
    static const char norm[] = ".input_layernorm.weight";
    size_t n = strlen(name);
    if (strncmp(name, "layers.", 7) != 0 || strncmp(name, first_layer, strlen(first_layer)) == 0 ||
        n < sizeof(norm) || strcmp(name + n - (sizeof(norm) - 1), norm) != 0)
        return NULL;
    return memory_format("%.*s.hidden_norm.weight", (int)(n - (sizeof(norm) - 1)), name);
}

void export_served_names(const char *name, char *names[EXPORT_NAMES])
{
    names[0] = memory_strdup(name);
    if (strncmp(name, first_layer, strlen(first_layer)) == 0)
        names[1] = memory_format("%s%s", mid_layer, name + strlen(first_layer));
    else
        names[1] = second_name(name);
}

static bool is_second_name(const char *name)
{
    return strncmp(name, "layers.", 7) == 0 &&
           strncmp(name, first_layer, strlen(first_layer)) != 0 &&
           strstr(name, ".hidden_norm.weight") != NULL;
}

static void declare_param(struct safetensors_writer *writer, const struct param *param)
{
    char *mid = NULL, *second = second_name(param->name);
    if (strncmp(param->name, first_layer, strlen(first_layer)) == 0)
        mid = memory_format("%s%s", mid_layer, param->name + strlen(first_layer));
    safetensors_writer_add(writer, mid != NULL ? mid : param->name, DTYPE_BF16, param->dims,
                           param->shape);
    if (second != NULL)
        safetensors_writer_add(writer, second, DTYPE_BF16, param->dims, param->shape);
    free(second);
    free(mid);
}

static int write_params(struct safetensors_writer *writer, const struct export_drafter *drafter,
                        struct error *err)
{
    int index = 0, result = 0;
    for (size_t i = 0; i < drafter->params->count && result == 0; i++) {
        const struct param *param = &drafter->params->items[i];
        char *second = second_name(param->name);
        result = export_write_param(writer, index++, &drafter->weights, param, err);
        if (second != NULL && result == 0)
            result = export_write_param(writer, index++, &drafter->weights, param, err);
        free(second);
    }
    return result;
}

static int fill_specforge(struct safetensors_writer *writer, const void *context, struct error *err)
{
    const struct export_drafter *drafter = context;
    const struct drafter_sizes *sizes = drafter->sizes;
    const struct vocab_map *map = drafter->map;
    int head = -1, d2t = -1, t2d = -1;
    for (size_t i = 0; i < drafter->params->count; i++)
        declare_param(writer, &drafter->params->items[i]);
    if (!sizes->trainable_head)
        head = safetensors_writer_add(writer, "lm_head.weight", DTYPE_BF16, 2,
                                      (const int64_t[]){sizes->draft_vocab, sizes->hidden});
    if (map != NULL) {
        d2t = safetensors_writer_add(writer, "d2t", DTYPE_I64, 1, &map->draft_size);
        t2d = safetensors_writer_add_as(writer, "t2d", "BOOL", 1, 1, &map->vocab_size);
    }
    if (safetensors_writer_begin(writer, err) != 0 || write_params(writer, drafter, err) != 0)
        return -1;
    if (head >= 0 && export_write_rows(writer, head, &drafter->target->head,
                                       map != NULL ? map->ids : NULL, sizes->draft_vocab, err) != 0)
        return -1;
    if (map == NULL)
        return 0;
    if (safetensors_writer_write(writer, d2t, 0, map->d2t,
                                 (size_t)map->draft_size * sizeof(*map->d2t), err) != 0)
        return -1;
    return safetensors_writer_write(writer, t2d, 0, map->t2d, (size_t)map->vocab_size, err);
}

int export_specforge_model(const char *path, const struct export_drafter *drafter,
                           struct error *err)
{
    // A map of every token is none: vLLM takes no d2t then.
    struct export_drafter written = *drafter;
    if (written.map != NULL && written.map->draft_size == written.map->vocab_size)
        written.map = NULL;
    return export_write_model(path, fill_specforge, &written, err);
}

// Norms of heads are Qwen3's, which only vLLM has a class for; SGLang then refuses it by that name instead
// of leaving the norms out.
cJSON *export_specforge_config(const struct drafter_sizes *sizes, const struct target *target)
{
    cJSON *object = cJSON_CreateObject();
    export_add_texts(object, "architectures",
                     sizes->head_norms ? "Eagle3Qwen3ForCausalLM" : "LlamaForCausalLMEagle3");
    cJSON *eagle = cJSON_AddObjectToObject(object, "eagle_config");
    export_add_layer_ids(eagle, "eagle_aux_hidden_state_layer_ids", sizes, 0);
    cJSON_AddTrueToObject(eagle, "use_aux_hidden_state");
    if (sizes->features != 3)
        json_add_int(object, "num_aux_hidden_states", sizes->features);
    json_add_int(object, "target_hidden_size", sizes->hidden);
    json_add_int(object, "draft_vocab_size", sizes->draft_vocab);
    cJSON_AddBoolToObject(object, "fc_norm", sizes->fc_norm);
    cJSON_AddBoolToObject(object, "norm_output", sizes->norm_output);
    if (sizes->norm_before_fc)
        cJSON_AddTrueToObject(object, "norm_before_fc");
    if (sizes->norm_before_residual)
        cJSON_AddTrueToObject(object, "norm_before_residual");
    if (target->embed_scale != 1.0f)
        json_add_real(object, "embed_scale", (double)target->embed_scale);
    if (target->logit_scale != 1.0f)
        json_add_real(object, "logit_scale", (double)target->logit_scale);
    export_add_markov(object, sizes);
    export_add_layers(object, sizes);
    cJSON_AddFalseToObject(object, "tie_word_embeddings");
    cJSON_AddStringToObject(object, "dtype", "bfloat16");
    return object;
}

// ---- speculators ---------------------------------------------------------------------------------

void export_add_eagle3_speculator(cJSON *object, const struct drafter_sizes *sizes)
{
    json_add_int(object, "draft_vocab_size", sizes->draft_vocab);
    json_add_int(object, "target_hidden_size", sizes->hidden);
    // What enters a layer has the number of that layer there.
    export_add_layer_ids(object, "eagle_aux_hidden_state_layer_ids", sizes, 1);
    // Each is stated: readers disagree about what it is where it is not.
    cJSON_AddBoolToObject(object, "norm_before_residual", sizes->norm_before_residual);
    cJSON_AddBoolToObject(object, "norm_before_fc", sizes->norm_before_fc);
    cJSON_AddBoolToObject(object, "fc_norm", sizes->fc_norm);
    cJSON_AddBoolToObject(object, "norm_output", sizes->norm_output);
    cJSON_AddFalseToObject(object, "embed_requires_grad");
}

int export_eagle3_speculators_fill(struct safetensors_writer *writer, const void *context,
                                   struct error *err)
{
    const struct export_speculators *drafter = context;
    const struct safetensors *model = drafter->model;
    const int64_t shape[] = {drafter->sizes->vocab, drafter->sizes->hidden};
    int index = safetensors_writer_add(writer, "embed_tokens.weight", DTYPE_BF16, 2, shape);
    for (size_t i = 0; i < model->count; i++) {
        const struct safetensors_entry *entry = &model->entries[i];
        char *name = strncmp(entry->name, mid_layer, strlen(mid_layer)) == 0
                         ? memory_format("%s%s", first_layer, entry->name + strlen(mid_layer))
                         : memory_strdup(entry->name);
        size_t elements = 1;
        for (int d = 0; d < entry->dims; d++)
            elements *= (size_t)entry->shape[d];
        if (!is_second_name(name))
            safetensors_writer_add_as(writer, name, entry->dtype, entry->size / elements,
                                      entry->dims, entry->shape);
        free(name);
    }
    if (safetensors_writer_begin(writer, err) != 0 ||
        export_write_rows(writer, index, &drafter->target->embed, NULL, shape[0], err) != 0)
        return -1;
    int result = 0;
    for (size_t i = 0; i < model->count && result == 0; i++)
        if (!is_second_name(model->entries[i].name))
            result = safetensors_writer_write(writer, ++index, 0, model->entries[i].bytes,
                                              model->entries[i].size, err);
    return result;
}
