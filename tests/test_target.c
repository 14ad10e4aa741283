// Targets: every layout a model directory may have, and every refusal by the name of what is not
// understood. Directories are made here, tiny.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include <math.h>

#include "base/bf16.h"
#include "data/safetensors.h"
#include "data/target.h"
#include "tests/support/config_files.h"

enum { VOCAB = 6, HIDDEN = 8 };

static int setup(void **state)
{
    struct config_folder *folder = memory_alloc(1, sizeof(*folder));
    config_folder_open(folder);
    *state = folder;
    return 0;
}

static int teardown(void **state)
{
    config_folder_close(*state);
    free(*state);
    return 0;
}

static void write_config(const struct config_folder *folder, const char *text)
{
    free(config_folder_write(folder, "config.json", text));
}

// A tensor of a file. Elements are distinct, and follow from the length of the name.
struct part {
    const char *name;
    enum dtype dtype;
    int dims;
    int64_t shape[5];
};

static float value_of(const char *name, int64_t i)
{
    return (float)strlen(name) + 0.125f * (float)i;
}

static void write_part(struct safetensors_writer *writer, int index, const struct part *part)
{
    struct error err;
    int64_t count = 1;
    for (int d = 0; d < part->dims; d++)
        count *= part->shape[d];
    for (int64_t i = 0; i < count; i++) {
        float value = value_of(part->name, i);
        bf16 rounded = bf16_from_float(value);
        size_t size = dtype_size(part->dtype);
        const void *bytes = part->dtype == DTYPE_BF16 ? (const void *)&rounded : &value;
        if (part->dtype != DTYPE_BF16 && part->dtype != DTYPE_F32)
            continue; // stays 0
        assert_int_equal(
            safetensors_writer_write(writer, index, (size_t)i * size, bytes, size, &err), 0);
    }
}

static void write_file(const struct config_folder *folder, const char *name,
                       const struct part *parts, size_t count)
{
    struct error err = {""};
    struct safetensors_writer *writer;
    char *path = config_folder_path(folder, name);
    assert_int_equal(safetensors_writer_open(&writer, path, &err), 0);
    for (size_t i = 0; i < count; i++)
        safetensors_writer_add(writer, parts[i].name, parts[i].dtype, parts[i].dims,
                               parts[i].shape);
    assert_int_equal(safetensors_writer_begin(writer, &err), 0);
    for (size_t i = 0; i < count; i++)
        write_part(writer, (int)i, &parts[i]);
    assert_int_equal(safetensors_writer_close(writer, true, &err), 0);
    free(path);
}

static const struct part plain_parts[] = {
    {"embed_tokens.weight", DTYPE_F32, 2, {VOCAB, HIDDEN}},
    {"lm_head.weight", DTYPE_F32, 2, {VOCAB, HIDDEN}},
    {"norm.weight", DTYPE_F32, 1, {HIDDEN}},
};
enum { PLAIN_PARTS = 3 };

// A target of these keys behind the sizes every config has.
static void write_plain(const struct config_folder *folder, const char *keys)
{
    char *text = memory_format("{\"hidden_size\": 8, \"num_hidden_layers\": 3, \"vocab_size\": 6, "
                               "\"num_attention_heads\": 2, \"rms_norm_eps\": 1e-5%s%s}",
                               *keys != '\0' ? ", " : "", keys);
    write_config(folder, text);
    write_file(folder, "head.safetensors", plain_parts, PLAIN_PARTS);
    free(text);
}

static void open_target(struct target *target, const struct config_folder *folder)
{
    struct error err = {""};
    if (target_open(target, folder->path, &err) != 0)
        fail_msg("%s", err.text);
}

static void expect_refusal(const struct config_folder *folder, const char *says)
{
    struct target target;
    struct error err = {""};
    if (target_open(&target, folder->path, &err) == 0)
        fail_msg("opened, although: %s", says);
    if (strstr(err.text, says) == NULL || strstr(err.text, folder->path) == NULL)
        fail_msg("expected '%s' in: %s", says, err.text);
}

