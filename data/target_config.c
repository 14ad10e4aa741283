// Owns what is believed about a target from its config.json: sizes, norm family, scales, and which
// configurations are refused because embedding or head would be computed wrongly. Opens no weights.
#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "data/target_internal.h"

// Families by the model_type of the text model, each between blanks: what the final norm is. Taken from the public model
// code; for all that build with random weights, logits were recomputed as head(norm(h)).
static const char rms_families[] =
    " apertus arcee bamba bitnet cwm deepseek_v2 deepseek_v3 deepseek_v32 diffllama dots1"
    " ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma3n_text gemma4_text glm glm4"
    " glm4_moe glm4_moe_lite glm4v_moe_text glm4v_text glm_moe_dsa gpt_oss granite granitemoe"
    " granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hyperclovax"
    " jamba kimi_k2 kimi_k25 kimi_linear lfm2 lfm2_moe llama llama4_text longcat_flash mimo"
    " mimo_v2_flash minimax minimax_m2 ministral ministral3 mistral mistral4 mixtral"
    " mllama_text_model nemotron_h olmo2 olmo3 olmoe phi3 phi4_multimodal qwen2 qwen2_5_vl"
    " qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_moe qwen3_omni_moe_text"
    " qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 solar_open ";
static const char rms_plus_one_families[] =
    " gemma gemma2 gemma3 gemma3_text minimax_m3_vl_text qwen3_5 qwen3_5_moe qwen3_5_moe_text"
    " qwen3_5_text qwen3_next step3p5 vaultgemma ";
static const char layer_norm_families[] =
    " bloom codegen cohere cohere2 dbrx falcon gpt2 gpt_bigcode gpt_neo gpt_neox gptj jais2"
    " mpt nemotron olmo opt persimmon phi phimoe stablelm starcoder2 ";

// Embeddings times sqrt(H).
static const char root_scaled_families[] =
    " gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4_text vaultgemma ";
// The head is the embedding unless config.json says otherwise.
static const char tied_families[] =
    " ernie4_5 ernie4_5_moe gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4_text lfm2"
    " lfm2_moe vaultgemma ";
// Logits are capped unless config.json says otherwise.
static const char capped_families[] = " gemma2 gemma3n_text gemma4_text vaultgemma ";
// embedding_multiplier and logits_scaling are theirs; dividing and multiplying.
static const char dividing_families[] = " granite granitemoe granitemoehybrid granitemoeshared ";
static const char multiplying_families[] = " hyperclovax ";

static bool listed(const char *families, const char *model_type)
{
    if (*model_type == '\0' || strchr(model_type, ' ') != NULL)
        return false;
    char *word = memory_format(" %s ", model_type);
    bool found = strstr(families, word) != NULL;
    free(word);
    return found;
}

#define COUNT(list) (sizeof(list) / sizeof(*(list)))

// Keys that change what embedding or head compute and are not implemented, with the value that
// changes nothing.
static const struct {
    const char *key;
    double neutral;
} refused_keys[] = {
    {"final_logit_softcapping", 0},
    {"logits_soft_cap", 0},
    {"lm_head_bias", 0},
    {"lm_head_multiplier", 1},
    {"mup_enabled", 0},
    {"dim_model_base", 0},
    {"scale_emb", 1},
    {"embedding_scale", 1},
    {"output_multiplier", 1},
    {"logits_mup_width_multiplier", 1},
};

struct config_reader {
    const cJSON *root; // the file
    const cJSON *text; // the text model's part; root when it is not nested
    const char *path;
    struct error *err;
    bool faulty;
};

enum { MOST_BYTES = 64 << 20 }; // of a JSON file; the largest index that is known has a few MiB

