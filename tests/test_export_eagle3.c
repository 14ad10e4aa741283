// EAGLE-3 drafters on disk: what a checkpoint and `dtrain export` hold in both layouts, and what is refused with which
// reason. Starting from them again: test_release_eagle3.c.
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "base/bf16.h"
#include "base/memory.h"
#include "tests/support/eagle3_fixture.h"
#include "tests/support/model_config.h"
#include "trainer/files.h"

enum { H = EAGLE3_H, V = EAGLE3_V, VD = EAGLE3_VD };

static struct eagle3_fixture at;

static int open_test(void **state)
{
    (void)state;
    eagle3_fixture_open(&at);
    return 0;
}

static int close_test(void **state)
{
    (void)state;
    eagle3_fixture_close(&at);
    return 0;
}

// ---- files ---------------------------------------------------------------------------------------

static void must_state(const char *directory, const char *wanted)
{
    cJSON *config = model_config_read(directory), *all = cJSON_Parse(wanted);
    assert_non_null(all);
    char *text = cJSON_Print(config);
    if (!cJSON_Compare(config, all, true))
        fail_msg("config.json is\n%s", text);
    cJSON_free(text);
    cJSON_Delete(all);
    cJSON_Delete(config);
}

static void open_model(const char *directory, struct safetensors *model)
{
    struct error err = {""};
    char *path = memory_format("%s/model.safetensors", directory);
    if (safetensors_open(model, path, &err) != 0)
        fail_msg("%s", err.text);
    free(path);
}

static bf16 bf16_at(const struct safetensors_entry *entry, int64_t index)
{
    bf16 value;
    memcpy(&value, entry->bytes + (size_t)index * sizeof(value), sizeof(value));
    return value;
}

static bf16 target_bf16(const struct target_tensor *tensor, int64_t index)
{
    return tensor->dtype == DTYPE_BF16 ? ((const bf16 *)tensor->data)[index]
                                       : bf16_from_float(((const float *)tensor->data)[index]);
}

// A parameter's values, rounded, under a name of the file.
static void must_hold_param(const struct safetensors *model, const char *name, const char *param)
{
    const struct safetensors_entry *entry = eagle3_fixture_must_find(model, name);
    const struct param *p = params_find(&at.params, param);
    assert_non_null(p);
    assert_string_equal(entry->dtype, "BF16");
    assert_int_equal(entry->dims, p->dims);
    for (int d = 0; d < p->dims; d++)
        assert_int_equal(entry->shape[d], p->shape[d]);
    for (int64_t i = 0; i < p->count; i++)
        assert_int_equal(bf16_at(entry, i), bf16_from_float(eagle3_fixture_value(p->offset + i)));
}

// Row r of the tensor is the target's row ids[r].
static void must_hold_rows(const struct safetensors *model, const char *name,
                           const struct target_tensor *tensor, const int32_t *ids, int64_t rows)
{
    const struct safetensors_entry *entry = eagle3_fixture_must_find(model, name);
    assert_string_equal(entry->dtype, "BF16");
    assert_int_equal(entry->shape[0], rows);
    assert_int_equal(entry->shape[1], H);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < H; i++)
            assert_int_equal(bf16_at(entry, r * H + i),
                             target_bf16(tensor, (ids != NULL ? ids[r] : r) * H + i));
}

static void must_hold_map(const struct safetensors *model)
{
    const struct safetensors_entry *d2t = eagle3_fixture_must_find(model, "d2t"),
                                   *t2d = eagle3_fixture_must_find(model, "t2d");
    assert_string_equal(d2t->dtype, "I64");
    assert_string_equal(t2d->dtype, "BOOL");
    assert_int_equal(d2t->shape[0], VD);
    assert_int_equal(t2d->shape[0], V);
    int64_t kept = 0;
    for (int64_t v = 0; v < V; v++) {
        assert_int_equal(t2d->bytes[v], at.map.t2d[v]);
        if (t2d->bytes[v] == 0)
            continue;
        int64_t offset;
        memcpy(&offset, d2t->bytes + (size_t)kept * sizeof(offset), sizeof(offset));
        assert_int_equal(kept++ + offset, v);
    }
    assert_int_equal(kept, VD);
}

// ---- what is written -----------------------------------------------------------------------------

