// The z-lab layout: every field of config.json, bf16 tensors by name, and what is refused with which
// reason (cases C5 and C10).
#include "trainer/export.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "base/bf16.h"
#include "base/log.h"
#include "data/safetensors.h"
#include "tests/support/checkpoint_fixture.h"
#include "tests/support/shard_fixture.h"
#include "trainer/files.h"

static struct drafter_fixture drafter;
static char *folder; // of one test

static int open_test(void **state)
{
    (void)state;
    drafter_fixture_open(&drafter, 2);
    folder = fixture_folder();
    return 0;
}

static int close_test(void **state)
{
    (void)state;
    drafter_fixture_close(&drafter);
    fixture_folder_remove(folder);
    return 0;
}

// ---- helpers -------------------------------------------------------------------------------------

static bool is_there(const char *name)
{
    char *path = fixture_path(folder, name);
    bool there = files_exists(path);
    free(path);
    return there;
}

// config.json of the fixture's drafter with these initial weights.
static cJSON *export_config(const float *master)
{
    struct error err = {""};
    const struct export_drafter written = {.params = &drafter.params,
                                           .weights = {.master = master},
                                           .sizes = &drafter.sizes,
                                           .target = &drafter.target};
    if (export_servable_write(folder, &written, &err) != 0)
        fail_msg("%s", err.text);
    char *text = fixture_text(folder, "config.json");
    cJSON *config = cJSON_Parse(text);
    assert_non_null(config);
    free(text);
    return config;
}

static cJSON *export_zeros(void)
{
    float *zeros = memory_alloc((size_t)drafter.params.elements, sizeof(*zeros));
    cJSON *config = export_config(zeros);
    free(zeros);
    return config;
}

// Whether member `path` ("a.b") is what the JSON text says.
static void assert_member(const cJSON *config, const char *path, const char *wanted)
{
    char *name = memory_strdup(path), *rest = NULL;
    const cJSON *item = config;
    for (char *part = strtok_r(name, ".", &rest); part != NULL; part = strtok_r(NULL, ".", &rest))
        item = cJSON_GetObjectItemCaseSensitive(item, part);
    cJSON *value = cJSON_Parse(wanted);
    char *text = item != NULL ? cJSON_PrintUnformatted(item) : NULL;
    if (!cJSON_Compare(item, value, true))
        fail_msg("%s is %s, wanted %s", path, text != NULL ? text : "absent", wanted);
    free(text);
    cJSON_Delete(value);
    free(name);
}

static void assert_absent(const cJSON *config, const char *path)
{
    char *name = memory_strdup(path), *rest = NULL;
    const cJSON *item = config;
    for (char *part = strtok_r(name, ".", &rest); part != NULL; part = strtok_r(NULL, ".", &rest))
        item = cJSON_GetObjectItemCaseSensitive(item, part);
    if (item != NULL)
        fail_msg("%s must not be there", path);
    free(name);
}

// ---- config.json ---------------------------------------------------------------------------------

static void config_states_every_field(void **state)
{
    (void)state;
    static const char *const fields[][2] = {
        {"architectures", "[\"DFlashDraftModel\"]"},
        {"auto_map", "{\"AutoModel\": \"dflash.DFlashDraftModel\"}"},
        {"model_type", "\"qwen3\""},
        {"block_size", "8"},
        {"dflash_config", "{\"mask_token_id\": 60, \"target_layer_ids\": [1, 3, 5]}"},
        {"num_target_layers", "6"},
        {"num_hidden_layers", "2"},
        {"hidden_size", "8"},
        {"intermediate_size", "12"},
        {"num_attention_heads", "2"},
        {"num_key_value_heads", "1"},
        {"head_dim", "4"},
        {"hidden_act", "\"silu\""},
        {"rms_norm_eps", "1e-6"},
        {"rope_theta", "1000000"},
        {"rope_scaling", "null"},
        {"is_neox_style", "true"},
        {"max_position_embeddings", "128"},
        {"attention_bias", "false"},
        {"vocab_size", "64"},
        {"layer_types", "[\"full_attention\", \"full_attention\"]"},
        {"sliding_window", "null"},
        {"use_sliding_window", "false"},
        {"max_window_layers", "2"},
        {"tie_word_embeddings", "false"},
        {"dtype", "\"bfloat16\""},
    };
    enum { FIELDS = sizeof(fields) / sizeof(*fields) };
    cJSON *config = export_zeros();
    for (size_t i = 0; i < FIELDS; i++)
        assert_member(config, fields[i][0], fields[i][1]);
    assert_int_equal(cJSON_GetArraySize(config), FIELDS); // and nothing else
    cJSON_Delete(config);
}