// All bytes of a file, with a 0 behind them.
static int read_file(const char *path, char **text, struct error *err)
{
    struct stat info;
    FILE *file = NULL;
    if (stat(path, &info) != 0)
        return error_set(err, "%s: can not open: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode) || info.st_size > MOST_BYTES)
        return error_set(err, "%s: %s", path,
                         S_ISREG(info.st_mode) ? "more than 64 MiB, which no JSON of a model has"
                                               : "not a regular file");
    if ((file = fopen(path, "rbe")) == NULL)
        return error_set(err, "%s: can not open: %s", path, strerror(errno));
    size_t used = 0, room = 1 << 16, got;
    *text = memory_alloc(room, 1);
    while ((got = fread(*text + used, 1, room - used - 1, file)) > 0) {
        used += got;
        if (used == room - 1)
            *text = memory_resize(*text, room *= 2, 1);
    }
    (*text)[used] = '\0';
    bool failed = ferror(file) != 0;
    fclose(file);
    return failed ? error_set(err, "%s: can not read", path) : 0;
}

int target_read_json(const char *path, cJSON **json, struct error *err)
{
    char *text = NULL;
    int result = read_file(path, &text, err);
    const char *place = NULL;
    *json = NULL;
    if (result == 0 && (*json = cJSON_ParseWithOpts(text, &place, 1)) == NULL)
        result = error_set(err, "%s: not JSON at byte %zu", path,
                           place != NULL ? (size_t)(place - text) : (size_t)0);
    if (result == 0 && !cJSON_IsObject(*json))
        result = error_set(err, "%s: not a JSON object", path);
    free(text);
    return result;
}

static const cJSON *given(const cJSON *object, const char *key)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsNull(item) ? NULL : item;
}

// From the text model's part, else from the file's top.
static const cJSON *given_anywhere(const struct config_reader *reader, const char *key)
{
    const cJSON *item = given(reader->text, key);
    return item != NULL ? item : given(reader->root, key);
}

// Beyond these no model is, and sums of bytes must not overflow.
static const struct {
    const char *key;
    int64_t most;
} size_limits[] = {{"hidden_size", 1 << 18},         {"vocab_size", 1 << 24},
                   {"num_hidden_layers", 100000},    {"num_attention_heads", 1 << 14},
                   {"num_key_value_heads", 1 << 14}, {"head_dim", 1 << 14},
                   {"intermediate_size", 1 << 20}};

static int64_t size_limit(const char *key)
{
    for (size_t i = 0; i < COUNT(size_limits); i++)
        if (strcmp(size_limits[i].key, key) == 0)
            return size_limits[i].most;
    return (int64_t)1 << 53;
}

// A positive integer of the text model; fallback when it is absent. Fallback -1: it is required.
static int64_t read_size(struct config_reader *reader, const char *key, int64_t fallback)
{
    const cJSON *item = given(reader->text, key);
    if (item == NULL && fallback >= 0)
        return fallback;
    double value = cJSON_IsNumber(item) ? item->valuedouble : 0.0;
    double most = (double)size_limit(key);
    if (value >= 1.0 && value <= most && value == floor(value))
        return (int64_t)value;
    reader->faulty = true;
    if (value > most)
        error_add(reader->err, "%s: %s is %.0f; at most %.0f is possible", reader->path, key, value,
                  most);
    else
        error_add(reader->err, "%s: %s%s", reader->path, key,
                  item == NULL ? " is missing" : " is not a positive integer");
    return 0;
}

static double read_norm_eps(struct config_reader *reader, const char *model_type, bool sizes_only)
{
    static const char *const keys[] = {"rms_norm_eps", "norm_eps", "layer_norm_epsilon"};
    for (size_t i = 0; i < COUNT(keys); i++) {
        const cJSON *item = given(reader->text, keys[i]);
        if (cJSON_IsNumber(item) && item->valuedouble > 0.0)
            return item->valuedouble;
    }
    // Published configs of this family leave out what its model code has as default.
    if (strcmp(model_type, "gemma3_text") == 0 || sizes_only)
        return 1e-6;
    reader->faulty = true;
    error_add(reader->err, "%s: rms_norm_eps is missing or not positive", reader->path);
    return 0.0;
}