static void specforge_has_midlayer_and_the_kept_rows(void **state)
{
    (void)state;
    struct safetensors model;
    eagle3_fixture_resolve(&at, eagle3_llama, VD);
    eagle3_fixture_write_checkpoint(&at);
    const char *out = eagle3_fixture_must_export(&at, "specforge", EXPORT_SPECFORGE);
    open_model(out, &model);
    must_hold_param(&model, "fc.weight", "fc.weight");
    must_hold_param(&model, "fc_norm.2.weight", "fc_norm.2.weight");
    must_hold_param(&model, "norm.weight", "norm.weight");
    static const char *const first[] = {
        "input_layernorm",  "hidden_norm",      "post_attention_layernorm", "self_attn.q_proj",
        "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",         "mlp.gate_proj",
        "mlp.up_proj",      "mlp.down_proj"};
    enum { FIRST = sizeof(first) / sizeof(*first) };
    for (int i = 0; i < FIRST; i++) {
        char *name = memory_format("midlayer.%s.weight", first[i]);
        char *param = memory_format("layers.0.%s.weight", first[i]);
        must_hold_param(&model, name, param);
        free(param);
        free(name);
    }
    assert_int_equal(eagle3_fixture_must_find(&model, "midlayer.self_attn.q_proj.weight")->shape[1],
                     2 * H);
    assert_int_equal(eagle3_fixture_must_find(&model, "fc.weight")->shape[1], 3 * H);
    must_hold_rows(&model, "lm_head.weight", &at.target.head, at.map.ids, VD);
    must_hold_map(&model);
    assert_int_equal(model.count, 2 + 3 + FIRST + 3); // no embedding, nothing else
    safetensors_close(&model);
    must_state(out, "{\"architectures\": [\"LlamaForCausalLMEagle3\"], \"eagle_config\": {"
                    "\"eagle_aux_hidden_state_layer_ids\": [1, 3, 5], "
                    "\"use_aux_hidden_state\": true}, \"target_hidden_size\": 8,"
                    "\"draft_vocab_size\": 20, \"fc_norm\": true, \"norm_output\": true,"
                    "\"model_type\": \"llama\", \"num_hidden_layers\": 1, \"hidden_size\": 8,"
                    "\"intermediate_size\": 12, \"num_attention_heads\": 2,"
                    "\"num_key_value_heads\": 1, \"head_dim\": 4, \"hidden_act\": \"silu\","
                    "\"rms_norm_eps\": 1e-06, \"rope_theta\": 10000, \"rope_scaling\": null,"
                    "\"is_neox_style\": true, \"max_position_embeddings\": 1024,"
                    "\"attention_bias\": false, \"vocab_size\": 64,"
                    "\"tie_word_embeddings\": false, \"dtype\": \"bfloat16\"}");
}

// vLLM and speculators call later layers' norm of their input input_layernorm, SGLang hidden_norm.
static void later_layers_have_both_names_of_their_norm(void **state)
{
    (void)state;
    struct safetensors model;
    eagle3_fixture_resolve(&at, eagle3_llama_trainable, VD);
    eagle3_fixture_write_checkpoint(&at);
    const char *out = eagle3_fixture_must_export(&at, "specforge", EXPORT_SPECFORGE);
    open_model(out, &model);
    must_hold_param(&model, "layers.1.input_layernorm.weight", "layers.1.input_layernorm.weight");
    must_hold_param(&model, "layers.1.hidden_norm.weight", "layers.1.input_layernorm.weight");
    must_hold_param(&model, "layers.1.self_attn.q_proj.weight", "layers.1.self_attn.q_proj.weight");
    assert_int_equal(eagle3_fixture_must_find(&model, "layers.1.self_attn.q_proj.weight")->shape[1],
                     H);
    must_hold_param(&model, "lm_head.weight", "lm_head.weight"); // trained
    safetensors_close(&model);
    open_model(eagle3_fixture_must_export(&at, "speculators", EXPORT_SPECULATORS), &model);
    assert_null(safetensors_find(&model, "layers.1.hidden_norm.weight"));
    must_hold_param(&model, "layers.1.input_layernorm.weight", "layers.1.input_layernorm.weight");
    must_hold_param(&model, "lm_head.weight", "lm_head.weight");
    safetensors_close(&model);
}