static void numbers_are_written_as_people_write_them(void **state)
{
    (void)state;
    cJSON_Delete(export_zeros());
    char *text = fixture_text(folder, "config.json");
    assert_non_null(strstr(text, "1e-06,"));
    assert_null(strstr(text, "9.99")); // the float nearest to 1e-6 as a double
    free(text);
    drafter.config.drafter.rope_scaling = ROPE_SCALING_LINEAR;
    drafter.config.drafter.rope_factor = 4.0;
    drafter_fixture_resolve(&drafter);
    cJSON_Delete(export_zeros());
    text = fixture_text(folder, "config.json");
    assert_non_null(strstr(text, "4.0")); // readers take a factor of 4 for a mistake
    free(text);
}

static void rope_scaling_is_stated(void **state)
{
    (void)state;
    drafter.config.drafter.rope_scaling = ROPE_SCALING_YARN;
    drafter.config.drafter.rope_factor = 2.5;
    drafter.config.drafter.rope_theta = 10000.0;
    drafter_fixture_resolve(&drafter);
    cJSON *config = export_zeros();
    assert_member(config, "rope_theta", "10000");
    assert_member(config, "rope_scaling",
                  "{\"rope_type\": \"yarn\", \"factor\": 2.5, "
                  "\"original_max_position_embeddings\": 128}");
    cJSON_Delete(config);
    drafter.config.drafter.rope_scaling = ROPE_SCALING_LINEAR;
    drafter_fixture_resolve(&drafter);
    config = export_zeros();
    assert_member(config, "rope_scaling", "{\"rope_type\": \"linear\", \"factor\": 2.5}");
    cJSON_Delete(config);
}

static void use_sliding(const char *types)
{
    drafter_fixture_layer_types(&drafter, types);
    drafter.config.drafter.sliding_window = 5;
    drafter_fixture_resolve(&drafter);
}

static void windows_are_stated_per_layer(void **state)
{
    (void)state;
    use_sliding("sliding full");
    cJSON *config = export_zeros();
    assert_member(config, "layer_types", "[\"sliding_attention\", \"full_attention\"]");
    assert_member(config, "sliding_window", "5");
    assert_member(config, "use_sliding_window", "true");
    assert_member(config, "max_window_layers", "2");
    assert_absent(config, "dflash_config.causal");
    assert_absent(config, "sliding_window_non_causal");
    cJSON_Delete(config);
}

static void a_checkpoint_says_what_servers_do_not_run(void **state)
{
    (void)state;
    drafter.config.drafter.predict_from_anchor = true;
    drafter.config.drafter.sliding_window_non_causal = true;
    drafter.config.drafter.window_origin = WINDOW_FROM_ANCHOR;
    use_sliding("sliding sliding");
    cJSON *config = export_zeros();
    assert_member(config, "sample_from_anchor", "true");
    assert_member(config, "sliding_window_non_causal", "true");
    assert_member(config, "window_origin", "\"anchor\"");
    cJSON_Delete(config);
}

static void a_tied_target_is_stated(void **state)
{
    (void)state;
    drafter.target.tied = true;
    cJSON *config = export_zeros();
    assert_member(config, "tie_word_embeddings", "true");
    cJSON_Delete(config);
}

// ---- model.safetensors ---------------------------------------------------------------------------

static void tensors_are_the_masters_rounded_to_bf16(void **state)
{
    (void)state;
    struct model_state values;
    model_state_open(&values, &drafter.params);
    drafter_fixture_fill(&values, 3);
    const struct param *norm = params_find(&drafter.params, "norm.weight");
    values.master[norm->offset] = 0.9f;            // a norm after 100 steps of 1e-3 from 1
    values.master[norm->offset + 1] = 1.00390625f; // halfway between two bf16: to even
    values.master[norm->offset + 2] = 1.01171875f; // halfway, to even upwards
    cJSON_Delete(export_config(values.master));
    char *path = fixture_path(folder, "model.safetensors");
    struct safetensors file;
    struct error err = {""};
    if (safetensors_open(&file, path, &err) != 0)
        fail_msg("%s", err.text);
    assert_int_equal(file.count, drafter.params.count);
    for (size_t p = 0; p < drafter.params.count; p++) {
        const struct param *param = &drafter.params.items[p];
        const struct safetensors_entry *entry =
            safetensors_get(&file, param->name, "BF16", param->dims, param->shape, &err);
        if (entry == NULL)
            fail_msg("%s", err.text);
        for (int64_t i = 0; entry != NULL && i < param->count; i++) {
            bf16 got, wanted = bf16_from_float(values.master[param->offset + i]);
            memcpy(&got, entry->bytes + (size_t)i * sizeof(got), sizeof(got));
            assert_int_equal(got, wanted);
        }
    }
    bf16 norms[3];
    memcpy(norms, safetensors_find(&file, "norm.weight")->bytes, sizeof(norms));
    assert_true(bf16_to_float(norms[0]) == 0.8984375f);
    assert_true(bf16_to_float(norms[1]) == 1.0f);
    assert_true(bf16_to_float(norms[2]) == 1.015625f);
    assert_string_equal(safetensors_metadata(&file, "format"), "pt");
    safetensors_close(&file);
    free(path);
    model_state_close(&values);
}