static void check_values(const struct target_tensor *tensor, const char *name, int64_t rows,
                         enum dtype dtype)
{
    assert_int_equal(tensor->rows, rows);
    assert_int_equal(tensor->columns, HIDDEN);
    assert_int_equal(tensor->dtype, dtype);
    for (int64_t i = 0; i < rows * HIDDEN; i++) {
        float value = dtype == DTYPE_BF16 ? bf16_to_float(((const bf16 *)tensor->data)[i])
                                          : ((const float *)tensor->data)[i];
        float wanted = value_of(name, i);
        assert_true(value ==
                    (dtype == DTYPE_BF16 ? bf16_to_float(bf16_from_float(wanted)) : wanted));
    }
}

// ---- layouts ----------------------------------------------------------------------------------------

static void test_target_directory(void **state)
{
    write_plain(*state, "\"model_type\": \"qwen3\", \"architectures\": [\"Qwen3ForCausalLM\"], "
                        "\"num_key_value_heads\": 1, \"head_dim\": 16, \"intermediate_size\": 32, "
                        "\"max_position_embeddings\": 4096, \"rope_theta\": 1000000, "
                        "\"bos_token_id\": 1, \"eos_token_id\": 2, \"pad_token_id\": 2");
    struct target target;
    open_target(&target, *state);
    assert_string_equal(target.model_type, "qwen3");
    assert_string_equal(target.architecture, "Qwen3ForCausalLM");
    assert_int_equal(target.hidden_size, 8);
    assert_int_equal(target.vocab_size, 6);
    assert_int_equal(target.layers, 3);
    assert_int_equal(target.num_attention_heads, 2);
    assert_int_equal(target.num_key_value_heads, 1);
    assert_int_equal(target.head_dim, 16);
    assert_int_equal(target.intermediate_size, 32);
    assert_int_equal(target.max_position_embeddings, 4096);
    assert_true(target.rms_norm_eps == 1e-5);
    assert_true(target.rope_theta == 1e6);
    assert_false(target.tied);
    assert_true(target.norm_weight_offset == 0.0f);
    assert_true(target.embed_scale == 1.0f && target.logit_scale == 1.0f);
    assert_int_equal(target.special_count, 2); // eos and pad are the same
    assert_int_equal(target.special_ids[0], 1);
    assert_int_equal(target.special_ids[1], 2);
    check_values(&target.embed, "embed_tokens.weight", VOCAB, DTYPE_F32);
    check_values(&target.head, "lm_head.weight", VOCAB, DTYPE_F32);
    check_values(&target.norm, "norm.weight", 1, DTYPE_F32);
    target_close(&target);
}

static void test_defaults(void **state)
{
    write_plain(*state, "\"model_type\": \"llama\", \"pad_token_id\": null");
    struct target target;
    open_target(&target, *state);
    assert_int_equal(target.num_key_value_heads, 2);
    assert_int_equal(target.head_dim, 4);
    assert_int_equal(target.intermediate_size, 0);
    assert_true(target.rope_theta == 10000.0);
    assert_string_equal(target.architecture, "");
    assert_int_equal(target.special_count, 0);
    target_close(&target);
}

static void test_single_model_file(void **state)
{
    const struct part parts[] = {
        {"model.layers.0.mlp.up_proj.weight", DTYPE_BF16, 2, {3, 5}},
        {"model.norm.weight", DTYPE_BF16, 1, {HIDDEN}},
        {"model.embed_tokens.weight", DTYPE_BF16, 2, {VOCAB, HIDDEN}},
        {"lm_head.weight", DTYPE_F32, 2, {VOCAB, HIDDEN}},
    };
    write_config(*state, "{\"model_type\": \"mistral\", \"hidden_size\": 8, "
                         "\"num_hidden_layers\": 1, \"rms_norm_eps\": 1e-6}");
    write_file(*state, "model.safetensors", parts, 4);
    struct target target;
    open_target(&target, *state);
    assert_int_equal(target.vocab_size, VOCAB); // from the head
    check_values(&target.embed, "model.embed_tokens.weight", VOCAB, DTYPE_BF16);
    check_values(&target.head, "lm_head.weight", VOCAB, DTYPE_F32);
    check_values(&target.norm, "model.norm.weight", 1, DTYPE_BF16);
    target_close(&target);
}