// The base of the rotary embedding, wherever the versions of the format have kept it.
static double read_rope_theta(const struct config_reader *reader)
{
    static const char *const places[] = {"rope_parameters", "rope_scaling"};
    const cJSON *theta = given(reader->text, "rope_theta");
    for (size_t i = 0; theta == NULL && i < COUNT(places); i++) {
        const cJSON *place = given(reader->text, places[i]);
        const cJSON *full = given(place, "full_attention"); // one set per kind of layer
        theta = given(full != NULL ? full : place, "rope_theta");
    }
    return cJSON_IsNumber(theta) && theta->valuedouble > 0.0 ? theta->valuedouble : 10000.0;
}

static void add_special_id(struct target *target, const cJSON *item)
{
    if (!cJSON_IsNumber(item) || item->valuedouble < 0.0)
        return;
    int64_t id = (int64_t)item->valuedouble;
    for (size_t i = 0; i < target->special_count; i++) {
        if (target->special_ids[i] == id)
            return;
    }
    target->special_ids =
        memory_resize(target->special_ids, target->special_count + 1, sizeof(int64_t));
    target->special_ids[target->special_count++] = id;
}

static void read_special_ids(const struct config_reader *reader, struct target *target)
{
    static const char *const keys[] = {"bos_token_id", "eos_token_id", "pad_token_id"};
    const cJSON *levels[] = {reader->text, reader->root};
    for (size_t i = 0; i < COUNT(keys); i++) {
        for (size_t level = 0; level < 2; level++) {
            const cJSON *value = given(levels[level], keys[i]), *item;
            add_special_id(target, value);
            if (cJSON_IsArray(value)) {
                cJSON_ArrayForEach(item, value) add_special_id(target, item);
            }
        }
    }
}

static void refuse_key(struct config_reader *reader, const char *key, const char *why)
{
    reader->faulty = true;
    error_add(reader->err, "%s: %s: %s", reader->path, key, why);
}

static void check_refused_keys(struct config_reader *reader, const char *model_type)
{
    for (size_t i = 0; i < COUNT(refused_keys); i++) {
        const cJSON *item = given_anywhere(reader, refused_keys[i].key);
        double value = cJSON_IsNumber(item) ? item->valuedouble : cJSON_IsTrue(item) ? 1.0 : 0.0;
        if (item != NULL && !cJSON_IsFalse(item) && value != refused_keys[i].neutral)
            refuse_key(reader, refused_keys[i].key,
                       "this change to embedding or logits is not supported");
    }
    const char *cap = "final_logit_softcapping";
    bool silent = cJSON_GetObjectItemCaseSensitive(reader->text, cap) == NULL;
    if (silent && listed(capped_families, model_type))
        refuse_key(reader, cap,
                   "not given, and this model_type caps its logits then: this is not supported "
                   "(null says that it does not)");
}

// A factor that only some families have; elsewhere nobody knows what it would mean.
static double read_factor(struct config_reader *reader, const char *key, bool known)
{
    const cJSON *item = given_anywhere(reader, key);
    if (item == NULL)
        return 1.0;
    double value = cJSON_IsNumber(item) ? item->valuedouble : 0.0;
    if (!(value > 0.0) || (!known && value != 1.0)) {
        refuse_key(reader, key,
                   known ? "not a positive number"
                         : "this model_type is not known to have such a factor");
        return 1.0;
    }
    return value;
}

static void read_scales(struct config_reader *reader, struct target *target,
                        struct target_facts *facts)
{
    bool divides = listed(dividing_families, target->model_type);
    bool multiplies = listed(multiplying_families, target->model_type);
    double embed = read_factor(reader, "embedding_multiplier", divides || multiplies);
    double logits = read_factor(reader, "logits_scaling", divides || multiplies);
    read_factor(reader, "logit_scale", false);
    target->embed_scale = (float)embed;
    target->logit_scale = (float)(divides ? 1.0 / logits : logits);
    facts->embed_scale_is_root = listed(root_scaled_families, target->model_type);
    if (facts->embed_scale_is_root)
        target->embed_scale = (float)sqrt((double)target->hidden_size);
}

