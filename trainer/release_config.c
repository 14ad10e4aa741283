// Owns the comparison of a released drafter's config.json with what is wanted. Fields that are not
// stated have the defaults of the classes that read the file: Transformers' Qwen3 configuration and
// speculators' DFlash one, which leave out what is at its default when they save.
#include "trainer/release_internal.h"

#include <math.h>
#include <string.h>

static const cJSON *get(const cJSON *object, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsNull(item) ? NULL : item;
}

static const char *text_of(const cJSON *item)
{
    return cJSON_IsString(item) ? item->valuestring : "";
}

// A number that must be exactly the wanted one. Where it is not stated it is `standard`; NAN: it must
// be stated.
struct number {
    const char *name, *key;
    double standard, wanted;
};

static void check_number(struct release_check *check, const cJSON *object,
                         const struct number *number)
{
    const cJSON *item = get(object, number->name);
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

static void check_flag(struct release_check *check, const cJSON *object, const char *name,
                       bool standard, bool wanted, const char *meaning)
{
    const cJSON *item = get(object, name);
    bool value = item == NULL ? standard : cJSON_IsTrue(item);
    if (value != wanted)
        release_fault(check, name, "%s, but %s", value ? "true" : "false", meaning);
}

static void check_text(struct release_check *check, const cJSON *object, const char *name,
                       const char *wanted, const char *meaning)
{
    const cJSON *item = get(object, name);
    if (item != NULL && strcmp(text_of(item), wanted) != 0)
        release_fault(check, name, "\"%s\", but %s", text_of(item), meaning);
}

// ---- the draft layers ----------------------------------------------------------------------------

static void check_widths(struct release_check *check, const cJSON *layers)
{
    const struct drafter_sizes *s = check->wanted->sizes;
    const struct number numbers[] = {
        {"hidden_size", "hidden_size of the target", 4096, (double)s->hidden},
        {"vocab_size", "vocab_size of the target", 151936, (double)s->vocab},
        {"num_hidden_layers", "drafter.layers", 32, (double)s->layers},
        {"num_attention_heads", "drafter.num_attention_heads", 32, (double)s->heads},
        {"num_key_value_heads", "drafter.num_key_value_heads", 32, (double)s->kv_heads},
        {"head_dim", "drafter.head_dim", 128, (double)s->head_dim},
        {"intermediate_size", "drafter.intermediate_size", 22016, (double)s->intermediate},
    };
    for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); i++)
        check_number(check, layers, &numbers[i]);
    const cJSON *eps = get(layers, "rms_norm_eps");
    double value = cJSON_IsNumber(eps) ? eps->valuedouble : 1e-6;
    if ((float)value != s->eps)
        release_fault(check, "rms_norm_eps", "%g, but drafter.rms_norm_eps is %g", value,
                      (double)s->eps);
    check_text(check, layers, "model_type", "qwen3", "dtrain's DFlash layers are qwen3");
    check_text(check, layers, "hidden_act", "silu", "dtrain's MLP has silu");
    check_flag(check, layers, "attention_bias", false, false, "dtrain's projections have no bias");
}

static void check_rope_members(struct release_check *check, const cJSON *rope)
{
    static const char *const known[] = {"rope_type",  "type",
                                        "rope_theta", "partial_rotary_factor",
                                        "factor",     "original_max_position_embeddings"};
    const cJSON *item = NULL;
    cJSON_ArrayForEach(item, rope)
    {
        bool found = cJSON_IsNull(item);
        for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++)
            found |= strcmp(item->string, known[i]) == 0;
        if (!found)
            release_fault(check, "rope_scaling", "dtrain does not know its member %s",
                          item->string);
    }
}

