// Owns the comparison of a released DFlash drafter's config.json with what is wanted, and what EAGLE-3's
// (release_eagle3_config.c) shares with it. Fields that are not stated have the defaults of the classes
// that read the file: Transformers' Qwen3 configuration and speculators' DFlash one, which leave out what
// is at its default when they save.
#include "trainer/release_internal.h"

#include <math.h>
#include <string.h>

#include "trainer/export_internal.h"

const cJSON *release_get(const cJSON *object, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsNull(item) ? NULL : item;
}

static const char *text_of(const cJSON *item)
{
    return cJSON_IsString(item) ? item->valuestring : "";
}

void release_check_number(struct release_check *check, const cJSON *object,
                          const struct release_number *number)
{
    const cJSON *item = release_get(object, number->name);
    double value = item == NULL ? number->standard : item->valuedouble;
    if (item != NULL && !cJSON_IsNumber(item))
        release_fault(check, number->name, "not a number");
    else if (isnan(value))
        release_fault(check, number->name, "not stated, but %s is %.10g", number->key,
                      number->wanted);
    else if (value != number->wanted)
        release_fault(check, number->name, "%.10g%s, but %s is %.10g", value,
                      item == NULL ? " where it is not stated" : "", number->key, number->wanted);
}

void release_check_flag(struct release_check *check, const cJSON *object, const char *name,
                        bool standard, bool wanted, const char *meaning)
{
    const cJSON *item = release_get(object, name);
    bool value = item == NULL ? standard : cJSON_IsTrue(item);
    if (value != wanted)
        release_fault(check, name, "%s, but %s", value ? "true" : "false", meaning);
}

void release_check_text(struct release_check *check, const cJSON *object, const char *name,
                        const char *wanted, const char *meaning)
{
    const cJSON *item = release_get(object, name);
    if (item != NULL && strcmp(text_of(item), wanted) != 0)
        release_fault(check, name, "\"%s\", but %s", text_of(item), meaning);
}

// ---- the draft layers ----------------------------------------------------------------------------

void release_check_eps(struct release_check *check, const cJSON *layers)
{
    const cJSON *eps = release_get(layers, "rms_norm_eps");
    double value = cJSON_IsNumber(eps) ? eps->valuedouble : 1e-6;
    float wanted = check->wanted->sizes->eps;
    if ((float)value != wanted)
        release_fault(check, "rms_norm_eps", "%g, but drafter.rms_norm_eps is %g", value,
                      (double)wanted);
}

static void check_widths(struct release_check *check, const cJSON *layers)
{
    const struct drafter_sizes *s = check->wanted->sizes;
    const struct release_number numbers[] = {
        {"hidden_size", "hidden_size of the target", 4096, (double)s->hidden},
        {"vocab_size", "vocab_size of the target", 151936, (double)s->vocab},
        {"num_hidden_layers", "drafter.layers", 32, (double)s->layers},
        {"num_attention_heads", "drafter.num_attention_heads", 32, (double)s->heads},
        {"num_key_value_heads", "drafter.num_key_value_heads", 32, (double)s->kv_heads},
        {"head_dim", "drafter.head_dim", 128, (double)s->head_dim},
        {"intermediate_size", "drafter.intermediate_size", 22016, (double)s->intermediate},
    };
    for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); i++)
        release_check_number(check, layers, &numbers[i]);
    release_check_eps(check, layers);
    release_check_text(check, layers, "model_type", "qwen3", "dtrain's DFlash layers are qwen3");
    release_check_text(check, layers, "hidden_act", "silu", "dtrain's MLP has silu");
    release_check_flag(check, layers, "attention_bias", false, false,
                       "dtrain's projections have no bias");
}

static void check_rope_members(struct release_check *check, const cJSON *rope)
{
    static const char *const known[] = {"rope_type",  "type",
                                        "rope_theta", "partial_rotary_factor",
                                        "factor",     "original_max_position_embeddings"};
    // Of YaRN, as dtrain has them and Transformers where they are not stated.
    static const struct release_number fixed[] = {{"beta_fast", "dtrain's", 32, 32},
                                                  {"beta_slow", "dtrain's", 1, 1}};
    const cJSON *item = NULL;
    cJSON_ArrayForEach(item, rope)
    {
        bool found = cJSON_IsNull(item);
        for (size_t i = 0; i < sizeof(fixed) / sizeof(*fixed); i++)
            found |= strcmp(item->string, fixed[i].name) == 0 && cJSON_IsNumber(item) &&
                     item->valuedouble == fixed[i].wanted;
        for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++)
            found |= strcmp(item->string, known[i]) == 0;
        if (!found)
            release_fault(check, "rope_scaling", "dtrain does not know its member %s",
                          item->string);
    }
}