// ---- what is refused -----------------------------------------------------------------------------

static void servable_drafters_have_no_reasons(void **state)
{
    (void)state;
    struct error err = {""};
    assert_int_equal(export_check_servable(&drafter.sizes, EXPORT_ZLAB, NULL, &err), 0);
    assert_int_equal(export_check_servable(&drafter.sizes, EXPORT_SPECULATORS, NULL, &err), 0);
    // What only sliding layers use does not matter without them.
    drafter.config.drafter.sliding_window_non_causal = true;
    drafter.config.drafter.window_origin = WINDOW_FROM_ANCHOR;
    drafter_fixture_resolve(&drafter);
    assert_int_equal(export_check_servable(&drafter.sizes, EXPORT_ZLAB, NULL, &err), 0);
    use_sliding("full sliding");
    assert_int_equal(export_check_servable(&drafter.sizes, EXPORT_ZLAB, NULL, &err), -1);
    assert_non_null(strstr(err.text, "drafter.sliding_window_non_causal: "));
    assert_non_null(strstr(err.text, "drafter.window_origin: "));
    assert_null(strstr(err.text, "predict_from_anchor"));
}

static void reasons_are_waived_by_name(void **state)
{
    (void)state;
    struct error err = {""};
    drafter.config.drafter.sliding_window_non_causal = true;
    drafter.config.drafter.window_origin = WINDOW_FROM_ANCHOR;
    use_sliding("full sliding");
    const struct drafter_sizes *sizes = &drafter.sizes;
    assert_int_equal(export_check_servable(sizes, EXPORT_ZLAB, "window_origin", &err), -1);
    assert_null(strstr(err.text, "drafter.window_origin: "));
    assert_non_null(strstr(err.text, "drafter.sliding_window_non_causal: "));
    static const char both[] = "window_origin,sliding_window_non_causal";
    assert_int_equal(export_check_servable(sizes, EXPORT_ZLAB, both, &err), 0);
    assert_int_equal(export_check_servable(sizes, EXPORT_SPECFORGE, "", &err), 0);
    // The speculators layout has one more: both kinds of layers.
    err = (struct error){""};
    assert_int_equal(export_check_servable(sizes, EXPORT_SPECULATORS, both, &err), -1);
    assert_non_null(strstr(err.text, "drafter.layer_types: "));
    assert_int_equal(export_check_servable(sizes, EXPORT_SPECULATORS, "", &err), 0);
    assert_int_equal(export_check_allowed("", &err), 0);
    assert_int_equal(export_check_allowed("layer_types,window_origin", &err), 0);
    assert_int_equal(export_check_allowed("layer_types,window", &err), -1);
    assert_non_null(strstr(err.text, "window can not be allowed"));
    assert_int_equal(export_check_allowed("predict_from_anchor", &err), -1);
}

static int export(const char *name, const char *format, bool allow_unservable, struct error *err)
{
    char *checkpoint = fixture_path(folder, name), *out = fixture_path(folder, "deep/out");
    *err = (struct error){""};
    const struct export_request request = {.checkpoint = checkpoint,
                                           .out = out,
                                           .format = (enum export_format)export_format_find(format),
                                           .allow = allow_unservable ? "" : NULL};
    int result = export_command(&request, err);
    free(out);
    free(checkpoint);
    return result;
}

static void the_command_copies_out_of_a_checkpoint(void **state)
{
    (void)state;
    struct error err;
    drafter_fixture_write(&drafter, folder, 4);
    if (export("step-00000004", "zlab", false, &err) != 0)
        fail_msg("%s", err.text);
    char *a = fixture_text(folder, "step-00000004/config.json"),
         *b = fixture_text(folder, "deep/out/config.json");
    assert_string_equal(a, b);
    char *from = fixture_path(folder, "step-00000004/model.safetensors");
    char *to = fixture_path(folder, "deep/out/model.safetensors");
    assert_int_equal(files_size(from), files_size(to));
    // What is there already is not overwritten.
    assert_int_equal(export("step-00000004", "zlab", false, &err), -1);
    assert_non_null(strstr(err.text, "deep/out/model.safetensors"));
    free(to);
    free(from);
    free(b);
    free(a);
}

static void formats_have_names(void **state)
{
    (void)state;
    assert_int_equal(export_format_find("zlab"), EXPORT_ZLAB);
    assert_int_equal(export_format_find("specforge"), EXPORT_SPECFORGE);
    assert_int_equal(export_format_find("speculators"), EXPORT_SPECULATORS);
    assert_int_equal(export_format_find("gguf"), -1);
}