static void check_rope_scaling(struct release_check *check, const cJSON *layers, const cJSON *rope)
{
    static const char *const types[] = {[ROPE_SCALING_NONE] = "default",
                                        [ROPE_SCALING_LINEAR] = "linear",
                                        [ROPE_SCALING_YARN] = "yarn"};
    const struct drafter_sizes *s = check->wanted->sizes;
    const cJSON *type = get(rope, "rope_type") != NULL ? get(rope, "rope_type") : get(rope, "type");
    const char *name = type != NULL ? text_of(type) : "default", *wanted = types[s->rope_scaling];
    if (strcmp(name, wanted) != 0) {
        release_fault(check, "rope_scaling",
                      "the type is \"%s\", but drafter.rope_scaling gives \"%s\"", name, wanted);
        return;
    }
    if (s->rope_scaling == ROPE_SCALING_NONE)
        return;
    check_number(check, rope,
                 &(struct number){"factor", "drafter.rope_factor", NAN, s->rope_factor});
    const struct number positions = {"original_max_position_embeddings",
                                     "drafter.rope_original_positions", NAN,
                                     (double)s->rope_original_positions};
    const struct number all = {"max_position_embeddings", positions.key, 32768, positions.wanted};
    bool stated = get(rope, positions.name) != NULL;
    if (s->rope_scaling == ROPE_SCALING_YARN)
        check_number(check, stated ? rope : layers, stated ? &positions : &all);
}

static void check_rope(struct release_check *check, const cJSON *layers)
{
    const cJSON *rope = get(layers, "rope_parameters");
    if (rope == NULL)
        rope = get(layers, "rope_scaling");
    const cJSON *theta = get(rope, "rope_theta") != NULL ? rope : layers;
    const double wanted = check->wanted->sizes->rope_theta;
    check_number(check, theta, &(struct number){"rope_theta", "drafter.rope_theta", 10000, wanted});
    const struct number part = {"partial_rotary_factor", "the share that dtrain rotates", 1, 1};
    check_number(check, layers, &part);
    check_number(check, rope, &part);
    check_rope_members(check, rope);
    check_rope_scaling(check, layers, rope);
    check_flag(check, layers, "is_neox_style", true, true, "dtrain rotates halves");
}

static bool any_sliding(const struct drafter_sizes *sizes)
{
    bool any = false;
    for (int64_t i = 0; i < sizes->layers; i++)
        any |= sizes->sliding[i];
    return any;
}

static void check_layer_types(struct release_check *check, const cJSON *layers)
{
    const struct drafter_sizes *s = check->wanted->sizes;
    const cJSON *types = get(layers, "layer_types");
    if (types == NULL && cJSON_IsTrue(get(layers, "use_sliding_window")))
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
    if (!any_sliding(s))
        return;
    check_number(
        check, layers,
        &(struct number){"sliding_window", "drafter.sliding_window", NAN, (double)s->window});
    check_flag(check, layers, "use_sliding_window", true, true, "drafter.layer_types has windows");
}

// One flag for all layers, which servers prefer to the layer types.
static void check_causality(struct release_check *check, const cJSON *layers)
{
    const struct drafter_sizes *s = check->wanted->sizes;
    const cJSON *item = get(layers, "is_causal");
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
    check_flag(check, layers, "rope_is_neox_style", true, true, "dtrain rotates halves");
    check_flag(check, layers, "use_gemma_norm", false, false, "dtrain's norms multiply by w");
    check_number(check, layers, &(struct number){"logit_scale", "the factor on logits", 1, 1});
}

// ---- the block -----------------------------------------------------------------------------------