static void check_rope_scaling(struct release_check *check, const cJSON *layers, const cJSON *rope,
                               double standard_positions)
{
    static const char *const types[] = {[ROPE_SCALING_NONE] = "default",
                                        [ROPE_SCALING_LINEAR] = "linear",
                                        [ROPE_SCALING_YARN] = "yarn"};
    const struct drafter_sizes *s = check->wanted->sizes;
    const cJSON *type = release_get(rope, "rope_type") != NULL ? release_get(rope, "rope_type")
                                                               : release_get(rope, "type");
    const char *name = type != NULL ? text_of(type) : "default", *wanted = types[s->rope_scaling];
    if (strcmp(name, wanted) != 0) {
        release_fault(check, "rope_scaling",
                      "the type is \"%s\", but drafter.rope_scaling gives \"%s\"", name, wanted);
        return;
    }
    if (s->rope_scaling == ROPE_SCALING_NONE)
        return;
    release_check_number(
        check, rope,
        &(struct release_number){"factor", "drafter.rope_factor", NAN, s->rope_factor});
    const struct release_number positions = {"original_max_position_embeddings",
                                             "drafter.rope_original_positions", NAN,
                                             (double)s->rope_original_positions};
    const struct release_number all = {"max_position_embeddings", positions.key, standard_positions,
                                       positions.wanted};
    bool stated = release_get(rope, positions.name) != NULL;
    if (s->rope_scaling == ROPE_SCALING_YARN)
        release_check_number(check, stated ? rope : layers, stated ? &positions : &all);
}

void release_check_rope(struct release_check *check, const cJSON *layers, double positions)
{
    const cJSON *rope = release_get(layers, "rope_parameters");
    if (rope == NULL)
        rope = release_get(layers, "rope_scaling");
    const cJSON *theta = release_get(rope, "rope_theta") != NULL ? rope : layers;
    const double wanted = check->wanted->sizes->rope_theta;
    release_check_number(
        check, theta, &(struct release_number){"rope_theta", "drafter.rope_theta", 10000, wanted});
    const struct release_number part = {"partial_rotary_factor", "the share that dtrain rotates", 1,
                                        1};
    release_check_number(check, layers, &part);
    release_check_number(check, rope, &part);
    check_rope_members(check, rope);
    check_rope_scaling(check, layers, rope, positions);
    release_check_flag(check, layers, "is_neox_style", true, true, "dtrain rotates halves");
}

void release_check_layer_types(struct release_check *check, const cJSON *layers)
{
    const struct drafter_sizes *s = check->wanted->sizes;
    const cJSON *types = release_get(layers, "layer_types");
    bool qwen3 = s->kind == DRAFTER_DFLASH || s->head_norms; // Llama's configuration has no switch
    if (types == NULL && cJSON_IsTrue(release_get(layers, "use_sliding_window")))
        release_fault(check, "layer_types", "not stated, although use_sliding_window is true");
    if (types != NULL && cJSON_GetArraySize(types) != s->layers)
        release_fault(check, "layer_types", "%d entries, but drafter.layers is %lld",
                      cJSON_GetArraySize(types), (long long)s->layers);
    for (int i = 0; i < s->layers; i++) {
        const cJSON *item = cJSON_GetArrayItem(types, i);
        const char *type = types == NULL ? "full_attention" : text_of(item);
        const char *wanted = s->sliding[i] ? "sliding_attention" : "full_attention";
        if ((types == NULL || item != NULL) && strcmp(type, wanted) != 0) {
            release_fault(check, "layer_types",
                          "layer %d is %s, but drafter.layer_types makes it %s", i, type, wanted);
            break;
        }
    }
    if (!export_any_sliding(s))
        return;
    release_check_number(check, layers,
                         &(struct release_number){"sliding_window", "drafter.sliding_window", NAN,
                                                  (double)s->window});
    if (qwen3)
        release_check_flag(check, layers, "use_sliding_window", true, true,
                           "drafter.layer_types has windows");
}

// One flag for all layers, which servers prefer to the layer types.
static void check_causality(struct release_check *check, const cJSON *layers)
{
    const struct drafter_sizes *s = check->wanted->sizes;
    const cJSON *item = release_get(layers, "is_causal");
    for (int i = 0; item != NULL && i < s->layers; i++) {
        bool causal = s->sliding[i] && s->sliding_causal;
        if (cJSON_IsTrue(item) != causal) {
            release_fault(check, "is_causal", "%s for all layers, but layer %d is %s",
                          cJSON_IsTrue(item) ? "true" : "false", i,
                          causal ? "causal in the block" : "not causal in the block");
            return;
        }
    }
}