// A multimodal model in shards: nested config, nested names, a tensor of five dimensions beside, and a
// shard that is not there but not needed either.
static void test_sharded_model(void **state)
{
    const struct part first[] = {
        {"model.visual.patch_embed.proj.weight", DTYPE_BF16, 5, {2, 1, 2, 1, 3}},
        {"model.language_model.embed_tokens.weight", DTYPE_BF16, 2, {VOCAB, HIDDEN}},
    };
    const struct part last[] = {
        {"model.language_model.norm.weight", DTYPE_BF16, 1, {HIDDEN}},
        {"lm_head.weight", DTYPE_BF16, 2, {VOCAB, HIDDEN}},
    };
    write_config(
        *state,
        "{\"model_type\": \"qwen3_5\", \"architectures\": [\"Qwen3_5ForConditionalGeneration\"], "
        "\"tie_word_embeddings\": false, \"eos_token_id\": [5, 4], \"hidden_size\": 999, "
        "\"text_config\": {\"model_type\": \"qwen3_5_text\", \"hidden_size\": 8, "
        "\"num_hidden_layers\": 7, \"vocab_size\": 6, \"num_attention_heads\": 4, "
        "\"rms_norm_eps\": 1e-6, \"eos_token_id\": 3, "
        "\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 10000000}}}");
    write_file(*state, "model-1.safetensors", first, 2);
    write_file(*state, "model-3.safetensors", last, 2);
    free(config_folder_write(
        *state, "model.safetensors.index.json",
        "{\"metadata\": {\"total_size\": 1}, \"weight_map\": {"
        "\"model.visual.patch_embed.proj.weight\": \"model-1.safetensors\", "
        "\"model.language_model.embed_tokens.weight\": \"model-1.safetensors\", "
        "\"model.language_model.layers.0.mlp.up_proj.weight\": \"model-2.safetensors\", "
        "\"model.language_model.norm.weight\": \"model-3.safetensors\", "
        "\"lm_head.weight\": \"model-3.safetensors\"}}"));
    struct target target;
    open_target(&target, *state);
    assert_string_equal(target.model_type, "qwen3_5_text");
    assert_string_equal(target.architecture, "Qwen3_5ForConditionalGeneration");
    assert_int_equal(target.hidden_size, 8);
    assert_int_equal(target.layers, 7);
    assert_true(target.rope_theta == 1e7);
    assert_true(target.norm_weight_offset == 1.0f);
    const int64_t ids[] = {3, 5, 4};
    assert_int_equal(target.special_count, 3);
    assert_memory_equal(target.special_ids, ids, sizeof(ids));
    check_values(&target.embed, "model.language_model.embed_tokens.weight", VOCAB, DTYPE_BF16);
    check_values(&target.head, "lm_head.weight", VOCAB, DTYPE_BF16);
    check_values(&target.norm, "model.language_model.norm.weight", 1, DTYPE_BF16);
    target_close(&target);

    free(config_folder_write(*state, "model.safetensors.index.json",
                             "{\"weight_map\": {"
                             "\"model.embed_tokens.weight\": \"model-1.safetensors\", "
                             "\"model.norm.weight\": \"model-2.safetensors\"}}"));
    expect_refusal(*state, "no tensor 'model.embed_tokens.weight'");
    free(config_folder_write(
        *state, "model.safetensors.index.json",
        "{\"weight_map\": {"
        "\"model.language_model.embed_tokens.weight\": \"model-1.safetensors\", "
        "\"model.language_model.norm.weight\": \"model-2.safetensors\"}}"));
    expect_refusal(*state, "model-2.safetensors");
}