static void speculators_has_layers_and_the_embedding(void **state)
{
    (void)state;
    struct safetensors model;
    eagle3_fixture_resolve(&at, eagle3_qwen3, VD);
    eagle3_fixture_write_checkpoint(&at);
    const char *out = eagle3_fixture_must_export(&at, "speculators", EXPORT_SPECULATORS);
    open_model(out, &model);
    for (size_t i = 0; i < at.params.count; i++)
        must_hold_param(&model, at.params.items[i].name, at.params.items[i].name);
    eagle3_fixture_must_find(&model, "layers.1.self_attn.k_norm.weight");
    eagle3_fixture_must_find(&model, "input_norm.weight");
    must_hold_rows(&model, "embed_tokens.weight", &at.target.embed, NULL, V);
    must_hold_rows(&model, "lm_head.weight", &at.target.head, at.map.ids, VD);
    must_hold_map(&model);
    assert_int_equal(model.count, at.params.count + 4);
    safetensors_close(&model);
    must_state(
        out,
        "{\"architectures\": [\"Eagle3Speculator\"], \"speculators_model_type\": \"eagle3\","
        "\"speculators_version\": \"0.9.0\", \"speculators_config\": {\"algorithm\": \"eagle3\","
        "\"proposal_methods\": [{\"proposal_type\": \"greedy\", \"speculative_tokens\": 3,"
        "\"verifier_accept_k\": 1, \"accept_tolerance\": 0.0}],"
        "\"default_proposal_method\": \"greedy\", \"verifier\": {\"name_or_path\": \"some/model\","
        "\"architectures\": [\"Qwen3ForCausalLM\"]}}, \"transformer_layer_config\": {"
        "\"model_type\": \"qwen3\", \"num_hidden_layers\": 2, \"hidden_size\": 8,"
        "\"intermediate_size\": 12, \"num_attention_heads\": 2, \"num_key_value_heads\": 1,"
        "\"head_dim\": 4, \"hidden_act\": \"silu\", \"rms_norm_eps\": 1e-06,"
        "\"rope_theta\": 10000, \"rope_scaling\": null, \"is_neox_style\": true,"
        "\"max_position_embeddings\": 1024, \"attention_bias\": false, \"vocab_size\": 64,"
        "\"layer_types\": [\"full_attention\", \"full_attention\"], \"sliding_window\": null,"
        "\"use_sliding_window\": false, \"max_window_layers\": 2,"
        "\"tie_word_embeddings\": false, \"dtype\": \"bfloat16\"}, \"draft_vocab_size\": 20,"
        "\"target_hidden_size\": 8, \"eagle_aux_hidden_state_layer_ids\": [2, 4, 6],"
        "\"norm_before_residual\": true, \"norm_before_fc\": true, \"fc_norm\": false,"
        "\"norm_output\": false, \"embed_requires_grad\": false, \"tie_word_embeddings\": false,"
        "\"dtype\": \"bfloat16\"}");
}

// Where the student knows every token there are no tables: vLLM has no place for them then.
static void the_whole_vocabulary_has_no_tables(void **state)
{
    (void)state;
    static const enum export_format formats[] = {EXPORT_SPECFORGE, EXPORT_SPECULATORS};
    eagle3_fixture_resolve(&at, eagle3_llama, V);
    eagle3_fixture_write_checkpoint(&at);
    for (int f = 0; f < 2; f++) {
        struct safetensors model;
        const char *out =
            eagle3_fixture_must_export(&at, f == 0 ? "specforge" : "speculators", formats[f]);
        open_model(out, &model);
        assert_null(safetensors_find(&model, "d2t"));
        assert_null(safetensors_find(&model, "t2d"));
        must_hold_rows(&model, "lm_head.weight", &at.target.head, NULL, V);
        safetensors_close(&model);
        cJSON *config = model_config_read(out);
        assert_int_equal(cJSON_GetObjectItem(config, "draft_vocab_size")->valueint, V);
        cJSON_Delete(config);
    }
}

static void another_number_of_features_is_stated(void **state)
{
    (void)state;
    eagle3_fixture_resolve(&at,
                           (const char *const[]){"drafter.style=llama",
                                                 "target.layer_ids=[1, 3, 5, 6]",
                                                 "drafter.layers=1", NULL},
                           VD);
    eagle3_fixture_write_checkpoint(&at);
    cJSON *config =
        model_config_read(eagle3_fixture_must_export(&at, "specforge", EXPORT_SPECFORGE));
    assert_int_equal(cJSON_GetObjectItem(config, "num_aux_hidden_states")->valueint, 4);
    cJSON_Delete(config);
    config = model_config_read(eagle3_fixture_must_export(&at, "speculators", EXPORT_SPECULATORS));
    const cJSON *layers = cJSON_GetObjectItem(config, "transformer_layer_config");
    assert_int_equal(cJSON_GetObjectItem(layers, "num_aux_hidden_states")->valueint, 4);
    cJSON_Delete(config);
}

// ---- what is refused -----------------------------------------------------------------------------

static void must_refuse(const char *const *sets, enum export_format format, const char *words,
                        const char *allow)
{
    struct error err;
    const char *out = run_path(&at.run, "refused");
    eagle3_fixture_resolve(&at, sets, VD);
    eagle3_fixture_write_checkpoint(&at);
    assert_int_equal(eagle3_fixture_export(&at, out, format, NULL, &err), -1);
    if (strstr(err.text, words) == NULL)
        fail_msg("\"%s\" is expected, the error is: %s", words, err.text);
    assert_false(files_exists(out));
    int waived = eagle3_fixture_export(&at, out, format, allow, &err);
    assert_int_equal(waived, allow != NULL ? 0 : -1);
    if (waived == 0)
        assert_int_equal(files_remove_folder(out, &err), 0);
}

