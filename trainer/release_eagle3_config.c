// Owns the comparison of a released EAGLE-3 drafter's config.json with what is wanted. Fields that are not
// stated have the defaults of the classes that read the file: Transformers' Llama and Qwen3 configurations,
// speculators' EAGLE-3 one, and SGLang's own.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "trainer/release_internal.h"

static double stated(const cJSON *object, const char *name, double standard)
{
    const cJSON *item = release_get(object, name);
    return cJSON_IsNumber(item) ? item->valuedouble : standard;
}

static void check_widths(struct release_check *check, const cJSON *layers)
{
    const struct drafter_sizes *s = check->wanted->sizes;
    bool qwen3 = s->head_norms;
    double hidden = stated(layers, "hidden_size", 4096);
    double heads = stated(layers, "num_attention_heads", 32);
    const struct release_number numbers[] = {
        {"hidden_size", "hidden_size of the target", 4096, (double)s->hidden},
        {"vocab_size", "vocab_size of the target", qwen3 ? 151936 : 32000, (double)s->vocab},
        {"num_hidden_layers", "drafter.layers", 32, (double)s->layers},
        {"num_attention_heads", "drafter.num_attention_heads", 32, (double)s->heads},
        {"num_key_value_heads", "drafter.num_key_value_heads", qwen3 ? 32 : heads,
         (double)s->kv_heads},
        {"head_dim", "drafter.head_dim", qwen3 ? 128 : hidden / heads, (double)s->head_dim},
        {"intermediate_size", "drafter.intermediate_size", qwen3 ? 22016 : 11008,
         (double)s->intermediate},
    };
    for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); i++)
        release_check_number(check, layers, &numbers[i]);
    release_check_eps(check, layers);
    release_check_text(check, layers, "model_type", qwen3 ? "qwen3" : "llama",
                       qwen3 ? "drafter.style is qwen3" : "drafter.style is llama");
    release_check_text(check, layers, "hidden_act", "silu", "dtrain's MLP has silu");
    static const char *const biases[] = {"attention_bias", "mlp_bias", "bias"};
    for (size_t i = 0; i < sizeof(biases) / sizeof(*biases); i++)
        release_check_flag(check, layers, biases[i], false, false,
                           "dtrain's matrices have no bias");
    release_check_flag(check, layers, "is_causal", true, true, "dtrain's EAGLE-3 is causal");
    release_check_number(check, layers,
                         &(struct release_number){"logit_scale", "the factor on logits", 1, 1});
}

// eagle_config has precedence where it states norm_before_fc; use_aux_norm is fc_norm's name in older files.
static void check_switches(struct release_check *check, const cJSON *root, const cJSON *eagle)
{
    const struct drafter_sizes *s = check->wanted->sizes;
    bool nested = release_get(eagle, "norm_before_fc") != NULL;
    bool older = cJSON_IsTrue(release_get(root, "use_aux_norm"));
    const struct {
        const cJSON *object;
        const char *name, *key;
        bool wanted;
    } switches[] = {
        {root, "norm_before_residual", "norm_before_residual", s->norm_before_residual},
        {nested ? eagle : root, "norm_before_fc", "norm_before_fc", s->norm_before_fc},
        {root, older ? "use_aux_norm" : "fc_norm", "fc_norm", s->fc_norm},
        {root, "norm_output", "norm_output", s->norm_output},
    };
    for (size_t i = 0; i < sizeof(switches) / sizeof(*switches); i++) {
        char meaning[64];
        snprintf(meaning, sizeof(meaning), "drafter.%s is %s", switches[i].key,
                 switches[i].wanted ? "true" : "false");
        release_check_flag(check, switches[i].object, switches[i].name, false, switches[i].wanted,
                           meaning);
    }
}

// What servers take where no layers are stated, in dtrain's numbering: outputs of 1, n/2 - 1, n - 4.
static bool are_usual_layers(const struct drafter_sizes *s)
{
    return s->features == 3 && s->target_layer_ids[0] == 1 &&
           s->target_layer_ids[1] == s->target_layers / 2 - 1 &&
           s->target_layer_ids[2] == s->target_layers - 4;
}

// `eagle`: the eagle_config of SpecForge's layout, NULL in speculators'. What stands at the top counts as vLLM does,
// which prefers it.
static void check_layer_ids(struct release_check *check, const cJSON *root, const cJSON *eagle,
                            bool nested)
{
    static const char name[] = "eagle_aux_hidden_state_layer_ids";
    bool top = release_get(root, name) != NULL, inner = release_get(eagle, name) != NULL;
    if (top)
        release_check_layer_ids(check, root, name, 1);
    if (inner)
        release_check_layer_ids(check, eagle, name, 0);
    if (!top && !inner && !are_usual_layers(check->wanted->sizes))
        release_check_layer_ids(check, nested ? root : eagle, name, nested ? 1 : 0);
}

// Whatever else eagle_config holds changes the drafter in a way that dtrain does not have.
static void check_eagle_members(struct release_check *check, const cJSON *eagle)
{
    static const char *const known[] = {"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state",
                                        "norm_before_fc", "layer_ids"};
    const cJSON *item = NULL;
    cJSON_ArrayForEach(item, eagle)
    {
        bool idle = cJSON_IsNull(item) || cJSON_IsFalse(item);
        for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++)
            idle |= strcmp(item->string, known[i]) == 0;
        if (!idle)
            release_fault(check, item->string, "dtrain does not know this member of eagle_config");
    }
    release_check_flag(check, eagle, "use_aux_hidden_state", true, true,
                       "dtrain's drafters take the features of several layers");
}

// `vocab`: Vd where draft_vocab_size is not stated.
static void check_vocabulary(struct release_check *check, const cJSON *root, double vocab)
{
    const struct drafter_sizes *s = check->wanted->sizes;
    const struct release_number numbers[] = {
        {"draft_vocab_size", "the size of the vocabulary in use (drafter.draft_vocab)", vocab,
         (double)s->draft_vocab},
        {"target_hidden_size", "hidden_size of the target", (double)s->hidden, (double)s->hidden}};
    release_check_number(check, root, &numbers[0]);
    release_check_number(check, root, &numbers[1]);
    release_check_flag(check, root, "tie_word_embeddings", false, false,
                       "dtrain's EAGLE-3 has a head of its own");
}

void release_check_eagle3_config(struct release_check *check, const cJSON *root,
                                 enum release_layout layout)
{
    const struct drafter_sizes *s = check->wanted->sizes;
    bool nested = layout == RELEASE_SPECULATORS;
    const cJSON *layers = nested ? release_get(root, "transformer_layer_config") : root;
    const cJSON *eagle = release_get(root, "eagle_config");
    check_widths(check, layers);
    release_check_rope(check, layers, s->head_norms ? 32768 : 2048);
    release_check_layer_types(check, layers);
    check_switches(check, root, eagle);
    check_layer_ids(check, root, nested ? NULL : eagle, nested);
    check_eagle_members(check, eagle);
    check_vocabulary(check, root, nested ? 32000 : (double)s->vocab);
    if (s->features != 3 && !nested && release_get(root, "num_aux_hidden_states") != NULL)
        release_check_number(check, root,
                             &(struct release_number){"num_aux_hidden_states",
                                                      "the number of target.layer_ids", 3,
                                                      (double)s->features});
}