static void test_names(void **state)
{
    static const struct {
        const char *embed, *norm, *head;
    } cases[] = {
        {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"},
        {"language_model.model.embed_tokens.weight", "language_model.model.norm.weight",
         "language_model.lm_head.weight"},
        {"model.language_model.embed_tokens.weight", "model.language_model.norm.weight",
         "model.language_model.lm_head.weight"},
        {"thinker.model.embed_tokens.weight", "thinker.model.norm.weight",
         "thinker.lm_head.weight"},
        {"transformer.wte.weight", "transformer.ln_f.weight", "lm_head.weight"},
        {"model.embed_tokens.weight", "model.final_layernorm.weight", "lm_head.weight"},
        {"model.embed_tokens.weight", "model.embedding_norm.weight", "lm_head.weight"},
        {"backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight"},
    };
    write_config(*state, "{\"model_type\": \"llama\", \"hidden_size\": 8, "
                         "\"num_hidden_layers\": 1, \"rms_norm_eps\": 1e-6}");
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        const struct part parts[] = {
            // must not be taken for the target's own
            {"model.layers.61.embed_tokens.weight", DTYPE_F32, 2, {VOCAB, HIDDEN}},
            {"mtp.norm.weight", DTYPE_F32, 1, {HIDDEN}},
            {"model.layers.61.shared_head.norm.weight", DTYPE_F32, 1, {HIDDEN}},
            {cases[i].embed, DTYPE_F32, 2, {VOCAB, HIDDEN}},
            {cases[i].norm, DTYPE_F32, 1, {HIDDEN}},
            {cases[i].head, DTYPE_F32, 2, {VOCAB, HIDDEN}},
        };
        write_file(*state, "model.safetensors", parts, 6);
        struct target target;
        open_target(&target, *state);
        check_values(&target.embed, cases[i].embed, VOCAB, DTYPE_F32);
        check_values(&target.norm, cases[i].norm, 1, DTYPE_F32);
        check_values(&target.head, cases[i].head, VOCAB, DTYPE_F32);
        target_close(&target);
    }
}

static void test_rope_theta_of_mixed_layers(void **state)
{
    write_plain(*state, "\"model_type\": \"llama\", \"rope_parameters\": {"
                        "\"sliding_attention\": {\"rope_theta\": 10000}, "
                        "\"full_attention\": {\"rope_theta\": 500000, \"rope_type\": \"linear\"}}");
    struct target target;
    open_target(&target, *state);
    assert_true(target.rope_theta == 500000.0);
    target_close(&target);
}

// ---- tied heads -------------------------------------------------------------------------------------

static void write_tied(const struct config_folder *folder, const char *keys)
{
    write_plain(folder, keys);
    const struct part parts[] = {plain_parts[0], plain_parts[2]};
    write_file(folder, "head.safetensors", parts, 2);
}

static void test_tied_heads(void **state)
{
    static const char *const tied[] = {
        "\"model_type\": \"qwen3\", \"tie_word_embeddings\": true",
        "\"model_type\": \"gemma3_text\"",
        "\"tie_word_embeddings\": true, \"text_config\": {\"model_type\": \"qwen3\", "
        "\"tie_word_embeddings\": false, \"hidden_size\": 8, \"num_hidden_layers\": 1, "
        "\"rms_norm_eps\": 1e-6}",
    };
    for (size_t i = 0; i < sizeof(tied) / sizeof(*tied); i++) {
        write_tied(*state, tied[i]);
        struct target target;
        open_target(&target, *state);
        assert_true(target.tied);
        assert_ptr_equal(target.head.data, target.embed.data);
        assert_int_equal(target.head.rows, VOCAB);
        target_close(&target);
    }
    write_tied(*state, "\"model_type\": \"qwen3\"");
    expect_refusal(*state, "'lm_head.weight', and tie_word_embeddings is not given");
    write_tied(*state, "\"model_type\": \"gemma3_text\", \"tie_word_embeddings\": false");
    expect_refusal(*state, "'lm_head.weight', and tie_word_embeddings is false");
}

// Said to be tied, but a head is there: harmless when it is the same, else one of the two is wrong.
// Values follow the length of a tensor's name.
static void test_tied_with_head(void **state)
{
    struct part parts[] = {
        {"transformer.wte.weight", DTYPE_F32, 2, {VOCAB, HIDDEN}},
        {"transformer.norm.weight", DTYPE_F32, 1, {HIDDEN}},
        {"thinker.lm_head.weight", DTYPE_F32, 2, {VOCAB, HIDDEN}},
    };
    write_config(*state, "{\"model_type\": \"llama\", \"hidden_size\": 8, "
                         "\"num_hidden_layers\": 1, \"rms_norm_eps\": 1e-6, "
                         "\"tie_word_embeddings\": true}");
    write_file(*state, "model.safetensors", parts, 3);
    struct target target;
    open_target(&target, *state);
    assert_true(target.tied);
    target_close(&target);
    parts[2].name = "lm_head.weight";
    write_file(*state, "model.safetensors", parts, 3);
    expect_refusal(*state, "tie_word_embeddings is true, but 'lm_head.weight'");
}

// ---- families and scales ----------------------------------------------------------------------------

