// Owns targets of which only the sizes are known, for plans: a config.json without weights, or a model
// that this program knows by name. Nothing here can be trained with.
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "data/target_internal.h"

// What published config.json files say.
static const struct known_target {
    const char *name, *model_type, *architecture;
    int64_t hidden_size, vocab_size, layers, heads, kv_heads, head_dim, intermediate_size,
        positions;
    double rms_norm_eps, rope_theta;
    float norm_weight_offset;
} known_targets[] = {
    {"Qwen3.6-27B", "qwen3_5_text", "Qwen3_5ForConditionalGeneration", 5120, 248320, 64, 24, 4, 256,
     17408, 262144, 1e-6, 1e7, 1.0f},
    {"Qwen3-8B", "qwen3", "Qwen3ForCausalLM", 4096, 151936, 36, 32, 8, 128, 12288, 40960, 1e-6, 1e6,
     0.0f},
};

enum { KNOWN_COUNT = sizeof(known_targets) / sizeof(*known_targets) };

// Shapes of tensors that are not there.
static void shape_tensors(struct target *target)
{
    int64_t h = target->hidden_size;
    target->embed = (struct target_tensor){NULL, DTYPE_BF16, target->vocab_size, h};
    target->head = target->embed;
    target->norm = (struct target_tensor){NULL, DTYPE_BF16, 1, h};
}

int target_open_sizes(struct target *target, const char *path, struct error *err)
{
    struct target_facts facts = {.tie = TIE_NO, .sizes_only = true};
    struct stat info;
    bool folder = stat(path, &info) == 0 && S_ISDIR(info.st_mode);
    *target = (struct target){.path = memory_strdup(path)};
    char *file = folder ? memory_format("%s/config.json", path) : memory_strdup(path);
    int result = target_read_config(target, file, &facts, err);
    free(file);
    if (result != 0) {
        target_close(target);
        return -1;
    }
    target->tied = facts.tie == TIE_YES || facts.tie == TIE_SAID_YES;
    shape_tensors(target);
    return 0;
}

bool target_open_known(struct target *target, const char *path)
{
    size_t length = strlen(path);
    while (length > 0 && path[length - 1] == '/')
        length--;
    for (size_t i = 0; i < KNOWN_COUNT; i++) {
        const struct known_target *known = &known_targets[i];
        size_t n = strlen(known->name);
        if (length < n || strncasecmp(path + length - n, known->name, n) != 0 ||
            (length > n && path[length - n - 1] != '/'))
            continue;
        *target = (struct target){.path = memory_strdup(known->name),
                                  .model_type = memory_strdup(known->model_type),
                                  .architecture = memory_strdup(known->architecture),
                                  .hidden_size = known->hidden_size,
                                  .vocab_size = known->vocab_size,
                                  .layers = known->layers,
                                  .num_attention_heads = known->heads,
                                  .num_key_value_heads = known->kv_heads,
                                  .head_dim = known->head_dim,
                                  .intermediate_size = known->intermediate_size,
                                  .max_position_embeddings = known->positions,
                                  .rms_norm_eps = known->rms_norm_eps,
                                  .rope_theta = known->rope_theta,
                                  .norm_weight_offset = known->norm_weight_offset,
                                  .embed_scale = 1.0f,
                                  .logit_scale = 1.0f};
        shape_tensors(target);
        return true;
    }
    return false;
}