static void what_sglang_does_not_run_is_refused_by_name(void **state)
{
    (void)state;
    must_refuse((const char *const[]){"drafter.style=qwen3", "drafter.layers=1", NULL},
                EXPORT_SPECFORGE, "drafter.style: SGLang has no norms on queries and keys",
                "style");
    must_refuse((const char *const[]){"drafter.style=llama", "drafter.layers=1",
                                      "drafter.norm_before_residual=true", NULL},
                EXPORT_SPECFORGE, "drafter.norm_before_residual: SGLang", "norm_before_residual");
    must_refuse((const char *const[]){"drafter.style=llama", "drafter.layers=1",
                                      "drafter.norm_before_fc=true", NULL},
                EXPORT_SPECFORGE, "drafter.norm_before_fc: SGLang", "norm_before_fc");
    must_refuse((const char *const[]){"drafter.style=llama", "drafter.layers=1",
                                      "drafter.layer_types=[sliding_attention]",
                                      "drafter.sliding_window=12", NULL},
                EXPORT_SPECFORGE, "drafter.layer_types: SGLang does not read windows",
                "layer_types");
    static const enum export_format formats[] = {EXPORT_SPECFORGE, EXPORT_SPECULATORS};
    for (int f = 0; f < 2; f++)
        must_refuse((const char *const[]){"drafter.style=llama", "drafter.layers=1",
                                          "drafter.num_attention_heads=3",
                                          "drafter.num_key_value_heads=1", NULL},
                    formats[f], "drafter.num_attention_heads: hidden_size is not a multiple",
                    "num_attention_heads");
    must_refuse(eagle3_llama, EXPORT_ZLAB,
                "not exported: drafter.kind: the z-lab layout is one of DFlash drafters", NULL);
    struct error err = {""};
    assert_int_equal(export_check_allowed("kind", &err), -1);
    assert_int_equal(export_check_allowed("style,norm_before_fc,norm_before_residual", &err), 0);
}

// What SGLang does not run, the speculators layout states.
static void speculators_takes_what_sglang_does_not_run(void **state)
{
    (void)state;
    eagle3_fixture_resolve(
        &at,
        (const char *const[]){"drafter.style=llama", "drafter.layers=2",
                              "drafter.norm_before_residual=true",
                              "drafter.layer_types=[sliding_attention, full_attention]",
                              "drafter.sliding_window=12", NULL},
        VD);
    eagle3_fixture_write_checkpoint(&at);
    cJSON *config =
        model_config_read(eagle3_fixture_must_export(&at, "speculators", EXPORT_SPECULATORS));
    const cJSON *layers = cJSON_GetObjectItem(config, "transformer_layer_config");
    char *types = cJSON_PrintUnformatted(cJSON_GetObjectItem(layers, "layer_types"));
    assert_string_equal(types, "[\"sliding_attention\",\"full_attention\"]");
    assert_int_equal(cJSON_GetObjectItem(layers, "sliding_window")->valueint, 12);
    assert_true(cJSON_IsTrue(cJSON_GetObjectItem(config, "norm_before_residual")));
    cJSON_free(types);
    cJSON_Delete(config);
}

// A frozen head is the target's rows: those of another target are noticed.
static void speculators_needs_the_target_of_the_run(void **state)
{
    (void)state;
    static const struct run_target other = {"qwen3", H, V, 1.0, 0.2, 12};
    struct error err = {""};
    eagle3_fixture_resolve(&at, eagle3_llama, VD);
    eagle3_fixture_write_checkpoint(&at);
    run_target_write(run_path(&at.run, "other"), &other);
    const struct export_request request = {at.checkpoint, run_path(&at.run, "out"),
                                           EXPORT_SPECULATORS, run_path(&at.run, "other"), NULL};
    assert_int_equal(export_command(&request, &err), -1);
    assert_non_null(strstr(err.text, "lm_head.weight: row 0 is not that of the target"));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_test, close_test)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(specforge_has_midlayer_and_the_kept_rows),
        TEST(later_layers_have_both_names_of_their_norm),
        TEST(speculators_has_layers_and_the_embedding),
        TEST(the_whole_vocabulary_has_no_tables),
        TEST(another_number_of_features_is_stated),
        TEST(what_sglang_does_not_run_is_refused_by_name),
        TEST(speculators_takes_what_sglang_does_not_run),
        TEST(speculators_needs_the_target_of_the_run),
    };
    return cmocka_run_group_tests_name("export_eagle3", tests, NULL, NULL);
}