static void test_norm_families(void **state)
{
    static const struct {
        const char *model_type;
        float offset;
    } cases[] = {
        {"llama", 0},
        {"qwen2", 0},
        {"qwen3", 0},
        {"qwen3_moe", 0},
        {"mistral", 0},
        {"mixtral", 0},
        {"phi3", 0},
        {"deepseek_v3", 0},
        {"kimi_k2", 0},
        {"glm4", 0},
        {"gpt_oss", 0},
        {"gemma", 1},
        {"gemma3_text", 1},
        {"gemma3", 1},
        {"qwen3_next", 1},
        {"qwen3_5", 1},
        {"qwen3_5_text", 1},
        {"qwen3_5_moe", 1},
        {"qwen3_5_moe_text", 1},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        char *keys = memory_format("\"model_type\": \"%s\"", cases[i].model_type);
        write_plain(*state, keys);
        struct target target;
        open_target(&target, *state);
        assert_true(target.norm_weight_offset == cases[i].offset);
        target_close(&target);
        free(keys);
    }
    write_plain(*state, "\"model_type\": \"brand_new\"");
    expect_refusal(*state, "model_type 'brand_new' is not known");
    expect_refusal(*state, " qwen3 "); // what is known is listed
    write_plain(*state, "\"model_type\": \"cohere2\"");
    expect_refusal(*state, "model_type 'cohere2': its final norm is a LayerNorm");
    write_plain(*state, "");
    expect_refusal(*state, "model_type ''");
}

static void test_scales(void **state)
{
    struct target target;
    write_plain(*state, "\"model_type\": \"gemma\"");
    open_target(&target, *state);
    assert_true(target.embed_scale == sqrtf(8.0f)); // the embedding is fp32
    target_close(&target);

    struct part parts[PLAIN_PARTS];
    memcpy(parts, plain_parts, sizeof(parts));
    parts[0].dtype = DTYPE_BF16;
    write_file(*state, "head.safetensors", parts, PLAIN_PARTS);
    open_target(&target, *state);
    assert_true(target.embed_scale == 2.828125f); // sqrt(8) in bf16
    target_close(&target);

    write_plain(*state, "\"model_type\": \"granite\", \"embedding_multiplier\": 12.0, "
                        "\"logits_scaling\": 8.0, \"residual_multiplier\": 0.22");
    open_target(&target, *state);
    assert_true(target.embed_scale == 12.0f && target.logit_scale == 0.125f);
    target_close(&target);

    write_plain(*state, "\"model_type\": \"hyperclovax\", \"logits_scaling\": 0.5");
    open_target(&target, *state);
    assert_true(target.embed_scale == 1.0f && target.logit_scale == 0.5f);
    target_close(&target);
}