// What some served drafters have around the layers and dtrain's have not.
static void check_extras(struct release_check *check, const cJSON *layers)
{
    check_causality(check, layers);
    release_check_flag(check, layers, "rope_is_neox_style", true, true, "dtrain rotates halves");
    release_check_flag(check, layers, "use_gemma_norm", false, false,
                       "dtrain's norms multiply by w");
    release_check_number(check, layers,
                         &(struct release_number){"logit_scale", "the factor on logits", 1, 1});
}

// ---- the block -----------------------------------------------------------------------------------

// `shift`: the file's number of a layer less dtrain's.
void release_check_layer_ids(struct release_check *check, const cJSON *object, const char *name,
                             int64_t shift)
{
    const struct drafter_sizes *s = check->wanted->sizes;
    const cJSON *ids = release_get(object, name);
    bool same = cJSON_IsArray(ids) && cJSON_GetArraySize(ids) == s->features;
    for (int i = 0; same && i < s->features; i++) {
        const cJSON *id = cJSON_GetArrayItem(ids, i);
        same = cJSON_IsNumber(id) && id->valuedouble == (double)(s->target_layer_ids[i] + shift);
    }
    if (same)
        return;
    cJSON *wanted = cJSON_CreateArray();
    for (int64_t i = 0; i < s->features; i++)
        cJSON_AddItemToArray(wanted, cJSON_CreateNumber((double)(s->target_layer_ids[i] + shift)));
    char *got = ids != NULL ? cJSON_PrintUnformatted(ids) : NULL;
    char *text = cJSON_PrintUnformatted(wanted);
    release_fault(check, name,
                  "%s, but the layers in use (target.layer_ids) are %s in this numbering",
                  got != NULL ? got : "not stated", text);
    cJSON_free(text);
    cJSON_free(got);
    cJSON_Delete(wanted);
}

// speculators' class for DFlash with a Markov head.
static bool is_dspark(const cJSON *root)
{
    return strcmp(text_of(release_get(root, "speculators_model_type")), "dspark") == 0;
}

static void check_markov(struct release_check *check, const cJSON *root)
{
    const struct release_number rank = {"markov_rank", "drafter.markov_rank",
                                        is_dspark(root) ? 256 : 0,
                                        (double)check->wanted->sizes->markov_rank};
    release_check_number(check, root, &rank);
    release_check_text(check, root, "markov_head_type", "vanilla",
                       "dtrain's Markov head depends on the token in front alone");
    release_check_flag(check, root, "enable_confidence_head", is_dspark(root), false,
                       "dtrain has no confidence head");
}

// What dflash_config states has precedence over what is stated beside it, as servers have it.
static const cJSON *stating(const cJSON *dflash, const cJSON *root, const char *name)
{
    return release_get(dflash, name) != NULL ? dflash : root;
}

// `standard`: of block_size. `mask`: the object that states the mask token.
static void check_block(struct release_check *check, const cJSON *root, const cJSON *mask,
                        double standard)
{
    const struct drafter_sizes *s = check->wanted->sizes;
    const struct release_number numbers[] = {
        {"block_size", "drafter.block_size", standard, (double)s->block_size},
        {"mask_token_id", "drafter.mask_token_id", NAN, (double)s->mask_token_id}};
    release_check_number(check, stating(mask, root, "block_size"), &numbers[0]);
    release_check_number(check, mask, &numbers[1]);
    release_check_flag(check, root, "sample_from_anchor", is_dspark(root), s->predict_from_anchor,
                       "drafter.predict_from_anchor is not");
    if (export_any_sliding(s))
        release_check_flag(check, root, "sliding_window_non_causal", false, !s->sliding_causal,
                           "drafter.sliding_window_non_causal is not");
}

// In z-lab's layout the window is measured from the query unless stated; speculators does not say.
static void check_window_origin(struct release_check *check, const cJSON *root,
                                const char *standard)
{
    const struct drafter_sizes *s = check->wanted->sizes;
    const char *wanted = s->window_origin == WINDOW_FROM_QUERY ? "query" : "anchor";
    const cJSON *item = release_get(root, "window_origin");
    const char *origin = item != NULL ? text_of(item) : standard;
    if (export_any_sliding(s) && origin != NULL && strcmp(origin, wanted) != 0)
        release_fault(check, "window_origin", "%s, but drafter.window_origin is %s", origin,
                      wanted);
}