static void broken_checkpoints_are_refused(void **state)
{
    (void)state;
    struct error err;
    drafter_fixture_write(&drafter, folder, 4);
    assert_int_equal(export("step-00000005", "zlab", false, &err), -1);
    assert_non_null(strstr(err.text, "step-00000005"));
    char *done = fixture_path(folder, "step-00000004/DONE");
    assert_int_equal(remove(done), 0);
    assert_int_equal(export("step-00000004", "zlab", false, &err), -1);
    assert_non_null(strstr(err.text, "DONE"));
    assert_false(is_there("deep"));
    free(done);
}

static void a_damaged_export_is_not_copied(void **state)
{
    (void)state;
    struct error err;
    drafter_fixture_write(&drafter, folder, 4);
    char *path = fixture_path(folder, "step-00000004/model.safetensors");
    fixture_flip_last_bit(path);
    assert_int_equal(export("step-00000004", "zlab", false, &err), -1);
    assert_non_null(strstr(err.text, "step-00000004/model.safetensors: its checksum"));
    assert_false(is_there("deep"));
    free(path);
}

static void what_servers_do_not_run_needs_consent(void **state)
{
    (void)state;
    struct error err;
    drafter.config.drafter.sliding_window_non_causal = true;
    use_sliding("sliding sliding");
    drafter_fixture_write(&drafter, folder, 4);
    assert_int_equal(export("step-00000004", "zlab", false, &err), -1);
    assert_non_null(strstr(err.text, "--allow-unservable"));
    assert_non_null(strstr(err.text, "drafter.sliding_window_non_causal"));
    assert_false(is_there("deep"));
    assert_int_equal(export("step-00000004", "zlab", true, &err), 0);
    assert_true(is_there("deep/out/config.json"));
}

static void predicting_from_the_anchor_is_refused_always(void **state)
{
    (void)state;
    struct error err;
    drafter.config.drafter.predict_from_anchor = true;
    drafter_fixture_resolve(&drafter);
    drafter_fixture_write(&drafter, folder, 4);
    for (int allow = 0; allow < 2; allow++) {
        assert_int_equal(export("step-00000004", "zlab", allow != 0, &err), -1);
        assert_non_null(strstr(err.text, "drafter.predict_from_anchor"));
        assert_false(is_there("deep"));
    }
}

// The embedding may have rows past the vocabulary; servers keep none of them.
static void a_mask_token_outside_the_vocabulary_is_refused(void **state)
{
    (void)state;
    drafter.sizes.mask_token_id = drafter.sizes.vocab;
    const enum export_format formats[] = {EXPORT_ZLAB, EXPORT_SPECFORGE, EXPORT_SPECULATORS};
    for (int i = 0; i < 3; i++) {
        struct error err = {""};
        assert_int_equal(export_check_servable(&drafter.sizes, formats[i], "", &err), -1);
        assert_non_null(strstr(err.text, "drafter.mask_token_id: "));
    }
    drafter.sizes.mask_token_id = drafter.sizes.vocab - 1;
    struct error err = {""};
    assert_int_equal(export_check_servable(&drafter.sizes, EXPORT_ZLAB, NULL, &err), 0);
}

static void mixed_layers_export_with_a_warning(void **state)
{
    (void)state;
    struct error err;
    use_sliding("sliding full");
    drafter_fixture_write(&drafter, folder, 4);
    char *log = fixture_path(folder, "log.txt");
    assert_int_equal(log_file_set(log), 0);
    int result = export("step-00000004", "zlab", false, &err);
    log_file_set(NULL);
    assert_int_equal(result, 0);
    char *text = fixture_text(folder, "log.txt");
    assert_non_null(strstr(text, "V2 model runner"));
    free(text);
    free(log);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_test, close_test)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(config_states_every_field),
        TEST(numbers_are_written_as_people_write_them),
        TEST(rope_scaling_is_stated),
        TEST(windows_are_stated_per_layer),
        TEST(a_checkpoint_says_what_servers_do_not_run),
        TEST(a_tied_target_is_stated),
        TEST(tensors_are_the_masters_rounded_to_bf16),
        TEST(servable_drafters_have_no_reasons),
        TEST(reasons_are_waived_by_name),
        TEST(the_command_copies_out_of_a_checkpoint),
        TEST(formats_have_names),
        TEST(broken_checkpoints_are_refused),
        TEST(a_damaged_export_is_not_copied),
        TEST(what_servers_do_not_run_needs_consent),
        TEST(predicting_from_the_anchor_is_refused_always),
        TEST(a_mask_token_outside_the_vocabulary_is_refused),
        TEST(mixed_layers_export_with_a_warning),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