static void test_refused_keys(void **state)
{
    static const struct {
        const char *keys, *says;
    } cases[] = {
        {"\"model_type\": \"gemma3_text\", \"final_logit_softcapping\": 30.0",
         "final_logit_softcapping"},
        {"\"model_type\": \"gemma2\"", "final_logit_softcapping"},
        {"\"model_type\": \"llama\", \"logits_scaling\": 8.0", "logits_scaling"},
        {"\"model_type\": \"llama\", \"embedding_multiplier\": 8.0", "embedding_multiplier"},
        {"\"model_type\": \"llama\", \"logit_scale\": 0.0625", "logit_scale"},
        {"\"model_type\": \"llama\", \"lm_head_bias\": true", "lm_head_bias"},
        {"\"model_type\": \"llama\", \"lm_head_multiplier\": 0.5", "lm_head_multiplier"},
        {"\"model_type\": \"granite\", \"logits_scaling\": 0", "logits_scaling"},
        {"\"model_type\": \"llama\", \"scale_emb\": \"much\"", "scale_emb"},
        {"\"model_type\": \"llama\", \"num_key_value_heads\": 1.5", "num_key_value_heads"},
        {"\"model_type\": \"llama\", \"head_dim\": 0", "head_dim"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        write_plain(*state, cases[i].keys);
        expect_refusal(*state, cases[i].says);
    }
    static const char *const harmless[] = {
        "\"model_type\": \"gemma2\", \"final_logit_softcapping\": null",
        "\"model_type\": \"llama\", \"lm_head_bias\": false, \"logit_scale\": 1.0, "
        "\"embedding_multiplier\": 1, \"lm_head_multiplier\": 1.0, \"scale_emb\": 1",
    };
    for (size_t i = 0; i < sizeof(harmless) / sizeof(*harmless); i++) {
        write_plain(*state, harmless[i]);
        struct target target;
        open_target(&target, *state);
        target_close(&target);
    }
}

// All that is wrong with a config is said at once.
static void test_every_fault_is_said(void **state)
{
    write_plain(*state, "");
    write_config(*state, "{\"model_type\": \"nobody\", \"final_logit_softcapping\": 1.0}");
    static const char *const faults[] = {"'nobody'", "hidden_size", "num_hidden_layers",
                                         "rms_norm_eps", "final_logit_softcapping"};
    for (size_t i = 0; i < sizeof(faults) / sizeof(*faults); i++)
        expect_refusal(*state, faults[i]);
}

// ---- tensors ----------------------------------------------------------------------------------------

static void test_wrong_tensors(void **state)
{
    static const struct {
        struct part parts[4];
        size_t count;
        const char *says;
    } cases[] = {
        {{{"norm.weight", DTYPE_F32, 1, {HIDDEN}}}, 1, "no token embedding"},
        {{{"embed_tokens.weight", DTYPE_F32, 2, {VOCAB, HIDDEN}}}, 1, "norm.weight"},
        {{{"embed_tokens.weight", DTYPE_F32, 2, {VOCAB, 7}}, {"norm.weight", DTYPE_F32, 1, {8}}},
         2,
         "'embed_tokens.weight' has 2 dimensions, the last of them 7"},
        {{{"embed_tokens.weight", DTYPE_F32, 2, {VOCAB, 8}}, {"norm.weight", DTYPE_F32, 1, {7}}},
         2,
         "'norm.weight'"},
        {{{"embed_tokens.weight", DTYPE_I32, 2, {VOCAB, 8}}, {"norm.weight", DTYPE_F32, 1, {8}}},
         2,
         "'embed_tokens.weight' is I32"},
        {{{"embed_tokens.weight", DTYPE_F32, 2, {VOCAB, 8}},
          {"norm.weight", DTYPE_F32, 1, {8}},
          {"norm.bias", DTYPE_F32, 1, {8}}},
         3,
         "'norm.bias'"},
        {{{"embed_tokens.weight", DTYPE_F32, 2, {VOCAB, 8}},
          {"norm.weight", DTYPE_F32, 1, {8}},
          {"lm_head.weight", DTYPE_F32, 2, {VOCAB, 8}},
          {"lm_head.bias", DTYPE_F32, 1, {VOCAB}}},
         4,
         "'lm_head.bias'"},
        {{{"embed_tokens.weight", DTYPE_F32, 2, {VOCAB, 8}},
          {"norm.weight", DTYPE_F32, 1, {8}},
          {"lm_head.weight", DTYPE_F32, 2, {VOCAB - 1, 8}}},
         3,
         "vocab_size is 6, but 'lm_head.weight' has 5 rows"},
        {{{"embed_tokens.weight", DTYPE_F32, 2, {VOCAB - 1, 8}},
          {"norm.weight", DTYPE_F32, 1, {8}},
          {"lm_head.weight", DTYPE_F32, 2, {VOCAB, 8}}},
         3,
         "the embedding only 5"},
    };
    write_plain(*state, "\"model_type\": \"llama\"");
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        write_file(*state, "head.safetensors", cases[i].parts, cases[i].count);
        expect_refusal(*state, cases[i].says);
    }
}

static void test_missing_files(void **state)
{
    expect_refusal(*state, "config.json");
    write_config(*state, "{\"model_type\": \"llama\", ");
    expect_refusal(*state, "config.json: not JSON");
    write_config(*state, "[1]");
    expect_refusal(*state, "config.json: not a JSON object");
    write_config(*state, "{\"model_type\": \"llama\", \"hidden_size\": 8, "
                         "\"num_hidden_layers\": 1, \"rms_norm_eps\": 1e-6}");
    expect_refusal(*state, "neither head.safetensors");
    free(config_folder_write(*state, "model.safetensors.index.json", "{\"weight_map\": 3}"));
    expect_refusal(*state, "no weight_map");
}