// Whatever else dflash_config holds changes the drafter in a way that dtrain does not have.
static void check_dflash_members(struct release_check *check, const cJSON *dflash)
{
    const cJSON *item = NULL;
    cJSON_ArrayForEach(item, dflash)
    {
        static const char *const known[] = {"mask_token_id", "target_layer_ids", "mask_token",
                                            "block_size", "num_target_layers"};
        bool idle = cJSON_IsNull(item) || cJSON_IsFalse(item);
        if (strcmp(item->string, "causal") == 0)
            idle = cJSON_IsNull(item) ||
                   (cJSON_IsFalse(item) && !export_any_sliding(check->wanted->sizes));
        for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++)
            idle |= strcmp(item->string, known[i]) == 0;
        if (!idle)
            release_fault(check, item->string, "dtrain does not know this member of dflash_config");
    }
}

static void check_zlab(struct release_check *check, const cJSON *root)
{
    const cJSON *dflash = release_get(root, "dflash_config");
    check_block(check, root, dflash, NAN);
    release_check_layer_ids(check, dflash, "target_layer_ids", 0);
    check_window_origin(check, root, "query");
    check_dflash_members(check, dflash);
    double layers = (double)check->wanted->sizes->target_layers;
    const struct release_number depth = {"num_target_layers", "the target's depth", layers, layers};
    release_check_number(check, stating(dflash, root, depth.name), &depth);
}

// Layer numbers of speculators count what enters a layer: dtrain's + 1.
static void check_speculators(struct release_check *check, const cJSON *root)
{
    const struct drafter_sizes *s = check->wanted->sizes;
    const struct release_number numbers[] = {
        {"draft_vocab_size", "vocab_size of the target", 32000, (double)s->vocab},
        {"target_hidden_size", "hidden_size of the target", (double)s->hidden, (double)s->hidden}};
    check_block(check, root, root, 8);
    release_check_layer_ids(check, root, "aux_hidden_state_layer_ids", 1);
    check_window_origin(check, root, NULL);
    release_check_number(check, root, &numbers[0]);
    release_check_number(check, root, &numbers[1]);
}

// A name of the kind that is trained, and its layout.
static bool is_kind(int kind, const char *type, const char *architecture,
                    enum release_layout *layout)
{
    static const char *const eagle3[] = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM",
                                         "Eagle3Qwen3ForCausalLM"};
    *layout = RELEASE_SPECULATORS;
    if (type != NULL && kind == DRAFTER_DFLASH)
        return strcmp(type, "dflash") == 0 || strcmp(type, "dspark") == 0;
    if (type != NULL)
        return strcmp(type, "eagle3") == 0;
    *layout = kind == DRAFTER_DFLASH ? RELEASE_ZLAB : RELEASE_SPECFORGE;
    if (kind == DRAFTER_DFLASH)
        return strcmp(architecture, "DFlashDraftModel") == 0;
    bool known = false;
    for (size_t i = 0; i < sizeof(eagle3) / sizeof(*eagle3); i++)
        known |= strcmp(architecture, eagle3[i]) == 0;
    return known;
}

int release_recognise(const cJSON *root, int kind, const char *file, enum release_layout *layout,
                      struct error *err)
{
    const cJSON *type = release_get(root, "speculators_model_type");
    const char *name = text_of(cJSON_GetArrayItem(release_get(root, "architectures"), 0));
    bool dflash = kind == DRAFTER_DFLASH;
    bool known = is_kind(kind, type != NULL ? text_of(type) : NULL, name, layout);
    if (!known && type != NULL)
        return error_set(err, "%s: speculators_model_type: \"%s\" is not %s drafter", file,
                         text_of(type), dflash ? "a DFlash" : "an EAGLE-3");
    if (!known)
        return error_set(err,
                         "%s: architectures: \"%s\" is neither %s nor is there a "
                         "speculators_model_type",
                         file, name,
                         dflash ? "DFlashDraftModel (z-lab, SpecForge)"
                                : "LlamaForCausalLMEagle3 (SpecForge, SGLang)");
    if (type != NULL && !cJSON_IsObject(release_get(root, "transformer_layer_config")))
        return error_set(err, "%s: transformer_layer_config is missing", file);
    return 0;
}

void release_check_config(struct release_check *check, const cJSON *root,
                          enum release_layout layout)
{
    bool nested = layout == RELEASE_SPECULATORS;
    check_markov(check, root);
    if (check->wanted->sizes->kind == DRAFTER_EAGLE3) {
        release_check_eagle3_config(check, root, layout);
        return;
    }
    const cJSON *layers = nested ? release_get(root, "transformer_layer_config") : root;
    check_widths(check, layers);
    release_check_rope(check, layers, 32768);
    release_check_layer_types(check, layers);
    check_extras(check, layers);
    if (nested)
        check_speculators(check, root);
    else
        check_zlab(check, root);
}