// `shift`: the file's number of a layer less dtrain's.
static void check_layer_ids(struct release_check *check, const cJSON *object, const char *name,
                            int64_t shift)
{
    const struct drafter_sizes *s = check->wanted->sizes;
    const cJSON *ids = get(object, name);
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

// `standard`: of block_size.
static void check_block(struct release_check *check, const cJSON *root, const cJSON *mask,
                        double standard)
{
    const struct drafter_sizes *s = check->wanted->sizes;
    const struct number numbers[] = {
        {"block_size", "drafter.block_size", standard, (double)s->block_size},
        {"mask_token_id", "drafter.mask_token_id", NAN, (double)s->mask_token_id}};
    check_number(check, root, &numbers[0]);
    check_number(check, mask, &numbers[1]);
    check_flag(check, root, "sample_from_anchor", false, s->predict_from_anchor,
               "drafter.predict_from_anchor is not");
    if (any_sliding(s))
        check_flag(check, root, "sliding_window_non_causal", false, !s->sliding_causal,
                   "drafter.sliding_window_non_causal is not");
}

// In z-lab's layout the window is measured from the query unless stated; speculators does not say.
static void check_window_origin(struct release_check *check, const cJSON *root,
                                const char *standard)
{
    const struct drafter_sizes *s = check->wanted->sizes;
    const char *wanted = s->window_origin == WINDOW_FROM_QUERY ? "query" : "anchor";
    const cJSON *item = get(root, "window_origin");
    const char *origin = item != NULL ? text_of(item) : standard;
    if (any_sliding(s) && origin != NULL && strcmp(origin, wanted) != 0)
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
                                            "block_size"};
        bool idle = cJSON_IsNull(item) || cJSON_IsFalse(item);
        if (strcmp(item->string, "causal") == 0)
            idle =
                cJSON_IsNull(item) || (cJSON_IsFalse(item) && !any_sliding(check->wanted->sizes));
        for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++)
            idle |= strcmp(item->string, known[i]) == 0;
        if (!idle)
            release_fault(check, item->string, "dtrain does not know this member of dflash_config");
    }
}

static void check_zlab(struct release_check *check, const cJSON *root)
{
    const cJSON *dflash = get(root, "dflash_config");
    check_block(check, root, dflash, NAN);
    check_layer_ids(check, dflash, "target_layer_ids", 0);
    check_window_origin(check, root, "query");
    check_dflash_members(check, dflash);
    double layers = (double)check->wanted->sizes->target_layers;
    check_number(check, root,
                 &(struct number){"num_target_layers", "the target's depth", layers, layers});
}

// Layer numbers of speculators count what enters a layer: dtrain's + 1.
static void check_speculators(struct release_check *check, const cJSON *root)
{
    const struct drafter_sizes *s = check->wanted->sizes;
    const struct number numbers[] = {
        {"draft_vocab_size", "vocab_size of the target", 32000, (double)s->vocab},
        {"target_hidden_size", "hidden_size of the target", (double)s->hidden, (double)s->hidden}};
    check_block(check, root, root, 8);
    check_layer_ids(check, root, "aux_hidden_state_layer_ids", 1);
    check_window_origin(check, root, NULL);
    check_number(check, root, &numbers[0]);
    check_number(check, root, &numbers[1]);
}

int release_recognise(const cJSON *root, const char *file, enum release_layout *layout,
                      struct error *err)
{
    const cJSON *kind = get(root, "speculators_model_type");
    const char *name = text_of(cJSON_GetArrayItem(get(root, "architectures"), 0));
    *layout = kind != NULL ? RELEASE_SPECULATORS : RELEASE_ZLAB;
    if (kind != NULL && strcmp(text_of(kind), "dflash") != 0)
        return error_set(err, "%s: speculators_model_type: \"%s\" is not a DFlash drafter", file,
                         text_of(kind));
    if (kind != NULL && !cJSON_IsObject(get(root, "transformer_layer_config")))
        return error_set(err, "%s: transformer_layer_config is missing", file);
    if (kind == NULL && strcmp(name, "DFlashDraftModel") != 0)
        return error_set(err,
                         "%s: architectures: \"%s\" is neither DFlashDraftModel (z-lab, SpecForge) "
                         "nor is there a speculators_model_type",
                         file, name);
    return 0;
}

void release_check_config(struct release_check *check, const cJSON *root,
                          enum release_layout layout)
{
    bool nested = layout == RELEASE_SPECULATORS;
    const cJSON *layers = nested ? get(root, "transformer_layer_config") : root;
    check_widths(check, layers);
    check_rope(check, layers);
    check_layer_types(check, layers);
    check_extras(check, layers);
    if (nested)
        check_speculators(check, root);
    else
        check_zlab(check, root);
}