// Half precision: what every kind of value becomes. The file is written by hand, with the half tensor
// at an odd place, and an fp32 one behind it.
static void test_half_and_misaligned(void **state)
{
    static const struct {
        uint16_t bits;
        float value;
    } halves[HIDDEN] = {
        {0x0000, 0.0f},     {0x8000, -0.0f},    {0x3c00, 1.0f},          {0xc500, -5.0f},
        {0x7bff, 65504.0f}, {0x0001, 0x1p-24f}, {0x83ff, -0x1.ff8p-15f}, {0x7c00, INFINITY},
    };
    char header[512] = "", *path = config_folder_path(*state, "head.safetensors");
    int n = snprintf(header + 8, sizeof(header) - 8,
                     "{\"odd\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                     "\"norm.weight\":{\"dtype\":\"F16\",\"shape\":[8],\"data_offsets\":[1,17]},"
                     "\"embed_tokens.weight\":{\"dtype\":\"F32\",\"shape\":[2,8],"
                     "\"data_offsets\":[17,81]}}");
    header[0] = (char)(n & 255);
    header[1] = (char)(n >> 8);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    fwrite(header, 1, 8 + (size_t)n, file);
    fputc(0, file);
    for (int i = 0; i < HIDDEN; i++)
        fwrite(&halves[i].bits, 2, 1, file);
    for (int i = 0; i < 2 * HIDDEN; i++)
        fwrite(&(float){(float)i}, 4, 1, file);
    fclose(file);
    write_config(*state, "{\"model_type\": \"llama\", \"hidden_size\": 8, "
                         "\"num_hidden_layers\": 1, \"rms_norm_eps\": 1e-6, "
                         "\"tie_word_embeddings\": true}");
    struct target target;
    open_target(&target, *state);
    assert_int_equal(target.norm.dtype, DTYPE_F32);
    for (int i = 0; i < HIDDEN; i++)
        assert_memory_equal((const float *)target.norm.data + i, &halves[i].value, 4);
    assert_int_equal((uintptr_t)target.embed.data % sizeof(float), 0);
    for (int i = 0; i < 2 * HIDDEN; i++)
        assert_true(((const float *)target.embed.data)[i] == (float)i);
    target_close(&target);
    free(path);
}

static void test_values_that_are_not_finite(void **state)
{
    (void)state;
    float norm[HIDDEN] = {0}, embed[VOCAB * HIDDEN] = {0};
    bf16 head[VOCAB * HIDDEN] = {0};
    struct target target = {.path = (char *)"the/target",
                            .vocab_size = VOCAB,
                            .norm = {norm, DTYPE_F32, 1, HIDDEN},
                            .embed = {embed, DTYPE_F32, VOCAB, HIDDEN},
                            .head = {head, DTYPE_BF16, VOCAB, HIDDEN}};
    struct error err = {""};
    assert_int_equal(target_check_finite(&target, &err), 0);
    head[5 * HIDDEN + 7] = bf16_from_float(-INFINITY);
    assert_int_equal(target_check_finite(&target, &err), -1);
    assert_non_null(strstr(err.text, "the/target: row 5 of the target's head has a value"));
    embed[2 * HIDDEN] = INFINITY;
    assert_int_equal(target_check_finite(&target, &err), -1);
    assert_non_null(strstr(err.text, "the/target: row 2 of the target's token embedding"));
    norm[3] = NAN;
    assert_int_equal(target_check_finite(&target, &err), -1);
    assert_non_null(strstr(err.text, "the/target: row 0 of the target's final norm"));
}

// Sizes without weights: a folder or a file, keys that no size follows from left out.
static void test_sizes_alone(void **state)
{
    struct target target;
    struct error err = {""};
    write_config(*state, "{\"hidden_size\": 8, \"vocab_size\": 6, \"num_hidden_layers\": 3, "
                         "\"num_attention_heads\": 2, \"tie_word_embeddings\": true}");
    const struct config_folder *folder = *state;
    char *file = config_folder_path(folder, "config.json");
    const char *paths[] = {folder->path, file};
    for (size_t i = 0; i < 2; i++) {
        if (target_open_sizes(&target, paths[i], &err) != 0)
            fail_msg("%s", err.text);
        assert_int_equal(target.embed.rows, VOCAB);
        assert_int_equal(target.head.rows, VOCAB);
        assert_int_equal(target.head.columns, HIDDEN);
        assert_int_equal(target.head_dim, 4);
        assert_int_equal(target.layers, 3);
        assert_true(target.tied && target.embed.data == NULL);
        target_close(&target);
    }
    expect_refusal(folder, "model_type"); // training needs to know what the final norm is
    write_config(folder, "{\"hidden_size\": 8, \"model_type\": \"gpt2\"}");
    assert_int_equal(target_open_sizes(&target, file, &err), -1);
    assert_non_null(strstr(err.text, "vocab_size is missing"));
    assert_non_null(strstr(err.text, "num_hidden_layers is missing"));
    assert_non_null(strstr(err.text, "LayerNorm"));
    free(file);
}