static void read_family(struct config_reader *reader, struct target *target, bool sizes_only)
{
    const cJSON *type = given_anywhere(reader, "model_type");
    target->model_type = memory_strdup(cJSON_IsString(type) ? type->valuestring : "");
    target->norm_weight_offset = listed(rms_plus_one_families, target->model_type) ? 1.0f : 0.0f;
    if (target->norm_weight_offset != 0.0f || listed(rms_families, target->model_type) ||
        (sizes_only && target->model_type[0] == '\0'))
        return;
    reader->faulty = true;
    if (listed(layer_norm_families, target->model_type)) {
        error_add(reader->err,
                  "%s: model_type '%s': its final norm is a LayerNorm, which is not supported",
                  reader->path, target->model_type);
        return;
    }
    error_add(reader->err,
              "%s: model_type '%s' is not known, so it is not known whether its final norm stores "
              "w or w - 1; known are, with w - 1:%sand with w:%s",
              reader->path, target->model_type, rms_plus_one_families, rms_families);
}

static enum tie read_tie(const struct config_reader *reader, const char *model_type)
{
    const char *key = "tie_word_embeddings";
    const cJSON *inner = given(reader->text, key), *outer = given(reader->root, key);
    bool yes = cJSON_IsTrue(inner) || cJSON_IsTrue(outer);
    bool no = cJSON_IsFalse(inner) || cJSON_IsFalse(outer);
    if (yes || no)
        return yes && no ? TIE_SAID_MIXED : yes ? TIE_SAID_YES : TIE_SAID_NO;
    return listed(tied_families, model_type) ? TIE_YES : TIE_NO;
}

static void read_facts(struct config_reader *reader, struct target *target,
                       struct target_facts *facts)
{
    const cJSON *names = given_anywhere(reader, "architectures");
    const cJSON *name = cJSON_IsArray(names) ? cJSON_GetArrayItem(names, 0) : NULL;
    target->architecture = memory_strdup(cJSON_IsString(name) ? name->valuestring : "");
    read_family(reader, target, facts->sizes_only);
    target->hidden_size = read_size(reader, "hidden_size", -1);
    target->layers = read_size(reader, "num_hidden_layers", -1);
    target->vocab_size = read_size(reader, "vocab_size", facts->sizes_only ? -1 : 0);
    target->num_attention_heads = read_size(reader, "num_attention_heads", 0);
    int64_t heads = target->num_attention_heads;
    target->num_key_value_heads = read_size(reader, "num_key_value_heads", heads);
    target->head_dim = read_size(reader, "head_dim", heads > 0 ? target->hidden_size / heads : 0);
    target->intermediate_size = read_size(reader, "intermediate_size", 0);
    target->max_position_embeddings =
        read_size(reader, "max_position_embeddings", facts->sizes_only ? 1 : 0);
    target->rms_norm_eps = read_norm_eps(reader, target->model_type, facts->sizes_only);
    target->rope_theta = read_rope_theta(reader);
    facts->tie = read_tie(reader, target->model_type);
    read_scales(reader, target, facts);
    read_special_ids(reader, target);
    check_refused_keys(reader, target->model_type);
}

// Multimodal configs keep the text model's part one or two levels down.
static const cJSON *text_part(const cJSON *root)
{
    static const char *const names[] = {"thinker_config", "text_config", "language_config",
                                        "llm_config"};
    const cJSON *part = root;
    for (size_t i = 0; i < COUNT(names); i++) {
        const cJSON *inner = given(part, names[i]);
        if (cJSON_IsObject(inner))
            part = inner;
    }
    return part;
}

int target_read_config(struct target *target, const char *file, struct target_facts *facts,
                       struct error *err)
{
    struct error faults = {""}; // a line each
    struct config_reader reader = {.err = &faults, .path = file};
    cJSON *root = NULL;
    int result = target_read_json(file, &root, err);
    if (result == 0) {
        reader.root = root;
        reader.text = text_part(root);
        read_facts(&reader, target, facts);
        if (reader.faulty)
            result = error_set(err, "%s", faults.text);
    }
    cJSON_Delete(root);
    return result;
}