// Sizes with which sums of bytes would overflow are refused by their keys, and what is no file is not read.
static void test_absurd_sizes(void **state)
{
    struct target target;
    const struct config_folder *folder = *state;
    char *file = config_folder_path(folder, "config.json");
    static const char *const absurd[][2] = {
        {"\"hidden_size\": 1073741824", "hidden_size is 1073741824; at most"},
        {"\"vocab_size\": 2147483647", "vocab_size is 2147483647; at most"},
        {"\"num_hidden_layers\": 1e300", "num_hidden_layers is 1"},
        {"\"intermediate_size\": 1048577", "intermediate_size is 1048577; at most 1048576"},
        {"\"num_key_value_heads\": 9007199254740992", "num_key_value_heads is 9007199254740992"},
        {"\"hidden_size\": 0", "hidden_size is not a positive integer"},
    };
    for (size_t i = 0; i < sizeof(absurd) / sizeof(*absurd); i++) {
        struct error err = {""};
        // The first of equal keys counts.
        char *text = memory_format("{%s, \"hidden_size\": 8, \"vocab_size\": 6, "
                                   "\"num_hidden_layers\": 3, \"num_attention_heads\": 2}",
                                   absurd[i][0]);
        write_config(folder, text);
        free(text);
        assert_int_equal(target_open_sizes(&target, file, &err), -1);
        if (strstr(err.text, absurd[i][1]) == NULL)
            fail_msg("expected '%s' in: %s", absurd[i][1], err.text);
    }
    struct error err = {""};
    assert_int_equal(target_open_sizes(&target, "/dev/zero", &err), -1);
    assert_non_null(strstr(err.text, "/dev/zero: not a regular file"));
    assert_int_equal(truncate(file, (64 << 20) + 1), 0);
    assert_int_equal(target_open_sizes(&target, file, &err), -1);
    assert_non_null(strstr(err.text, "more than 64 MiB"));
    free(file);
}

static void test_known_names(void **state)
{
    (void)state;
    static const char *const known[] = {"qwen3-8b", "models/Qwen3-8B", "/x/QWEN3-8b//"};
    static const char *const unknown[] = {"qwen3-8", "my-qwen3-8b", "qwen3-8b-base", "", "/"};
    struct target target;
    for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++) {
        assert_true(target_open_known(&target, known[i]));
        assert_int_equal(target.hidden_size, 4096);
        assert_int_equal(target.head.rows, 151936);
        target_close(&target);
    }
    for (size_t i = 0; i < sizeof(unknown) / sizeof(*unknown); i++)
        assert_false(target_open_known(&target, unknown[i]));
}

#define TARGET_TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TARGET_TEST(test_target_directory),
        TARGET_TEST(test_defaults),
        TARGET_TEST(test_single_model_file),
        TARGET_TEST(test_sharded_model),
        TARGET_TEST(test_names),
        TARGET_TEST(test_rope_theta_of_mixed_layers),
        TARGET_TEST(test_tied_heads),
        TARGET_TEST(test_tied_with_head),
        TARGET_TEST(test_norm_families),
        TARGET_TEST(test_scales),
        TARGET_TEST(test_refused_keys),
        TARGET_TEST(test_every_fault_is_said),
        TARGET_TEST(test_wrong_tensors),
        TARGET_TEST(test_missing_files),
        TARGET_TEST(test_half_and_misaligned),
        cmocka_unit_test(test_values_that_are_not_finite),
        TARGET_TEST(test_sizes_alone),
        TARGET_TEST(test_absurd_sizes),
        cmocka_unit_test(test_known_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
